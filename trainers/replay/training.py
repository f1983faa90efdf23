"""The trainer's part of a replay: recorded batches, trained on again in one process by the same engine.

A step of the trainer is a function of its weights, its optimizer's state and its batch. The batch is rebuilt from the
recorded episodes (tokens, log-probs and versions) and the recorded advantages and masks; its digest tells whether it is
the one that was trained on. Checksums of log-probs, gradients and weights are compared with those of the run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge_env.config.recipe import ParallelismSection, RunConfig
from forge_env.errors import UsageError
from forge_env.machine import user_path
from forge_env.run.fingerprint import WORD, Replayed
from forge_env.run.recording import Recording
from forge_env.run.trainer import ReplayQuestion
from forge_env.trajectory import DAMAGE, Segment, Trajectory
from trainers.buffer.packed import PackedGroup, repack
from trainers.buffer.sequences import BatchSizes, at_targets, in_batch, targets
from trainers.losses.load import make_loss
from trainers.losses.types import needs
from trainers.model.folder import hub_name
from trainers.titan.device import Device, use_device

if TYPE_CHECKING:
    from trainers.replay.sampling import SamplingReplay


@dataclass(frozen=True, slots=True)
class Start:
    """A point of a run that a replay can begin at.

    Attributes:
        model: checkpoint folder with the weights that the run started from.
        checkpoint: checkpoint of that step; None: the beginning of the run.
    """

    after: int
    model: Path
    checkpoint: Path | None = None


def replay(
    recording: Recording, config: RunConfig, question: ReplayQuestion, checkpoints: Mapping[int, Path]
) -> Iterator[Replayed]:
    """Train recorded steps again, and compare each with its record."""
    last = recording.steps[-1] if question.last is None else question.last
    if not recording.steps[0] - 1 <= question.after < last <= recording.steps[-1]:
        raise UsageError(
            f"steps {question.after + 1} to {last} are not recorded",
            fix=f"the recording has steps {recording.steps[0]} to {recording.steps[-1]}",
        )
    start = find_start(recording, question, checkpoints)
    sampler = None
    if question.tokens:
        from trainers.replay.sampling import SamplingReplay  # takes seconds: vLLM

        sampler = SamplingReplay(config, start.model)
    trainer = TrainingReplay(recording, config, start, sampler)
    yield from trainer.follow(question.after if question.changed else last)
    if question.changed is not None:
        yield from trainer.follow(last, changed=question.changed)


def find_start(recording: Recording, question: ReplayQuestion, checkpoints: Mapping[int, Path]) -> Start:
    """The newest point at or before `question.after` at which a replay can begin."""
    beginning = recording.trained.beginnings[0]
    model = recording.root / (beginning.model if question.model is None else user_path(question.model).absolute())
    usable = {step: folder for step, folder in checkpoints.items() if step in recording.trained.fingerprints}
    before = [step for step in usable if step <= question.after]
    if before and (question.after or beginning.after):
        step = before[-1]
        weights = usable[step] / "model"
        return Start(step, weights if weights.is_dir() else model, usable[step])
    if not model.is_dir():
        raise UsageError(
            f"the model that the run started from is not in {model}",
            fix="give it with --model FOLDER" + (f", or begin at a checkpoint: --from {max(usable)}" if usable else ""),
        )
    if beginning.after:
        raise UsageError(
            f"the recording begins after step {beginning.after}, and there is no checkpoint of that step",
            fix="begin at a later checkpoint: --from STEP" if usable else "record a run from its first step",
        )
    return Start(0, model)


class TrainingReplay:
    """A trainer that follows a recording."""

    def __init__(
        self, recording: Recording, config: RunConfig, start: Start, sampler: SamplingReplay | None = None
    ) -> None:
        self._recording = recording
        self._sampler = sampler
        self._recipe = config
        self.config = recording.config(config, start.after)
        self.step = start.after
        self._device: Device = use_device(self.config.trainer.with_gpus)
        from trainers.titan.model import TitanModel
        from trainers.titan.parallel import Sharding

        section = self.config.trainer
        self._model = TitanModel(
            start.model,
            max_length=config.model.max_length,
            device=self._device.torch,
            seed=config.seed,
            dtype=config.model.dtype,
            lora=config.lora,
            base_name=hub_name(config.model.path),
            sharding=Sharding(ParallelismSection(), section.activation_checkpoint, section.compile),
        )
        self._reference = _Reference(self.config, start, self._device)
        self._configure(self.config)
        if start.checkpoint is not None:
            self._engine.load(start.checkpoint)
        self._check(start)
        self._publish()

    def _check(self, start: Start) -> None:
        if start.checkpoint is None:
            recorded = self._recording.beginning(start.after).fingerprint.weights
        else:
            recorded = self._recording.trained.fingerprints[start.after].weights
        weights = self._engine.fingerprint().weights
        if different := [name for name in recorded if recorded[name] != weights.get(name, -1) % WORD]:
            raise UsageError(
                f"the weights in {start.checkpoint or start.model} are not those that the run had after step "
                f"{start.after}: {len(different)} tensors differ, {different[0]} among them",
                fix="give the folder that it started from: --model FOLDER",
            )

    def _configure(self, config: RunConfig) -> None:
        from trainers.titan.engine import TitanEngine

        section = config.trainer
        self.config = config
        self._loss = make_loss(config.grpo.loss)
        self._engine = TitanEngine(
            self._model,
            section.optimizer,
            device=self._device,
            steps=config.grpo.steps,
            microbatch_tokens=section.microbatch_tokens,
            share_prefixes=section.share_prefixes,
            temperature=config.grpo.temperature,
            threads=section.threads,
            seed=config.seed,
        )

    def change(self, config: RunConfig) -> None:
        """Continue with other settings, and with the state of the optimizer, as a resumed run does."""
        with tempfile.TemporaryDirectory() as folder:
            self._engine.save(Path(folder))
            self._configure(config)
            self._engine.load(Path(folder))

    def _set_learning_rate(self) -> None:
        """Use the new learning rate in the next step already, instead of the one that was loaded."""
        for schedule in self._engine.schedule.schedulers:
            rates = zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
            for group, base, factor in rates:
                group["lr"] = base * factor(schedule.last_epoch)

    def follow(self, last: int, *, changed: RunConfig | None = None) -> Iterator[Replayed]:
        """Train the recorded steps up to `last`, with `changed` settings if given, and compare each with its record."""
        if changed is not None:
            self.change(changed)
            self._set_learning_rate()
        while self.step < last:
            config = self._recording.config(self._recipe, self.step)
            if changed is None and config != self.config:
                self.change(config)
            yield self._train(self.step + 1)

    def _train(self, step: int) -> Replayed:
        groups, altered = self.batch(step)
        sampled = None if self._sampler is None else self._sampler.sample(self._episodes(step))
        segments = in_batch(group.segments() for group in groups)
        self._reference.score(self._engine, self._model, segments, self.step, needs(self._loss).computed)
        sizes = BatchSizes.of(segments, needs(self._loss).computed)
        share = self._engine.share(sizes, self.config.trainer.minibatches)
        self._engine.train_share(share, sizes.pick(segments), self._loss)
        self.step = step
        self._publish()
        return Replayed(step, self._recording.trained.fingerprints[step], self._engine.fingerprint(), altered, sampled)

    def _publish(self) -> None:
        if self._sampler is not None:
            self._sampler.add(self.step, self.published())

    def _episodes(self, step: int) -> Iterator[Trajectory]:
        for group in self._recording.trained.steps[step]:
            yield from self._recording.episodes(group)

    def batch(self, step: int) -> tuple[list[PackedGroup], list[int]]:
        """Rebuild the groups that a step was trained on; also returns the numbers of those that differ."""
        groups, altered = [], []
        for item in self._recording.trained.steps[step]:
            try:
                group = repack(self._recording.episodes(item), item.credit)
            except DAMAGE as error:
                raise UsageError(
                    f"group {item.group} of step {step} can't be rebuilt: {error}",
                    fix="its episodes or its line of trained.jsonl were changed after the run",
                ) from error
            groups.append(group)
            if group.digest != item.digest:
                altered.append(item.group)
        return groups, altered

    def published(self) -> dict[str, torch.Tensor]:
        """A copy of the current weights as the generators get them."""
        return {part.name: part.values.to(self._model.dtype, copy=True) for part in self._model.published()}


class _Reference:
    """The reference model of a replay, if the recipe has one."""

    def __init__(self, config: RunConfig, start: Start, device: Device) -> None:
        section = config.grpo.reference
        self._every, self._version = section.every, start.after
        self._source = "none" if config.method != "grpo" else section.source
        self._scorer: Any = None
        if self._source == "none" or (self._source == "initial" and config.lora is not None):
            return
        from trainers.titan.model import TitanModel
        from trainers.titan.score import Scorer

        folder = start.model
        if self._source == "path":
            assert section.path is not None
            folder = Path(section.path)
            if not folder.is_dir():
                raise UsageError(f"grpo.reference.path={folder} is not a folder", fix="fetch the reference model")
        if self._source == "lagging" and start.checkpoint is not None:
            folder = start.checkpoint / "model"
        model = TitanModel(folder, max_length=config.model.max_length, device=device.torch, dtype=config.model.dtype)
        model.module.requires_grad_(False)
        self._scorer = Scorer(
            model,
            device=device,
            microbatch_tokens=config.trainer.microbatch_tokens,
            share_prefixes=config.trainer.share_prefixes,
            temperature=config.grpo.temperature,
            threads=config.trainer.threads,
        )

    def score(self, engine: Any, policy: Any, segments: Sequence[Segment], version: int, computed: Any) -> None:
        """Set `ref_logprobs` of the segments that are computed; `version` is the policy's."""
        if self._source == "none":
            return
        if self._every is not None and version - self._version >= self._every:
            self._scorer.model.load_hf(policy.state_dict_hf())
            self._version = version
        sizes = BatchSizes.of(segments, computed)
        scorer = self._scorer or engine
        with policy.base() if self._scorer is None else nullcontext():
            values = scorer.score(scorer.microbatches(sizes.lengths, sizes.shared), sizes.pick(segments))
        for index, logprobs in values.items():
            segment = segments[int(sizes.numbers[index])]
            assert len(logprobs) == len(targets(segment))
            segment.ref_logprobs = at_targets(segment, logprobs)
