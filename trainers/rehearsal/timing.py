"""Durations of a rehearsal's parts: from the plan's constants, scaled to a recorded run if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from forge_env.job.needs import ModelMemory
from trainers.plan.forecast import Forecast
from trainers.plan.memory import GIB
from trainers.plan.speed import decoding, prefill_s

CPU_SNAPSHOT = 5.9e8
"""Bytes per second of a CPU trainer's copy for a checkpoint: 11.2 MiB in 0.02 s (docs/benchmarks.md, Checkpoints)."""
SAVE_S = 0.02
"""Seconds for which the trainer stands still in addition to that copy (same source)."""


@dataclass(frozen=True)
class Timing:
    """Durations in seconds.

    Attributes:
        capacity: sequences that an engine decodes together.
        prefill_s: seconds of an engine for each token of a prompt.
        token_s: seconds of the trainer for each token that it computes.
        step_s: seconds of the trainer for each step, in addition.
        reference_s: seconds of the reference model for each token.
        snapshot_s: seconds for which the trainer waits while its weights are copied for the generators.
        publish_s: seconds until they can be fetched.
        pull_s: seconds until all hosts have fetched them.
        load_s: seconds for which a generator pauses to load them.
        sleep_s: seconds to put the generators to sleep and to wake them (`generator.sleep`).
        save_s: seconds for which the trainer waits while its state is copied for a checkpoint.
        write_s: seconds until the checkpoint is on the disk.
        book_keeping_s: other seconds of the controller in each step.
        generation: factor on the durations of generation.
        training: factor on the durations of training.
        processors: threads that run at once where trainer and generators share processors; None: they have GPUs.
    """

    forecast: Forecast
    capacity: int
    prefill_s: float
    token_s: float
    step_s: float
    reference_s: float
    snapshot_s: float
    publish_s: float
    pull_s: float
    load_s: float
    sleep_s: float
    save_s: float
    write_s: float
    book_keeping_s: float = 0.0
    generation: float = 1.0
    training: float = 1.0
    processors: int | None = None
    _decoding: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, forecast: Forecast, saved: ModelMemory, disk_speed: float, cpus: int) -> Timing:
        """Create the timing of a recipe from its forecast.

        Args:
            forecast: the plan.
            saved: sizes of a checkpoint.
            disk_speed: bytes per second that the disk writes.
            cpus: processors of a host.
        """
        config, work, step = forecast.config, forecast.work, forecast.step
        generator, trainer = config.generator, config.trainer
        gpu = forecast.gpu(generator.with_gpus)
        prompt = prefill_s(forecast.shape, work, generator.procs, gpu, generator.threads) / work.prompt
        learning = dict(step.learning)
        reference = learning.pop("reference model", 0.0) / work.computed
        copy = learning.pop("weights to the host", 0.0)
        sleep = learning.pop("generators to sleep and back", 0.0)
        size = saved.saved_gb * GIB
        on_gpus = forecast.gpu(trainer.with_gpus)
        save = size / trainer.procs / on_gpus.bus if on_gpus is not None else size / CPU_SNAPSHOT
        sync = step.sync
        assert sync is not None  # only recipes with rollouts are rehearsed
        return cls(
            forecast,
            forecast.capacity,
            prompt,
            learning.pop("compute") / work.computed,
            sum(learning.values()),
            reference,
            copy,
            sync.publish,
            sync.pull,
            sync.load,
            sleep,
            save + SAVE_S,
            size / disk_speed,
            processors=None if generator.with_gpus or trainer.with_gpus else cpus,
        )

    def decode_s(self, batch: int) -> float:
        """Seconds of an engine's step with this many sequences."""
        if batch not in self._decoding:
            config, work = self.forecast.config, self.forecast.work
            section = config.generator
            gpu = self.forecast.gpu(section.with_gpus)
            each = decoding(self.forecast.shape, work, batch, section.procs, gpu, config.model.dtype, section.threads)
            self._decoding[batch] = sum(each.values())
        return self._decoding[batch] * self.generation

    def scaled(self, generation: float, training: float, measured: Mapping[str, float]) -> Timing:
        """Multiply the durations of generation and training, and replace others by measured ones."""
        return replace(
            self,
            generation=self.generation * generation,
            training=self.training * training,
            _decoding=self._decoding,
            snapshot_s=measured.get("snapshot_s", self.snapshot_s),
            publish_s=measured.get("publish_s", self.publish_s),
            pull_s=measured.get("pull_s", self.pull_s),
            load_s=measured.get("load_s", self.load_s),
            book_keeping_s=measured.get("book_keeping_s", self.book_keeping_s),
        )
