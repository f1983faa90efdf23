"""One evaluation from its configuration to its summary.

folder (locked, may be resumed) --> plan without finished samples --> policy, sandboxes --> runner --> summary, report
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from forge_env.config.evaluation import EndpointOptions, EvaluationConfig, changes, endpoint_url
from forge_env.config.reader import changed_yaml, read_as, refuse_redacted
from forge_env.endpoint.chat_format import ChatFormat
from forge_env.endpoint.errors import EndpointError
from forge_env.endpoint.opponents import Named, check_named, open_opponents
from forge_env.endpoint.policy import EndpointPolicy
from forge_env.endpoint.vllm_server import VLLMServer, check_checkpoint
from forge_env.environment.base import Environment
from forge_env.environment.optional import gold_actions, seats_of
from forge_env.errors import EnvironmentBugError, ForgeError, UsageError, did_you_mean
from forge_env.evaluation.metering import Meter, TokenUsage, read_price
from forge_env.evaluation.plan import Plan, Planned, Sample, SampleResult, check_score, plan
from forge_env.evaluation.progress import EnvironmentProgress, EvaluationProgress
from forge_env.evaluation.record import EvaluationResult, ResultsFolder
from forge_env.evaluation.results import Results, ResultTable
from forge_env.evaluation.runner import Runner, TaskSource, WatchedEngine, collecting_seldom
from forge_env.events import Events, ticking
from forge_env.files import DiskFullError, FolderGoneError, unused, write_whole
from forge_env.logs import log_to, move_log
from forge_env.loop_guard import LoopGuard
from forge_env.policy import Policy
from forge_env.reading import check_readable
from forge_env.redaction import learn
from forge_env.registry import maker
from forge_env.rewards.rubric import SHOWN_TASKS, check_targets
from forge_env.rollout.scripted import SCRIPTED, GoldPolicy, scripted_policy
from forge_env.tasks.datasets import check_unique
from forge_env.terminal import open_display
from forge_env.trajectory import TrajectoryWriter
from forge_env.types import Task

if TYPE_CHECKING:
    from forge_env.sandbox.protocol import SandboxEngine


log = logging.getLogger(__name__)
VLLM = "vllm:"
"""Prefix of model names that are checkpoint folders, for which a vLLM server is started."""
HELD_UP_S = 20.0
"""Seconds for which code may block the event loop before it is reported."""
CHECKED_TASKS = 4096
"""Number of an environment's tasks whose targets and ids are checked in advance; results are counted by id."""
UNIQUE_FIX = "give each task a unique id; --epochs plays tasks several times"
MANY_SAMPLES = 100_000
"""Number of samples above which the search for reference solutions is announced, as it takes long."""
RESERVE_BYTES = 4 * 2**20
"""Bytes reserved on the disk for running samples in case it fills up."""


@dataclass
class Evaluation:
    """One evaluation, ready to run. The constructor checks everything that can be checked without starting anything."""

    config: EvaluationConfig
    policy: Policy | None = None
    classes: dict[str, type[Environment]] = field(default_factory=dict)
    """Environments given as classes, by name."""
    resume: bool = False
    sandboxes: SandboxEngine | None = None
    stream: TextIO | None = None

    def __post_init__(self) -> None:
        config = self.config
        learn(config.model_dump(mode="json"))
        self.folder = ResultsFolder(config.out or _new_folder(config))
        if self.folder.exists() and not self.resume:
            raise UsageError(
                f"{self.folder.root} already contains an evaluation",
                fix="continue it with --resume, or choose another --out",
            )
        if self.resume and not self.folder.config.exists():
            raise UsageError(f"{self.folder.root} contains no evaluation to resume")
        if self.resume and self.folder.rescored.exists():
            raise UsageError(
                f"{self.folder.root} contains rescored transcripts: new samples can't be added",
                fix="resume the original evaluation, then rescore it",
            )
        if self.resume:
            check_readable(self.folder.root)
            before = read_as(EvaluationConfig, self.folder.config)
            if changed := changes(before, config):
                raise UsageError(
                    f"{self.folder.root} was started with another {', '.join(changed)}", fix="choose another --out"
                )
            if "base_url" not in config.model_fields_set:  # use the recorded one, not this shell's default
                config = self.config = config.model_copy(update={"base_url": before.base_url})
        refuse_redacted(config.model_dump(include=None if self.policy is None else {"environments", "opponents"}))
        self._meter = Meter(read_price(config.prices, config.model) if config.prices else None, config.budget)
        self._engine = WatchedEngine(
            config.sandbox, self.sandboxes, **{"docker_host": config.docker_host, **config.sandbox_options}
        )
        self._sources: dict[str, TaskSource] = {}
        for index, choice in enumerate(config.environments):
            known, at = self.classes.get(choice.name, choice.name), f"environments.{index}.options"
            self._sources[choice.label] = TaskSource(maker(known, choice.options, at, sandboxes=self._engine))
        self.samples = plan(config, {label: source.environment for label, source in self._sources.items()})
        for label, source in self._sources.items():
            check_score(config.score, label, source.environment)
            check_targets(source.environment, (task for task, _ in self._tasks(label)))
            check_unique(((task.id, index) for task, index in self._tasks(label)), label, "task", UNIQUE_FIX)
        if self.policy is None:
            self.policy = scripted(config)
        if self.policy is None and config.model.startswith(VLLM):
            self._check_tools(check_checkpoint(config.model.removeprefix(VLLM)))
        elif self.policy is None:
            endpoint_url(config.base_url)  # validates it; it may come from OPENAI_BASE_URL
        self.opponents: dict[str, dict[str, Policy]] = {}
        """Open policies by label and seat; if given, they replace those of the configuration."""
        self._named = self._checked_opponents()
        if isinstance(self.policy, GoldPolicy):
            self.samples = self._with_gold(self.samples)
        shares = self.samples.shares
        self.planned = {label: Planned(share.split, share.played, share.asked) for label, share in shares.items()}
        """Numbers of samples that the summary refers to, by label."""
        self.progress = self._new_progress()
        self._runner: Runner | None = None
        self._server: VLLMServer | None = None
        self.stopped = False
        self._gone: FolderGoneError | None = None
        self._writer: TrajectoryWriter | None = None

    def keep(self, wanted: Callable[[Sample], bool]) -> None:
        """Restrict the plan to the wanted samples; the others count as missing."""
        self.samples = self.samples.only(wanted)
        self.progress = self._new_progress()

    def task(self, sample: Sample) -> Task:
        """The sample's task, as its environment creates it now."""
        return self._sources[sample.label].task(sample.split, sample.index)[0]

    def _tasks(self, label: str) -> Iterator[tuple[Task, int]]:
        """First tasks of an environment with their indices, without those that fail: playing them counts the bug."""
        share = self.samples.shares[label]
        for index in range(min(share.tasks, CHECKED_TASKS)):
            with suppress(EnvironmentBugError):
                yield self.task(share[index]), index

    def _check_tools(self, model: str) -> None:
        """Refuse native tools that the checkpoint's chat template can't write."""
        label = next((label for label, source in self._sources.items() if source.environment.tools), None)
        if label is None or self.config.tools != "native":
            return
        if reason := ChatFormat.of(model).refusal_of_tools():
            raise UsageError(f"{label} has tools, and {reason}", fix="describe them as text: --tools text")

    def _checked_opponents(self) -> dict[str, Named]:
        """The configured opponents of each environment, by label."""
        opponents: dict[str, Named] = {}
        for choice in self.config.environments:
            named = self.config.opponents if choice.opponents is None else choice.opponents
            check_named(choice.label, self.seats(choice.label), named, "opponents")
            if named and isinstance(self.policy, GoldPolicy):
                raise UsageError(
                    f"the gold policy plays all seats of {choice.label} together",
                    fix="leave opponents out, or name a player of that game: --model module:function",
                )
            opponents[choice.label] = named
        return opponents

    def seats(self, label: str) -> tuple[str, ...]:
        """Seats of an environment."""
        return seats_of(self._sources[label].environment)

    def has_gold(self, sample: Sample) -> bool:
        """Whether the sample's task has a reference solution."""
        source, task = self._sources[sample.label], self.task(sample)
        with source.code("gold_actions", task.id):
            return gold_actions(source.environment, task) is not None

    def _with_gold(self, samples: Plan) -> Plan:
        """Restrict the plan to tasks with a reference solution, since some can't be solved (a hand of cards)."""
        if self.stream is not None and len(samples) > MANY_SAMPLES:
            self.stream.write(f"looking for the reference solutions of {len(samples):,} samples\n")
            self.stream.flush()
        solvable = samples.only(self.has_gold)
        if missing := [label for label, share in solvable.shares.items() if not share.played]:
            raise UsageError(
                f"no task of {min(missing)} has a gold solution", fix="set Task.gold, or define gold_actions"
            )
        return solvable

    def _new_progress(self) -> EvaluationProgress:
        progress = EvaluationProgress(
            self.folder.root.name,
            self.config.model,
            usage=self._meter.total,
            budget=self.config.budget,
            priced=self._meter.price is not None,
        )
        for label, share in self.samples.shares.items():
            progress.environments[label] = EnvironmentProgress(share.played)
        return progress

    @property
    def playing(self) -> bool:
        """Whether samples are being played; False while endpoint and sandboxes start."""
        return self._runner is not None

    def stop(self) -> None:
        """Start no more samples; `run` returns when the running ones have finished."""
        self.stopped = True
        self.progress.notice = "finishing the running samples"
        if self._runner is not None:
            self._runner.stop()

    async def run(self) -> EvaluationResult:
        """Play the missing samples and write the summary, even if the run ends early.

        If cancelled, it abandons the running samples, writes the summary, and raises `CancelledError`.
        """
        fresh = not self.folder.root.exists()
        try:
            return await self._run()
        except ForgeError:
            if fresh:
                self.folder.remove_if_empty()
            raise

    async def _run(self) -> EvaluationResult:
        with self.folder, log_to(self.folder.log), collecting_seldom():
            results = ResultTable()
            pending = await asyncio.to_thread(self._pending, results)  # takes minutes for a million samples
            self._write_config()
            self.progress.begin()
            writer = self._writer = TrajectoryWriter(
                self.folder.samples, what="finished samples", reserve=RESERVE_BYTES
            )
            try:
                await self._play(results, pending, writer)
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from failures.exceptions[0].__cause__
            finally:
                try:
                    if (path := self._rescued()) is not None:
                        writer.move(path)
                    writer.close()
                except DiskFullError as error:
                    error.fix = "free some space; --resume plays them again"
                    raise
                result = await asyncio.to_thread(self._sum_up, results)  # takes seconds for a million samples
            return result

    def _write_config(self) -> None:
        asks = self.policy is None and not self.config.model.startswith(VLLM)
        always = ["base_url"] if asks else []  # recorded even if it is the default, which depends on the shell
        try:
            write_whole(self.folder.config, changed_yaml(self.config, always))
        except OSError as error:
            raise ForgeError(
                f"can't write {self.folder.config}: {error.strerror}", fix="free some space, or choose another --out"
            ) from error

    async def _play(self, results: ResultTable, pending: Plan, writer: TrajectoryWriter) -> None:
        if not len(pending):
            return
        async with AsyncExitStack() as stack:
            events = Events()
            stack.callback(events.close)
            if self.stream is not None:
                events.subscribe(open_display(self.progress, self.stream))
                await stack.enter_async_context(ticking(events))
            for damage in self.folder.damage:
                events.note(f"{damage}; its sample will be played again")
            policy = self.policy
            if policy is None:
                policy, self._server = await open_policy(stack, self.config, self.folder.root / "vllm.log", events.note)
            opponents = self.opponents or {
                label: await open_opponents(stack, named, "opponents") for label, named in self._named.items()
            }
            if self.sandboxes is None:
                await stack.enter_async_context(self._engine)
            self._runner = Runner(
                self.config,
                policy,
                self._sources,
                self._engine,
                writer,
                self._meter,
                self.progress,
                events,
                opponents,
                results,
                rescued=self._rescued,
            )
            if self.stopped:
                return
            if isinstance(policy, EndpointPolicy):
                self.progress.limiter, self.progress.request_errors = policy.limiter, policy.errors
                policy.tell = events.note
            with LoopGuard(HELD_UP_S, 0.0, events.note):
                if self._server is None:
                    await self._runner.run(pending)
                else:
                    await self._run_with_server(self._runner, pending, self._server)

    async def _run_with_server(self, runner: Runner, pending: Plan, server: VLLMServer) -> None:
        """Play the samples. If our vLLM server exits, abandon the running ones, as every request would fail."""
        playing = asyncio.ensure_future(runner.run(pending))
        ended = asyncio.ensure_future(server.ended())
        try:
            await asyncio.wait([playing, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not playing.done():
                runner.error = ended.result()
        finally:
            ended.cancel()
            playing.cancel()
            await asyncio.wait([playing])
        if not playing.cancelled():
            playing.result()

    def _pending(self, results: ResultTable) -> Plan:
        """The samples still to be played, without those that earlier processes played.

        Adds the usage of recorded samples to the meter, and the results of planned ones to `results`.
        """
        changed: set[str] = set()
        for trajectory, result in self.folder.results(self.config.score):
            self._meter.total.add(TokenUsage(**trajectory.info.get("usage", {})))
            if (number := self._number(result)) is not None:
                results.add(result)
                sample = self.samples.shares[result.environment][number]
                is_other = result.valid and not self._has_task(sample, trajectory.info.get("task"))
                (changed.add if is_other else changed.discard)(result.id)
        if changed:
            raise _other_tasks(self.folder.root, sorted(changed))
        for damage in self.folder.damage:
            log.warning("%s", damage)
        done: list[tuple[str, int]] = []
        for result in self._in_order(results):
            number = self._number(result)
            if result.valid and number is not None:
                self.progress.environments[result.environment].add(result)
                done.append((result.environment, number))
        return self.samples.without(done)

    def _has_task(self, sample: Sample, digest: str | None) -> bool:
        """Whether the sample's task has this digest; True if an older version recorded no digest."""
        try:
            return digest is None or self._sources[sample.label].task(sample.split, sample.index)[1] == digest
        except EnvironmentBugError:  # the task can no longer be created
            return False

    def _number(self, result: SampleResult) -> int | None:
        """Number of a sample in its environment's share of the plan; None if it is not planned."""
        share = self.samples.shares.get(result.environment)
        split, index, epoch = result.id.removeprefix(f"{result.environment}/").rsplit("/", 2)
        return None if share is None else share.number(split, int(index), int(epoch))

    def _in_order(self, results: ResultTable) -> Results:
        return Results(results, results.latest(list(self.samples.shares).index))

    def _sum_up(self, results: ResultTable) -> EvaluationResult:
        from forge_env.evaluation.summary import summarize
        from forge_env.evaluation.tables import markdown

        summary = summarize(self.config, results, self.planned, self.progress)
        try:
            summary.write(self.folder.summary)
            write_whole(self.folder.report, markdown(summary))
        except OSError as error:  # a full disk must not hide the result; --resume writes both again
            log.error("summary and report can't be written: %s", error)
        reason = self._gone or (self._runner.error if self._runner else None)
        return EvaluationResult(self.folder.root, summary, self._in_order(results), reason)

    def _rescued(self) -> Path | None:
        """A new path for the samples if their folder was removed or replaced, which also stops the run; else None."""
        made = self._writer is not None and self._writer.is_made
        if self.folder.is_there(*([self.folder.samples] if made else [])):
            return None
        log_path = self.folder.log
        self._gone = self.folder.rescue()
        self.folder.samples.touch()
        move_log(log_path, self.folder.log)
        log.error("%s", self._gone)
        self.config = self.config.model_copy(update={"out": self.folder.root})
        self._write_config()
        self.stop()
        return self.folder.samples


def _other_tasks(folder: Path, ids: list[str]) -> UsageError:
    more = f" and {len(ids) - SHOWN_TASKS} more" if len(ids) > SHOWN_TASKS else ""
    return UsageError(
        f"{folder}: the tasks of {len(ids)} finished samples have changed since they were played: "
        f"{', '.join(ids[:SHOWN_TASKS])}{more}",
        fix="choose another --out, or restore the data",
    )


def _new_folder(config: EvaluationConfig) -> Path:
    """A folder under runs/ that doesn't exist yet, named by the environments, the model and the time."""
    words = [*(choice.label for choice in config.environments), config.model.rstrip("/").rpartition("/")[2]]
    stem = "-".join("".join(c if c.isalnum() or c in "._" else "_" for c in word) for word in words)[:80]
    return unused(Path("runs") / f"eval-{stem}")


async def open_policy(
    stack: AsyncExitStack, config: EvaluationConfig, log_file: Path, note: Callable[[str], object]
) -> tuple[Policy, VLLMServer | None]:
    """Open the model of a configuration, until the stack is closed: an endpoint, or a checkpoint behind vLLM."""
    options: EndpointOptions = config
    server = None
    if options.model.startswith(VLLM):
        note("starting vLLM")
        server = await stack.enter_async_context(
            VLLMServer(options.model.removeprefix(VLLM), log_file, config.vllm_args)
        )
        options = options.model_copy(
            update={"model": server.name, "base_url": server.base_url, "uds": server.uds, "api_key_env": ""}
        )
    policy = await stack.enter_async_context(EndpointPolicy(options))
    if server is not None:
        policy.reader = await asyncio.to_thread(server.format.reader, server.model)
    try:
        await policy.check()
    except EndpointError as error:
        module, colon, function = options.model.partition(":")
        if colon and function.isidentifier() and module.isidentifier() and not _importable(module):
            also = f"if {options.model!r} is a function: there is no module {module!r} here"
            error.fix = f"{error.fix}; {also}" if error.fix else also
        elif guess := did_you_mean(options.model.lower(), SCRIPTED):
            error.fix = "; ".join(filter(None, [error.fix, f"did you mean the policy {guess!r}?"]))
        raise
    return policy, server


def scripted(config: EvaluationConfig) -> Policy | None:
    """The scripted policy that the model names; None for an endpoint's model, including those named `name:tag`."""
    model = config.model
    if model.startswith(VLLM):
        return None
    module, colon, attribute = model.partition(":")
    if not colon or (attribute.isidentifier() and "/" not in module and _importable(module)):
        return scripted_policy(model)
    path = "." in module and all(part.isidentifier() for part in [*module.split("."), attribute])
    if path and "base_url" not in config.model_fields_set and "OPENAI_BASE_URL" not in os.environ:
        raise UsageError(
            f"there is no module {module!r} for the policy {model!r}",
            fix="give package.module:function, or add --base-url for an endpoint's model",
        )
    return None


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
