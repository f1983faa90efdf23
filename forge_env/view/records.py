"""Views of a record for the pages, read without trust: a damaged part affects only its own display."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_env.errors import ForgeError
from forge_env.figures import duration
from forge_env.reading import LONGEST_LINE, UnsafeFileError
from forge_env.trajectory import DAMAGE, Trajectory, Turn
from forge_env.trajectory_index import SCORED
from forge_env.types import Message
from forge_env.view.index import RunIndex
from forge_env.view.text import SHOWN, Piece, Vocabulary, arguments, pieces, plain, shown

MOST_MESSAGES, MOST_MEMBERS = 400, 64
LONG_LINES = 24
"""Number of lines beyond which an observation is folded."""


class UnreadableError(Exception):
    """A record or file that can't be shown, and the reason."""


def read(index: RunIndex, row: Mapping[str, Any]) -> tuple[Trajectory, bytes]:
    """Read a trajectory and its line.

    Raises:
        UnreadableError: the line is damaged, too large or gone.
    """
    if row["length"] > LONGEST_LINE:
        raise UnreadableError(f"the record has {row['length']:,} bytes; at most {LONGEST_LINE:,} are shown")
    try:
        line = index.read(row["key"], row["length"])
    except (OSError, LookupError, UnsafeFileError) as error:
        raise UnreadableError(f"its file can't be read: {error}") from error
    try:
        return Trajectory.from_dict(json.loads(line)), line
    except (*DAMAGE, ForgeError) as error:
        raise UnreadableError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


@dataclass(slots=True)
class CallView:
    """One tool call."""

    name: str
    arguments: list[Piece]
    seconds: float | None = None
    credit: Mapping[str, Any] | None = None
    """The call's credit, on pages that show credits (`forge_env.view.credit`)."""


@dataclass(slots=True)
class MessageView:
    """One message of the conversation."""

    number: int
    role: str
    pieces: list[Piece]
    calls: list[CallView]
    reasoning: str
    name: str
    images: int
    left: int
    """Number of characters beyond those shown."""
    fold: bool
    note: str = ""
    """Figures of the turn, in one line of small print."""
    seat: str = ""
    credit: Mapping[str, Any] | None = None
    """Credit of a message without calls."""


def conversation(trajectory: Trajectory, longest: int = SHOWN) -> list[MessageView]:
    """Return the messages as the agent saw them, with the figures of each turn.

    Args:
        longest: maximum characters of a text.
    """
    result: list[MessageView] = []

    def add(message: Message, seat: str = "") -> MessageView:
        result.append(_message(message, len(result), seat, longest))
        return result[-1]

    for turn in trajectory.turns:
        for message in turn.observation:
            add(message, turn.seat)
        answer = add(turn.message, turn.seat)
        for call, spent in zip(answer.calls, turn.calls_s, strict=False):
            call.seconds = spent
        answer.note = _note(turn)
    for message in trajectory.final_observation:
        add(message)
    return result


def _note(turn: Turn) -> str:
    reply = turn.reply
    parts = [f"{len(reply.token_ids):,} tokens"] if len(reply.token_ids) else []
    if turn.generate_s:
        parts.append(f"model {duration(turn.generate_s, fine=True)}")
    if turn.step_s:
        parts.append(f"environment {duration(turn.step_s, fine=True)}")
    if len(reply.token_ids) and turn.generate_s:
        parts.append(f"{len(reply.token_ids) / turn.generate_s:,.0f} tokens/s")
    if turn.reward:
        parts.append(f"reward {turn.reward:g}")
    if reply.stop_reason not in ("stop", ""):
        parts.append(f"stop reason: {reply.stop_reason}")
    return " · ".join(parts)


def _message(message: Message, number: int, seat: str, longest: int) -> MessageView:
    text = message.content
    cut = text[:longest]
    calls = message.tool_calls[:100]
    return MessageView(
        number=number,
        role=message.role,
        pieces=([Piece(shown(cut), "text")] if text else []) if message.role == "tool" else pieces(cut),
        calls=[CallView(call.function.name, arguments(call.function.arguments, longest)) for call in calls],
        reasoning=(message.reasoning_content or "")[:longest],
        name=message.name or "",
        images=len(message.images),
        left=max(0, len(text) - longest),
        fold=message.role != "assistant" and cut.count("\n") > LONG_LINES,
        seat=seat,
    )


@dataclass(slots=True)
class TokenTurn:
    """The tokens of one turn: the preceding ones, as a number and a text, and the sampled ones."""

    before: int
    before_text: str
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


def tokens(trajectory: Trajectory, vocabulary: Vocabulary | None) -> list[TokenTurn]:
    """Return the tokens turn by turn; without a vocabulary, their ids are shown instead of their texts."""
    result = []
    for turn in trajectory.turns:
        reply = turn.reply
        if not reply.has_tokens:
            continue
        before, ids = reply.prompt_ids.tolist(), reply.token_ids.tolist()
        texts = list(vocabulary.texts(ids)) if vocabulary is not None else [f"{number} " for number in ids]
        texts = [plain(text) for text in texts]  # no invisible characters: the page finds a token by its position
        text = "".join(vocabulary.texts(before)) if vocabulary is not None else " ".join(map(str, before))
        logprobs = [round(value, 4) if math.isfinite(value) else 0.0 for value in reply.logprobs.tolist()]
        result.append(TokenTurn(len(before), text[:SHOWN], texts, ids, logprobs, reply.versions.tolist()))
    return result


def token_data(turns: Sequence[TokenTurn], advantage: float | None, learned: bool) -> dict[str, Any]:
    """Return the data for the page: for each turn the lengths of the tokens' texts in UTF-16 units, and their figures.

    Args:
        learned: whether a training step used this advantage; else it is the reward minus the group's mean.
    """
    return {
        "advantage": advantage,
        "learned": learned,
        "turns": [
            {
                "lengths": [len(text.encode("utf-16-le")) // 2 for text in turn.texts],
                "ids": turn.ids,
                "logprobs": turn.logprobs,
                "versions": turn.versions,
            }
            for turn in turns
        ],
    }


@dataclass(slots=True)
class Member:
    """One member of a group, beside the others."""

    row: dict[str, Any]
    messages: list[MessageView]
    unreadable: str = ""
    common: int = 0
    """Number of initial messages that all members share."""
    parts_at: int | None = None
    """Number of the first message in which it differs from the reference; None if it is the reference, or the same."""


def group_members(index: RunIndex, rows: Sequence[dict[str, Any]]) -> tuple[list[MessageView], list[Member]]:
    """Return the prompt that all members share, and the members, the best first.

    The first readable one is the reference of the others: of equally good episodes the one with the fewest tokens.
    """
    members: list[Member] = []
    texts: list[list[str]] = []
    for row in sorted(rows, key=_rank)[:MOST_MEMBERS]:
        try:
            trajectory, _ = read(index, row)
        except UnreadableError as error:
            members.append(Member(row, [], str(error)))
            continue
        members.append(Member(row, conversation(trajectory)[:MOST_MESSAGES]))
        texts.append([_content(message) for message in trajectory.messages])
    common = 0
    while texts and all(len(text) > common for text in texts) and len({text[common] for text in texts}) == 1:
        common += 1
    readable = [member for member in members if not member.unreadable]
    for member, text in zip(readable, texts, strict=True):
        member.common = common
        same = next((number for number, pair in enumerate(zip(texts[0], text, strict=False)) if len({*pair}) > 1), None)
        member.parts_at = min(len(texts[0]), len(text)) if same is None and len(text) != len(texts[0]) else same
    return (readable[0].messages[:common] if readable else []), members


def _rank(row: Mapping[str, Any]) -> tuple[bool, float, int, int]:
    scored = row["outcome"] in SCORED and row["reward"] is not None
    return not scored, -row["reward"] if scored else 0.0, row["tokens"] or 0, row["member"] or 0


def _content(message: Message) -> str:
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    return json.dumps([message.role, message.content, calls])


@dataclass(slots=True)
class Difference:
    """A figure in which the best members of a group differ from the others."""

    name: str
    best: float
    others: float


def differences(rows: Sequence[Mapping[str, Any]]) -> tuple[int, list[Difference]]:
    """Count the best members, and list how they differ from the others on average, the largest difference first."""
    valid = [row for row in rows if row["outcome"] in SCORED and row["reward"] is not None]
    top = max((row["reward"] for row in valid), default=0.0)
    best = [row for row in valid if row["reward"] >= top - 1e-9]
    others = [row for row in valid if row["reward"] < top - 1e-9]
    if not best or not others:
        return len(best), []
    names = dict.fromkeys(name for row in valid for name in row["metrics"])
    figures: dict[str, Any] = {name: (lambda row, name=name: row["metrics"].get(name, 0.0)) for name in names}
    figures |= {
        "turns": lambda row: row["turns"], "tool calls": lambda row: row["calls"], "tokens": lambda row: row["tokens"],
        "seconds": lambda row: row["wall_s"] or 0.0,
    }  # fmt: skip
    result = [
        Difference(name, sum(map(value, best)) / len(best), sum(map(value, others)) / len(others))
        for name, value in figures.items()
    ]
    result = [
        item for item in result if abs(item.best - item.others) > 0.02 * max(abs(item.best), abs(item.others), 1e-9)
    ]
    return len(best), sorted(
        result, key=lambda item: -abs(item.best - item.others) / (abs(item.best) + abs(item.others))
    )
