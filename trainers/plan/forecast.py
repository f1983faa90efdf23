"""A recipe's forecast: placement of its processes, memory of each, and duration of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from forge_env import __version__
from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from forge_env.job.addresses import Address
from forge_env.job.card import Card
from forge_env.job.needs import needed_gpus
from forge_env.job.plan import Plan, units
from trainers.model.adapter import adapter_parameters, targets
from trainers.model.folder import check_generator_heads, check_heads
from trainers.plan.hardware import PER_HOST, Cluster, Gpu
from trainers.plan.memory import GIB, RESERVED_GIB, Layout, Memory, generator_memory, scoring_memory, trainer_memory
from trainers.plan.shape import Shape, model_config, named_config
from trainers.plan.speed import (
    Step,
    Workload,
    decoding,
    prefill_s,
    reference_s,
    training_parts,
    weight_sync,
)

CPUS, PLENTY_GIB = 64, 1e6
"""CPUs and GiB of memory of each assumed host: so much that only its GPUs limit the placement."""
RESTING = ("weights", "optimizer")
"""Parts of a trainer's memory that it keeps between two steps."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A kind of process, the number of such processes, and the memory of one.

    Attributes:
        room: bytes of its GPU that other processes don't hold; None: the process uses the host's memory, which it
            shares with others.
    """

    name: str
    count: int
    memory: Memory
    room: float | None

    @property
    def fits(self) -> bool:
        """Whether the memory of a process fits into its room."""
        return self.room is None or self.memory.peak <= self.room


class Forecast:
    """Forecast of a recipe on a cluster; roles without GPUs are forecast on CPUs."""

    def __init__(self, config: RunConfig, work: Workload, cluster: Cluster) -> None:
        self.config, self.work, self.cluster = config, work, cluster
        hf = model_config(config.model)
        self.shape = Shape.of(hf, config.model.path)
        trainer, generator = config.trainer, config.generator
        dims = trainer.parallelism
        check_heads(hf, dims.tensor_parallel_degree, dims.context_parallel_degree)
        if config.rolls_out:
            check_generator_heads(hf, generator.procs)
        self.trained_parameters, adapters = self.shape.parameters, 0
        """Number of parameters that are trained: all, or those of the adapters."""
        if config.lora is not None:
            adapters = config.lora.rank * len(targets(config.lora, hf))
            self.trained_parameters = adapter_parameters(config.lora, hf)
        self.layout = Layout.of(
            trainer.procs,
            trainer.parallelism,
            recompute=trainer.activation_checkpoint,
            dtype=config.model.dtype,
            device="cuda" if trainer.with_gpus else "cpu",
            threads=trainer.threads,
            adapters=adapters,
        )
        self.needed = needed_gpus(config)

    def gpu(self, used: bool) -> Gpu | None:
        """The cluster's kind of GPU if a role uses any; otherwise None."""
        return self.cluster.gpu if used else None

    @cached_property
    def reference(self) -> Shape | None:
        """Shape of the reference model, or None if the recipe uses none."""
        section = self.config.grpo.reference
        if section.source == "none" or not self.config.rolls_out:
            return None
        return self.shape if section.path is None else Shape.of(named_config(section.path), section.path)

    @cached_property
    def holders(self) -> list[Holder]:
        """All kinds of processes with the memory of one."""
        separate = list(self._holders())
        if not self.config.job.share_gpus:
            return separate
        on_gpu = [holder for holder in separate if holder.room is not None]
        return [
            holder
            if holder.room is None
            else replace(holder, room=holder.room - sum(self._held(other, holder) for other in on_gpu))
            for holder in separate
        ]

    def _held(self, holder: Holder, other: Holder) -> float:
        """Bytes of a shared GPU that `holder` keeps while `other` is at its peak."""
        if holder is other:
            return 0.0
        if self.config.generator.sleep and {holder.name, other.name} == {"trainer", "generator"}:
            return sum(holder.memory.parts.get(part, 0.0) for part in RESTING) if holder.name == "trainer" else 0.0
        return holder.memory.peak

    def _holders(self) -> Iterator[Holder]:
        config, work = self.config, self.work
        trainer, generator = config.trainer, config.generator
        room = (self.cluster.gpu.memory_gib - RESERVED_GIB) * GIB
        tokens = min(trainer.microbatch_tokens, max(int(work.computed / self.layout.data), work.prompt + work.reply))
        each = work.computed / work.episodes
        memory = trainer_memory(
            self.shape,
            self.layout,
            trainer.optimizer,
            tokens=tokens,
            targets=int(tokens * work.reply / each),
            copies=(work.prompt + work.reply) / each,
            trained=self.trained_parameters,
        )
        yield Holder("trainer", trainer.procs, memory, room if trainer.with_gpus else None)
        if self.reference is not None:
            on_gpu = config.grpo.reference.with_gpus
            procs = config.grpo.reference.procs
            layout = Layout(data=procs, dtype=config.model.dtype, device="cuda" if on_gpu else "cpu")
            yield Holder("reference", procs, scoring_memory(self.reference, layout, tokens), room if on_gpu else None)
        if config.rolls_out:
            count = generator.num_replicas * generator.procs
            shared = config.job.share_gpus
            given = None if shared else self.cluster.gpu.memory_gib * GIB * generator.gpu_memory_utilization
            memory = generator_memory(
                self.shape,
                generator.procs,
                config.model.dtype,
                "cuda" if generator.with_gpus else "cpu",
                given=given,
                cache=generator.kv_cache_gb * GIB,
            )
            yield Holder("generator", count, memory, (room if shared else given) if generator.with_gpus else None)

    @cached_property
    def capacity(self) -> int:
        """Number of sequences that one engine can decode together: at most those whose keys and values fit."""
        return max(1, min(self.config.generator.max_num_seqs, self.cached))

    @cached_property
    def cached(self) -> int:
        """Number of sequences whose keys and values fit into the memory of one engine."""
        holder = next(holder for holder in self.holders if holder.name == "generator")
        each = self.shape.kv_bytes(4 if self.config.model.dtype == "float32" else 2) / self.config.generator.procs
        return int(holder.memory.parts["keys and values"] / (each * (self.work.prompt + self.work.reply)))

    @cached_property
    def batch(self) -> int:
        """Number of sequences that one engine decodes together: at most its share of the episodes in flight."""
        return max(1, min(self.capacity, -(-self.work.in_flight // self.config.generator.num_replicas)))

    @cached_property
    def decoding(self) -> dict[str, float]:
        """Seconds of a decoding step of one engine, by part."""
        section = self.config.generator
        return decoding(
            self.shape,
            self.work,
            self.batch,
            section.procs,
            self.gpu(section.with_gpus),
            self.config.model.dtype,
            section.threads,
        )

    @cached_property
    def step(self) -> Step:
        """A training step."""
        config, work = self.config, self.work
        trainer, generator = config.trainer, config.generator
        learning = training_parts(
            self.shape,
            work,
            self.layout,
            trainer.microbatch_tokens,
            self.gpu(trainer.with_gpus),
            compiled=trainer.compile,
        )
        if self.reference is not None:
            on_gpu = self.gpu(config.grpo.reference.with_gpus)
            learning["reference model"] = reference_s(
                self.reference, work, on_gpu, config.grpo.reference.procs, trainer.threads
            )
        sampled = work.episodes * work.reply
        if not config.rolls_out:
            return Step({}, learning, None, 0, work.tokens, 0)
        gpu = self.gpu(generator.with_gpus)
        steps = work.reply * work.episodes / (self.batch * generator.num_replicas)
        if work.steps_apart == 0:  # training waits for the longest reply of the batch
            steps = max(steps, work.longest)
        generation = {name: seconds * steps for name, seconds in self.decoding.items()}
        prompts = work.episodes / generator.num_replicas
        generation["prompts"] = prompts * prefill_s(self.shape, work, generator.procs, gpu, generator.threads)
        sync = weight_sync(self.shape, self.layout, self.gpu(trainer.with_gpus), generator.procs, *self._hosts())
        learning["weights to the host"] = sync.copy
        if generator.sleep and gpu is not None:
            learning["generators to sleep and back"] = 2 * sync.bytes / generator.procs / gpu.bus
        shared = generator.sleep or (config.job.share_gpus and trainer.with_gpus and generator.with_gpus)
        return Step(generation, learning, sync, work.steps_apart, work.tokens, sampled, shared)

    def _hosts(self) -> tuple[int, bool]:
        """Number of hosts with generators, and whether the trainer's host is one of them."""
        if not self.config.generator.with_gpus:
            return 1, True
        used = -(-self.needed // PER_HOST)
        section = self.config.generator
        hosts = max(1, -(-section.num_replicas * section.procs // PER_HOST))
        return hosts, hosts >= used

    def placement(self) -> list[str]:
        """Place the run's actors on hosts of eight GPUs, and return one line for each host."""
        if not self.needed:
            return ["this machine's processors: everything"]
        hosts = max(-(-self.needed // PER_HOST), self.config.trainer.hosts, self.config.generator.hosts)
        last = None
        for count in range(hosts, 2 * hosts + 1):  # more hosts may be needed, since replicas can leave GPUs unused
            ids = [str(number) for number in range(PER_HOST)]
            cards = [Card(__version__, "", f"host{n}", "", "", CPUS, PLENTY_GIB, ids) for n in range(count)]
            addresses = [Address("tcp", f"host{n}", self.config.job.port) for n in range(count)]
            plan = Plan(self.config.job.model_copy(update={"place": {}}), addresses, cards)
            try:
                for unit in units(self.config):
                    plan.place(unit)
            except UsageError as error:
                last = error
                continue
            return [_host(plan, number) for number in range(count)]
        assert last is not None
        raise UsageError(last.message, fix="spread it over more hosts: trainer.hosts, generator.hosts")

    @property
    def problems(self) -> list[str]:
        """Reasons why the recipe would not run on the cluster."""
        reasons = []
        if self.needed > self.cluster.count:
            reasons.append(f"it needs {self.needed} GPUs, and there are {self.cluster.count}")
        for holder in self.holders:
            if not holder.fits and holder.room is not None:
                reasons.append(
                    f"{holder.name}: {holder.memory.peak / GIB:.1f} GiB are needed on each GPU, "
                    f"{holder.room / GIB:.1f} GiB are available"
                )
            elif holder.name == "generator" and holder.memory.parts["keys and values"] <= 0:
                reasons.append("generator: the weights leave no room for keys and values")
        return reasons


def _host(plan: Plan, number: int) -> str:
    names = []
    for name, position in plan.places.items():
        if number in position.hosts:
            gpus = len(position.gpus[0])
            names.append(f"{name} ({gpus} GPU{'s' if gpus > 1 else ''})" if gpus else name)
    return f"host {number}: {', '.join(names)}"
