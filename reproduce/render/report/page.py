"""Writes the page of results, `runs/report/index.html`, and its main figure as a file."""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from markupsafe import Markup

from experiments.runs.comparison import with_spread
from experiments.runs.curves import NAMES
from experiments.runs.stats import excludes_zero
from experiments.support.checkpoint import write_text
from experiments.support.results import git_state
from reproduce import judge, records
from reproduce.execute.blocks import EVIDENCE
from reproduce.execute.jobs import finished_runs, plan
from reproduce.judge.claims import read_claims
from reproduce.judge.verdicts import verdict
from reproduce.render import listing
from reproduce.render.grid import PAPER
from reproduce.render.header import revision
from reproduce.render.report import figures
from reproduce.render.report.blocks import Shown, filled, shown_blocks
from reproduce.render.report.html import HERE, TEMPLATES, link
from reproduce.render.table import Rendered, render, render_measured
from reproduce.specs.table import Table, read_tables

MAIN = "a"  # the block of the main figure
MEASURED = HERE.parents[1] / "measured"


def main(runs: Path) -> None:
    """Write the page, with the committed results and those of blocks and tables made here."""
    path = runs / "report" / "index.html"
    write_text(path, build(runs, path.parent))
    print(f"written: {path}")


def write_figure(name: str, path: Path) -> None:
    """Write a figure of the committed results alone: `figure`, the README's, or `sizes`."""
    claims, evidence = read_claims(), records.read_evidence(EVIDENCE)
    if name == "sizes":
        drawn = figures.sizes(evidence.values, claims.margin)
    else:
        drawn = figures.differences(_main(shown_blocks(claims, evidence, {"claims": []})))
    write_text(path, figures.standalone(drawn))
    print(f"written: {path}")


def build(runs: Path, folder: Path) -> str:
    """The HTML of the page. folder: where it is written to, for relative links."""
    rules, evidence = read_claims(), records.read_evidence(EVIDENCE, runs / "evidence")
    judged = judge.content(rules, evidence.values)
    shown, specs = shown_blocks(rules, evidence, judged), read_tables()
    measured = [m for claim in judged["claims"] for m in claim["measured"]]
    # Rows that are factors of speed over dense and can be true.
    speeds = [m for m in measured if m["lines"] and not (m["than"] or m["less"])]
    main = _main(shown)
    return TEMPLATES.get_template("page.html").render(
        counts=Counter(claim["verdict"] for claim in judged["claims"]),
        covered=listing.items(),
        drawn=figures.differences(main) if math.isfinite(main.gap) else "",
        excludes_zero=excludes_zero,
        filled=filled,
        judged=judged,
        link=partial(link, folder),
        main=main,
        measured_files=lambda pattern: sorted(MEASURED.glob(f"*/{pattern}")),
        names=NAMES,
        reproduce=HERE.parents[1],
        revision=revision(git_state()),
        shown=shown,
        specs=specs,
        speeds={
            "device": ", ".join(dict.fromkeys(m["device"].partition(",")[0] for m in speeds)),
            "lines": [line for m in speeds for line in m["lines"] if not line["why"]],
        },
        style=figures.variables() + Markup((HERE / "style.css").read_text(encoding="utf-8")),
        tables_made={table.name: tiers_of(table, runs) for table in specs},
        verdict=verdict,
        with_spread=with_spread,
        variants={(s.block.name, v) for s in shown if s.variants for v in s.block.variants},
        warnings=evidence.warnings(),
    )


def _main(shown: list[Shown]) -> Shown:
    return next(s for s in shown if s.block.name == MAIN)


@dataclass(frozen=True)
class Made:
    """A table as it was rendered for a tier."""

    tier: str
    rendered: Rendered
    files: list[Path] = field(default_factory=list)  # where its numbers are, if it was run

    @property
    def where(self) -> str:
        """The tier and the device in words."""
        device = self.rendered.facts["Device"].partition(",")[0]
        return f"tier {self.tier}" + (f" on {device}" if device else "")


def tiers_of(table: Table, runs: Path) -> list[Made]:
    """The tiers that were made, committed ones first; else the largest, without our values."""
    made = []
    for tier in table.tiers:
        for path in sorted(MEASURED.glob(f"*/{table.name}-{tier}.csv")):
            made.append(_of(tier, render_measured(table, tier, path), path.with_suffix("")))
    for tier, one in table.tiers.items():
        if one.block:
            collected = records.collect(table, tier, runs)
            path = EVIDENCE / f"{one.block}.jsonl"
            if collected.runs and path.is_file():
                made.append(Made(tier, render(collected.table, tier, collected.runs), [path]))
        elif listing.read_progress(table, tier, runs) is not None:
            rendered = render(table, tier, finished_runs(plan(table, tier, runs)))
            made.append(_of(tier, rendered, listing.stem(table, tier, runs)))
    if made:
        return made
    tier = [name for name, one in table.tiers.items() if not one.unavailable][-1]
    empty = render(table, tier, [])
    papers = [line for line in empty.grid.lines if line.names[-1] == PAPER]
    return [Made(tier, replace(empty, grid=replace(empty.grid, lines=papers)))]


def _of(tier: str, rendered: Rendered, stem: Path) -> Made:
    files = [stem.with_name(stem.name + end) for end in (".md", ".csv", "-runs.csv")]
    return Made(tier, rendered, [path for path in files if path.is_file()])
