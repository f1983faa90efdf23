"""The outcome of a run, and the summary.json that records it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import forge_env
from forge_env.errors import ForgeError, UsageError, root_cause
from forge_env.files import write_whole
from forge_env.reading import read_json
from forge_env.run.run import Run
from forge_env.schema import with_schema, without_schema

Exit = Literal["success", "failed", "interrupted"]
DEFAULTS: dict[str, Any] = {
    "heldout_start": None,
    "heldout_end": None,
    "steps": 0,
    "wall_s": 0.0,
    "engine": None,
    "tokens_generated": 0,
    "tokens_discarded_stale": 0,
    "max_staleness": 0,
}


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a run."""

    exit: Exit
    code: int
    error: BaseException | None = None
    """The error shown to the user."""
    raised: BaseException | None = None
    """The exception that ended the trainer; the log has its traceback."""
    ending: str = field(default="", compare=False)
    """How the run ended and how to continue it, in one line."""

    @property
    def message(self) -> str:
        """The error in one line (more for a list of mistakes)."""
        if self.error is None:
            return ""
        return str(self.error) if isinstance(self.error, ForgeError) else _describe(self.error)


def failed(error: BaseException, raised: BaseException | None = None) -> RunOutcome:
    """Return the outcome for an exception; for an exception group, its root cause."""
    cause = root_cause(error)
    return RunOutcome("failed", cause.exit_code if isinstance(cause, ForgeError) else 1, cause, raised or error)


def describe_end(run: Run, outcome: RunOutcome) -> str:
    """Describe in one line how a run ended and how to continue it."""
    done, saved = run.state.step, run.state.saved
    steps = f"{done} step{'s' * (done != 1)}"
    if outcome.exit == "success":
        return f"done: {steps}"
    ended = f"{outcome.exit} after {steps}" if done else f"{outcome.exit} before the first step"
    command = f"forge-env train {shlex.quote(str(run.folder.config))} --resume"
    if nothing_to_resume(run, outcome):
        return f"{ended}: there is nothing to resume"
    if outcome.code == UsageError.exit_code:
        return ended
    if saved == 0:
        return f"{ended}; nothing was saved; start again with: {command}"
    if saved is not None and saved < done:
        ended += f", saved after {saved}"
    return f"{ended}; continue with: {command}"


def nothing_to_resume(run: Run, outcome: RunOutcome) -> bool:
    """Whether a new run failed before it had recorded anything, for example because its model can't be loaded."""
    return outcome.exit == "failed" and not has_recorded(run)


def has_recorded(run: Run) -> bool:
    """Whether the run has state that a resumed run would continue from."""
    state = run.state
    return bool(run.resume or state.step or state.saved or state.evaluations)


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def read_summary(path: Path) -> dict[str, Any]:
    """Read the summary that an earlier process of the run left; empty if there is none.

    Raises:
        UsageError: it is of a newer version than this forge-env reads, or the file is not read (`open_file`).
    """
    if not path.exists():
        return {}
    try:
        data = read_json(path)
    except json.JSONDecodeError:  # truncated by a full disk
        return {}
    except ValueError as error:
        raise UsageError(f"{path} can't be read: {error}", fix="correct it, or remove the file") from error
    return without_schema(data, str(path)) if isinstance(data, dict) else {}


def write_summary(run: Run, exit: Exit | Literal["running"], error: str, wall_s: float) -> dict[str, Any]:
    """Write summary.json atomically and return it. Values that the trainer put into `run.summary` take precedence."""
    state = run.state
    names = dict.fromkeys(item.split for item in state.evaluations)
    scores = {split: sorted(state.scores(split), key=lambda item: item.step) for split in names}
    stages: dict[str, float] = {}
    for stage in state.stages:
        if stage.ended is not None:
            stages[stage.name] = round(stages.get(stage.name, 0.0) + stage.ended - stage.started, 3)
    summary: dict[str, Any] = {
        **DEFAULTS,
        **run.earlier,  # kept whole: a process that is killed before it has counts of its own must not lose these
        **run.facts,
        "name": run.folder.name,
        "environment": run.config.environment.name,
        "seed": run.config.seed,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "forge_env": forge_env.__version__,
        "steps": state.step,
        "max_off_policy_steps": run.config.grpo.max_off_policy_steps,
        "heldout": {
            split: {"start": items[0].score, "end": items[-1].score, "n": items[-1].n, "stderr": items[-1].stderr}
            for split, items in scores.items()
        },
        "stages": stages,
        "warnings": state.warnings,
    }
    for split, items in scores.items():
        prefix = "heldout" if split == state.split else f"heldout_{split}"
        summary |= {f"{prefix}_start": items[0].score, f"{prefix}_end": items[-1].score}
    summary |= run.summary
    summary |= {"wall_s": round(wall_s, 3), "exit": exit, "error": error or None}
    write_whole(run.folder.summary, json.dumps(with_schema(summary), indent=2, default=str) + "\n")
    return summary


def save_progress(run: Run) -> None:
    """Write summary.json with the current figures, so that a resumed run has them even if this process is killed."""
    try:
        write_summary(run, "running", "", float(run.earlier.get("wall_s") or 0.0) + run.state.elapsed)
    except OSError as error:
        run.forgive(error)
