"""`KIND.index.jsonl` beside `KIND.jsonl`: one short row for each trajectory, so that a list needs no transcript.

The writer of the trajectories writes it, behind the records. It may be missing, or lack rows: of the newest records, of
a folder from before, of a process that was killed between the two writes, of a full disk. `IndexReader` makes such rows
from the records themselves, so nothing depends on the file but the time that a list takes. It can be deleted.

A row is a JSON array, in the order of `COLUMNS`; its first value is the version of the row. What is of a reader's
interest and long is cut off (`MOST`). A line of the file is a row, or packs the rows of about 64 kB of records
(`pack`), so that the file stays below a twentieth of the records. Lines are appended only. Several processes append to
one pair of files, so the rows needn't be in the order of the records. Of two rows for one offset the later counts, and
a row that reaches beyond the end of the records is of records that were lost.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from forge_env.files import LineWriter
from forge_env.reading import UnsafeFileError, open_file, whole_lines

VERSION = 1
PACKED = b'[2,"'
"""How a line begins that holds several rows."""
SUFFIX = ".index.jsonl"
SCORED = ("ended", "limit", "crashed")
"""Outcomes of episodes that have a score."""
LIMITS = (
    *("turns", "tool_calls", "tokens", "context", "time"),
    *("working_time", "agent_time", "program_time", "cost"),
)
"""Limits that an episode can run out of; others are named as they are."""
MOST_METRICS, MOST_TAGS, MOST_NAME, MOST_ANSWER = 12, 8, 64, 48
"""What a row holds of one trajectory: metrics, tags, characters of a name, characters of the answer."""
PACKED_RECORDS = 1 << 16
"""Bytes of records after which their rows are written; a reader makes them itself until then."""
MOST_UNPACKED = 1 << 22
"""Bytes of rows in one line; one that claims to hold more is damaged."""
MOST_ROWS_HELD = 1 << 20
"""Bytes of lines that wait for room on a full disk; readers make the other rows of the records."""
BAD_RECORD = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions raised when a line that is not a record is read."""


@dataclass(slots=True)
class IndexRow:
    """What a list shows of one trajectory, and where its record is.

    `outcome` is "ended", "limit" (`why` names it: "turns", "tool_calls", ...), "crashed" (the agent's own code failed),
    "lost" (`why` is the kind of the error) or "unreadable" (`why` says what is wrong with the record).
    """

    offset: int
    """Of the record's first byte in `KIND.jsonl`."""
    length: int
    """Bytes of the record, its line feed included."""
    id: str = ""
    environment: str = ""
    task: str = ""
    split: str = ""
    group: int | None = None
    """Of a training episode the position of its group; else the index of the task."""
    member: int | None = None
    """Which episode of the group, or epoch of the evaluation."""
    reward: float = 0.0
    best: float = 1.0
    """The environment's highest reward, where the record has it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """By name; `turns` and `tool_calls` only where they differ from the columns, `tool_errors` only above 0."""
    outcome: str = "ended"
    why: str = ""
    turns: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    """How often the agent called each tool."""
    tokens: int = 0
    """That the policy sampled; where no tokens are known, what the endpoint counted."""
    context: int = 0
    """Tokens of the longest conversation; 0: not known."""
    wall_s: float = 0.0
    waited_s: float = 0.0
    generate_s: float = 0.0
    step_s: float = 0.0
    started: float = 0.0
    """Seconds since 1970, UTC; 0: not recorded."""
    oldest: int = -1
    """Policy version of the oldest sampled token; -1: no version is known."""
    newest: int = -1
    difficulty: int = 1
    tags: list[str] = field(default_factory=list)
    retries: int = 0
    cost: float = 0.0
    """In the currency of the price list, where the evaluation has one."""
    answer: str = ""
    """Beginning of the answer, or of the last message, in one line."""
    reset_s: float = 0.0
    close_s: float = 0.0
    reason: str = ""
    """The judge's reason for a score below the maximum; numbers are masked."""
    read: str = ""
    """Beginning of the last tool result that the agent read; numbers are masked."""

    @property
    def end(self) -> int:
        """Offset of the next record."""
        return self.offset + self.length

    @property
    def num_calls(self) -> int:
        """Tool calls."""
        return sum(self.calls.values())


COLUMNS = ("version", *(item.name for item in fields(IndexRow)))
"""Of a row on disk."""
_values = attrgetter(*COLUMNS[1:])
_EMPTY: list[tuple[int, type]] = [
    (COLUMNS.index(item.name), {"str": str, "dict": dict, "list": list}[str(item.type).partition("[")[0]])
    for item in fields(IndexRow)
    if item.type not in ("int", "float", "int | None")
]
"""Places and types of the columns that are no numbers: 0 stands for an empty one."""
_FIGURES = [COLUMNS.index(item.name) for item in fields(IndexRow) if item.type == "float"]


def index_path(records: Path) -> Path:
    """The index of a file of trajectories."""
    return records.with_name(records.name.removesuffix(".jsonl") + SUFFIX)


def is_index(path: Path) -> bool:
    """Whether it is an index, and no file of trajectories."""
    return path.name.endswith(SUFFIX)


def row_of(record: Mapping[str, Any], offset: int, length: int) -> IndexRow:
    """The row of a record of any version (`Trajectory.to_dict`).

    Raises:
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError: it is no record.
    """
    turns, info = record["turns"], record.get("info") or {}
    usage = info.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    calls: dict[str, int] = {}
    for turn in turns:
        for call in turn["message"].get("tool_calls") or ():
            name = call["function"]["name"][:MOST_NAME]
            calls[name] = calls.get(name, 0) + 1
    counted = {"turns": len(turns), "tool_calls": sum(calls.values()), "tool_errors": 0}
    metrics = {
        name[:MOST_NAME]: _short(value, 4)
        for name, value in record["metrics"].items()
        if value != counted.get(name) and math.isfinite(value)
    }
    tokens, context, versions = _tokens(record)
    outcome, why = _outcome(record)
    return IndexRow(
        offset=offset,
        length=length,
        id=str(record["id"]),
        environment=str(record["environment"]),
        task=record["task_id"][:MOST_NAME],
        split=record.get("split", "train")[:MOST_NAME],
        group=_place(record, "group", info.get("index")),
        member=_place(record, "member", info.get("epoch")),
        reward=_short(record["reward"], 6),
        best=_short(math.inf if (best := info.get("max_reward", 1)) is None else best, 6),
        metrics=dict(list(metrics.items())[:MOST_METRICS]),
        outcome=outcome,
        why=why,
        turns=len(turns),
        calls=dict(list(calls.items())[:MOST_METRICS]),
        tokens=int(tokens or usage.get("completion", 0)),
        context=context,
        wall_s=_short(record.get("wall_s", 0), 4),
        waited_s=_short(record.get("waited_s", 0), 4),
        generate_s=_short(sum(turn.get("generate_s", 0) for turn in turns), 4),
        step_s=_short(sum(turn.get("step_s", 0) for turn in turns), 4),
        started=_short(record.get("started", 0), 1),
        oldest=min(versions, default=-1),
        newest=max(versions, default=-1),
        difficulty=int(record.get("difficulty", 1)),
        tags=[tag[:MOST_NAME] for tag in record.get("tags", [])[:MOST_TAGS]],
        retries=int(record.get("retries", 0)),
        cost=_short(usage.get("cost", 0), 6),
        answer=_beginning(record, turns),
        reset_s=_short(record.get("reset_s", 0), 4),
        close_s=_short(record.get("close_s", 0), 4),
        reason=masked(record.get("reason", "")),
        read=masked(last_read(turns)),
    )


_NUMBER = re.compile(r"\b(\d{1,9})/(\d{1,9})\b|\d+(?:\.\d+)?", re.ASCII)
"""A fraction, or a number."""


def masked(text: str) -> str:
    """The first line of a text with its numbers masked, so that texts that differ only in numbers are equal.

    A masked fraction still shows none, part or all: `0/2 passed` becomes `0/n passed`, `1/2` `k/n` and `2/2` `n/n`.
    """
    line = next((line for line in text[: 4 * MOST_NAME].split("\n") if line.strip()), "")
    return _NUMBER.sub(_mask, " ".join(line.split())[:MOST_NAME])


def _mask(number: re.Match[str]) -> str:
    if number[2] is None:
        return "#"
    above, below = int(number[1]), int(number[2])
    return "0/n" if above == 0 else "n/n" if above == below else "k/n"


def last_read(turns: Sequence[Mapping[str, Any]]) -> str:
    """The last tool result that the agent read before it answered; empty if there is none."""
    for turn in reversed(turns):
        for message in reversed(turn["observation"]):
            if message["role"] == "tool":
                content = message.get("content")
                return content if isinstance(content, str) else ""
    return ""


def _place(record: Mapping[str, Any], name: str, otherwise: Any) -> int | None:
    found = record.get(name)
    found = otherwise if found is None else found
    return found if type(found) is int else None


def _short(value: float, digits: int) -> float:
    """A figure with few digits; a whole one without a point."""
    rounded = round(float(value), digits)
    return int(rounded) if math.isfinite(rounded) and rounded == int(rounded) else rounded


def _tokens(record: Mapping[str, Any]) -> tuple[int, int, list[int]]:
    """Sampled tokens, those of the longest conversation, and the versions that sampled them."""
    turns, packed = record["turns"], record.get("tokens")
    if packed is not None:
        counts = [turn["tokens"] for turn in turns if "tokens" in turn]
        versions = [int(version) for version, _ in packed["versions"]]
        return sum(own[2] for own in counts), max(map(sum, counts), default=0), versions
    sampled = [turn["token_ids"] for turn in turns if turn.get("token_ids")]  # of version 1
    versions = [int(version) for turn in turns for version in set(turn.get("versions") or ())]
    context = (len(turn.get("prompt_ids") or ()) + len(turn.get("token_ids") or ()) for turn in turns)
    return sum(map(len, sampled)), max(context, default=0), versions


def _outcome(record: Mapping[str, Any]) -> tuple[str, str]:
    if record.get("valid", True) and record.get("error"):
        return "crashed", ""
    if not record.get("valid", True):
        kind, colon, _ = (record.get("error") or "").partition(":")
        return "lost", kind[:MOST_NAME] if colon and " " not in kind.strip() else "Error"
    if record.get("truncated"):
        return "limit", str(record.get("truncation") or "limit")[:MOST_NAME]
    return "ended", ""


def out_of(limit: str) -> str:
    """`out of tool calls`, for the name of a limit."""
    return f"out of {limit.replace('_', ' ')}" if limit in LIMITS else f"limit: {limit}"


def _beginning(record: Mapping[str, Any], turns: Any) -> str:
    text = record.get("answer") or (turns[-1]["message"].get("content") if turns else "") or ""
    lines = (line.strip() for line in text[: 20 * MOST_ANSWER].splitlines()) if isinstance(text, str) else ()
    return " ".join(line for line in lines if line and not line.startswith("```"))[:MOST_ANSWER]


# ---
# On disk


def encode(row: IndexRow) -> bytes:
    """A line of the index, without its line feed. What follows from the id is left out, and so is what is usual."""
    left_out = {
        "outcome": row.outcome == "ended",
        "environment": row.environment == _environment_in(row.id),
        "split": row.split == _split_in(row.id, row.group, row.member),
    }
    values = [
        0 if left_out.get(name) or not (value or value is None) else value
        for name, value in zip(COLUMNS, [VERSION, *_values(row)], strict=True)
    ]
    values = [None if isinstance(value, float) and not math.isfinite(value) else value for value in values]
    try:
        return json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a surrogate without its other half: JSON has it, UTF-8 does not
        return json.dumps(values, separators=(",", ":")).encode()


def decode(line: bytes) -> IndexRow:
    """The row that a line of an index holds.

    Raises:
        ValueError, TypeError: it holds none, or one of a version that this forge-env doesn't know.
    """
    return _row(json.loads(line))


def _row(values: Any) -> IndexRow:
    if not isinstance(values, list) or values[:1] != [VERSION] or len(values) < len(COLUMNS):
        raise ValueError("no row of version 1")
    for place, kind in _EMPTY:
        value = values[place]
        if value.__class__ is kind:
            continue
        if value == 0:
            values[place] = kind()
        else:
            raise ValueError(f"{COLUMNS[place]} is a {type(value).__name__}")
    if None in values:
        for place in _FIGURES:
            if values[place] is None:
                values[place] = math.nan
    row = IndexRow(*values[1 : len(COLUMNS)])
    row.outcome = row.outcome or "ended"
    row.environment = row.environment or _environment_in(row.id)
    row.split = row.split or _split_in(row.id, row.group, row.member)
    if type(row.offset) is not int or type(row.length) is not int or row.offset < 0 or row.length < 1:
        raise ValueError("no place in a file")
    return row


def pack(rows: Sequence[bytes]) -> bytes:
    """Rows as one line of the index, without its line feed: a single one as it is, several as `[2, TEXT]`, where TEXT
    is the base64 of what zlib makes of the rows with commas between them."""
    if len(rows) == 1:
        return rows[0]
    return b'%b%b"]' % (PACKED, base64.b64encode(zlib.compress(b",".join(rows))))


def unpack(line: bytes) -> list[Any]:
    """The values of the rows that a line holds.

    Raises:
        ValueError, zlib.error, RecursionError: the line is damaged.
    """
    content = line
    if line.startswith(PACKED):
        packed = base64.b64decode(line.removeprefix(PACKED).removesuffix(b"\n").removesuffix(b'"]'), validate=True)
        unpacking = zlib.decompressobj()
        content = unpacking.decompress(packed, MOST_UNPACKED)
        if not unpacking.eof:
            raise ValueError("cut short, or longer than any that is written")
    content = b"[%b]" % content
    try:
        return list(from_json(content, cache_strings="none"))
    except ValueError:  # a surrogate without its other half: only Python's reader takes it
        return list(json.loads(content))


def _decoded(lines: Iterable[bytes]) -> Iterator[IndexRow]:
    """The rows of these lines that can be read."""
    for line in lines:
        try:
            values = unpack(line)
        except (ValueError, zlib.error, RecursionError):
            continue
        for found in values:
            try:
                yield _row(found)
            except (ValueError, TypeError):
                continue


class IndexWriter:
    """Writes rows to the index of a file of trajectories: those of `PACKED_RECORDS` bytes of records as one line.

    What is not written yet, or can't be for lack of room, costs nothing but time: readers make it of the records.

    Args:
        records: the file of trajectories.
    """

    def __init__(self, records: Path) -> None:
        self._file = LineWriter(index_path(records), what="rows of the index", most_held=MOST_ROWS_HELD)
        self._rows: list[bytes] = []
        self._bytes = 0

    def append(self, row: IndexRow) -> None:
        """Take a row, and write all that were taken where they are enough."""
        self._rows.append(encode(row))
        self._bytes += row.length
        if self._bytes >= PACKED_RECORDS:
            self.flush()

    def flush(self) -> None:
        """Write what was taken."""
        if self._rows:
            self._file.append(pack(self._rows))
        self._rows, self._bytes = [], 0

    def close(self) -> None:
        """Write what was taken, and close the file.

        Raises:
            DiskFullError: there is no room.
        """
        self.flush()
        self._file.close()


def _environment_in(name: str) -> str:
    """Of the ids of an evaluation: ENVIRONMENT/SPLIT/INDEX/EPOCH."""
    return name.partition("/")[0] if "/" in name else ""


def _split_in(name: str, group: int | None, member: int | None) -> str:
    """Of the ids of a run, SPLIT-GROUP-MEMBER and SPLIT-INDEX; empty where there is none in it."""
    if group is not None:
        for suffix in (f"-{group}-{member}", f"-{group}"):
            if name.endswith(suffix):
                return name.removesuffix(suffix)
    return ""


def scan(records: Path, start: int = 0, end: int | None = None) -> Iterator[IndexRow]:
    """Rows made of the records themselves, of the whole lines between two offsets: about 10,000 a second.

    A line that holds no record, or is too long, gives a row with the outcome "unreadable". Raises as `open_file`.
    """
    with open_file(records) as file:
        file.seek(start)
        for offset, length, line in whole_lines(file):
            if end is not None and offset >= end:
                return
            try:
                row = row_of(json.loads(line), offset, length) if line else _too_long(offset, length)
            except BAD_RECORD as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                row = IndexRow(offset, length, outcome="unreadable", why=why[:200])
            yield row


def _too_long(offset: int, length: int) -> IndexRow:
    return IndexRow(offset, length, outcome="unreadable", why=f"the line has {length:,} bytes")


def new_lines(records: Path, read: int, most: float = math.inf) -> tuple[list[bytes], int]:
    """The whole lines of an index behind its byte `read`, and where to read on. One that was cut short is read anew.

    Args:
        records: the file of trajectories.
        read: bytes of its index that were read before.
        most: bytes to read now, about.

    Raises:
        OSError: the index is there and can't be read.
    """
    lines, start = [], read
    try:
        file = open_file(index_path(records))
    except (FileNotFoundError, UnsafeFileError):  # the rows are made of the records
        return [], read
    with file:
        if os.fstat(file.fileno()).st_size < read:
            read = start = 0
        file.seek(read)
        for line in whole_lines(file, 2 * MOST_UNPACKED):
            lines.append(line.text)
            read += line.length
            if read - start >= most:
                break
    return lines, read


def rows_of(lines: Iterable[bytes], start: int, end: int) -> list[IndexRow]:
    """The rows in an index's lines of records between two offsets, in order of offset.

    A line that is damaged, or of a newer version, gives none: its row is made of the record. Of rows that overlap the
    later counts: the others' records were lost with a machine's memory, and written over.
    """
    found = [row for row in _decoded(lines) if start <= row.offset and row.end <= end]
    if all(one.end <= other.offset for one, other in pairwise(found)):
        return found
    kept: list[tuple[int, IndexRow]] = []
    for number, row in sorted(enumerate(found), key=lambda item: (item[1].offset, item[0])):
        while kept and row.offset < kept[-1][1].end and kept[-1][0] < number:
            kept.pop()
        if not kept or row.offset >= kept[-1][1].end:
            kept.append((number, row))
    return [row for _, row in kept]


class IndexReader:
    """The rows of one file of trajectories, complete and as they come.

    reader = IndexReader(folder / "train.jsonl")
    rows = {row.offset: row for row in reader.news()}        # all there are
    rows |= {row.offset: row for row in reader.news()}       # later: those that came since

    Args:
        records: the file of trajectories; it may not be there yet.

    Attributes:
        begun_anew: the file was replaced or cut short since the call before: rows of before count no more. Set by
            `news`.
        covered: bytes of the records, from the start, whose rows have been given.
    """

    def __init__(self, records: Path) -> None:
        self.records = records
        self.begun_anew = False
        self.covered = 0
        self._read = 0
        self._file: tuple[int, int] | None = None
        self._ahead: dict[int, int] = {}
        """Ends by offset of rows beyond a gap."""

    def news(self) -> Iterator[IndexRow]:
        """Rows since the last call: those of the index first, then of records that have none.

        Raises:
            OSError, UnsafeFileError: a file can't be read.
        """
        self.begun_anew = False
        lines, self._read = new_lines(self.records, self._read)  # before the size: what they tell of is in the file
        try:
            found = self.records.stat()
        except FileNotFoundError:
            return
        if self._file not in (None, (found.st_dev, found.st_ino)) or found.st_size < self.covered:
            self.begun_anew, self.covered = True, 0
            self._ahead.clear()
            lines, self._read = new_lines(self.records, 0)
        self._file = (found.st_dev, found.st_ino)
        for row in rows_of(lines, self.covered, found.st_size):
            self._ahead[row.offset] = row.end
            yield row
        self._close_up()
        while self.covered < found.st_size:
            gap_ends = min((start for start in self._ahead if start > self.covered), default=None)
            before = self.covered
            for row in scan(self.records, self.covered, gap_ends):
                self.covered = row.end
                yield row
            self._close_up()
            if self.covered == before:
                return  # half a line, which somebody is writing

    def _close_up(self) -> None:
        while (end := self._ahead.pop(self.covered, None)) is not None:
            self.covered = end
        for start in [start for start in self._ahead if start < self.covered]:
            del self._ahead[start]
