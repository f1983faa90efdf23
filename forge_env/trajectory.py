"""Trajectories: the exact record of an episode, and its file format. Training, evaluation and viewer share them."""

from __future__ import annotations

import base64
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_env.errors import UsageError
from forge_env.files import DiskFullError, LineWriter
from forge_env.policy import NO_TOKENS, TOKEN_FIELDS, Reply
from forge_env.reading import (
    ANYWHERE,
    LARGEST_COUNT,
    LARGEST_NUMBER,
    LONGEST_LINE,
    is_bounded,
    open_file,
    whole_lines,
)
from forge_env.schema import with_schema, without_schema
from forge_env.trajectory_index import BAD_RECORD, MOST_ROWS_HELD, IndexRow, encode, index_path, row_of
from forge_env.types import Message

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from forge_env.errors import AgentError, ProgramCrashError
    from forge_env.policy import BoolArray, FloatArray, IntArray

NOT_CHEAT_PROOF = "not_cheat_proof"
"""Metric of episodes whose tests could not rule out cheating, as they shared a process with the code under test."""


@dataclass(slots=True)
class Turn:
    """One exchange: new messages in, one assistant message out, with its tokens."""

    observation: list[Message]
    """Messages that were new to the agent."""
    reply: Reply
    """The agent's answer, with its tokens."""
    reward: float = 0.0
    """Reward earned by this exchange."""
    generate_s: float = 0.0
    """Seconds from the request to the policy until its answer."""
    step_s: float = 0.0
    """Seconds spent in the environment (tools, scoring)."""
    seat: str = ""
    """Seat that took this turn, if the episode has seats."""
    calls_s: list[float] = field(default_factory=list)
    """Seconds of each of the message's tool calls, in order, if the environment measures them."""

    @property
    def message(self) -> Message:
        """The assistant's message."""
        return self.reply.message


@dataclass(slots=True, eq=False)
class Segment:
    """A token sequence to train on, as arrays of the same length T; lists are converted to arrays.

    Attributes:
        token_ids: prompt, sampled and observed tokens in order, int32 [T].
        mask: True for tokens to train on, which the policy sampled, bool [T].
        logprobs: log-probability of a sampled token when it was sampled, 0 elsewhere, float32 [T].
        versions: policy version that sampled the token, -1 elsewhere, int32 [T].
        advantages: advantage of each sampled token, 0 elsewhere, float32 [T].
        ref_logprobs: log-probability under the reference model, 0 elsewhere, float32 [T]; None without one.
        receipt: sum of the `Reply.receipt` of its sampled tokens, modulo 2**64; None if any of them has no receipt.
        episode: number of its episode in its group or batch; an episode that forked, or that has several conversations,
            has several segments. None: the segment is an episode by itself.
    """

    token_ids: IntArray
    mask: BoolArray
    logprobs: FloatArray = NO_TOKENS
    versions: IntArray = NO_TOKENS
    advantages: FloatArray = NO_TOKENS
    ref_logprobs: FloatArray | None = None
    receipt: int | None = None
    episode: int | None = None

    def __post_init__(self) -> None:
        import numpy as np

        def whole(values: NDArray[Any], kind: Any, missing: int) -> NDArray[Any]:
            return np.asarray(values, kind) if len(values) else np.full(len(self.token_ids), missing, kind)

        self.token_ids, self.mask = np.asarray(self.token_ids, np.int32), np.asarray(self.mask, np.bool_)
        self.logprobs, self.versions = whole(self.logprobs, np.float32, 0), whole(self.versions, np.int32, -1)
        self.advantages = whole(self.advantages, np.float32, 0)

    def __len__(self) -> int:
        return len(self.token_ids)


class _Joined:
    """Turns whose tokens form one sequence: the first `count` of `parts`, and the offsets of the sampled tokens."""

    def __init__(self) -> None:
        self.parts: list[IntArray] = []
        self.count = self.length = 0
        self.sampled: list[tuple[int, Reply]] = []

    def begins(self, prompt: list[IntArray]) -> bool:
        """Whether a prompt, given in parts, starts with these tokens."""
        import numpy as np

        return np.array_equal(np.concatenate(prompt)[: self.length], np.concatenate(self.parts[: self.count]))

    def segment(self) -> Segment:
        import numpy as np

        segment = Segment(np.concatenate(self.parts[: self.count]), np.zeros(self.length, np.bool_))
        for start, reply in self.sampled:
            span = slice(start, start + len(reply.token_ids))
            segment.mask[span] = True
            segment.logprobs[span] = reply.logprobs
            segment.versions[span] = reply.versions
        receipts = [reply.receipt for _, reply in self.sampled]
        signed = [receipt for receipt in receipts if receipt is not None]
        segment.receipt = sum(signed) % 2**64 if len(signed) == len(receipts) else None
        return segment


@dataclass(slots=True)
class Trajectory:
    """One episode from reset to end.

    `valid` is False if infrastructure failed beyond retry; such a trajectory is counted and shown but
    enters no statistic, baseline or score.

    Examples:
        >>> import forge_env as fe
        >>> episode = fe.Trajectory(id="train-0", environment="calculator", task_id="train-0")
        >>> fe.Trajectory.from_dict(episode.to_dict()).valid
        True
    """

    id: str
    """Unique within the run."""
    environment: str
    """Name of the environment."""
    task_id: str
    """`Task.id`."""
    split: str = "train"
    """`Task.split`."""
    turns: list[Turn] = field(default_factory=list)
    """The exchanges in order."""
    final_observation: list[Message] = field(default_factory=list)
    """Messages after the last answer, to which the agent did not respond."""
    reward: float = 0.0
    """Reward of the whole episode; with seats, the mean over those that the policy played."""
    answer: str | None = None
    """The agent's submission, or else its last message; None if the environment defines no answer."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Other measurements of the episode, by name."""
    terminated: bool = False
    """Whether the environment ended the episode."""
    truncated: bool = False
    """Whether a limit ended the episode."""
    truncation: str | None = None
    """The limit that truncated the episode: "turns", "tokens", "reply_tokens" (the last reply was cut), "time", ..."""
    valid: bool = True
    """False if infrastructure or the environment failed; the episode then enters no statistic."""
    error: str | None = None
    """Why the episode is invalid; for a valid one, the failure of the agent's code."""
    retries: int = 0
    """Number of times the episode was restarted after a failure."""
    wall_s: float = 0.0
    """Seconds from reset to the end."""
    waited_s: float = 0.0
    """Seconds of the last attempt, after reset, spent waiting for shared resources (rate limits, a free sandbox)."""
    reset_s: float = 0.0
    """Seconds of the last attempt's reset."""
    close_s: float = 0.0
    """Seconds to release the episode's resources."""
    reason: str = ""
    """Why the episode scored below the maximum, as a category shared by episodes (`forge_env.rewards.explain`); empty
    if unknown."""
    failures: list[str] = field(default_factory=list)
    """Failures, limited in number and length: for example tests with their expected and actual values."""
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a reward function that returned an `fe.Score` -> its answer, explanation and metadata."""
    difficulty: int = 1
    """`Task.difficulty`."""
    tags: list[str] = field(default_factory=list)
    """`Task.tags`."""
    info: dict[str, Any] = field(default_factory=dict)
    """Additional JSON-ready data of the run that played it: sample, usage, cost, ..."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Reward of each seat; empty if the environment has no seats."""
    opponents: dict[str, str] = field(default_factory=dict)
    """Seats that the policy didn't play -> name of the player."""
    group: int | None = None
    """Position of its group in the order of tasks; for a held-out episode of a training run, the index of its task."""
    member: int | None = None
    """Index of the episode in its group, from 0."""
    started: float = 0.0
    """Start time in seconds since 1970, UTC; the episode ended `wall_s` later. 0: not recorded."""

    @property
    def messages(self) -> list[Message]:
        """All messages of the episode in order."""
        return [item for turn in self.turns for item in [*turn.observation, turn.message]] + self.final_observation

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled in this episode."""
        return sum(len(turn.reply.token_ids) for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        """Oldest policy version that sampled a token; -1 if there are no sampled tokens."""
        return min((int(turn.reply.versions.min()) for turn in self.turns if len(turn.reply.token_ids)), default=-1)

    @property
    def cut_replies(self) -> int:
        """Number of replies that a limit of tokens cut."""
        return sum(turn.reply.was_cut for turn in self.turns)

    @property
    def sampled_by_version(self) -> dict[int, int]:
        """Number of tokens that each policy version sampled."""
        counts: dict[int, int] = {}
        for turn in self.turns:
            if len(turn.reply.token_ids):
                for version, count in zip(*(part.tolist() for part in runs(turn.reply.versions)), strict=True):
                    counts[version] = counts.get(version, 0) + count
        return counts

    def earn(self, rewards: Mapping[str, float]) -> None:
        """Add rewards of seats ("" without seats), each to the seat's last turn and to the episode.

        Args:
            rewards: seat -> reward.
        """
        for seat, reward in rewards.items():
            for turn in reversed(self.turns):
                if turn.seat == seat:
                    turn.reward += reward
                    break
            if self.rewards:
                self.rewards[seat] += reward
            else:
                self.reward += reward
        if self.rewards:
            self.reward = self._mean_reward()

    @property
    def crashed(self) -> bool:
        """Whether the agent's code failed, so that the episode scores 0."""
        return self.valid and self.error is not None

    def crash(self, error: AgentError | ProgramCrashError) -> None:
        """Record that the agent's code failed; rewards earned so far are set to 0.

        Args:
            error: the exception it raised.
        """
        self.valid, self.error, self.reward = True, str(error), 0.0
        self.rewards = dict.fromkeys(self.rewards, 0.0)
        for turn in self.turns:
            turn.reward = 0.0

    def _mean_reward(self) -> float:
        played = [value for seat, value in self.rewards.items() if seat not in self.opponents]
        return sum(played) / len(played) if played else 0.0

    def by_seat(self) -> dict[str, Trajectory]:
        """Split the episode for training: one trajectory per seat that the policy played, with its turns and reward.

        Without rewards per seat there is one trajectory, named "", with the turns sorted by seat. A reward that the
        episode earned beyond its seats' rewards (`score_group`) is added to each of them.
        """
        if not self.rewards:
            seats = self._turns_by_seat()
            return {"": self if len(seats) < 2 else replace(self, turns=[turn for turns in seats for turn in turns])}
        bonus = self.reward - self._mean_reward()
        return {
            seat: replace(
                self,
                id=f"{self.id}/{seat}",
                turns=[turn for turn in self.turns if turn.seat == seat],
                final_observation=[],
                reward=reward + bonus,
                rewards={},
                opponents={},
            )
            for seat, reward in self.rewards.items()
            if seat not in self.opponents
        }

    def _turns_by_seat(self) -> list[list[Turn]]:
        """The turns of each seat, in the order of the seats' first turns."""
        seats: dict[str, list[Turn]] = {}
        for turn in self.turns:
            seats.setdefault(turn.seat, []).append(turn)
        return list(seats.values())

    def segments(self) -> list[Segment]:
        """Merge the turns of each seat, seat after seat, into the smallest number of exact token sequences.

        Turn t+1 continues the sequence if its prompt starts with turn t's prompt and sampled tokens;
        otherwise (the chat was re-rendered differently) a new sequence starts.

        Raises:
            UsageError: a reply claims to continue more or fewer tokens than precede it.
        """
        return [joined.segment() for turns in self._turns_by_seat() for joined in self._joined(turns)]

    def _joined(self, turns: list[Turn]) -> list[_Joined]:
        sequences: list[_Joined] = []
        prompt: list[IntArray] = []  # the tokens since the conversation last restarted
        length = 0
        for reply in (turn.reply for turn in turns):
            if not reply.has_tokens:
                continue
            if reply.continues and reply.continues != length:
                raise UsageError(
                    f"{self.id}: a reply continues {reply.continues} tokens, and {length} came before it",
                    fix="set Reply.continues to the number of all tokens before it, or to 0",
                )
            prompt = prompt if reply.continues else []
            prompt.append(reply.prompt_ids)
            length = reply.prompt_length
            if not len(reply.token_ids):
                continue
            if not sequences or (sequences[-1].parts is not prompt and not sequences[-1].begins(prompt)):
                sequences.append(_Joined())
            joined = sequences[-1]
            joined.sampled.append((length, reply))
            prompt.append(reply.token_ids)
            length += len(reply.token_ids)
            joined.parts, joined.count, joined.length = prompt, len(prompt), length
        return sequences

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary; `from_dict` reads it back. See `Record format` below."""
        data = {name: getattr(self, name) for name in self.__slots__ if name not in _APART}
        sometimes = {name: value for name, none in _SOMETIMES.items() if (value := getattr(self, name)) != none}
        data["turns"] = [_turn_to_dict(turn) for turn in self.turns]
        data["final_observation"] = [message.to_openai() for message in self.final_observation]
        replies = [turn.reply for turn in self.turns if turn.reply.has_tokens]
        if replies:
            import numpy as np

            ids = [ids for reply in replies for ids in (reply.prompt_ids, reply.token_ids)]
            versions = runs(np.concatenate([reply.versions for reply in replies]))
            data["tokens"] = {
                "ids": _to_text(np.concatenate(ids), "i4"),
                "logprobs": _to_text(np.concatenate([reply.logprobs for reply in replies]), "f4"),
                "versions": np.stack(versions, 1).tolist(),
            }
        return with_schema({**data, **sometimes}, SCHEMA)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trajectory:
        """Rebuild a trajectory from the output of `to_dict`.

        Args:
            data: one parsed line of a record file.
        """
        if type(version := data.get("schema")) is not int:
            raise ValueError(f"{version!r} is not a version")  # a damaged byte, which costs this record only
        data = without_schema(data, "the trajectory", SCHEMA)
        turns = _turns(data)
        final = [Message.from_openai(message) for message in data.get("final_observation", [])]
        made = cls(**{**data, "turns": turns, "final_observation": final})
        _check(made, _OF_TRAJECTORY)
        for turn in turns:
            _check(turn, _OF_TURN)
        return made


# ---
# Record format: one JSON object, in which messages are plain text and the tokens of all turns are three values.
#
#   turns[i].tokens  [continues, prompt, sampled], numbers of tokens; absent for a turn without tokens.
#   tokens.ids       prompt and sampled ids, turn by turn, as "i4:BASE64"
#   tokens.logprobs  of the sampled tokens, as "f4:BASE64"
#   tokens.versions  of the sampled tokens, as runs: [version, number of tokens], ...
#
# "i4" is int32, "f4" float32: first the lowest byte of all values, then the next byte of all, and so on. If zlib makes
# the bytes smaller they are compressed: "i4z", "f4z". Fields with the values of `_SOMETIMES` and `_USUAL` are omitted.

SCHEMA = 6
_SOMETIMES: dict[str, Any] = {
    "rewards": {},
    "opponents": {},
    "group": None,
    "member": None,
    "started": 0.0,
    "reset_s": 0.0,
    "close_s": 0.0,
    "reason": "",
    "failures": [],
    "scores": {},
}
_APART = ("turns", "final_observation", *_SOMETIMES)
_TIMES = ("reward", "generate_s", "step_s")
_USUAL: dict[str, Any] = {
    "reward": 0.0,
    "stop_reason": "stop",
    "forked": False,
    "metadata": {},
    "seat": "",
    "calls_s": [],
}


def runs(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Run-length encode a vector: its values and the length of each run."""
    import numpy as np

    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])[: len(values)])
    return values[starts], np.diff(starts, append=len(values))


def _turn_to_dict(turn: Turn) -> dict[str, Any]:
    reply = turn.reply
    figures = {
        **{name: getattr(turn, name) for name in _TIMES},
        "stop_reason": reply.stop_reason,
        "forked": reply.forked,
        "metadata": reply.metadata,
        "seat": turn.seat,
        "calls_s": turn.calls_s,
    }
    data: dict[str, Any] = {
        "observation": [message.to_openai() for message in turn.observation],
        "message": reply.message.to_openai(),
        **{name: value for name, value in figures.items() if name not in _USUAL or value != _USUAL[name]},
    }
    if reply.has_tokens:
        data["tokens"] = [reply.continues, len(reply.prompt_ids), len(reply.token_ids)]
    return data


def _turns(data: dict[str, Any]) -> list[Turn]:
    """Build the turns of a record; removes the record's "tokens" entry."""
    tokens = data.pop("tokens", None)
    parts: list[tuple[Any, ...]] = []
    counts = [turn["tokens"] for turn in data["turns"] if "tokens" in turn]
    if tokens is not None:
        import numpy as np

        lengths = np.array(counts, np.int64).reshape(-1, 3)
        values, repeats = np.array(tokens["versions"], np.int64).reshape(-1, 2).T
        prompts, sampled = (int(lengths[:, column].sum()) for column in (1, 2))
        if ((repeats < 0) | (repeats > sampled)).any() or repeats.sum() != sampled:
            raise ValueError("the number of versions differs from the sampled tokens")
        ids = np.split(_from_text(tokens["ids"], "i4", prompts + sampled), np.cumsum(lengths[:, 1:].ravel())[:-1])
        ends = np.cumsum(lengths[:, 2])[:-1]
        logprobs = np.split(_from_text(tokens["logprobs"], "f4", sampled), ends)
        versions = np.split(np.repeat(values, repeats), ends)
        parts = list(zip(ids[::2], ids[1::2], logprobs, versions, strict=True))
    taken = iter(zip(counts, parts, strict=True))
    turns = []
    for given in data["turns"]:
        item = {**_USUAL, **given}
        reply = Reply(
            Message.from_openai(item["message"]),
            stop_reason=item["stop_reason"],
            forked=item["forked"],
            metadata=dict(item["metadata"]),
        )
        if "tokens" in item:
            (continues, *lengths), arrays = next(taken)
            if [len(arrays[0]), len(arrays[1])] != lengths:
                raise ValueError("the number of tokens differs from its turns")
            reply = replace(reply, **dict(zip(TOKEN_FIELDS, arrays, strict=True)), continues=continues)
        observation = [Message.from_openai(message) for message in item["observation"]]
        figures = {name: item[name] for name in (*_TIMES, "seat")}
        turns.append(Turn(observation, reply, **figures, calls_s=list(item["calls_s"])))
    return turns


_KINDS: dict[str, Any] = {
    "str": str, "int": int, "float": (int, float), "bool": bool, "Any": object,
    "str | None": (str, type(None)), "int | None": (int, type(None)), "dict[str, Any]": (dict,),
}  # fmt: skip
"""Type of a field, or of the items of a list or dictionary field -> Python types that a record may contain."""


def _expected(part: type[Trajectory | Turn]) -> list[tuple[str, str, Any]]:
    """Name, type and permitted Python types of each checked field; of its items for lists and dictionaries."""
    expected = []
    for item in fields(part):
        kind = str(item.type)
        inside = kind.removesuffix("]").removeprefix("list[").removeprefix("dict[str, ") if "[" in kind else kind
        if inside in _KINDS:
            expected.append((item.name, kind, _KINDS[inside]))
    return expected


_OF_TRAJECTORY, _OF_TURN = _expected(Trajectory), _expected(Turn)


def _check(part: Trajectory | Turn, expected: list[tuple[str, str, Any]]) -> None:
    """Check the fields of a record, which may be damaged; messages have been validated already.

    Raises:
        TypeError: a field has a wrong type.
        ValueError: a number is too large.
    """
    for name, kind, types in expected:
        value = getattr(part, name)
        if kind.startswith("list"):
            right = isinstance(value, list) and all(isinstance(item, types) for item in value)
        elif kind.startswith("dict"):
            right = isinstance(value, dict) and all(isinstance(item, types) for item in value.values())
        else:
            right = isinstance(value, types)
        if not right:
            raise TypeError(f"{name} is not {kind}: {value!r:.100}")
        items = value if isinstance(value, list) else value.values() if isinstance(value, dict) else [value]
        largest = LARGEST_COUNT if types is int else LARGEST_NUMBER
        if not all(is_bounded(item, largest) for item in items):
            raise ValueError(f"{name} has a number that is infinite, or beyond {largest:g}")


def _to_text(values: NDArray[Any], kind: str) -> str:
    import numpy as np

    content = values.astype(f"<{kind}").view(np.uint8).reshape(-1, 4).T.tobytes()
    packed = zlib.compress(content, 1)  # higher levels save another 5 % and take twice as long
    zipped = len(packed) < len(content)
    return f"{kind}{'z' if zipped else ''}:{base64.b64encode(packed if zipped else content).decode()}"


def _from_text(text: str, kind: str, number: int) -> NDArray[Any]:
    """Decode `number` values. Never unpacks more than these, since a damaged record may claim gigabytes."""
    import numpy as np

    prefix, _, coded = text.partition(":")
    content = base64.b64decode(coded, validate=True)
    if prefix == f"{kind}z":
        content = zlib.decompressobj().decompress(content, 4 * number + 1)
    elif prefix != kind:
        raise ValueError(f"tokens are {prefix[:20]!r} where {kind!r} is expected")
    if len(content) != 4 * number:
        raise ValueError(f"the number of tokens is not {number}, as its turns require")
    planes = np.frombuffer(content, np.uint8).reshape(4, -1)
    return np.ascontiguousarray(planes.T).view(f"<{kind}").ravel()


# ---
# Trajectories on disk: JSON lines, appended one complete record at a time.
#
# A process killed while writing leaves at most one incomplete last line: readers skip it, and the next writer
# cuts it off.

DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, zlib.error)
"""Exceptions raised when a line that is not a trajectory is read."""


class TrajectoryWriter(LineWriter):
    """Appends trajectories to a file; each record is handed to the operating system when it is written.

    A second file, `KIND.index.jsonl`, holds a row for each record with its offset and the values that lists show
    (`forge_env.trajectory_index`).

    Use it from one thread at a time. In an event loop, call it in a thread: writing a long episode takes milliseconds.
    """

    exact = ("tokens",)

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self._rows: deque[IndexRow | None] = deque()
        """Index rows of the lines that are held back or being written."""
        self._index = self._new_index(path)

    @staticmethod
    def _new_index(path: Path) -> LineWriter:
        return LineWriter(index_path(path), what="rows of the index", most_held=MOST_ROWS_HELD)

    def write(self, trajectory: Trajectory) -> None:
        """Append one record and its index row, or hold them while the disk is full (see `LineWriter`).

        Raises:
            TypeError, ValueError, RecursionError: a value from the policy or the environment can't be stored as JSON.
        """
        data = trajectory.to_dict()
        try:
            line = json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
        except UnicodeEncodeError:  # an unpaired surrogate, valid in JSON but not in UTF-8
            line = json.dumps(data, separators=(",", ":")).encode()
        try:
            row = row_of(data, 0, 0)
        except BAD_RECORD:  # an environment's metric is not a number; the record is written nevertheless
            row = None
        self._rows.append(row)
        dropped = self.dropped
        self.append(line)
        if self.dropped > dropped:
            self._rows.pop()

    def move(self, path: Path) -> None:
        """Move as `LineWriter.move`, and start a new index: readers rebuild missing rows from the records."""
        super().move(path)
        with suppress(DiskFullError):
            self._index.close()
        self._index = self._new_index(path)

    def written(self, offset: int, length: int) -> None:
        """Add the index row of the record that was just written."""
        row = self._rows.popleft()
        if row is not None:
            row.offset, row.length = offset, length
            self._index.append(encode(row))

    def close(self) -> None:
        """Close both files. Raises as `LineWriter.close`, for the record file only."""
        try:
            super().close()
        finally:
            with suppress(DiskFullError):
                self._index.close()


def read_record(path: Path, offset: int, length: int, *, root: Path = ANYWHERE) -> Trajectory:
    """Read the record at an offset of a file; `root` must contain the file.

    Raises:
        OSError, UnsafeFileError: the file can't be read.
        DAMAGE: it is not a trajectory.
    """
    with open_file(path, root=root) as file:
        file.seek(offset)
        return Trajectory.from_dict(json.loads(file.read(min(length, LONGEST_LINE))))


def read_trajectories(
    path: str | Path,
    *,
    on_damage: Callable[[str], object] | None = None,
    on_newer: Callable[[str], object] | None = None,
    check: Callable[[Trajectory], object] = lambda trajectory: None,
    root: str | Path | None = None,
) -> Iterator[Trajectory]:
    """Read the complete records of a file in order; an incomplete last line is skipped.

    Args:
        path: path of the file.
        on_damage: called with a message for each complete line that is not a trajectory, which is then skipped.
        on_newer: called with a message for each record of a newer schema version, which is then skipped.
        check: raises an exception like those of `from_dict` for a trajectory that the caller can't use.
        root: folder that must contain the file after symbolic links are resolved; None: any folder.

    Raises:
        UsageError: such a line has no callback, or the path is not a regular file.
    """
    with open_file(Path(path), root=ANYWHERE if root is None else Path(root)) as file:
        for number, (_, length, line) in enumerate(whole_lines(file), start=1):
            try:
                if not line:
                    raise ValueError(f"it has {length:,} bytes; at most {LONGEST_LINE:,} are read")
                trajectory = Trajectory.from_dict(json.loads(line))
                check(trajectory)
            except UsageError as error:  # newer schema version
                if on_newer is None:
                    raise UsageError(f"{path}, line {number}: {error.message}", fix=error.fix) from error
                on_newer(f"{path}, line {number}: {error}")
                continue
            except DAMAGE as error:
                damage = f"{path}, line {number} is not a trajectory: {' '.join(str(error).split())[:200]}"
                if on_damage is None:
                    raise UsageError(damage, fix="delete that line") from error
                on_damage(damage)
                continue
            yield trajectory
