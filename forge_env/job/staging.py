"""Models for hosts that don't see their folder: a copy in the cache, which all hosts see."""

from __future__ import annotations

import os
import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path

from forge_env.errors import ForgeError


def stage(folder: Path, cache: Path) -> Path:
    """Copy a model's folder into the cache; one that is there and has not changed since is used again.

    Args:
        folder: of the model.
        cache: that all hosts see under this path.

    Raises:
        ForgeError: there is no room, or something can't be read.
    """
    target = cache / "staged" / f"{folder.name}-{_key(folder)}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".staging-", dir=target.parent) as place:
            copied = shutil.copytree(folder, Path(place) / "model")  # what links lead to, too
            if not target.is_dir():  # nobody was faster
                os.replace(copied, target)
    except (OSError, shutil.Error) as error:
        raise ForgeError(
            f"{folder} can't be copied to {target}, where all hosts would see it: {error}",
            fix="free some space, or put the model on a file system that all hosts mount",
        ) from error
    return target


def _key(folder: Path) -> str:
    """Of its files as they are now."""
    key = blake2b(str(folder.resolve()).encode(), digest_size=8)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            key.update(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return key.hexdigest()
