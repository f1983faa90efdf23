"""The replay buffer's file in a checkpoint. Loading an untrusted file executes no code."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from forge_env.errors import UsageError
from trainers.buffer.packed import PackedGroup

LATER = ("members", "receipts", "episodes")
"""Fields of a group that files written by earlier versions lack."""


def save_buffer(state: dict[str, Any], file: Path) -> None:
    """Write a buffer's `state_dict` as a safetensors file: the groups' bytes, and everything else as JSON metadata."""
    blocks: dict[str, NDArray[np.uint8]] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, PackedGroup):
            name = str(len(blocks))
            blocks[name] = np.frombuffer(value.data, np.uint8)
            names = ("task_id", "columns", *LATER)
            return {"group": name, **{each: getattr(value, each) for each in names}}
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    save_file(blocks, file, metadata={"state": json.dumps(plain(state))})


def load_buffer(file: Path) -> dict[str, Any]:
    """Read a file written by `save_buffer`. Step numbers, which are dictionary keys, are strings in the result.

    Raises:
        UsageError: the file is damaged.
    """

    def restore(value: Any) -> Any:
        if isinstance(value, dict) and "group" in value:
            data = blocks.get_tensor(value["group"]).tobytes()
            later = {name: tuple(value.get(name, ())) for name in LATER}
            return PackedGroup(value["task_id"], tuple(value["columns"]), data, **later)
        if isinstance(value, dict):
            return {key: restore(item) for key, item in value.items()}
        return [restore(item) for item in value] if isinstance(value, list) else value

    try:
        with safe_open(file, framework="np") as blocks:
            state: dict[str, Any] = restore(json.loads(blocks.metadata()["state"]))
    except (SafetensorError, ValueError, KeyError, TypeError, struct.error) as error:  # depends on the missing part
        raise UsageError(
            f"{file} is damaged: {error}", fix="delete this checkpoint's folder to go on from the one before"
        ) from error
    return state
