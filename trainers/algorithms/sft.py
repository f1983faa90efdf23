"""Supervised fine-tuning of a model on an environment's demonstrations.

    tasks in their order --> demonstrations --> chat format with a mask --> batches --> TitanTrainer --> runs/NAME/model
                             (read and rendered in a thread, one batch ahead)

    method: sft
    environment: {name: conversations, options: {dataset: {path: chats.jsonl, streaming: true}}}

Only the trainer is started. Only the assistant's tokens of a conversation are learned. The trainer packs a batch into
passes of `trainer.microbatch_tokens`. The conversation at a position of the data depends only on the recipe, so a
resumed run continues with the same data.

The held-out score is exp(-loss) on demonstrations of `evaluation.split`: the geometric mean of the probability of their
tokens (1 is perfect). The loss itself is the metric `eval/SPLIT/loss`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import forge_env as fe
from forge_env.config.recipe import RunConfig
from forge_env.environment.base import Environment, resolve_task
from forge_env.errors import UsageError
from forge_env.run import Run
from forge_env.run.outcome import save_progress
from forge_env.run.scratch import scratch_folder
from forge_env.run.trainer import Question, Trainer
from forge_env.tasks.curriculum import make_order
from forge_env.tasks.order import Order, TaskOrder
from forge_env.trajectory import Segment
from trainers.loop import checks
from trainers.loop.checkpoints import Checkpoints, Saved
from trainers.loop.healing import MAX_DEATHS_IN_A_ROW
from trainers.loop.method import find_hosts
from trainers.loop.prepare import build_tiny, find_model, resumed_model
from trainers.loop.stack import RoleDiedError, Stack, prepare_controller, unless_stopped
from trainers.loop.trainer import TrainerHandle
from trainers.loop.warmup import demonstration
from trainers.loop.watchdog import Watchdog
from trainers.model.chat import Chat
from trainers.plan.report import plan

HELD_OUT_WINDOW = 1024
"""Maximum number of held-out conversations in memory."""
MOST_LEFT_OUT = 1000
"""Number of consecutive conversations left out after which the run fails."""
IDLE = ("grpo", "generator", "rollouts", "sandbox", "warmup")
"""Sections of a recipe without effect on supervised fine-tuning."""
IDLE_KEYS = {"evaluation": ("temperature", "sampling", "pinned", "metric"), "logging": ("trajectories",)}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """Data of a training step, up to a position in the data.

    The masks of `segments` select the assistant's tokens. Conversations that are too long, or have no token to learn,
    were `left_out`.
    """

    segments: list[Segment]
    end: int
    left_out: int


@dataclass(frozen=True, slots=True)
class Conversations:
    """Demonstrations of a split as token sequences by position. Each position always has the same sequences.

    Conversations of more than `max_length` tokens are left out.
    """

    environment: Environment
    chat: Chat
    split: str
    order: Order
    max_length: int
    seed: int

    def __getitem__(self, position: int) -> list[Segment]:
        """Sequences of the conversation at a position, without those that are too long or have no token to learn."""
        return [
            Segment(np.array(ids), np.array(mask))
            for ids, mask in self._sequences(position)
            if len(ids) <= self.max_length and any(mask[1:])
        ]

    def _sequences(self, position: int) -> list[tuple[list[int], list[bool]]]:
        task = resolve_task(self.environment, None, {"split": self.split, "index": self.order[position]})
        messages = demonstration(self.environment, task, random.Random(f"{self.seed}/{self.split}/{position}"))
        return self.chat.render_training(messages, self.environment.tools)

    def batch(self, position: int, count: int) -> Batch:
        """Read the next `count` conversations from a position on.

        Raises:
            UsageError: too many conversations in a row are left out (`MOST_LEFT_OUT`).
        """
        segments: list[Segment] = []
        start, last, conversations = position, position, 0
        while conversations < count:
            if sequences := self[position]:
                segments += sequences
                last, conversations = position, conversations + 1
            position += 1
            if position - last > MOST_LEFT_OUT:
                raise self._nothing_to_learn(position - 1)
        return Batch(segments, position, position - start - count)

    def _nothing_to_learn(self, position: int) -> UsageError:
        """The error for many conversations in a row without a sequence, of which `position` is the last."""
        if any(len(ids) > self.max_length for ids, _ in self._sequences(position)):
            text, fix = f"are longer than model.max_length={self.max_length} tokens", "raise model.max_length"
        else:
            text = "have no turn of the assistant to train on"
            fix = "check the conversations and model.thinking, or choose another chat format with model.renderer"
        return UsageError(f"{MOST_LEFT_OUT} conversations in a row {text}", fix=fix)


class SFT(Trainer):
    """Training method `sft`: supervised fine-tuning."""

    def check(self, config: RunConfig) -> None:
        """Check a recipe before anything is started; refuse one that can't work."""
        prepare_controller()
        check_idle(config)
        checks.check_devices(config)
        checks.check_idle_options(config)
        checks.check_model(config)
        checks.check_lora(config)
        checks.check_parallelism(config)
        checks.check_environment(config)
        checks.check_renderer(config)
        checks.check_tools(config)
        environment: Environment = fe.make(config.environment.name, **config.environment.options)
        for split in (environment.splits[0], *evaluated(config)):  # reads the first row of a dataset
            task = resolve_task(environment, None, {"split": split, "index": 0})
            demonstration(environment, task, random.Random(0))

    def plan(self, config: RunConfig, question: Question) -> Iterator[str]:
        """Estimate the resources, time and cost of a recipe, as lines of text."""
        return plan(config, question)

    async def __call__(self, run: Run) -> None:
        """Run the recipe `run.config` until its last step or until `run.stop` is set."""
        with scratch_folder():
            prepare_controller()
            await play(run)


def check_idle(config: RunConfig) -> None:
    """Refuse keys that only affect reinforcement learning."""
    fields = type(config).model_fields
    changed = [name for name in IDLE if getattr(config, name) != fields[name].default]
    for section, names in IDLE_KEYS.items():
        default = fields[section].default
        changed += [
            f"{section}.{name}" for name in names if getattr(getattr(config, section), name) != getattr(default, name)
        ]
    if config.tasks.order == "curriculum":
        changed.append("tasks.order=curriculum")
    if changed:
        raise UsageError(f"{changed[0]} is not used by method=sft: no episodes are played", fix="leave it out")


def evaluated(config: RunConfig) -> list[str]:
    """The splits to evaluate."""
    return [config.evaluation.split, *config.evaluation.extra_splits]


async def play(run: Run) -> None:
    """Start the trainer and run a session."""
    config, checkpoints = run.config, Checkpoints(run)
    checkpoints.tidy()
    if run.resume and checkpoints.step >= config.sft.steps and exported(run).is_dir():
        run.note(f"All {config.sft.steps} steps are done: nothing to resume. More: --sft.steps N")
        return
    run.stage("model", config.model.path)
    model = await find_model(run)
    if run.resume:
        await asyncio.to_thread(checkpoints.verify, model)
    environment: Environment = fe.make(config.environment.name, **config.environment.options)
    start = resumed_model(run) or model
    if start is None:
        start = await asyncio.to_thread(build_tiny, run, environment)
    async with Stack(config, await find_hosts(run)) as stack:
        run.stage("trainer", "the trainer is starting")
        watch = Watchdog(run)
        starting = watch.while_doing(stack.start_trainer(start))
        trainer = await stack.unless_one_dies(unless_stopped(run, starting))
        if trainer is None:
            run.note("stopped before training began: nothing to save")
            return
        session = Session(run, stack, trainer, environment, Chat.of(start, config.model))
        await watch.while_doing(session.run_to_end(), lambda: (session.step, session.doing))
        run.stage("shutdown")
    checkpoints.tidy()


def exported(run: Run) -> Path:
    """Folder of the trained model, in Hugging Face format."""
    return run.folder.root / "model"


class Session:
    """One session of a run, from its first step to its last.

    Attributes:
        step: training steps done.
    """

    def __init__(self, run: Run, stack: Stack, trainer: TrainerHandle, environment: Environment, chat: Chat) -> None:
        self.run = run
        self.step = 0
        self._stack = stack
        self._trainer = trainer
        self._environment = environment
        self._chat = chat
        self._checkpoints = Checkpoints(run)
        self._account = run.account("trainer", "start")
        self._position = self._left_out = 0
        self._held_out: dict[str, list[Segment]] = {}
        """First `HELD_OUT_WINDOW` conversations of each held-out split."""
        split = environment.splits[0]
        order = make_order(run.config.tasks, environment, split, seed=run.config.seed)
        self._conversations = self._demonstrations(split, order)
        self._beginning = order.state_dict()

    def _demonstrations(self, split: str, order: Order) -> Conversations:
        config = self.run.config
        return Conversations(self._environment, self._chat, split, order, config.model.max_length, config.seed)

    @property
    def doing(self) -> tuple[str, float]:
        """Current activity of the trainer, and its start time."""
        return self._account.doing, self._account.since

    async def run_to_end(self) -> None:
        """Train until the recipe's last step, or until the run is asked to stop; export the model after the last step.

        A trainer that dies is restarted from the newest checkpoint, or from the start of the run if there is none.
        """
        deaths, steps, again = 0, self.run.config.sft.steps, self.run.resume
        while True:
            try:
                await self._stack.unless_one_dies(self._learn(again=again))
                break
            except RoleDiedError as death:
                deaths += 1
                if deaths > MAX_DEATHS_IN_A_ROW:
                    raise
                self.run.warn(f"{death.message}. It is being restarted")
                await self._stack.restart(death.role)
                again = True
        if self.step >= steps:
            self.run.note(f"Reached training limit ({steps} steps)")
            await self._trainer.save_model(str(exported(self.run)))
            self.run.note(f"model: {exported(self.run)}")

    async def _learn(self, *, again: bool) -> None:
        from trainers.losses.sft import SFTLoss  # imports torch, which takes seconds

        config, trainer = self.run.config, self.run.config.trainer
        await self._trainer.configure(
            trainer.optimizer,
            loss=SFTLoss(),
            steps=config.sft.steps,
            microbatch_tokens=trainer.microbatch_tokens,
            share_prefixes=trainer.share_prefixes,
            minibatches=trainer.minibatches,
            threads=trainer.threads,
        )
        self.step = self._position = self._left_out = 0
        self._conversations.order.load_state_dict(self._beginning)
        self.run.saved(0)
        if again and (saved := await self._checkpoints.restore(self._trainer)) is not None:
            self.run.note(f"Continuing after step {saved.step}")
            self.run.saved(saved.step)
            self.step, self._position, self._left_out = saved.step, saved.state["position"], saved.state["left_out"]
            self._conversations.order.load_state_dict(saved.state["order"])
        if not self.step:
            await self._evaluate(evaluated(config))
        self.run.stage("training", f"{config.sft.steps} steps")
        await self._steps()
        with self._account.during("save"):
            await self._checkpoints.settled()
            await self._checkpoints.save(self._trainer, self._state())
        save_progress(self.run)
        if self.step >= config.sft.steps:
            await self._evaluate(evaluated(config))

    async def _steps(self) -> None:
        config = self.run.config
        self._checkpoints.start_clock()
        reading = self._read(self._position)
        try:
            while self.step < config.sft.steps and not self.run.stop.is_set():
                self._account.enter("wait for data")
                batch = await reading
                if self.step + 1 < config.sft.steps:
                    reading = self._read(batch.end)
                self._account.enter("train")
                metrics = await self._trainer.train_step(batch.segments)
                self.step, self._position = self.step + 1, batch.end
                self._left_out += batch.left_out
                self._log(metrics)
                if self.step >= config.sft.steps:
                    return
                if config.evaluation.every and self.step % config.evaluation.every == 0:
                    await self._evaluate([config.evaluation.split])
                if self._checkpoints.due(self.step) and not self._checkpoints.busy:
                    with self._account.during("save"):
                        await asyncio.wait([reading])  # it advances the order of tasks, which is saved
                        await self._checkpoints.begin(self._trainer, self._state())
                    save_progress(self.run)
        finally:
            await asyncio.gather(reading, return_exceptions=True)  # a thread can't be cancelled

    def _read(self, position: int) -> asyncio.Task[Batch]:
        """Read and render a step's conversations in a thread, concurrently with training."""
        work = asyncio.to_thread(self._conversations.batch, position, self.run.config.sft.batch_size)
        return asyncio.create_task(work)

    def _state(self) -> Saved:
        order = self._conversations.order.state_dict(self._position)
        state = {"position": self._position, "left_out": self._left_out, "order": order}
        return Saved(self.step, state, {})

    def _log(self, metrics: dict[str, float]) -> None:
        renamed = {"loss": "sft/loss", "entropy": "sft/entropy"}
        row = {renamed.get(name, f"trainer/{name}"): value for name, value in metrics.items()}
        row |= {"sft/conversations": float(self._position - self._left_out), "sft/left_out": float(self._left_out)}
        row |= {f"time/trainer/{doing}": seconds for doing, seconds in self._account.take().items()}
        self.run.log(self.step, row)
        if self._left_out:
            self.run.warn("conversations longer than model.max_length are skipped: see the metric sft/left_out")
        if skipped := int(metrics.get("skipped_updates", 0)):
            self.run.warn(f"{skipped} updates were skipped: loss or gradient was not finite")
        rate = metrics.get("tokens_per_s")
        if rate is not None:
            self.run.status(tokens_per_s=rate)
        self.run.progress(self.step, self.run.config.sft.steps, loss=metrics["loss"])

    # --- held-out loss

    async def _evaluate(self, splits: list[str]) -> None:
        for split in splits:
            with self._account.during("evaluate"):
                loss, stderr, number = await self._held_out_loss(split)
            if self.run.stop.is_set():
                return  # the score would be incomplete
            score = math.exp(-loss)
            self.run.evaluation(self.step, split, score, number, stderr * score)
            self.run.log(self.step, {f"eval/{split}/loss": loss})

    async def _held_out_loss(self, split: str) -> tuple[float, float, int]:
        """Loss per token, its standard error and the number of conversations. Ends early if the run is stopped."""
        section = self.run.config.evaluation
        wanted = section.num_tasks if split == section.split else section.extra_num_tasks
        count = self._environment.num_tasks(split)
        total = wanted if count is None else min(wanted, count)
        sums, counts = array("d"), array("q")
        for start in range(0, total, HELD_OUT_WINDOW):
            if self.run.stop.is_set():
                break
            positions = range(start, min(start + HELD_OUT_WINDOW, total))
            segments = await asyncio.to_thread(self._read_held_out, split, positions)
            if segments:
                logprobs = await self._trainer.logprobs(segments)
                sums.extend(-values.sum(dtype=np.float64) for values in logprobs)
                counts.extend(len(values) for values in logprobs)
        if not counts and not self.run.stop.is_set():
            length = self.run.config.model.max_length
            raise UsageError(
                f"no conversation of split {split!r} fits into model.max_length={length} tokens",
                fix="raise model.max_length",
            )
        losses, lengths = np.array(sums), np.array(counts)
        tokens = max(float(lengths.sum()), 1.0)
        loss = float(losses.sum()) / tokens
        error = math.sqrt(float(np.square(losses - loss * lengths).sum())) / tokens  # standard error of a ratio
        return loss, error, len(counts)

    def _read_held_out(self, split: str, positions: range) -> list[Segment]:
        """Conversations of a split, except those left out. The first `HELD_OUT_WINDOW` are cached."""
        if positions.start == 0 and split in self._held_out:
            return self._held_out[split]
        order = TaskOrder(self._environment.num_tasks(split), shuffle=False)
        conversations = self._demonstrations(split, order)
        segments = [segment for position in positions for segment in conversations[position]]
        if positions.start == 0:
            self._held_out[split] = segments
        return segments


train = SFT()
