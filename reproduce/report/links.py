"""Makes links from the page to the files that its numbers come from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePath

from reproduce.report.html import Markup, tag

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Links:
    """Makes relative links. page: the folder that the page is written to."""

    page: Path

    def to(self, path: Path, words: str | None = None) -> Markup:
        """A link to a file; its text is the path in the repository, unless `words` are given."""
        href = PurePath(os.path.relpath(path.resolve(), self.page.resolve())).as_posix()
        return tag("a", words or name(path), href=href, data_source=True)


def name(path: Path) -> str:
    """A path relative to the repository; a path outside of it is unchanged."""
    resolved = path.resolve()
    return (resolved.relative_to(ROOT) if resolved.is_relative_to(ROOT) else path).as_posix()
