"""Checkpoints of a run: their files, atomic saving, pruning, verification and restoring.

    step-000040/
        model/                 weights, a Hugging Face folder; when training adapters, adapter/ instead (PEFT)
        optimizer/, state.pt   the rest of the trainer's state (`trainers.titan.checkpoint`)
        buffer.safetensors     the replay buffer with its groups
        progress.json          order of tasks, results not yet learned from, tasks set aside, the algorithm's state
        checkpoint.json        recipe and forge-env version, and size and checksum of every other file
    best -> step-000020        the checkpoint with the best held-out score
    resumed/                   the model that this session started from

A checkpoint is written under a temporary name (`.partial`), synced to disk, and then renamed; older checkpoints are
removed only after that. So every `step-N` is complete, even if the process is killed at any moment. Reading a
checkpoint runs no code.

The trainer copies its state and continues; files are written during the next steps, one checkpoint at a time. A failure
to save is logged as a warning and the next checkpoint is tried; only the last checkpoint of a session can fail a run.
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
from forge_env.reading import ANYWHERE, LARGEST_TABLE, UnsafeFileError, open_file, read_json, regular_files
from forge_env.redaction import redact_settings
from forge_env.run import Run
from forge_env.schema import with_schema, without_schema
from trainers.buffer.packed import load_buffer, save_buffer
from trainers.loop.trainer import TrainerHandle
from trainers.model.adapter import FOLDER as ADAPTER
from trainers.model.adapter import check_base

ROOM_S = 5.0
"""Seconds between attempts to save the last checkpoint on a full disk; no event signals free space."""
BUFFER = "buffer.safetensors"
PROGRESS = "progress.json"
MANIFEST = "checkpoint.json"
BEST = "best"
SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "tie_word_embeddings"),
)
"""Keys of config.json that must agree for two models to have the same shape."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Saved:
    """State in a checkpoint besides the trainer's.

    Attributes:
        state: state of everything else except the buffer, as JSON.
        buffer: state of the replay buffer: which groups are finished, and the groups that wait to be trained on.
    """

    step: int
    state: dict[str, Any]
    buffer: dict[str, Any]


def saved_in(root: Path) -> dict[int, Path]:
    """Complete checkpoints in a folder by their step, oldest first."""
    folders = (path.parent for path in root.glob(f"step-*/{MANIFEST}") if _is_step(path.parent))
    return dict(sorted((_step(folder), folder) for folder in folders))


class _NoRoomError(Exception):
    """Writing a checkpoint failed because the disk is full."""


class Checkpoints:
    """Saves, prunes, verifies and restores the checkpoints of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._section = run.config.checkpoint
        self._writing: asyncio.Task[None] | None = None
        self._began_at = 0.0

    @property
    def _root(self) -> Path:
        return self._run.folder.checkpoints

    # --- existing checkpoints

    @property
    def step(self) -> int:
        """Training step of the newest checkpoint; 0 without one."""
        folder = self.newest()
        return 0 if folder is None else _step(folder)

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return list(saved_in(self._root).values())

    def newest(self) -> Path | None:
        """The newest checkpoint; None without one."""
        return next(reversed(self.all()), None)

    def best(self) -> list[Path]:
        """Scored checkpoints by held-out score, best first; of equal scores, the later one first."""
        split = self._run.config.evaluation.split
        scores = {item.step: item.score for item in self._run.state.evaluations if item.split == split}
        scored = [folder for folder in self.all() if _step(folder) in scores]
        return sorted(scored, key=lambda folder: (scores[_step(folder)], _step(folder)), reverse=True)

    def model(self) -> Path | None:
        """Link or copy the newest checkpoint's Hugging Face folder to `resumed/`, which pruning leaves alone."""
        newest = self.newest()
        if newest is None:
            return None
        with written_whole(self._root / "resumed") as staging:
            staging.mkdir()
            for file in regular_files(newest / "model", newest):
                _link(Path(file.path), staging / file.name)
        return self._root / "resumed"

    # --- start of a session

    def tidy(self) -> None:
        """Remove incomplete checkpoints. The run's folder is locked, so no other process is writing them."""
        for partial in sorted(self._root.glob("*.partial")):
            if partial.is_symlink():
                partial.unlink()
                continue
            self._run.note(f"{partial.name.split('.')[0]} is incomplete and was removed")
            shutil.rmtree(partial, ignore_errors=True)

    def start_clock(self) -> None:
        """Start, or restart, the interval of `checkpoint.minutes`."""
        self._began_at = asyncio.get_running_loop().time()

    def verify(self, initial_model: Path | None = None) -> Path | None:
        """Return the newest checkpoint after comparing all its files with their checksums; None without a checkpoint.

        Args:
            initial_model: the folder of the recipe's `model.path`; None if the model is built by the run.

        Raises:
            UsageError: it is damaged, or has another version, recipe or model; the message names it and the one before.
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
                f"{newest} was saved with another recipe: {'; '.join(different)}",
                fix=f"resume with the run's own config.yaml, or {self._instead(newest)}",
            )
        if self._run.config.lora is not None:
            if initial_model is not None:
                check_base(newest / ADAPTER, initial_model)
        elif initial_model is not None and (changed := _other_shape(newest / "model", initial_model)):
            raise UsageError(
                f"{newest} was trained from another model than {initial_model}: {changed}",
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
            data = read_json(folder / MANIFEST)
            manifest = without_schema(data, str(folder / MANIFEST))
            if not isinstance(manifest["recipe"], dict) or not isinstance(manifest["files"], dict):
                raise TypeError("recipe or files")
        except UsageError as error:
            raise UsageError(error.message, fix=f"{error.fix}, or {self._instead(folder)}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{folder / MANIFEST} is damaged: {error}", fix=self._instead(folder)) from error
        return manifest

    def _instead(self, folder: Path) -> str:
        """Suggest an alternative to a checkpoint that can't be used."""
        before = [other for other in self.all() if _step(other) < _step(folder)]
        if before:
            return f"delete {folder} to continue with --resume from {before[-1].name}, the previous one"
        if any((folder / "model").glob("*.safetensors")):
            return f"there is no earlier one; start a new run from its model: model.path={folder / 'model'}"
        return "there is no earlier one: start a new run"

    async def restore(self, trainer: TrainerHandle) -> Saved | None:
        """Load the newest checkpoint into the trainer and return the other state; None without a checkpoint."""
        folder = self.newest()
        if folder is None:
            return None
        await trainer.load(str(folder))
        progress = read_json(folder / PROGRESS, largest=LARGEST_TABLE)
        return Saved(int(progress.pop("step")), progress, load_buffer(folder / BUFFER))

    # --- saving

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step, by step number or elapsed time."""
        section = self._section
        if section.every and step % section.every == 0:
            return True
        if section.keep_best and self._run.config.evaluation.every and step % self._run.config.evaluation.every == 0:
            return True  # the best step is known only after its score, too late to save it
        return bool(section.minutes) and asyncio.get_running_loop().time() - self._began_at >= section.minutes * 60

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    async def settled(self) -> None:
        """Wait until the checkpoint that is being written is complete or has failed."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def begin(self, trainer: TrainerHandle, saved: Saved) -> None:
        """Save concurrently with training: return when the trainer has copied its state. Failures become warnings.

        The caller must not begin a checkpoint while another one is being written (`busy`).
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
            reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
            self._run.warn(f"a checkpoint could not be saved; the next one will be tried: {reason}")
        finally:
            copied.set()

    async def save(self, trainer: TrainerHandle, saved: Saved, *, patient: bool = True) -> Path | None:
        """Save the last checkpoint of a session and wait until it is complete.

        On a full disk, wait for free space if `patient`, else return None.
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
                except Exception:  # from any library; retry if the folder was removed meanwhile
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
        """Whether this run already has a checkpoint of `step`, saved earlier or resumed from."""
        return (self._folder(step) / MANIFEST).is_file()

    def _has_room(self) -> bool:
        """Whether a checkpoint as large as the newest would fit on the disk; checked before writing."""
        newest = self.newest()
        size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()) if newest else 0
        return machine.free_disk_gb(self._root) * machine.GIB >= size and not machine.is_out_of_inodes(self._root)

    async def _write(self, trainer: TrainerHandle, saved: Saved, copied: asyncio.Event) -> Path:
        """Write a checkpoint; set `copied` when training may continue."""
        folder, started = self._folder(saved.step), time.perf_counter()
        with written_whole(folder) as staging:
            try:
                staging.mkdir()
                writing = await trainer.begin_save(str(staging))
                copied.set()
                times = await writing
                size = await asyncio.to_thread(self._complete, staging, saved)
            except Exception as error:  # libraries raise different errors for a full disk
                if machine.disk_is_full(self._root):  # checked before the partial files are removed and free space
                    raise _NoRoomError from error
                raise
        await asyncio.to_thread(_sync, self._root)
        seconds = time.perf_counter() - started
        logger.info("step %d saved: %.1f MiB in %.2f s %s", saved.step, size / 2**20, seconds, times)
        self._run.saved(saved.step)
        self.prune()
        return folder

    def _complete(self, staging: Path, saved: Saved) -> int:
        """Add the files that the trainer doesn't write, sync all files to disk, and return their size in bytes."""
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
        """Remove all but the newest and best checkpoints; call it after each new checkpoint or score."""
        best = self.best()[: self._section.keep_best]
        newest = self.all()[-self._section.keep :]
        unscored = self._under_evaluation()
        for folder in self.all():
            if folder not in newest and folder not in best and _step(folder) != unscored:
                # renamed first, so that a partly removed checkpoint is not taken for a complete one
                leaving = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
                with suppress(OSError):
                    folder.rename(leaving)
                    shutil.rmtree(leaving, ignore_errors=True)
        with suppress(OSError):
            self._point_at(best[0] if best else None)

    def _under_evaluation(self) -> int | None:
        """The latest evaluated step if its score is still missing, else None."""
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


def _sealed(path: Path) -> tuple[int, str]:
    """Sync a file to disk and return its size in bytes and its SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, digest


def _sync(folder: Path) -> None:
    """Sync a folder's directory entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damage(folder: Path, files: dict[str, Any]) -> str | None:
    """Describe the first damaged or missing file of a checkpoint; None if all are intact."""
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
                return f"the contents of {name} have changed"
    return next((f"{name} is missing" for name in (PROGRESS, BUFFER) if name not in files), None)


def _identity(recipe: dict[str, Any]) -> dict[str, Any]:
    """Settings that a resumed run can't change, because they determine the meaning of the saved state."""
    model = recipe["model"]
    built = model["path"] == "tiny"
    return {
        "method": recipe["method"],
        "seed": recipe["seed"],
        "environment.name": recipe["environment"]["name"],
        "tasks.order": recipe["tasks"]["order"],
        "lora": recipe["lora"],
        "model.renderer": model["renderer"],
        "model.tools": model["tools"],
        "model.path=tiny": built,
        "model.tiny": model["tiny"] if built else None,
        "trainer.optimizer.muon_lr above 0": recipe["trainer"]["optimizer"]["muon_lr"] > 0,
    }


def differences(saved: dict[str, Any], config: RunConfig) -> list[str]:
    """Differences that prevent `config` from continuing a checkpoint of recipe `saved`, as `key: old -> new`."""
    before, after = _identity(saved), _identity(config.model_dump(mode="json"))
    return [
        f"{key}: {json.dumps(before[key])} -> {json.dumps(after[key])}" for key in after if before[key] != after[key]
    ]


def _other_shape(saved: Path, other: Path) -> str:
    """Describe how two models' shapes differ; empty if they don't."""
    one, two = (read_json(folder / "config.json", root=ANYWHERE) for folder in (saved, other))
    return "; ".join(f"{key}: {one.get(key)} -> {two.get(key)}" for key in SHAPE if one.get(key) != two.get(key))


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # a file system without hard links
        shutil.copy(file, target)
