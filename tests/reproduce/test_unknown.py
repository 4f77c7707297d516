"""Settings that neither a paper nor its authors' code gives, or that they give differently: the
header of each full tier names them."""

import re

import pytest

from reproduce.render.table import render
from reproduce.specs.table import read_tables

# What no source gives, by table. Known in full: ().
WMT14 = "Steps, batch, vocabulary, averaging and search .* The paper's own are not known"
SR_STE = r"factor 2e-4 of its own code \(that of .* not (known|confirmed)\)"
FLIPS = "which number is which, the model and the curves were not seen"
CRAMMING = "an extract of the paper says 512", "subset of C4 is not published"
FACTORS = "code of May 2024 has those of 774M and 1558M the other way round"
AVERAGES = "which metrics the paper's averages take is not known"
DEIT = "own settings for DeiT were not seen"
SCHEDULE = "does not say where its schedule ends"
LAYER = "which is in which|how the parts are divided between them, shapes and values were not seen"
SIZES = "Settings of the other sizes were not published"
OPT = "[Nn]o training of (OPT|it) was published"
MASKS = "prints no period for the choice of masks"
HARNESS = "version of lm-eval"
SILENT = "where the paper is silent", "present versions of the tasks"
RANDOM = "as in the authors' code; the paper says random"
BATCH = "paper's batch (and length are|is) not known"
CURVES = "no values were seen"
UNKNOWN = {
    "fst_table1": (WMT14, "which decay factors is not known"),
    "fst_table2": ("gives 774M and 1558M the other way round", "BERT's recipe has no warm-up"),
    "fst_table3": ("shapes and values were not seen",),
    "fst_table4": ("shapes and values were not seen",),
    "fst_table5": (*CRAMMING, AVERAGES, "in the paper not confirmed"),
    "fst_table6": (FACTORS, AVERAGES),
    "fst_table7": (FACTORS,),
    "fst_table8": ("other sizes are not known", SR_STE),
    "fst_table9": (WMT14, "which rows and columns the paper prints is not known"),
    "fst_table10": (*CRAMMING, AVERAGES, "Which combinations the paper prints is not known"),
    "fst_table11": ("of the table only its subject is known",),
    "fst_table12": (LAYER,),
    "fst_table13": (LAYER,),
    "fst_figure1": (WMT14, FLIPS, SR_STE),
    "fst_figure2": (FLIPS,),
    "fst_figure3": (WMT14, FLIPS, "What the figure has is not known"),
    "fst_figure4": (WMT14, FLIPS),
    "fst_figure5": (WMT14, FLIPS),
    "fst_figure7": (),
    "sste_table1": (WMT14, "which values of gamma is not known"),
    "sste_table2": (WMT14,),
    "sste_table3": (SCHEDULE,),
    "sste_table4": (WMT14,),
    "sste_table5": (DEIT, SR_STE),
    "sste_table6": (SR_STE, AVERAGES),
    "sste_table7": ("the size is not known", "paper's hard variant has is not known", AVERAGES),
    "sste_table8": (DEIT, "Which combinations the paper prints is not known"),
    "sste_table9": ("caption, rows and cells were not seen", SR_STE),
    "sste_table10": ("Which shapes the quoted numbers belong to is not known",),
    "sste_table11": ("Which precision and card the quoted numbers belong to is not known",),
    "sste_table12": ("no value was seen", "own steps are not known"),
    "sste_figure1": (SCHEDULE, "which rows the figure has is not known"),
    "sste_figure2": (SCHEDULE, "the two statements differ"),
    "sste_figure4": (WMT14, "which beta is not known", SR_STE),
    "ast_table1": (SIZES, OPT, MASKS, "gives no schedule", "Nor does it say on which text"),
    "ast_table2": (HARNESS, "kind of accuracy", MASKS),
    "ast_table3": (HARNESS, "inferred from the paper's dense value", "which the paper took", MASKS),
    "ast_table4": (SIZES, OPT, MASKS, "more steps, how many is not known"),
    "ast_table5": (SIZES, OPT, MASKS, "weights of the layer losses were not published"),
    "ast_table6": ("precision and batch were not seen",),
    "ast_figure2": (SIZES,),
    "slope_table1": (BATCH,),
    "slope_table2": (),
    "slope_table3": SILENT,
    "slope_table4": ("63, 100 or 163, and which made the table is not known",),
    "slope_table5": (RANDOM,),
    "slope_table6": (BATCH,),
    "slope_table7": (BATCH,),
    "slope_table8": (RANDOM,),
    "slope_tableB1": ("period of the search is not known",),
    "slope_tableB2": (RANDOM, "scripts differ, see Table 4"),
    "slope_tableB3": (BATCH, "headings of the paper's last columns are damaged"),
    "slope_tableB4": ("Table 3, whose header says what is not known",),
    "slope_tableB5": ("Table 3, whose header says", "That of MRPC and QQP is not known"),
    "slope_figure2": ("ranks of GPT2-Large are not known", "Table 3's header says what else"),
    "slope_figure3": ("read off the plot",),
    "slope_figure4": ("no other values were seen", "How the paper rounds is not known"),
    "slope_figureB1": (CURVES, "With which mask the paper compares, and of which model"),
    "slope_figureB2": ("read off the plot",),
    "slope_figureB3": (CURVES,),
    "slope_figureB4": (),
    "slope_figureB5": (CURVES,),
    "slope_figureB6": (CURVES, "Which widths the paper takes, and what training, is not known"),
    "torchao_table1": ("1,024 images a step, which the study does not give",),
    "torchao_table2": (),
    "torchao_table3": (),
    "torchao_table4": (),
    "torchao_table5": (),
}
TABLES = {
    table.name: table
    for table in read_tables()
    if table.paper and not table.tiers["full"].unavailable
}


def test_every_full_tier_was_looked_at():
    assert UNKNOWN.keys() == TABLES.keys()


@pytest.mark.parametrize("name", TABLES)
def test_the_header_names_what_is_not_known(name):
    header = " ".join(render(TABLES[name], "full", []).header)
    missing = [told for told in UNKNOWN[name] if not re.search(told, header)]
    assert not missing
