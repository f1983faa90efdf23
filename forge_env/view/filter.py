"""Filters of the list of trajectories: parsed from an address's query, and converted to an SQL condition."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from forge_env.trajectory_index import LIMITS, SCORED

SPAN = re.compile(r"(\d{1,12})(?:\s*-\s*(\d{1,12}))?", re.ASCII)
"""A range such as `3-9`, or one number."""
OUTCOMES = ("full", "unsolved", "partial", "wrong", "limit", "crashed", "lost", "unreadable")
SORTS = {
    "newest": "key", "reward": "reward", "tokens": "tokens", "turns": "turns", "calls": "calls", "seconds": "wall_s",
    "version": "newest",
}  # fmt: skip
"""Columns by which a list can be sorted, by their name in an address; a leading `-` reverses the order."""
VALID = f"outcome in {SCORED}"
TRAIN = "+kind = 'train' or (+kind glob 'train-[0-9]*-*' and not +kind glob 'train-[0-9][0-9][0-9][0-9][0-9]*')"
"""Condition for training episodes.

It excludes held-out episodes of a split named train, whose kind ends with the step. Since most episodes are training
episodes, the unary + keeps SQLite from using the index on kind.
"""
HELD_OUT = re.compile(r"train-\d{5}", re.ASCII)
OF_KIND = "(kind = :kind or kind glob :hosts)"
"""Condition for episodes of one kind, played on any host; see `of_kind`."""
PAID = "reward >= :best - 1e-9"
"""Condition for the maximum reward, whether or not the task was solved."""
UNSOLVED = f"({VALID} and {PAID} and solved < 0.5)"
"""Condition for the maximum reward with a held-out metric below one half: the reward may not measure the goal."""
FAILED = f"(outcome in ('lost', 'unreadable') or not {PAID} or {UNSOLVED})"
OUTCOME = (
    "case when outcome in ('lost', 'unreadable', 'crashed') then outcome "
    f"when {UNSOLVED} then 'unsolved' when outcome = 'limit' then 'limit' when {PAID} then 'full' "
    "when reward > 0 then 'partial' else 'wrong' end"
)
PAID_UNSOLVED = "maximum reward, not solved"
HOW_ENDED = (
    "case when outcome = 'lost' then 'lost: ' || why when outcome = 'unreadable' then 'unreadable' "
    f"when outcome = 'crashed' then 'agent crashed' when {UNSOLVED} then '{PAID_UNSOLVED}' "
    f"when outcome = 'limit' and why in {LIMITS} then 'out of ' || replace(why, '_', ' ') "
    "when outcome = 'limit' then 'limit: ' || why "
    "when calls = 0 and :tools then 'never used a tool' when reason != '' then reason "
    "when reward > 0 then 'below maximum reward' else 'wrong answer' end"
)
ENDING = (
    f"{HOW_ENDED} || case when {VALID} and outcome != 'crashed' and not {UNSOLVED} and read != '' "
    "and read in (select value from json_each(:often)) then ', after reading \"' || read || '\"' else '' end"
)
"""Name of an episode's failure: how it ended or the judge's reason, and the last tool result if many read the same."""


@dataclass(frozen=True, slots=True)
class Filter:
    """The conditions of a list, as given in its address; an empty value is no condition."""

    kind: str = ""
    """`train`, `held-out`, or the name of a file."""
    outcome: str = ""
    ending: str = ""
    """A class of failures, among episodes below the maximum reward or unsolved."""
    low: float | None = None
    """Minimum reward."""
    high: float | None = None
    difficulty: str = ""
    tag: str = ""
    tool: str = ""
    environment: str = ""
    task: str = ""
    group: str = ""
    id: str = ""
    """Prefix of the ids."""
    versions: str = ""
    """Policy versions: `3-9`, or one."""
    step: str = ""
    """Training step that was trained on the episodes: one, or `3-9`."""
    since: str = ""
    """Earliest start: `2026-11-23T14:05`, UTC."""
    until: str = ""
    """Latest start."""
    q: str = ""
    """Text anywhere in the episode."""
    sort: str = "newest"
    after: str = ""
    """Start of the page: value and key of the row before it."""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filter:
        """Parse the query of an address; values that can't be parsed are ignored."""
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
        """Format the address's query with these changes; unless `after` is among them, the first page is shown."""
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
        """Name and value of each condition that is set, without search and order."""
        return {
            item.name: str(getattr(self, item.name))
            for item in fields(self)
            if item.name not in ("sort", "after", "q") and getattr(self, item.name) not in (None, "")
        }

    def where(self) -> tuple[str, dict[str, Any]]:
        """Return the condition as SQL, and its parameters."""
        conditions: list[str] = ["1"]
        values: dict[str, Any] = {}
        if self.kind == "train":
            conditions.append(f"({TRAIN})")
        elif self.kind == "held-out":
            conditions.append(f"not ({TRAIN})")
        elif self.kind:
            conditions.append(OF_KIND)
            values |= of_kind(self.kind)
        if self.outcome == "failed":
            conditions.append(f"{VALID} and {FAILED}")
        elif self.outcome:
            conditions.append(f"({OUTCOME}) = :outcome")
        if self.ending:
            conditions += [f"({ENDING}) = :ending", FAILED]
        for name, sign in (("low", ">="), ("high", "<=")):
            if getattr(self, name) is not None:
                conditions.append(f"reward {sign} :{name} {'-' if name == 'low' else '+'} 1e-9 and {VALID}")
        for name, column in (("environment", "environment"), ("task", "task"), ("group", "grp")):
            if getattr(self, name):
                conditions.append(f"{column} = :{name}")
        if self.difficulty:
            conditions.append("difficulty = cast(:difficulty as integer)")
        for name, column, quoted in (("tag", "tags", self.tag), ("tool", "tools", self.tool)):
            if quoted:
                conditions.append(f"instr({column}, :{name}_text)")
                values[f"{name}_text"] = json.dumps(quoted)
        if self.id:
            conditions.append("substr(id, 1, length(:id)) = :id")
        if (span := span_of(self.versions)) is not None:
            values |= {"first": span[0], "last": span[1]}
            conditions.append("newest between :first and :last")
        if (span := span_of(self.step)) is not None:
            values |= {"first_step": span[0], "last_step": span[1]}
            conditions.append(
                f"({TRAIN}) and ((:groups is null and newest between :first_step - 1 and :last_step - 1) "
                "or grp in (select value from json_each(:groups)))"
            )
        for name, sign in (("since", ">="), ("until", "<=")):
            if (moment := moment_of(getattr(self, name))) is not None:
                values[f"{name}_s"] = moment
                conditions.append(f"started > 0 and started {sign} :{name}_s")
        if self.q:
            conditions.append("key in (select value from json_each(:found))")
        values |= {item.name: getattr(self, item.name) for item in fields(self)}
        values |= {"groups": None, "found": "[]"}
        return " and ".join(f"({part})" for part in conditions), values


def span_of(text: str) -> tuple[int, int] | None:
    """Return the first and last number of `3-9`, or of one number; None if the text is neither."""
    match = SPAN.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2] or match[1]))


def moment_of(text: str) -> float | None:
    """Return the seconds since 1970 of a date, with or without a time, UTC; None if it is not a date."""
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def is_training(kind: str) -> bool:
    """Whether a file's episodes are training episodes; the same condition as `TRAIN`."""
    return kind == "train" or (kind.startswith("train-") and not HELD_OUT.match(kind))


def takes(kind: str, file: str) -> bool:
    """Whether a filter's kind includes the episodes of a file."""
    if kind in ("train", "held-out"):
        return is_training(file) == (kind == "train")
    return not kind or file == kind or re.match(rf"{re.escape(kind)}-\d.*-", file) is not None


def of_kind(kind: str) -> dict[str, str]:
    """Return the parameters of `OF_KIND`."""
    letters = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in kind)
    return {"kind": kind, "hosts": f"{letters}-[0-9]*-*"}
