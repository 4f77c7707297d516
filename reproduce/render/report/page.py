"""Writes the page of results, `runs/report/index.html`, and its main figure as a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from markupsafe import Markup

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
from reproduce.records import read_evidence
from reproduce.render import listing
from reproduce.render.header import revision
from reproduce.render.report import blocks, tables
from reproduce.render.report.figures import standalone, variables
from reproduce.render.report.gather import Shown, shown_blocks, unfinished
from reproduce.render.report.html import HERE, TEMPLATES, link, macros
from reproduce.specs.table import read_tables

OF_BLOCKS = (*("commands_of", "difference_figure", "revision_of", "table_of_variants"),)
VERDICT_TEXT = ("agreement", "p_value", "statement", "without")
MAIN = "a"  # the block of the main figure


def main(runs: Path, report: Callable[[str], None] = print) -> None:
    """Write the page, with the committed results and those of blocks and tables made here."""
    folder = runs / "report"
    _write(folder / "index.html", build(runs, folder), report)


def write_figure(path: Path, report: Callable[[str], None] = print) -> None:
    """Write only the main figure of the committed results, which README.md shows."""
    rules, evidence = read_claims(), read_evidence(EVIDENCE)
    main = _main(shown_blocks(rules, evidence, {"claims": []}))
    _write(path, standalone(blocks.difference_figure(main)), report)


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
    css = (HERE / "style.css").read_text(encoding="utf-8")
    return TEMPLATES.get_template("page.html").render(
        **{name: getattr(blocks, name) for name in OF_BLOCKS},
        **{name: getattr(text, name) for name in VERDICT_TEXT},
        variants={
            (s.block.name, variant) for s in shown if s.variants for variant in s.block.variants
        },
        counts=Counter(claim["verdict"] for claim in judged["claims"]),
        covered=listing.items(),
        enough=ENOUGH,
        evidence=evidence,
        excludes_zero=excludes_zero,
        judged=judged,
        link=partial(link, folder),
        main=_main(shown),
        measured_files=lambda pattern: sorted(tables.MEASURED.glob(f"*/{pattern}")),
        names=NAMES,
        reproduce=HERE.parents[1],
        revision=revision(git_state()),
        row_verdicts=_row_verdicts(judged),
        shown=shown,
        specs=specs,
        style=variables() + Markup(css),
        tables_made={table.name: tables.found(table, runs) for table in specs},
        unfinished=unfinished(runs),
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
