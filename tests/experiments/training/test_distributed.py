"""Tests of the messages between ranks, without a second process."""

import pickle

import pytest
import torch

from experiments.support.errors import UserError
from experiments.training import distributed
from experiments.training.distributed import World

MAIN, OTHER = (World(rank, 2, torch.device("cpu")) for rank in range(2))


@pytest.fixture
def sent(monkeypatch):
    """The list of messages that rank 0 sends; a rank that asks afterwards receives them."""
    messages = []

    def broadcast(values):
        if any(value is not None for value in values) or not messages:
            messages[:] = values
        values[:] = pickle.loads(pickle.dumps(messages))

    monkeypatch.setattr(distributed.dist, "broadcast_object_list", broadcast)
    return messages


def test_rank_0_alone_decides(sent):
    """Another process may finish a run while the ranks look for its result."""
    assert MAIN.rank0_first(lambda: "large") == "large" and sent == [None, None]
    assert OTHER.rank0_first(lambda: "as large") == "as large"
    assert MAIN.broadcast_from_rank0(lambda: {"ended": 1}) == {"ended": 1}
    assert OTHER.broadcast_from_rank0(lambda: pytest.fail("asked on another rank")) == {"ended": 1}


def test_errors_go_with_it(sent, tmp_path):
    def chooses():
        raise UserError("no such task")

    for rank in (MAIN, OTHER):
        with pytest.raises(UserError, match="no such task") as caught:
            rank.broadcast_from_rank0(chooses if rank is MAIN else list)
        assert caught.value.elsewhere is (rank is OTHER)  # rank 0 alone prints it
    for rank in (MAIN, OTHER):
        with pytest.raises(FileNotFoundError) as missing:
            rank.broadcast_from_rank0((tmp_path / "there").read_bytes if rank is MAIN else list)
        assert str(missing.value.filename) == str(tmp_path / "there")
