"""Makes the page's section on measured speed and memory; each figure says what was timed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from experiments import bench
from reproduce.report import html
from reproduce.report.figures import factors
from reproduce.report.html import Markup, tag, text
from reproduce.report.links import Links
from reproduce.report.tables import MEASURED
from reproduce.verdict_text import Json, table_name

RECORDS = Path(bench.__file__).parents[1] / "bench_results"
MEANS = {
    "kernel": "one layer or linear on its own, forward and backward",
    "step": "a training step of a whole model, with masks and packing",
    "projected": "not a whole model: one timed layer represents it",
    "counted": "bytes, counted once",
}
OF_BENCH = {"linear": "kernel", "block": "kernel", "train": "step"}
SHORT = 8  # figures with at most so many rows are open at first


def section(judged: Json, links: Links) -> Markup:
    """The section on speed and memory."""
    kinds = [tag("li", tag("strong", kind), f": {meaning}") for kind, meaning in MEANS.items()]
    drawn = [
        _measured(measured, claim["id"], links)
        for claim in judged["claims"]
        for measured in claim["measured"]
        if measured["lines"] and not measured["than"]
    ]
    return text(
        tag(
            "p",
            "Speed relative to dense on the device named with each figure; the papers used others. "
            "What was timed:",
        ),
        tag("ul", kinds),
        tag(
            "p", "Filled dots are our values, hollow diamonds the paper's; the line at 1 is dense."
        ),
        tag("h3", "Compared with the papers"),
        drawn or tag("p", "Nothing was measured yet."),
        tag("h3", "Measured by experiments.bench"),
        tag("p", "Where a method was measured more than once, the figures name the revision."),
        [_record(path, links) for path in sorted(RECORDS.glob("*.json"))],
    )


def _measured(measured: Json, claim: int, links: Links) -> Markup:
    rows = [(line["label"], line["paper"], line["ours"]) for line in measured["lines"]]
    less = measured["less"]
    unit = "memory relative to dense; less is better" if less else "times as fast as dense"
    title = f"{table_name(measured['table'])}: {measured['column']}"
    files = [links.to(path) for path in sorted(MEASURED.glob(f"*/{measured['table']}-full.csv"))]
    return html.details(
        [_kind(measured["kind"]), f" {title}"],
        tag("figure", factors(f"{title} ({measured['kind']})", rows, unit)),
        tag(
            "p",
            tag("a", f"Claim {claim}", href=f"#claim-{claim}"),
            f". {measured['device']}. ",
            files,
        ),
        open=len(rows) <= SHORT,
    )


def _kind(kind: str) -> Markup:
    return tag("span", kind, class_="kind")


def _record(path: Path, links: Links) -> Markup:
    """The rows of a record of experiments.bench that were timed together with a dense model."""
    record = json.loads(path.read_text(encoding="utf-8"))
    parts = []
    for name, kind in OF_BENCH.items():
        rows = [
            row
            for row in record.get("benchmarks", {}).get(name, {}).get("rows", [])
            if row["ms"] and "dense" in row["peers"] and not row["name"].startswith("dense")
        ]
        if not rows:
            continue
        dots: dict[str, list[tuple[str, None, float]]] = {}
        measured = Counter((r["shape"], r["name"]) for r in rows)
        for r in rows:
            again = measured[r["shape"], r["name"]] > 1
            label = f"{r['name']} at {r['revision'][:7]}" if again else r["name"]
            dots.setdefault(r["shape"], []).append((label, None, r["peers"]["dense"] / r["ms"]))
        cells = [
            [
                r["name"],
                r["shape"],
                r["dtype"],
                r["backend"],
                f"{r['ms']:.4g}",
                f"{r['peers']['dense']:.4g}",
                f"{r['peers']['dense'] / r['ms']:.2f}",
                r["revision"][:7],
            ]
            for r in rows
        ]
        title = f"{name} on {record['device']}"
        heads = ["method", "shape", "dtype", "products", "ms", "dense, ms", "factor", "revision"]
        parts.append(
            html.details(
                [_kind(kind), f" {title}"],
                [
                    tag(
                        "figure",
                        tag("figcaption", shape),
                        factors(f"{title}: {shape} ({kind})", of_shape, "times as fast as dense"),
                    )
                    for shape, of_shape in dots.items()
                ],
                html.table(f"{title} ({kind})", heads, cells, words=(0, 1, 2, 3, 7)),
                tag("p", "From ", links.to(path), ". To measure it again:"),
                html.command(f"python -m experiments.bench {name}"),
                open=kind == "step",
            )
        )
    return text(parts)
