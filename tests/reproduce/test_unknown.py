"""Settings that neither a paper nor its authors' code gives, or that they give differently: the
header of each full tier names them."""

import re

from reproduce.render.table import render
from reproduce.specs.table import read_tables

UNKNOWN = r"not (known|confirmed|seen|published|give)|were not seen"
RANDOM = "as in the authors' code; the paper says random"
READ_OFF = "read off the plot"
# What is told in other words, by table; "" if everything is known.
OTHER = {
    "ast_table2": "prints no period for the choice of masks",
    "fst_table2": "gives 774M and 1558M the other way round",
    "fst_table7": "code of May 2024 has those of 774M and 1558M the other way round",
    "fst_table11": "of the table only its subject is known",
    "slope_figure3": READ_OFF,
    "slope_figureB2": READ_OFF,
    "slope_figureB3": "no values were seen",
    "slope_figureB5": "no values were seen",
    "slope_table3": "where the paper is silent",
    "slope_table5": RANDOM,
    "slope_table8": RANDOM,
    "slope_tableB2": RANDOM,
    "sste_table3": "does not say where its schedule ends",
    "sste_figure2": "the two statements differ",
    **dict.fromkeys(["fst_figure7", "slope_table2", "slope_figureB4"], ""),
    **dict.fromkeys([f"torchao_table{n}" for n in range(2, 6)], ""),
}


def test_the_header_names_what_is_not_known():
    tables = {table.name: table for table in read_tables() if table.paper}
    assert OTHER.keys() <= tables.keys()
    for name, table in tables.items():
        if not table.tiers["full"].unavailable:
            header = " ".join(render(table, "full", []).header)
            assert re.search(OTHER.get(name, UNKNOWN), header), name
