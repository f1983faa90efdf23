"""Checkpoints of a run: what is saved, when it counts, what is kept, what is read back.

    step-000040/
        model/                 weights, a Hugging Face folder; where adapters are trained, adapter/ instead (PEFT)
        optimizer/, state.pt   the rest of the trainer's state (`trainers.titan.checkpoint`)
        buffer.safetensors     the replay buffer with its groups
        progress.json          order of tasks, results not yet learned from, tasks set aside, the algorithm's state
        checkpoint.json        of which run and version, and size and checksum of every other file
    best -> step-000020        the one with the best held-out score
    resumed/                   the model that this session started from

A checkpoint is made under another name (`.partial`), its files are on the disk before it is renamed, and nothing is
removed before that: whatever ends the process in between, every `step-N` is whole. Reading one runs no code.

The trainer copies its state and goes on; files are written beside the next steps, one checkpoint at a time. Where that
fails, a warning says so and the next one is tried; only the last checkpoint of a session can fail a run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forge_env
from forge_env import machine
from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from forge_env.files import written_whole
from forge_env.reading import ANYWHERE, LARGEST_TABLE, UnsafeFileError, open_file, read_text, regular_files
from forge_env.redaction import redact_settings
from forge_env.run import Run
from forge_env.schema import with_schema, without_schema
from trainers.buffer.saved import load_buffer, save_buffer
from trainers.loop.trainer import TrainerHandle
from trainers.model.adapter import FOLDER as ADAPTER
from trainers.model.adapter import check_base

ROOM_S = 5.0
"""How often the last checkpoint is tried again on a full disk; no event tells when there is room."""
BUFFER = "buffer.safetensors"
PROGRESS = "progress.json"
MANIFEST = "checkpoint.json"
BEST = "best"
SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "tie_word_embeddings"),
)
"""What makes a model another model, in its config.json."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint holds besides the trainer's state.

    Attributes:
        step: training steps done.
        state: of everything around the trainer but the buffer; JSON.
        buffer: of the replay buffer: which groups are done with, and those that wait to be trained on.
    """

    step: int
    state: dict[str, Any]
    buffer: dict[str, Any]


class _NoRoomError(Exception):
    """The disk was full when writing failed."""


class Checkpoints:
    """The run's checkpoints: saved, pruned, verified, restored."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._section = run.config.checkpoint
        self._writing: asyncio.Task[None] | None = None
        self._began_at = 0.0

    @property
    def _root(self) -> Path:
        return self._run.folder.checkpoints

    # --- which there are

    @property
    def step(self) -> int:
        """Training steps of the newest checkpoint, 0 without any."""
        folder = self.newest()
        return 0 if folder is None else _step(folder)

    def all(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(
            (path.parent for path in self._root.glob(f"step-*/{MANIFEST}") if _is_step(path.parent)), key=_step
        )

    def newest(self) -> Path | None:
        """The most recent one."""
        return next(reversed(self.all()), None)

    def best(self) -> list[Path]:
        """Those with the best held-out scores, best first; of equal ones the later."""
        split = self._run.config.evaluation.split
        scores = {item.step: item.score for item in self._run.state.evaluations if item.split == split}
        scored = [folder for folder in self.all() if _step(folder) in scores]
        return sorted(scored, key=lambda folder: (scores[_step(folder)], _step(folder)), reverse=True)

    def model(self) -> Path | None:
        """The newest checkpoint's Hugging Face folder, at a place where it stays while checkpoints come and go."""
        newest = self.newest()
        if newest is None:
            return None
        with written_whole(self._root / "resumed") as staging:
            staging.mkdir()
            for file in regular_files(newest / "model", newest):
                _link(Path(file.path), staging / file.name)
        return self._root / "resumed"

    # --- a session begins

    def tidy(self) -> None:
        """Remove what was left half-written; the run's folder is held, so nobody is writing it any more."""
        for left in sorted(self._root.glob("*.partial")):
            if left.is_symlink():
                left.unlink()
                continue
            self._run.note(f"{left.name.split('.')[0]} was not written to its end, so it is left out")
            shutil.rmtree(left, ignore_errors=True)

    def start_clock(self) -> None:
        """From now on time counts for `checkpoint.minutes`."""
        self._began_at = asyncio.get_running_loop().time()

    def verify(self, initial_model: Path | None = None) -> Path | None:
        """The newest checkpoint, once every byte of it is known to be what was written; None where there is none.

        Args:
            initial_model: the folder that the recipe's `model.path` names; None where the model is built here.

        Raises:
            UsageError: it is damaged, or of another version, recipe or model; names it, and the one before.
        """
        self._refuse_older_versions()
        newest = self.newest()
        if newest is None:
            return None
        manifest = self._manifest(newest)
        if problem := _damage(newest, manifest.get("files", {})):
            raise UsageError(f"{newest} is damaged: {problem}", fix=self._instead(newest))
        if different := differences(manifest["recipe"], self._run.config):
            raise UsageError(
                f"{newest} was saved by another recipe: {'; '.join(different)}",
                fix=f"resume with the run's own config.yaml, or {self._instead(newest)}",
            )
        if self._run.config.lora is not None:
            if initial_model is not None:
                check_base(newest / ADAPTER, initial_model)
        elif initial_model is not None and (changed := _other_shape(newest / "model", initial_model)):
            raise UsageError(
                f"{newest} is of another model than {initial_model}: {changed}",
                fix=f"resume with the run's own config.yaml, or {self._instead(newest)}",
            )
        if (version := manifest.get("forge_env")) != forge_env.__version__:
            self._run.warn(f"{newest.name} was saved by forge-env {version}; this is {forge_env.__version__}")
        return newest

    def _refuse_older_versions(self) -> None:
        folders = [path for path in self._root.glob("step-*") if _is_step(path)]
        last = max(folders, key=_step, default=None)
        if last is not None and not (last / MANIFEST).is_file():
            raise UsageError(
                f"{last} has no {MANIFEST}: it is damaged, or was saved by an older version", fix=self._instead(last)
            )

    def _manifest(self, folder: Path) -> dict[str, Any]:
        try:
            data = json.loads(read_text(folder / MANIFEST))
            manifest = without_schema(data, str(folder / MANIFEST))
            if not isinstance(manifest["recipe"], dict) or not isinstance(manifest["files"], dict):
                raise TypeError("recipe or files")
        except UsageError as error:
            raise UsageError(error.message, fix=f"{error.fix}, or {self._instead(folder)}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{folder / MANIFEST} is damaged: {error}", fix=self._instead(folder)) from error
        return manifest

    def _instead(self, folder: Path) -> str:
        """What there is besides a checkpoint that can't be used."""
        before = [other for other in self.all() if _step(other) < _step(folder)]
        if before:
            return f"delete {folder} to continue with --resume from {before[-1].name}, the one before"
        if any((folder / "model").glob("*.safetensors")):
            return f"there is none before it; start a new run from its model: model.path={folder / 'model'}"
        return "there is none before it: start a new run"

    async def restore(self, trainer: TrainerHandle) -> Saved | None:
        """Load the newest checkpoint into the trainer; None where there is none."""
        folder = self.newest()
        if folder is None:
            return None
        await trainer.load(str(folder))
        progress = json.loads(read_text(folder / PROGRESS, largest=LARGEST_TABLE))
        return Saved(int(progress.pop("step")), progress, load_buffer(folder / BUFFER))

    # --- saving

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be saved after this step, for its number or for the time."""
        section = self._section
        if section.every and step % section.every == 0:
            return True
        if section.keep_best and self._run.config.evaluation.every and step % self._run.config.evaluation.every == 0:
            return True  # which of those that are scored is the best is known when they are gone
        return bool(section.minutes) and asyncio.get_running_loop().time() - self._began_at >= section.minutes * 60

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._writing is not None and not self._writing.done()

    async def settled(self) -> None:
        """Wait until what is being written is on the disk, or has failed."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def begin(self, trainer: TrainerHandle, saved: Saved) -> None:
        """Save beside training: returns when the trainer has copied its state. What fails is a warning.

        One at a time: the caller asks for none while another is being written.
        """
        self.start_clock()
        self._run.check_folder()
        if self._is_there(saved.step):
            return
        if not self._has_room():
            self._run.warn(_FULL)
            return
        copied = asyncio.Event()
        self._writing = asyncio.create_task(self._write_beside(trainer, saved, copied), name="checkpoint")
        await copied.wait()

    async def _write_beside(self, trainer: TrainerHandle, saved: Saved, copied: asyncio.Event) -> None:
        try:
            await self._write(trainer, saved, copied)
        except _NoRoomError:
            self._run.warn(_FULL)
        except Exception as error:  # boundary of a task
            logger.exception("step %d could not be saved", saved.step)
            self._run.warn(f"a checkpoint could not be saved, the next one is tried: {_reason(error)}")
        finally:
            copied.set()

    async def save(self, trainer: TrainerHandle, saved: Saved, *, patient: bool = True) -> Path | None:
        """Save, and wait until it is done: the last one of a session. On a full disk a patient caller waits for room.

        Raises:
            Exception: whatever went wrong, for another reason than room.
        """
        await self.settled()
        while True:
            self._run.check_folder()
            if self._is_there(saved.step):
                return self._folder(saved.step)
            if self._has_room():
                try:
                    return await self._write(trainer, saved, asyncio.Event())
                except _NoRoomError:
                    pass
                except Exception:  # of any library: the folder was removed meanwhile, or it can't be saved
                    if self._run.check_folder():
                        raise
                    continue
            self._run.warn(_FULL)
            if not patient:
                return None
            await asyncio.sleep(ROOM_S)

    def _folder(self, step: int) -> Path:
        return self._root / f"step-{step:06d}"

    def _is_there(self, step: int) -> bool:
        """The same step of the same run: saved before, or resumed from."""
        return (self._folder(step) / MANIFEST).is_file()

    def _has_room(self) -> bool:
        """Whether one as large as the newest would fit: better not begun than given up."""
        newest = self.newest()
        size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()) if newest else 0
        return machine.free_disk_gb(self._root) * machine.GIB >= size and not machine.is_out_of_inodes(self._root)

    async def _write(self, trainer: TrainerHandle, saved: Saved, copied: asyncio.Event) -> Path:
        """Write a checkpoint; `copied` is set when training may go on."""
        folder, started = self._folder(saved.step), time.perf_counter()
        with written_whole(folder) as staging:
            try:
                staging.mkdir()
                writing = await trainer.begin_save(str(staging))
                copied.set()
                times = await writing
                size = await asyncio.to_thread(self._complete, staging, saved)
            except Exception as error:  # every library words a full disk differently
                if machine.disk_is_full(self._root):  # asked now: what was written makes room when it is removed
                    raise _NoRoomError from error
                raise
        await asyncio.to_thread(_sync, self._root)
        seconds = time.perf_counter() - started
        logger.info("step %d saved: %.1f MiB in %.2f s %s", saved.step, size / 2**20, seconds, times)
        self._run.saved(saved.step)
        self.prune()
        return folder

    def _complete(self, staging: Path, saved: Saved) -> int:
        """Add what isn't the trainer's, and get it all on the disk; bytes."""
        save_buffer(saved.buffer, staging / BUFFER)
        (staging / PROGRESS).write_text(json.dumps({"step": saved.step, **saved.state}), encoding="utf-8")
        files = {str(path.relative_to(staging)): path for path in sorted(staging.rglob("*")) if path.is_file()}
        sums = {name: _sealed(path) for name, path in files.items()}
        manifest = {
            "step": saved.step,
            "forge_env": forge_env.__version__,
            "recipe": redact_settings(self._run.config.model_dump(mode="json")),
            "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sums.items()},
        }
        (staging / MANIFEST).write_text(json.dumps(with_schema(manifest)), encoding="utf-8")
        _sealed(staging / MANIFEST)
        for inner in (*(path for path in staging.rglob("*") if path.is_dir()), staging):
            _sync(inner)
        return sum(size for size, _ in sums.values())

    def prune(self) -> None:
        """Keep the newest and the best; call it when there is a new checkpoint or a new score."""
        best = self.best()[: self._section.keep_best]
        newest = self.all()[-self._section.keep :]
        unscored = self._under_evaluation()
        for folder in self.all():
            if folder not in newest and folder not in best and _step(folder) != unscored:
                # renamed first: half of a checkpoint must not look like one
                leaving = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
                with suppress(OSError):
                    folder.rename(leaving)
                    shutil.rmtree(leaving, ignore_errors=True)
        with suppress(OSError):
            self._point_at(best[0] if best else None)

    def _under_evaluation(self) -> int | None:
        """The step whose score is still to come: the last one that is evaluated."""
        every, split = self._run.config.evaluation.every, self._run.config.evaluation.split
        if not self._section.keep_best or not every:
            return None
        step = self.step // every * every
        scored = any(item.step == step and item.split == split for item in self._run.state.evaluations)
        return None if scored else step

    def _point_at(self, best: Path | None) -> None:
        link = self._root / BEST
        if best is None:
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or os.readlink(link) != best.name:
            staging = link.with_name(f"{BEST}.partial")
            staging.unlink(missing_ok=True)
            staging.symlink_to(best.name)
            staging.replace(link)


_FULL = "the disk is full: no checkpoint can be saved. Free some space (df -h, df -i)"


def _is_step(folder: Path) -> bool:
    return folder.is_dir() and folder.name.removeprefix("step-").isdigit()


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _sealed(path: Path) -> tuple[int, str]:
    """Size and checksum of a file, which is on the disk from here on."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, digest


def _sync(folder: Path) -> None:
    """Get the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damage(folder: Path, files: dict[str, Any]) -> str | None:
    """What is wrong with a checkpoint's files, if anything is."""
    for name, written in files.items():
        try:
            with open_file(folder / name, root=folder) as file:
                if (size := os.fstat(file.fileno()).st_size) != written["bytes"]:
                    return f"{name} has {size} bytes, {written['bytes']} were written"
        except FileNotFoundError:
            return f"{name} is missing"
        except UnsafeFileError as error:
            return error.message
    for name, written in files.items():
        with open_file(folder / name, root=folder) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != written["sha256"]:
                return f"{name} holds other bytes than were written"
    return next((f"{name} is missing" for name in (PROGRESS, BUFFER) if name not in files), None)


def _identity(recipe: dict[str, Any]) -> dict[str, Any]:
    """What a run can't change on the way: the state that is saved would mean something else."""
    model, optimizer = recipe.get("model", {}), recipe.get("trainer", {}).get("optimizer", {})
    built = model.get("path") == "tiny"
    return {
        "method": recipe.get("method"),
        "seed": recipe.get("seed"),
        "environment.name": recipe.get("environment", {}).get("name"),
        "tasks.order": recipe.get("tasks", {}).get("order"),
        "lora": recipe.get("lora"),
        "model.renderer": model.get("renderer"),
        "model.path=tiny": built,
        "model.tiny": model.get("tiny") if built else None,
        "trainer.optimizer.muon_lr above 0": (optimizer.get("muon_lr") or 0) > 0,
    }


def differences(saved: dict[str, Any], config: RunConfig) -> list[str]:
    """Why a checkpoint of one recipe can't be continued by another, as `key: old -> new`."""
    before, after = _identity(saved), _identity(config.model_dump(mode="json"))
    return [
        f"{key}: {json.dumps(before[key])} -> {json.dumps(after[key])}" for key in after if before[key] != after[key]
    ]


def _other_shape(saved: Path, other: Path) -> str:
    """How two models' shapes differ, in words; empty where they don't."""
    one, two = (json.loads(read_text(folder / "config.json", root=ANYWHERE)) for folder in (saved, other))
    return "; ".join(f"{key}: {one.get(key)} -> {two.get(key)}" for key in SHAPE if one.get(key) != two.get(key))


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # a file system without hard links
        shutil.copy(file, target)
