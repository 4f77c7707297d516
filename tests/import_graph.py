"""The import graph of the tree: `python tests/import_graph.py`.

Prints, for each folder of modules, its files, the floors they stand on (a module stands one floor
above the highest that it imports) and how many imports they have; or circles, if there are any.
Lazy imports count, those for type checking do not. The layers themselves are contracts of
import-linter, in pyproject.toml.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grimp
import networkx

ROOT = Path(__file__).parents[1]
PACKAGES = ("common_kernels", "methods", "models", "experiments", "reproduce")


def imports() -> dict[str, set[str]]:
    """By module, the modules of this repository that it imports, lazily or not."""
    sys.path.insert(0, str(ROOT))
    graph = grimp.build_graph(*PACKAGES, cache_dir=None, exclude_type_checking_imports=True)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or by way of others."""
    rings = networkx.strongly_connected_components(networkx.DiGraph(graph))
    return [sorted(ring) for ring in rings if len(ring) > 1]


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """By module, how many imports the longest chain below it has; there must be no circle."""
    levels = networkx.topological_generations(networkx.DiGraph(graph).reverse())
    return {module: level for level, modules in enumerate(levels, 1) for module in modules}


def main() -> None:
    graph = imports()
    if rings := circles(graph):
        sys.exit("\n".join(f"circle: {' '.join(ring)}" for ring in rings))
    height = floors(graph)
    print(f"{'folder':<28} files  floors  imports")
    for folder in sorted({module.rpartition(".")[0] for module in graph} - {""}):
        inside = [module for module in graph if module.rpartition(".")[0] == folder]
        tall = [height[module] for module in inside]
        arrows = sum(len(graph[module]) for module in inside)
        print(f"{folder:<28} {len(inside):5}  {min(tall):2}-{max(tall):<3}  {arrows:7}")
    arrows = sum(map(len, graph.values()))
    print(f"{len(graph)} modules, {arrows} imports, {max(height.values())} floors")
    print("no circle")


if __name__ == "__main__":
    main()
