"""Adapters that let other trainers train on an environment: a module for each.

Every adapter plays episodes with `forge_env.integrations.episode`, so limits, crashes and failures of the
infrastructure count as they do in forge-env. The other package is imported when its module is.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from forge_env.errors import UsageError

__all__ = ["needs"]


@contextmanager
def needs(package: str, install: str) -> Iterator[None]:
    """Turn a missing package into a `UsageError`; its imports go inside."""
    try:
        yield
    except ModuleNotFoundError as error:
        fix = f"pip install {install}"
        raise UsageError(f"this adapter needs {package}, but there is no module {error.name!r}", fix=fix) from error
