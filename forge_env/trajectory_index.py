"""`KIND.index.jsonl` beside `KIND.jsonl`: one short row per trajectory, so that lists need not read the transcripts.

The trajectory writer appends each row after its record. The file may be missing or lack rows: in an old folder, after a
process was killed between the two writes, or after the disk was full. `IndexReader` rebuilds such rows from the
records, so the index only saves time and can be deleted.

A row is a JSON array in the order of `COLUMNS`; its first value is the row's format version. Long values are cut off at
the limits below (`MOST_...`). Several processes append to one pair of files, so the rows needn't be in the order of the
records. If two rows have the same offset, the later one counts. A row that ends beyond the end of the record file
belongs to a record that was lost.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from forge_env.reading import LARGEST_NUMBER, UnsafeFileError, is_bounded, open_file, whole_lines

VERSION = 1
SUFFIX = ".index.jsonl"
SCORED = ("ended", "limit", "crashed")
"""Outcomes of episodes that are scored."""
LIMITS = (
    *("turns", "tool_calls", "reply_tokens", "tokens", "context", "time"),
    *("working_time", "agent_time", "program_time", "cost"),
)
"""Known limits of an episode; other limits are shown by their names."""
MOST_METRICS, MOST_TAGS, MOST_NAME, MOST_ANSWER = 12, 8, 64, 48
"""Limits of a row: number of metrics, number of tags, characters of a name, characters of the answer."""
MOST_ROWS_HELD = 1 << 20
"""Maximum bytes of rows held while the disk is full; readers rebuild the other rows from the records."""
PART = 1 << 20
"""Bytes of the index that are read at once: many more rows would keep Python's garbage collector busy."""
LONGEST_ROW = 1 << 16
BAD_RECORD = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions raised when a line that is not a record is read."""


@dataclass(slots=True)
class IndexRow:
    """The location of one trajectory's record and the values that lists show.

    `outcome` is "ended", "limit" (`why` names it: "turns", "tool_calls", ...), "crashed" (the agent's code failed),
    "lost" (`why` is the type of the error) or "unreadable" (`why` describes the damage).
    """

    offset: int
    """Offset of the record's first byte in `KIND.jsonl`."""
    length: int
    """Bytes of the record, including its line feed."""
    id: str = ""
    environment: str = ""
    task: str = ""
    split: str = ""
    group: int | None = None
    """Position of the group for a training episode; else the index of the task."""
    member: int | None = None
    """Index of the episode in its group, or the epoch of the evaluation."""
    reward: float = 0.0
    best: float = 1.0
    """The environment's highest reward, if the record contains it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics by name; `turns` and `tool_calls` only if they differ from the columns, `tool_errors` only above 0."""
    outcome: str = "ended"
    why: str = ""
    turns: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    """Number of the agent's calls of each tool."""
    tokens: int = 0
    """Number of tokens the policy sampled; if there are no tokens, the endpoint's count."""
    context: int = 0
    """Tokens of the longest conversation; 0: unknown."""
    wall_s: float = 0.0
    waited_s: float = 0.0
    generate_s: float = 0.0
    step_s: float = 0.0
    started: float = 0.0
    """Start time in seconds since 1970, UTC; 0: not recorded."""
    oldest: int = -1
    """Oldest policy version that sampled a token; -1: unknown."""
    newest: int = -1
    difficulty: int = 1
    tags: list[str] = field(default_factory=list)
    retries: int = 0
    cost: float = 0.0
    """Cost in the currency of the price list, if the evaluation has one."""
    answer: str = ""
    """Start of the answer, or of the last message, as one line."""
    reset_s: float = 0.0
    close_s: float = 0.0
    reason: str = ""
    """The judge's reason for a score below the maximum; numbers are masked."""
    read: str = ""
    """Start of the last tool result that the agent read; numbers are masked."""

    @property
    def end(self) -> int:
        """Offset of the next record."""
        return self.offset + self.length

    @property
    def num_calls(self) -> int:
        """Total number of tool calls."""
        return sum(self.calls.values())


COLUMNS = ("version", *(item.name for item in fields(IndexRow)))
"""Columns of a row on disk."""
_values = attrgetter(*COLUMNS[1:])
_TYPES: list[tuple[int, type]] = [
    (COLUMNS.index(item.name), {"str": str, "dict": dict, "list": list}[str(item.type).partition("[")[0]])
    for item in fields(IndexRow)
    if item.type not in ("int", "float", "int | None")
]
"""Index and type of each column that is not a number."""
_FIGURES = [COLUMNS.index(item.name) for item in fields(IndexRow) if item.type == "float"]


def index_path(records: Path) -> Path:
    """Path of the index of a trajectory file."""
    return records.with_name(records.name.removesuffix(".jsonl") + SUFFIX)


def is_index(path: Path) -> bool:
    """Whether the path is that of an index rather than of a trajectory file."""
    return path.name.endswith(SUFFIX)


def row_of(record: Mapping[str, Any], offset: int, length: int) -> IndexRow:
    """Build the row of a record (`Trajectory.to_dict`).

    Raises:
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError: it is not a record.
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
        generate_s=_short(_total(turn.get("generate_s", 0) for turn in turns), 4),
        step_s=_short(_total(turn.get("step_s", 0) for turn in turns), 4),
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
"""Pattern of a fraction or a number."""


def masked(text: str) -> str:
    """Mask the numbers in the first line of a text, so that texts that differ only in numbers become equal.

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
    """The last tool result that the agent read before its answer; empty if there is none."""
    for turn in reversed(turns):
        for message in reversed(turn["observation"]):
            if message["role"] == "tool":
                content = message.get("content")
                return content if isinstance(content, str) else ""
    return ""


def _place(record: Mapping[str, Any], name: str, otherwise: Any) -> int | None:
    index = record.get(name)
    index = otherwise if index is None else index
    return index if type(index) is int else None


def _total(values: Iterable[float]) -> float:
    return max(-LARGEST_NUMBER, min(sum(values), LARGEST_NUMBER))


def _short(value: float, digits: int) -> float:
    """Round a value to `digits` decimals; whole values become integers. `ValueError`: it is too large."""
    rounded = round(float(value), digits)
    if math.isfinite(rounded) and not is_bounded(rounded):
        raise ValueError(f"the number {rounded:g} is too large")
    return int(rounded) if math.isfinite(rounded) and rounded == int(rounded) else rounded


def _tokens(record: Mapping[str, Any]) -> tuple[int, int, list[int]]:
    """Number of sampled tokens, length of the longest conversation, and the policy versions that sampled."""
    packed = record.get("tokens")
    if packed is None:
        return 0, 0, []
    counts = [turn["tokens"] for turn in record["turns"] if "tokens" in turn]
    versions = [int(version) for version, _ in packed["versions"]]
    return sum(count[2] for count in counts), max(map(sum, counts), default=0), versions


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
    """Phrase for a limit, such as `out of tool calls`."""
    return f"out of {limit.replace('_', ' ')}" if limit in LIMITS else f"limit: {limit}"


def _beginning(record: Mapping[str, Any], turns: Any) -> str:
    text = record.get("answer") or (turns[-1]["message"].get("content") if turns else "") or ""
    lines = (line.strip() for line in text[: 20 * MOST_ANSWER].splitlines()) if isinstance(text, str) else ()
    return " ".join(line for line in lines if line and not line.startswith("```"))[:MOST_ANSWER]


# ---
# On disk


def encode(row: IndexRow) -> bytes:
    """Encode a row as a line of the index, without the line feed."""
    values = [None if isinstance(value, float) and not math.isfinite(value) else value for value in _values(row)]
    try:
        return json.dumps([VERSION, *values], separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:  # an unpaired surrogate, valid in JSON but not in UTF-8
        return json.dumps([VERSION, *values], separators=(",", ":")).encode()


def decode(line: bytes) -> IndexRow:
    """Decode a line of the index.

    Raises:
        ValueError, TypeError, RecursionError: the line is not a row, or has a version unknown to this forge-env.
    """
    try:
        values = from_json(line, cache_strings="none")
    except ValueError:  # an unpaired surrogate, which only Python's parser accepts
        values = json.loads(line)
    if not isinstance(values, list) or values[:1] != [VERSION] or len(values) < len(COLUMNS):
        raise ValueError(f"not a row of version {VERSION}")
    if wrong := [COLUMNS[column] for column, kind in _TYPES if values[column].__class__ is not kind]:
        raise ValueError(f"{wrong[0]} has another type")
    if None in values:
        for column in _FIGURES:
            values[column] = math.nan if values[column] is None else values[column]
    row = IndexRow(*values[1 : len(COLUMNS)])
    if type(row.offset) is not int or type(row.length) is not int or row.offset < 0 or row.length < 1:
        raise ValueError("not an offset in a file")
    return row


def scan(records: Path, start: int = 0, end: int | None = None) -> Iterator[IndexRow]:
    """Build rows from the records themselves, for the complete lines between two offsets: about 10,000 a second.

    A line that is not a record, or is too long, yields a row with the outcome "unreadable". Raises as `open_file`.
    """
    with open_file(records) as file:
        file.seek(start)
        for offset, length, line in whole_lines(file):
            if end is not None and offset >= end:
                return
            try:
                if not line:
                    raise ValueError(f"the line has {length:,} bytes")
                row = row_of(json.loads(line), offset, length)
            except BAD_RECORD as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                row = IndexRow(offset, length, outcome="unreadable", why=why[:200])
            yield row


def _new_lines(records: Path, read: int) -> tuple[list[bytes], int]:
    """Read about `PART` bytes of an index from byte `read` on: its complete lines, and the offset after them."""
    lines: list[bytes] = []
    try:
        file = open_file(index_path(records))
    except (FileNotFoundError, UnsafeFileError):  # the rows are built from the records
        return [], read
    with file:
        read = read if os.fstat(file.fileno()).st_size >= read else 0  # a truncated index is read again
        file.seek(read)
        end = read + PART
        for line in whole_lines(file, LONGEST_ROW):
            lines.append(line.text)
            read += line.length
            if read >= end:
                break
    return lines, read


def _rows_of(lines: Iterable[bytes], start: int, end: int) -> list[IndexRow]:
    """Rows in index lines whose records are between two offsets, in order of offset.

    Damaged lines and those of a newer version yield no rows; they are built from the records. If rows overlap, the
    later one counts: the record of the other was lost in a crash of the machine and overwritten.
    """
    rows: list[IndexRow] = []
    for line in lines:
        with suppress(ValueError, TypeError, RecursionError):
            row = decode(line)
            if start <= row.offset and row.end <= end:
                rows.append(row)
    if all(one.end <= other.offset for one, other in pairwise(rows)):
        return rows
    current: list[tuple[int, IndexRow]] = []
    for number, row in sorted(enumerate(rows), key=lambda item: (item[1].offset, item[0])):
        while current and row.offset < current[-1][1].end and current[-1][0] < number:
            current.pop()
        if not current or row.offset >= current[-1][1].end:
            current.append((number, row))
    return [row for _, row in current]


class IndexReader:
    """Reads the rows of one trajectory file: first all of them, then each time those that were added.

    reader = IndexReader(folder / "train.jsonl")
    rows = {row.offset: row for row in reader.news()}        # all rows
    rows |= {row.offset: row for row in reader.news()}       # later: rows added since

    Args:
        records: path of the trajectory file; it need not exist yet.
        read, covered, inode: attributes of an earlier reader, to continue from there.

    Attributes:
        begun_anew: whether the file was replaced or truncated since the previous call, which makes earlier rows
            invalid. Set by `news`.
        covered: bytes of the records, from the start, whose rows have been returned.
        size: bytes of the record file when it was last looked at.
        scanned: bytes of records whose rows were missing from the index.
        read: bytes of the index that have been read.
        inode: of the record file; 0: unknown.
    """

    def __init__(self, records: Path, *, read: int = 0, covered: int = 0, inode: int = 0) -> None:
        self.records = records
        self.begun_anew = False
        self.read, self.covered, self.inode = read, covered, inode
        self.size = self.scanned = 0
        self._ahead: dict[int, int] = {}
        """Offset -> end of rows that follow a gap."""

    def news(self) -> Iterator[IndexRow]:
        """Yield the rows added since the last call: from the index first, then from records that it lacks.

        Raises:
            OSError, UnsafeFileError: a file can't be read.
        """
        self.begun_anew = False
        try:
            status = self.records.stat()
        except FileNotFoundError:
            return
        if self.inode not in (0, status.st_ino) or status.st_size < self.covered:
            self.begun_anew, self.covered, self.read = True, 0, 0
            self._ahead.clear()
        self.inode = status.st_ino
        while True:
            lines, self.read = _new_lines(self.records, self.read)
            self.size = self.records.stat().st_size  # after the rows were read, whose records are in the file by now
            if not lines:
                break
            for row in _rows_of(lines, self.covered, self.size):
                if row.offset == self.covered:
                    self.covered = row.end
                else:
                    self._ahead[row.offset] = row.end
                yield row
            self._close_up()
        while self.covered < self.size:
            gap_ends = min((start for start in self._ahead if start > self.covered), default=None)
            before = self.covered
            for row in scan(self.records, self.covered, gap_ends):
                self.covered, self.scanned = row.end, self.scanned + row.length
                yield row
            self._close_up()
            if self.covered == before:
                return  # the last line is incomplete and still being written

    def _close_up(self) -> None:
        while (end := self._ahead.pop(self.covered, None)) is not None:
            self.covered = end
        for start in [start for start in self._ahead if start < self.covered]:
            del self._ahead[start]
