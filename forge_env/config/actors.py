"""The sections of a recipe about models and the actors that hold them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from forge_env.config.base import Fraction, NonNegative, Positive, Section


class TinyModel(Section):
    """Shape of the checkpoint that `model.path: tiny` builds (Qwen3 architecture)."""

    layers: Positive = 4
    """Transformer blocks."""
    dim: Positive = 128
    """Width of the residual stream."""
    heads: Positive = 4
    """Query heads."""
    kv_heads: Positive = 2
    """Key and value heads."""
    head_dim: Positive = 32
    """Size of one head; vLLM wants a multiple of 32."""
    hidden_dim: Positive = 384
    """Width of the feed-forward layer."""
    vocab_size: Annotated[int, Field(ge=320)] = 1024
    """Most tokens in the vocabulary; all 256 bytes, the chat format's tokens and its fixed phrases are among them."""
    rope_theta: float = 10_000.0
    """Base of the rotary position embedding."""

    @model_validator(mode="after")
    def _shapes(self) -> TinyModel:
        if self.heads % self.kv_heads:
            raise ValueError("heads must be a multiple of kv_heads")
        if self.head_dim % 32:
            raise ValueError("head_dim must be a multiple of 32 (vLLM's attention kernels)")
        return self


class ModelSection(Section):
    """Which model."""

    path: str = "tiny"
    """`tiny` builds a small model here; otherwise a checkpoint folder or a hub name such as Qwen/Qwen3-0.6B."""
    renderer: str = "qwen3"
    """Chat format, by its name in the `renderers` library; a model built here speaks those of Qwen3 and Nemotron 3."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the generator's weights and of all arithmetic; the trainer keeps its weights in float32."""
    max_length: Positive = 512
    """Tokens of a whole conversation; an episode that reaches it is truncated."""
    tiny: TinyModel = TinyModel()
    """Shape of the model that `path: tiny` builds."""
    cache_dir: str | None = None
    """Where built and warmed-up checkpoints are kept; unset: ~/.cache/forge-env (or $FORGE_ENV_CACHE)."""


class OptimizerSection(Section):
    """AdamW with linear warm-up and a decay; `muon` for hidden matrices on request."""

    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate of AdamW."""
    muon_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate of Muon for hidden matrices; 0: AdamW trains them too."""
    beta1: Fraction = 0.9
    """AdamW's first-moment decay."""
    beta2: Fraction = 0.95
    """AdamW's second-moment decay."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay; with Muon, of the hidden matrices only."""
    warmup_steps: NonNegative = 5
    """Steps of linear warm-up."""
    schedule: Literal["linear", "cosine", "sqrt", "constant"] = "linear"
    """Shape of the decay from the peak to the rate at the end; `constant`: none after the warm-up."""
    decay_start: Fraction = 0.5
    """Fraction of the run after which the rate decays."""
    min_lr_ratio: Fraction = 0.1
    """Rate at the end, as a fraction of the peak."""
    max_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this global norm."""


class WarmupSection(Section):
    """Supervised fine-tuning on the environment's demonstrations before RL; its result is cached."""

    steps: NonNegative = 600
    """Optimizer steps; 0 skips the warm-up."""
    batch_size: Positive = 16
    """Demonstrations in a step."""
    threads: Positive = 2
    """CPU threads of a trainer of one process while it has the machine to itself."""
    optimizer: OptimizerSection = OptimizerSection(
        lr=3e-3, muon_lr=3e-3, beta2=0.99, weight_decay=0.05, warmup_steps=20, decay_start=0.0, min_lr_ratio=0.02
    )
    """Its own optimizer."""


class GeneratorSection(Section):
    """vLLM, in processes of its own."""

    num_replicas: Positive = 1
    """Engines that generate."""
    procs: Positive = 1
    """Processes (tensor-parallel ranks) of one engine."""
    with_gpus: bool = False
    """One GPU per process."""
    max_num_seqs: Positive = 128
    """Sequences decoded together in one engine."""
    gpu_memory_utilization: Fraction = 0.9
    """GPU only: share of its memory for weights and key-value cache."""
    kv_cache_gb: Positive = 1
    """CPU only: key-value cache of one engine, GiB."""
    threads: Positive = 1
    """CPU only: threads of one engine."""
    enforce_eager: bool = True
    """GPU only: run without graph capture, which starts faster and decodes slower."""
    recompute_on_update: bool = False
    """After new weights, compute keys and values of requests in flight anew; off: keep them, which costs nothing."""


class ParallelismSection(Section):
    """How the trainer's processes share the work; the product of the degrees is `trainer.procs`."""

    data_parallel_shard_degree: int = -1
    """Processes among which the batch, the weights and the optimizer's state are split (FSDP); -1: the rest."""
    tensor_parallel_degree: Positive = 1
    """Processes that split every weight matrix, with the same part of the batch."""
    context_parallel_degree: Positive = 1
    """Processes that split every sequence."""
    pipeline_parallel_degree: Positive = 1
    """Processes that split the layers among them."""

    @model_validator(mode="after")
    def _degrees(self) -> ParallelismSection:
        if self.data_parallel_shard_degree < 1 and self.data_parallel_shard_degree != -1:
            raise ValueError("data_parallel_shard_degree must be at least 1, or -1 for all processes that are left")
        return self


class TrainerSection(Section):
    """TorchTitan, in processes of its own."""

    procs: Positive = 1
    """Processes; `parallelism` says how they share the work."""
    parallelism: ParallelismSection = ParallelismSection()
    """How they share it; by default each has its part of the batch and of the weights (FSDP)."""
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass instead of kept: the cheap ones, or all. Saves memory."""
    compile: bool = False
    """Compile the transformer blocks (GPU): minutes of start-up, faster steps."""
    with_gpus: bool = False
    """One GPU per process."""
    threads: Positive = 1
    """CPU threads of a trainer of one process, and of the reference model."""
    optimizer: OptimizerSection = OptimizerSection()
    """Optimizer of the RL phase."""
    microbatch_tokens: Positive = 8192
    """Tokens in one forward-backward pass, padding included."""
    minibatches: Positive = 1
    """Optimizer updates made from one batch of groups."""

    @model_validator(mode="after")
    def _processes(self) -> TrainerSection:
        degrees = self.parallelism.model_dump()
        product = 1
        for degree in degrees.values():
            product *= max(degree, 1)
        free = self.parallelism.data_parallel_shard_degree == -1
        if self.procs != product and not (free and self.procs % product == 0):
            stated = ", ".join(f"{name}={degree}" for name, degree in degrees.items() if degree != 1)
            raise ValueError(
                f"the product of parallelism's degrees ({stated}) must be procs={self.procs}: "
                f"use trainer.procs={product}, or other degrees"
            )
        return self
