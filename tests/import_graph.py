"""The import graph of the tree: `python tests/import_graph.py`.

Prints, for each folder of modules, its files, the floors they stand on (a module stands one floor
above the highest that it imports) and how many imports they have; then circles, lazy imports
counted in, those for type checking left out. The layers themselves are contracts of import-linter,
in pyproject.toml.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGES = ("common_kernels", "methods", "models", "experiments", "reproduce")


def imports() -> dict[str, set[str]]:
    """By module, the modules of this repository that it imports, lazily or not."""
    sys.path.insert(0, str(ROOT))
    graph = grimp.build_graph(*PACKAGES, cache_dir=None, exclude_type_checking_imports=True)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or by way of others."""

    @cache
    def below(module: str) -> frozenset[str]:
        seen: set[str] = set()
        left = [module]
        while left:
            for other in graph[left.pop()] - seen:
                seen.add(other)
                left.append(other)
        return frozenset(seen)

    found: dict[frozenset[str], list[str]] = {}
    for module in graph:
        if module in below(module):
            ring = frozenset(m for m in below(module) if module in below(m))
            found[ring] = sorted(ring)
    return list(found.values())


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """By module, how many imports the longest chain below it has; in a circle, its lowest floor."""
    found: dict[str, int] = {}

    def floor(module: str, above: frozenset[str]) -> int:
        if module not in found:
            lower = [floor(m, above | {module}) for m in graph[module] if m not in above]
            found[module] = 1 + max(lower, default=0)
        return found[module]

    for module in graph:
        floor(module, frozenset())
    return found


def main() -> None:
    graph = imports()
    height = floors(graph)
    print(f"{'folder':<28} files  floors  imports")
    for folder in sorted({module.rpartition(".")[0] for module in graph} - {""}):
        inside = [module for module in graph if module.rpartition(".")[0] == folder]
        tall = [height[module] for module in inside]
        arrows = sum(len(graph[module]) for module in inside)
        print(f"{folder:<28} {len(inside):5}  {min(tall):2}-{max(tall):<3}  {arrows:7}")
    arrows = sum(map(len, graph.values()))
    print(f"{len(graph)} modules, {arrows} imports, {max(height.values())} floors")
    rings = circles(graph)
    print("no circle" if not rings else "\n".join(f"circle: {' '.join(ring)}" for ring in rings))


if __name__ == "__main__":
    main()
