"""Tables of a summary: Markdown for the folder, the same cells for the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, TextIO

from forge_env.evaluation.estimates import Times
from forge_env.figures import duration, state
from forge_env.trajectory import NOT_CHEAT_PROOF
from forge_env.visible import one_line, visible

if TYPE_CHECKING:
    from forge_env.evaluation.estimates import Estimate
    from forge_env.evaluation.summary import EnvironmentSummary, GroupSummary, Summary

SHOWN_TAGS = 40
"""Maximum rows of tags in the report."""
SHOWN_ROWS = 12
"""Maximum rows on a terminal of tables other than the first."""
ALIKE_TASKS = 300
"""Number of tasks below which equal scores of all tasks leave more than 1 % uncertain (3 / n at 95 %, J. A. Hanley and
A. Lippman-Hand, 1983)."""


COUNTS = ("missing", "lost", "crashed", "truncated")
ESTIMATED = "their tokens and cost are estimated at four bytes per token"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text: title, column names, rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    spare: Sequence[str] = ()
    """Columns that a narrow terminal may omit, in the order of omission."""


def figure(estimate: Estimate | None) -> str:
    """Format a value with its error: `0.812 ± 0.013`, or a dash."""
    return "-" if estimate is None else f"{estimate.value:.3f} ± {estimate.stderr:.3f}"


def interval(estimate: Estimate | None) -> str:
    """Format an interval: `0.786 to 0.836`, or an empty string."""
    return "" if estimate is None else f"{estimate.low:.3f} to {estimate.high:.3f}"


def share(value: float | None) -> str:
    """Format a fraction: `0.812`, or a dash."""
    return "-" if value is None else f"{value:.3f}"


def counts(named: Mapping[str, int]) -> str:
    """Format counts by name: `2 time, 1 tokens`."""
    return ", ".join(f"{number} {name}" for name, number in sorted(named.items())) or "0"


def counted(number: int, what: str) -> str:
    """Format a number with its noun: `1 sample`, `12 samples`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def tables(summary: Summary) -> list[Table]:
    """Tables of the scores, then of pass@k, difficulties and tags that have more than one row."""
    result = [_scores(summary)]
    for environment in summary.environments.values():
        if len(environment.pass_at) > 1:
            result.append(_passes(environment))
        for kind, groups in (("difficulty", environment.by_difficulty), ("tag", environment.by_tag)):
            if len(groups) > 1:
                result.append(_groups(environment, kind, groups))
    return result


def _scores(summary: Summary) -> Table:
    percent = f"{100 * summary.confidence:g} % interval"
    columns = ["environment", "tasks", "samples", summary.score_name, percent, "solved", "truncated", "crashed"]
    columns += ["lost", "missing"]
    buggy = any(item.bugs for item in summary.environments.values())
    columns += ["bugs", "bugs as 0"] if buggy else []
    rows = []
    for label, item in summary.environments.items():
        solved = item.pass_at.get(1)
        rows.append(
            [
                f"{label} ({item.split})",
                str(item.tasks),
                str(item.samples),
                figure(item.score),
                interval(item.score),
                "-" if solved is None else f"{solved.value:.3f}",
                counts(item.truncated),
                str(item.crashed),
                counts(item.invalid),
                str(item.missing),
                *([str(item.bugs), figure(item.score_with_bugs or item.score)] if buggy else []),
            ]
        )
    none = [name for index, name in enumerate(columns) if name in COUNTS and all(row[index] == "0" for row in rows)]
    rest = ["tasks", "solved", "samples", percent, "missing", "truncated", "crashed", "lost"]
    return Table(f"{summary.model}", columns, rows, [*none, *(name for name in rest if name not in none)])


def _passes(item: EnvironmentSummary) -> Table:
    rows = [[str(k), figure(at), interval(at), figure(item.pass_all[k])] for k, at in item.pass_at.items()]
    title = f"{item.label}: solved means at least {item.success_threshold:g}"
    return Table(title, ["k", "pass@k", "interval", "pass^k"], rows)


def _groups(item: EnvironmentSummary, kind: str, groups: Mapping[str, GroupSummary]) -> Table:
    single = {name: group for name, group in groups.items() if group.tasks == 1}
    folded = single if len(single) > 1 and kind == "tag" else {}
    shown = [(name, group) for name, group in groups.items() if name not in folded]
    rows = [
        [name, str(group.tasks), str(group.samples), figure(group.score), share(group.solved)]
        for name, group in shown[:SHOWN_TAGS]
    ]
    if len(shown) > SHOWN_TAGS:
        rows.append([f"... {len(shown) - SHOWN_TAGS} more in summary.json", "", "", "", ""])
    if folded:  # a single task is not representative of its tag
        samples = sum(group.samples for group in folded.values())
        shares = [(group.solved, group.samples) for group in folded.values() if group.solved is not None]
        solved = sum(solved * count for solved, count in shares) / samples if shares else None
        name = f"{len(folded)} {kind}s of one task each"
        rows.append([name, str(len(folded)), str(samples), "", share(solved)])
    return Table(f"{item.label} by {kind}", [kind, "tasks", "samples", "score", "solved"], rows, ["samples", "tasks"])


def headlines(summary: Summary) -> list[str]:
    """One line per environment with its score, the number of samples that it covers, and problems."""
    return [headline(item, summary.score_name) for item in summary.environments.values()]


def headline(item: EnvironmentSummary, score_name: str) -> str:
    """Describe one environment's result: `Sums (eval): reward 0.500 ± 0.289 over 4 of 6 samples; 2 lost; ...`."""
    of = "" if item.samples == item.planned else f"{item.samples} of "
    what = f"{item.label} ({item.split}): {score_name} {figure(item.score)} over {of}{counted(item.planned, 'sample')}"
    return "; ".join([what, *exceptions(dataclasses.asdict(item))])


def exceptions(item: Mapping[str, Any]) -> list[str]:
    """Describe samples of an `EnvironmentSummary` (as in summary.json) that a score excludes or counts as crashes."""
    parts = []
    if (asked := item.get("asked", 0)) > (planned := item.get("planned", 0)):
        parts.append(f"{asked} requested, {planned} available")
    left_out = {"not run": item.get("missing", 0), "failed by environment bugs": item.get("bugs", 0)}
    parts += [f"{sum(lost.values())} lost ({counts(lost)})"] if (lost := item.get("invalid")) else []
    parts += [f"{number} {why}" for why, number in left_out.items() if number]
    if bounds := item.get("bounds"):
        low, high = bounds
        parts.append(f"bounds if each of these had the lowest or highest score: {low:.3f} to {high:.3f}")
    if crashed := item.get("crashed"):
        parts.append(f"agent crashed on {crashed} (scored 0), first: {one_line(str(item.get('first_crash')), 300)}")
    if doubtful := item.get("metrics", {}).get(NOT_CHEAT_PROOF):
        parts.append(f"not cheat-proof: {doubtful:.0%} of the samples passed tests in the judged code's process")
    return parts


def footnotes(summary: Summary) -> list[str]:
    """Notes below the tables: meaning of the errors, usage, durations and problems."""
    notes = [
        "± is the standard error, clustered by task; intervals are bootstrapped over tasks. Samples lost to "
        "infrastructure are counted but excluded from scores; truncated samples keep their score; crashed samples "
        "score 0."
    ]
    notes.append(usage(summary))
    if estimated := sum(item.estimated_requests for item in summary.environments.values()):
        asked = sum(item.requests for item in summary.environments.values())
        notes.append(f"{estimated} of {asked} replies had no token count: {ESTIMATED}")
    for item in summary.environments.values():
        if item.bugs:
            notes.append(
                f"{item.label}: environment bugs on {counted(item.bugs, 'sample')}, scored 0 in the last column only; "
                f"the first: {item.first_bug}"
            )
        if item.samples:
            account = Times(item.wall_s, item.generate_s, item.step_s, item.reset_s, item.close_s, item.waited_s)
            notes.append(f"{item.label}: a sample took {account.words()}; {item.turns:.1f} turns")
        if item.score is not None and item.score.low == item.score.high and 0 < item.tasks < ALIKE_TASKS:
            notes.append(
                f"{item.label}: all {item.tasks} tasks have the same score, which says little about other "
                f"tasks: up to {min(100, 300 // item.tasks)} % of all may score differently (95 % confidence)"
            )
        if item.samples and item.success_threshold is None:
            notes.append(
                f"{item.label}: the maximum reward is unknown, so no task counts as solved; set max_reward of the "
                "environment or `success` of the evaluation"
            )
        if item.cut_replies:
            notes.append(f"{item.label}: {item.cut_replies} replies were cut at max_tokens")
    if summary.request_errors:
        notes.append(f"failed requests, retries included: {counts(summary.request_errors)}")
    return notes


def outline(summary: Summary) -> list[str]:
    """Four lines: model and status, two of scores, usage."""
    items = [*summary.environments.values()]
    played, planned = (sum(getattr(item, name) for item in items) for name in ("samples", "planned"))
    scores = headlines(summary)
    if len(items) == 1:
        scores.append(f"{counted(items[0].tasks, 'task')}, {100 * summary.confidence:g} % interval {_range(items[0])}")
    elif len(items) > 2:
        scores[1:] = [f"and {len(items) - 1} more environments; print(result) shows all"]
    of = f"{played} of {counted(planned, 'sample')}"
    head = f"{summary.model}: {state(summary.status)}, {of} in {duration(summary.wall_s)}"
    return [one_line(line, 160) for line in (head, *(scores or ["no environment"]), usage(summary))]


def _range(item: EnvironmentSummary) -> str:
    return interval(item.score) or "unknown"


def usage(summary: Summary) -> str:
    """Tokens and cost in a line."""
    tokens = f"{summary.prompt_tokens:,} prompt and {summary.completion_tokens:,} completion tokens"
    return tokens + (f", cost {summary.cost:.4g}" if summary.cost else "")


def html(shown: Sequence[Table], notes: Iterable[str]) -> str:
    """Render tables as HTML, for notebooks."""
    return "".join([*map(_html, shown), *(f"<p><small>{escape(visible(note))}</small></p>" for note in notes)])


def _html(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(visible(cell))}</{tag}>' for cell in cells)}</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    head = f"<caption>{escape(visible(table.title))}</caption><thead>{row(table.columns, 'th')}</thead>"
    return f"<table>{head}<tbody>{body}</tbody></table>"


def markdown(summary: Summary) -> str:
    """Render the report in Markdown."""
    lines = ["# Evaluation", "", *(f"{_cell(line)}\n" for line in headlines(summary))]
    for table in tables(summary):
        lines += [f"## {_cell(table.title)}", "", _row(table.columns), _row(["---"] * len(table.columns))]
        lines += [*(_row(row) for row in table.rows), ""]
    return "\n".join([*lines, *(f"- {note}" for note in footnotes(summary))]) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def print_tables(tables: Sequence[Table], notes: Iterable[str], stream: TextIO) -> None:
    """Print tables for people, the first (the result) last. No table is wider than the terminal.

    If there is no room for all columns, those in `Table.spare` are omitted and listed in a line below. Names that are
    too long are cut. Without a terminal nothing is omitted.
    """
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape as escape_markup
    from rich.table import Table as RichTable

    console = Console(file=stream, highlight=False, emoji=False, width=None if stream.isatty() else 160)
    narrow = stream.isatty()
    for note in notes:
        console.print(
            f"[dim]{escape_markup(visible(note))}[/]", soft_wrap=True
        )  # a path broken over lines can't be clicked
    for table in [*tables[1:], *tables[:1]]:
        shown, left_out = columns_that_fit(table, console.width)
        rows = table.rows
        cut = len(rows) - SHOWN_ROWS if narrow and table is not tables[0] and len(rows) > SHOWN_ROWS + 1 else 0
        drawn = RichTable(title=escape_markup(visible(table.title)), box=SIMPLE, title_justify="left", pad_edge=False)
        room = console.width - 3 - sum(column_width(table, index) + 3 for index in shown[1:])
        for index in shown:
            drawn.add_column(
                escape_markup(visible(table.columns[index])),
                justify="right" if index else "left",
                no_wrap=True,
                overflow="ellipsis",
                min_width=column_width(table, index) if index else None,
                max_width=None if index else max(room, 3),
            )
        for row in rows[: len(rows) - cut]:
            drawn.add_row(*(escape_markup(visible(row[index])) for index in shown))
        if cut:
            drawn.add_row(f"[dim]... {cut} more in report.md[/]", *[""] * (len(shown) - 1))
        console.print(drawn)
        if left_out:
            console.print(f"[dim]hidden columns: {escape_markup(', '.join(left_out))}[/]", soft_wrap=True)


SHORTEST_NAME = 16
"""Characters of the first column that remain visible before another column is omitted."""


def column_width(table: Table, place: int) -> int:
    """Width of a column in terminal cells."""
    from rich.cells import cell_len

    return max(cell_len(visible(text)) for text in [table.columns[place], *(row[place] for row in table.rows)])


def columns_that_fit(table: Table, width: int) -> tuple[list[int], list[str]]:
    """Indices of the columns that fit into `width` cells, and the names of omitted columns that aren't empty."""
    widths = [column_width(table, index) for index in range(len(table.columns))]
    if widths:
        widths[0] = min(widths[0], SHORTEST_NAME)
    shown, left_out = list(range(len(widths))), []
    for name in table.spare:
        if sum(widths[index] + 3 for index in shown) <= width:
            break
        index = table.columns.index(name)
        if index in shown:
            shown.remove(index)
            if any(row[index] not in ("", "0", "-") for row in table.rows):
                left_out.append(name)
    return shown, left_out
