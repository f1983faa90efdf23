"""`Run`: the interface of a training run for its trainer, with recipe, folder, metrics, logging and events.

A trainer is an entry point in the group `forge_env.trainers`:

    async def train(run: Run) -> None:
        run.stage("model", "building")
        ...
        while not run.stop.is_set():
            run.log(step, {"reward/mean": 0.4, "grpo_loss/total_loss": 0.1})
        run.summary["engine"] = "docker"

It returns when it is done, or soon after `run.stop` is set; it raises to fail. Names of metrics that the displays and
the report know are in `forge_env.display.curves`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from forge_env.config.reader import render
from forge_env.config.recipe import RunConfig
from forge_env.events import Events
from forge_env.files import NO_SPACE, DiskFullError, FolderGoneError, LineWriter, write_whole
from forge_env.logs import move_log
from forge_env.redaction import redact_json
from forge_env.run.account import Account
from forge_env.run.contract import Clause
from forge_env.run.fingerprint import Fingerprint, names_of
from forge_env.run.folder import RunFolder
from forge_env.run.metrics import REWARD, EpisodeLogger, JSONLMetrics, MetricsLogger, TensorBoardMetrics, read_metrics
from forge_env.run.state import HeldOutScore, RunState, Stage, held_out_scores
from forge_env.run.timeline import Timeline, keep_earlier
from forge_env.run.trackers import Tracker
from forge_env.run.trajectories import DISK_FULL, MOST_HELD, TrajectoryFiles, first_episodes, is_kept
from forge_env.schema import with_schema
from forge_env.trajectory import Trajectory
from forge_env.visible import one_line

NO_VERSIONS: Mapping[int, int] = {}
logger = logging.getLogger("forge_env.run")


class Run:
    """One training run, seen by its trainer.

    Attributes:
        config: the resolved recipe.
        folder: the run's folder, which holds all its files.
        stop: set when the user (Ctrl-C, SIGTERM) wants the run to finish cleanly and save.
        resume: continue from the newest checkpoint of `folder`.
        earlier: the summary that the run had when it was resumed; counters continue from it.
        summary: merged into summary.json; also written when the run fails.
        state: the live state, which displays read.
        events: announces changes of `state` to displays and other subscribers.
        facts: merged into summary.json first: start time, versions and machine.
        loggers: destinations of metrics.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        *,
        resume: bool = False,
        state: RunState | None = None,
        loggers: Sequence[MetricsLogger] = (),
        earlier: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.resume = resume
        self.stop = asyncio.Event()
        self.earlier = dict(earlier or {})
        self.summary: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.state = state or RunState(folder.name, config.evaluation.split, config.grpo.max_off_policy_steps)
        self.events = Events()
        self.loggers = list(loggers)
        self.gone: FolderGoneError | None = None
        """Set when the folder was removed or replaced: `folder` is then a new one, in which the run is saved."""
        self._trajectories = TrajectoryFiles(folder.trajectories, self.warn, self.disk_full)
        self._trained: LineWriter | None = None
        self._timeline: Timeline | None = None
        if resume:
            self._restore()

    def stage(self, name: str, detail: str = "") -> None:
        """Begin a stage and end the previous one.

        Names: "sandbox", "model", "trainer", "warm-up", "generator", "evaluation", "training", "shutdown".

        Args:
            name: the stage's name on the terminal.
            detail: more about it.
        """
        self.end_stage()
        stage = Stage(name, detail, self.state.elapsed)
        self.state.stages.append(stage)
        self.state.done = self.state.total = 0
        self.state.progress_fields = {}
        logger.info("stage %s%s", name, f": {detail}" if detail else "")
        self.events.event(f"{name}: {detail}" if detail else name)

    def end_stage(self) -> None:
        """End the current stage."""
        if (stage := self.state.stage) is not None:
            stage.ended = self.state.elapsed

    def progress(self, done: int, total: int, **fields: Any) -> None:
        """Report that `done` of `total` units of the current stage are done.

        Args:
            done: finished units of the stage.
            total: all units of the stage.
            fields: figures to show beside it.
        """
        self.state.done, self.state.total = done, total
        self.state.progress_fields = fields
        self.events.update()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one row of metrics: metrics.jsonl, TensorBoard, Weights & Biases, display.

        Args:
            step: from 1; 0: before training.
            metrics: name -> number.
        """
        self._log(step, metrics)
        self.state.step = max(self.state.step, step)
        if (reward := metrics.get(REWARD)) is not None:
            self.state.rewards.append(reward)
        self.events.update()

    def check_folder(self) -> bool:
        """If the run's folder was removed or replaced, continue in a new one and ask the run to stop, which saves it.

        Every write begins with this check; the run ends with the error `gone`.

        Returns:
            Whether the folder was unchanged.
        """
        made = any(isinstance(sink, JSONLMetrics) and sink.is_made for sink in self.loggers)
        files = [self.folder.metrics] if made else []
        if self.folder.is_there(*files):
            return True
        log = self.folder.log
        self.gone = self.folder.rescue()
        self.state.saved = 0
        self.config = self.config.model_copy(update={"name": self.folder.name})
        self.request_stop()
        try:
            move_log(log, self.folder.log)
            write_whole(self.folder.config, render(self.config))
            for sink in self.loggers:
                if isinstance(sink, JSONLMetrics | TensorBoardMetrics):
                    sink.move(self.folder)
            if self._timeline is not None:
                self._timeline.move(self.folder.timeline)
            self._trajectories.move(self.folder.trajectories)
            self._trajectories.submit(self._move_trained)
        except OSError as error:
            self.forgive(error)
        self.warn(str(self.gone))
        return False

    def _move_trained(self) -> bool:
        if self._trained is not None:
            self._trained.move(self.folder.trained)
        return False

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.check_folder()
        for sink in self.loggers:
            with self._forgiving(sink):
                sink.log(step, metrics)

    def evaluation(
        self, step: int, split: str, score: float, n: int, stderr: float, versions: Mapping[int, int] = NO_VERSIONS
    ) -> None:
        """Record a held-out score after training step `step`.

        Args:
            step: number of training steps before the evaluation.
            split: the evaluated tasks.
            score: mean over the valid episodes.
            n: number of valid episodes.
            stderr: standard error of the mean.
            versions: number of tokens sampled by each policy version; a score may mix versions (`evaluation.pinned`).
        """
        scored = HeldOutScore(step, split, score, n, stderr, dict(versions))
        self.state.evaluations.append(scored)
        prefix = f"eval/{split}"
        row = {f"{prefix}/score": score, f"{prefix}/n": float(n), f"{prefix}/stderr": stderr}
        if versions:
            row |= {
                f"{prefix}/oldest_version": float(min(versions)),
                f"{prefix}/newest_version": float(max(versions)),
                f"{prefix}/share_of_step": versions.get(step, 0) / sum(versions.values()),
            }
        self._log(step, row)
        mixed = f"; {scored.played_by}" if scored.played_by else ""
        message = f"held-out ({split}) after step {step}: {score:.3f} ± {stderr:.3f} (standard error, n={n}){mixed}"
        logger.info("%s", message)
        self.events.event(message)

    def saved(self, step: int) -> None:
        """Record the step of the checkpoint that a resumed run would continue from; 0: there is none yet.

        Args:
            step: training steps in the checkpoint.
        """
        self.state.saved = step

    def status(self, **fields: Any) -> None:
        """Update the live figures.

        Their names are reward, cut (share of the replies that were cut), staleness, tokens_per_s, in_flight, buffer,
        eta_s, and waiting, such as {"trainer": "episodes"}.

        Args:
            fields: the changed figures.
        """
        self.state.status |= fields
        self.events.update()

    async def log_episodes(self, step: int, split: str) -> None:
        """Send the first recorded episodes of an evaluation to the loggers that take episodes.

        Args:
            step: number of training steps before the evaluation.
            split: the evaluated tasks.
        """
        sinks = [sink for sink in self.loggers if isinstance(sink, EpisodeLogger)]
        if not sinks:
            return
        await self._trajectories.written()
        episodes = await asyncio.to_thread(first_episodes, self.folder.trajectories, f"{split}-{step:05d}")
        for sink in sinks if episodes else ():
            with self._forgiving(sink):
                await asyncio.to_thread(sink.log_episodes, step, split, episodes)

    @contextmanager
    def _forgiving(self, sink: MetricsLogger | None = None) -> Iterator[None]:
        """Warn of failures in the block that end no run: a tracker's, and a full disk."""
        try:
            yield
        except Exception as error:
            if isinstance(sink, Tracker):
                self.warn(f"{sink.package} failed to record ({type(error).__name__}): {one_line(str(error))}")
            elif isinstance(error, OSError):
                self.forgive(error)
            else:
                raise

    def trajectory(self, trajectory: Trajectory, kind: str) -> None:
        """Append to `trajectories/KIND.jsonl` ("train", "eval", ...) if the recipe keeps that kind.

        A thread writes, in the order of the calls; the trajectory must not be changed after this call. A full disk ends
        no run: unwritten trajectories wait for space in memory, up to a bound. Callers that write many trajectories
        should await `drain` between them.

        Args:
            trajectory: of a finished episode.
            kind: name of the file.

        Raises:
            OSError: an earlier one could not be written, for a reason other than disk space.
        """
        self.check_folder()
        if is_kept(self.config.logging.trajectories, kind):
            self._trajectories.write(trajectory, kind)

    def trained(self, step: int, groups: Sequence[Mapping[str, Any]], fingerprint: Fingerprint | None = None) -> None:
        """Record the groups that `step` was trained on.

        The thread that writes trajectories writes a line of `trained.jsonl` (docs/run_folder.md).

        Args:
            step: the training step.
            groups: for each group "group", "task", "version", "staleness", "uses", "digest", "credit" and "episodes",
                JSON-ready.
            fingerprint: what the step computed, for a replay.
        """
        more = {} if fingerprint is None else {"fingerprint": fingerprint.row()}
        self._annotate({"step": step, "groups": list(groups), **more})

    def began(self, after: int, beginning: Fingerprint, **facts: Any) -> None:
        """Record that training begins or continues after step `after`: a line of `trained.jsonl`.

        Args:
            after: completed training steps.
            beginning: checksums of the weights.
            facts: the rest of what a replay needs, JSON-ready.
        """
        self._annotate({"after": after, "names": names_of(beginning), "beginning": beginning.row(), **facts})

    def not_trained(self, group: int, fate: str, why: str = "") -> None:
        """Record that a group was played but not trained on: it was "dropped" by the filter, "lost", or "stale".

        Args:
            group: its number.
            fate: "dropped", "lost" or "stale".
            why: the reason, for a lost group.
        """
        self._annotate({"group": group, "fate": str(fate), **({"why": why} if why else {})})

    def _annotate(self, row: Mapping[str, Any]) -> None:
        def write() -> bool:
            self._trained = self._trained or LineWriter(
                self.folder.trained, what="rows of what was trained", most_held=MOST_HELD
            )
            self._trained.append(json.dumps(with_schema(row), separators=(",", ":")).encode())
            return self._trained.held > 0

        self.check_folder()
        self._trajectories.submit(write)

    def contract(self, clause: Clause) -> None:
        """Record the result of a self-check: a line of `contract.jsonl` and of the log, and an entry of the summary.

        A doubtful result is a warning.

        Args:
            clause: the check and its result.
        """
        self.check_folder()
        line = redact_json(json.dumps(with_schema(clause.row())).encode())
        try:
            with self.folder.contract.open("ab") as file:
                file.write(line + b"\n")
        except OSError as error:
            self.forgive(error)
        self.summary.setdefault("contract", {})[clause.clause] = clause.verdict
        if clause.verdict == "doubtful":
            self.warn(f"contract: {clause.words}")
        else:
            logger.info("contract: %s", clause.words)

    async def drain(self) -> None:
        """Wait while the thread that writes trajectories is too far behind; raises the same errors as `trajectory`."""
        await self._trajectories.drain()

    @property
    def timeline(self) -> Timeline | None:
        """The activities of all actors over time (see `forge_env.run.timeline`); None if the recipe disables it."""
        if self._timeline is None and self.config.logging.timeline:
            keep_earlier(self.folder.timeline)
            self._timeline = Timeline(self.folder.timeline, time.perf_counter())
        return self._timeline

    def account(self, actor: str, doing: str) -> Account:
        """Open a time account whose spans are added to the timeline.

        Args:
            actor: its name on the timeline.
            doing: its initial activity.
        """
        timeline = self.timeline
        return Account(actor, doing, on_span=None if timeline is None else timeline.span)

    def note(self, text: str) -> None:
        """Show a line on the terminal and add it to the log.

        Args:
            text: one line.
        """
        logger.info("%s", text)
        self.events.note(text)

    def warn(self, text: str) -> None:
        """Warn the user; a repeated text is shown once and counted.

        Args:
            text: one line.
        """
        count = self.state.warnings.get(text, 0)
        self.state.warnings[text] = count + 1
        logger.warning("%s", text)
        if not count:
            self.events.event(f"warning: {text}")

    def disk_full(self) -> None:
        """Warn that something could not be written for lack of disk space; it stays in memory and the run continues."""
        self.warn(DISK_FULL)

    def forgive(self, error: OSError) -> None:
        """Warn if `error` is a lack of disk space, which ends no run; otherwise raise it.

        Args:
            error: raised by a write.
        """
        if error.errno not in NO_SPACE:
            raise error
        self.disk_full()

    def request_stop(self) -> None:
        """Ask the trainer to finish cleanly."""
        self.state.stopping = True
        self.stop.set()

    def close(self, exit: str = "success") -> None:
        """Close every file. Called by the creator of the run.

        Args:
            exit: how the run ended, as in summary.json.

        Raises:
            OSError: something could not be written, for a reason other than disk space.
        """
        self.end_stage()
        with ExitStack() as stack:
            if self._timeline is not None:
                stack.callback(self._timeline.close)
            for sink in self.loggers:
                close = partial(sink.close, exit) if isinstance(sink, Tracker) else sink.close
                stack.callback(self._close, close, sink)
            stack.callback(self._close, self._close_trained)
            stack.callback(self._close, self._trajectories.close)
            self.loggers.clear()

    def _close(self, close: Callable[[], object], sink: MetricsLogger | None = None) -> None:
        try:
            with self._forgiving(sink):
                close()
        except DiskFullError as error:
            self.warn(str(error))

    def _close_trained(self) -> None:
        if self._trained is not None:
            self._trained.close()

    def _restore(self) -> None:
        """Restore the state from the metrics that an earlier process logged."""
        rewards: dict[int, float] = {}
        rows = list(read_metrics(self.folder.metrics))
        for row in rows:
            self.state.step = max(self.state.step, int(row["step"]))
            if (reward := row.get(REWARD)) is not None:
                rewards[int(row["step"])] = float(reward)
        self.state.rewards = [rewards[step] for step in sorted(rewards)]
        scores = [score for split in held_out_scores(rows).values() for score in split]
        self.state.evaluations = sorted(scores, key=lambda score: (score.step, score.split))
