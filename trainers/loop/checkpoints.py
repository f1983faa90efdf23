"""Checkpoints of a run: what is saved, when it counts, what is read back."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from forge_env import machine
from forge_env.errors import UsageError
from forge_env.files import write_whole, written_whole
from forge_env.run import Run
from trainers.buffer.packed import PackedGroup
from trainers.loop.trainer import TrainerHandle

ROOM_S = 5.0
"""How often the last checkpoint is tried again on a full disk; no event tells when there is room."""
BUFFER = "buffer.safetensors"


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint holds besides the trainer's state.

    Attributes:
        step: training steps done.
        state: of the order of tasks (`order`), of tasks set aside (`set_aside`), of the algorithm (`algorithm`); JSON.
        buffer: of the replay buffer: which groups are done with, and those that wait to be trained on.
    """

    step: int
    state: dict[str, Any]
    buffer: dict[str, Any]


class Checkpoints:
    """The run's checkpoints: `step-N/` folders with weights, training state, data position and replay buffer."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._root = run.folder.checkpoints
        self._keep = run.config.checkpoint.keep

    @property
    def step(self) -> int:
        """Training steps of the newest checkpoint, 0 without any."""
        folder = self.newest()
        return 0 if folder is None else int(json.loads((folder / "progress.json").read_text())["step"])

    def _all(self) -> list[Path]:
        return sorted(path.parent for path in self._root.glob("step-*/progress.json"))

    def newest(self) -> Path | None:
        """The most recent complete checkpoint."""
        found = self._all()
        return found[-1] if found else None

    def model(self) -> Path | None:
        """The newest checkpoint's Hugging Face folder, at a place where it stays while checkpoints come and go."""
        newest = self.newest()
        if newest is None:
            return None
        with written_whole(self._root / "resumed") as staging:
            staging.mkdir()
            for file in (newest / "model").iterdir():
                _link(file, staging / file.name)
        return self._root / "resumed"

    async def save(self, trainer: TrainerHandle, saved: Saved) -> Path | None:
        """Save the trainer and what goes with it.

        A full disk ends no run: a checkpoint on the way is then left out (None), and the last one waits for room.
        """
        while (folder := await self._save_where_there_is_room(trainer, saved)) is None:
            self._run.warn("the disk is full: no checkpoint can be saved. Free some space")
            if saved.step < self._run.config.grpo.steps and not self._run.stop.is_set():
                return None
            await asyncio.sleep(ROOM_S)
        return folder

    async def _save_where_there_is_room(self, trainer: TrainerHandle, saved: Saved) -> Path | None:
        newest = self.newest()  # the next one will be about as large: better not begun than torn
        size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()) if newest else 0
        if machine.free_disk_gb(self._root) * machine.GIB < size:
            return None
        try:
            return await self._save(trainer, saved)
        except Exception:  # every library words a full disk differently
            if not machine.disk_is_full(self._root):
                raise
            shutil.rmtree(self._root / f"step-{saved.step:06d}", ignore_errors=True)
            return None

    async def _save(self, trainer: TrainerHandle, saved: Saved) -> Path:
        folder = self._root / f"step-{saved.step:06d}"
        progress = folder / "progress.json"
        if progress.is_file():  # the same step of the same run: saved before, or resumed from
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        await trainer.save(str(folder))
        await asyncio.to_thread(save_buffer, saved.buffer, folder / BUFFER)
        # Written last: a checkpoint without it is not one.
        write_whole(progress, json.dumps({"step": saved.step, **saved.state}))
        for old in self._all()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return folder

    async def restore(self, trainer: TrainerHandle) -> Saved | None:
        """Load the newest checkpoint into the trainer; None where there is none."""
        folder = self.newest()
        if folder is None:
            return None
        await trainer.load(str(folder))
        progress = json.loads((folder / "progress.json").read_text())
        return Saved(int(progress.pop("step")), progress, load_buffer(folder / BUFFER))


def save_buffer(state: dict[str, Any], file: Path) -> None:
    """Write a replay buffer's state: a safetensors file of the groups' bytes, with all else as JSON in its header.

    Reading it runs no code, whoever wrote it.
    """
    blocks: dict[str, NDArray[np.uint8]] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, PackedGroup):
            name = str(len(blocks))
            blocks[name] = np.frombuffer(value.data, np.uint8)
            return {"group": name, "task_id": value.task_id, "columns": value.columns}
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    save_file(blocks, file, metadata={"state": json.dumps(plain(state))})


def load_buffer(file: Path) -> dict[str, Any]:
    """Read what `save_buffer` wrote; the numbers of steps, which are keys, come back as strings.

    Raises:
        UsageError: there is no such file, or it is damaged.
    """
    if not file.is_file():
        raise UsageError(
            f"{file.parent} was saved by an older version, whose replay buffer can't be read safely",
            fix=f"start a new run from its model: model.path={file.parent / 'model'}",
        )

    def whole(value: Any) -> Any:
        if isinstance(value, dict) and "group" in value:
            return PackedGroup(value["task_id"], tuple(value["columns"]), blocks.get_tensor(value["group"]).tobytes())
        if isinstance(value, dict):
            return {key: whole(item) for key, item in value.items()}
        return [whole(item) for item in value] if isinstance(value, list) else value

    try:
        with safe_open(file, framework="np") as blocks:
            state: dict[str, Any] = whole(json.loads(blocks.metadata()["state"]))
    except (SafetensorError, ValueError, KeyError, TypeError, struct.error) as error:  # whatever is missing
        raise UsageError(
            f"{file} is damaged: {error}", fix="delete this checkpoint's folder to go on from the one before"
        ) from error
    return state


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # a file system without hard links
        shutil.copy(file, target)
