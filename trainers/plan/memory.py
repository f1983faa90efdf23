"""Peak memory of the trainer, the reference model and the generators, from a model's sizes and a recipe's keys.

The counts include the tensors that torch allocates, as its kernels keep them for the backward pass. Tests compare them
with real passes on the CPU, and with passes of the recipes at their real sizes on tensors without memory
(`tests/trainers/plan`). CUDA, NCCL and the allocator's waste are not tensors; `RESERVED_GIB` covers them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from forge_env.config.recipe import OptimizerSection, ParallelismSection
from trainers.model.folder import WIDEST
from trainers.plan.shape import Delta, Shape

GIB = 2**30
FLOAT32 = 4
BYTES = {"float32": 4, "bfloat16": 2}
RESERVED_GIB = 2.0
"""GiB of each GPU for CUDA's context, NCCL's buffers and memory that the allocator can't use. Assumed, not measured."""
TILE_BYTES = {"cpu": 2**23, "cuda": 2**28}
"""Bytes of the scores that the head holds at once, in float32 (`trainers.titan.head.TILE`)."""
ENGINE_TOKENS = 8192
"""Tokens that an engine computes at once (vLLM's `max_num_batched_tokens` on a GPU)."""
CHUNK = 64
"""Tokens that a gated delta layer solves together (`trainers.model.delta.CHUNK`)."""
GRID = 1.5
"""Padded tokens in attention for each token of a packed row; assumed, for unknown lengths.

Attention gives each sequence a row, padded to the longest of its grid: at most this (`trainers.titan.layout.GRID`).
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel layout of the trainer's processes.

    Attributes:
        data: number of parts of the batch that are computed in parallel.
        tensor: number of processes that split each matrix.
        context: number of processes that split each row of tokens.
        threads: number of concurrent passes in a single process on a CPU.
        adapters: sum of the ranks of a block's adapters; 0: the weights are trained.
    """

    data: int = 1
    tensor: int = 1
    context: int = 1
    recompute: str = "none"
    dtype: str = "float32"
    device: str = "cuda"
    threads: int = 1
    adapters: int = 0

    @classmethod
    def of(cls, procs: int, section: ParallelismSection, **options: str | int) -> Layout:
        """Create a layout from a recipe's keys."""
        tensor, context = section.tensor_parallel_degree, section.context_parallel_degree
        return cls(procs // (tensor * context), tensor, context, **options)  # type: ignore[arg-type]

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.data * self.tensor * self.context

    @property
    def shards(self) -> int:
        """Number of processes over which FSDP shards each weight."""
        return self.data * self.context

    @property
    def alone(self) -> bool:
        """Whether a single process computes in bfloat16: it casts weights in each layer, FSDP casts everything once."""
        return self.ranks == 1 and self.dtype != "float32"

    @property
    def precision(self) -> int:
        """Bytes of an element in matrix multiplications."""
        return BYTES[self.dtype]

    @property
    def residual(self) -> int:
        """Bytes of an element of the residual stream."""
        return FLOAT32 if self.alone else self.precision

    def normed(self, each: int, *, mixed: bool = False) -> int:
        """Bytes that a norm keeps of each element for its backward pass.

        torch's kernel for norms on GPUs keeps its input. On a CPU, or if input and weight differ in precision, a norm
        consists of single operations, which keep its input and, if its weight is trained, the normed values in float32.

        Args:
            each: bytes of an element of the norm's input.
        """
        if self.device == "cuda" and not mixed:
            return each
        return FLOAT32 if self.adapters else 2 * FLOAT32


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by part at the peak; parts that don't exist at the same time share one entry, with their maximum."""

    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        """Sum of all parts, bytes."""
        return sum(self.parts.values())


def optimizer_bytes(shape: Shape, section: OptimizerSection) -> float:
    """Bytes of the optimizer's moments: AdamW keeps two per parameter, Muon one for hidden matrices except experts."""
    moments = 2 * FLOAT32 * shape.parameters
    if section.muon_lr > 0:
        for count, sizes, experts, linear in shape.kinds:
            projections = 0 if linear else sizes.projections
            moments -= FLOAT32 * count * (projections + 3 * shape.dim * sizes.dense(experts))
    return moments


def saved_bytes(
    shape: Shape,
    layout: Layout,
    tokens: int,
    grid: float,
    *,
    mixture: bool,
    linear: bool = False,
    copies: float = 1.0,
) -> float:
    """Bytes per token that the forward pass of one block keeps for its backward pass, without recomputation.

    Args:
        tokens: tokens of a row, over all processes that share it.
        copies: copies of a token's keys and values: the sequences that share a prefix have one each.
    """
    itemsize, tensor = layout.precision, layout.tensor
    q, k = shape.queries / tensor, shape.keys / tensor
    # Between blocks, tensor parallelism splits the row itself; the inputs of linear layers are whole rows.
    residual = 2 * shape.dim * layout.normed(layout.residual) / tensor * (1 + shape.out_norms)
    inputs = shape.dim * itemsize * (5 if layout.alone else 2)  # a cast for each matrix, or their common inputs
    normed_keys = 0 if shape.shares_kv else k
    heads = (q + normed_keys) * layout.normed(itemsize, mixed=layout.alone) * shape.qk_norm
    if layout.device == "cuda" and (itemsize == FLOAT32 or shape.head_dim > WIDEST):
        k = q  # memory-efficient attention has a copy of keys and values for each head of the queries
    attention = grid * (2 * (q + copies * k) * itemsize + shape.heads / tensor * FLOAT32) + q * itemsize
    if layout.context > 1:  # keys and values of the whole row, and a mask of the tokens that each token attends to
        attention = 3 * q * itemsize + (2 * k * layout.context + tokens) * itemsize + shape.heads / tensor * FLOAT32
    attention += 3 * q * itemsize * shape.gated  # queries beside their gates, the gate and its sigmoid
    rotary = 2 * shape.head_dim * FLOAT32 if shape.qk_norm else shape.head_dim * FLOAT32
    roots = FLOAT32 * (2 / tensor + (shape.heads + shape.kv_heads) / tensor * shape.qk_norm)
    inputs += layout.adapters * itemsize
    if shape.layer_input:  # gate, its GELU, their product, and the norm of the output
        residual += shape.dim * layout.normed(layout.residual) / tensor
        inputs += 3 * shape.layer_input * itemsize + (shape.dim * itemsize if layout.alone else 0)
    feed_forward = _feed_forward_bytes(shape, layout, mixture=mixture)
    if linear:
        return residual + inputs + _delta_bytes(shape.delta, layout, copies) + 2 * FLOAT32 + feed_forward
    return residual + inputs + heads + attention + rotary + roots + feed_forward


def _delta_bytes(delta: Delta, layout: Layout, copies: float) -> float:
    """Bytes per token that a gated delta layer keeps: of its paths, and of the row."""
    wide = 2 * FLOAT32 if layout.device == "cpu" else FLOAT32
    keys, values = delta.heads * delta.key_dim, delta.values
    convolution = (delta.width + 1) * delta.mixed
    rule = 9 * keys + 3 * values + 5 * CHUNK * delta.heads + values * delta.key_dim / CHUNK
    return copies * wide * (convolution + rule) + 6 * values * FLOAT32


def _feed_forward_bytes(shape: Shape, layout: Layout, *, mixture: bool) -> float:
    itemsize = layout.precision
    dense = 4 * shape.hidden / layout.tensor * itemsize
    if not mixture:
        return dense
    router = shape.experts * (FLOAT32 + FLOAT32 + 1) + (shape.dim * FLOAT32 if itemsize != FLOAT32 else 0)
    rows = 2 * shape.dim + 4 * shape.expert_hidden
    shared = float(4 * shape.shared_hidden + shape.dim) * itemsize * (shape.shared_hidden > 0)
    if shape.beside:  # norms of both outputs, of the inputs of router and experts, and the router's scales
        shared = dense + shape.dim * (4 * layout.normed(layout.residual) + 2 * itemsize)
    return router + shape.active * (rows * itemsize + 24) + shared


def _between(
    shape: Shape, layout: Layout, tokens: int, grid: float, *, mixture: bool, linear: bool, copies: float
) -> tuple[float, float]:
    """Bytes per token of a block: kept from forward to backward pass, and added in the latter by recomputation."""
    everything = saved_bytes(shape, layout, tokens, grid, mixture=mixture, linear=linear, copies=copies)
    if layout.recompute == "none":
        return everything, 0.0
    itemsize, tensor = layout.precision, layout.tensor
    saved = shape.dim * layout.residual / tensor
    if layout.recompute == "selective":  # results of every second matrix are kept: q, v, first and last feed-forward
        attention = (shape.queries + shape.keys) / tensor * itemsize
        if layout.device == "cuda":  # results of attention are kept too if a GPU kernel computes it
            attention += grid * (shape.queries * itemsize + shape.heads * FLOAT32) / tensor
        hidden = 0.0 if mixture else shape.hidden / tensor * itemsize + shape.dim * itemsize
        saved += attention + hidden
    return saved, everything - saved


@dataclass(frozen=True, slots=True)
class Pass:
    """Bytes of a forward and backward pass at the moments when memory use may be highest.

    Attributes:
        activations: bytes that all blocks keep for the backward pass.
        head: further bytes of the head, while all activations are in memory.
        block: further bytes of the first block whose backward pass runs, while the other activations are in memory.
        end: bytes at the end of the backward pass, when per-layer embeddings get their gradients.
    """

    activations: float
    head: float
    block: float
    end: float = 0.0

    @property
    def peak(self) -> float:
        """Bytes at the moment of highest use."""
        return max(self.activations + max(self.head, self.block), self.end)


def passes(shape: Shape, layout: Layout, tokens: int, targets: int, grid: float, copies: float = 1.0) -> Pass:
    """Bytes of one microbatch's pass in one process.

    Args:
        tokens: tokens of a row, before context parallelism splits it.
        targets: tokens of the row that contribute to the loss.
    """
    itemsize, tensor = layout.precision, layout.tensor
    rows, learned = ceil(tokens / layout.context), ceil(targets / layout.context)
    saved = recomputed = 0.0
    for count, sizes, experts, delta in shape.kinds:
        if count:
            each, more = _between(sizes, layout, tokens, grid, mixture=experts, linear=delta, copies=copies)
            saved, recomputed = saved + count * each * rows, max(recomputed, more * rows)
    width = shape.layers * shape.layer_input  # of all per-layer embeddings, whose gradients come last
    learned_inputs = 0 if layout.adapters else shape.layer_inputs
    saved += rows * width * (layout.residual + layout.normed(layout.residual))
    hidden = shape.used / (1 if shape.mixtures else tensor)
    working = rows * (2 * hidden * itemsize + 2 * shape.dim * layout.residual / tensor)
    final = rows * shape.dim * layout.normed(layout.residual) / tensor
    casts = (shape.blocks + shape.embedding + shape.dim * width) * itemsize if layout.alone else 0
    block, end = recomputed + working, (learned_inputs + rows * width) * FLOAT32
    if layout.ranks > 1:  # FSDP: weights of a block and of the next one, and gradients in both precisions
        block += (
            shape.largest_block / tensor * (2 * itemsize + itemsize + FLOAT32) + shape.embedding / tensor * itemsize
        )
        casts += shape.layer_inputs * itemsize  # in FSDP's root module, gathered for the whole pass
        end += (shape.layer_inputs + learned_inputs) * itemsize
    head = final + learned * shape.dim * (itemsize + 2 * FLOAT32) + _head_bytes(shape, layout, learned)
    return Pass(saved + casts, head, block, end)


def _head_bytes(shape: Shape, layout: Layout, targets: int) -> float:
    """Bytes of the head besides its inputs: tiles of scores, its gradient, and FSDP's copy of its weight."""
    itemsize, part = layout.precision, shape.embedding / layout.tensor
    scores = targets * shape.vocabulary / layout.tensor * FLOAT32
    tile = min(TILE_BYTES[layout.device], scores)
    # a tile in low precision, as a result of one matrix product or an input of others
    rough = tile * itemsize / FLOAT32 if itemsize != FLOAT32 else 0.0
    gradient = 0.0 if layout.adapters else part * itemsize
    passes = [2 * tile + rough, tile * (2 if tile == scores else 1) + 2 * rough + gradient]
    if itemsize != FLOAT32 and not layout.adapters:
        passes.append(gradient + part * FLOAT32)  # copy in float32, for the optimizer or for the shard's rank
    return max(passes) + (part * itemsize if layout.ranks > 1 else 0.0)


def trainer_memory(
    shape: Shape,
    layout: Layout,
    optimizer: OptimizerSection,
    *,
    tokens: int,
    targets: int,
    grid: float = GRID,
    copies: float = 1.0,
    trained: int | None = None,
) -> Memory:
    """Peak bytes of one trainer process from its second step on, when gradients and optimizer state exist.

    Args:
        trained: number of parameters of the adapters; None: all weights are trained.
    """
    weights = FLOAT32 * shape.parameters / layout.ranks
    moments = optimizer_bytes(shape, optimizer) / layout.ranks
    learned = weights
    if trained is not None and trained < shape.parameters:
        learned = FLOAT32 * trained / layout.ranks
        moments = 2 * learned
    work = passes(shape, layout, tokens, targets, grid, copies)
    side_by_side = layout.threads if layout.ranks == 1 and layout.device == "cpu" else 1
    gradients = learned * (1 + (side_by_side if side_by_side > 1 else 0))
    update = learned if layout.device == "cpu" else 0.0  # AdamW over lists of tensors makes one more copy
    rest = max(work.peak * side_by_side, update)
    shared = min(work.activations * side_by_side, rest)
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
    """Peak bytes of one process of a model that is not trained, with microbatches of `tokens` tokens."""
    hidden = shape.used
    working = tokens * (3 * hidden * layout.precision + 3 * shape.dim * layout.residual)
    # FSDP gathers the weights of a block and of the next one; a single process in bfloat16 casts those of one block
    blocks = 2 if layout.shards > 1 else int(layout.alone)
    cast = blocks * shape.largest_block * layout.precision
    head = 2 * TILE_BYTES[layout.device] + (shape.embedding * layout.precision if blocks else 0)
    if layout.shards > 1:
        working += shape.layer_inputs * layout.precision
    return Memory(
        {"weights": FLOAT32 * shape.parameters / layout.ranks, "head, or one block": max(working + cast, head)}
    )


def generator_memory(shape: Shape, procs: int, dtype: str, device: str, *, given: float | None, cache: float) -> Memory:
    """Bytes of one process of an engine.

    Args:
        given: bytes of the GPU that the process may use; keys and values take the part that weights and activations
            leave. None: they take `cache`.
        cache: bytes for the engine's keys and values.
    """
    weights = shape.parameters * BYTES[dtype] / procs
    if device == "cpu":
        return Memory({"weights": weights, "keys and values": cache / procs})
    working = ENGINE_TOKENS * (4 * shape.hidden / procs + 4 * shape.dim) * BYTES[dtype]
    working += ENGINE_TOKENS * shape.vocabulary / procs * FLOAT32 / 16
    room = cache / procs if given is None else given - weights - working
    return Memory({"weights": weights, "activations": working, "keys and values": room})
