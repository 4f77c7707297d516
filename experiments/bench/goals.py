"""The goals for the rows of `bench train` on an H200: speed relative to the same step in dense
bf16, both launched from Python, and memory relative to that step's."""

from __future__ import annotations

from experiments.bench.arms import REPACKED, SIMULATED, TORCHAO
from experiments.bench.jobs import SPARSE, STACK

# The rate of a dense bf16 product of 8192 x 8192 x 8192 on random data after idle time.
PEAK_TFLOPS = 790.0
SHARE = f"share of {PEAK_TFLOPS:.0f} TFLOP/s by 6N %"
LAUNCHED = 1.03  # goal for the time of a launched step over that of a replayed one

WIDE, ALL_774M = f"{STACK}, all linears", "GPT-2 774M, 16 x 1024, all linears"
_124M = ("GPT-2 124M, 32 x 1024", "GPT-2 124M, 32 x 1024, all linears")
_VISION = ("ViT-L/16, 64 images", "SAM ViT-L encoder, 4 images")
FASTER = {
    (WIDE, "fst"): 1.27,
    (WIDE, "slope"): 1.27,
    (WIDE, "s_ste"): 1.22,
    (WIDE, "s_ste, fp8"): 1.55,
    (WIDE, "fst, fp8"): 1.6,
    (ALL_774M, "fst"): 1.13,
    (ALL_774M, "slope"): 1.13,
    **{(shape, name): 1.05 for shape in _VISION for name in ("fst", "s_ste", "slope")},
    # At this width 2:4 cannot be faster; the goal is not to be much slower.
    **{(shape, name): 1 / 1.03 for shape in _124M for name in SPARSE},
    (_124M[0], SIMULATED): 1 / 1.5,
}
FASTER_THAN_TORCHAO = {(WIDE, "s_ste, fp8"): 1.2}
# Goals for the peak over dense's, and for the memory held between steps (weights, gradients,
# optimizer, masks and packed operands) over dense's.
MEMORY = {(WIDE, REPACKED): {"peak over dense": 0.68, "held over dense": 0.62}}


def share_of_peak(flops: float, ms: float) -> float:
    """`flops` in `ms` milliseconds, in percent of PEAK_TFLOPS."""
    return 100 * flops / ms / 1e9 / PEAK_TFLOPS


def judge(
    shape: str, name: str, figures: dict[str, float], ms: float, peers: dict[str, float]
) -> tuple[str, bool | None]:
    """(a row's goals with the values reached, True if all were reached); ("", None) for a row
    without goals.

    ms: time of the launched step. peers: milliseconds of dense and dense FP8 in the same
    comparison.
    """
    counted = figures.get("step with its share of that ms", ms)
    goals: list[tuple[str, float, bool]] = []
    if (times := FASTER.get((shape, name))) is not None:
        reached = peers["dense"] / counted
        goals.append((f"{times:.2f} x as fast as dense", reached, reached >= times))
    if (times := FASTER_THAN_TORCHAO.get((shape, name))) is not None and TORCHAO in peers:
        reached = peers[TORCHAO] / counted
        goals.append((f"{times:.2f} x as fast as {TORCHAO}", reached, reached >= times))
    for figure, most in MEMORY.get((shape, name), {}).items():
        goals.append((f"{figure} at most {most}", figures[figure], figures[figure] <= most))
    if (over := figures.get("launched over graphs")) is not None:
        goals.append((f"launched at most {LAUNCHED} x graphs", over, over <= LAUNCHED))
    if not goals:
        return "", None
    words = "; ".join(f"{goal} ({reached:.2f})" for goal, reached, _ in goals)
    return words, all(met for *_, met in goals)
