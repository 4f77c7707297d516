"""Verdicts on speed and memory, from made-up tables of measurements."""

import math

import pytest

from experiments.support.errors import UserError
from reproduce import speed_claims
from reproduce.claims import Claims, Margin, Speed, read_claims
from reproduce.reading import TABLES, read_rows, read_table
from reproduce.speed_claims import judge_speed

CLAIMS = Claims(Margin(0.25, "dense", "half"), 0.05, 5, 0.02, [])
MD = "# T\n\n- Device: NVIDIA Toy, 2 threads.\n- Code: revision c0ffee.\n"


@pytest.fixture
def measured(tmp_path):
    """measured({row: (paper, ours)}, {row: [ours by repeat]}) -> folder of SLoPe's Table 1."""

    def write(rows, repeats=None, table="slope_table1", value="metrics.train_speedup"):
        lines = [f"{row},full,{ours},1,{paper or ''}" for row, (paper, ours) in rows.items()]
        head = "method,tier,training: mean,training: n,training: paper"
        (tmp_path / f"{table}-full.csv").write_text("\n".join([head, *lines]) + "\n")
        (tmp_path / f"{table}-full.md").write_text(MD)
        if repeats:
            lines = [f"{row},{n},{v}" for row, vs in repeats.items() for n, v in enumerate(vs)]
            text = "\n".join([f"method,seed,{value}", *lines]) + "\n"
            (tmp_path / f"{table}-full-runs.csv").write_text(text)
        return tmp_path

    return write


def statement(**changed):
    return Speed(**{"table": "slope_table1", "column": "training", "kind": "kernel"} | changed)


@pytest.mark.parametrize(
    ("ours", "expected"),
    # Half of the paper's gain of 0.5 is 1.25; 2 % of ours either way are its noise.
    [(1.5, "confirmed"), (1.28, "confirmed"), (1.26, "inconclusive"), (1.23, "inconclusive"),
     (1.2, "direction only"), (0.9, "not reproduced")],
)  # fmt: skip
def test_one_measurement_has_the_noise_for_its_interval(measured, ours, expected):
    found = judge_speed(CLAIMS, statement(), measured({"x": (1.5, ours)}))
    (line,) = found.lines
    assert (found.verdict, line.verdict, line.n) == (expected, expected, 1)
    assert (line.label, line.paper, line.ours) == ("x", 1.5, ours)
    assert all(map(math.isnan, line.interval))
    assert (found.device, found.code) == ("NVIDIA Toy, 2 threads", "revision c0ffee")


@pytest.mark.parametrize(
    ("ours", "expected"), [(0.6, "confirmed"), (0.7, "inconclusive"), (0.8, "direction only")]
)
def test_of_memory_less_is_a_gain(measured, ours, expected):
    """Half of what 0.4 saves leaves 0.7."""
    folder = measured({"x": (0.4, ours)})
    assert judge_speed(CLAIMS, statement(less=True), folder).verdict == expected


@pytest.mark.parametrize(
    ("repeats", "expected"),
    [
        ([1.27, 1.28, 1.29, 1.28, 1.27], "confirmed"),
        ([1.25] * 5, "confirmed"),  # exactly half
        ([1.26, 1.261, 1.26, 1.261, 1.26], "confirmed"),  # inconclusive with a noise of 2 %
        ([1.1, 1.6, 1.3, 1.7, 1.2], "inconclusive"),  # confirmed with a noise of 2 %
        ([1.2, 1.3, 1.25, 1.22, 1.31], "inconclusive"),
        ([1.22, 1.23, 1.22, 1.23, 1.22], "direction only"),
    ],
)
def test_repeats_have_their_own_interval(measured, repeats, expected):
    from experiments.runs.stats import paired_interval

    folder = measured({"x": (1.5, 9.0)}, {"x": repeats, "not measured": [""]})
    found = judge_speed(CLAIMS, statement(), folder)
    assert (found.verdict, found.lines[0].n) == (expected, 5)
    assert found.lines[0].interval == paired_interval(repeats)
    assert found.lines[0].ours == pytest.approx(sum(repeats) / 5)


def test_a_count_has_no_error_however_often_it_was_made(measured):
    """0.71 saves 0.29, a little less than half of 0.6; one measurement would leave that open."""
    folder = measured({"x": (0.4, 0.71)}, {"x": [0.71] * 5})
    counted = judge_speed(CLAIMS, statement(less=True, kind="counted"), folder)
    assert (counted.verdict, counted.lines[0].n) == ("direction only", 1)
    assert counted.lines[0].share == pytest.approx(0.29 / 0.6)


def test_a_row_that_is_left_out_is_shown_and_not_judged(measured):
    repeats = {"m / S": [1.06] * 5, "m / F": [1.0] * 5, "n / S": [0.5] * 5, "n / F": [1.0] * 5}
    folder = measured(PAIR | {"n / S": (1.2, 9.0), "n / F": (1.1, 9.0)}, repeats)
    for than, expected in (("", "direction only"), (" / F", "confirmed")):
        asked = statement(rows=" / S", than=than, left_out={"n / S": "it repeats m"})
        found = judge_speed(CLAIMS, asked, folder)
        judged = [(x.verdict, x.why) for x in found.lines]
        assert judged == [(expected, ""), ("shown, not judged", "it repeats m")]
        assert found.verdict == expected


def test_no_block_saves_more_than_its_only_sparse_part():
    """Claim 4 leaves out the rows of Figure 7 that do, by more than the error of a fixed order."""
    impossible = {}
    for row in read_rows(speed_claims.MEASURED / "fst_figure7-full.csv"):
        names = ("FFN dense", "FFN 2:4", "block dense", "block 2:4")
        ffn, ffn_24, block, block_24 = (float(row[f"{name}: mean"]) for name in names)
        if block - block_24 - (ffn - ffn_24) > 0.08 * block_24:
            saved = f"saves {block - block_24:.0f} ms and its only sparse part, the FFN, "
            impossible[row["method"]] = f"impossible, as the block {saved}{ffn - ffn_24:.0f}"
    block = next(c for c in read_claims().claims if c.id == 4).measured[1]
    assert block.left_out == impossible and len(impossible) == 2


def test_a_row_refutes_a_statement_and_one_without_a_published_value_is_shown(measured):
    rows = {"a x": (1.5, 1.5), "b x": (1.5, 1.25), "c x": (None, 0.1), "d y": (1.5, 0.9),
            "not measured": (1.5, "")}  # fmt: skip
    folder = measured(rows)

    def verdicts(**changed):
        found = judge_speed(CLAIMS, statement(**changed), folder)
        return found.verdict, [line.verdict for line in found.lines]

    every = ["confirmed", "inconclusive", "shown, not judged", "not reproduced"]
    assert verdicts() == ("not reproduced", every)
    assert verdicts(rows=" x") == ("inconclusive", every[:3])
    assert verdicts(rows="a x") == ("confirmed", every[:1])
    assert verdicts(rows="c x") == ("shown, not judged", every[2:3])
    (line,) = judge_speed(CLAIMS, statement(rows="c x"), folder).lines
    assert (line.label, line.paper, line.ours) == ("c x", None, 0.1)


PAIR = {"m / S": (1.2, 9.0), "m / F": (1.1, 9.0)}


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ([1.06, 1.07, 1.065, 1.06, 1.07], "confirmed"),
        ([1.02, 1.03, 1.025, 1.02, 1.03], "direction only"),  # the paper has 1.09
        ([0.97, 0.98, 0.975, 0.97, 0.98], "not reproduced"),
        ([0.99, 1.02, 1.0, 1.01, 0.98], "not reproduced"),
        ([0.93, 1.09, 1.0, 1.07, 0.96], "inconclusive"),
    ],
)
def test_faster_than_another_by_pairs(measured, factors, expected):
    base = [1.1, 1.3, 1.2, 1.25, 1.15]  # which varies far more than the quotient
    repeats = {"m / S": [b * f for b, f in zip(base, factors, strict=True)], "m / F": base}
    folder = measured(PAIR, repeats)
    found = judge_speed(CLAIMS, statement(rows=" / S", than=" / F"), folder)
    (line,) = found.lines
    assert (found.verdict, line.verdict, line.label) == (expected, expected, "m / S")
    assert line.paper == pytest.approx(1.2 / 1.1)
    assert line.ours == pytest.approx(math.prod(factors) ** 0.2)
    low, high = line.interval
    assert low < line.ours < high and math.sqrt(low * high) == pytest.approx(line.ours)
    assert found.why == ""


def test_each_row_has_its_own_factor(measured):
    repeats = {"m / S": [1.1, 1.21], "m / F": [1.0, 1.0], "n / S": [2.0, 3.0], "n / F": [1.0, 1.0]}
    folder = measured(PAIR, repeats)
    found = judge_speed(CLAIMS, statement(rows=" / S", than=" / F"), folder)
    # In logarithms. The error of a mean of two is half of their difference, and Student's t with
    # one degree of freedom is Cauchy: tan(pi (p - 1/2)).
    t = math.tan(0.475 * math.pi)
    for line, (first, second) in zip(found.lines, [(1.1, 1.21), (2.0, 3.0)], strict=True):
        middle, half = math.sqrt(first * second), (second / first) ** (t / 2)
        assert (line.ours, *line.interval) == pytest.approx((middle, middle / half, middle * half))


def test_p_values_of_the_rows_are_adjusted_together(measured):
    """Alone at 0.03 a row is faster; of two such, neither."""
    factors = [1.018, 1.003, 1.012, 1.003, 1.019]
    one = {"m / S": factors, "m / F": [1.0] * 5}
    two = one | {"n / S": factors, "n / F": [1.0] * 5}
    asked = statement(rows=" / S", than=" / F")
    assert judge_speed(CLAIMS, asked, measured(PAIR, one)).verdict == "direction only"
    assert judge_speed(CLAIMS, asked, measured(PAIR, two)).verdict == "not reproduced"


FIVE = {"m / S": [1.2] * 5, "m / F": [1.1] * 5}


@pytest.mark.parametrize(
    ("repeats", "each"),
    [
        (None, [1]),
        (FIVE | {"m / S": [1.2] * 4}, [4]),
        (FIVE | {"m / F": [1.1] * 4}, [4]),
        ({"m / S": [1.2] * 5}, [0]),
        (FIVE | {"n / S": [1.2] * 4, "n / F": [1.1] * 4}, [5, 4]),
    ],
)
def test_faster_is_not_judged_by_few_repeats(measured, repeats, each):
    asked = statement(rows=" / S", than=" / F")
    found = judge_speed(CLAIMS, asked, measured(PAIR, repeats))
    command = "python -m reproduce table1 paper=slope tier=full"
    assert (found.verdict, found.why) == ("not tested", f"{each[-1]} of 5 repeats ({command})")
    assert [line.n for line in found.lines] == each


def test_what_was_not_measured(measured, tmp_path):
    found = judge_speed(CLAIMS, statement(), tmp_path / "nowhere")
    assert (found.verdict, found.lines) == ("not tested", [])
    assert (found.device, found.code) == ("", "")
    assert found.why == "not measured (python -m reproduce table1 paper=slope tier=full)"
    with pytest.raises(UserError, match="slope_table1 has no 'training' of rows ' / none'"):
        judge_speed(CLAIMS, statement(rows=" / none"), measured(PAIR))


def test_the_committed_measurements_have_what_is_claimed():
    """Every statement of claims.yaml finds its rows, and a column of its table by that label."""
    claims = read_claims()
    asked = [speed for claim in claims.claims for speed in claim.measured]
    assert {claim.id for claim in claims.claims if claim.measured} == {4, 12, 14}
    for speed in asked:
        assert judge_speed(claims, speed).lines
        labels = {c.label for c in read_table(TABLES / f"{speed.table}.yaml").columns}
        assert speed.column in labels
    assert {speed.than for speed in asked} == {"", " / FST"}
    assert speed_claims.MEASURED.name == "h200"
