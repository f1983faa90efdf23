"""A run's report: `report.html`, one self-contained file, and the same as Markdown and as a picture.

It gives the answers of `forge-env show` (`forge_env.view.digest`), curves, example failures and successes, the time
account, and the run's settings and machine. `reward_curve.png` is the headline chart alone.
"""

from __future__ import annotations

import json
import re
import sqlite3
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from markupsafe import Markup

from forge_env.display.curves import Curve, merge_rows, reward_curves, unit_bounds
from forge_env.display.svg import SERIES
from forge_env.events import Subscriber
from forge_env.figures import duration, percent
from forge_env.files import write_whole, written_whole
from forge_env.machine import cache_dir
from forge_env.run.contract import in_a_sentence
from forge_env.run.folder import RunFolder
from forge_env.run.metrics import read_metrics
from forge_env.run.outcome import read_summary
from forge_env.run.run import Run
from forge_env.view import contents
from forge_env.view.charts import REWARD_PANEL, Chart, svg
from forge_env.view.digest import Digest, Example, add_episodes, digest, digest_of, opened
from forge_env.view.records import UnreadableError, conversation
from forge_env.view.rendering import body, fragment, saved_page
from forge_env.view.runs import RunView
from forge_env.visible import one_line, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from forge_env.hacks.findings import Findings
    from forge_env.types import ToolCall

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
PARTS = {"evaluations": "Held-out scores", "time": "Time", "record": "Episodes", "recipe": "Recipe"}
"""Labels of the parts of a page after the overview."""


def write_report(root: Path, out: Path | None = None) -> Path:
    """Write the report of a run or an evaluation as a page, using only files of its folder, and return its path.

    Raises:
        OSError: it can't be written.
        sqlite3.Error: there is no space for the temporary index of the trajectories.
    """
    out = out or root / "report.html"
    write_whole(out, html(root))
    return out


def html(root: Path, cache: Path | None = None) -> str:
    """Render the pages of a run or an evaluation as one self-contained page.

    Args:
        cache: folder for the index of its trajectories; None: a temporary folder.
    """
    with opened(root, cache) as run:
        parts: list[tuple[str, dict[str, Any]]]
        if run.is_evaluation:
            found, drawn = digest_of(run), []
            parts = [("evaluation", contents.evaluation(run))]
        else:
            overview = contents.overview(run)
            found, drawn = overview["found"], contents.charts_of(run)
            time = {**contents.time(run), "has_timeline": False}
            parts = [("overview", overview), ("evaluations", contents.held_out(run)), ("time", time)]
        add_episodes(found, EXAMPLES)
        parts.append(("record", _record(found)))
        with suppress(UnreadableError):
            parts.append(("recipe", {**contents.recipe(run), "facts": []}))
        reward = next((chart for chart in drawn if chart.key == REWARD_PANEL), None)
        shared = {"saved": True, "here": fragment, "picture": _picture(reward)}
        main = Markup().join(
            Markup('<div class="part" id="{}">{}</div>').format(
                "overview" if at == 0 else name, body(name, **{**values, **shared})
            )
            for at, (name, values) in enumerate(parts)
        )
        nav = [("", "Overview"), *((name, PARTS[name]) for name, _ in parts[1:])]
        charts = [chart.data() for chart in drawn]
        return saved_page(main, run.name, charts, run=run, nav=nav, here=fragment, problems=run.problems)


def _picture(chart: Chart | None) -> str:
    """Return a chart as the data URL of a picture; empty without a chart."""
    return "" if chart is None else f"data:image/svg+xml;base64,{b64encode(svg(chart).encode()).decode()}"


def _record(found: Digest) -> dict[str, Any]:
    """The example episodes, and what the other pages don't show: hacks, warnings, stages, the last metrics."""
    tables: list[tuple[str, list[tuple[str, str]]]] = []
    if found.hacks is not None:
        tables.append(("Reward hacking", [*earned(found.hacks)]))
    if isinstance(warnings := found.run.summary.get("warnings"), dict):
        tables.append(("Warnings", [(text, f"{count} x") for text, count in warnings.items()]))
    if isinstance(stages := found.run.summary.get("stages"), dict):
        spent = [(name, duration(value)) for name, value in stages.items() if isinstance(value, int | float)]
        tables.append(("Stages", spent))
    last: dict[str, float] = {}
    for row in found.run.metrics:
        last |= {key: value for key, value in row.items() if key not in ("step", "time") and value is not None}
    examples = [_example(example) for example in found.examples]
    return {"examples": examples, "tables": tables, "last": [(key, f"{last[key]:.6g}") for key in sorted(last)]}


def _example(example: Example) -> dict[str, Any]:
    """Return the title of an episode and its messages; those in the middle of a long one are left out."""
    episode, task = example.episode, one_line(example.episode.task_id, 60)
    messages = conversation(episode, LONGEST)
    if left := max(0, len(messages) - MOST_MESSAGES):
        messages = [*messages[: MOST_MESSAGES // 2], *messages[-(MOST_MESSAGES // 2) :]]
    title = f"{one_line(example.why, 60)}: {one_line(episode.id, 60)}, task {task}, reward {episode.reward:g}"
    return {"title": title, "messages": messages, "left": left, "kind": example.kind}


def earned(hacks: Findings) -> Iterator[tuple[str, str]]:
    """Yield names and values of the short result of `forge-env hacks`."""
    yield "summary", hacks.words + (" (sampled)" if hacks.left_out else "")
    for sign in hacks.signs:
        yield f"{sign.sign}: {sign.reason}", f"{sign.episodes:,} episodes"


# ---
# The answers


def answers(found: Digest) -> Iterator[tuple[str, list[str]]]:
    """Yield each question with its answer in sentences, the short one first."""
    if found.run.is_evaluation:
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


# ---
# Markdown


def markdown(found: Digest) -> str:
    """Render the report for a pull request: the answers, the failures, an example, the settings."""
    lines = [f"## {_plain(found.run.name)}", "", _plain(found.headline), ""]
    for question, sentences in answers(found):
        lines += [f"**{question}** {_plain(in_a_row(sentences))}", ""]
    if found.failures:
        lines += ["| failure | episodes | share |", "|---|---:|---:|"]
        lines += [
            f"| {_plain(item.name)} | {item.count:,} | {percent(item.share)} |" for item in found.failures[:8]
        ] + [""]
    if found.examples:
        lines += [*_folded(found.examples[0])]
    if found.run.contract:
        lines += [f"**{_plain(in_a_sentence(found.run.contract))}**", ""]
        lines += [
            f"- {_plain(item.words)}" for item in found.run.contract if item.verdict in ("doubtful", "broken")
        ] + [""]
    if found.hacks is not None:
        lines += ["**Reward hacking**"]
        lines += [f"- {_plain(name)}: {_plain(value)}" for name, value in earned(found.hacks)] + [""]
    lines += ["<details><summary>Run and machine</summary>", "", "| | |", "|---|---|"]
    lines += [f"| {_plain(name)} | {_plain(value)} |" for name, value in contents.facts(found.run.summary)]
    return "\n".join([*lines, "", "</details>", ""])


def _plain(text: str) -> str:
    """Escape a text so that nothing in it is markup, link or mention."""
    return re.sub(r"([\\`*_{}\[\]<>#|!~@&])", r"\\\1", one_line(text, 600)).replace(
        "://", ":\u2060//".replace("\u2060", " ")
    )


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


def _folded(example: Example) -> Iterator[str]:
    """Yield an episode as a folded code block that its text can't close."""
    texts = []
    for message in example.episode.messages[:MOST_MESSAGES]:
        calls = [f"→ {call.function.name}({arguments_of(call)})" for call in message.tool_calls]
        texts.append("\n".join([f"[{message.role}]", *filter(None, [message.content, *calls])]))
    text = visible("\n\n".join(cut(text) for text in texts))
    fence = "`" * (3 + max((len(run) for run in re.findall("`+", text)), default=0))
    yield from ["<details><summary>A typical failure</summary>", "", f"{fence}text", text, fence, "", "</details>", ""]


CURVES = "curves.png"


def write_card(out: Path, run: Path, kind: Literal["model", "run"]) -> None:
    """Write the card of a published model or run: `README.md` with its metadata and digest, and its curves."""
    found = digest(run, cache=cache_dir())
    write_picture(found, out / CURVES)
    front = yaml.safe_dump(_front(found, kind), sort_keys=False, allow_unicode=True)
    text = f"---\n{front}---\n\n![{kind}: the score over the run]({CURVES})\n\n{markdown(found)}"
    write_whole(out / "README.md", text)


def _front(found: Digest, kind: str) -> dict[str, object]:
    """The metadata that the hub reads from a card."""
    name = found.run.environment.partition(":")[0]
    tags = ["forge-env", *(["reinforcement-learning"] if kind == "model" else []), *([name] if name else [])]
    if kind == "run":
        return {"tags": tags}
    model = found.run.config.get("model")
    base = str(model.get("path", "")) if isinstance(model, dict) else ""
    on_hub = base.count("/") == 1 and not base.startswith((".", "/", "~")) and not Path(base).exists()
    known = {"base_model": base} if on_hub else {}
    return {"library_name": "transformers", "pipeline_tag": "text-generation", **known, "tags": tags}


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

    curves = reward_curves(found.run.metrics, found.run.scored_by)
    wrapped = [(question, wrap(visible(in_a_row(sentences)), 90)[:3]) for question, sentences in answers(found)]
    height = 7.2 if curves else 0.25 + LINE * (3 + sum(len(lines) + 0.35 for _, lines in wrapped))
    figure = Figure(figsize=(10, height), dpi=130)
    top, line = 1 - 0.25 / height, LINE / height
    figure.text(0.04, top, one_line(found.run.name, 80), size=14, weight="bold", va="top", parse_math=False)
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
