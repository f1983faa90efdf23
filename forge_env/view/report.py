"""A run's report: `report.html`, one self-contained file, and the same as Markdown and as a picture.

It gives the answers of `forge-env show` (`forge_env.view.digest`), curves, example failures and successes, the time
account, and the run's settings and machine. `reward_curve.png` is the headline chart alone.
"""

from __future__ import annotations

import json
import re
import sqlite3
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from forge_env.display.curves import (
    PANELS,
    Curve,
    Panel,
    curve,
    merge_rows,
    reward_curves,
    time_account,
    unit_bounds,
)
from forge_env.display.svg import SERIES, legend, line_chart, share_bars
from forge_env.events import Subscriber
from forge_env.figures import duration, number, percent
from forge_env.files import write_whole, written_whole
from forge_env.reading import LARGEST_RECIPE, read_text
from forge_env.run.contract import CLAUSES, in_a_sentence
from forge_env.run.folder import RunFolder
from forge_env.run.metrics import read_metrics
from forge_env.run.outcome import read_summary
from forge_env.run.run import Run
from forge_env.run.state import held_out_scores
from forge_env.view.runs import RunView
from forge_env.visible import one_line, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from forge_env.hacks.findings import Findings
    from forge_env.types import Message, ToolCall
    from forge_env.view.digest import Digest, Example

Row = Mapping[str, Any]
EXAMPLES = 3
"""Failures, and successes, in a report."""
LONGEST, MOST_MESSAGES = 2_000, 40
"""Maximum characters of one text of an example, and messages of one example; the run's folder has the rest."""
QUESTIONS = (
    "Did it learn?",
    "What does a typical failure look like?",
    "Why did the reward move?",
    "What limited the speed?",
)
LINE = 0.223
"""Inches of a line of text in a picture."""
SIZES = {"narrow": (340, 230), "middle": (960, 320), "wide": (1900, 460)}
"""Sizes of the headline chart: a drawing scales together with its text, so each width of the page has its own."""


def write_report(root: Path, out: Path | None = None) -> Path:
    """Write the report of a run or an evaluation as a page, using only files of its folder, and return its path.

    Raises:
        OSError: it can't be written.
        sqlite3.Error: there is no space for the temporary index of the trajectories.
    """
    from forge_env.view.digest import digest

    out = out or root / "report.html"
    write_whole(out, html(digest(root, examples=EXAMPLES)))
    return out


def html(found: Digest) -> str:
    """Render the page of a run or an evaluation."""
    when = [str(found.summary[name]) for name in ("started", "finished") if found.summary.get(name)][-1:]
    subtitle = " · ".join([found.headline, *when])
    return page(found.name, found.state, subtitle, _body(found))


def page(name: str, state: str, subtitle: str, body: Iterable[str]) -> str:
    """Render a self-contained page.

    Args:
        state: word beside it, which is also its class: "finished", "failed", ...
    """
    text = files("forge_env.view").joinpath("templates", "report.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL)
    assert script is not None
    return Template(text).substitute(
        script_hash=b64encode(sha256(script[1].encode()).digest()).decode(),
        title=escaped(f"{name} · forge-env"),
        name=escaped(name),
        exit=escaped(state),
        subtitle=escaped(subtitle),
        body="\n".join(body),
    )


def escaped(text: object) -> str:
    """Escape a text for a page."""
    return escape(visible(str(text)))


def _body(found: Digest) -> Iterator[str]:
    if error := found.summary.get("error"):
        yield f'<section class="failed"><h2>Error</h2><pre>{escaped(error)}</pre></section>'
    yield f'<div class="four">{"".join(_cards(found))}</div>'
    if curves := _thin(reward_curves(found.rows, found.scored_by)):
        title = "<h2>Reward <small>by training step; bars: one standard error</small></h2>"
        yield f"<section>{title}{_headline(curves)}"
        yield from (f"<p class='soft'>{escaped(text)}</p>" for text in mixed_scores(found.rows))
        yield "</section>"
    if panels := [text for panel in PANELS if (text := _panel(panel, found.rows))]:
        yield f'<div class="grid">{"".join(panels)}</div>'
    if account := time_account(found.rows):
        title = "<h2>Where the time went <small>share of each actor's time; hatched: waiting</small></h2>"
        advice = "".join(f"<p><code>{escaped(key)}</code>: {escaped(text)}</p>" for key, text in found.limit.advice)
        yield f"<section>{title}{share_bars(account)}{advice}</section>"
    yield from _read(found)
    yield from _tables(found)
    config = found.root / "config.yaml"
    if config.exists():
        recipe = escaped(read_text(config, largest=LARGEST_RECIPE))
        yield (f'<section><details class="config"><summary>Recipe</summary><pre>{recipe}</pre></details></section>')


# ---
# The answers


def answers(found: Digest) -> Iterator[tuple[str, list[str]]]:
    """Yield each question with its answer in sentences, the short one first."""
    if found.is_evaluation:
        yield "What is the score?", found.scores or ["No score is recorded."]
        yield QUESTIONS[1], [found.failure_words, found.unsolved_words]
        yield QUESTIONS[3], [found.limit.words, found.limit.detail]
        return
    change = ""
    if found.learned.start is not None and found.learned.end is not None:
        change = f"{found.learned.measure}: {found.learned.start:.3f} → {found.learned.end:.3f}"
    yield QUESTIONS[0], [found.learned.words, change, *found.learned.further]
    yield QUESTIONS[1], [found.failure_words, found.unsolved_words]
    yield QUESTIONS[2], found.reasons.told
    yield QUESTIONS[3], [found.limit.words, found.limit.detail]


def in_a_row(sentences: Iterable[str]) -> str:
    """Join sentences to running text."""
    return " ".join(text if text.endswith((".", "?")) else f"{text}." for text in sentences if text)


def _cards(found: Digest) -> Iterator[str]:
    from forge_env.view.text import glued

    for index, (question, sentences) in enumerate(answers(found)):
        kind = f' class="{found.learned.verdict}"' if index == 0 and not found.is_evaluation else ""
        texts = [glued(text) for text in sentences if text]
        paragraphs = "".join(f"<p{kind if at == 0 else ''}>{escaped(text)}</p>" for at, text in enumerate(texts))
        yield f"<section><h2>{escaped(question)}</h2>{paragraphs}</section>"


def mixed_scores(rows: Sequence[Row]) -> Iterator[str]:
    """Describe the held-out points that other versions of the policy helped to make."""
    for split in held_out_scores(rows):
        for row in rows:
            share = row.get(f"eval/{split}/share_of_step")
            low, high = (row.get(f"eval/{split}/{name}_version") for name in ("oldest", "newest"))
            if isinstance(share, float) and share < 1 and isinstance(low, float) and isinstance(high, float):
                versions = f"version {low:.0f}" if low == high else f"versions {low:.0f} to {high:.0f}"
                after = f"held-out ({split}) after step {row['step']}"
                yield f"{after}: sampled by {versions}, {percent(share)} by this step's"


# ---
# Charts


def _thin(curves: Iterable[Curve]) -> list[Curve]:
    from forge_env.view.charts import thinned

    return [thinned(line, 600) for line in curves]


def _headline(curves: Sequence[Curve]) -> str:
    label = "Reward and held-out score over steps"
    charts = (
        f'<div class="{name}">'
        + line_chart(
            curves, width=width, height=height, bounds=unit_bounds(curves), label=label, hover=name != "narrow"
        )
        + "</div>"
        for name, (width, height) in SIZES.items()
    )
    return legend([line.label for line in curves]) + "".join(charts)


def _panel(panel: Panel, rows: Sequence[Row]) -> str:
    curves = _thin(line for label, key in panel.series.items() if (line := curve(rows, label, key)).x)
    if not curves:
        return ""
    unit = f" <small>{escape(panel.unit)}</small>" if panel.unit else ""
    chart = line_chart(curves, width=340, height=170, label=panel.title, log=panel.log)
    return f"<section><h2>{escape(panel.title)}{unit}</h2>{legend([line.label for line in curves])}{chart}</section>"


# ---
# Episodes to read, figures to look up


def _read(found: Digest) -> Iterator[str]:
    if found.failures:
        most = max(failure.count for failure in found.failures)
        rows = "".join(
            f"<tr><td>{escaped(failure.name)}{_eg(failure.example)}</td>"
            f'<td class="n whole">{failure.count:,}</td>'
            f'<td class="n whole">{percent(failure.share)}</td>'
            f'<td><span class="bar" style="width:{100 * failure.count / most:.0f}px"></span></td></tr>'
            for failure in found.failures[:12]
        )
        yield f"<section><h2>Failures</h2><table>{rows}</table></section>"
    if found.examples:
        details = "".join(map(_episode, found.examples))
        yield f"<section><h2>Example episodes <small>typical failures, then successes</small></h2>{details}</section>"


def _eg(example: str) -> str:
    return f"<br><small>e.g. {escaped(example)}</small>" if example else ""


def _episode(example: Example) -> str:
    episode, task = example.episode, one_line(example.episode.task_id, 60)
    title = f"{one_line(example.why, 60)}: {one_line(episode.id, 60)}, task {task}, reward {episode.reward:g}"
    messages = episode.messages
    left = len(messages) - MOST_MESSAGES
    shown = messages if left <= 0 else [*messages[: MOST_MESSAGES // 2], *messages[-(MOST_MESSAGES // 2) :]]
    parts = [message_html(message) for message in shown]
    if left > 0:
        parts.insert(MOST_MESSAGES // 2, f'<p class="soft">{left} messages omitted</p>')
    where = f"trajectories/{example.kind}.jsonl"
    parts.append(f'<p class="soft">{escaped(where)}</p>')
    return f"<details><summary>{escaped(title)}</summary>{''.join(parts)}</details>"


def message_html(message: Message) -> str:
    """Format a message with its tool calls; long texts are cut."""
    texts = [f"~ {message.reasoning_content}"] if message.reasoning_content else []
    texts += [message.content] if message.content else []
    texts += [f"→ {call.function.name}({arguments_of(call)})" for call in message.tool_calls]
    shown = "".join(f"<pre dir='auto'>{escaped(cut(text))}</pre>" for text in texts)
    return f'<div class="message {escape(message.role)}"><b>{escape(message.role)}</b>{shown}</div>'


def arguments_of(call: ToolCall) -> str:
    """Format a call's arguments; a single multi-line text is shown with its own line breaks."""
    text = call.function.arguments
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(values, dict) and len(values) == 1 and isinstance(next(iter(values.values())), str):
        key, value = next(iter(values.items()))
        return f"{key}=\n{value}\n" if "\n" in value else f"{key}={value!r}"
    return text


def cut(text: str) -> str:
    """Cut a text to `LONGEST` characters."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\n[... {len(text) - LONGEST:,} more characters]"


def _tables(found: Digest) -> Iterator[str]:
    summary = found.summary
    if found.contract:
        cells = [(CLAUSES[clause.clause], f"{clause.verdict}: {clause.text}") for clause in found.contract]
        yield section("Self-checks", cells)
    if found.hacks is not None:
        yield section("Reward hacking", [*earned(found.hacks)])
    yield section("Run and machine", [*facts(found.summary)])
    if isinstance(scores := summary.get("heldout"), dict) and scores:
        cells = [
            (split, f"{item['start']:.3f} → {item['end']:.3f} ± {item['stderr']:.3f} (standard error, n={item['n']})")
            for split, item in scores.items()
            if isinstance(item, dict)
            and all(isinstance(item.get(name), int | float) for name in ("start", "end", "stderr", "n"))
        ]
        yield section("Held-out scores", cells)
    if isinstance(warnings := summary.get("warnings"), dict) and warnings:
        yield section("Warnings", [(text, f"{count} x") for text, count in warnings.items()])
    if isinstance(stages := summary.get("stages"), dict) and stages:
        yield section(
            "Stages", [(name, duration(spent)) for name, spent in stages.items() if isinstance(spent, int | float)]
        )
    last: dict[str, float] = {}
    for row in found.rows:
        last |= {key: value for key, value in row.items() if key not in ("step", "time") and value is not None}
    if last:
        yield section("Last value of every metric", [(key, f"{last[key]:.6g}") for key in sorted(last)], folded=True)


def earned(hacks: Findings) -> Iterator[tuple[str, str]]:
    """Yield names and values of the short result of `forge-env hacks`."""
    yield "summary", hacks.words + (" (sampled)" if hacks.left_out else "")
    for sign in hacks.signs:
        yield f"{sign.sign}: {sign.reason}", f"{sign.episodes:,} episodes"


def facts(summary: Row) -> Iterator[tuple[str, str]]:
    """Yield names and values of the run's settings, machine and totals."""
    bound = summary.get("max_off_policy_steps")
    known = {
        "environment": summary.get("environment"),
        "model": summary.get("model"),
        "seed": summary.get("seed"),
        "training steps": summary.get("steps"),
        "started": summary.get("started"),
        "finished": summary.get("finished"),
        "wall time": duration(wall_s) if isinstance(wall_s := summary.get("wall_s"), int | float) and wall_s else None,
        "sandbox engine": summary.get("engine"),
        "tokens generated": number(tokens) if isinstance(tokens := summary.get("tokens_generated"), int) else None,
        "episodes": number(played) if isinstance(played := summary.get("episodes"), int) else None,
        "episodes lost to environment bugs": summary.get("episodes_bugs") or None,
        f"largest staleness (bound {bound})": summary.get("max_staleness") if bound is not None else None,
    }
    yield from ((name, str(value)) for name, value in known.items() if value not in (None, ""))
    if isinstance(versions := summary.get("versions"), dict):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    if isinstance(machine := summary.get("machine"), dict):
        gpus = listed if isinstance(listed := machine.get("gpus"), list) and listed else ["no GPU"]
        yield (
            "machine",
            f"{machine.get('processor')}, {machine.get('cpus')} CPUs, {machine.get('memory_gb')} GiB; "
            + (f"{', '.join(map(str, gpus))}; {machine.get('system')}"),
        )


def section(title: str, cells: Sequence[tuple[str, str]], *, folded: bool = False) -> str:
    """A section with a table of names and values; `folded` shows only the title until it is opened."""
    body = "".join(f'<tr><td>{escaped(name)}</td><td class="v">{escaped(value)}</td></tr>' for name, value in cells)
    if folded:
        return f"<section><details><summary>{escape(title)}</summary><table>{body}</table></details></section>"
    return f"<section><h2>{escape(title)}</h2><table>{body}</table></section>"


# ---
# Markdown


def markdown(found: Digest) -> str:
    """Render the report for a pull request: the answers, the failures, an example, the settings."""
    lines = [f"## {_plain(found.name)}", "", _plain(found.headline), ""]
    for question, sentences in answers(found):
        lines += [f"**{question}** {_plain(in_a_row(sentences))}", ""]
    if found.failures:
        lines += ["| failure | episodes | share |", "|---|---:|---:|"]
        lines += [
            f"| {_plain(item.name)} | {item.count:,} | {percent(item.share)} |" for item in found.failures[:8]
        ] + [""]
    if found.examples:
        lines += [*_folded(found.examples[0])]
    if found.contract:
        lines += [f"**{_plain(in_a_sentence(found.contract))}**", ""]
        lines += [f"- {_plain(item.words)}" for item in found.contract if item.verdict in ("doubtful", "broken")] + [""]
    if found.hacks is not None:
        lines += ["**Reward hacking**"]
        lines += [f"- {_plain(name)}: {_plain(value)}" for name, value in earned(found.hacks)] + [""]
    lines += ["<details><summary>Run and machine</summary>", "", "| | |", "|---|---|"]
    lines += [f"| {_plain(name)} | {_plain(value)} |" for name, value in facts(found.summary)]
    return "\n".join([*lines, "", "</details>", ""])


def _plain(text: str) -> str:
    """Escape a text so that nothing in it is markup, link or mention."""
    return re.sub(r"([\\`*_{}\[\]<>#|!~@&])", r"\\\1", one_line(text, 600)).replace(
        "://", ":\u2060//".replace("\u2060", " ")
    )


def _folded(example: Example) -> Iterator[str]:
    """Yield an episode as a folded code block that its text can't close."""
    texts = []
    for message in example.episode.messages[:MOST_MESSAGES]:
        calls = [f"→ {call.function.name}({arguments_of(call)})" for call in message.tool_calls]
        texts.append("\n".join([f"[{message.role}]", *filter(None, [message.content, *calls])]))
    text = visible("\n\n".join(cut(text) for text in texts))
    fence = "`" * (3 + max((len(run) for run in re.findall("`+", text)), default=0))
    yield from ["<details><summary>A typical failure</summary>", "", f"{fence}text", text, fence, "", "</details>", ""]


# ---
# The end of a run


class ReportWriter(Subscriber):
    """Writes the report and the headline chart when a run has ended."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def ended(self, wall_s: float) -> None:
        """Write both, and note the held-out scores; a report that can't be written is a warning."""
        run = self._run
        try:
            summary = read_summary(run.folder.summary)
            drawn = write_reward_curve(run.folder)
            write_report(run.folder.root)
        except (OSError, sqlite3.Error) as error:  # a full disk must not hide how the run ended
            run.warn(f"Can't write the report: {error}")
            return
        if summary.get("heldout_start") is not None and summary["steps"]:
            run.note(
                f"held-out {summary['heldout_start']:.3f} -> {summary['heldout_end']:.3f} "
                f"in {summary['steps']} steps and {duration(wall_s)}"
            )
        if drawn:
            run.note(f"report: {run.folder.report}")


# ---
# Pictures


def write_reward_curve(folder: RunFolder) -> bool:
    """Draw the report's headline chart as a PNG file; return False if there is nothing to draw."""
    curves = reward_curves(merge_rows(read_metrics(folder.metrics)), RunView(folder.root).scored_by)
    if not curves:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, curves)
    axes.set_title(folder.name, parse_math=False)
    _save(figure, folder.reward_curve)
    return True


def _save(figure: Figure, out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    with written_whole(out) as staging:
        figure.savefig(staging, format="png")


def _draw(axes: Axes, curves: Sequence[Curve]) -> None:
    from matplotlib.ticker import MaxNLocator

    for index, line in enumerate(curves):
        colour = SERIES[index % len(SERIES)]
        if any(line.error):
            axes.plot(line.x, line.y, color=colour, alpha=0.3, linewidth=1.3)
            axes.errorbar(
                line.x, line.y, line.error, label=line.label, color=colour, fmt="o", ms=4, capsize=2, clip_on=False
            )
        else:
            alone = "o" if len(line.x) == 1 else ""
            axes.plot(line.x, line.y, label=line.label, color=colour, linewidth=1.3, marker=alone, ms=4)
    if (bounds := unit_bounds(curves)) is not None:
        axes.set_ylim(bounds)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set(xlabel="training step", ylabel="reward")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def write_picture(found: Digest, out: Path) -> None:
    """Draw the answers and the reward as a picture of about 1,300 by 900 pixels."""
    from textwrap import wrap

    from matplotlib.figure import Figure

    curves = reward_curves(found.rows, found.scored_by)
    wrapped = [(question, wrap(visible(in_a_row(sentences)), 90)[:3]) for question, sentences in answers(found)]
    height = 7.2 if curves else 0.25 + LINE * (3 + sum(len(lines) + 0.35 for _, lines in wrapped))
    figure = Figure(figsize=(10, height), dpi=130)
    top, line = 1 - 0.25 / height, LINE / height
    figure.text(0.04, top, one_line(found.name, 80), size=14, weight="bold", va="top", parse_math=False)
    figure.text(
        0.04, top - 1.3 * line, one_line(found.headline, 110), size=9, color="#62625b", va="top", parse_math=False
    )
    at = top - 2.6 * line
    for question, lines in wrapped:
        figure.text(0.04, at, question, size=9, weight="bold", va="top")
        for text in lines:
            figure.text(0.33, at, text, size=9, va="top", parse_math=False)
            at -= line
        at -= 0.35 * line
    if curves:
        _draw(figure.add_axes((0.07, 0.08, 0.9, max(at - 0.13, 0.3))), curves)
    _save(figure, out)
