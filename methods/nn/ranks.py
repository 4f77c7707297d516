"""Choices that all ranks of a process group must make alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def of_rank_0(choose: Callable[[], Any]) -> Any:
    """Return on every rank what `choose` returns, or raises, on rank 0."""
    if not dist.is_initialized():
        return choose()
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [choose()]
        except (ValueError, RuntimeError) as error:  # the others wait for it
            found = [error]
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
