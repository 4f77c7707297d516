"""Writes the page of results, `runs/report/index.html`, and its main figure as a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from experiments import bench
from experiments.runs.comparison import with_spread
from experiments.runs.curves import NAMES
from experiments.runs.stats import excludes_zero
from experiments.support.checkpoint import write_text
from experiments.support.errors import UserError
from experiments.support.results import git_state
from reproduce import judge
from reproduce.execute.blocks import EVIDENCE
from reproduce.judge import Json, text
from reproduce.judge.claims import read_claims
from reproduce.judge.scale import ENOUGH
from reproduce.records import Evidence, read_evidence
from reproduce.render import listing
from reproduce.render.header import revision
from reproduce.render.report import blocks, tables
from reproduce.render.report.figures import factors, standalone, variables
from reproduce.render.report.gather import Shown, own_runs, shown_blocks, unfinished
from reproduce.render.report.html import HERE, TEMPLATES, link, macros
from reproduce.specs.table import read_tables

OF_BLOCKS = (
    *("commands_of", "curves_of", "difference_figure", "revision_of", "small_models"),
    "table_of_variants",
)
VERDICT_TEXT = ("agreement", "p_value", "statement", "without")
MAIN = "a"  # the block of the main figure
RECORDS = Path(bench.__file__).parents[1] / "bench_results"
OF_BENCH = {"linear": "kernel", "block": "kernel", "train": "step"}


def main(runs: Path, report: Callable[[str], None] = print) -> None:
    """Write the page, with the committed results and those of one's own runs."""
    folder = runs / "report"
    _write(folder / "index.html", build(runs, folder), report)


def write_figure(path: Path, report: Callable[[str], None] = print) -> None:
    """Write only the main figure of the committed results, which README.md shows."""
    rules, evidence = read_claims(), read_evidence(EVIDENCE)
    main = _main(shown_blocks(rules, evidence, {"claims": []}))
    _write(path, standalone(blocks.difference_figure(main, main.leading)), report)


def _write(path: Path, content: str, report: Callable[[str], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    report(f"written: {path}")


def build(runs: Path, folder: Path) -> str:
    """The HTML of the page. folder: where it is written to, for relative links."""
    rules, evidence = read_claims(), read_evidence(EVIDENCE, runs / "evidence")
    judged = judge.content(rules, evidence.values)
    shown, specs = shown_blocks(rules, evidence, judged), read_tables()
    own, trouble = own_runs(runs)
    css = (HERE / "style.css").read_text(encoding="utf-8")
    return TEMPLATES.get_template("page.html").render(
        **{name: getattr(blocks, name) for name in OF_BLOCKS},
        **{name: getattr(text, name) for name in VERDICT_TEXT},
        across=blocks.across(shown),
        variants={
            (s.block.name, variant) for s in shown if s.variants for variant in s.block.variants
        },
        bench_records=[*_bench_records()],
        counts=Counter(claim["verdict"] for claim in judged["claims"]),
        covered=listing.items(),
        enough=ENOUGH,
        evidence=evidence,
        excludes_zero=excludes_zero,
        factors=factors,
        judged=judged,
        link=partial(link, folder),
        main=_main(shown),
        measured_files=lambda pattern: sorted(tables.MEASURED.glob(f"*/{pattern}")),
        names=NAMES,
        origins=_origins(evidence),
        own=own,
        trouble=trouble,
        reproduce=HERE.parents[1],
        revision=revision(git_state()),
        row_verdicts=_row_verdicts(judged),
        runs=runs,
        shown=shown,
        specs=specs,
        style=variables() + Markup(css),
        tables_made={table.name: tables.found(table, runs) for table in specs},
        unfinished=unfinished(runs),
        with_spread=with_spread,
    )


def _main(shown: list[Shown]) -> Shown:
    return next(s for s in shown if s.block.name == MAIN)


def _row_verdicts(judged: Json) -> tables.Verdicts:
    """The verdicts on rows of measured tables, by (table, column, row)."""
    return {
        (measured["table"], measured["column"], line["label"]): line["verdict"]
        for claim in judged["claims"]
        for measured in claim["measured"]
        for line in measured["lines"]
        if not measured["than"] and line["verdict"] in macros.shapes
    }


def _origins(evidence: Evidence) -> list[list[Any]]:
    """The rows of the table of revisions and devices of all records."""
    origins: dict[tuple[str, str], list[str]] = {}
    for (block, _), seeds in evidence.kept.items():
        for stored in seeds.values():
            origin = blocks.revision_of(stored), stored.record["environment"]["device"]
            origins.setdefault(origin, []).append(block)
    return [
        [*origin, len(names), ", ".join(sorted(set(names)))]
        for origin, names in sorted(origins.items())
    ]


def _bench_records() -> Iterator[Json]:
    """The rows of the records of experiments.bench that were timed together with a dense model."""
    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for name, kind in OF_BENCH.items():
            rows = [
                row | {"dense": row["peers"]["dense"], "factor": row["peers"]["dense"] / row["ms"]}
                for row in record.get("benchmarks", {}).get(name, {}).get("rows", [])
                if row["ms"] and "dense" in row["peers"] and not row["name"].startswith("dense")
            ]
            if rows:
                times = Counter((row["shape"], row["name"]) for row in rows)
                dots: dict[str, list[tuple[str, None, float]]] = {}
                for row in rows:
                    again = times[row["shape"], row["name"]] > 1
                    label = row["name"] + f" at {row['revision'][:7]}" * again
                    dots.setdefault(row["shape"], []).append((label, None, row["factor"]))
                title = f"{name} on {record['device']}"
                yield {"name": name, "kind": kind, "title": title, "path": path, "dots": dots,
                       "rows": rows}  # fmt: skip
