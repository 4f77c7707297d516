"""Tests of what a method says of the products that it chose."""

import json
import multiprocessing
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import methods
from common_kernels.matmul import Measured
from methods.nn import acceleration
from methods.nn.acceleration import Acceleration, Choice, choose
from methods.nn.gemms import DENSE, Layouts, Products

GPU = torch.device("cuda")  # asked for nothing here
ALL = Products(True, True, True)
# Rows of the sparse matrix: milliseconds of the sparse and of the dense product.
TIMES = {128: (0.5, 0.7), 64: (0.4, 0.3)}
LAYOUT = "cutlass_sm90"  # in which they were measured to be the fastest


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with sparse products, of which those with 64 rows are slower than dense ones."""
    monkeypatch.setattr(acceleration, "unavailable", lambda *_: None)
    asked = []

    def measured(problem, device, layouts=()):
        asked.append(problem)
        return Measured(LAYOUT, *TIMES[problem.rows]) if problem.rows in TIMES else None

    monkeypatch.setattr(acceleration, "fastest", measured)
    monkeypatch.setattr(acceleration, "own_layout", lambda *_: LAYOUT)
    monkeypatch.setattr(acceleration, "measured", measured)
    for name in ("library_layout", "library_layout_for"):
        monkeypatch.setattr(acceleration, name, lambda *_: "cusparselt_sm90")
    monkeypatch.delenv(acceleration.MATMUL_VARIABLE, raising=False)
    return asked


def told(sparse, matmul="auto", shape=(128, 64), device=GPU):
    products, choices = choose(sparse, shape, False, torch.bfloat16, device, 256, matmul)
    for name, choice in choices.items():  # what is told is what runs
        assert choice.sparse == getattr(products, name) == (not choice.reason)
        assert not choice.sparse or choice.layout == getattr(products.layouts, name)
    return choices


def test_a_choice_is_of_what_was_measured_and_has_its_reason(gpu, monkeypatch):
    chosen = choose(ALL, (128, 64), True, torch.bfloat16, GPU, 1000, "auto")[0]
    layouts = Layouts(fprop=LAYOUT, wgrad=LAYOUT)
    assert chosen == Products(fprop=True, wgrad=True, layouts=layouts)
    shapes = [(p.rows, p.columns, p.tokens, p.biased) for p in gpu]
    assert shapes == [(128, 64, 1000, True), (64, 128, 1000, False), (128, 1008, 64, False)]
    for kernels in ("cusparselt", "cuda"):
        assert {(c.sparse, c.kernels) for c in told(ALL, kernels).values()} == {(True, kernels)}
    for options, reason in (
        ({"matmul": "dense"}, "matmul=dense"),
        ({"shape": (128, 72)}, "a weight [128, 72] is no multiple of 64 in both dims"),
    ):
        assert {c.reason for c in told(ALL, **options).values()} == {reason}
    for matmul in acceleration.MATMULS:
        told(Products(True, False, True), matmul)
    monkeypatch.setitem(TIMES, 128, (float("inf"), 0.7))
    found = told(ALL)["fprop"]
    assert found == Choice("", "no sparse kernel gives the right product", None, 0.7)
    assert found.saved_ms == 0


def test_the_gain_of_a_step_is_that_of_its_products(gpu):
    of_a = told(ALL)
    assert of_a == {
        "fprop": Choice(LAYOUT, "", 0.5, 0.7),
        "dgrad": Choice("", "measured to be slower: 0.4 ms, dense 0.3 ms", 0.4, 0.3),
        "wgrad": Choice(LAYOUT, "", 0.5, 0.7),
    }
    found = Acceleration(256, {"a": of_a, "b": told(Products(fprop=True))})
    assert found.saved_ms == pytest.approx(0.6)
    assert found.gain(12.0, 2) == pytest.approx(1.1)
    # Of a: 1.3 ms in the place of 1.7, one of them dense; of b a single product was measured.
    assert found.gains() == {"a": pytest.approx(1.7 / 1.3), "b": pytest.approx(0.7 / 0.5)}
    assert str(found).endswith("1.5 ms a micro-batch of 256 tokens in the place of 2.1 ms")
    written = json.loads(json.dumps(found.as_dict()))
    fprop = {"sparse": True, "reason": "", "ms": 0.5, "dense_ms": 0.7, "kernels": "cuda"}
    assert written["layers"]["a"]["fprop"] == fprop and written["tokens"] == 256


def of_s_ste(matmul, **options):
    layer = nn.Linear(64, 128)
    method = methods.build("s_ste", include=["*"], **options)
    method.convert(layer, dtype=torch.bfloat16)
    return choose(layer.candidates(), (128, 64), True, torch.bfloat16, GPU, 256, matmul)[0]


def test_hopper_alone_runs_on_fp8_units_and_wherever_there_are_any(gpu, monkeypatch):
    """`matmul` says which of its products run sparse: that is about speed."""
    for matmul in acceleration.MATMULS:
        for recipe in ("paper", "hybrid"):
            assert of_s_ste(matmul, fp8=recipe) == DENSE
        assert not of_s_ste(matmul).fp8
        sparse = matmul != "dense"
        of_fp8 = of_s_ste(matmul, fp8="hopper")
        assert replace(of_fp8, layouts=Layouts()) == Products(sparse, False, sparse, fp8=True)
    monkeypatch.setitem(TIMES, 128, (2.0, 1.0))
    assert of_s_ste("auto", fp8="hopper") == Products(fp8=True)
    monkeypatch.setattr(acceleration, "unavailable", lambda *_: "no FP8 units")
    for matmul in ("auto", "dense"):
        assert of_s_ste(matmul, fp8="hopper") == DENSE  # simulated


def _choose_differently(rank, queue):
    """Two ranks of which each finds other products to be faster."""
    found = Products(fprop=rank == 0, wgrad=rank == 1), {}
    acceleration.choose = lambda *_: found
    layer = nn.Linear(64, 128)
    method = methods.build("s_ste", include=["*"])
    method.convert(layer, dtype=torch.bfloat16)
    everyone = [None, None]
    dist.all_gather_object(everyone, (method.accelerate(256), layer.products))
    if rank == 0:
        queue.put(everyone)


def test_ranks_run_what_rank_0_chose(start_ranks):
    queue = multiprocessing.get_context("forkserver").SimpleQueue()
    start_ranks(_choose_differently, queue)
    products = Products(fprop=True)
    assert queue.get() == [({"": products}, products)] * 2
