"""`forge-env show`: answer the four main questions about a run in words."""

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
from forge_env.machine import cache_dir, user_path
from forge_env.run.contract import in_a_sentence
from forge_env.run.folder import check_readable
from forge_env.visible import one_line, visible

if TYPE_CHECKING:
    from forge_env.view.digest import Digest

WIDEST = 100
"""Maximum columns of a line, for readability."""
SHOWN_REASONS = 4
BAR = 20


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Did it learn? What does a typical failure look like? Why did the reward move? What limited the speed? "
        "The answers come from the files of the run, finished or not; of an evaluation, score and failures are shown."
    )
    parser.add_argument("run_folder", metavar="RUN", help="folder of a run or an evaluation")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(args: argparse.Namespace) -> int:
    """Print the answers, with the result last."""
    from dataclasses import asdict

    from forge_env.view.digest import digest

    summary = digest(folder_of_run(args.run_folder), cache=cache_dir())
    if args.json:
        answers = {
            "name": summary.name,
            "state": summary.state,
            "episodes": summary.episodes,
            "failures": [asdict(failure) for failure in summary.failures],
            "learned": asdict(summary.learned),
            "reasons": asdict(summary.reasons),
            "limit": asdict(summary.limit),
            "contract": [check.row() for check in summary.contract],
        }
        print(json.dumps(answers, indent=2, default=str))
        return 0
    width = min(shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDEST, WIDEST)
    for line in lines(summary, width):
        print(line)
    return 0


def folder_of_run(text: str) -> Path:
    """Find the folder of a run or an evaluation: the given path, or `runs/NAME`.

    Raises:
        UsageError: it contains neither a run nor an evaluation, or an unreadable file.
    """
    from forge_env.view.runs import is_run

    for path in (user_path(text), Path("runs") / text):
        if path.is_dir() and is_run(path):
            check_readable(path.absolute())
            return path.absolute()
    raise UsageError(
        f"{one_line(text)} holds no run and no evaluation", fix="give the folder that forge-env train or eval wrote"
    )


def lines(found: Digest, width: int) -> Iterator[str]:
    """Format the answers in lines of at most `width` columns."""
    yield from _wrapped(f"{found.name} · {found.headline}", width)
    yield from _answer("What limited the speed?", [found.limit.words, found.limit.detail], width)
    for key, what in found.limit.advice[:2]:
        yield from _wrapped(f"{key}: {what}", width, "    ")
    if not found.is_evaluation:
        yield from _answer("Why did the reward move?", found.reasons.told, width)
        yield from _moved(found, width)
    if found.contract:
        doubts = [check.words for check in found.contract if check.verdict in ("doubtful", "broken")]
        yield from _answer("Can it be trusted?", [in_a_sentence(found.contract), *doubts], width)
    yield from _answer("What does a typical failure look like?", [found.failure_words, found.unsolved_words], width)
    yield from _failures(found, width)
    if found.is_evaluation:
        yield from _answer("What came of it?", found.scores or ["No score yet."], width)
    else:
        yield from _answer("Did it learn?", [found.learned.words, *found.learned.further], width)
        if found.learned.start is not None and found.learned.end is not None:
            measure = one_line(found.learned.measure, max(width - 20, 10))
            yield f"  {measure}: {found.learned.start:.3f} → {found.learned.end:.3f}"


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
        words = shlex.join(["forge-env", "trajectory", str(found.root), typical["id"]])
        yield visible(f"    read one: {words}")  # not wrapped, so that it can be copied
