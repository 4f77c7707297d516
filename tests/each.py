"""Cheap cases in one test."""

import functools
import inspect
from collections.abc import Callable, Iterable


def each(names: str | tuple[str, ...], values: Iterable) -> Callable:
    """A decorator like pytest.mark.parametrize, with all values in one test; a failure names its
    values. Fixtures are made once for all of them."""
    split = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]

    def decorate(test: Callable) -> Callable:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(**fixtures):
            for value in values:
                given = dict(zip(split, (value,) if len(split) == 1 else value, strict=True))
                try:
                    test(**fixtures, **given)
                except BaseException as error:
                    error.add_note(f"with {given}")
                    raise

        left = [p for name, p in signature.parameters.items() if name not in split]
        run.__signature__ = signature.replace(parameters=left)
        return run

    return decorate
