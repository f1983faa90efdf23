"""report.html and reward_curve.png: the curves and figures of a run, made from the files of its folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from forge_env.display.curves import PANELS, Panel, curve, merge_rows, reward_curves, time_account, unit_bounds
from forge_env.display.svg import legend, line_chart, number, share_bars
from forge_env.display.terminal import duration
from forge_env.files import write_whole, written_whole
from forge_env.run.folder import RunFolder
from forge_env.run.metrics import read_metrics
from forge_env.run.outcome import read_summary

Row = Mapping[str, Any]


def write_report(folder: RunFolder) -> Path:
    """Write the page and return its path; needs nothing but what lies in the folder."""
    summary = read_summary(folder.summary)
    rows = merge_rows(read_metrics(folder.metrics))
    page = Template(files("forge_env.display").joinpath("report.html").read_text(encoding="utf-8"))
    subtitle = f"{summary.get('environment', '')} · seed {summary.get('seed', '')} · {summary.get('finished', '')}"
    text = page.substitute(
        title=escape(f"{folder.name} · forge-env"),
        name=escape(folder.name),
        exit=escape(str(summary.get("exit", "running"))),
        subtitle=escape(subtitle),
        body="\n".join(_body(folder, summary, rows)),
    )
    write_whole(folder.report, text)
    return folder.report


def _body(folder: RunFolder, summary: Row, rows: Sequence[Row]) -> Iterator[str]:
    if error := summary.get("error"):
        yield f'<section class="failed"><h2>Error</h2><pre>{escape(str(error))}</pre></section>'
    yield _tiles(summary)
    curves = reward_curves(rows)
    if curves:
        label = "Reward and held-out score over steps"
        chart = line_chart(curves, width=960, height=300, bounds=unit_bounds(curves), label=label)
        keys = legend([line.label for line in curves])
        yield f"<section><h2>Reward <small>over training steps</small></h2>{keys}{chart}</section>"
    if panels := [text for panel in PANELS if (text := _panel(panel, rows))]:
        yield f'<div class="grid2">{"".join(panels)}</div>'
    if account := time_account(rows):
        title = "<h2>Where the time went <small>share of every actor</small></h2>"
        yield f"<section>{title}{share_bars(account)}</section>"
    yield from _tables(summary, rows)
    if folder.config.exists():
        recipe = escape(folder.config.read_text(encoding="utf-8"))
        yield f"<section><details><summary>Recipe</summary><pre>{recipe}</pre></details></section>"


def write_reward_curve(folder: RunFolder) -> bool:
    """Draw the page's headline as a picture, for where no page can be shown; False when there is nothing to draw."""
    curves = reward_curves(merge_rows(read_metrics(folder.metrics)))
    if not curves:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, line in enumerate(curves):
        colour = f"C{index}"
        if any(line.error):
            axes.errorbar(line.x, line.y, line.error, label=line.label, color=colour, marker="o", ms=4, capsize=2)
        else:
            axes.plot(line.x, line.y, label=line.label, color=colour, alpha=0.8, linewidth=1.3)
    if (bounds := unit_bounds(curves)) is not None:
        axes.set_ylim(bounds)
    axes.set(xlabel="training step", ylabel="reward", title=folder.name)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    with written_whole(folder.reward_curve) as staging:
        figure.savefig(staging, format="png")
    return True


def _tiles(summary: Row) -> str:
    start, end = summary.get("heldout_start"), summary.get("heldout_end")
    bound = summary.get("max_off_policy_steps")
    tiles = [
        ("held-out score", f"{start:.3f} → {end:.3f}" if start is not None and end is not None else "-"),
        ("training steps", number(summary.get("steps") or 0)),
        ("wall time", duration(float(summary.get("wall_s") or 0.0))),
        ("sandbox engine", str(summary.get("engine") or "-")),
        ("tokens generated", number(summary.get("tokens_generated") or 0)),
        ("discarded as stale", number(summary.get("tokens_discarded_stale") or 0)),
        (f"largest staleness (bound {bound})", number(summary.get("max_staleness") or 0)),
    ]
    cells = (f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _panel(panel: Panel, rows: Sequence[Row]) -> str:
    curves = [line for label, key in panel.series.items() if (line := curve(rows, label, key)).x]
    if not curves:
        return ""
    unit = f" <small>{escape(panel.unit)}</small>" if panel.unit else ""
    keys = legend([line.label for line in curves]) if len(curves) > 1 else ""
    chart = line_chart(curves, label=panel.title)
    return f"<section><h2>{escape(panel.title)}{unit}</h2>{keys}{chart}</section>"


def _tables(summary: Row, rows: Sequence[Row]) -> Iterator[str]:
    if scores := summary.get("heldout"):
        cells = [
            (split, f"{item['start']:.3f} → {item['end']:.3f} ± {item['stderr']:.3f} (n={item['n']})")
            for split, item in scores.items()
        ]
        yield _table("Held-out scores", cells)
    if warnings := summary.get("warnings"):
        yield _table("Warnings", [(text, f"{count} x") for text, count in warnings.items()])
    if stages := summary.get("stages"):
        yield _table("Stages", [(name, duration(float(seconds))) for name, seconds in stages.items()])
    last: dict[str, float] = {}
    for row in rows:
        last |= {key: value for key, value in row.items() if key not in ("step", "time") and value is not None}
    if last:
        cells = [(key, f"{last[key]:.6g}") for key in sorted(last)]
        yield _table("Every metric, last value", cells, folded=True)


def _table(title: str, cells: Sequence[tuple[str, str]], *, folded: bool = False) -> str:
    body = "".join(f'<tr><td>{escape(name)}</td><td class="n">{escape(value)}</td></tr>' for name, value in cells)
    if folded:
        return f"<section><details><summary>{escape(title)}</summary><table>{body}</table></details></section>"
    return f"<section><h2>{escape(title)}</h2><table>{body}</table></section>"
