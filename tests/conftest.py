"""Triton's interpreter, and tiny random models of transformers for models and drivers."""

import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import socket
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from tests import interpreter

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    interpreter.speed_up()


@pytest.hookimpl(tryfirst=True)  # before `-m gpu` chooses
def pytest_collection_modifyitems(items):
    """Mark the tests that a GPU adds something to: those of files that choose a DEVICE for their
    tensors, and those that are skipped without a GPU."""
    for item in items:
        reasons = [mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif")]
        if hasattr(item.module, "DEVICE") or any("needs a GPU" in reason for reason in reasons):
            item.add_marker(pytest.mark.gpu)


def pytest_collection_finish():
    """Let no search for garbage go through what has been imported, which takes a second each time:
    compilers, transformers' Trainer and torch's graphs ask for one again and again."""
    gc.collect()
    gc.freeze()


# What takes ranks seconds to import.
IMPORTED_ONCE = ["pytest", "torch._dynamo", "torch.distributed.fsdp", "experiments.pretrain"]


def _rank(rank, ranks, store, function, arguments):
    torch.set_num_threads(1)
    if store:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    function(rank, *arguments)
    if store:
        dist.barrier()
        # gloo's threads outlive the group and abort an interpreter that ends
        # (github.com/pytorch/pytorch/pull/179291).
        os._exit(0)


@pytest.fixture(scope="session")
def start_ranks(tmp_path_factory):
    """start_ranks(function, *arguments, ranks=2): call function(rank, *arguments) in as many
    processes of a group and wait for them. All are forked from one that has imported torch."""
    multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
    multiprocessing.forkserver.ensure_running()  # before a test changes the environment

    def start(function, *arguments, ranks=2, group=True):
        store = group and (tmp_path_factory.mktemp("ranks") / "store").as_uri()
        given = ranks, store, function, arguments
        torch.multiprocessing.start_processes(_rank, given, nprocs=ranks, start_method="forkserver")

    return start


def _command_of_rank(rank, ranks, port, module, arguments):
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    places |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    sys.argv = [module, *arguments]
    main = importlib.import_module(module).main
    gc.freeze()
    main()


@pytest.fixture(scope="session")
def run_on_two_ranks(start_ranks):
    """run_on_two_ranks("experiments.pretrain", *arguments): the command as torchrun would start it,
    which config/test_cli.py does; without the seconds that its processes take to import torch."""

    def run(module, *arguments):
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        given = 2, port, module, [*map(str, arguments)]
        start_ranks(_command_of_rank, *given, group=False)

    return run


@pytest.fixture(scope="session")
def hf_model():
    """hf_model("llama", vocab_size=320): two layers, width 32, 32 positions, in eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    sizes |= {"vocab_size": 320, "max_position_embeddings": 32}
    grouped = {"intermediate_size": 64, "num_key_value_heads": 1}
    families = {"gpt2": {}, "llama": grouped, "mistral": grouped}
    families["opt"] = {"ffn_dim": 64, "word_embed_proj_dim": 32}

    def build(family, seed=0, end_of_text=None, **settings):
        torch.manual_seed(seed)
        given = {**sizes, **families[family], **settings}
        given |= {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
        config = AutoConfig.for_model(family, **given)
        return AutoModelForCausalLM.from_config(config).eval()

    return build
