"""The web application: handlers that render each page on the server from a run's files, complete without scripts."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from forge_env.config.evaluation import CONFIDENCE
from forge_env.errors import ForgeError
from forge_env.evaluation.estimates import mean
from forge_env.machine import cache_dir
from forge_env.reading import LARGEST_TABLE
from forge_env.rewards.reasons import score_lines
from forge_env.trajectory import NOT_CHEAT_PROOF
from forge_env.view import charts, contents, episode, evaluations, records, rendering, text
from forge_env.view.filter import SORTS, Filter
from forge_env.view.index import AT_ONCE, CACHE_FIX
from forge_env.view.listing import MOST_SORTED, Order, page_of
from forge_env.view.news import news
from forge_env.view.records import UnreadableError
from forge_env.view.rendering import here, place, static_files
from forge_env.view.runs import Runs, RunView

MOST_COMPARED = 8
NO_RUN = "This folder has no such run; it may have been removed."
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}


class Pages:
    """The application."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.ending = asyncio.Event()
        self._comparisons: dict[Any, Any] = {}

    def load(self) -> None:
        """Warm up to make the first page of each kind fast: load templates, numpy, and the lexers of code blocks."""
        for name in rendering.templates().list_templates():
            rendering.templates().get_template(name)
        mean([[0.0], [1.0]])
        for language in text.LANGUAGES:
            text.code("1", language)

    def application(self) -> Starlette:
        """Create the ASGI application."""
        run = "/run/{run}"
        pages: list[tuple[str, Callable[..., Any]]] = [
            ("/", self.list_runs),
            ("/compare", self.compare),
            ("/compare/charts.json", self.compare_charts),
            ("/static/{mark}/{name}", self.static_file),
            ("/events", self.events),
            (f"{run}/events", self.events),
            (run, self.overview),
            (f"{run}/trajectories", self.trajectories),
            (f"{run}/g", self.group),
            (f"{run}/t/{{kind}}/{{id:path}}", self.trajectory),
            (f"{run}/tokens/{{kind}}/{{id:path}}", self.tokens),
            (f"{run}/piece/{{kind}}/{{id:path}}", self.piece),
            (f"{run}/charts.json", self.charts_data),
            (f"{run}/chart.svg", self.chart_svg),
            (f"{run}/chart.csv", self.chart_csv),
            (f"{run}/time", self.time),
            (f"{run}/timeline.json", self.timeline_data),
            (f"{run}/evaluations", self.held_out),
            (f"{run}/recipe", self.recipe),
            (f"{run}/log", self.log),
        ]
        routes = [Route(path, handler, methods=["GET", "HEAD"]) for path, handler in pages]
        kinds = (404, HTTPException, UnreadableError, ForgeError, OSError, sqlite3.Error, Exception)
        handlers: Any = dict.fromkeys(kinds, self._failed)
        return Starlette(routes=routes, exception_handlers=handlers)

    # --- parts

    def _page(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        run: RunView | None = values.get("run")
        values = {"page": template, **values}
        if run is not None:
            values |= {"nav": contents.nav_of(run), "problems": run.problems}
        html = rendering.page(rendering.body(template, **values), **values)
        return HTMLResponse(html, status, {"cache-control": "no-store"})

    def _run(self, request: Request) -> RunView:
        run = self.runs.get(request.path_params["run"])
        if run is None:
            raise HTTPException(404, NO_RUN)
        return run

    def _indexed(self, request: Request) -> RunView:
        run = self._run(request)
        run.index.update(AT_ONCE)
        return run

    def _row(self, request: Request) -> tuple[RunView, dict[str, Any]]:
        run = self._indexed(request)
        row = run.queries.one(request.path_params["kind"], request.path_params["id"])
        if row is None:
            raise HTTPException(404, "This run has no such episode.")
        return run, row

    def _failed(self, request: Request, error: Exception) -> Response:
        """Show what is missing or can't be read, or which folder can't be used."""
        status, text, fix = 500, f"{type(error).__name__}: {error}", "The traceback is in forge-env view's terminal."
        folder = self.runs.cache or cache_dir()
        if isinstance(error, HTTPException):
            status, text, fix = error.status_code, str(error.detail), ""
        elif isinstance(error, UnreadableError):
            status, text, fix = 404, str(error), ""
        elif isinstance(error, ForgeError):
            status, text, fix = 422, str(error), error.fix or ""
        elif isinstance(error, OSError) and not str(error.filename).startswith(str(folder)):
            status, text, fix = 503, str(error), "Reload the page."  # a file was removed while it was read
        elif isinstance(error, OSError | sqlite3.Error):
            status, text, fix = 503, f"The cache folder {folder} can't be used: {error}.", f"{CACHE_FIX}."
        name = request.path_params.get("run") if hasattr(request, "path_params") else None
        run = self.runs.get(name) if name else None
        title = "Not found" if status == 404 else "Error"
        return self._page("message", status, run=run, title=title, sub=text, fix=fix, text=None, more="")

    # --- runs

    def list_runs(self, request: Request) -> Response:
        """Show the list of runs."""
        if self.runs.single:
            run = self.runs.get(self.runs.root.name)
            if run is not None:
                return RedirectResponse(here(run), 303)
        order = Order.of(request.query_params)
        return self._page(
            "runs",
            title="Runs",
            events="/events",
            folder=_at_home(self.runs.root),
            listing=page_of(self.runs, order, "".join(_folders(request, "after")[:1])),
            order=order,
            most_sorted=MOST_SORTED,
        )

    def overview(self, request: Request) -> Response:
        """Show the four answers and the curves of a run, or the results of an evaluation."""
        run = self._indexed(request)
        if run.is_evaluation:
            return self._page("evaluation", page="overview", events=here(run, "events"), **contents.evaluation(run))
        around = _whole(request.query_params.get("around"))
        return self._page("overview", events=here(run, "events"), **contents.overview(run, around))

    def held_out(self, request: Request) -> Response:
        """Show the held-out scores of a training run."""
        return self._page("evaluations", **contents.held_out(self._indexed(request)))

    def _chosen(self, request: Request) -> list[RunView]:
        """Return the runs named by `runs=A&runs=B`, or by `runs=A,B`; a run's name may contain a comma."""
        given = _folders(request, "runs")
        names = given if len(given) > 1 else "".join(given).split(",")
        chosen = [run for name in [*dict.fromkeys(names)][:MOST_COMPARED] if (run := self.runs.get(name)) is not None]
        if len(chosen) < 2:
            raise HTTPException(404, "Comparing needs two runs of this folder: /compare?runs=A,B")
        _check_size(chosen)
        return chosen

    def compare(self, request: Request) -> Response:
        """Show several runs side by side."""
        chosen = self._chosen(request)
        for run in chosen:
            run.index.update(AT_ONCE)
        return self._page(
            "compare",
            title="Compare",
            runs=chosen,
            settings=evaluations.different_settings(chosen),
            pairs=evaluations.pairs(chosen, self._comparisons),
            confidence=CONFIDENCE,
            training=any(run.metrics for run in chosen),
        )

    def compare_charts(self, request: Request) -> Response:
        """Return the curves of several runs as JSON."""
        chosen = self._chosen(request)
        named = {run.name: run.metrics for run in chosen}  # runs without metrics too, so that each run keeps its colour
        scores = {run.scored_by for run in chosen if run.metrics}
        score = scores.pop() if len(scores) == 1 else ""
        return _json({"charts": [chart.data() for chart in charts.charts(named, score)]})

    # --- trajectories

    def trajectories(self, request: Request) -> Response:
        """Show the list of trajectories."""
        run = self._indexed(request)
        chosen = Filter.of(request.query_params)
        return self._page(
            "trajectories",
            run=run,
            title=f"Trajectories of {run.name}",
            chosen=chosen,
            sorts=SORTS,
            events=here(run, "events"),
            listed=run.queries.listed(chosen),
            facets=run.queries.facets(chosen),
            progress=run.index.progress(),
        )

    def trajectory(self, request: Request) -> Response:
        """Show one episode."""
        run, row = self._row(request)
        tab = request.query_params.get("tab", "")
        file, offset = run.index.place(row["key"])
        before, behind = run.queries.neighbours(row)
        members = run.queries.group(row["kind"], row["grp"]) if row["grp"] else []
        values: dict[str, Any] = {
            "run": run,
            "title": row["id"],
            "row": row,
            "tab": tab,
            "before": before,
            "behind": behind,
            "members": members,
            "file": file.name,
            "offset": offset,
            "unreadable": "",
            "piece_url": place(run, row, "piece") + "?",
        }
        try:
            trajectory, line = records.read(run.index, row)
        except UnreadableError as error:
            return self._page("trajectory", **{**values, "unreadable": str(error)})
        values |= {
            "error": trajectory.error or "",
            "reason": trajectory.reason,
            "why_failed": trajectory.failures,
            "scores": score_lines(trajectory.scores),
            "not_cheat_proof": bool(trajectory.metrics.get(NOT_CHEAT_PROOF)),
            "components": episode.figures(trajectory.metrics),
            "never_called": run.queries.constants["tools"]
            and not row["calls"]
            and row["result"] in ("partial", "wrong"),
            "facts": [*episode.facts(row, trajectory, episode.against(row, members)), *episode.training(run, row)],
            "credits": episode.credits(run, row),
            "times": episode.times(row),
        }
        if tab == "tokens":
            vocabulary = run.vocabulary()
            turns = records.tokens(trajectory, vocabulary)
            tokens_url = place(run, row, "tokens")
            values |= {"learned": episode.learned(run, row)}
            values |= {"turns": turns, "has_vocabulary": vocabulary is not None, "tokens_url": tokens_url}
        elif tab == "raw":
            raw = _indented(line)
            values |= {"raw": raw[: text.SHOWN], "raw_left": len(raw) > text.SHOWN}
        else:
            messages = records.conversation(trajectory)
            shown = messages[: records.MOST_MESSAGES]
            values |= {"messages": shown, "more_messages": len(messages) - len(shown)}
        return self._page("trajectory", **values)

    def tokens(self, request: Request) -> Response:
        """Return the data of an episode's tokens as JSON."""
        run, row = self._row(request)
        trajectory, _ = records.read(run.index, row)
        group = run.queries.group(row["kind"], row["grp"]) if row["grp"] else []
        advantage = episode.against(row, group)
        trained = episode.trained(run, row)
        if trained is not None and trained[2] is not None and math.isfinite(trained[2].advantage):
            advantage = trained[2].advantage
        turns = records.tokens(trajectory, run.vocabulary())
        return _json(records.token_data(turns, advantage, trained is not None))

    def piece(self, request: Request) -> Response:
        """Show the rest of a long text."""
        run, row = self._row(request)
        wanted, start = request.query_params.get("message", ""), _whole(request.query_params.get("start")) or 0
        trajectory, line = records.read(run.index, row)
        number = _whole(wanted)
        messages = trajectory.messages
        if wanted == "raw":
            whole = _indented(line)
        elif number is not None and number < len(messages):
            whole = messages[number].content
        else:
            raise HTTPException(404, "This episode has no such message.")
        end = start + text.SHOWN
        more = f"{place(run, row, 'piece')}?message={quote(wanted)}&start={end}" if end < len(whole) else ""
        sub = f"characters {start:,} to {min(end, len(whole)):,} of {len(whole):,}"
        title = f"{row['id']}, {'raw' if number is None else messages[number].role}"
        return self._page(
            "message", run=run, page="trajectory", title=title, sub=sub, fix="", text=whole[start:end], more=more
        )

    def group(self, request: Request) -> Response:
        """Show the episodes of one group side by side."""
        run = self._indexed(request)
        kind, name = request.query_params.get("kind", "train"), request.query_params.get("group", "")
        rows = run.queries.group(kind, name) if name else []
        if not rows:
            raise HTTPException(404, "This run has no such group.")
        valid = episode.rewards(rows)
        prompt, members = records.group_members(run.index, rows)
        best, differences = records.differences(rows)
        return self._page(
            "group",
            run=run,
            title=f"Group {name}",
            group=name,
            rows=rows,
            prompt=prompt,
            members=members,
            best=best,
            differences=differences,
            mean=sum(valid) / len(valid) if valid else None,
        )

    # --- figures

    def charts_data(self, request: Request) -> Response:
        """Return the curves of a run as JSON."""
        return _json({"charts": [chart.data() for chart in contents.charts_of(self._run(request))]})

    def _chart(self, request: Request) -> charts.Chart:
        run, key = self._run(request), request.query_params.get("key", "")
        chart = next((chart for chart in contents.charts_of(run) if chart.key == key), None)
        if chart is None:
            raise HTTPException(404, "This run has no such chart.")
        return chart

    def chart_svg(self, request: Request) -> Response:
        """Return a chart as an SVG picture."""
        bounds = [_figure(request.query_params.get(name)) for name in ("low", "high")]
        return Response(charts.svg(self._chart(request), *bounds), media_type="image/svg+xml")

    def chart_csv(self, request: Request) -> Response:
        """Return a chart as a CSV table."""
        return Response(
            charts.table(self._chart(request)).encode("utf-8", "replace"), media_type="text/csv; charset=utf-8"
        )

    def time(self, request: Request) -> Response:
        """Show the time account and the timeline of a run."""
        run = self._run(request)
        return self._page("time", events=here(run, "events"), **contents.time(run))

    def timeline_data(self, request: Request) -> Response:
        """Return the visible part of the timeline as JSON."""
        run = self._run(request)
        low, high = (_figure(request.query_params.get(name)) for name in ("from", "to"))
        return _json(run.timeline.window(low, high, _whole(request.query_params.get("width")) or 1200))

    # --- files

    def recipe(self, request: Request) -> Response:
        """Show the definition of the reward, and the resolved recipe."""
        return self._page("recipe", **contents.recipe(self._run(request)))

    def log(self, request: Request) -> Response:
        """Show the end of the log."""
        run = self._run(request)
        sub, content = contents.part_of(run.root / "run.log", last=True)
        return self._page("message", run=run, page="log", title="Log", sub=sub, fix="", text=content or None, more="")

    def static_file(self, request: Request) -> Response:
        """Return one of the page's static files."""
        content = static_files().get(request.path_params["name"])
        if content is None:
            raise HTTPException(404, "This file does not exist.")
        kind = TYPES.get(Path(request.path_params["name"]).suffix, "application/octet-stream")
        return Response(content, media_type=kind, headers={"cache-control": "private, max-age=31536000, immutable"})

    # --- change notifications

    async def events(self, request: Request) -> Response:
        """Stream change notifications to a page, which then reloads its content."""
        name = request.path_params.get("run")
        run = self._run(request) if name else None
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(news(self.runs, run, self.ending), media_type="text/event-stream", headers=headers)


def _at_home(path: Path) -> str:
    """Abbreviate the user's home folder in a path to `~`, as a shell accepts it."""
    with suppress(ValueError, RuntimeError):
        return str(Path("~") / path.relative_to(Path.home()))
    return str(path)


def _folders(request: Request, key: str) -> list[str]:
    """Return the folder names that the query has for a key; their bytes need not be UTF-8."""
    query = parse_qsl(request.scope["query_string"].decode("latin-1"), errors="surrogateescape")
    return [value for name, value in query if name == key]


def _check_size(runs: Sequence[RunView]) -> None:
    """Refuse to compare runs whose metrics don't fit in memory together."""
    size = 0
    for run in runs:
        with suppress(OSError):
            size += (run.root / "metrics.jsonl").stat().st_size
    if size > LARGEST_TABLE:
        raise HTTPException(422, f"The metrics of these runs have {size:,} bytes; at most {LARGEST_TABLE:,} are read.")


def _json(data: Any) -> Response:
    body = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


def _whole(value: str | None) -> int | None:
    return int(value) if value is not None and value.isascii() and value.isdigit() and len(value) < 16 else None


def _figure(value: str | None) -> float | None:
    with suppress(ValueError):
        number = float(value or "nan")
        return number if math.isfinite(number) else None
    return None


def _indented(line: bytes) -> str:
    """Indent a record if it is JSON."""
    with suppress(ValueError, RecursionError):
        return json.dumps(json.loads(line), indent=1, ensure_ascii=False)
    return line.decode("utf-8", "replace")
