"""Rows of datasets on the Hugging Face hub, or in a folder of its layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_env.errors import ForgeError, InfrastructureError, UsageError

if TYPE_CHECKING:
    from forge_env.datasets import DatasetConfig

HUB_TIMEOUT_S = 10.0
"""Seconds for the hub to answer at all."""


def hub_rows(config: DatasetConfig, part: str | None) -> Iterator[Mapping[str, Any]]:
    """Rows of a dataset on the hub, or in a folder of the hub's layout."""
    if not Path(config.path).expanduser().is_dir():
        check_hub(config.path)
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"{config.path!r} is no file; the hub needs `datasets`", fix='pip install "forge-env[data]"'
        ) from error
    # Not found, no such configuration or split, a file that can't be read.
    failures = (OSError, ValueError, datasets.exceptions.DatasetsError, _session()[1])
    try:
        found = datasets.load_dataset(config.path, config.name, split=part or "train", streaming=config.streaming)
        if config.streaming and config.shuffle_buffer:
            found = found.shuffle(seed=config.shuffle_seed, buffer_size=config.shuffle_buffer)
    except failures as error:
        raise ForgeError(
            f"can't load dataset {config.path!r}: {first_line(error)}", fix="check path, name and splits"
        ) from error
    return _watched(found, config.path, failures)


def _watched(
    rows: Iterable[Mapping[str, Any]], path: str, failures: tuple[type[Exception], ...]
) -> Iterator[Mapping[str, Any]]:
    try:
        yield from rows
    except failures as error:
        raise InfrastructureError(f"reading dataset {path!r} failed: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error of another library says, in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


def check_hub(dataset: str) -> None:
    """Ask the hub once for an answer: its own library tries for half a minute before it says that there is none.

    Raises:
        ForgeError: it can't be reached.
    """
    try:
        from huggingface_hub import constants
    except ImportError:
        return  # the caller says what is missing
    if constants.HF_HUB_OFFLINE:
        return  # the person says so: what was downloaded before is used
    session, failure = _session()
    try:
        session.head(f"{constants.ENDPOINT}/api/datasets/{dataset}", timeout=HUB_TIMEOUT_S)
    except (OSError, failure) as error:
        raise ForgeError(
            f"can't load dataset {dataset!r}: {constants.ENDPOINT} can't be reached: {first_line(error)}",
            fix="check the network; HF_HUB_OFFLINE=1 uses what was downloaded before; a file needs neither",
        ) from error


def _session() -> tuple[Any, type[Exception]]:
    """The hub's HTTP session, and what it raises: releases of its library differ in what they speak HTTP with."""
    from huggingface_hub import get_session

    session = get_session()
    library = import_module(type(session).__module__.partition(".")[0])
    failure: type[Exception] = library.HTTPError
    return session, failure
