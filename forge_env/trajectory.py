"""What happened in an episode, exactly, and how it is kept on disk: trained on, evaluated and viewed alike."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forge_env.errors import UsageError
from forge_env.types import Message

# ---
# What happened in an episode, exactly. The same record is trained on, evaluated and viewed.


@dataclass(slots=True)
class Turn:
    """One exchange: new messages in, one assistant message out, with its tokens (see `forge_env.policy.Reply`)."""

    observation: list[Message]
    message: Message
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"
    forked: bool = False
    reward: float = 0.0
    generate_s: float = 0.0
    """Seconds from asking the policy to its answer."""
    step_s: float = 0.0
    """Seconds in the environment (tools, scoring)."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What else the policy tells of this turn, JSON-ready (`forge_env.policy.Reply.metadata`)."""


@dataclass(slots=True)
class Segment:
    """A token sequence to train on, all lists of one length T.

    Attributes:
        token_ids: prompt, sampled and observed tokens in order, [T].
        mask: True where the policy sampled the token, [T].
        logprobs: its log-probability when sampled, 0 elsewhere, [T].
        versions: policy version that sampled it, -1 elsewhere, [T].
    """

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    versions: list[int]


@dataclass(slots=True)
class Trajectory:
    """One episode from reset to its end.

    `valid` is False when infrastructure failed beyond retry; such a trajectory is counted and shown but
    enters no statistic, baseline or score.
    """

    id: str
    environment: str
    task_id: str
    split: str = "train"
    turns: list[Turn] = field(default_factory=list)
    final_observation: list[Message] = field(default_factory=list)
    reward: float = 0.0
    answer: str | None = None
    """What the agent submitted, or else its last message, as the environment knows it (`Environment.given_answer`)."""
    metrics: dict[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    truncation: str | None = None
    """Which limit truncated it: "turns", "tokens", "context", "time", "tool_calls", ..."""
    valid: bool = True
    error: str | None = None
    retries: int = 0
    wall_s: float = 0.0
    waited_s: float = 0.0
    """Seconds of the last try spent waiting for shared things (rate limits, a free sandbox), after reset."""
    difficulty: int = 1
    tags: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    """What else whoever played it records, JSON-ready: sample, usage, cost, ..."""

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy sampled in this episode."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest sampled token; -1 when there are none."""
        return min((version for turn in self.turns for version in turn.versions), default=-1)

    def segments(self) -> list[Segment]:
        """Merge the turns into as few token sequences as are exact.

        Turn t+1 continues the sequence when its prompt begins with turn t's prompt and sampled tokens;
        otherwise (the chat was re-rendered differently) a new sequence starts.
        """
        result: list[Segment] = []
        current: Segment | None = None
        for turn in self.turns:
            if not turn.token_ids:
                continue
            if current is None or turn.prompt_ids[: len(current.token_ids)] != current.token_ids:
                current = Segment([], [], [], [])
                result.append(current)
            observed = turn.prompt_ids[len(current.token_ids) :]
            current.token_ids += observed + turn.token_ids
            current.mask += [False] * len(observed) + [True] * len(turn.token_ids)
            current.logprobs += [0.0] * len(observed) + turn.logprobs
            current.versions += [-1] * len(observed) + turn.versions
        return result

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary; `from_dict` reads it back."""
        data = {name: getattr(self, name) for name in self.__slots__ if name not in ("turns", "final_observation")}
        data["turns"] = [
            {
                **{name: getattr(turn, name) for name in turn.__slots__ if name not in ("observation", "message")},
                "observation": [message.to_openai() for message in turn.observation],
                "message": turn.message.to_openai(),
            }
            for turn in self.turns
        ]
        data["final_observation"] = [message.to_openai() for message in self.final_observation]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trajectory:
        """Rebuild what `to_dict` wrote."""
        turns = [
            Turn(
                **{
                    **turn,
                    "observation": [Message.model_validate(message) for message in turn["observation"]],
                    "message": Message.model_validate(turn["message"]),
                }
            )
            for turn in data["turns"]
        ]
        final = [Message.model_validate(message) for message in data.get("final_observation", [])]
        return cls(**{**data, "turns": turns, "final_observation": final})


# ---
# Trajectories on disk: JSON lines, appended one whole record at a time.
#
# A process killed while writing leaves at most one incomplete last line: readers skip it, and the next writer
# cuts it off.


class TrajectoryWriter:
    """Appends trajectories to a file; every record is handed to the operating system as it is written."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab+")
        self._file.truncate(end_of_last_record(self._file.fileno()))

    def write(self, trajectory: Trajectory) -> None:
        """Append one record. Raises `OSError` when the disk is full."""
        self._file.write(json.dumps(trajectory.to_dict(), separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_trajectories(
    path: str | Path,
    *,
    on_damage: Callable[[str], object] | None = None,
    check: Callable[[Trajectory], object] = lambda trajectory: None,
) -> Iterator[Trajectory]:
    """The complete records of a file, in order; an incomplete last line is left out.

    Args:
        path: of the file.
        on_damage: is told of a line in the middle that is no trajectory, which is then left out.
        check: raises such an error as `from_dict` does for a trajectory that is none the reader can use.

    Raises:
        UsageError: there is such a line, and nobody to tell.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                trajectory = Trajectory.from_dict(json.loads(line))
                check(trajectory)
            except (ValueError, TypeError, KeyError, AttributeError) as error:  # by whatever is wrong with its shape
                damage = f"{path}, line {number} is no trajectory: {' '.join(str(error).split())[:200]}"
                if on_damage is None:
                    raise UsageError(damage, fix="delete that line") from error
                on_damage(damage)
                continue
            yield trajectory


def end_of_last_record(descriptor: int) -> int:
    """Offset just behind the last line feed, searched from the end."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - 65_536)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
