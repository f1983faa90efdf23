"""trained.jsonl: the groups that each step was trained on; written by `Run.trained` and `Run.not_trained`."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from forge_env.reading import LARGEST_COUNT, LARGEST_TABLE, is_bounded, open_file, whole_lines
from forge_env.run.fingerprint import Fingerprint, read_names
from forge_env.schema import without_schema


class TrainedEpisode(NamedTuple):
    """One episode that was trained on."""

    member: str
    """Its member of the group: "0", with a seat "0/white"; empty in runs from before this was recorded."""
    reward: float
    advantage: float
    """Mean over its sampled tokens."""
    tokens: int
    """Number of tokens that the policy sampled."""
    turns: int
    truncated: int
    """1 if a limit ended the episode, else 0."""


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group that a step was trained on."""

    group: int
    """Its position in the order of tasks."""
    task: str
    version: int
    """Policy version of its oldest token."""
    staleness: int
    """Age of that token when it was trained on, in policy updates."""
    uses: int
    """How often it was trained on by then, this time included."""
    episodes: list[TrainedEpisode]
    digest: str = ""
    """Hash of its tokens, log-probs, versions, advantages and masks; empty in runs from before this was recorded."""
    credit: str = ""
    """Its advantages and masks."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The start of training, or its continuation after a resume or the death of an actor."""

    after: int
    """Completed training steps."""
    model: str
    """Checkpoint folder that the trainer was started on, relative to the run's folder if it is inside."""
    recipe: dict[str, Any]
    """Sections of the recipe that training depends on."""
    names: dict[str, list[str]]
    """Names of the tensors whose checksums the fingerprints hold."""
    fingerprint: Fingerprint
    """Its `weights` are the checksums before the first step."""


@dataclass(slots=True)
class Trained:
    """The groups of a run: those trained on, by step, and the fates of the others."""

    steps: dict[int, list[TrainedGroup]] = field(default_factory=dict)
    """Groups by training step, without the steps that a resumed run repeats."""
    fates: dict[int, str] = field(default_factory=dict)
    """Groups that no step was trained on: "dropped", "lost", "stale"."""
    beginnings: list[Beginning] = field(default_factory=list)
    """Starts of training, in order."""
    fingerprints: dict[int, Fingerprint] = field(default_factory=dict)
    """What each step computed."""

    def add(self, line: bytes | str) -> None:
        """Add one line of the file; lines that are no row of a known version are ignored."""
        try:
            row = without_schema(json.loads(line), "trained.jsonl")
            if "fate" in row:
                self.fates[_whole(row["group"])] = str(row["fate"])
                return
            if "after" in row:
                self._begin(_beginning(row))
                return
            step, groups = _whole(row["step"]), [_group(item) for item in row["groups"]]
            fingerprint = None
            if "fingerprint" in row and self.beginnings:
                fingerprint = Fingerprint.of_row(row["fingerprint"], self.beginnings[-1].names)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, zlib.error):
            return
        self._forget(step)
        self.steps[step] = groups
        if fingerprint is not None:
            self.fingerprints[step] = fingerprint
        for group in groups:
            self.fates.pop(group.group, None)

    def _begin(self, beginning: Beginning) -> None:
        self._forget(beginning.after + 1)
        self.beginnings = [each for each in self.beginnings if each.after <= beginning.after]
        self.beginnings.append(beginning)

    def _forget(self, first: int) -> None:
        """Remove step `first` and later ones: the run was set back, and trains them again."""
        tables: tuple[dict[int, Any], ...] = (self.steps, self.fingerprints)
        for rows in tables:
            for later in [step for step in rows if step >= first]:
                del rows[later]


def _group(item: dict[str, Any]) -> TrainedGroup:
    return TrainedGroup(
        _whole(item["group"]),
        str(item["task"]),
        _whole(item["version"]),
        _whole(item["staleness"]),
        _whole(item.get("uses", 1)),
        [_episode(*values) for values in item["episodes"]],
        str(item.get("digest", "")),
        str(item.get("credit", "")),
    )


def _beginning(row: dict[str, Any]) -> Beginning:
    names = read_names(row["names"])
    recipe = {str(section): dict(values) for section, values in row["recipe"].items()}
    beginning = Fingerprint.of_row(row["beginning"], names)
    return Beginning(_whole(row["after"]), str(row["model"]), recipe, names, beginning)


def _episode(member: Any, reward: Any, advantage: Any, tokens: Any, turns: Any, truncated: Any) -> TrainedEpisode:
    figures = float(reward), float(advantage)
    if not all(map(is_bounded, figures)):
        raise ValueError("a figure is too large")
    return TrainedEpisode(str(member), *figures, *(_whole(value) for value in (tokens, turns, truncated)))


def _whole(value: Any) -> int:
    """Return `value` as a whole number of at most 63 bits; raise `ValueError` for any other."""
    number = int(value)
    if not is_bounded(number, LARGEST_COUNT):
        raise ValueError(f"{number:.3g} is too large")
    return number


def read_trained(path: Path) -> Trained:
    """Read the file of a run; empty for a run from before the file existed.

    Raises:
        UsageError: a line is of a newer version than this forge-env reads, or the file is not read (`open_file`).
    """
    trained = Trained()
    if path.exists():
        with open_file(path, largest=LARGEST_TABLE) as file:
            for line in whole_lines(file):
                trained.add(line.text)
    return trained
