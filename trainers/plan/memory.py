"""Peak memory of the trainer, the reference model and the generators, from a model's sizes and a recipe's keys.

What is counted is what torch allocates, in the way its kernels keep tensors for the backward pass. The counts are held
against real passes on the CPU, and against passes of the recipes at their real sizes with tensors that have no memory
(`tests/trainers/plan`). The allocator's own waste, CUDA and NCCL are not tensors: `RESERVED_GIB`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from forge_env.config.recipe import OptimizerSection, ParallelismSection
from trainers.plan.shape import Shape

GIB = 2**30
FLOAT32 = 4
BYTES = {"float32": 4, "bfloat16": 2}
RESERVED_GIB = 2.0
"""Of a GPU, for CUDA's context, NCCL's buffers and what the allocator can't use. Assumed, not measured."""
TILE_BYTES = {"cpu": 2**23, "cuda": 2**28}
"""Scores that the head holds at once, in float32 (`trainers.titan.head.TILE`)."""
ENGINE_TOKENS = 8192
"""Tokens that an engine computes at once (vLLM's `max_num_batched_tokens` on a GPU)."""
GRID = 1.5
"""Attention gives each sequence of a packed row a row of its own, padded to the longest: at most twice the tokens
(`trainers.titan.packing`). Assumed where the lengths aren't known."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the trainer's processes share the work.

    Attributes:
        data: processes with another part of the batch.
        tensor: processes that split each matrix.
        context: processes that split each row of tokens.
        recompute: `none`, `selective` or `full`.
        dtype: of the arithmetic.
        device: `cpu` or `cuda`.
        threads: passes side by side, on a CPU and in one process.
    """

    data: int = 1
    tensor: int = 1
    context: int = 1
    recompute: str = "none"
    dtype: str = "float32"
    device: str = "cuda"
    threads: int = 1

    @classmethod
    def of(cls, procs: int, section: ParallelismSection, **options: str | int) -> Layout:
        """From a recipe's keys."""
        tensor, context = section.tensor_parallel_degree, section.context_parallel_degree
        return cls(procs // (tensor * context), tensor, context, **options)  # type: ignore[arg-type]

    @property
    def ranks(self) -> int:
        """All processes."""
        return self.data * self.tensor * self.context

    @property
    def shards(self) -> int:
        """Processes that FSDP spreads each weight over."""
        return self.data * self.context

    @property
    def alone(self) -> bool:
        """Whether there is one process, which casts weights in each layer; FSDP casts them once, and all else."""
        return self.ranks == 1 and self.dtype != "float32"

    @property
    def precision(self) -> int:
        """Bytes of what matrices are multiplied with."""
        return BYTES[self.dtype]

    @property
    def residual(self) -> int:
        """Bytes of an element of the residual stream."""
        return FLOAT32 if self.alone else self.precision

    def normed(self, each: int, *, mixed: bool = False) -> int:
        """Bytes that a norm keeps of an element that has `each`.

        torch has a kernel for norms on GPUs that keeps its input. On a CPU, and where input and weight differ in
        precision, a norm is made of single operations, which keep input and normed values in float32.
        """
        return each if self.device == "cuda" and not mixed else 2 * FLOAT32


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by part; parts that are not there at the same time are not added up, `peak` is."""

    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())


def optimizer_bytes(shape: Shape, section: OptimizerSection) -> float:
    """Moments of all parameters: AdamW keeps two, Muon one of the hidden matrices (not of experts)."""
    moments = 2 * FLOAT32 * shape.parameters
    if section.muon_lr > 0:
        matrices = 2 * shape.dim * (shape.queries + shape.keys)
        dense = (shape.layers - shape.mixtures) * 3 * shape.dim * shape.hidden
        moments -= FLOAT32 * (shape.layers * matrices + dense)
    return moments


def saved_bytes(shape: Shape, layout: Layout, tokens: int, grid: float, *, mixture: bool) -> float:
    """What the forward pass of one block keeps of a token for its backward pass, recomputing nothing.

    Args:
        tokens: of a row, over all processes that share it.
        grid: rows of attention, in tokens for each token.
        mixture: a block with experts.
    """
    own, tensor = layout.precision, layout.tensor
    q, k = shape.queries / tensor, shape.keys / tensor
    # Between blocks, tensor parallelism splits the row itself; what linear layers read is whole.
    residual = 2 * shape.dim * layout.normed(layout.residual) / tensor
    inputs = shape.dim * own * (5 if layout.alone else 2)  # a cast for each matrix, or what they all read
    heads = (q + k) * layout.normed(own, mixed=layout.alone) * shape.qk_norm
    attention = grid * (2 * (q + k) * own + shape.heads / tensor * FLOAT32) + q * own
    if layout.context > 1:  # keys and values of the whole row, and a mask of what each token sees of it
        attention = 3 * q * own + (2 * k * layout.context + tokens) * own + shape.heads / tensor * FLOAT32
    rotary = 2 * shape.head_dim * FLOAT32 if shape.qk_norm else shape.head_dim * FLOAT32
    roots = FLOAT32 * (2 / tensor + (shape.heads + shape.kv_heads) / tensor * shape.qk_norm)
    return residual + inputs + heads + attention + rotary + roots + _feed_forward_bytes(shape, layout, mixture=mixture)


def _feed_forward_bytes(shape: Shape, layout: Layout, *, mixture: bool) -> float:
    own = layout.precision
    if not mixture:
        return 4 * shape.hidden / layout.tensor * own
    router = shape.experts * (FLOAT32 + FLOAT32 + 1) + (shape.dim * FLOAT32 if own != FLOAT32 else 0)
    rows = 2 * shape.dim + 4 * shape.expert_hidden
    return router + shape.active * (rows * own + 24)


def _between(shape: Shape, layout: Layout, tokens: int, grid: float, *, mixture: bool) -> tuple[float, float]:
    """What is kept of a token from the forward to the backward pass of a block, and what recomputing adds to it."""
    everything = saved_bytes(shape, layout, tokens, grid, mixture=mixture)
    if layout.recompute == "none":
        return everything, 0.0
    own, tensor = layout.precision, layout.tensor
    kept = shape.dim * layout.residual / tensor
    if layout.recompute == "selective":  # the results of every second matrix: of q, v, the first and last feed-forward
        attention = (shape.queries + shape.keys) / tensor * own
        if layout.device == "cuda":  # attention's results are kept as well, where it is one of a GPU's kernels
            attention += grid * (shape.queries * own + shape.heads * FLOAT32) / tensor
        hidden = 0.0 if mixture else shape.hidden / tensor * own + shape.dim * own
        kept += attention + hidden
    return kept, everything - kept


@dataclass(frozen=True, slots=True)
class Pass:
    """Bytes of a forward and backward pass, at the two moments when they are most.

    Attributes:
        activations: kept by all blocks.
        head: what the last layer takes while all of those are there.
        block: what the backward pass of one block takes, the first one, while the others' are there.
    """

    activations: float
    head: float
    block: float

    @property
    def peak(self) -> float:
        """Whichever is more."""
        return self.activations + max(self.head, self.block)


def passes(shape: Shape, layout: Layout, tokens: int, targets: int, grid: float) -> Pass:
    """Of one microbatch in one process.

    Args:
        tokens: of a row, of which context parallelism gives each process its part.
        targets: those of them that are learned.
    """
    own, tensor = layout.precision, layout.tensor
    rows, learned = ceil(tokens / layout.context), ceil(targets / layout.context)
    dense, mixture = shape.layers - shape.mixtures, shape.mixtures
    kept = recomputed = 0.0
    for count, experts in ((dense, False), (mixture, True)):
        if count:
            each, more = _between(shape, layout, tokens, grid, mixture=experts)
            kept, recomputed = kept + count * each * rows, max(recomputed, more * rows)
    hidden = shape.expert_hidden * shape.active if mixture else shape.hidden / tensor
    working = rows * (2 * hidden * own + 2 * shape.dim * layout.residual / tensor)
    final = rows * shape.dim * layout.normed(layout.residual) / tensor
    casts = (shape.blocks + shape.embedding) * own if layout.alone else 0
    block = recomputed + working
    if layout.ranks > 1:  # FSDP: a block's weights, those of the one that comes next, and gradients in both precisions
        block += shape.largest_block / tensor * (2 * own + own + FLOAT32) + shape.embedding / tensor * own
    head = final + learned * shape.dim * (own + 2 * FLOAT32) + _head_bytes(shape, layout, learned)
    return Pass(kept + casts, head, block)


def _head_bytes(shape: Shape, layout: Layout, targets: int) -> float:
    """What the head takes besides its inputs: tiles of scores, its gradient, and FSDP's copy of its weight."""
    own, part = layout.precision, shape.embedding / layout.tensor
    scores = targets * shape.vocabulary / layout.tensor * FLOAT32
    tile = min(TILE_BYTES[layout.device], scores)
    rough = tile * own / FLOAT32 if own != FLOAT32 else 0.0  # as it comes from the product, and as it goes into others
    gradient = part * own
    passes = [2 * tile + rough, tile * (2 if tile == scores else 1) + 2 * rough + gradient]
    if own != FLOAT32:
        passes.append(gradient + part * FLOAT32)  # in float32, for the optimizer or on its way to who keeps it
    return max(passes) + (part * own if layout.ranks > 1 else 0.0)


def trainer_memory(
    shape: Shape, layout: Layout, optimizer: OptimizerSection, *, tokens: int, targets: int, grid: float = GRID
) -> Memory:
    """Peak bytes of one process from its second step on, when gradients and the optimizer's state are there.

    Args:
        tokens: of a microbatch.
        targets: those of them that are learned.
        grid: rows of attention, in tokens for each token.
    """
    weights = FLOAT32 * shape.parameters / layout.ranks
    moments = optimizer_bytes(shape, optimizer) / layout.ranks
    found = passes(shape, layout, tokens, targets, grid)
    side_by_side = layout.threads if layout.ranks == 1 and layout.device == "cpu" else 1
    gradients = weights * (1 + (side_by_side if side_by_side > 1 else 0))
    update = weights if layout.device == "cpu" else 0.0  # AdamW over lists of tensors makes one more copy
    rest = max(found.peak * side_by_side, update)
    shared = min(found.activations * side_by_side, rest)
    return Memory(
        {
            "weights": weights,
            "gradients": gradients,
            "optimizer": moments,
            "activations": shared,
            "head, or one block": rest - shared,
        }
    )


def scoring_memory(shape: Shape, layout: Layout, tokens: int) -> Memory:
    """Peak bytes of one process of a model that is not trained, with microbatches of so many tokens."""
    hidden = shape.expert_hidden * shape.active if shape.mixtures else shape.hidden
    working = tokens * (3 * hidden * layout.precision + 3 * shape.dim * layout.residual)
    # FSDP has a block's weights whole, and those of the next one; alone, bfloat16 needs a copy of the block
    blocks = 2 if layout.shards > 1 else int(layout.alone)
    cast = blocks * shape.largest_block * layout.precision
    head = 2 * TILE_BYTES[layout.device] + (shape.embedding * layout.precision if blocks else 0)
    return Memory(
        {"weights": FLOAT32 * shape.parameters / layout.ranks, "head, or one block": max(working + cast, head)}
    )


def generator_memory(shape: Shape, procs: int, dtype: str, device: str, *, given: float | None, cache: float) -> Memory:
    """Bytes of one process of an engine.

    Args:
        given: what it may use of its GPU; the rest of that becomes room for keys and values. None: `cache`.
        cache: bytes for keys and values of the engine.
    """
    weights = shape.parameters * BYTES[dtype] / procs
    if device == "cpu":
        return Memory({"weights": weights, "keys and values": cache / procs})
    working = ENGINE_TOKENS * (4 * shape.hidden / procs + 4 * shape.dim) * BYTES[dtype]
    working += ENGINE_TOKENS * shape.vocabulary / procs * FLOAT32 / 16
    room = cache / procs if given is None else given - weights - working
    return Memory({"weights": weights, "activations": working, "keys and values": room})
