"""Training steps and forward passes of a dense and a sparse module, timed in turns."""

from __future__ import annotations

from experiments.bench.timing import Call, Time
from experiments.bench.variants import Bench
from reproduce.measure.base import MethodLayer
from reproduce.measure.setup import evaluating


def ends_dense(config: MethodLayer) -> bool:
    """True for FST, which leaves a dense model: its inference is that of a dense one."""
    return config.method == "fst"


def to_compare(dense: Bench, sparse: Bench, inference: dict[str, Bench]) -> dict[str, Call]:
    """The calls to time: training steps of both models, whole and in parts, and forward passes in
    evaluation mode of the dense model (`dense inference`) and of the models in `inference`."""

    def forward(built: Bench) -> Call:
        built.converted.before(0)
        return evaluating(built)

    calls = {"dense": dense.forward_backward, **sparse.calls()}
    if inference:
        calls["dense inference"] = forward(dense)
    return calls | {name: forward(built) for name, built in inference.items()}


def milliseconds(found: dict[str, Time], sparse: Bench) -> dict[str, float]:
    """The times of the calls of `to_compare`, and `step`: a whole sparse step with its share of the
    mask search."""
    times = {name: time.ms for name, time in found.items()}
    search = times.get("hooks, masks chosen", times["hooks"]) - times["hooks"]
    times["step"] = times["whole"] + max(0.0, search) / sparse.converted.method.mask_period
    return times
