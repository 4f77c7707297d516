"""Tables and figures, for people and as CSV, from finished runs, records and published values."""
