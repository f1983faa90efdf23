"""The training runs and evaluations in a folder: their state and results, read from their files."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import sqlite3
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import yaml

from forge_env.config.reader import read_yaml
from forge_env.display.curves import merge_rows
from forge_env.errors import UsageError
from forge_env.figures import state
from forge_env.machine import cache_dir
from forge_env.reading import (
    LARGEST,
    LARGEST_DOCUMENT,
    LARGEST_TABLE,
    LONGEST_LINE,
    UnsafeFileError,
    parse_json,
    read_bytes,
    unreadable,
)
from forge_env.run.contract import Clause, read_contract
from forge_env.run.folder import RunFolder
from forge_env.run.metrics import REWARD, metrics_row
from forge_env.run.state import held_out_scores
from forge_env.run.trained import Trained, TrainedEpisode, TrainedGroup
from forge_env.view.charts import Chart, histograms
from forge_env.view.followed import Followed
from forge_env.view.index import SOLVED, RunIndex
from forge_env.view.queries import Queries
from forge_env.view.text import Vocabulary
from forge_env.view.timeline import Timeline

MOST_OPEN = 32
"""Maximum runs whose index stays open."""
MOST_HELD = 2 * LARGEST_TABLE
"""Maximum bytes of files held in memory, where their content takes ten times as much. A single run may exceed it."""
SURE = 1.96
"""Standard errors of a 95 % interval."""
GAP = 0.2
"""Difference of reward and measure from which a list warns."""
MOST_LISTED = 10_000
"""Maximum folders to list: the last ones by name."""
POINTS = 80
"""Points of a list's small curve."""
MARKS = ("metrics.jsonl", "config.yaml", "summary.json", "trajectories")
LIVE_S = 3_600.0
"""Seconds after its last change for which a run's files are checked again; an append does not change their folder."""
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Error codes of a file that does not exist."""
LARGEST_VOCABULARY = 64 << 20
"""Maximum bytes of a tokenizer that is read."""


class Metrics(Followed):
    """The rows of a metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, largest=LARGEST_TABLE)
        self._rows: list[dict[str, Any]] = []
        self._merged: list[dict[str, Any]] = []

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per step (`forge_env.display.curves.merge_rows`)."""
        self.update()
        return self._merged

    def _take(self, lines: Iterator[bytes]) -> None:
        if new := [row for line in lines if (row := _metrics_row(line, self._lines.path)) is not None]:
            self._rows += new
            self._merged = merge_rows(self._rows)

    def _begin_again(self) -> None:
        self._rows, self._merged = [], []


def _metrics_row(line: bytes, path: Path) -> dict[str, Any] | None:
    with suppress(UsageError):  # written by a newer version
        row = metrics_row(line, path)
        return row and {key: value for key, value in row.items() if value is not None and abs(value) < 1e300}
    return None


class TrainedRows(Followed):
    """The rows of a trained.jsonl."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, longest=LONGEST_LINE, largest=LARGEST_TABLE)
        self.trained = Trained()
        self.stamp = 0
        """Changes whenever `trained` does."""

    def _take(self, lines: Iterator[bytes]) -> None:
        for line in lines:
            self.stamp += 1
            with suppress(UsageError):  # written by a newer version
                self.trained.add(line)

    def _begin_again(self) -> None:
        self.trained = Trained()
        self.stamp += 1

    def of(self, group: str, member: int | None) -> tuple[int, TrainedGroup, TrainedEpisode | None] | None:
        """Return the last step that was trained on a group, with its record of the group and of one member."""
        for step in reversed(self.trained.steps):
            for match in self.trained.steps[step]:
                if str(match.group) == group:
                    record = next((episode for episode in match.episodes if episode.member == str(member)), None)
                    return step, match, record
        return None


@dataclass(slots=True)
class Figures:
    """The figures of a run in the list of runs, cached until its files change."""

    method: str = ""
    environment: str = ""
    model: str = ""
    seed: int | None = None
    steps: int = 0
    """Steps of training, or samples of an evaluation."""
    planned: int = 0
    sparkline: list[float] = field(default_factory=list)
    measure: str = ""
    """The quantity that `start` and `end` measure: a metric of the environment, or the reward."""
    unsolved: list[float] = field(default_factory=list)
    """Mean reward and measure of the last fifth of the training steps, if rewards are far above the measure."""
    start: float | None = None
    end: float | None = None
    error: float | None = None
    verdict: str = ""
    """Either "better" or "worse" if `end` differs from `start` beyond noise; the run's page has the paired test."""
    tokens_per_s: float | None = None
    wall_s: float | None = None


class RunView:
    """One run or evaluation."""

    def __init__(self, root: Path, cache: Path | None = None) -> None:
        self.root = root
        self.name = root.name
        self._cache = cache
        self._metrics = Metrics(root / "metrics.jsonl")
        self._trained = TrainedRows(root / "trained.jsonl")
        self._timeline = Timeline(root / "timeline.json")
        self._histograms: tuple[int, list[Chart]] = (-1, [])
        self._documents: dict[Path, tuple[tuple[int, int], Any]] = {}

    @cached_property
    def index(self) -> RunIndex:
        """The index of its trajectories, opened on first use."""
        return RunIndex(self.root, self._cache, self.measure)

    @cached_property
    def queries(self) -> Queries:
        """Queries of its trajectories."""
        return Queries(self.index, self._groups_of)

    @property
    def trained(self) -> TrainedRows:
        """The groups that its steps were trained on, as far as recorded."""
        self._trained.update()
        return self._trained

    @property
    def timeline(self) -> Timeline:
        """Its current timeline."""
        self._timeline.update()
        return self._timeline

    def histograms(self) -> list[Chart]:
        """Return histograms of the trained episodes, updated after new steps."""
        trained = self.trained
        if self._histograms[0] != trained.stamp:
            self._histograms = (trained.stamp, histograms(trained.trained))
        return self._histograms[1]

    def _groups_of(self, first: int, last: int) -> list[str] | None:
        steps = self.trained.trained.steps
        chosen = (groups for step, groups in steps.items() if first <= step <= last)
        return [str(group.group) for groups in chosen for group in groups] if steps else None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Its current metrics, a row per step."""
        return self._metrics.rows()

    @property
    def config(self) -> dict[str, Any]:
        """Its recipe; empty if it is missing or unreadable."""
        return self._document("config.yaml")

    @property
    def environment(self) -> str:
        """Name of its environment; empty for an evaluation, which may have several."""
        section = self.config.get("environment")
        return str(section.get("name", "")) if isinstance(section, dict) else ""

    @property
    def metric(self) -> str:
        """The metric that scores held-out episodes: the recipe's `evaluation.metric`, an evaluation's `score`."""
        section = self.config.get("evaluation")
        named = section.get("metric") if isinstance(section, dict) else self.config.get("score")
        return named if isinstance(named, str) and named else SOLVED

    @property
    def measure(self) -> str:
        """The metric for whether an episode solved its task."""
        return SOLVED if self.metric == "reward" else self.metric

    @property
    def scored_by(self) -> str:
        """`metric`; or `reward`, if the recipe names no metric and episodes have no `solved`."""
        logged = {key for row in self.metrics[-20:] for key in row if key.startswith("reward/")} - {REWARD}
        return "reward" if self.metric == SOLVED and logged and f"reward/{SOLVED}" not in logged else self.metric

    @property
    def summary(self) -> dict[str, Any]:
        """Its summary so far; empty if it is missing or unreadable."""
        return self._document("summary.json")

    @property
    def labels(self) -> list[str]:
        """Of an evaluation: its environments, as in its configuration."""
        chosen = self.config.get("environments")
        items = chosen if isinstance(chosen, list) else []
        return [str(item.get("label") or item.get("name")) if isinstance(item, dict) else str(item) for item in items]

    @property
    def scores(self) -> list[dict[str, Any]]:
        """Of an evaluation: the parts of its summary, one for each environment."""
        environments = self.summary.get("environments")
        items = environments.values() if isinstance(environments, dict) else ()
        return [item for item in items if isinstance(item, dict)]

    @property
    def contract(self) -> list[Clause]:
        """Results of its self-checks; empty if there are none or they are unreadable."""
        with suppress(OSError, UsageError):
            return read_contract(RunFolder(self.root).contract)
        return []

    @property
    def problems(self) -> list[str]:
        """Reasons why some of its files can't be read; pages use the others."""
        return [*unreadable(self.root), *(self.index.unread.values() if "index" in self.__dict__ else ())]

    @property
    def is_evaluation(self) -> bool:
        """Whether `forge-env eval` created it."""
        return "environments" in self.config or (
            not os.path.exists(self.root / "metrics.jsonl")
            and os.path.exists(self.root / "trajectories" / "eval.jsonl")
        )

    @property
    def state(self) -> str:
        """running, finished, failed, interrupted, incomplete, lossy, or stopped: ended without a record."""
        if self.summary.get("exit") in (None, "", "running") and is_held(self.root):
            return "running"
        return state_of(self.summary)  # a run that writes its own report has ended

    def vocabulary(self) -> Vocabulary | None:
        """Load the vocabulary of the newest checkpoint; None if the run folder has none.

        The recipe's `model.path` is not read: a stranger's recipe may name any folder of this machine.
        """
        paths: list[tuple[float, Path]] = []
        for pattern in ("checkpoints/*/model/tokenizer.json", "checkpoints/*/tokenizer.json", "model/tokenizer.json"):
            with suppress(OSError):
                paths += [(path.stat().st_mtime, path) for path in self.root.glob(pattern)]
        for _, path in sorted(paths, reverse=True)[:1]:
            for older in [each for each in list(self._documents) if each.name == path.name and each != path]:
                self._documents.pop(older, None)
            with suppress(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, UnsafeFileError):
                found: Vocabulary = self._parsed(path, LARGEST_VOCABULARY, lambda text: Vocabulary(json.loads(text)))
                return found
        return None

    def _document(self, name: str) -> dict[str, Any]:
        """Parse a JSON or YAML file; empty if it is missing, too large or damaged."""

        def parse(text: str) -> Any:
            with suppress(ValueError, RecursionError, yaml.YAMLError):
                return parse_json(text) if name.endswith(".json") else read_yaml(text)[0]
            return None

        with suppress(OSError, UnsafeFileError):
            document = self._parsed(self.root / name, LARGEST[name] or LARGEST_DOCUMENT, parse)
            return document if isinstance(document, dict) else {}
        return {}

    def _parsed(self, path: Path, largest: int, parse: Callable[[str], Any]) -> Any:
        """Return a file's parsed content, read again after it has changed."""
        status = path.stat()
        stamp = (status.st_size, status.st_mtime_ns)
        if path not in self._documents or self._documents[path][0] != stamp:
            content = read_bytes(path, largest=largest, root=self.root)
            self._documents[path] = (stamp, parse(content.decode(errors="replace")))
        return self._documents[path][1]

    @property
    def size(self) -> int:
        """Bytes of the files whose content it holds."""
        documents = sum(stamp[0] for stamp, _ in list(self._documents.values()))  # other threads add to it
        return documents + self._metrics.size + self._trained.size + self._timeline.size

    def stamp(self) -> str:
        """Return a value that changes whenever the run's files do."""
        marks = []
        for name in ("metrics.jsonl", "summary.json", "config.yaml", "contract.jsonl"):
            with suppress(OSError):
                status = (self.root / name).stat()
                marks.append((name, status.st_ino, status.st_size, status.st_mtime_ns))
        with suppress(OSError), os.scandir(self.root / "trajectories") as entries:
            marks += sorted((entry.name, entry.inode(), entry.stat().st_size, 0) for entry in entries)
        return blake2b(json.dumps(marks).encode(), digest_size=8).hexdigest()

    @property
    def age(self) -> float | None:
        """Seconds since any of its files was written."""
        changed = _changed(str(self.root))
        return max(0.0, time.time() - changed) if changed else None

    def figures(self) -> Figures:
        """Compute the figures for a list."""
        config, summary, rows = self.config, self.summary, self.metrics
        model = config.get("model")
        result = Figures(
            method="evaluation" if self.is_evaluation else str(config.get("method") or "training"),
            environment=self.environment,
            model=str(model.get("path") or model.get("name") or "") if isinstance(model, dict) else str(model or ""),
            seed=config.get("seed") if isinstance(config.get("seed"), int) else None,
            steps=int(rows[-1]["step"]) if rows else 0,
            planned=_planned(config),
            wall_s=_number(summary.get("wall_s")) or (_number(rows[-1].get("time")) if rows else None),
        )
        result.measure, result.unsolved = self.scored_by, _unsolved(rows, self.measure)
        rewards = [row[REWARD] for row in rows if row.get(REWARD) is not None]
        step = max(1, -(-len(rewards) // POINTS))
        result.sparkline = [
            sum(part) / len(part) for at in range(0, len(rewards), step) if (part := rewards[at : at + step])
        ]
        rates = [row["generator/tokens_per_s"] for row in rows if row.get("generator/tokens_per_s") is not None]
        rates = rates or [row["trainer/tokens_per_s"] for row in rows if row.get("trainer/tokens_per_s") is not None]
        result.tokens_per_s = sum(rates) / len(rates) if rates else None
        if scores := next(iter(held_out_scores(rows).values()), []):
            first, last = scores[0], scores[-1]
            result.start, result.end, result.error = first.score if first is not last else None, last.score, last.stderr
            sure = SURE * math.hypot(first.stderr, last.stderr)
            if result.start is not None and abs(result.end - result.start) > sure:
                result.verdict = "better" if result.end > result.start else "worse"
        if self.is_evaluation:
            result.measure = str(summary.get("score_name") or "reward")
            result.environment, scored = ", ".join(self.labels), self.scores
            result.steps, result.planned = (
                int(sum(_number(item.get(name)) or 0 for item in scored)) for name in ("samples", "planned")
            )
            if len(scored) == 1 and isinstance(score := scored[0].get("score"), dict):
                result.end, result.error = _number(score.get("value")), _number(score.get("stderr"))
        return result


def _unsolved(rows: list[dict[str, Any]], measure: str) -> list[float]:
    """Return mean reward and measure of the last fifth of the steps if the reward is far above; else an empty list."""
    pairs = [
        (row[REWARD], row[f"reward/{measure}"])
        for row in rows
        if None not in (row.get(REWARD), row.get(f"reward/{measure}"))
    ]
    last = pairs[-max(1, len(pairs) // 5) :]
    if not last or not all(0 <= value <= 1 for pair in last for value in pair):
        return []  # not comparable on another scale
    paid, solved = (sum(values) / len(last) for values in zip(*last, strict=True))
    return [round(paid, 4), round(solved, 4)] if paid - solved > GAP else []


def _planned(config: Mapping[str, Any]) -> int:
    section = config.get("grpo") or config.get("training")
    steps = section.get("steps") if isinstance(section, dict) else config.get("steps")
    return steps if isinstance(steps, int) else 0


def _number(value: Any) -> float | None:
    return (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 else None
    )


def state_of(summary: Mapping[str, Any]) -> str:
    """Return `RunView.state` of a run that no process writes to; "finished" does not mean that it learned."""
    status = str(summary.get("exit") or summary.get("status") or "")
    return "stopped" if status in ("", "running") else state(status)


def is_held(root: Path) -> bool:
    """Whether a process of this machine holds the folder (`forge_env.files.HeldFolder`).

    This reads the kernel's list of locks, since trying to take the lock would disturb a starting run. Only Linux has
    that list; elsewhere the lock is tried, for an instant.
    """
    try:
        if sys.platform != "linux":
            return _is_locked(root)
        inode = root.stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    return any("FLOCK" in line and f":{inode} " in line for line in locks.splitlines())


def _is_locked(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run or an evaluation; an unreadable folder is assumed to be one."""
    return _changed(str(path)) is not None


@dataclass(frozen=True, slots=True)
class FolderState:
    """State of a folder at the last listing of runs."""

    stamp: int
    """Time at which a file in it was last created, replaced or removed, in nanoseconds."""
    changed: float | None
    """Time of the last write to its files; None: it is not a run."""


class Runs:
    """All runs in a folder, or the single run if the folder is one.

    Args:
        cache: folder of the indexes; None: the user's cache folder.
    """

    def __init__(self, root: Path, cache: Path | None = None) -> None:
        self.root = root
        self.cache = cache
        self.single = is_run(root)
        self._open: OrderedDict[str, RunView] = OrderedDict()
        self._lock = threading.Lock()
        self._states: dict[str, FolderState] = {}

    def path(self, name: str) -> Path:
        """Return the path of a run with this name, whether or not it exists."""
        return self.root if self.single else self.root / name

    def get(self, name: str) -> RunView | None:
        """Return the run with this name, or None if there is none."""
        if not name or name in (".", "..") or "/" in name or "\0" in name or (self.single and name != self.root.name):
            return None
        if not is_run(self.path(name)):
            return None
        with self._lock:
            run = self._open.get(name) or RunView(self.path(name), self.cache)
            self._open[name] = run
            self._open.move_to_end(name)
            size = sum(view.size for view in self._open.values())
            while len(self._open) > MOST_OPEN or (size > MOST_HELD and len(self._open) > 1):
                size -= self._open.popitem(last=False)[1].size
            return run

    def names(self) -> tuple[list[str], int]:
        """Return the runs, newest first, and `MOST_LISTED` if the folder has more entries, else 0.

        Entries beyond `MOST_LISTED` are not read. Runs among them can only be opened by their address.
        """
        if self.single:
            return [self.root.name], 0
        try:
            with os.scandir(self.root) as entries:
                folders = sorted(
                    (entry for entry in entries if not entry.name.startswith(".")),
                    key=lambda entry: entry.name,
                    reverse=True,
                )
        except OSError:
            return [], 0
        self._states = {entry.name: self._state(entry) for entry in folders[:MOST_LISTED]}
        runs = [(state.changed, name) for name, state in self._states.items() if state.changed is not None]
        return [name for _, name in sorted(runs, reverse=True)], MOST_LISTED if len(folders) > MOST_LISTED else 0

    def _state(self, entry: os.DirEntry[str]) -> FolderState:
        """Return a folder's state: that of the last listing, if no file can have changed since."""
        try:
            stamp = entry.stat().st_ctime_ns
        except OSError:
            stamp = 0
        last = self._states.get(entry.name)
        if last is not None and last.changed and last.stamp == stamp:
            recent = max(stamp / 1e9, last.changed) >= time.time() - LIVE_S
            if not recent and _written(f"{entry.path}/{MARKS[0]}") <= last.changed:
                return last
        return FolderState(stamp, _changed(entry.path))

    def figures(self, run: RunView) -> Figures:
        """Return the list's figures of a run, from the cache if its files have not changed."""
        stamp, key = run.stamp(), os.fsencode(run.root.resolve()).hex()
        parent = (self.cache or cache_dir()) / "view"
        parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(parent / "runs.sqlite", timeout=30, isolation_level=None)) as cached:
            cached.execute("create table if not exists figures_6 (path text primary key, stamp text, data text)")
            row = cached.execute("select data from figures_6 where path = ? and stamp = ?", (key, stamp)).fetchone()
            if row is not None:
                return Figures(**json.loads(row[0]))
            figures = run.figures()
            values = (key, stamp, json.dumps(asdict(figures)))
            cached.execute("insert or replace into figures_6 values (?, ?, ?)", values)
            return figures


def _written(path: str) -> float:
    """Return the time of the last write to a file, or 0 if it can't be read."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _changed(path: str) -> float | None:
    """Return the time of the last write to a run's files: 0 if they can't be read, None if there are none."""
    latest: float | None = None
    for mark in MARKS:
        try:
            latest = max(latest or 0.0, os.stat(f"{path}/{mark}").st_mtime)
        except OSError as error:
            if error.errno not in ABSENT:
                latest = latest or 0.0
        except ValueError:  # not a valid file name
            return None
    return latest
