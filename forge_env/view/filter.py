"""What a list shows: an address's query, and the condition in SQL that it is."""

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
"""`3-9`, or one number."""
OUTCOMES = ("paid", "unsolved", "partly", "unpaid", "limit", "crashed", "lost", "unreadable")
SORTS = {
    "newest": "key", "reward": "reward", "tokens": "tokens", "turns": "turns", "calls": "calls", "seconds": "wall_s",
    "version": "newest",
}  # fmt: skip
"""Columns by which a list is sorted, by their name in an address; `-` before it turns the order round."""
VALID = f"outcome in {SCORED}"
TRAIN = "+kind = 'train' or (+kind glob 'train-[0-9]*-*' and not +kind glob 'train-[0-9][0-9][0-9][0-9][0-9]*')"
"""Of training: not the held-out episodes of a split that is called train, which have their step behind the name. Most
episodes are, so that SQLite is kept from looking them up by kind one by one (that is what + does)."""
HELD_OUT = re.compile(r"train-\d{5}", re.ASCII)
OF_KIND = "(kind = :kind or kind glob :hosts)"
"""Of one kind, on whatever host they were played; see `of_kind`."""
PAID = "reward >= :best - 1e-9"
"""Earned all that can be earned; whether the task was solved is another question."""
UNSOLVED = f"({VALID} and {PAID} and solved < 0.5)"
"""Earned all, and less than half by what held-out episodes are measured by: the reward may not be what is wanted."""
FAILED = f"(outcome in ('lost', 'unreadable') or not {PAID} or {UNSOLVED})"
OUTCOME = (
    "case when outcome in ('lost', 'unreadable', 'crashed') then outcome "
    f"when {UNSOLVED} then 'unsolved' when outcome = 'limit' then 'limit' when {PAID} then 'paid' "
    "when reward > 0 then 'partly' else 'unpaid' end"
)
PAID_UNSOLVED = "full reward, not solved"
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
    """Training step that was trained on them: one, or `3-9`."""
    since: str = ""
    """When they began, at the earliest: `2026-11-23T14:05`, UTC."""
    until: str = ""
    """And at the latest."""
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
            found.append(f"{VALID} and {FAILED}")
        elif self.outcome:
            found.append(f"({OUTCOME}) = :outcome")
        if self.ending:
            found += [f"({ENDING}) = :ending", FAILED]
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
        if (span := span_of(self.versions)) is not None:
            values |= {"first": span[0], "last": span[1]}
            found.append("newest between :first and :last")
        if (span := span_of(self.step)) is not None:
            values |= {"first_step": span[0], "last_step": span[1]}
            found.append(
                f"({TRAIN}) and ((:groups is null and newest between :first_step - 1 and :last_step - 1) "
                "or grp in (select value from json_each(:groups)))"
            )
        for name, sign in (("since", ">="), ("until", "<=")):
            if (moment := moment_of(getattr(self, name))) is not None:
                values[f"{name}_s"] = moment
                found.append(f"started > 0 and started {sign} :{name}_s")
        if self.q:
            found.append("key in (select value from json_each(:found))")
        values |= {item.name: getattr(self, item.name) for item in fields(self)}
        values |= {"groups": None, "found": "[]"}
        return " and ".join(f"({part})" for part in found), values


def span_of(text: str) -> tuple[int, int] | None:
    """First and last of `3-9`, or of one number; None: it is neither."""
    found = SPAN.fullmatch(text)
    return None if found is None else (int(found[1]), int(found[2] or found[1]))


def moment_of(text: str) -> float | None:
    """Seconds since 1970 of a date, with or without a time, UTC; None: it is none."""
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def is_training(kind: str) -> bool:
    """Whether a file's episodes are of training, as `TRAIN` says it."""
    return kind == "train" or (kind.startswith("train-") and not HELD_OUT.match(kind))


def takes(kind: str, file: str) -> bool:
    """Whether a filter's kind takes the episodes of a file."""
    if kind in ("train", "held-out"):
        return is_training(file) == (kind == "train")
    return not kind or file == kind or re.match(rf"{re.escape(kind)}-\d.*-", file) is not None


def of_kind(kind: str) -> dict[str, str]:
    """The values of `OF_KIND`."""
    letters = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in kind)
    return {"kind": kind, "hosts": f"{letters}-[0-9]*-*"}
