"""What the pages ask of a run's index: lists, counts, groups. Every filter is a value of an address."""

from __future__ import annotations

import json
import math
import mmap
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import quote

from forge_env.evaluation.estimates import PairedDifference, by_task, compare
from forge_env.view.index import PLACES, RunIndex, rows_of

PAGE = 50
"""Rows of a list."""
SEARCHED = 1_000
"""Rows that a search asks the index for at once."""
SEARCH_S = 0.2
"""Seconds that a page of a search takes at most; it then offers to go on."""
BINS = 10
VERSIONS = re.compile(r"(\d{1,12})(?:\s*-\s*(\d{1,12}))?", re.ASCII)
PLACE = re.compile(r"(?:(-?[\d.e+-]{1,30}),)?(\d{1,18})", re.ASCII)
"""Value and key of a row, in an address."""
OUTCOMES = ("right", "partly", "wrong", "limit", "lost", "unreadable")
SORTS = {
    "newest": "key", "reward": "reward", "tokens": "tokens", "turns": "turns", "calls": "calls", "seconds": "wall_s",
    "version": "newest",
}  # fmt: skip
"""Columns by which a list is sorted, by their name in an address; `-` before it turns the order round."""
OUTCOME = (
    "case when outcome = 'lost' then 'lost' when outcome = 'unreadable' then 'unreadable' "
    "when outcome = 'limit' then 'limit' when reward >= :best - 1e-9 then 'right' "
    "when reward > 0 then 'partly' else 'wrong' end"
)
VALID = "outcome in ('ended', 'limit')"
TRAIN = "kind = 'train' or (kind glob 'train-[0-9]*-*' and not kind glob 'train-[0-9][0-9][0-9][0-9][0-9]*')"
"""Of training: not the held-out episodes of a split that is called train, which have their step behind the name."""
HELD_OUT = re.compile(r"train-\d{5}", re.ASCII)
OF_KIND = "(kind = :kind or kind glob :hosts)"
"""Of one kind, on whatever host they were played; see `of_kind`."""
ENDING = (
    "case when outcome = 'lost' then 'lost: ' || why when outcome = 'unreadable' then 'unreadable' "
    "when outcome = 'limit' then 'limit: ' || why when calls = 0 and :tools then 'never used a tool' "
    "when reward > 0 then 'partly right' else 'finished, wrong answer' end"
)


@dataclass(frozen=True, slots=True)
class Filter:
    """What a list shows, as its address says it; empty: no condition."""

    kind: str = ""
    """`train`, `held-out`, or the name of a file."""
    outcome: str = ""
    ending: str = ""
    """A class of failures; of episodes that did not earn all they could."""
    low: float | None = None
    """Rewards from here."""
    high: float | None = None
    difficulty: str = ""
    tag: str = ""
    tool: str = ""
    environment: str = ""
    task: str = ""
    group: str = ""
    id: str = ""
    """How ids begin."""
    versions: str = ""
    """Of the policy: `3-9`, or one."""
    step: str = ""
    """Training step that was trained on them."""
    q: str = ""
    """Text anywhere in the episode."""
    sort: str = "newest"
    after: str = ""
    """Where the page begins: value and key of the row before."""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filter:
        """The filter of an address; what can't be understood is no condition."""
        values: dict[str, Any] = {}
        for item in fields(cls):
            text = query.get(item.name, "").strip()
            if not text:
                continue
            if item.name in ("low", "high"):
                with suppress(ValueError):
                    value = float(text)
                    values[item.name] = value if math.isfinite(value) else None
            else:
                values[item.name] = text[:500]
        if values.get("sort", "newest").removeprefix("-") not in SORTS:
            del values["sort"]
        return cls(**values)

    def query(self, **changes: Any) -> str:
        """The address's query with these changes; a page begins anew unless `after` is among them."""
        changed = replace(self, **{"after": "", **changes})
        parts = []
        for item in fields(self):
            value = getattr(changed, item.name)
            if value not in (None, "") and value != item.default:
                text = f"{value:g}" if isinstance(value, float) else str(value)
                parts.append(f"{item.name}={quote(text.encode('utf-8', 'replace'), safe='')}")
        return "?" + "&".join(parts)

    @property
    def conditions(self) -> dict[str, str]:
        """Name and text of what is set, without search and order."""
        return {
            item.name: str(getattr(self, item.name))
            for item in fields(self)
            if item.name not in ("sort", "after", "q") and getattr(self, item.name) not in (None, "")
        }

    def where(self) -> tuple[str, dict[str, Any]]:
        """The condition as SQL, and its values."""
        found: list[str] = ["1"]
        values: dict[str, Any] = {}
        if self.kind == "train":
            found.append(f"({TRAIN})")
        elif self.kind == "held-out":
            found.append(f"not ({TRAIN})")
        elif self.kind:
            found.append(OF_KIND)
            values |= of_kind(self.kind)
        if self.outcome == "failed":
            found.append(f"{VALID} and reward < :best - 1e-9")
        elif self.outcome:
            found.append(f"({OUTCOME}) = :outcome")
        if self.ending:
            found.append(f"({ENDING}) = :ending")
            if not self.ending.startswith(("lost", "unreadable")):
                found.append("reward < :best - 1e-9")
        for name, sign in (("low", ">="), ("high", "<=")):
            if getattr(self, name) is not None:
                found.append(f"reward {sign} :{name} {'-' if name == 'low' else '+'} 1e-9 and {VALID}")
        for name, column in (("environment", "environment"), ("task", "task"), ("group", "grp")):
            if getattr(self, name):
                found.append(f"{column} = :{name}")
        if self.difficulty:
            found.append("difficulty = cast(:difficulty as integer)")
        for name, column, quoted in (("tag", "tags", self.tag), ("tool", "tools", self.tool)):
            if quoted:
                found.append(f"instr({column}, :{name}_text)")
                values[f"{name}_text"] = json.dumps(quoted)
        if self.id:
            found.append("substr(id, 1, length(:id)) = :id")
        if self.versions:
            span = VERSIONS.fullmatch(self.versions)
            if span is not None:
                values |= {"first": int(span[1]), "last": int(span[2] or span[1])}
                found.append("newest between :first and :last")
        if self.step.isascii() and self.step.isdigit() and len(self.step) < 10:
            found.append(
                f"({TRAIN}) and ((:groups is null and newest = :step - 1) "
                "or grp in (select value from json_each(:groups)))"
            )
        values |= {item.name: getattr(self, item.name) for item in fields(self)}
        values["groups"] = None
        return " and ".join(f"({part})" for part in found), values


@dataclass(slots=True)
class Listed:
    """A page of a list."""

    rows: list[dict[str, Any]]
    after: str
    """Where the next page begins; empty: this is the last."""
    searched: float | None = None
    """Share of the rows that a search has looked at so far, where it has not looked at all."""


@dataclass(slots=True)
class Facets:
    """What may be chosen, with how many rows each choice has."""

    total: int
    outcomes: dict[str, int]
    bins: list[int]
    low: float
    """Of the first bin."""
    high: float
    """Of the last."""
    difficulties: dict[str, tuple[int, float | None]]
    """Number of episodes and mean reward."""
    tags: list[tuple[str, int]]
    tools: list[tuple[str, int]]
    kinds: list[tuple[str, int]]
    environments: list[str]


class Queries:
    """The questions, asked of one index; answers that take long are kept until the index changes.

    Args:
        index: of the run's trajectories.
        groups_of: the groups that a step was trained on; None where that isn't known.
    """

    def __init__(self, index: RunIndex, groups_of: Callable[[int], list[str] | None] = lambda step: None) -> None:
        self.index = index
        self._groups_of = groups_of
        self._kept: dict[Any, Any] = {}
        self._of = -1

    def kept(self, key: Any, make: Any) -> Any:
        """`make()`, or what it gave for this key since the index last changed."""
        generation = self.index.generation
        if self._of != generation or len(self._kept) > 500:
            self._kept, self._of = {}, generation
        kept = self._kept  # the answer belongs to these, also where others begin meanwhile
        if key not in kept:
            kept[key] = make()
        return kept[key]

    def rows(self, sql: str, values: Mapping[str, Any] | None = None) -> list[sqlite3.Row]:
        """Any question; `:best` and `:tools` are known in it."""
        return self.index.connection().execute(sql, {**self.constants, **(values or {})}).fetchall()

    @property
    def constants(self) -> dict[str, Any]:
        """What rewards are measured by: the highest there is, and whether the agents have tools."""
        found: dict[str, Any] = self.kept("constants", self._constants)
        return found

    def _constants(self) -> dict[str, Any]:
        question = (
            f"select max(best) as best, max(case when {VALID} then reward end) as seen, "
            "max(calls > 0 and turns > 1) as tools from t"  # a call of a tool that isn't there is answered by nobody
        )
        row = self.index.connection().execute(question).fetchone()
        best, seen = row["best"] or 1.0, row["seen"] or 0.0
        return {"best": seen if best == 1.0 and seen > 1.0 else best, "tools": row["tools"] or 0}

    def _where(self, chosen: Filter) -> tuple[str, dict[str, Any]]:
        """A filter's condition, with what only the run knows."""
        where, values = chosen.where()
        if (
            chosen.step.isascii()
            and chosen.step.isdigit()
            and (groups := self._groups_of(int(chosen.step[:9]))) is not None
        ):
            values["groups"] = json.dumps(groups)
        return where, values

    def listed(self, chosen: Filter) -> Listed:
        """A page of the rows that a filter takes."""
        if chosen.q:
            return self._searched(chosen)
        rows = [*self._batch(chosen, chosen.after, PAGE + 1)]
        more = len(rows) > PAGE
        return Listed(rows[:PAGE], _place(rows[PAGE - 1], chosen) if more else "")

    def _batch(self, chosen: Filter, after: str, most: int) -> Iterator[dict[str, Any]]:
        yield from rows_of(self._bare(chosen, after, most, f"*, {OUTCOME} as result"))

    def _bare(self, chosen: Filter, after: str, most: int, columns: str = "") -> list[sqlite3.Row]:
        where, values = self._where(chosen)
        column, up = SORTS[chosen.sort.removeprefix("-")], chosen.sort.startswith("-")
        order, sign = ("asc", ">") if up else ("desc", "<")
        with suppress(ValueError):
            value, key = _after(after)
            values |= {"after_key": key, "after_value": value}
            beyond = (
                f"key {sign} :after_key" if column == "key" else f"({column}, key) {sign} (:after_value, :after_key)"
            )
            where = f"{where} and {beyond}"
        if column != "key":
            where = f"{where} and {column} is not null"
        columns = columns or ("key, length" if column == "key" else f"key, length, {column}")
        sql = f"select {columns} from t where {where} order by {column} {order}, key {order} limit {most}"
        return self.rows(sql, values)

    def _searched(self, chosen: Filter) -> Listed:
        """Look for a text in the records themselves, in the order of the list, for a while."""
        until, found, after = time.perf_counter() + SEARCH_S, list[int](), chosen.after
        needles = _needles(chosen.q)
        with ExitStack() as stack:
            maps: dict[int, mmap.mmap] = {}
            while not after or after == chosen.after or (len(found) < PAGE and time.perf_counter() < until):
                batch = self._bare(chosen, after, SEARCHED)
                for number, row in enumerate(batch):
                    after = _place(row, chosen)
                    if self._holds(row, needles, maps, stack):
                        found.append(row["key"])
                    if len(found) >= PAGE or (number % 20 == 19 and time.perf_counter() >= until):
                        break
                if len(batch) < SEARCHED and (not batch or after == _place(batch[-1], chosen)):
                    return Listed(self._whole(found), "", None)
        return Listed(self._whole(found), after, self._share_before(chosen, after))

    def _whole(self, keys: list[int]) -> list[dict[str, Any]]:
        marks = ", ".join(map(str, keys))
        rows = {
            row["key"]: row
            for row in rows_of(self.rows(f"select *, {OUTCOME} as result from t where key in ({marks})"))
        }
        return [rows[key] for key in keys]

    def _share_before(self, chosen: Filter, after: str) -> float:
        total = self.facets(chosen).total
        if not total:
            return 1.0
        where, values = self._where(chosen)
        column, up = SORTS[chosen.sort.removeprefix("-")], chosen.sort.startswith("-")
        value, key = _after(after)
        values |= {"after_key": key, "after_value": value}
        done = f"({column}, key) {'<=' if up else '>='} (:after_value, :after_key)"
        done = f"key {'<=' if up else '>='} :after_key" if column == "key" else done
        number: int = self.rows(f"select count(*) from t where {where} and {done}", values)[0][0]
        return number / total

    def _holds(self, row: sqlite3.Row, needles: list[bytes], maps: dict[int, mmap.mmap], stack: ExitStack) -> bool:
        number, offset = divmod(row["key"], PLACES)
        if number not in maps:
            try:
                file = stack.enter_context(self.index.place(row["key"])[0].open("rb"))
                maps[number] = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except (OSError, ValueError, LookupError):
                return False  # it is gone
        text, end = maps[number], offset + row["length"]
        for needle in needles:
            at = text.find(needle, offset, end)
            if at >= 0:
                ids = text.rfind(b'"tokens":{"ids":"', offset, end)  # numbers, which hold any short text
                if ids < 0 or at < ids:
                    return True
        return False

    def facets(self, chosen: Filter) -> Facets:
        """The counts of every choice; those of outcome and reward are what choosing another one would give."""
        base = replace(chosen, q="", after="", sort="newest")
        found: Facets = self.kept(("facets", base), lambda: self._facets(base))
        return found

    def _facets(self, chosen: Filter) -> Facets:
        apart = replace(chosen, outcome="", low=None, high=None)
        where, values = self._where(apart)
        best = self.constants["best"]
        outcomes: Counter[str] = Counter()
        bins: Counter[int] = Counter()
        low = min(0.0, self.kept("lowest", lambda: self.rows(f"select min(reward) from t where {VALID}")[0][0] or 0.0))
        high = max(best, low + 1e-9)
        width = (high - low) / BINS
        inside = replace(apart, low=chosen.low, high=chosen.high)
        difficulties: dict[int, list[float]] = {}
        tags: Counter[str] = Counter()
        tools: Counter[str] = Counter()
        total = 0
        sql = (
            f"select {OUTCOME} as result, reward, difficulty, tags, tools, count(*) as n from t where {where} "
            "group by 1, 2, 3, 4, 5"
        )
        for row in self.rows(sql, values):
            number, result, reward = row["n"], row["result"], row["reward"]
            valid = result not in ("lost", "unreadable") and reward is not None
            fits = chosen.low is None and chosen.high is None
            if not fits and valid:
                at_least = inside.low is None or reward >= inside.low - 1e-9
                fits = at_least and (inside.high is None or reward <= inside.high + 1e-9)
            failed = valid and reward < best - 1e-9
            chosen_result = not chosen.outcome or result == chosen.outcome or (chosen.outcome == "failed" and failed)
            if fits:
                outcomes[result] += number
            if valid and chosen_result:
                bins[min(BINS - 1, max(0, int((reward - low) / width)))] += number
            if not (fits and chosen_result):
                continue
            total += number
            if valid:
                sums = difficulties.setdefault(row["difficulty"], [0.0, 0.0])
                sums[0] += number
                sums[1] += number * reward
            for tag in json.loads(row["tags"]) if row["tags"] else ():
                tags[tag] += number
            for tool in json.loads(row["tools"]) if row["tools"] else ():
                tools[tool] += number
        kinds = self.kept("kinds", lambda: [tuple(row) for row in self.rows("select kind, count(*) from t group by 1")])
        named = self.kept("environments", lambda: [row[0] for row in self.rows("select distinct environment from t")])
        return Facets(
            total=total,
            outcomes={
                name: outcomes[name] for name in OUTCOMES if outcomes[name] or name in ("right", "wrong", "limit")
            },
            bins=[bins[place] for place in range(BINS)],
            low=low,
            high=high,
            difficulties={str(key): (int(n), s / n) for key, (n, s) in sorted(difficulties.items())},
            tags=tags.most_common(30),
            tools=tools.most_common(20),
            kinds=kinds,
            environments=sorted(named),
        )

    def one(self, kind: str, name: str) -> dict[str, Any] | None:
        """The row of a trajectory: by id, or as `@FILE:OFFSET` where its id can't stand in an address."""
        try:
            f"{kind}{name}".encode()
        except UnicodeEncodeError:  # an address that is no text
            return None
        if name.startswith("@"):
            file, _, offset = name[1:].rpartition(":")
            if not (offset.isascii() and offset.isdigit()) or len(offset) > 15:
                return None
            sql = f"select *, {OUTCOME} as result from t where key = :key"
            number = self.rows("select number from file where name = :file", {"file": file})
            found = self.rows(sql, {"key": number[0][0] * PLACES + int(offset)}) if number else []
        else:
            sql = f"select *, {OUTCOME} as result from t where kind = :kind and id = :id"
            found = self.rows(sql, {"kind": kind, "id": name})
        return next(rows_of(found), None)

    def neighbours(self, row: Mapping[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The record before and the one behind, in the same kind."""
        values = {"kind": row["kind"], "key": row["key"]}
        before = self.rows("select * from t where +kind = :kind and key < :key order by key desc limit 1", values)
        behind = self.rows("select * from t where +kind = :kind and key > :key order by key limit 1", values)
        return next(rows_of(before), None), next(rows_of(behind), None)

    def group(self, kind: str, group: str) -> list[dict[str, Any]]:
        """The members of a group, in order."""
        sql = f"select *, {OUTCOME} as result from t where kind = :kind and grp = :grp order by member, key limit 200"
        return [*rows_of(self.rows(sql, {"kind": kind, "grp": group}))]

    def failures(self, kind: str) -> list[tuple[str, int, dict[str, Any] | None]]:
        """Classes of failures with how many there are, and a typical one: of median length among the newest.

        Args:
            kind: as in a filter.
        """
        found: list[tuple[str, int, dict[str, Any] | None]] = self.kept(
            ("failures", kind), lambda: self._failures(kind)
        )
        return found

    def _failures(self, kind: str) -> list[tuple[str, int, dict[str, Any] | None]]:
        where, values = self._where(Filter(kind=kind))
        failed = f"{where} and (outcome in ('lost', 'unreadable') or reward < :best - 1e-9)"
        classes: dict[str, list[tuple[int, int, int]]] = {}
        for row in self.rows(
            f"select {ENDING} as ending, tokens, turns, key from t where {failed} order by key desc", values
        ):
            classes.setdefault(row["ending"], []).append((row["tokens"], row["turns"], row["key"]))
        result = []
        for ending, members in sorted(classes.items(), key=lambda item: -len(item[1])):
            typical = sorted(members[:101])[len(members[:101]) // 2]
            one = next(rows_of(self.rows("select * from t where key = :key", {"key": typical[2]})), None)
            result.append((ending, len(members), one))
        return result

    def scores(self, kind: str, score: str) -> dict[str, list[float]]:
        """Scores of the valid episodes of a kind by task; see `score_of`."""
        where, values = self._where(Filter(kind=kind))
        rows = rows_of(self.rows(f"select task, reward, metrics from t where {where} and {VALID}", values))
        found = ((row["task"], score_of(row, score)) for row in rows)
        return by_task((task, value) for task, value in found if value is not None)

    def change(self, first: str, last: str, score: str) -> PairedDifference | None:
        """From the scores of one kind to those of another, task by task; None: they have no task in common."""
        found: PairedDifference | None = self.kept(
            ("change", first, last, score), lambda: compare(*(self.scores(kind, score) for kind in (first, last)))
        )
        return found


def is_training(kind: str) -> bool:
    """Whether a file's episodes are of training, as `TRAIN` says it."""
    return kind == "train" or (kind.startswith("train-") and not HELD_OUT.match(kind))


def of_kind(kind: str) -> dict[str, str]:
    """The values of `OF_KIND`."""
    letters = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in kind)
    return {"kind": kind, "hosts": f"{letters}-[0-9]*-*"}


def score_of(row: Mapping[str, Any], score: str) -> float | None:
    """By what an episode is measured: `reward`, or a metric; of one without the metric, the reward."""
    found = row["reward"] if score == "reward" else row["metrics"].get(score, row["reward"])
    return None if found is None else float(found)


def _place(row: Mapping[str, Any] | sqlite3.Row, chosen: Filter) -> str:
    column = SORTS[chosen.sort.removeprefix("-")]
    return str(row["key"]) if column == "key" else f"{row[column]!r},{row['key']}"


def _after(place: str) -> tuple[float, int]:
    """Value and key that `_place` told; `ValueError`: it is none."""
    found = PLACE.fullmatch(place)
    if found is None:
        raise ValueError(f"{place!r} is no place in a list")
    return float(found[1] or 0), int(found[2])


def _needles(text: str) -> list[bytes]:
    """How a text may stand in a record: as JSON has it, and as JSON within JSON, which is what arguments are."""
    once = json.dumps(text, ensure_ascii=False)[1:-1]
    twice = json.dumps(once, ensure_ascii=False)[1:-1]
    forms = dict.fromkeys([once, twice, json.dumps(text)[1:-1]])
    return [form.encode("utf-8", "replace") for form in forms]
