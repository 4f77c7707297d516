"""Options that no method takes, by the line that a user reads; nothing has begun then."""

import math

import pytest
from torch import nn

import methods

REFUSED = [
    ("ast", {"metric": "random"}, "metric='random'; choose one of magnitude, wanda"),
    ("ast", {"task_weight": math.nan}, "task_weight=nan"),
    ("ast", {"kl_weight": 0.0, "task_weight": 0.0}, "are all 0"),
    ("cast", {"temperature": 0.0}, r"temperature=0\.0"),  # of another default than its base's
    ("fst", {"alpha": "1e-4"}, "alpha='1e-4'; it must be a number"),
    ("fst", {"dense_fraction": 1.5}, r"dense_fraction=1\.5; it must lie in \[0, 1\]"),
    ("gmp", {"begin_fraction": 0.5, "end_fraction": 0.4}, r"begin_fraction=0\.5, end_frac"),
    ("one_shot", {"metric": "proxsparse", "m": 8}, "proxsparse learns 2:4 masks, not 2:8"),
    ("semi_sparse", {"mode": "activation", "fp8": "hopper"}, "fp8=hopper needs mode=weight"),
    ("ste", {"fp8": "e4m3"}, "fp8='e4m3'; choose one of off, paper, hybrid, hopper"),
    ("ste", {"dense_columns": 0.5, "fp8": "paper"}, "fp8=paper has no dense columns"),
    ("slope", {"n": 4}, r"n=4 and m=4; N:M keeps n of m.* 0 < n < m"),
    ("slope", {"patterns": ["*=2:4x"]}, r"patterns: '\*=2:4x' is not of the form GLOB=N:M"),
    ("slope", {"permute": True}, "permute=True raises what mask=magnitude keeps, but mask=random"),
    ("slope", {"adapter_fraction": 0.5}, "adapter_fraction=0.5 needs.*adapter_rank=0"),
    ("step", {"min_fraction": 0.6}, r"min_fraction=0\.6, max_fraction=0\.5"),
]
NEED_A_LENGTH = [
    ("ast", {}, r"ramp_fraction=0\.25 of how many steps\?"),
    ("cast", {}, "the decay rises over total_steps; set total_steps"),
    ("fst", {}, r"dense_fraction=0\.167 of how many steps\? set total_steps"),
    ("semi_sparse", {"sparse_fraction": 0.5}, r"sparse_fraction=0\.5 of how many steps"),
    ("slope", {"adapter_rank": 2}, r"adapter_fraction=0\.01 of how many steps\? set total"),
    ("step", {}, r"max_fraction=0\.5 of how many steps\? set total_steps"),
]


def test_what_is_refused():
    for name, options, told in REFUSED:
        with pytest.raises(ValueError, match=told):
            methods.build(name, **options)


def test_a_fraction_of_an_unknown_number_of_steps_leaves_the_model_alone():
    for name, options, told in NEED_A_LENGTH:
        layer = nn.Linear(16, 8)
        with pytest.raises(ValueError, match=told):
            methods.build(name, include=["*"], exclude=[], **options).convert(layer)
        assert type(layer) is nn.Linear
