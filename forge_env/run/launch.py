"""Running a trainer: log, signals, events and summary around it.

subscribers (terminal, report) <-- Run.events <-- Run <-- trainer (entry point in `forge_env.trainers`)
run.log  <-- stdout and stderr of every process, logging, tracebacks
Ctrl-C   --> once: `run.stop`; twice: the trainer's task is cancelled (`forge_env.interrupts`)
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from forge_env import machine
from forge_env.config.reader import render
from forge_env.config.recipe import RunConfig
from forge_env.errors import ForgeError, root_cause
from forge_env.events import ticking
from forge_env.files import write_whole
from forge_env.interrupts import INTERRUPTED, run_until_interrupted
from forge_env.logs import captured_output, log_to
from forge_env.loop_guard import LoopGuard
from forge_env.redaction import learn
from forge_env.run.folder import RunFolder
from forge_env.run.metrics import open_loggers, read_metrics
from forge_env.run.outcome import (
    RunOutcome,
    describe_end,
    failed,
    has_recorded,
    nothing_to_resume,
    read_summary,
    write_summary,
)
from forge_env.run.run import Run
from forge_env.run.state import RunState

NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
Trainer = Callable[[Run], Awaitable[None]]
logger = logging.getLogger("forge_env.run")


def launch(
    config: RunConfig,
    folder: RunFolder,
    load_trainer: Callable[[], Trainer],
    *,
    subscribe: Callable[[Run, TextIO], object] = lambda run, terminal: None,
    resume: bool = False,
    debug: bool = False,
) -> RunOutcome:
    """Run the trainer to its end and leave a complete run folder; all output goes to the terminal and the log.

    Args:
        folder: the run's folder, created here and held until the end.
        load_trainer: imports the trainer; called after the display has started, since it may take seconds.
        subscribe: called with the run and the terminal before the trainer is loaded, to subscribe to `run.events`.
        debug: leave stdout and stderr alone and log everything to them.
    """

    learn(config.model_dump(mode="json"))
    folder.create()
    try:
        with ExitStack() as stack:
            terminal: TextIO = sys.stdout
            if not debug:
                terminal = stack.enter_context(captured_output(folder.log))
            stack.enter_context(log_to(folder.log, debug=debug))
            earlier = read_summary(folder.summary) if resume else {}
            state = RunState(folder.name, config.evaluation.split, config.grpo.max_off_policy_steps)
            run = _open_run(config, folder, state, resume, earlier)
            subscribe(run, terminal)
            return _play(run, load_trainer, float(earlier.get("wall_s") or 0.0), debug=debug)
    finally:
        folder.release()


def _open_run(config: RunConfig, folder: RunFolder, state: RunState, resume: bool, earlier: dict[str, Any]) -> Run:
    config = config.model_copy(update={"name": folder.name})
    before = max((float(row.get("time") or 0.0) for row in read_metrics(folder.metrics)), default=0.0)
    run = Run(config, folder, resume=resume, state=state, earlier=earlier)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    run.facts = {
        "started": earlier.get("started") or now,
        "model": config.model.path,
        "versions": machine.versions(),
        "machine": machine.describe(),
    }
    try:
        write_whole(folder.config, render(config))
        write_summary(run, "running", "", float(earlier.get("wall_s") or 0.0))
        run.loggers += open_loggers(config, folder, lambda: before + state.elapsed, run.disk_full)
    except OSError as error:
        fix = f"free some space, or {folder.another}"
        raise ForgeError(f"can't write to {folder.root}: {error.strerror}", fix=fix) from error
    return run


def _play(run: Run, load_trainer: Callable[[], Trainer], earlier_s: float, *, debug: bool) -> RunOutcome:
    """Run the trainer, then write the outcome, also after a failure."""
    try:
        outcome = _outcome(run, load_trainer, debug=debug)
        run.check_folder()
        if run.gone is not None:
            outcome = failed(run.gone, outcome.raised)
        try:
            return _recorded(run, outcome, earlier_s)
        except KeyboardInterrupt:  # all is saved, and --resume writes the summary and the report
            outcome = replace(outcome, exit="interrupted", code=INTERRUPTED)
            return replace(outcome, ending=describe_end(run, outcome))
    finally:
        run.events.close()


def _recorded(run: Run, outcome: RunOutcome, earlier_s: float) -> RunOutcome:
    """Close the files and write summary and report; a run whose end can't be recorded has failed."""
    run.end_stage()
    wall_s = earlier_s + run.state.elapsed
    outcome = _unless_refused(run, outcome, partial(run.close, outcome.exit))
    outcome = _unless_refused(run, outcome, partial(write_summary, run, outcome.exit, outcome.message, wall_s))
    run.state.exit = outcome.exit
    outcome = replace(outcome, ending=describe_end(run, outcome))
    if outcome.error is not None:
        logger.error("the run failed", exc_info=outcome.raised or outcome.error)
    run.events.ended(wall_s)
    logger.info("%s", outcome.ending)
    if nothing_to_resume(run, outcome):
        run.folder.give_up()
    return outcome


def _unless_refused(run: Run, outcome: RunOutcome, write: Callable[[], object]) -> RunOutcome:
    """Call `write`; if it raises OSError, a successful outcome becomes a failure, and any other gets a warning."""
    try:
        write()
    except OSError as error:
        cause = _refused_write(run, error) or error
        if outcome.exit == "success":
            return failed(cause, error)
        run.warn(f"the end of the run can't be recorded: {cause}")
    return outcome


def _outcome(run: Run, load_trainer: Callable[[], Trainer], *, debug: bool) -> RunOutcome:
    async def train() -> None:
        section = run.config.watchdog
        guard = LoopGuard(section.warn_s, 0.0 if debug else section.end_s, run.warn)  # a debugger blocks it for long
        async with ticking(run.events):
            trainer = load_trainer()
            with guard:
                await trainer(run)

    def finish() -> str | None:
        run.request_stop()
        stage = run.state.stage
        return None if stage is not None and stage.name == "model" else "and saving"  # a download may take hours

    try:
        run_until_interrupted(train(), finish=finish, tell=run.note, grace_s=run.config.checkpoint.grace_s)
    except KeyboardInterrupt:
        return RunOutcome("interrupted", INTERRUPTED)
    except asyncio.CancelledError:
        return failed(RuntimeError("the trainer was cancelled from within"))
    except Exception as error:  # noqa: BLE001 - the boundary of the run: any exception is reported and recorded
        return failed(_refused_write(run, error) or error, error)
    return RunOutcome("interrupted", INTERRUPTED) if run.stop.is_set() else RunOutcome("success", 0)


def _refused_write(run: Run, error: Exception) -> ForgeError | None:
    """Return the likely cause of a failure: a full disk, which libraries word differently, or a missing permission."""
    then = "then start it again"
    if has_recorded(run):
        then = f"then continue with: forge-env train {run.folder.config} --resume"
    for folder in filter(Path.exists, (run.folder.root, Path(tempfile.gettempdir()), Path("/dev/shm"))):
        if machine.is_out_of_inodes(folder):
            return ForgeError(f"the disk of {folder} has no inodes left", fix=f"delete some files, {then}")
        if machine.disk_is_full(folder):
            return ForgeError(f"the disk of {folder} is full", fix=f"free some space, {then}")
    cause = root_cause(error)
    if isinstance(cause, OSError) and cause.errno in NO_PERMISSION and cause.filename:
        return ForgeError(f"can't write to {cause.filename}: {cause.strerror}", fix=f"make it writable again, {then}")
    return None
