"""Tests of what a method says of the products that it chose."""

import json

import pytest
import torch
from torch import nn

import methods
from common_kernels.matmul import Measured
from methods.nn import acceleration, gemms
from methods.nn.acceleration import Acceleration, Choice, explain
from methods.nn.gemms import Products, choose_products

GPU = torch.device("cuda")  # asked for nothing here
ALL = Products(True, True, True)
# Rows of the sparse matrix: milliseconds of the sparse and of the dense product.
TIMES = {128: (0.5, 0.7), 64: (0.4, 0.3)}
LAYOUT = "cutlass_sm90"  # in which they were measured to be the fastest


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with sparse products, of which those with 64 rows are slower than dense ones."""
    monkeypatch.setattr(gemms, "unavailable", lambda *_: None)

    def measured(problem, device, layouts=()):
        return Measured(LAYOUT, *TIMES[problem.rows]) if problem.rows in TIMES else None

    monkeypatch.setattr(gemms, "fastest", measured)
    monkeypatch.setattr(gemms, "own_layout", lambda *_: LAYOUT)
    monkeypatch.setattr(acceleration, "measured", measured)
    monkeypatch.delenv(gemms.MATMUL_VARIABLE, raising=False)


def told(sparse, matmul="auto", shape=(128, 64), device=GPU):
    of = (sparse, shape, False, torch.bfloat16, device, 256, matmul)
    return explain(choose_products(*of), *of)


def test_a_choice_has_its_times_and_its_reason(gpu):
    assert told(ALL) == {
        "fprop": Choice(True, "", 0.5, 0.7, "cuda"),
        "dgrad": Choice(False, "measured to be slower: 0.4 ms, dense 0.3 ms", 0.4, 0.3),
        "wgrad": Choice(True, "", 0.5, 0.7, "cuda"),
    }
    found = told(Products(fprop=True))
    assert found["fprop"].sparse
    assert found["wgrad"] == Choice(
        False, "no operand is 2:4 along the dimension that is summed over"
    )
    assert {c.reason for c in told(ALL, "dense").values()} == {"matmul=dense"}
    for kernels in ("cusparselt", "cuda"):
        assert {(c.sparse, c.kernels) for c in told(ALL, kernels).values()} == {(True, kernels)}
    odd = told(ALL, shape=(128, 72))
    reason = "a weight [128, 72] is no multiple of 64 in both dims"
    assert {c.reason for c in odd.values()} == {reason}
    emulated = told(ALL, device=torch.device("cpu"))
    assert {c.reason for c in emulated.values()} == {"sparse products are emulated here"}


def test_a_product_without_a_right_algorithm_says_so(gpu, monkeypatch):
    monkeypatch.setitem(TIMES, 128, (float("inf"), 0.7))
    found = told(ALL)["fprop"]
    reason = "no sparse kernel gives the right product"
    assert found == Choice(False, reason, None, 0.7) and found.saved_ms == 0


def test_what_is_told_is_what_runs(gpu):
    for sparse in (ALL, Products(True, False, True), Products(fp8=True)):
        for matmul in gemms.MATMULS:
            of = (sparse, (128, 64), True, torch.bfloat16, GPU, 256, matmul)
            chosen = choose_products(*of)
            for name, choice in explain(chosen, *of).items():
                assert choice.sparse == getattr(chosen, name) and choice.sparse == (
                    not choice.reason
                )


def test_the_gain_of_a_step_is_that_of_its_products(gpu):
    found = Acceleration(256, {"a": told(ALL), "b": told(Products(fprop=True))})
    assert found.saved_ms == pytest.approx(0.6)
    assert found.gain(12.0, 2) == pytest.approx(1.1)
    # Of a: 1.3 ms in the place of 1.7, one of them dense; of b a single product was measured.
    assert found.gains() == {"a": pytest.approx(1.7 / 1.3), "b": pytest.approx(0.7 / 0.5)}
    assert str(found) == (
        "products of 2 layers: fprop sparse in 2, by our own kernels in 2; dgrad dense in 1 "
        "(measured to be slower), dense in 1 (no operand is 2:4 along the dimension that is summed "
        "over); wgrad sparse in 1, by our own kernels in 1, dense in 1 (no operand is 2:4 along "
        "the dimension that is summed over); sparse products 1.5 ms a micro-batch of 256 tokens in "
        "the place of 2.1 ms"
    )
    written = json.loads(json.dumps(found.as_dict()))
    fprop = {"sparse": True, "reason": "", "ms": 0.5, "dense_ms": 0.7, "kernels": "cuda"}
    assert written["layers"]["a"]["fprop"] == fprop and written["tokens"] == 256


def test_a_method_tells_after_accelerate():
    method = methods.build("s_ste", include=["*"])
    method.convert(nn.Sequential(nn.Linear(64, 128)), torch.float32)
    assert method.acceleration is None
    method.accelerate(256, "auto")
    assert set(method.acceleration.layers) == {"0"} and method.acceleration.gains() == {"0": None}
    assert "fprop, wgrad dense in 1 (cuSPARSELt" in str(method.acceleration)
