"""What a list shows of every trajectory of a run, in an SQLite file of the cache folder, never in the run.

It is made of the rows that the writer leaves beside the trajectories (`forge_env.trajectory_index`), and where there
are none, of the records themselves: newest first, a part at a time, so that a page can be shown meanwhile. The file is
disposable: where its version, or an indexed file, is another, it is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from forge_env.files import end_of_last_line
from forge_env.machine import cache_dir
from forge_env.reading import (
    LONGEST_LINE,
    LONGEST_SKIPPED,
    UnsafeFileError,
    open_file,
    regular_files,
    whole_lines,
)
from forge_env.trajectory_index import IndexRow, is_index, new_lines, rows_of, scan

log = logging.getLogger(__name__)
CACHE_FIX = "make room there, or set FORGE_ENV_CACHE to a folder that can be written"
VERSION = 8
"""Of the tables below."""
PART = 8 << 20
"""Bytes of records that are read at once where they have no rows."""
ROWS_PART = 1 << 17
"""Bytes of the rows' file that are taken at once: some 4,000 rows. Many more would cost time, for Python's collector of
garbage looks through them again and again."""
PLACES = 1 << 42
"""Bytes that a file's records can have; a row's key is its file's number times this, and its offset."""
GROUPED = re.compile(r"^(?P<split>.+)-(?P<group>\d{1,15})-(?P<member>\d{1,9})$")
"""Ids of training episodes from before their group was a field."""
UNNAMED = re.compile("[\ud800-\udfff]")
"""Bytes of a file's name that are no UTF-8, as Python has them."""
SOLVED = "solved"
"""What held-out episodes are measured by, where the recipe does not say it."""

TABLES = """
create table file (
    number integer primary key, name text unique, kind text, inode integer,
    low integer, high integer, rows_read integer, size integer
);
create table t (
    key integer primary key, kind text, id text, length integer, environment text, task text, split text,
    grp text, member integer, reward real, best real, outcome text, why text,
    turns integer, calls integer, tools text, tokens integer, context integer, wall_s real, waited_s real,
    generate_s real, step_s real, started real, oldest integer, newest integer, difficulty integer, tags text,
    metrics text, solved real, retries integer, cost real, answer text, reset_s real, close_s real, reason text,
    read text
);
create unique index t_id on t (kind, id);
create table changes (generation integer, dropped integer);
insert into changes values (0, 0);
"""
INDEXES = """
create index if not exists t_group on t (kind, grp);
create index if not exists t_reward on t (reward);
create index if not exists t_version on t (newest, kind);
create index if not exists t_ending on t (best, kind, outcome, why, reason, read, reward, solved, calls, tokens, turns);
"""
"""The last holds all that endings are counted by, so that no row is read for it."""
COLUMNS = (
    "key", "kind", "id", "length", "environment", "task", "split", "grp", "member", "reward", "best", "outcome", "why",
    "turns", "calls", "tools", "tokens", "context", "wall_s", "waited_s", "generate_s", "step_s", "started", "oldest",
    "newest", "difficulty", "tags", "metrics", "solved", "retries", "cost", "answer", "reset_s",
    "close_s", "reason", "read",
)  # fmt: skip
INSERT = (
    f"insert into t ({', '.join(COLUMNS)}) values ({', '.join('?' * len(COLUMNS))}) "
    f"on conflict (kind, id) do update set {', '.join(f'{name} = excluded.{name}' for name in COLUMNS)} "
    "where excluded.key >= t.key"
)
"""Of two records of one id the later counts, whichever is read first."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of a run's records is in the index."""

    indexed: int
    """Bytes."""
    total: int

    @property
    def whole(self) -> bool:
        """Nothing is left to read."""
        return self.indexed >= self.total

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.indexed / self.total if self.total else 1.0


def kind_of(name: str) -> str:
    """The kind of a file of trajectories: its name without the ending."""
    return name.removesuffix(".jsonl")


def trajectory_files(folder: Path) -> list[os.DirEntry[str]]:
    """The files of a run's trajectories, those written to last at the end; none whose name isn't UTF-8, for neither
    the tables nor an address can hold it."""
    with suppress(OSError):
        found = [
            (entry.stat().st_mtime, entry.name, entry)
            for entry in regular_files(folder / "trajectories", folder)
            if entry.name.endswith(".jsonl") and not is_index(Path(entry.name)) and not UNNAMED.search(entry.name)
        ]
        return [entry for _, _, entry in sorted(found, key=lambda item: item[:2])]
    return []


class RunIndex:
    """The index of one run's trajectories; each thread that uses it has a connection of its own.

    Args:
        folder: of the run or evaluation.
        cache: where the SQLite file is kept; None: the user's cache folder.
        measure: name of the metric that says whether an episode solved its task; the column `solved`.

    Several processes may keep one file up to date: they take turns.
    """

    def __init__(self, folder: Path, cache: Path | None = None, measure: str = SOLVED) -> None:
        self.folder = folder
        self.measure = measure
        place = (cache or cache_dir()) / "view"
        place.mkdir(parents=True, exist_ok=True)
        identity = os.fsencode(folder.resolve()) + b"\0" + measure.encode("utf-8", "backslashreplace")
        name = hashlib.blake2b(identity, digest_size=12).hexdigest()
        self.path = place / f"{name}.sqlite"
        self._own = threading.local()
        self._writing = threading.Lock()
        self._ordered = False
        self.unread: dict[str, str] = {}
        """Why files are not read to their end, by name."""
        with self._alone():
            self._prepare()

    @property
    def generation(self) -> int:
        """Goes up with every change, whoever made it, so that what was computed of the rows can be kept until then."""
        return int(self.connection().execute("select generation from changes").fetchone()[0])

    @property
    def dropped(self) -> int:
        """How often rows were thrown away, because their file was replaced or cut short."""
        return int(self.connection().execute("select dropped from changes").fetchone()[0])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other thread, of whatever process, makes the file or writes to it."""
        with self._writing, Path(f"{self.path}.lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def connection(self) -> sqlite3.Connection:
        """This thread's."""
        found: sqlite3.Connection | None = self._own.__dict__.get("connection")
        if found is None:
            found = self._own.connection = self._connect()
        return found

    def _connect(self) -> sqlite3.Connection:
        opened = sqlite3.connect(self.path, timeout=30, isolation_level=None, check_same_thread=False)
        opened.row_factory = sqlite3.Row
        opened.executescript("pragma journal_mode = wal; pragma synchronous = off; pragma cache_size = -32768;")
        return opened

    def _prepare(self) -> None:
        """A file with the tables of this version; any other is thrown away: it can be made again."""
        with suppress(sqlite3.DatabaseError), closing(self._connect()) as opened:
            if opened.execute("pragma user_version").fetchone()[0] == VERSION:
                return
        for ending in ("", "-wal", "-shm"):
            Path(f"{self.path}{ending}").unlink(missing_ok=True)
        with closing(self._connect()) as opened:
            opened.executescript(f"begin; {TABLES} pragma user_version = {VERSION}; commit;")

    def progress(self) -> Progress:
        """How far it is, by what the files hold now."""
        known = {row["name"]: row for row in self.connection().execute("select * from file")}
        indexed = total = 0
        for entry in trajectory_files(self.folder):
            size, row = entry.stat().st_size, known.get(entry.name)
            total += size
            if row is not None and row["inode"] == entry.inode():
                indexed += row["high"] - row["low"]
                indexed += size - row["high"] if row["size"] == size else 0  # half a line at the end
        return Progress(min(indexed, total), total)

    def update(self, budget: int | None = None) -> bool:
        """Read what is new, then what is missing, newest first; whether anything changed.

        Args:
            budget: bytes of records without rows to read at most; None: all.
        """
        with self._alone():
            changed, left = False, budget
            entries = trajectory_files(self.folder)
            changed |= self._forget({entry.name: entry.inode() for entry in entries})
            self._register(entries)
            for entry in reversed(entries):
                try:
                    grown, used = self._grow(entry, left)
                except UnsafeFileError as error:
                    self.unread[entry.name] = error.message
                    continue
                self.unread.pop(entry.name, None)
                changed |= grown
                left = None if left is None else left - used
                if left is not None and left <= 0:
                    break
            if changed:
                self.connection().execute("update changes set generation = generation + 1")
            self._order()
            return changed

    def _order(self) -> None:
        """What makes sorted lists quick, once there is something to sort: it is made faster than kept up to date."""
        own = self.connection()
        if not self._ordered and own.execute("select 1 from t limit 1").fetchone():
            own.executescript(INDEXES)
            self._ordered = True

    def _forget(self, there: dict[str, int]) -> bool:
        """Drop the rows of files that are gone or were replaced."""
        own = self.connection()
        gone = [row for row in own.execute("select * from file") if there.get(row["name"]) != row["inode"]]
        for row in gone:
            self._drop(row["number"])
        return bool(gone)

    def _register(self, entries: Iterable[os.DirEntry[str]]) -> None:
        """Give new files their numbers, those written to last the highest: lists are in this order."""
        own = self.connection()
        known = {row["name"] for row in own.execute("select name from file")}
        for entry in entries:
            if entry.name not in known:
                number = (own.execute("select max(number) from file").fetchone()[0] or 0) + 1
                values = (number, entry.name, kind_of(entry.name), entry.inode())
                own.execute("insert into file values (?, ?, ?, ?, -1, -1, 0, 0)", values)

    def _drop(self, number: int) -> None:
        own = self.connection()
        own.execute("begin")
        own.execute("delete from t where key between ? and ?", (number * PLACES, (number + 1) * PLACES - 1))
        own.execute("delete from file where number = ?", (number,))
        own.execute("update changes set dropped = dropped + 1")
        own.execute("commit")

    def _grow(self, entry: os.DirEntry[str], budget: int | None) -> tuple[bool, int]:
        """Read on in one file; whether rows came, and how many bytes of records were parsed for them."""
        own, path = self.connection(), self.folder / "trajectories" / entry.name
        row = own.execute("select * from file where name = ?", (entry.name,)).fetchone()
        try:
            lines, read = new_lines(path, row["rows_read"], ROWS_PART)
            size, end = _ends(path)  # behind the lines: what they tell of is in the file by now
            if size < row["high"]:  # cut short
                self._drop(row["number"])
                self._register([entry])
                lines, read = new_lines(path, 0, ROWS_PART)
                size, end = _ends(path)
            row = own.execute("select * from file where name = ?", (entry.name,)).fetchone()
            if row["low"] < 0:  # nothing of it was read yet
                own.execute("update file set low = ?, high = ? where number = ?", (end, end, row["number"]))
            while lines:
                row = own.execute("select * from file where name = ?", (entry.name,)).fetchone()
                self._from_rows(row, lines, read, end)
                lines, read = new_lines(path, read, ROWS_PART)
                size, end = _ends(path)
        except OSError:
            return False, 0  # it is gone again
        row = own.execute("select * from file where name = ?", (entry.name,)).fetchone()
        changed, used = (row["rows_read"] > 0 and row["size"] != size), 0
        low, high = row["low"], row["high"]
        while high < end and (budget is None or used < budget):  # what came since, in order
            before = high
            part = min(high + PART, end)
            part = end if part >= end else _line_after(path, part)
            self._store(row["number"], row["kind"], scan(path, high, part), low=low, high=part, size=size)
            used, high, changed = used + part - before, part, True
        while low > 0 and (budget is None or used < budget):  # what was there, newest first
            start = _line_after(path, max(0, low - PART)) if low > PART else 0
            start = start if start < low else _line_before(path, low)
            self._store(row["number"], row["kind"], scan(path, start, low), low=start, high=high, size=size)
            used, low, changed = used + low - start, start, True
        if row["size"] != size:
            own.execute("update file set size = ? where number = ?", (size, row["number"]))
        return changed, used

    def _from_rows(self, row: sqlite3.Row, lines: list[bytes], read: int, end: int) -> None:
        """Take the rows that the writer left, as far as they join what is indexed without a gap."""
        own = self.connection()
        fresh = row["low"] == row["high"]
        low, high = (0, 0) if fresh else (row["low"], row["high"])
        joined: list[IndexRow] = []
        for found in rows_of(lines, high, end):
            if found.offset != high:
                break
            joined.append(found)
            high = found.end
        if fresh and high == 0:
            low = high = row["high"]
        if joined:
            self._store(row["number"], row["kind"], joined, low=low, high=high, size=0)
        own.execute(
            "update file set low = ?, high = ?, rows_read = ? where number = ?", (low, high, read, row["number"])
        )

    def _store(self, number: int, kind: str, rows: Iterable[IndexRow], *, low: int, high: int, size: int) -> None:
        with self.connection() as own:  # all of it, or nothing
            own.execute("begin")
            own.executemany(INSERT, (_values(number, kind, self.measure, row) for row in rows))
            own.execute("update file set low = ?, high = ?, size = ? where number = ?", (low, high, size, number))
            own.execute("update changes set generation = generation + 1")

    def place(self, key: int) -> tuple[Path, int]:
        """The file and the offset of a row's record.

        Raises:
            LookupError: the file is not of this index any more.
        """
        row = self.connection().execute("select name from file where number = ?", (key // PLACES,)).fetchone()
        if row is None:
            raise LookupError("the file of this record is gone")
        return self.folder / "trajectories" / row["name"], key % PLACES

    def read(self, key: int, length: int) -> bytes:
        """A record's line.

        Raises:
            OSError, LookupError: the file is gone.
        """
        path, offset = self.place(key)
        with open_file(path) as file:
            file.seek(offset)
            return file.read(length)


def _ends(path: Path) -> tuple[int, int]:
    """Bytes of a file, and of its whole lines."""
    with open_file(path) as file:
        return os.fstat(file.fileno()).st_size, end_of_last_line(file.fileno(), LONGEST_LINE)


def _line_after(path: Path, offset: int) -> int:
    """Offset of the first line that begins at or behind `offset`."""
    if offset <= 0:
        return 0
    with open_file(path) as file:
        file.seek(offset - 1)
        for line in whole_lines(file, 1):
            return line.offset + line.length
        return file.seek(0, os.SEEK_END)


def _line_before(path: Path, offset: int) -> int:
    """Offset of the line that ends at `offset`."""
    with open_file(path) as file:
        end = offset - 1
        while end > max(0, offset - LONGEST_SKIPPED):
            start = max(0, end - (1 << 20))
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    if end > 0:
        raise UnsafeFileError(f"{path}: the line before byte {offset:,} is too long", fix="remove it")
    return 0


def _utf8(text: str) -> str:
    """SQLite has UTF-8 only: half of a surrogate pair is written as JSON writes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


@lru_cache(4096)
def _json(items: tuple[tuple[str, Any], ...]) -> str:
    """A mapping as JSON; most episodes have one of a few."""
    return json.dumps(dict(items))


@lru_cache(4096)
def _list(items: tuple[str, ...]) -> str:
    return json.dumps(items)


def _values(number: int, kind: str, measure: str, row: IndexRow) -> tuple[Any, ...]:
    """A row of the table; one with what the table can't hold is shown as unreadable."""
    try:
        return _columns(number, kind, measure, row)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {error}"
        name = row.id[:200] if isinstance(row.id, str) else ""
        return _columns(number, kind, measure, IndexRow(row.offset, row.length, name, outcome="unreadable", why=why))


def _columns(number: int, kind: str, measure: str, row: IndexRow) -> tuple[Any, ...]:
    group, member = row.group, row.member
    name = "" if group is None else str(group)
    if group is None and kind.startswith("train") and (found := GROUPED.match(row.id)):
        name, member = found["group"], int(found["member"])
    elif member is not None and "/" in row.id and row.id.endswith(f"/{member}"):
        name = row.id.rpartition("/")[0]  # of an evaluation: ENVIRONMENT/SPLIT/INDEX
    elif not kind.startswith("train"):
        name = ""
    identity = row.id or f"line at byte {row.offset}"
    texts = [
        identity,
        row.environment,
        row.task,
        row.split,
        name,
        row.outcome,
        row.why,
        row.answer,
        row.reason,
        row.read,
    ]
    if not "".join(texts).isascii():
        texts = [_utf8(text) for text in texts]
    identity, environment, task, split, name, outcome, why, answer, reason, read = texts
    calls = row.num_calls
    figures = (
        abs(member or 0) | abs(row.turns) | abs(calls) | abs(row.tokens) | abs(row.context) | abs(row.oldest)
        | abs(row.newest) | abs(row.difficulty) | abs(row.retries)
    )  # fmt: skip
    if figures.bit_length() > 62:
        raise ValueError("a figure is too large")
    return (
        number * PLACES + row.offset, kind, identity, row.length, environment, task, split, name, member,
        _finite(row.reward), _finite(row.best), outcome, why, row.turns, calls,
        _json(tuple(row.calls.items())) if row.calls else "", row.tokens, row.context,
        _finite(row.wall_s), _finite(row.waited_s), _finite(row.generate_s), _finite(row.step_s), _finite(row.started),
        row.oldest, row.newest, row.difficulty, _list(tuple(row.tags)) if row.tags else "",
        _json(tuple(row.metrics.items())) if row.metrics else "", _finite(row.metrics.get(measure)), row.retries,
        _finite(row.cost), answer, _finite(row.reset_s), _finite(row.close_s), reason, read,
    )  # fmt: skip


def _finite(value: float | None) -> float | None:
    """SQLite keeps NaN as nothing; an infinity would move every mean, and integers have 64 bits."""
    if value is None or abs(value) < 1e18:
        return value
    return float(value) if abs(value) < 1e300 else None


def shown_rows(found: Iterable[sqlite3.Row]) -> Iterator[dict[str, Any]]:
    """Rows as dictionaries, their lists read."""
    for row in found:
        data = dict(row)
        data["tags"] = json.loads(data["tags"]) if data.get("tags") else []
        data["metrics"] = json.loads(data["metrics"]) if data.get("metrics") else {}
        data["tools"] = json.loads(data["tools"]) if data.get("tools") else {}
        yield data


# ---
# In the background

AT_ONCE = 16 << 20
"""Bytes of records without rows that a page waits for."""
IN_TURN = 32 << 20
"""Bytes of records without rows that are read before other runs have their turn."""


class Indexer:
    """Keeps the indexes of the runs that are looked at up to date, in a thread of its own."""

    def __init__(self) -> None:
        self._wanted: dict[Path, RunIndex] = {}
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def want(self, index: RunIndex) -> None:
        """Read what is new of a run: what has rows at once, the rest a part at a time in the background."""
        index.update(budget=AT_ONCE)
        if index.progress().whole:
            return
        with self._wake:
            self._wanted[index.path] = index
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="forge-env-view-index", daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self) -> None:
        """Stop after the part under way."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._wanted and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                path, index = next(iter(self._wanted.items()))
                del self._wanted[path]
            try:
                before = index.generation
                index.update(budget=IN_TURN)
                again = not index.progress().whole and index.generation != before
            except Exception:  # one run's damaged index must not stop the others'; its page says so
                log.exception("the trajectories of %s can't be read on", index.folder)
                again = False
            if again:
                with self._wake:
                    self._wanted[path] = index
