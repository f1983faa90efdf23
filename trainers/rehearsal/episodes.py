"""Episodes of a rehearsal: how many tokens their turns have and how long their tools take, drawn or recorded."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from forge_env.run.folder import RunFolder
from forge_env.run.trajectories import recorded
from forge_env.trajectory import Trajectory, read_trajectories
from trainers.algorithms.parts import make_filter
from trainers.rollout.types import Group

TRAIN = "train"
"""Stem of the files with training episodes."""
MOST_READ = 4000
"""Episodes read from a recorded run."""
OBSERVATION = 64
"""Tokens of a tool's result; assumed."""
P95 = 1.645
"""Standard deviations between the median and the 95th percentile of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of an episode.

    Attributes:
        prompt: tokens that are new to the model before it answers.
        reply: tokens that it samples if no limit cuts the reply; one more than were recorded if a limit cut it.
        tool_s: seconds of the environment afterwards.
    """

    prompt: int
    reply: int
    tool_s: float


@dataclass(frozen=True, slots=True)
class Script:
    """An episode to be played.

    Attributes:
        turns: its turns.
        reset_s: seconds before the first turn.
        close_s: seconds after the last turn.
    """

    turns: tuple[Turn, ...]
    reset_s: float = 0.0
    close_s: float = 0.0


class Episodes(Protocol):
    """Source of groups."""

    def group(self, index: int) -> list[Script]:
        """The episodes of a group; equal for equal indices."""

    def keeps(self, index: int) -> bool:
        """Whether `grpo.filter` keeps the group."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Episodes with log-normal lengths, of which half of the variance lies between tasks; all groups are kept.

    Attributes:
        size: episodes of a group.
        prompt: tokens of the first prompt.
        reply: median of the sampled tokens of an episode.
        p95: their 95th percentile.
        turns: turns of each episode.
        tool_s: seconds of the environment in each turn.
        seed: seed of the draws.
    """

    size: int
    prompt: int
    reply: int
    p95: int
    turns: int
    tool_s: float
    seed: int = 0

    def group(self, index: int) -> list[Script]:
        """See `Episodes`."""
        rng = random.Random(f"{self.seed}/{index}")
        sigma = math.log(max(self.p95 / self.reply, 1.0)) / P95 / math.sqrt(2)
        task = rng.gauss(0.0, sigma)
        return [self._script(self.reply * math.exp(task + rng.gauss(0.0, sigma))) for _ in range(self.size)]

    def _script(self, reply: float) -> Script:
        each = max(1, round(reply / self.turns))
        prompts = [self.prompt, *[OBSERVATION] * (self.turns - 1)]
        return Script(tuple(Turn(prompt, each, self.tool_s) for prompt in prompts))

    def keeps(self, index: int) -> bool:
        """See `Episodes`."""
        return True


@dataclass(frozen=True, slots=True)
class Recorded:
    """Groups of a recorded run, in turn; a group that is too small repeats its episodes.

    Attributes:
        size: episodes of a group.
        groups: the recorded groups.
        kept: whether the recipe's filter keeps each.
        cut: share of the recorded replies that a limit cut, so that their true lengths are unknown.
    """

    size: int
    groups: Sequence[Sequence[Script]]
    kept: Sequence[bool] = field(default_factory=list)
    cut: float = 0.0

    def group(self, index: int) -> list[Script]:
        """See `Episodes`."""
        scripts = self.groups[index % len(self.groups)]
        return [scripts[number % len(scripts)] for number in range(self.size)]

    def keeps(self, index: int) -> bool:
        """See `Episodes`."""
        return self.kept[index % len(self.kept)]

    @property
    def turns(self) -> list[Turn]:
        """All turns."""
        return [turn for scripts in self.groups for script in scripts for turn in script.turns]

    def mean(self) -> tuple[int, int]:
        """Mean tokens of an episode that are not sampled, and that are."""
        count = sum(len(scripts) for scripts in self.groups)
        turns = self.turns
        return (
            max(1, round(sum(turn.prompt for turn in turns) / count)),
            max(1, round(sum(turn.reply for turn in turns) / count)),
        )


def read_episodes(folder: Path, config: RunConfig) -> Recorded:
    """Read the training episodes of a run.

    Raises:
        UsageError: there are none, or they have no tokens.
    """
    files = recorded(RunFolder(folder).trajectories, TRAIN)
    by_group: dict[int, list[Trajectory]] = defaultdict(list)
    for file in files:
        for episode in islice(read_trajectories(file, on_damage=lambda _: None, root=folder), MOST_READ):
            if episode.group is not None and episode.valid and episode.num_sampled_tokens:
                by_group[episode.group].append(episode)
    if not by_group:
        raise UsageError(
            f"--like: {folder} has no training episodes with tokens",
            fix="record a run with logging.trajectories=all, or give --reply and --prompt",
        )
    keeps = make_filter(config.grpo.filter)
    groups = [by_group[number] for number in sorted(by_group)]
    replies = [turn.reply for group in groups for episode in group for turn in episode.turns]
    return Recorded(
        config.grpo.group_size,
        [[_script(episode) for episode in group] for group in groups],
        [any(keeps(seat) for seat in Group(group).by_seat()) for group in groups],
        sum(reply.stop_reason == "length" for reply in replies) / len(replies),
    )


def _script(episode: Trajectory) -> Script:
    """The turns of a recorded episode; its waits for sandboxes and endpoints are not part of its tools' time."""
    in_environment = episode.reset_s + sum(turn.step_s for turn in episode.turns)
    working = max(0.0, 1.0 - episode.waited_s / in_environment) if in_environment else 1.0
    turns = tuple(
        Turn(
            len(each.reply.prompt_ids),
            len(each.reply.token_ids) + (each.reply.stop_reason == "length"),
            each.step_s * working,
        )
        for each in episode.turns
    )
    return Script(turns, episode.reset_s * working, episode.close_s)
