"""What a driver does with its command line before hydra sees it."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.errors import UserError


def take_texts(arguments: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments without those that are plain text, and these by their names.

    `NAME=TEXT`, `--NAME=TEXT` and `--NAME TEXT` give everything that follows, as it is: quotation
    marks, brackets, equals signs and line breaks are no grammar there.

    Raises:
        UserError: a text that is missing, given twice, or not UTF-8.
    """
    rest: list[str] = []
    texts: dict[str, str] = {}
    left = iter(arguments)
    for argument in left:
        key, equals, text = argument.partition("=")
        name = key.removeprefix("--")
        if name not in names or not (equals or key.startswith("--")):
            rest.append(argument)
            continue
        if not equals and (text := next(left, None)) is None:  # type: ignore[assignment]
            raise UserError(f"{key} needs a text after it: {key} TEXT, or {name}=TEXT")
        if name in texts:
            raise UserError(f"{name} is given twice; give it once")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{name} is not UTF-8 (character {error.start + 1})") from error
        texts[name] = text
    return rest, texts
