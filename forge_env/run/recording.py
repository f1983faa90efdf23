"""What a run folder records of training, as far as a replay needs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from forge_env.run.folder import RunFolder
from forge_env.run.trained import Beginning, TrainedGroup, read_trained
from forge_env.run.trajectories import recorded
from forge_env.trajectory import DAMAGE, Trajectory, read_record
from forge_env.trajectory_index import IndexReader

Place = tuple[Path, int, int]
"""File, offset and length of a record."""


TRAINED_WITH = ("steps", "loss", "reference", "temperature")
"""Keys of `grpo` that decide what a step computes from its batch."""


def settings(config: RunConfig) -> dict[str, Any]:
    """The sections of a recipe that decide what a step computes from its batch, for `Run.began`."""
    return {
        "trainer": config.trainer.model_dump(mode="json", exclude_defaults=True),
        "grpo": config.grpo.model_dump(mode="json", exclude_defaults=True, include=set(TRAINED_WITH)),
    }


class Recording:
    """The steps of a run, the episodes that each was trained on, and what each computed.

    Attributes:
        steps: recorded steps, ascending.

    Raises:
        UsageError: the folder holds no run, or one that was recorded by an older version.
    """

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root)
        if not self.folder.exists():
            raise UsageError(f"{root} is not the folder of a run", fix="give a folder with a config.yaml, as in runs/")
        self.trained = read_trained(self.folder.trained)
        self.steps = sorted(self.trained.fingerprints)
        if not self.trained.steps:
            raise UsageError(f"{root} has no trained step", fix="replay a run with a trained.jsonl: of GRPO or alike")
        if not self.trained.beginnings or not self.steps:
            raise UsageError(
                f"{self.folder.trained} has no checksums: an older version recorded the run",
                fix="`forge-env show` still reads it; replay a run of this version",
            )
        if self.trained.beginnings[0].after + 1 != self.steps[0] or self.steps[-1] - self.steps[0] >= len(self.steps):
            raise UsageError(
                f"{self.folder.trained} lacks steps: it has {len(self.steps)}, the last is {self.steps[-1]}",
                fix="the file is damaged, or an older version recorded a part of the run",
            )
        self._places: dict[tuple[int, str], Place] | None = None

    @property
    def root(self) -> Path:
        """The run's folder."""
        return self.folder.root

    def beginning(self, after: int) -> Beginning:
        """The newest start of training at or before step `after`: the settings of the next step."""
        return next(each for each in reversed(self.trained.beginnings) if each.after <= after)

    def config(self, current: RunConfig, after: int) -> RunConfig:
        """The run's recipe with the settings of step `after` + 1, which a later resume may have changed."""
        recipe = self.beginning(after).recipe
        data = current.model_dump(mode="json")
        kept = {name: value for name, value in data["grpo"].items() if name not in TRAINED_WITH}
        return RunConfig.model_validate({**data, "trainer": recipe["trainer"], "grpo": {**kept, **recipe["grpo"]}})

    def episodes(self, group: TrainedGroup) -> list[Trajectory]:
        """The episodes of a group that were trained on, in the order in which they were packed.

        Raises:
            UsageError: an episode isn't recorded.
        """
        result = []
        for item in group.episodes:
            member, slash, seat = item.member.partition("/")
            episode = self._read(group.group, member)
            played = any(turn.seat for turn in episode.turns)
            parts = episode.by_seat() if slash or played else {"": episode}
            if seat not in parts:
                raise UsageError(f"{episode.id} has no seat {seat!r}", fix="the recorded episodes are damaged")
            result.append(parts[seat])
        return result

    def played(self, step: int) -> Iterator[Trajectory]:
        """The whole episodes of a step, with all seats. Raises as `episodes`."""
        for group in self.trained.steps[step]:
            for member in dict.fromkeys(item.member.partition("/")[0] for item in group.episodes):
                yield self._read(group.group, member)

    def _read(self, group: int, member: str) -> Trajectory:
        if self._places is None:
            self._places = {
                (-1 if row.group is None else row.group, str(row.member)): (path, row.offset, row.length)
                for path in sorted(recorded(self.folder.trajectories, "train"))
                for row in IndexReader(path).news()
            }
        if (group, member) not in self._places:
            raise UsageError(
                f"episode {member} of group {group} is not in {self.folder.trajectories}",
                fix="a replay needs all training episodes: record with logging.trajectories=all",
            )
        path, offset, length = self._places[group, member]
        try:
            return read_record(path, offset, length, root=self.root)
        except DAMAGE as error:
            raise UsageError(f"{path}, byte {offset} is not a trajectory", fix="restore the file") from error
