"""Options that no method takes, by the line that a user reads; nothing has begun then."""

import math

import pytest
from torch import nn

import methods

REFUSED = [
    ("act24", {"dense_fraction": 1.5}, r"dense_fraction=1\.5; it must lie in \[0, 1\]"),
    ("ast", {"alpha": -1.0}, r"alpha=-1\.0"),
    ("ast", {"metric": "random"}, "metric='random'; choose one of magnitude, wanda"),
    ("ast", {"decay_route": "weights"}, "decay_route='weights'; choose one of decoupled_first"),
    ("ast", {"refresh_every": -1}, "refresh_every=-1"),
    ("ast", {"ramp_fraction": 1.5}, r"ramp_fraction=1\.5"),
    ("ast", {"calibration_sequences": 0}, "calibration_sequences=0"),
    ("ast", {"task_weight": math.nan}, "task_weight=nan"),
    ("ast", {"kl_weight": 0.0, "task_weight": 0.0}, "are all 0"),
    ("ast", {"temperature": 0.0}, r"temperature=0\.0"),
    ("ast", {"divergence": "jensen"}, "divergence='jensen'; choose one of forward, reverse"),
    ("ast", {"layer_modules": "*.h.0"}, "list of globs"),
    ("ast", {"layer_loss": "mse"}, "layer_loss='mse'; choose one of squarehead"),
    ("bi_mask", {"permute_every": 0}, "permute_every="),
    ("bi_mask", {"candidates": 0}, "candidates="),
    ("cast", {"refresh_every": 0}, "refresh_every=0; it must be at least 1"),
    ("cast", {"temperature": 0.0}, r"temperature=0\.0"),  # of another default than its base's
    ("cast", {"decay": -1.0}, r"decay=-1\.0; it must be at least 0"),
    ("fst", {"refresh_every": 0}, "refresh_every=0; it must be at least 1"),
    ("fst", {"algorithm": "best"}, "algorithm='best'; choose one of exact, greedy, two_approx"),
    ("fst", {"mvue": "yes"}, "mvue='yes'; choose one of exact, sequential, off"),
    ("fst", {"dense_fraction": 1.5}, r"dense_fraction=1\.5; it must lie in \[0, 1\]"),
    ("gmp", {"begin_fraction": 0.5, "end_fraction": 0.4}, r"begin_fraction=0\.5, end_frac"),
    ("gmp", {"prune_every": 0}, "prune_every=0"),
    ("imp", {"begin_fraction": 1.0}, r"begin_fraction=1\.0"),
    ("imp", {"rounds": 0}, "rounds=0"),
    ("one_shot", {"metric": "taylor"}, "metric="),
    ("one_shot", {"mask_steps": 0}, "mask_steps=0; it must be at least 1"),
    ("one_shot", {"penalty": -1.0}, r"penalty=-1\.0; it must be at least 0"),
    ("one_shot", {"prior": "maskllm"}, "prior='maskllm'; choose one of magnitude, wanda"),
    ("one_shot", {"metric": "proxsparse", "m": 8}, "proxsparse learns 2:4 masks, not 2:8"),
    ("one_shot", {"metric": "maskllm", "m": 16}, "too many with m=16"),
    ("projected", {"healing_fraction": 1.5}, r"healing_fraction=1\.5; it must lie in \[0, 1\]"),
    ("semi_sparse", {"mode": "activation", "fp8": "hopper"}, "fp8=hopper needs mode=weight"),
    ("ste", {"fp8": "e4m3"}, "fp8='e4m3'; choose one of off, paper, hybrid, hopper"),
    ("ste", {"dense_columns": 1.5}, r"dense_columns=1\.5; it must lie in \[0, 1\]"),
    ("ste", {"dense_columns": 0.5, "fp8": "paper"}, "fp8=paper has no dense columns"),
    ("s_ste", {"gamma": 1.5}, "gamma"),
    ("semi_sparse", {"mode": "both"}, "mode='both'; choose one of weight, activation"),
    ("semi_sparse", {"algorithm": "largest"}, "algorithm='largest'"),
    ("semi_sparse", {"algorithm": "rows"}, "is the method ste"),
    ("semi_sparse", {"refresh_every": 0}, "refresh_every=0"),
    ("semi_sparse", {"sparse_fraction": 1.5}, r"sparse_fraction=1\.5"),
    ("slope", {"n": 4}, r"n=4 and m=4; N:M keeps n of m.* 0 < n < m"),
    ("slope", {"m": 256}, "m=256.*128"),
    ("slope", {"patterns": ["*=2:4x"]}, r"patterns: '\*=2:4x' is not of the form GLOB=N:M"),
    ("slope", {"patterns": ["*=4:2"]}, r"patterns: '\*=4:2'; N:M keeps n of m"),
    ("slope", {"patterns": "*=2:4"}, "must be a list"),
    ("slope", {"mask": "movement"}, "mask='movement'; choose one of random, magnitude"),
    ("slope", {"permute": True}, "permute=True raises what mask=magnitude keeps, but mask=random"),
    ("slope", {"column_refresh": -1}, "column_refresh=-1; it must be at least 0"),
    ("slope", {"adapter_fraction": 0.0, "adapter_rank": 1}, r"adapter_fraction=0\.0.*\(0, 1\]"),
    ("slope", {"adapter_fraction": 0.5}, "adapter_fraction=0.5 needs.*adapter_rank=0"),
    ("sr_ste", {"alpha": -1.0}, r"alpha=-1\.0"),
    ("fst", {"alpha": "1e-4"}, "alpha='1e-4'; it must be a number"),
    ("sr_ste", {"decay_on": "momentum"}, "decay_on='momentum'"),
    ("ternary", {"activation_bits": 4}, "activation_bits=4; choose one of 8, 0"),
    ("step", {"min_fraction": 0.6}, r"min_fraction=0\.6, max_fraction=0\.5"),
    ("step", {"max_fraction": 1.0}, r"max_fraction=1\.0"),
]
NEED_A_LENGTH = [
    ("act24", {"dense_fraction": 0.5}, r"dense_fraction=0\.5 of how many steps"),
    ("ast", {}, r"ramp_fraction=0\.25 of how many steps\?"),
    ("cast", {}, "the decay rises over total_steps; set total_steps"),
    ("fst", {}, r"dense_fraction=0\.167 of how many steps\? set total_steps"),
    ("gmp", {}, r"end_fraction=0\.6 of .* set total_steps"),
    ("imp", {}, "set total_steps"),
    ("projected", {}, r"healing_fraction=0\.2 of how many steps\? set total_steps"),
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
