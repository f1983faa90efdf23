"""Duration of a training step by part, from operations, bytes and the constants of `hardware.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from trainers.buffer.sequences import MOST_COPIES
from trainers.plan import hardware
from trainers.plan.hardware import PER_HOST, Gpu
from trainers.plan.memory import BYTES, FLOAT32, Layout
from trainers.plan.shape import Shape

PROMPT = 256
"""Tokens of an episode that are not sampled, when the command gives no number."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Episodes and tokens of a training step.

    Attributes:
        group: number of episodes that begin with the same prompt.
        shared: number of episodes whose prompt the trainer computes once.
        prompt: tokens of an episode that are not sampled.
        reply: tokens of an episode that are sampled and contribute to the loss.
        longest: maximum number of tokens sampled in a turn.
        steps_apart: number of steps that generation may run ahead; 0: generation and training alternate.
        sampled: whether a generator samples the episodes; otherwise they come from a dataset.
    """

    episodes: int
    group: int
    shared: float
    prompt: int
    reply: int
    longest: int
    steps_apart: int
    sampled: bool

    @classmethod
    def of(cls, config: RunConfig, prompt: int | None = None, reply: int | None = None) -> Workload:
        """Create the workload of a recipe.

        Args:
            prompt: tokens of an episode that are not sampled; None: `PROMPT`, at most half of `model.max_length`.
        """
        longest, grpo = config.model.max_length, config.grpo
        sampled = config.rolls_out
        if prompt is None:
            prompt = min(PROMPT, longest // 2)
        if reply is None:
            limit = grpo.max_tokens_per_turn if sampled else longest - prompt
            reply = max(1, min(limit, longest - prompt) // 2)
        if prompt < 1 or reply < 1 or prompt + reply > longest:
            raise UsageError(
                f"an episode of {prompt} + {reply} tokens doesn't fit model.max_length={longest}",
                fix="lower --prompt or --reply",
            )
        if not sampled:
            return cls(config.sft.batch_size, 1, 1, prompt, reply, reply, 0, sampled=False)
        shared = 1.0
        if config.trainer.share_prefixes:  # as many of a group as are in one update, and fit into one pass
            room = config.trainer.microbatch_tokens
            fit = min((room - prompt) / reply, MOST_COPIES * room / (prompt + reply))
            shared = max(1.0, min(grpo.group_size / config.trainer.minibatches, fit))
        return cls(
            grpo.groups_per_step * grpo.group_size,
            grpo.group_size,
            shared,
            prompt,
            reply,
            min(grpo.max_tokens_per_turn, longest - prompt),
            grpo.max_off_policy_steps,
            sampled=True,
        )

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.episodes * (self.prompt + self.reply)

    @property
    def computed_prompt(self) -> float:
        """Tokens of an episode's prompt that the trainer computes, on average."""
        return self.prompt / self.shared

    @property
    def computed(self) -> float:
        """Tokens that the trainer computes in a step."""
        return self.episodes * (self.computed_prompt + self.reply)

    @property
    def in_flight(self) -> int:
        """Number of episodes that are sampled at the same time."""
        return self.episodes * (self.steps_apart + 1)


def training_flops(shape: Shape, work: Workload, recompute: str = "none") -> float:
    """Operations of forward and backward passes over a step's tokens, including recomputation.

    The head's scores are computed twice (`trainers.titan.head`).
    """
    again = {"none": 0.0, "selective": 1.0, "full": 2.0}[recompute]
    blocks = (6.0 + again) * shape.computed * work.computed + (4 if recompute == "full" else 3) * _context(shape, work)
    return blocks + work.episodes * work.reply * 8.0 * shape.embedding


def _context(shape: Shape, work: Workload) -> float:
    """Attention operations of a forward pass over a step's tokens."""
    prompt = work.computed_prompt * shape.context_flops(work.prompt / 2)
    return work.episodes * (prompt + work.reply * shape.context_flops(work.prompt + work.reply / 2))


def training_parts(
    shape: Shape, work: Workload, layout: Layout, microbatch_tokens: int, gpu: Gpu | None, *, compiled: bool = False
) -> dict[str, float]:
    """Seconds of the trainer in a step, by part: computation, exchanges that don't overlap with it, and the update."""
    flops = training_flops(shape, work, layout.recompute) / layout.ranks
    if gpu is None:
        return {"compute": flops / (float(hardware.CPU_FLOPS) * (layout.threads if layout.ranks == 1 else 1))}
    compute = flops / _rate(gpu, 1)
    compute /= float(hardware.COMPILED) if compiled else 1.0
    tokens = work.computed / layout.data
    passes = ceil(tokens / microbatch_tokens)
    each = BYTES[layout.dtype]
    gathered = (2 * each + FLOAT32) * shape.parameters / layout.tensor * (1 - 1 / layout.shards)
    weights = passes * gathered / link(gpu, layout.ranks)
    collectives = 8 + 4 * (layout.recompute == "full")
    moved = tokens / layout.context * shape.dim * each * (1 - 1 / layout.tensor)
    tensor = collectives * shape.layers * moved / link(gpu, layout.tensor)
    update = 7 * FLOAT32 * shape.parameters / layout.ranks / gpu.bandwidth
    return {"compute": compute, "exchange": max(0.0, weights - compute) + tensor, "update": update}


def link(gpu: Gpu, ranks: int) -> float:
    """Bytes per second that each of `ranks` processes exchanges with the others."""
    return (gpu.link if ranks <= PER_HOST else gpu.network) * float(hardware.NETWORK_SHARE)


def reference_s(shape: Shape, work: Workload, gpu: Gpu | None, procs: int, threads: int) -> float:
    """Seconds of the reference model in a step: one forward pass, over `procs` processes."""
    flops = 2.0 * shape.computed * work.computed + _context(shape, work)
    flops += work.episodes * work.reply * 2.0 * shape.embedding
    return flops / (_rate(gpu, threads) * procs)


def _rate(gpu: Gpu | None, threads: int) -> float:
    """Operations per second of one process."""
    return float(hardware.CPU_FLOPS) * threads if gpu is None else gpu.flops * float(hardware.TRAINING_SHARE)


def decoding(
    shape: Shape, work: Workload, batch: int, procs: int, gpu: Gpu | None, dtype: str, threads: int
) -> dict[str, float]:
    """Seconds of an engine's step by part, for `batch` sequences that are on average halfway through their replies."""
    each, context = BYTES[dtype], work.prompt + work.reply / 2
    flops = batch * (2.0 * (shape.computed + shape.embedding) + shape.context_flops(context))
    if gpu is None:
        compute = flops / (_rate(None, threads) * procs)
        return {"compute": compute, "engine": batch * float(hardware.CPU_TOKEN_S)}
    read = shape.computed + shape.embedding + shape.idle * (1 - _missed(shape, batch))
    bandwidth = procs * gpu.bandwidth * float(hardware.BANDWIDTH_SHARE)
    weights, keys = read * each / bandwidth, batch * context * shape.kv_bytes(each) / bandwidth
    compute = flops / (_rate(gpu, threads) * procs)
    moved = 2 * shape.layers * 2 * batch * shape.dim * each * (1 - 1 / procs)
    exchange = moved / link(gpu, procs)
    parts = {"weights read": weights, "keys and values read": keys, "exchange": exchange}
    parts["compute"] = max(0.0, compute - weights - keys)
    return {**parts, "engine": float(hardware.ENGINE_STEP_S)}


def _missed(shape: Shape, batch: int) -> float:
    """Share of the idle experts that no token of a batch uses."""
    return (1 - shape.active / shape.experts) ** batch if shape.experts else 1.0


def prefill_s(shape: Shape, work: Workload, procs: int, gpu: Gpu | None, threads: int) -> float:
    """Seconds of one engine for an episode's prompt, averaged over a group, whose episodes share one prefill."""
    flops = (2.0 * shape.computed + shape.context_flops(work.prompt / 2)) * work.prompt / work.group
    return flops / (_rate(gpu, threads) * procs)


@dataclass(frozen=True, slots=True)
class Sync:
    """Duration of sending new weights to the generators, by part.

    Attributes:
        copy: seconds for which the trainer waits while every rank copies its shards to its host's memory.
        publish: seconds until the weights can be pulled.
        pull: seconds until all hosts have fetched them.
        load: seconds for which a generator pauses to load them.
    """

    bytes: float
    copy: float
    publish: float
    pull: float
    load: float

    @property
    def seconds(self) -> float:
        """Seconds from the end of a training step until the generators sample with its weights."""
        return self.copy + self.publish + self.pull + self.load


def weight_sync(
    shape: Shape, layout: Layout, gpu: Gpu | None, procs: int, generator_hosts: int, trainer_host: bool
) -> Sync:
    """Forecast the transfer of new weights from the trainer to all generators; `procs` are those of one engine."""
    size = shape.parameters * BYTES[layout.dtype]
    copy = size / layout.ranks / gpu.bus if gpu is not None else 0.0
    others = generator_hosts - trainer_host
    pull = size / float(hardware.STORE_PULL) * trainer_host + others * size / float(hardware.HOST_COPY)
    load = size / procs / gpu.bus if gpu is not None else 0.0
    return Sync(size, copy, size / float(hardware.STORE_PUSH), pull, load)


@dataclass(frozen=True, slots=True)
class Step:
    """Forecast of a training step.

    Attributes:
        generation: seconds in which the generators sample the step's episodes, by part.
        learning: seconds of trainer and reference model, by part.
        sync: transfer of the step's weights to the generators; None if nothing is sampled.
        ahead: number of steps that generation may run ahead.
        tokens: number of tokens in prompts and replies.
        sampled: number of tokens in replies.
        in_turns: whether generation and learning use the same GPUs, or the generators sleep while the trainer works.
    """

    generation: Mapping[str, float]
    learning: Mapping[str, float]
    sync: Sync | None
    ahead: int
    tokens: int
    sampled: int
    in_turns: bool = False

    @property
    def generation_s(self) -> float:
        """Seconds of generation."""
        return sum(self.generation.values())

    @property
    def learning_s(self) -> float:
        """Seconds of learning."""
        return sum(self.learning.values())

    @property
    def round_s(self) -> float:
        """Seconds of one round: sample episodes, train on them, and load the new weights into the generators."""
        return self.generation_s + self.learning_s + (self.sync.seconds - self.sync.copy if self.sync else 0.0)

    @property
    def computing_s(self) -> float:
        """Seconds of generation and learning, which overlap unless they take turns (`in_turns`)."""
        both = self.generation_s, self.learning_s
        return sum(both) if self.in_turns else max(both)

    @property
    def transfer_s(self) -> float:
        """Seconds for which a version of the weights is in transit; the next one is sent afterwards."""
        return self.sync.seconds - self.sync.copy if self.sync and self.ahead else 0.0

    @property
    def seconds(self) -> float:
        """Seconds from one step to the next: the longest of `computing_s`, `transfer_s` and a round's share of it.

        Rounds overlap: `ahead` + 1 of them run at once, so one ends every `round_s` / (`ahead` + 1) seconds.
        """
        return max(self.computing_s, self.transfer_s, self.round_s / (self.ahead + 1))

    @property
    def why(self) -> str:
        """Explanation of `seconds`, as text."""
        if not self.generation:
            return "training alone"
        if self.seconds == self.transfer_s:
            return "the weight sync: one version is in transit at a time"
        if self.seconds > self.computing_s:
            overlap = f", of which {self.ahead + 1} are in progress" if self.ahead else ""
            return f"a round of generation, training and weight sync{overlap}"
        return "generation and training take turns" if self.in_turns else "the longer of generation and training"

    @property
    def bottleneck(self) -> str:
        """The longest part of the side that limits the step, such as `trainer: compute`."""
        sides = {"generation": self.generation, "trainer": self.learning}
        if self.sync is not None and self.seconds > self.computing_s:
            published = {"publish": self.sync.publish, "pull": self.sync.pull, "load": self.sync.load}
            sides["weight sync"] = published
        side = max(sides, key=lambda name: sum(sides[name].values()))
        part = max(sides[side], key=lambda name: sides[side][name])
        return f"{side}: {part}"
