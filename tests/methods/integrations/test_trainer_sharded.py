"""Methods inside transformers.Trainer on two ranks, which are one: in DDP, and under FSDP2 as
accelerate applies it."""

import gc
import json
import multiprocessing
import os

import pytest
import torch
import torch.multiprocessing as mp
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from transformers import TrainingArguments

from methods.integrations.trainer import STATE, MethodCallback
from methods.nn.sharding import is_sharded
from tests.methods.integrations.test_trainer import TOKENS, Ordered, build, records

STEPS, MICRO, SAVED = 6, 4, 3
# Each passes a choice of masks and, where the method has phases, a switch, also once it is resumed.
# A large eps lets AdamW's update be as smooth as the gradient: no last bit of it grows.
DDP = "ast distilling in DDP"
CASES = {
    DDP: {"refresh_every": 2, "kl_weight": 0.5},
    "fst": {"refresh_every": 2, "dense_fraction": 0.17, "mvue": "off"},
    "slope": {"adapter_rank": 4, "adapter_fraction": 0.5},
    "ast distilling": {"refresh_every": 2, "kl_weight": 0.5},
}


def on_cpus(made):
    """accelerate shards on GPUs alone: `made`, the making of its state, on CPUs, too."""

    def make(self, *args, fsdp_plugin=None, **kwargs):
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    return make


def train(case, folder, ranks, resume=None):
    model, method = build(case.removesuffix(" in DDP"), layers=1, total_steps=STEPS, **CASES[case])
    fsdp = ranks > 1 and case != DDP
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=2 // ranks, report_to=[], use_cpu=True, disable_tqdm=True,
        save_steps=SAVED, logging_steps=1, learning_rate=1e-2, adam_epsilon=1e-2,
        lr_scheduler_type="constant", resume_from_checkpoint=resume, fsdp=fsdp,
        ddp_broadcast_buffers=False,
    )  # fmt: skip
    callback = MethodCallback(method, model, arguments)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (STEPS * MICRO * 2, TOKENS), generator=generator)
    trainer = Ordered(
        model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[callback], optimizer_cls_and_kwargs=callback.optimizer_cls_and_kwargs,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    if fsdp:
        assert all(is_sharded(p) for p in model.parameters())
        if case == "ast distilling":
            assert all(is_sharded(layer.mask) for layer in method.layers.values())
            assert all(map(is_sharded, method.teacher.parameters()))
    if resume is None:
        trainer.save_model(str(folder / "end"))
    if arguments.process_index == 0:
        (folder / "records.json").write_text(json.dumps(records(trainer)))


def run(rank, cases, store, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    AcceleratorState.__init__ = on_cpus(AcceleratorState.__init__)
    gc.freeze()  # each training collects garbage, and that of the imports takes longer than it
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for case in cases:
        train(case, folder / "two" / case, 2)
        resume = str(folder / "two" / case / f"checkpoint-{SAVED}")
        train(case, folder / "resumed" / case, 2, resume)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads outlive the group and abort an interpreter that ends


@pytest.fixture(scope="module")
def trained(tmp_path_factory, request):
    """A folder with that of each case asked for in `one`, `two` and `resumed`."""
    here = [item for item in request.session.items if item.path == request.path]
    asked = {i.callspec.params["case"] for i in here if hasattr(i, "callspec")}
    cases = [case for case in CASES if case in asked | {"ast distilling"}]
    folder = tmp_path_factory.mktemp("sharded")
    multiprocessing.set_forkserver_preload([__name__, "torch.distributed.fsdp"])
    store = (folder / "store").as_uri()
    ranks = mp.start_processes(
        run, (cases, store, folder), 2, join=False, start_method="forkserver"
    )
    for case in cases:  # while the ranks start
        train(case, folder / "one" / case, 1)
    while not ranks.join():
        pass
    return folder


@pytest.mark.parametrize(
    "case", [DDP, "fst", "ast distilling", pytest.param("slope", marks=pytest.mark.extra)]
)
def test_two_ranks_are_one_process_and_save_the_plain_model(case, trained):
    one, *others = (
        json.loads((trained / place / case / "records.json").read_text())
        for place in ("one", "two", "resumed")
    )
    assert len(one) == STEPS
    assert all(log["illegal_groups"] == 0 for log in one if log["phase"] != "dense")
    for logs in others:
        for log, other in zip(one, logs, strict=True):
            for key in ("loss", "grad_norm"):
                assert other.pop(key) == pytest.approx(log[key], abs=1e-5)
                other[key] = log[key]
            assert log == other
    for end in (f"checkpoint-{SAVED}", "end"):
        saved, other = (
            load_file(trained / place / case / end / "model.safetensors")
            for place in ("one", "two")
        )
        torch.testing.assert_close(other, saved, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(other[name] == 0, weight == 0) for name, weight in saved.items())


def test_the_layers_lie_in_the_files_of_the_trainer(trained):
    folder = trained / "two" / "ast distilling" / f"checkpoint-{SAVED}"
    state = torch.load(folder / STATE, weights_only=True)
    assert "layers" not in state and not any(map(is_sharded, state["teacher"].values()))
    layers = torch.load(folder / "pytorch_model_fsdp.bin", weights_only=True)
    assert layers["model.layers.0.mlp.up_proj.mask"].dtype == torch.bool
