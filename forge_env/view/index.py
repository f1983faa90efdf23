"""Index of a run's trajectories for the lists, in an SQLite file of the cache folder, never in the run's folder.

It is built from the index rows that the writer stores beside the trajectories (`forge_env.trajectory_index`) or, for
records without rows, from the records: a part at a time, so that a page can be shown meanwhile. The file is disposable:
it is rebuilt if its version or an indexed file has changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
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

from forge_env.machine import cache_dir
from forge_env.reading import UnsafeFileError, open_file, regular_files
from forge_env.trajectory_index import IndexReader, IndexRow, is_index

CACHE_FIX = "make room there, or set FORGE_ENV_CACHE to a folder that can be written"
VERSION = 9
"""Version of the tables below."""
AT_ONCE = 16 << 20
"""Bytes of records without index rows that are read while a page waits; then as many at a time until all are read."""
BATCH = 4_000
"""Rows that are stored at once; many more would keep Python's garbage collector busy."""
PLACES = 1 << 42
"""Maximum bytes of a file's records; a row's key is its file's number times this, plus the record's offset."""
UNNAMED = re.compile("[\ud800-\udfff]")
"""Bytes of a file's name that are not UTF-8, as Python decodes them."""
SOLVED = "solved"
"""Metric of held-out episodes if the recipe does not name one."""

COLUMNS = {
    "key": "integer primary key", "kind": "text", "id": "text", "length": "integer", "environment": "text",
    "task": "text", "split": "text", "grp": "text", "member": "integer", "reward": "real", "best": "real",
    "outcome": "text", "why": "text", "turns": "integer", "calls": "integer", "tools": "text", "tokens": "integer",
    "context": "integer", "wall_s": "real", "waited_s": "real", "generate_s": "real", "step_s": "real",
    "started": "real", "oldest": "integer", "newest": "integer", "difficulty": "integer", "tags": "text",
    "metrics": "text", "solved": "real", "retries": "integer", "cost": "real", "answer": "text", "reset_s": "real",
    "close_s": "real", "reason": "text", "read": "text",
}  # fmt: skip
TABLES = f"""
create table file (
    number integer primary key, name text unique, kind text, inode integer,
    covered integer, rows_read integer, size integer
);
create table t ({", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())});
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
"""The last index covers all columns that failures are counted by, so that no row has to be read."""
INSERT = (
    f"insert into t ({', '.join(COLUMNS)}) values ({', '.join('?' * len(COLUMNS))}) "
    f"on conflict (kind, id) do update set {', '.join(f'{name} = excluded.{name}' for name in COLUMNS)} "
    "where excluded.key >= t.key"
)
"""Of two records with one id the later one is kept, in whatever order they are read."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of indexing a run's records."""

    indexed: int
    """Bytes."""
    total: int

    @property
    def whole(self) -> bool:
        """Whether all records are indexed."""
        return self.indexed >= self.total

    @property
    def share(self) -> float:
        """Share of the indexed bytes, from 0 to 1."""
        return self.indexed / self.total if self.total else 1.0


def kind_of(name: str) -> str:
    """Return the kind of a file of trajectories: its name without the extension."""
    return name.removesuffix(".jsonl")


def trajectory_files(folder: Path) -> list[os.DirEntry[str]]:
    """List a run's trajectory files, the most recently written last.

    Files whose name isn't UTF-8 are skipped, because neither the tables nor an address can represent it.
    """
    with suppress(OSError):
        files = [
            (entry.stat().st_mtime, entry.name, entry)
            for entry in regular_files(folder / "trajectories", folder)
            if entry.name.endswith(".jsonl") and not is_index(Path(entry.name)) and not UNNAMED.search(entry.name)
        ]
        return [entry for _, _, entry in sorted(files, key=lambda item: item[:2])]
    return []


class RunIndex:
    """The index of one run's trajectories, with a separate database connection for each thread.

    Args:
        cache: folder of the SQLite file; None: the user's cache folder.
        measure: name of the metric for whether an episode solved its task, stored in the column `solved`.

    Several processes may update one file: they take turns.
    """

    def __init__(self, folder: Path, cache: Path | None = None, measure: str = SOLVED) -> None:
        self.folder = folder
        self.measure = measure
        parent = (cache or cache_dir()) / "view"
        parent.mkdir(parents=True, exist_ok=True)
        identity = os.fsencode(folder.resolve()) + b"\0" + measure.encode("utf-8", "backslashreplace")
        name = hashlib.blake2b(identity, digest_size=12).hexdigest()
        self.path = parent / f"{name}.sqlite"
        self._own = threading.local()
        self._writing = threading.Lock()
        self._ordered = False
        self.unread: dict[str, str] = {}
        """Reasons why files could not be read completely, by file name."""
        with self._alone():
            self._prepare()

    @property
    def generation(self) -> int:
        """A counter of changes by any process; results computed from the rows are valid until it changes."""
        return int(self.connection().execute("select generation from changes").fetchone()[0])

    @property
    def dropped(self) -> int:
        """How often rows were dropped, because their file was replaced or truncated."""
        return int(self.connection().execute("select dropped from changes").fetchone()[0])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock under which one thread of one process creates or writes the file."""
        with self._writing, Path(f"{self.path}.lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def connection(self) -> sqlite3.Connection:
        """Return the connection of this thread."""
        connection: sqlite3.Connection | None = self._own.__dict__.get("connection")
        if connection is None:
            connection = self._own.connection = self._connect()
        return connection

    def _connect(self) -> sqlite3.Connection:
        opened = sqlite3.connect(self.path, timeout=30, isolation_level=None, check_same_thread=False)
        opened.row_factory = sqlite3.Row
        opened.executescript("pragma journal_mode = wal; pragma synchronous = off; pragma cache_size = -32768;")
        return opened

    def _prepare(self) -> None:
        """Ensure that the file has the tables of this version; any other file is deleted and created again."""
        with suppress(sqlite3.DatabaseError), closing(self._connect()) as opened:
            if opened.execute("pragma user_version").fetchone()[0] == VERSION:
                return
        for ending in ("", "-wal", "-shm"):
            Path(f"{self.path}{ending}").unlink(missing_ok=True)
        with closing(self._connect()) as opened:
            opened.executescript(f"begin; {TABLES} pragma user_version = {VERSION}; commit;")

    def progress(self) -> Progress:
        """Return the progress of indexing, by the current size of the files."""
        known = {row["name"]: row for row in self.connection().execute("select * from file")}
        indexed = total = 0
        for entry in trajectory_files(self.folder):
            size, row = entry.stat().st_size, known.get(entry.name)
            total += size
            if row is not None and row["inode"] == entry.inode():
                indexed += size if row["size"] == size else row["covered"]  # the last line may be incomplete
        return Progress(min(indexed, total), total)

    def update(self, budget: int | None = None) -> bool:
        """Read new rows, the most recently written file first; return whether anything changed.

        Args:
            budget: bytes of records without index rows after which reading ends; None: unlimited.
        """
        with self._alone():
            entries = trajectory_files(self.folder)
            changed = self._forget({entry.name: entry.stat() for entry in entries})
            self._register(entries)
            for entry in reversed(entries):
                if budget is not None and budget <= 0:
                    break
                try:
                    grown, scanned = self._grow(entry.name, budget)
                except UnsafeFileError as error:
                    self.unread[entry.name] = error.message
                    continue
                self.unread.pop(entry.name, None)
                changed |= grown
                budget = None if budget is None else budget - scanned
            self._order()
            return changed

    def _order(self) -> None:
        """Create indexes for sorted lists once there are rows, which is faster than updating them from the start."""
        connection = self.connection()
        if not self._ordered and connection.execute("select 1 from t limit 1").fetchone():
            connection.executescript(INDEXES)
            self._ordered = True

    def _forget(self, there: dict[str, os.stat_result]) -> bool:
        """Drop the rows of files that are gone, or were replaced or truncated."""
        gone = [
            row["number"]
            for row in self.connection().execute("select * from file").fetchall()
            if (status := there.get(row["name"])) is None
            or status.st_ino != row["inode"]
            or status.st_size < row["covered"]
        ]
        for number in gone:
            self._drop(number)
        return bool(gone)

    def _register(self, entries: Iterable[os.DirEntry[str]]) -> None:
        """Number new files, the most recently written highest: lists are in this order."""
        connection = self.connection()
        known = {row["name"] for row in connection.execute("select name from file")}
        for entry in entries:
            if entry.name not in known:
                number = (connection.execute("select max(number) from file").fetchone()[0] or 0) + 1
                values = (number, entry.name, kind_of(entry.name), entry.inode())
                connection.execute("insert into file values (?, ?, ?, ?, 0, 0, 0)", values)

    def _drop(self, number: int) -> None:
        connection = self.connection()
        connection.execute("begin")
        connection.execute("delete from t where key between ? and ?", (number * PLACES, (number + 1) * PLACES - 1))
        connection.execute("delete from file where number = ?", (number,))
        connection.execute("update changes set generation = generation + 1, dropped = dropped + 1")
        connection.execute("commit")

    def _grow(self, name: str, budget: int | None) -> tuple[bool, int]:
        """Continue reading one file; return whether rows changed, and the bytes of records that were parsed."""
        known = self.connection().execute("select * from file where name = ?", (name,)).fetchone()
        reader = IndexReader(
            self.folder / "trajectories" / name,
            read=known["rows_read"],
            covered=known["covered"],
            inode=known["inode"],
        )
        rows: list[IndexRow] = []
        whole = False
        with suppress(OSError):  # the file has been removed
            for row in reader.news():
                if reader.begun_anew:  # replaced just now: read the next time
                    return False, 0
                rows.append(row)
                if len(rows) == BATCH:
                    self._store(known, rows, reader, known["size"])
                    rows = []
                if budget is not None and reader.scanned >= budget:
                    break
            else:
                whole = not reader.begun_anew
        size = reader.size if whole else known["size"]
        changed = (reader.covered, size) != (known["covered"], known["size"])
        if rows or changed:
            self._store(known, rows, reader, size)
        return changed, reader.scanned

    def _store(self, file: sqlite3.Row, rows: Iterable[IndexRow], reader: IndexReader, size: int) -> None:
        """Store rows and the position of the reader: all of it, or nothing."""
        with self.connection() as connection:
            connection.execute("begin")
            values = (_values(file["number"], file["kind"], self.measure, row) for row in rows)
            connection.executemany(INSERT, values)
            connection.execute(
                "update file set covered = ?, rows_read = ?, size = ? where number = ?",
                (reader.covered, reader.read, size, file["number"]),
            )
            connection.execute("update changes set generation = generation + 1")

    def place(self, key: int) -> tuple[Path, int]:
        """Return the file and the offset of a row's record.

        Raises:
            LookupError: the file is no longer in this index.
        """
        row = self.connection().execute("select name from file where number = ?", (key // PLACES,)).fetchone()
        if row is None:
            raise LookupError("the file of this record is gone")
        return self.folder / "trajectories" / row["name"], key % PLACES

    def read(self, key: int, length: int) -> bytes:
        """Read a record's line.

        Raises:
            OSError, LookupError: the file is gone.
        """
        path, offset = self.place(key)
        with open_file(path) as file:
            file.seek(offset)
            return file.read(length)


def _utf8(text: str) -> str:
    """Return `text` as SQLite can store it, in UTF-8: unpaired surrogates are escaped as in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


@lru_cache(4096)
def _json(items: tuple[tuple[str, Any], ...]) -> str:
    """Format a mapping as JSON, cached since most episodes share a few mappings."""
    return json.dumps(dict(items))


@lru_cache(4096)
def _list(items: tuple[str, ...]) -> str:
    return json.dumps(items)


def _values(number: int, kind: str, measure: str, row: IndexRow) -> tuple[Any, ...]:
    """Return the values of a table row; a row that the table can't hold becomes an unreadable one."""
    try:
        return _columns(number, kind, measure, row)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {error}"
        name = row.id[:200] if isinstance(row.id, str) else ""
        return _columns(number, kind, measure, IndexRow(row.offset, row.length, name, outcome="unreadable", why=why))


def _columns(number: int, kind: str, measure: str, row: IndexRow) -> tuple[Any, ...]:
    group, member = row.group, row.member
    name = "" if group is None else str(group)
    if member is not None and "/" in row.id and row.id.endswith(f"/{member}"):
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
    """Return a value that SQLite can store and average: None for NaN and infinities; large integers become floats."""
    if value is None or abs(value) < 1e18:
        return value
    return float(value) if abs(value) < 1e300 else None


def shown_rows(found: Iterable[sqlite3.Row]) -> Iterator[dict[str, Any]]:
    """Convert rows to dictionaries, parsing their JSON columns."""
    for row in found:
        data = dict(row)
        data["tags"] = json.loads(data["tags"]) if data.get("tags") else []
        data["metrics"] = json.loads(data["metrics"]) if data.get("metrics") else {}
        data["tools"] = json.loads(data["tools"]) if data.get("tools") else {}
        yield data
