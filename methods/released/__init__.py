"""Methods as their authors' code runs them where that code has a defect: evidence, not advice.

Each file changes its method by one defect and says where the defect stands; the tests show the
defect and that all else is the method, bit for bit. `reproduce/claims.yaml` lists which arm of a
block has one of them. By name they are `released.<file>`, `method=released/<file>` on a command
line, and no list of methods to choose from has them. They are code that a run finds by the name in
its config, so they cannot lie in `reproduce/`, which no layer below it may import.
"""
