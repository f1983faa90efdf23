"""The folder of a run: its layout, its name, and its lock."""

from __future__ import annotations

import os
from pathlib import Path

from forge_env.errors import UsageError
from forge_env.files import HeldFolder, Inside, remove, unused
from forge_env.machine import user_path
from forge_env.reading import check_readable


class RunFolder(HeldFolder):
    """Paths of `runs/NAME/`. Nothing is created before `create`."""

    another = "choose another --name, or a writable place with output_dir=PATH"
    inside = ("trajectories", "checkpoints")

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.root.name

    config = Inside("config.yaml")
    """The resolved recipe, with its documentation as comments."""
    metrics = Inside("metrics.jsonl")
    """One JSON object a line: `step`, `time` (seconds since the start), metrics. The last row of a step counts."""
    trajectories = Inside("trajectories")
    """`KIND.jsonl` for every kind of trajectory, and `KIND.index.jsonl` with a row for each trajectory."""
    trained = Inside("trained.jsonl")
    """The groups that each step was trained on, and the groups that none was: one JSON object a line."""
    contract = Inside("contract.jsonl")
    """Results of the run's self-checks: one JSON object a line (`forge_env.run.contract`)."""
    checkpoints = Inside("checkpoints")
    """Checkpoints, laid out by the trainer."""
    tensorboard = Inside("tensorboard")
    """TensorBoard event files."""
    summary = Inside("summary.json")
    """Results of the run, as JSON."""
    reward_curve = Inside("reward_curve.png")
    """Reward and held-out score over steps, as a picture."""
    report = Inside("report.html")
    """Self-contained page with every curve."""
    timeline = Inside("timeline.json")
    """Activities of all actors, in Chrome's trace format (opens in Perfetto)."""
    log = Inside("run.log")
    """Full log, with the output of every process and every traceback."""
    logs = Inside("logs")
    """Output of the processes on each other host: `NUMBER-HOST.log`."""

    def exists(self) -> bool:
        """Whether a run has already been written here."""
        return os.path.exists(self.config) or os.path.exists(self.metrics)

    def give_up(self) -> None:
        """Remove all but logs and summary of a run that can't be resumed, so that its name can be used again."""
        for path in self.root.iterdir():
            if path not in (self.log, self.logs, self.summary):
                remove(path)

    def create(self) -> None:
        """Create the folders and lock them: a second process on the same run is refused."""
        self.hold()


LONGEST_NAME = 200
"""Maximum bytes of a run's name; file systems take 255, and files are named after the run."""


def choose_folder(output_dir: str, name: str | None, stem: str, *, resume: bool) -> RunFolder:
    """Choose the folder that a run is written to.

    Args:
        name: the requested name, or None to make one from `stem` and the time.

    Raises:
        UsageError: the run exists and is not to be resumed, or the other way round.
    """
    base = user_path(output_dir)
    if name is not None:
        usable = name.strip() and name not in (".", "..") and "/" not in name and name.isprintable()
        if not usable or len(name.encode()) > LONGEST_NAME:
            fix = f"use a plain folder name of at most {LONGEST_NAME} bytes"
            raise UsageError(f"{name[:80]!r} can't be the name of a run", fix=fix)
        folder = RunFolder(base / name)
        if folder.exists() and not resume:
            raise UsageError(
                f"the run {folder.root} exists already", fix="continue it with --resume, or choose another --name"
            )
        if resume and not folder.exists():
            raise UsageError(f"there is no run {folder.root} to resume", fix=_existing(base))
        if resume:
            check_readable(folder.root)
        return folder
    if resume:
        raise UsageError("--resume needs a run", fix=f"add --name NAME; {_existing(base)}")
    return RunFolder(unused(base / stem))


def _existing(base: Path) -> str:
    runs = [path for path in base.iterdir() if RunFolder(path).exists()] if base.is_dir() else []
    runs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return f"newest in {base}: {', '.join(path.name for path in runs[:5])}" if runs else f"{base} holds no run"
