"""Peak rates of GPUs and the shares of them that are reached: all constants of docs/plan.md, with their sources."""

from __future__ import annotations

import re
from dataclasses import dataclass

from forge_env.errors import UsageError, suggestion

PER_HOST = 8
"""Number of GPUs in a host, as in every vendor's servers for training."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU with the peak figures of its vendor's data sheet.

    Attributes:
        memory_gib: memory available to programs, GiB.
        flops: dense bfloat16 operations per second, without sparsity.
        bandwidth: memory bandwidth, bytes per second.
        link: bandwidth to other GPUs of the host, bytes per second in one direction.
        network: bandwidth to other hosts in the vendor's server, bytes per second and GPU in one direction.
        bus: bandwidth to the host's memory, bytes per second in one direction.
    """

    name: str
    memory_gib: float
    flops: float
    bandwidth: float
    link: float
    network: float
    bus: float
    source: str


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 79.6, 989e12, 3.35e12, 450e9, 50e9, 64e9, "NVIDIA H100 SXM data sheet; DGX H100"),
        Gpu("H200", 140.4, 989e12, 4.8e12, 450e9, 50e9, 64e9, "NVIDIA H200 SXM data sheet; DGX H200"),
        Gpu("B200", 179.0, 2250e12, 8.0e12, 900e9, 50e9, 64e9, "NVIDIA DGX B200 data sheet"),
        Gpu("A100", 79.2, 312e12, 2.039e12, 300e9, 25e9, 32e9, "NVIDIA A100 80GB SXM data sheet; DGX A100"),
        Gpu("L40S", 44.5, 362e12, 0.864e12, 32e9, 12.5e9, 32e9, "NVIDIA L40S data sheet; no NVLink"),
        Gpu("MI300X", 191.0, 1307e12, 5.3e12, 448e9, 50e9, 64e9, "AMD Instinct MI300X data sheet"),
    )
}
"""Known kinds of GPU, by name."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A measured, published or assumed figure.

    Attributes:
        value: the figure in SI units; shares are between 0 and 1.
        kind: `measured` (docs/benchmarks.md has the run), `published`, or `assumed`.
        source: the figure's source; for an assumed one, its meaning.
    """

    value: float
    kind: str
    source: str

    def __float__(self) -> float:
        return self.value


TITAN = "TorchTitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1: Llama 3.1 8B, 8 H100 (500 W), FSDP"
TRAINING_SHARE = Constant(0.34, "published", f"{TITAN}, 5,762 tokens/s and GPU")
"""Share of a GPU's peak operations reached in training without compilation; recomputation is counted."""
COMPILED = Constant(1.157, "published", f"{TITAN}, 6,667 tokens/s with compilation")
"""Speedup of training with compiled blocks."""
NETWORK_SHARE = Constant(0.8, "assumed", "share of a link that large collectives reach")
BANDWIDTH_SHARE = Constant(
    0.77, "published", "vLLM 0.23, Llama 3.1 8B, A100: johnmusgrave.com/p/vllm-throughput-latency-sweep-on"
)
"""Share of a GPU's memory bandwidth that decoding reaches."""
ENGINE_STEP_S = Constant(0.004, "assumed", "an engine around each step: scheduling, sampling, recording")
CPU_FLOPS = Constant(4.1e10, "measured", "docs/benchmarks.md, Trainer: packed rows, a thread")
"""Operations per second of one thread of the CPU trainer."""
CPU_TOKEN_S = Constant(1.0e-4, "measured", "docs/benchmarks.md, Generator throughput: the default recipe's model")
"""CPU seconds per sampled token of a CPU generator, in addition to the model's operations."""
STORE_PUSH = Constant(
    9.9e9, "measured", "1024 MB in 108 ms on an earlier machine; docs/benchmarks.md, Weight sync: 293 ms"
)
STORE_PULL = Constant(
    6.3e9, "measured", "1024 MB in 171 ms on an earlier machine; docs/benchmarks.md, Weight sync: 422 ms"
)
HOST_COPY = Constant(
    1.03e9, "measured", "1024 MB in 1.04 s on an earlier machine; docs/benchmarks.md, Weight sync: 1.37 s"
)
"""Bytes per second of weights copied from one host to another through the store."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A number of GPUs of one kind."""

    count: int
    gpu: Gpu

    @property
    def hosts(self) -> int:
        """Number of hosts that contain the GPUs."""
        return -(-self.count // PER_HOST)

    def __str__(self) -> str:
        hosts = f" in {self.hosts} hosts" if self.hosts > 1 else ""
        return f"{self.count} {self.gpu.name}{hosts}"


def parse_cluster(text: str) -> Cluster:
    """Parse a cluster such as `8xH100`; without a number it has one GPU."""
    match = re.fullmatch(r"(?:(\d{1,6})x)?([A-Za-z0-9]+)", text.strip())
    if match is None or match[1] == "0":
        raise UsageError(f"--gpus {text!r} is not a number and a kind of GPU", fix="for example 8xH100")
    kinds = {name.lower(): gpu for name, gpu in GPUS.items()}
    if (gpu := kinds.get(match[2].lower())) is None:
        raise UsageError(
            f"--gpus: unknown GPU {match[2]!r}", fix=suggestion(match[2], GPUS, f"known: {', '.join(GPUS)}")
        )
    return Cluster(int(match[1] or 1), gpu)
