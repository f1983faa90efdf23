"""Copies of models in the cache, which all hosts see, for hosts that don't see the model's folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path

from forge_env.errors import ForgeError


def stage(folder: Path, cache: Path) -> Path:
    """Copy a model's folder into the cache; a copy of an unchanged folder is reused.

    Args:
        cache: a folder that all hosts see under this path.

    Raises:
        ForgeError: there is not enough disk space, or something can't be read.
    """
    target = cache / "staged" / f"{folder.name}-{_key(folder)}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".staging-", dir=target.parent) as staging:
            copied = shutil.copytree(folder, Path(staging) / "model")  # follows symlinks
            if not target.is_dir():  # no other process was faster
                os.replace(copied, target)
    except (OSError, shutil.Error) as error:
        raise ForgeError(
            f"{folder} can't be copied to {target}, which all hosts share: {error}",
            fix="free some space, or put the model on a file system that all hosts mount",
        ) from error
    return target


def _key(folder: Path) -> str:
    """Return a digest of the names, sizes and modification times of the folder's files."""
    key = blake2b(str(folder.resolve()).encode(), digest_size=8)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            key.update(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return key.hexdigest()
