"""`forge-env show`: a run's results in words, as a report, or line by line while it runs."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forge_env.cli.command import Parser
from forge_env.errors import UsageError
from forge_env.files import write_whole
from forge_env.machine import cache_dir, user_path
from forge_env.run.contract import in_a_sentence
from forge_env.visible import one_line, visible

if TYPE_CHECKING:
    from forge_env.view.digest import Digest

WIDEST = 100
"""Maximum columns of a line, for readability."""
LINES = 10
"""Lines before those that `--follow` waits for."""
SHOWN_REASONS = 4
BAR = 20


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Summarize a run: did it learn, what does a typical failure look like, why did the reward move, what limited "
        "the speed? For an evaluation: its scores and failures. The run may still be running."
    )
    parser.add_argument("run_folder", metavar="RUN", help="folder of a run or an evaluation, or a name in runs/")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--format",
        choices=("text", "html", "md", "png"),
        default="text",
        help="write a report with curves and example episodes instead: a self-contained page, Markdown or a picture",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="file of the report (default: report.html or report.png in RUN; md is printed)"
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="print steps, held-out scores and warnings until the run ends",
    )
    parser.add_argument(
        "--lines", type=int, metavar="N", help=f"print the last N of these lines (with --follow, default: {LINES})"
    )


def run(args: argparse.Namespace) -> int:
    """Print the summary with the result last, write the report, or follow the run."""
    from dataclasses import asdict

    from forge_env.view.digest import digest
    from forge_env.view.recorded import folder_of_run

    if args.out and args.format == "text":
        raise UsageError("--out is the file of a report", fix="add --format html, md or png")
    root = folder_of_run(args.run_folder)
    if args.follow or args.lines is not None:
        from forge_env.cli.follow import follow

        follow(root, LINES if args.lines is None else max(args.lines, 0), to_end=args.follow)
        return 0
    if args.format != "text":
        return _report(root, args.format, args.out)
    summary = digest(root, cache=cache_dir())
    if args.json:
        answers = {
            "name": summary.run.name,
            "state": summary.run.state,
            "episodes": summary.episodes,
            "failures": [asdict(failure) for failure in summary.failures],
            "learned": asdict(summary.learned),
            "reasons": asdict(summary.reasons),
            "limit": asdict(summary.limit),
            "contract": [check.row() for check in summary.run.contract],
        }
        print(json.dumps(answers, indent=2, default=str))
        return 0
    width = min(shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDEST, WIDEST)
    for line in lines(summary, width):
        print(line)
    return 0


def _report(root: Path, form: str, out: str | None) -> int:
    from forge_env.view.digest import digest
    from forge_env.view.report import EXAMPLES, html, markdown, write_picture

    path = user_path(out) if out else root / f"report.{form}"
    if form == "html":
        write_whole(path, html(root, cache_dir()))
    else:
        facts = digest(root, examples=EXAMPLES, cache=cache_dir())
        if form == "png":
            write_picture(facts, path)
        elif out is None:
            print(markdown(facts), end="")
            return 0
        else:
            write_whole(path, markdown(facts))
    print(path)
    return 0


def lines(found: Digest, width: int) -> Iterator[str]:
    """Format the answers in lines of at most `width` columns, the most important last."""
    from forge_env.view.report import QUESTIONS, answers

    yield from _wrapped(f"{found.run.name} · {found.headline}", width)
    for question, sentences in reversed([*answers(found)]):
        if question == QUESTIONS[1] and found.run.contract:
            doubts = [check.words for check in found.run.contract if check.verdict in ("doubtful", "broken")]
            yield from _answer("Can the result be trusted?", [in_a_sentence(found.run.contract), *doubts], width)
        yield from _answer(question, sentences, width)
        if question == QUESTIONS[3]:
            for key, what in found.limit.advice[:2]:
                yield from _wrapped(f"{key}: {what}", width, "    ")
        elif question == QUESTIONS[2]:
            yield from _moved(found, width)
        elif question == QUESTIONS[1]:
            yield from _failures(found, width)


def _answer(question: str, words: Sequence[str], width: int) -> Iterator[str]:
    yield ""
    yield question
    for sentence in words:
        if sentence:
            yield from _wrapped(sentence, width, "  ")


def _wrapped(text: str, width: int, indent: str = "") -> Iterator[str]:
    yield from textwrap.wrap(
        " ".join(visible(text).split()), max(width, 20), initial_indent=indent, subsequent_indent=indent
    )


def _moved(found: Digest, width: int) -> Iterator[str]:
    largest = [*found.reasons.difficulties, *found.reasons.components, *found.reasons.endings]
    for item in largest[:SHOWN_REASONS]:
        figures = f"{item.before:.2f} → {item.after:.2f}"
        yield f"    {one_line(item.name, width - len(figures) - 7):<24} {figures}"


def _failures(found: Digest, width: int) -> Iterator[str]:
    from forge_env.view.digest import MOST_CLASSES

    most = max((failure.count for failure in found.failures), default=1)
    for failure in found.failures[:MOST_CLASSES]:
        name = one_line(failure.name, max(width - BAR - 14, 10))
        yield f"    {failure.count:>7,}  {name:<24} {'█' * max(1, round(BAR * failure.count / most))}"
        if failure.example:
            yield from _wrapped(f"e.g. {failure.example}", width, " " * 13)
    readable = (failure.typical for failure in found.failures if failure.name != "unreadable")
    if (typical := next(filter(None, readable), None)) is not None:
        words = shlex.join(["forge-env", "trajectory", str(found.run.root), typical["id"]])
        yield visible(f"    example: {words}")  # not wrapped, so that it can be copied
