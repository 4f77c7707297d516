"""Downloads checkpoints and data sets from the Hugging Face hub. Both are named `owner/name`, or
`owner/name@revision` with a commit, branch or tag."""

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from experiments.support.errors import UserError


def download(source: str, patterns: Iterable[str], key: str) -> Path:
    """Download the files of `source`, the value of the setting `key`, that match `patterns`, and
    return the snapshot's folder in the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    hub_id, _, revision = source.partition("@")
    try:
        folder = snapshot_download(hub_id, revision=revision or None, allow_patterns=list(patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise UserError(
            f"{key}={source} is neither a local folder nor a checkpoint that can be had from "
            f"the hub ({type(error).__name__})"
        ) from error
    return Path(folder)


def commit(folder: Path) -> str | None:
    """The commit of the snapshot in `folder`; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


@functools.cache
def pinned(source: str) -> str:
    """A path `hf://datasets/owner/name/...` at its newest commit, or at that of its revision, which
    stays the same in this process. Any other path as it is."""
    found = re.fullmatch(r"hf://datasets/([^/]+/[^/@]+)(?:@([^/]+))?(/.*)?", source)
    if found is None:
        return source
    from huggingface_hub import HfApi

    hub_id, revision, path = found.groups()
    sha = HfApi().dataset_info(hub_id, revision=revision and unquote(revision)).sha
    return f"hf://datasets/{hub_id}@{sha}{path or ''}"


def commits(urls: Iterable[str]) -> list[str]:
    """The commits in URLs of the hub's files, sorted."""
    return sorted({commit for url in urls for commit in re.findall(r"^hf://.*?@(\w{40})\b", url)})


def load_dataset(hub_id: str, config: str | None, revision: str | None) -> Any:
    """A data set of the hub with all its splits, in its newest revision unless one is given."""
    import datasets

    try:
        return datasets.load_dataset(hub_id, config, revision=revision)
    except (OSError, ValueError) as error:  # bases of its errors, offline or not
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"data.source={hub_id} is neither a local folder nor a data set that can be downloaded "
            f"from the hub: {reason}"
        ) from error
