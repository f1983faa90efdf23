"""What happened in an episode, exactly, and how it is kept on disk: trained on, evaluated and viewed alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_env.errors import UsageError
from forge_env.files import LineWriter
from forge_env.policy import NO_TOKENS, Reply
from forge_env.types import Message

if TYPE_CHECKING:
    from forge_env.policy import BoolArray, FloatArray, IntArray


@dataclass(slots=True)
class Turn:
    """One exchange: new messages in, one assistant message out, with its tokens."""

    observation: list[Message]
    reply: Reply
    reward: float = 0.0
    generate_s: float = 0.0
    """Seconds from asking the policy to its answer."""
    step_s: float = 0.0
    """Seconds in the environment (tools, scoring)."""

    @property
    def message(self) -> Message:
        """What the assistant said."""
        return self.reply.message


@dataclass(slots=True, eq=False)
class Segment:
    """A token sequence to train on, arrays of one length T; lists become arrays.

    Attributes:
        token_ids: prompt, sampled and observed tokens in order, int32 [T].
        mask: True where the policy sampled the token and it is to be learned, bool [T].
        logprobs: log-probability of a sampled token when it was sampled, 0 elsewhere, float32 [T].
        versions: policy version that sampled it, -1 elsewhere, int32 [T].
        advantages: of each sampled token, 0 elsewhere, float32 [T].
        ref_logprobs: log-probability under the reference model, 0 elsewhere, float32 [T]; None without one.
    """

    token_ids: IntArray
    mask: BoolArray
    logprobs: FloatArray = NO_TOKENS
    versions: IntArray = NO_TOKENS
    advantages: FloatArray = NO_TOKENS
    ref_logprobs: FloatArray | None = None

    def __post_init__(self) -> None:
        import numpy as np

        length = len(self.token_ids)
        self.token_ids, self.mask = np.asarray(self.token_ids, np.int32), np.asarray(self.mask, np.bool_)
        self.logprobs = np.asarray(self.logprobs if len(self.logprobs) else np.zeros(length), np.float32)
        self.versions = np.asarray(self.versions if len(self.versions) else np.full(length, -1), np.int32)
        self.advantages = np.asarray(self.advantages if len(self.advantages) else np.zeros(length), np.float32)

    def __len__(self) -> int:
        return len(self.token_ids)


class _Joined:
    """Turns whose tokens are one sequence: the first `count` of `parts`, and where its sampled tokens lie."""

    def __init__(self) -> None:
        self.parts: list[IntArray] = []
        self.count = self.length = 0
        self.sampled: list[tuple[int, Reply]] = []

    def begins(self, prompt: list[IntArray]) -> bool:
        """Whether a prompt, in parts, begins with these tokens."""
        import numpy as np

        return np.array_equal(np.concatenate(prompt)[: self.length], np.concatenate(self.parts[: self.count]))

    def segment(self) -> Segment:
        import numpy as np

        segment = Segment(np.concatenate(self.parts[: self.count]), np.zeros(self.length, np.bool_))
        for start, reply in self.sampled:
            place = slice(start, start + len(reply.token_ids))
            segment.mask[place] = True
            segment.logprobs[place] = reply.logprobs
            segment.versions[place] = reply.versions
        return segment


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
        return sum(len(turn.reply.token_ids) for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest sampled token; -1 when there are none."""
        return min((int(turn.reply.versions.min()) for turn in self.turns if len(turn.reply.token_ids)), default=-1)

    def segments(self) -> list[Segment]:
        """Merge the turns into as few token sequences as are exact.

        Turn t+1 continues the sequence when its prompt begins with turn t's prompt and sampled tokens;
        otherwise (the chat was re-rendered differently) a new sequence starts.

        Raises:
            UsageError: a reply continues more or fewer tokens than came before it.
        """
        found: list[_Joined] = []
        prompt: list[IntArray] = []  # the conversation's tokens since it last began anew
        length = 0
        for reply in (turn.reply for turn in self.turns):
            if not len(reply.prompt_ids) and not len(reply.token_ids):
                continue
            if reply.continues and reply.continues != length:
                raise UsageError(
                    f"{self.id}: a reply continues {reply.continues} tokens, and {length} came before it",
                    fix="the policy's session sets Reply.continues to all tokens before, or leaves it 0",
                )
            prompt = prompt if reply.continues else []
            prompt.append(reply.prompt_ids)
            length = reply.prompt_length
            if not len(reply.token_ids):
                continue
            if not found or (found[-1].parts is not prompt and not found[-1].begins(prompt)):
                found.append(_Joined())
            joined = found[-1]
            joined.sampled.append((length, reply))
            prompt.append(reply.token_ids)
            length += len(reply.token_ids)
            joined.parts, joined.count, joined.length = prompt, len(prompt), length
        return [joined.segment() for joined in found]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary; `from_dict` reads it back."""
        data = {name: getattr(self, name) for name in self.__slots__ if name not in ("turns", "final_observation")}
        data["turns"] = [
            {
                **{name: getattr(turn, name) for name in ("reward", "generate_s", "step_s")},
                **{name: getattr(turn.reply, name) for name in ("stop_reason", "forked", "metadata", "continues")},
                **{
                    name: [] if not len(getattr(turn.reply, name)) else getattr(turn.reply, name).tolist()
                    for name in ("prompt_ids", "token_ids", "logprobs", "versions")
                },
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
        turns = []
        for item in data["turns"]:
            own = {name: item[name] for name in ("reward", "generate_s", "step_s") if name in item}
            rest = {name: value for name, value in item.items() if name not in own and name != "observation"}
            reply = Reply(**{**rest, "message": Message.model_validate(item["message"])})
            turns.append(Turn([Message.model_validate(message) for message in item["observation"]], reply, **own))
        final = [Message.model_validate(message) for message in data.get("final_observation", [])]
        return cls(**{**data, "turns": turns, "final_observation": final})


# ---
# Trajectories on disk: JSON lines, appended one whole record at a time.
#
# A process killed while writing leaves at most one incomplete last line: readers skip it, and the next writer
# cuts it off.


class TrajectoryWriter(LineWriter):
    """Appends trajectories to a file; every record is handed to the operating system as it is written."""

    def write(self, trajectory: Trajectory) -> None:
        """Append one record, or hold it while the disk is full (see `LineWriter`)."""
        self.append(json.dumps(trajectory.to_dict(), separators=(",", ":")).encode())


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
