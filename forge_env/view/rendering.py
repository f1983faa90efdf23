"""Rendering of pages: the templates, their filters and globals, the addresses of pages, and pages as files."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from hashlib import blake2b, sha256
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from forge_env.evaluation.estimates import Estimate
from forge_env.figures import ago, count, duration, number, percent, signed
from forge_env.redaction import redact
from forge_env.trajectory_index import out_of
from forge_env.view import text
from forge_env.view.filter import PAID_UNSOLVED
from forge_env.view.listing import Row
from forge_env.view.runs import RunView

SAFE = re.compile(r"[\w][\w .:@+=,-]*(?:/[\w][\w .:@+=,-]*)*")
"""Ids that can be part of an address; other records are addressed by file and offset."""
OUTCOME_NAMES = {
    "full": "maximum reward", "unsolved": PAID_UNSOLVED, "partial": "below maximum reward", "wrong": "wrong answer",
    "limit": "hit a limit", "crashed": "agent crashed", "lost": "lost", "unreadable": "can't be read",
}  # fmt: skip


def _points(values: Sequence[float], width: float, height: float) -> str:
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    step = width / max(1, len(values) - 1)
    return " ".join(
        f"{index * step:.1f},{height - 3 - (value - low) / span * (height - 6):.1f}"
        for index, value in enumerate(values)
    )


def _fixed(value: float, digits: int = 3) -> str:
    """Format a number with a fixed number of decimals and a true minus sign."""
    return f"{value:.{digits}f}".replace("-", "\u2212")


def _reward(value: float | None) -> str:
    if value is None or value != value:
        return "\u2013" if value is None else "NaN"
    return _fixed(value, 2) if abs(value) < 100 else number(value)


def _span(scores: Iterable[Estimate | None]) -> tuple[float, float]:
    """Return the range of an axis for several scores: from 0 to 1, or further."""
    shown = [score for score in scores if score is not None]
    return min([0.0, *(score.low for score in shown)]), max([1.0, *(score.high for score in shown)])


def _probability(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.2g}"


def _tone(row: Mapping[str, Any]) -> str:
    reward, best = row["reward"], row["best"] or 1.0
    if row.get("result") == "unsolved":
        return "warn"
    return "good" if reward >= best - 1e-9 else "bad" if reward <= 0 else "warn"


def _finalize(value: Any) -> Any:
    """Make every text of a template safe to show, since an agent may have written it."""
    return text.shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _static() -> tuple[str, dict[str, bytes]]:
    """Return a digest of the page's static files, and their contents by name."""
    folder = files("forge_env.view").joinpath("static")
    contents = {item.name: item.read_bytes() for item in folder.iterdir() if item.is_file()}
    return blake2b(b"".join(contents[name] for name in sorted(contents)), digest_size=6).hexdigest(), contents


def static_files() -> dict[str, bytes]:
    """Return the page's static files by name."""
    return _static()[1]


def static(name: str) -> str:
    """Return the address of a static file; it changes with the files' content, so that browsers may cache them."""
    return f"/static/{_static()[0]}/{name}"


def _quoted(value: str) -> str:
    """Quote a text for an address: a folder's name keeps its bytes; other text that is not UTF-8 is replaced."""
    try:
        return quote(value.encode("utf-8", "surrogateescape"), safe="")
    except UnicodeEncodeError:
        return quote(value.encode("utf-8", "replace"), safe="")


def here(run: RunView | Row, page: str = "") -> str:
    """Return the address of a page of a run."""
    return f"/run/{_quoted(run.name)}" + (f"/{page}" if page else "")


def compared(runs: Sequence[RunView | Row]) -> str:
    """Return the part of an address that names several runs."""
    return "&".join(f"runs={_quoted(run.name)}" for run in runs)


def place(run: RunView, row: Mapping[str, Any], page: str = "t") -> str:
    """Return the address of a trajectory."""
    name = row["id"]
    if not (SAFE.fullmatch(name) and row["outcome"] != "unreadable" and len(name) < 500):
        path, offset = run.index.place(row["key"])
        name = f"@{path.name}:{offset}"
    kind = quote(row["kind"].encode("utf-8", "surrogateescape"), safe="")
    return f"{here(run, page)}/{kind}/{quote(name, safe='/:@')}"


def group_url(run: RunView, row: Mapping[str, Any]) -> str:
    """Return the address of a group."""
    kind, group = (quote(row[name].encode("utf-8", "surrogateescape"), safe="") for name in ("kind", "grp"))
    return f"{here(run, 'g')}?kind={kind}&group={group}"


@cache
def templates() -> Environment:
    """Create the template environment, which escapes all values and reads each template once."""
    environment = Environment(
        loader=PackageLoader("forge_env.view"),
        autoescape=True,
        undefined=StrictUndefined,
        auto_reload=False,  # an update of forge-env must not mix new templates with the running code
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["glued"] = text.glued
    environment.filters["attr"] = lambda value: Markup(escape(text.plain(str(value))))
    environment.filters["urlencode"] = lambda value: _quoted(str(value))
    environment.globals |= {
        "static": static,
        "saved": None,
        "here": here,
        "compared": compared,
        "group_url": group_url,
        "points": _points,
        "reward": _reward,
        "fixed": _fixed,
        "number": number,
        "count": count,
        "seconds": partial(duration, fine=True),
        "ago": ago,
        "percent": percent,
        "signed": signed,
        "span": _span,
        "probability": _probability,
        "most_shown": text.SHOWN,
        "tone": _tone,
        "outcomes": OUTCOME_NAMES,
        "paid_unsolved": PAID_UNSOLVED,
        "out_of": out_of,
        "where": lambda run, row: Markup(escape(place(run, row))),
        "joined": lambda texts: Markup(escape("".join(texts))),
    }
    return environment


def body(name: str, **values: Any) -> Markup:
    """Render the content of a page from its template."""
    return Markup(templates().get_template(f"{name}.html.jinja").render({"page": name, "run": None, **values}))


def page(main: Markup, **values: Any) -> str:
    """Render a page around its content; secrets are redacted."""
    base: dict[str, Any] = {"page": "", "run": None, "nav": (), "events": "", "problems": []}
    return redact(templates().get_template("base.html.jinja").render({**base, **values, "main": main}))


def saved_page(main: Markup, title: str, charts: Sequence[Mapping[str, Any]] = (), **values: Any) -> str:
    """Render a page as one self-contained file, which loads nothing and runs no script but its own.

    Args:
        charts: data of the charts that it draws.
    """
    files = {name: content.decode() for name, content in static_files().items()}
    style = f"{files['uplot-1.6.32.min.css']}\n{files['style.css']}"
    scripts = [files["uplot-1.6.32.min.js"], f"{files['charts.js']}\nstartCharts();\n"] if charts else []
    hashes = [f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in (style, *scripts)]
    policy = (
        f"default-src 'none'; img-src data:; style-src {hashes[0]}; script-src {' '.join(hashes[1:])}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    saved = {
        "policy": policy,
        "style": Markup(style),
        "scripts": [Markup(text) for text in scripts],
        "charts": Markup(json.dumps({"charts": charts}).replace("<", "\\u003c")) if charts else "",
    }
    return page(main, title=title, saved=saved, **values)


def fragment(run: RunView, name: str = "") -> str:
    """Return the address of a run's page within its saved page."""
    return f"#{name or 'overview'}"
