"""Durations of a recorded run: factors on the plan's durations with which a rehearsal of its recipe takes its times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forge_env.config.reader import read_as
from forge_env.config.recipe import RunConfig
from forge_env.display.curves import merge_rows
from forge_env.errors import UsageError
from forge_env.run.folder import RunFolder
from forge_env.run.metrics import read_metrics
from trainers.rehearsal.stage import FILLING, Performance, Scene, perform
from trainers.rehearsal.timing import Timing

ROUNDS = 5
"""Simulations with which the factors are fitted: trainer and generators that share processors slow each other down."""
FEWEST = 4
"""Steps, without those in which the pipeline fills, that a recorded run must have."""
COMPARED = {"trainer": ("wait for episodes", "wait for generators", "train"), "generator": ("wait for requests",)}
"""Activities whose shares are compared with the record."""


@dataclass(frozen=True, slots=True)
class Record:
    """Times of a recorded run.

    Attributes:
        config: its recipe.
        steps: number of steps that the times are means of.
        step_s: seconds of a step.
        seconds: actor -> activity -> seconds in a step.
        transfer: mean of the transfer metrics of a step, by name.
    """

    config: RunConfig
    steps: int
    step_s: float
    seconds: Mapping[str, Mapping[str, float]]
    transfer: Mapping[str, float]

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Read the record of a run.

        Raises:
            UsageError: the folder is not of a run, its recipe can't be read, or it has too few steps.
        """
        run = RunFolder(folder)
        if not run.config.is_file():
            raise UsageError(
                f"--like: {folder} is not a run folder: it has no config.yaml", fix="name one, as runs/NAME"
            )
        config = read_as(RunConfig, run.config)
        rows = [row for row in merge_rows(read_metrics(run.metrics)) if "reward/mean" in row]
        full = rows[config.grpo.max_off_policy_steps + FILLING :]
        if len(full) < FEWEST:
            raise UsageError(
                f"--like: {folder} has {len(rows)} training steps, too few to measure its times",
                fix=f"use a run of {config.grpo.max_off_policy_steps + FILLING + FEWEST} steps or more",
            )
        seconds: dict[str, dict[str, float]] = {}
        for row in full:
            for key, value in row.items():
                if key.startswith("time/") and value is not None:
                    _, actor, doing = key.split("/", 2)
                    account = seconds.setdefault(actor, {})
                    account[doing] = account.get(doing, 0.0) + float(value) / len(full)
        names = ("weights/snapshot_s", "weights/push_s", "weights/pull_s", "weights/stall_s")
        transfer = {name: sum(float(row.get(name) or 0.0) for row in full) / len(full) for name in names}
        return cls(config, len(full), sum(seconds["trainer"].values()), seconds, transfer)

    def share(self, actor: str, doing: str) -> float:
        """Share of an actor's time that an activity takes."""
        account = self.seconds.get(actor, {})
        return account.get(doing, 0.0) / (sum(account.values()) or 1.0)

    def measured(self) -> dict[str, float]:
        """Durations that a rehearsal takes over as they are."""
        trainer = self.seconds["trainer"]
        return {
            "snapshot_s": self.transfer["weights/snapshot_s"],
            "publish_s": max(0.0, self.transfer["weights/push_s"] - self.transfer["weights/snapshot_s"]),
            "pull_s": self.transfer["weights/pull_s"],
            "load_s": self.transfer["weights/stall_s"],
            "book_keeping_s": trainer.get("book-keeping", 0.0),
        }


@dataclass(frozen=True, slots=True)
class Fit:
    """Factors with which a rehearsal of a recorded recipe takes its times.

    Attributes:
        generation: factor on the plan's durations of generation.
        training: factor on the plan's durations of training.
        measured: durations that replace the plan's.
        off: largest difference between a simulated and the recorded share of an actor's time.
        where: the activity with that difference.
    """

    generation: float
    training: float
    measured: Mapping[str, float] = field(default_factory=dict)
    off: float = 0.0
    where: str = ""

    def apply(self, timing: Timing) -> Timing:
        """Scale a recipe's timing."""
        return timing.scaled(self.generation, self.training, self.measured)


def fit(record: Record, scene: Scene) -> Fit:
    """Fit the factors: simulate the recorded recipe until generator and trainer are busy for the recorded times.

    Args:
        record: the recorded run.
        scene: its recipe with the plan's durations.
    """
    fitted = Fit(1.0, 1.0, record.measured())
    performance = Performance()
    for _ in range(ROUNDS):
        performance = perform(replace(scene, timing=fitted.apply(scene.timing)))
        if not performance.step_s:
            raise UsageError(
                "--like: the recorded recipe can't be simulated"
                + (f": {performance.error}" if performance.error else "")
            )
        generation, training = (
            _ratio(record, performance, actor, doing)
            for actor, doing in (("generator", "generate"), ("trainer", "train"))
        )
        fitted = replace(
            fitted,
            generation=fitted.generation * generation,
            training=fitted.training * training,
        )
    off, where = max(differences(record, performance))
    return replace(fitted, off=off, where=where)


def _ratio(record: Record, performance: Performance, actor: str, doing: str) -> float:
    """Recorded seconds of an activity relative to the simulated ones."""
    simulated = performance.seconds[actor].get(doing, 0.0) / (performance.steps - performance.skipped)
    recorded = record.seconds.get(actor, {}).get(doing, 0.0)
    return recorded / simulated if simulated and recorded else 1.0


def differences(record: Record, performance: Performance) -> Sequence[tuple[float, str]]:
    """Differences between simulated and recorded shares, with the names of the activities."""
    return [
        (abs(performance.share(actor, doing) - record.share(actor, doing)), f"{actor}: {doing}")
        for actor, activities in COMPARED.items()
        for doing in activities
    ]
