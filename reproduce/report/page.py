"""Assembles the page of results, `runs/report/index.html`, and writes its main figure as a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from experiments.runs.comparison import with_spread
from experiments.runs.curves import NAMES
from experiments.support.checkpoint import write_text
from experiments.support.errors import UserError
from experiments.support.results import git_state
from reproduce import verdicts
from reproduce.blocks import EVIDENCE
from reproduce.claims import Claims, read_claims
from reproduce.header import revision
from reproduce.reading import read_tables
from reproduce.records import Evidence, read_evidence
from reproduce.report import blocks, claims, html, speed, tables
from reproduce.report.figures import STYLE, standalone
from reproduce.report.gather import (
    Own,
    Shown,
    own_runs,
    shown_blocks,
    unfinished,
)
from reproduce.report.html import Markup, tag, text
from reproduce.report.links import Links
from reproduce.spec import Table
from reproduce.verdict_text import Json

HERE = Path(__file__).parent
MAIN = "a"  # the block of the main figure
CONTENTS = {
    "claims": "The claims",
    "blocks": "Runs of the blocks",
    "tables": "The papers' tables",
    "speed": "Speed and memory",
    "own": "Your own runs",
    "left-out": "Missing, failed and outdated runs",
    "sources": "Where the numbers come from",
}
SCRIPT = """
const reveal = () => {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  for (let e = target; e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true;
  if (target) target.scrollIntoView();
};
addEventListener("hashchange", reveal);
addEventListener("beforeprint", () => {
  for (const e of document.querySelectorAll("details")) e.open = true;
});
reveal();
"""


def main(runs: Path, report: Callable[[str], None] = print) -> None:
    """Write the page, with the committed results and those of one's own runs."""
    folder = runs / "report"
    page = folder / "index.html"
    text_of_page = build(runs, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(page, text_of_page)
    except OSError as error:
        raise UserError(f"cannot write {page}: {error.strerror}") from error
    report(f"written: {page}")


def write_figure(path: Path, report: Callable[[str], None] = print) -> None:
    """Write only the main figure of the committed results, which README.md shows."""
    figure = standalone(main_figure(read_claims(), read_evidence(EVIDENCE)))
    try:
        write_text(path, figure)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    report(f"written: {path}")


def build(runs: Path, folder: Path) -> str:
    """The HTML of the page. folder: where it is written to, for relative links."""
    links = Links(folder)
    rules, evidence = read_claims(), read_evidence(EVIDENCE, runs / "evidence")
    judged = verdicts.content(rules, evidence.values)
    shown, own = shown_blocks(rules, evidence), own_runs(runs)
    arms = {(s.block.name, arm) for s in shown if s.arms for arm in s.block.arms}
    by_name = {s.block.name: s for s in shown}

    def of_table(table: Table) -> Markup | None:
        return blocks.of_table(table, by_name, evidence, rules.margin, judged)

    parts = {
        "claims": claims.section(judged, arms, links),
        "blocks": _blocks(shown, evidence, rules, judged, links),
        "tables": tables.section(read_tables(), runs, claims.verdicts(judged), of_table, links),
        "speed": speed.section(judged, links),
        "own": _own(own, runs, links),
        "left-out": _left_out(shown, evidence, own, runs, links),
        "sources": _sources(evidence, links),
    }
    sections = [
        tag(
            "section",
            tag("h2", CONTENTS[name], id=f"{name}-heading"),
            part,
            id=name,
            aria_labelledby=f"{name}-heading",
        )
        for name, part in parts.items()
    ]
    contents = [tag("li", tag("a", words, href=f"#{name}")) for name, words in CONTENTS.items()]
    body = tag(
        "body",
        tag("a", "Skip to the claims", href="#claims", class_="skip"),
        tag("header", _opening(rules, evidence)),
        tag("nav", tag("ul", contents), aria_label="Contents"),
        tag("main", sections),
        tag(
            "footer", tag("p", f"Written by python -m reproduce report at {revision(git_state())}.")
        ),
        tag("script", Markup(SCRIPT)),
    )
    style = STYLE.read_text(encoding="utf-8") + (HERE / "style.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", "sparse24: claims about 2:4 sparse training, tested"),
        tag("style", Markup(style)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def main_figure(rules: Claims, evidence: Evidence) -> Markup:
    """The figure of the differences between the leading methods of the main block and dense."""
    block = next(s for s in shown_blocks(rules, evidence) if s.block.name == MAIN)
    return blocks.difference_figure(block, block.leading, rules.margin.share)


def _opening(rules: Claims, evidence: Evidence) -> Markup:
    block = next(s for s in shown_blocks(rules, evidence) if s.block.name == MAIN)
    introduction = (
        "Five papers train transformers with 2:4 sparsity: two of every four weights are zero, "
        "which lets GPUs multiply faster. This page compares their methods in one trainer, tests "
        "their claims with several seeds, and links every number to the file it comes from."
    )
    parts = [tag("h1", "Which claims about 2:4 sparse training hold?"), tag("p", introduction)]
    if block.baseline not in block.arms:
        return text(parts, tag("p", f"Block {MAIN}, which the figure here shows, has no runs yet."))
    n = [block.rows[arm].pairs for arm in block.leading if block.rows[arm].pairs]
    seeds = f"{min(n)} to {max(n)}" if n and min(n) < max(n) else str(max(n, default=0))
    quantity = NAMES[block.quantity].partition(",")[0]
    caption = (
        f"{block.block.title}. Each row shows how far a method's {quantity} is above that of "
        f"{block.baseline}: mean and 95 % interval of the paired differences over {seeds} seeds, "
        "with each seed as a small dot (a hollow mark is a single seed without an interval). The "
        f"square is {block.yardstick}, a dense model whose feed-forward layers have half the "
        "width: a method that is not to the left of it is no better than that smaller model. "
        "(shallow is a dense model with half the depth.) A method inside "
        "the shaded band, a quarter of that distance on either side of 0, counts as being as good "
        "as dense."
    )
    return text(
        parts,
        tag("figure", main_figure(rules, evidence), tag("figcaption", caption), class_="main"),
    )


def _blocks(
    shown: list[Shown],
    evidence: Evidence,
    rules: Claims,
    judged: Json,
    links: Links,
) -> Markup:
    asked = {contrast.block for claim in rules.claims for contrast in claim.contrasts}
    absent = sorted(asked - {s.block.name for s in shown})
    none = [
        tag("p", f"Block {name} has no runs yet, and no file in reproduce/blocks.")
        for name in absent
    ]
    made = {s.block.name: blocks.section(s, evidence, rules.margin, judged, links) for s in shown}
    pilots = [part for name, part in made.items() if name.startswith("pilot")]
    return text(
        blocks.across(shown, evidence, rules.margin),
        [part for name, part in made.items() if not name.startswith("pilot")],
        none,
        tag("h3", "Pilots"),
        html.details(f"{len(pilots)} pilots, which chose the settings", pilots),
    )


def _own(own: Own, runs: Path, links: Links) -> Markup:
    parts = []
    for folder, arms in own.rows.items():
        cells = [
            [
                row.label,
                f"{with_spread(row.mean, row.std)} (n={row.n})",
                row.against or "-",
                claims.signed(row.difference, row.low, row.high) if row.pairs else "-",
                claims.interval(row.low, row.high),
                html.listed(links.to(file, file.parent.name) for file in files),
            ]
            for row, files in arms
        ]
        heads = ["run", "val_loss", "compared with", "difference", "95 % interval", "results"]
        parts.append(html.table(str(folder), heads, cells, words=(0, 2, 5)))
        parts.append(html.command(f"python -m experiments.compare {folder}"))
    return text(parts or tag("p", f"There is no finished training run in {runs}."))


def _left_out(shown: list[Shown], evidence: Evidence, own: Own, runs: Path, links: Links) -> Markup:
    parts = []
    for s in shown:
        total = len(s.block.arms) * len(s.block.seeds)
        absent = [f"{arm} (seeds {', '.join(map(str, seeds))})" for arm, seeds in s.missing.items()]
        count = sum(map(len, s.missing.values()))
        done = f"Block {s.block.name}: {total - count} of {total} runs are done."
        gone = html.details(f"{count} are missing", tag("p", "; ".join(absent))) if absent else None
        bad = [tag("p", "Runs whose result is not finite: ", links.to(k.path)) for k in s.diverged]
        parts.append(tag("li", done, gone, bad))
    lists: dict[str, list[Markup]] = {
        "Outdated records, whose arm was removed or has another config now. They are not used.": [
            text(links.to(k.path), f": {k.why}") for k in evidence.outdated
        ],
        "Runs that were started here but not finished, with their last message.": [
            text(links.to(path), f": {said}") for path, said in unfinished(runs, evidence)
        ],
        "Your own runs that cannot be shown.": [text(why) for why in own.trouble],
    }
    for reason, entries in lists.items():
        inside = tag("ul", [tag("li", entry) for entry in entries]) if entries else " None."
        parts.append(tag("li", reason, inside))
    return tag("ul", parts)


def _sources(evidence: Evidence, links: Links) -> Markup:
    root = HERE.parent
    files = {
        "the papers' values, each with its source": root / "published.json",
        "the claims, contrasts and rules": root / "claims.yaml",
        "which tables are covered, and why the others are not": root / "coverage.yaml",
        "the pilot that chose the decay factors": EVIDENCE / "pilot_decay.json",
        "how blocks, tables and tiers work": root / "README.md",
    }
    listed = [tag("li", links.to(path), f": {words}") for words, path in files.items()]
    origins: dict[tuple[str, str], list[str]] = {}
    for (block, _), seeds in evidence.kept.items():
        for stored in seeds.values():
            origin = blocks.revision(stored), blocks.device(stored)
            origins.setdefault(origin, []).append(block)
    rows = [
        [revision, device, len(names), ", ".join(sorted(set(names)))]
        for (revision, device), names in sorted(origins.items())
    ]
    heads = ["revision", "device", "records", "blocks"]
    explanation = (
        "Verdicts, means and intervals are computed from records (one file per run, listed below "
        "each block) and from measured tables. A + after a revision means that the code had "
        "uncommitted changes. To repeat a run, check out its revision (git checkout REVISION) and "
        "run the command below its block or table."
    )
    return text(
        tag("p", explanation),
        tag("ul", listed),
        html.table("Records by revision and device", heads, rows, words=(0, 1, 3)),
    )
