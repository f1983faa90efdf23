"""Checkpoints of a run: what is saved, when it counts, what is read back."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_env import machine
from forge_env.files import write_whole, written_whole
from forge_env.run import Run
from trainers.loop.trainer import TrainerHandle

ROOM_S = 5.0
"""How often the last checkpoint is tried again on a full disk; no event tells when there is room."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint holds besides the trainer's state.

    Attributes:
        step: training steps done.
        order: of the tasks, with what a curriculum has learned.
        buffer: of the replay buffer: which groups are done with, and those that wait to be trained on.
    """

    step: int
    order: dict[str, Any]
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
        (folder / "buffer.pickle").write_bytes(pickle.dumps(saved.buffer))
        # Written last: a checkpoint without it is not one.
        write_whole(progress, json.dumps({"step": saved.step, "order": saved.order}))
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
        buffer = pickle.loads((folder / "buffer.pickle").read_bytes())
        return Saved(int(progress["step"]), progress["order"], buffer)


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # a file system without hard links
        shutil.copy(file, target)
