"""How pages are drawn: the templates, all that they may use, and the addresses they lead to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from forge_env.trajectory_index import out_of
from forge_env.view import text
from forge_env.view.filter import PAID_UNSOLVED
from forge_env.view.runs import RunView

SAFE = re.compile(r"[\w][\w .:@+=,-]*(?:/[\w][\w .:@+=,-]*)*")
"""Ids that can stand in an address as they are; others are told by the place of their record."""
OUTCOME_NAMES = {
    "paid": "full reward", "unsolved": PAID_UNSOLVED, "partly": "below maximum reward", "unpaid": "wrong answer",
    "limit": "hit a limit", "crashed": "agent crashed", "lost": "lost", "unreadable": "can't be read",
}  # fmt: skip


def _points(values: Sequence[float], width: float, height: float) -> str:
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    step = width / max(1, len(values) - 1)
    return " ".join(
        f"{place * step:.1f},{height - 3 - (value - low) / span * (height - 6):.1f}"
        for place, value in enumerate(values)
    )


def _reward(value: float | None) -> str:
    if value is None or value != value:
        return "\u2013" if value is None else "NaN"
    return f"{value:.2f}" if abs(value) < 100 else text.number(value)


def _tone(row: Mapping[str, Any]) -> str:
    reward, best = row["reward"], row["best"] or 1.0
    if row.get("result") == "unsolved":
        return "warn"
    return "good" if reward >= best - 1e-9 else "bad" if reward <= 0 else "warn"


def _finalize(value: Any) -> Any:
    """Every text that a template shows is an agent's until it is known not to be."""
    return text.shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _static() -> tuple[str, dict[str, bytes]]:
    """The page's own files by name, and a mark of their content."""
    folder = files("forge_env.view").joinpath("static")
    found = {item.name: item.read_bytes() for item in folder.iterdir() if item.is_file()}
    return blake2b(b"".join(found[name] for name in sorted(found)), digest_size=6).hexdigest(), found


def static_files() -> dict[str, bytes]:
    """The page's own files by name."""
    return _static()[1]


def static(name: str) -> str:
    """Address of one of the page's own files; it changes with their content, so that a browser may keep them."""
    return f"/static/{_static()[0]}/{name}"


def _quoted(value: str) -> str:
    """For an address. A folder's name keeps its bytes, whatever they are; other text that is no UTF-8 is replaced."""
    try:
        return quote(value.encode("utf-8", "surrogateescape"), safe="")
    except UnicodeEncodeError:
        return quote(value.encode("utf-8", "replace"), safe="")


def here(run: RunView, page: str = "") -> str:
    """Address of a page of a run."""
    return f"/run/{_quoted(run.name)}" + (f"/{page}" if page else "")


def compared(runs: Sequence[RunView]) -> str:
    """The part of an address that names several runs."""
    return "&".join(f"runs={_quoted(run.name)}" for run in runs)


def place(run: RunView, row: Mapping[str, Any], page: str = "t") -> str:
    """Address of a trajectory."""
    name = row["id"]
    if not (SAFE.fullmatch(name) and row["outcome"] != "unreadable" and len(name) < 500):
        path, offset = run.index.place(row["key"])
        name = f"@{path.name}:{offset}"
    kind = quote(row["kind"].encode("utf-8", "surrogateescape"), safe="")
    return f"{here(run, page)}/{kind}/{quote(name, safe='/:@')}"


def group_url(run: RunView, row: Mapping[str, Any]) -> str:
    """Address of a group."""
    kind, group = (quote(row[name].encode("utf-8", "surrogateescape"), safe="") for name in ("kind", "grp"))
    return f"{here(run, 'g')}?kind={kind}&group={group}"


@cache
def templates() -> Environment:
    """The templates; all that they show is escaped. Each is read once."""
    environment = Environment(
        loader=PackageLoader("forge_env.view"),
        autoescape=True,
        undefined=StrictUndefined,
        auto_reload=False,  # an update of forge-env must not mix its templates with the code that runs
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["glued"] = text.glued
    environment.filters["attr"] = lambda value: Markup(escape(text.plain(str(value))))
    environment.filters["urlencode"] = lambda value: _quoted(str(value))
    environment.globals |= {
        "static": static,
        "here": here,
        "compared": compared,
        "group_url": group_url,
        "points": _points,
        "reward": _reward,
        "number": text.number,
        "count": text.count,
        "seconds": text.seconds,
        "ago": text.ago,
        "percent": text.percent,
        "signed": text.signed,
        "most_shown": text.SHOWN,
        "tone": _tone,
        "outcomes": OUTCOME_NAMES,
        "paid_unsolved": PAID_UNSOLVED,
        "out_of": out_of,
        "where": lambda run, row: Markup(escape(place(run, row))),
        "joined": lambda texts: Markup(escape("".join(texts))),
    }
    return environment
