"""What a recorded run or evaluation says of an environment's tasks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge_env.evaluation.estimates import Estimate, passes, share_of
from forge_env.hacks.findings import Findings, Judge, find
from forge_env.hacks.transcripts import read

EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Recorded:
    """Difficulty and signal of the tasks that a policy played."""

    folder: str
    episodes: int
    tasks: int
    pass_at: dict[int, Estimate]
    """Probability that at least one of k episodes of a task has the full reward, over tasks with that many."""
    solved: dict[str, tuple[int, int]]
    """Episodes with the full reward, and all episodes, by task."""
    signal: Estimate | None
    """Share of groups whose rewards differ, from which a policy can learn; without groups, of tasks."""
    findings: Findings
    """Findings of `forge-env hacks`: rewards without a hidden score, and the agreement of a second judge."""

    def as_json(self) -> dict[str, Any]:
        """The part of `grade.json`."""
        return {
            "folder": self.folder,
            "episodes": self.episodes,
            "tasks": self.tasks,
            "pass_at": {str(k): asdict(estimate) for k, estimate in self.pass_at.items()},
            "solved": self.solved,
            "signal": None if self.signal is None else asdict(self.signal),
            "paid_for_less": self.findings.paid_count,
            "hidden": self.findings.hidden_name,
            "judged": None if self.findings.judged is None else asdict(self.findings.judged),
        }


def recorded(root: Path, full: float, *, judge: Judge | None = None) -> Recorded:
    """Read the episodes of a run or an evaluation.

    Args:
        full: reward of a solved episode.
        judge: a second judge for a sample of the rewarded episodes.

    Raises:
        UsageError: there are no episodes.
        OSError: a file can't be read.
    """
    rewards: dict[str, list[float]] = defaultdict(list)
    groups: dict[tuple[str, int | None, str], list[float]] = defaultdict(list)
    for episode in read(root).episodes:
        if episode.reward is not None:
            rewards[episode.task].append(episode.reward)
            groups[episode.kind, episode.group, episode.task].append(episode.reward)
    solved = {task: (sum(one >= full - EPSILON for one in scores), len(scores)) for task, scores in rewards.items()}
    differ = [(float(max(scores) - min(scores) > EPSILON), 1) for scores in groups.values() if len(scores) > 1]
    return Recorded(
        str(root),
        sum(map(len, rewards.values())),
        len(rewards),
        {k: at for k, (at, _) in passes(list(solved.values())).items()},
        solved,
        share_of(differ),
        find(root, judge=judge),
    )
