"""The runs below a folder: training runs and evaluations, what they are and how they stand, read from their files."""

from __future__ import annotations

import errno
import json
import math
import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from forge_env.config.reader import read_yaml
from forge_env.display.curves import REWARD, evaluation_splits, merge_rows
from forge_env.errors import UsageError
from forge_env.files import NewLines
from forge_env.machine import cache_dir
from forge_env.reading import (
    ANYWHERE,
    LARGEST_DOCUMENT,
    LARGEST_TABLE,
    LONGEST_LINE,
    UnsafeFileError,
    read_bytes,
    read_text,
)
from forge_env.run.contract import Clause, read_contract
from forge_env.run.folder import LARGEST, RunFolder, unreadable
from forge_env.run.metrics import metrics_row
from forge_env.run.trained import Trained, TrainedEpisode, TrainedGroup
from forge_env.view.charts import Chart, histograms
from forge_env.view.index import SOLVED, RunIndex
from forge_env.view.queries import Queries
from forge_env.view.text import Vocabulary

MOST_OPEN = 32
"""Runs whose index stays open."""
SORTED_BY_TIME = 5_000
"""Folders up to which a list asks each for its time; beyond, they are in the order of their names."""
SURE = 1.96
"""Standard errors of a 95 % interval."""
GAP = 0.2
"""By which the reward is above what it should measure where a list warns."""
MOST_LISTED = 100_000
"""Folders that are listed; of more, those that the file system names first."""
MOST_LOOKED_AT = 2_000
"""Folders, too many to sort by time, in which a page looks for runs."""
POINTS = 80
"""Of a list's small curve."""
MARKS = ("metrics.jsonl", "config.yaml", "summary.json", "trajectories")
LARGEST_VOCABULARY = 64 << 20
"""Bytes of a tokenizer that are read."""


class Metrics:
    """The rows of a metrics.jsonl, read on from where they ended."""

    def __init__(self, path: Path) -> None:
        self._lines = NewLines(path, largest=LARGEST_TABLE)
        self._rows: list[dict[str, Any]] = []
        self._merged: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def rows(self) -> list[dict[str, Any]]:
        """One row a step (`forge_env.display.curves.merge_rows`)."""
        with self._lock:
            found = [_metrics_row(line, self._lines.path) for line in self._lines.read(self._begin_again)]
            if new := [row for row in found if row is not None]:
                self._rows += new
                self._merged = merge_rows(self._rows)
            return self._merged

    def _begin_again(self) -> None:
        self._rows, self._merged = [], []


def _metrics_row(line: bytes, path: Path) -> dict[str, Any] | None:
    with suppress(UsageError):  # of a newer version
        row = metrics_row(line, path)
        return row and {key: value for key, value in row.items() if value is not None and abs(value) < 1e300}
    return None


class TrainedRows:
    """The rows of a trained.jsonl, read on from where they ended."""

    def __init__(self, path: Path) -> None:
        self.trained = Trained()
        self.stamp = 0
        """Changes whenever `trained` does."""
        self._lines = NewLines(path, longest=LONGEST_LINE, largest=LARGEST_TABLE)
        self._lock = threading.Lock()

    def update(self) -> None:
        """Read what was written since."""
        with self._lock:
            for line in self._lines.read(self._begin_again):
                self.stamp += 1
                with suppress(UsageError):  # of a newer version
                    self.trained.add(line)

    def _begin_again(self) -> None:
        self.trained = Trained()
        self.stamp += 1

    def of(self, group: str, member: int | None) -> tuple[int, TrainedGroup, TrainedEpisode | None] | None:
        """The last step that was trained on a group, and what it was of one member."""
        for step in reversed(self.trained.steps):
            for one in self.trained.steps[step]:
                if str(one.group) == group:
                    own = next((episode for episode in one.episodes if episode.member == str(member)), None)
                    return step, one, own
        return None


@dataclass(slots=True)
class Held:
    """Held-out scores of one split: step, score, standard error, episodes."""

    split: str
    points: list[tuple[int, float, float, int]] = field(default_factory=list)


def held_out(rows: list[dict[str, Any]]) -> list[Held]:
    """The held-out scores of a run by split, in order of steps."""
    found = []
    for split in evaluation_splits(rows):
        prefix = f"eval/{split}"
        points = [
            (
                int(row["step"]),
                row[f"{prefix}/score"],
                row.get(f"{prefix}/stderr") or 0.0,
                int(row.get(f"{prefix}/n") or 0),
            )
            for row in rows
            if row.get(f"{prefix}/score") is not None
        ]
        if points:
            found.append(Held(split, points))
    return found


@dataclass(slots=True)
class Figures:
    """What the list of runs shows of one, kept in the cache until its files change."""

    method: str = ""
    environment: str = ""
    model: str = ""
    seed: int | None = None
    steps: int = 0
    planned: int = 0
    sparkline: list[float] = field(default_factory=list)
    measure: str = ""
    """What `start` and `end` measure: a metric of the environment, or the reward."""
    unsolved: list[float] = field(default_factory=list)
    """Reward and measure of the last fifth of the training steps, where much was paid that was not solved."""
    start: float | None = None
    end: float | None = None
    error: float | None = None
    verdict: str = ""
    """better or worse, where `end` is beyond the noise of both; a run's own page has the paired test."""
    tokens_per_s: float | None = None
    wall_s: float | None = None
    exit: str = ""


class RunView:
    """One run or evaluation.

    Attributes:
        root: its folder.
        name: in addresses; the folder's.
    """

    def __init__(self, root: Path, cache: Path | None = None) -> None:
        self.root = root
        self.name = root.name
        self._cache = cache
        self._metrics = Metrics(root / "metrics.jsonl")
        self._trained = TrainedRows(root / "trained.jsonl")
        self._histograms: tuple[int, list[Chart]] = (-1, [])

    @cached_property
    def folder(self) -> RunFolder:
        """Its paths."""
        return RunFolder(self.root)

    @cached_property
    def index(self) -> RunIndex:
        """Of its trajectories; opened when it is first asked for."""
        return RunIndex(self.root, self._cache, self.measure)

    @cached_property
    def queries(self) -> Queries:
        """Questions about its trajectories."""
        return Queries(self.index, self._groups_of)

    @property
    def trained(self) -> TrainedRows:
        """What its steps were trained on, as far as that is recorded."""
        self._trained.update()
        return self._trained

    def histograms(self) -> list[Chart]:
        """Of what its steps were trained on; made anew when more were."""
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
        """Its metrics, a row a step, as they stand."""
        return self._metrics.rows()

    @property
    def config(self) -> dict[str, Any]:
        """Its recipe; empty where there is none, or none that can be read."""
        found = _document(self.root / "config.yaml")
        return found if isinstance(found, dict) else {}

    @property
    def environment(self) -> str:
        """Name of its environment; empty for an evaluation, which may have several."""
        section = self.config.get("environment")
        return str(section.get("name", "")) if isinstance(section, dict) else ""

    @property
    def metric(self) -> str:
        """By what its held-out episodes are scored: the recipe's `evaluation.metric`, an evaluation's `score`."""
        section = self.config.get("evaluation")
        named = section.get("metric") if isinstance(section, dict) else self.config.get("score")
        return named if isinstance(named, str) and named else SOLVED

    @property
    def measure(self) -> str:
        """The metric that says whether an episode solved its task."""
        return SOLVED if self.metric == "reward" else self.metric

    @property
    def scored_by(self) -> str:
        """`metric`; or `reward`, where the recipe names no metric and episodes have no `solved`."""
        kept = {key for row in self.metrics[-20:] for key in row if key.startswith("reward/")} - {REWARD}
        return "reward" if self.metric == SOLVED and kept and f"reward/{SOLVED}" not in kept else self.metric

    @property
    def summary(self) -> dict[str, Any]:
        """What came of it so far; likewise."""
        found = _document(self.root / "summary.json")
        return found if isinstance(found, dict) else {}

    @property
    def contract(self) -> list[Clause]:
        """What it made sure of before anybody believes its curve; empty where there is nothing that can be read."""
        with suppress(OSError, UsageError):
            return read_contract(self.folder.contract)
        return []

    @property
    def problems(self) -> list[str]:
        """Why some of its files can't be read; what is shown is made of the others."""
        return [*unreadable(self.root), *(self.index.unread.values() if "index" in self.__dict__ else ())]

    @property
    def is_evaluation(self) -> bool:
        """Whether `forge-env eval` made it."""
        return "environments" in self.config or (
            not os.path.exists(self.root / "metrics.jsonl")
            and os.path.exists(self.root / "trajectories" / "eval.jsonl")
        )

    @property
    def is_held(self) -> bool:
        """Whether a process of this machine writes to it."""
        return is_held(self.root)

    @property
    def state(self) -> str:
        """running, finished, failed, interrupted, complete, incomplete, lossy, or stopped: it ended without a word."""
        return "running" if self.is_held else state_of(self.summary)

    def vocabulary(self) -> Vocabulary | None:
        """Of the model that it trained, from the newest checkpoint; None where none lies there."""
        found: list[tuple[float, Path]] = []
        root = self.root
        for pattern in ("checkpoints/*/model/tokenizer.json", "checkpoints/*/tokenizer.json", "model/tokenizer.json"):
            with suppress(OSError):
                found += [(path.stat().st_mtime, path) for path in self.root.glob(pattern)]
        model = self.config.get("model")
        named = Path(str(model.get("path", ""))) if isinstance(model, dict) else Path()
        with suppress(OSError):
            if not found and (named / "tokenizer.json").is_file():
                found.append((0.0, named / "tokenizer.json"))
                root = ANYWHERE  # a checkpoint of the hub's cache is a folder of links
        for _, path in sorted(found, reverse=True)[:1]:
            with suppress(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, UnsafeFileError):
                stamp = (path, path.stat().st_mtime_ns)
                if self.__dict__.get("_vocabulary", (None, None))[0] != stamp:
                    data = json.loads(read_bytes(path, largest=LARGEST_VOCABULARY, root=root))
                    self._vocabulary = (stamp, Vocabulary(data))
                return self._vocabulary[1]
        return None

    def stamp(self) -> str:
        """Changes whenever its files do; what pages are told of."""
        marks = []
        for name in ("metrics.jsonl", "summary.json", "config.yaml", "contract.jsonl"):
            with suppress(OSError):
                found = (self.root / name).stat()
                marks.append((name, found.st_size, found.st_mtime_ns))
        with suppress(OSError), os.scandir(self.root / "trajectories") as entries:
            marks += sorted((entry.name, entry.stat().st_size, 0) for entry in entries)
        return f"{hash(tuple(marks)) & 0xFFFFFFFFFFFF:x}"

    def figures(self) -> Figures:
        """What a list shows."""
        config, summary, rows = self.config, self.summary, self.metrics
        model = config.get("model")
        found = Figures(
            method="evaluation" if self.is_evaluation else str(config.get("method") or "training"),
            environment=self.environment,
            model=str(model.get("path") or model.get("name") or "") if isinstance(model, dict) else str(model or ""),
            seed=config.get("seed") if isinstance(config.get("seed"), int) else None,
            steps=int(rows[-1]["step"]) if rows else 0,
            planned=_planned(config),
            exit=str(summary.get("exit") or summary.get("status") or ""),
            wall_s=_number(summary.get("wall_s")) or (_number(rows[-1].get("time")) if rows else None),
        )
        found.measure, found.unsolved = self.scored_by, _unsolved(rows, self.measure)
        rewards = [row[REWARD] for row in rows if row.get(REWARD) is not None]
        step = max(1, -(-len(rewards) // POINTS))
        found.sparkline = [
            sum(part) / len(part) for at in range(0, len(rewards), step) if (part := rewards[at : at + step])
        ]
        rates = [row["generator/tokens_per_s"] for row in rows if row.get("generator/tokens_per_s") is not None]
        rates = rates or [row["trainer/tokens_per_s"] for row in rows if row.get("trainer/tokens_per_s") is not None]
        found.tokens_per_s = sum(rates) / len(rates) if rates else None
        if splits := held_out(rows):
            first, last = splits[0].points[0], splits[0].points[-1]
            found.start, found.end, found.error = first[1] if first[0] != last[0] else None, last[1], last[2]
            if found.start is not None and abs(found.end - found.start) > SURE * math.hypot(first[2], last[2]):
                found.verdict = "better" if found.end > found.start else "worse"
        environments = summary.get("environments")
        if self.is_evaluation:
            chosen = config.get("environments")
            listed = chosen if isinstance(chosen, list) else []
            names = [
                str(item.get("label") or item.get("name")) if isinstance(item, dict) else str(item) for item in listed
            ]
            found.environment = ", ".join(names)
            if isinstance(environments, dict) and len(environments) == 1:
                only = next(iter(environments.values()))
                score = only.get("score") if isinstance(only, dict) else None
                if isinstance(score, dict):
                    found.end, found.error = _number(score.get("value")), _number(score.get("stderr"))
        return found


def _unsolved(rows: list[dict[str, Any]], measure: str) -> list[float]:
    """Mean reward and mean measure of the last fifth of the steps, where the reward is far above; else nothing."""
    pairs = [
        (row[REWARD], row[f"reward/{measure}"])
        for row in rows
        if None not in (row.get(REWARD), row.get(f"reward/{measure}"))
    ]
    last = pairs[-max(1, len(pairs) // 5) :]
    if not last or not all(0 <= value <= 1 for pair in last for value in pair):
        return []  # on another scale nothing can be said
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


def _document(path: Path) -> Any:
    """A JSON or YAML file; None where it is missing, too large or damaged."""
    try:
        text = read_text(path, largest=LARGEST[path.name] or LARGEST_DOCUMENT)
        stamp = (path.stat().st_mtime_ns, len(text))
        if (kept := _read.get(path)) is not None and kept[0] == stamp:
            return kept[1]
        found = None
        with suppress(ValueError, RecursionError, yaml.YAMLError):
            found = json.loads(text) if path.suffix == ".json" else read_yaml(text)[0]
    except (OSError, UnsafeFileError):
        return None
    if len(_read) > 4 * MOST_OPEN:
        _read.clear()
    _read[path] = (stamp, found)
    return found


_read: dict[Path, tuple[tuple[int, int], Any]] = {}


def state_of(summary: Mapping[str, Any]) -> str:
    """`RunView.state` of a run that nobody writes to. It finished: whether it learned is another question."""
    said = str(summary.get("exit") or summary.get("status") or "")
    return {"success": "finished", "": "stopped", "running": "stopped"}.get(said, said)


def is_held(root: Path) -> bool:
    """Whether a process of this machine holds the folder (`forge_env.files.HeldFolder`), by the kernel's own list:
    trying to hold it would stand in a run's way."""
    try:
        inode = root.stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    return any("FLOCK" in line and f":{inode} " in line for line in locks.splitlines())


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run or an evaluation; also one that can't be read may be."""
    try:
        return any((path / mark).exists() for mark in MARKS)
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG


@dataclass(frozen=True, slots=True)
class Listing:
    """A page of the list of runs."""

    names: list[str]
    total: int
    after: str
    """The name that the next page begins behind; empty: this is the last."""
    by_name: bool
    """There are too many to sort by time."""
    cut: bool = False
    """There are more than `MOST_LISTED`: the others are shown by their address only."""


class Runs:
    """All runs in a folder, or the one that the folder is.

    Args:
        root: the folder.
        cache: where indexes are kept; None: the user's cache folder.
    """

    def __init__(self, root: Path, cache: Path | None = None) -> None:
        self.root = root
        self.cache = cache
        self.single = is_run(root)
        self._open: OrderedDict[str, RunView] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, name: str) -> Path:
        """Where a run of this name lies, or would."""
        return self.root if self.single else self.root / name

    def get(self, name: str) -> RunView | None:
        """The run of this name; None: there is none."""
        if not name or name in (".", "..") or "/" in name or "\0" in name or (self.single and name != self.root.name):
            return None
        try:
            if not is_run(self.path(name)):
                return None
        except OSError:
            return None  # the name is too long, or nobody may look there
        with self._lock:
            found = self._open.get(name) or RunView(self.path(name), self.cache)
            self._open[name] = found
            self._open.move_to_end(name)
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
            return found

    def names(self, after: str = "", most: int = 50) -> Listing:
        """The runs, newest first."""
        if self.single:
            return Listing([self.root.name], 1, "", False)
        try:
            with os.scandir(self.root) as entries:
                named = (entry.name for entry in entries if not entry.name.startswith("."))
                found = [*islice(named, MOST_LISTED + 1)]
        except OSError:
            return Listing([], 0, "", False)
        cut = len(found) > MOST_LISTED
        found = found[:MOST_LISTED]
        by_name = len(found) > SORTED_BY_TIME
        if by_name:
            found.sort(reverse=True)
        else:
            found = [name for name in found if is_run(self.root / name)]
            found.sort(key=lambda name: (_changed(self.root / name), name), reverse=True)
        start = found.index(after) + 1 if after in found else 0
        page: list[str] = []
        end = start
        for name in found[start : start + MOST_LOOKED_AT]:
            end += 1
            if not by_name or is_run(self.root / name):
                page.append(name)
            if len(page) == most:
                break
        return Listing(page, len(found), found[end - 1] if end < len(found) else "", by_name, cut)

    def figures(self, name: str) -> Figures | None:
        """What the list shows of a run, from the cache where its files are as they were."""
        run = self.get(name)
        if run is None:
            return None
        stamp = json.dumps([[mark, *_stamp(run.root / mark)] for mark in MARKS[:3]])
        place = (self.cache or cache_dir()) / "view"
        place.mkdir(parents=True, exist_ok=True)
        key = os.fsencode(run.root.resolve()).hex()
        with closing(sqlite3.connect(place / "runs.sqlite", timeout=30, isolation_level=None)) as own:
            own.execute("create table if not exists figures_4 (path text primary key, stamp text, data text)")
            row = own.execute("select stamp, data from figures_4 where path = ?", (key,)).fetchone()
            if row is not None and row[0] == stamp:
                return Figures(**json.loads(row[1]))
            found = run.figures()
            own.execute("insert or replace into figures_4 values (?, ?, ?)", (key, stamp, json.dumps(asdict(found))))
            return found

    def age(self, name: str) -> float | None:
        """Seconds since anything of a run was written."""
        changed = _changed(self.path(name))
        return max(0.0, time.time() - changed) if changed else None


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def _changed(path: Path) -> float:
    found = 0.0
    for mark in ("metrics.jsonl", "summary.json", "config.yaml", "trajectories"):
        with suppress(OSError):
            found = max(found, (path / mark).stat().st_mtime)
    return found
