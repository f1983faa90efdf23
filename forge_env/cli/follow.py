"""The events of a run as lines of text, for `forge-env show --follow`."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import aclosing, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from forge_env.errors import UsageError
from forge_env.evaluation.tables import counted
from forge_env.figures import duration
from forge_env.files import NewLines
from forge_env.interrupts import run_until_interrupted
from forge_env.run.metrics import REWARD, metrics_row
from forge_env.run.state import held_out_scores
from forge_env.trajectory_index import SCORED, IndexReader, is_index
from forge_env.visible import one_line

PROBLEM = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")


def follow(root: Path, lines: int, *, to_end: bool) -> None:
    """Print the last `lines` events of a run; with `to_end`, also new ones until the run has ended."""
    news = News(root)
    for line in deque(news.lines(), lines):
        print(line, flush=True)
    if to_end:
        run_until_interrupted(_follow(root, news))
    print(ending(root))


async def _follow(root: Path, news: News) -> None:
    from forge_env.view.runs import is_held
    from forge_env.watching import changes

    async with aclosing(changes([root, root / "trajectories"])) as events:
        async for _ in events:
            held = is_held(root)  # checked before reading, so that the run's last lines are read
            for line in news.lines():
                print(line, flush=True)
            if not held:
                return


def ending(root: Path) -> str:
    """Format the state of a run in one line."""
    from forge_env.view.runs import RunView

    view = RunView(root)
    summary = view.summary
    parts = [f"{root.name}: {view.state}"]
    start, end = summary.get("heldout_start"), summary.get("heldout_end")
    if isinstance(start, float) and isinstance(end, float):
        parts.append(f"held-out {start:.3f} → {end:.3f}")
    if error := summary.get("error"):
        parts.append(one_line(str(error)))
    return "  ".join(parts)


class News:
    """Reader of a run's files that yields each event once, as a line of text."""

    def __init__(self, root: Path) -> None:
        self._metrics = NewLines(root / "metrics.jsonl")
        self._log = NewLines(root / "run.log")
        self._folder = root / "trajectories"
        self._samples: dict[Path, IndexReader] = {}
        self._counts: dict[str, int] = {}
        self._reward = 0.0

    def lines(self) -> Iterator[str]:
        """Yield lines for the events since the last call."""
        for line in self._log.read():
            if PROBLEM.search(text := line.decode("utf-8", "replace"), 0, 200):
                yield f"! {one_line(text)}"
        for line in self._metrics.read():
            with suppress(UsageError):  # written by a newer version
                yield from row_in_words(metrics_row(line, self._metrics.path) or {})
        yield from self._evaluated()

    def _evaluated(self) -> Iterator[str]:
        """Yield a line that counts an evaluation's samples by outcome; training runs report steps instead."""
        if self._metrics.path.exists():
            return
        before = sum(self._counts.values())
        for path in sorted(self._folder.glob("*.jsonl")):
            if is_index(path):
                continue
            for row in self._samples.setdefault(path, IndexReader(path)).news():
                self._counts[row.outcome] = self._counts.get(row.outcome, 0) + 1
                self._reward += row.reward if row.outcome in SCORED and row.reward == row.reward else 0.0
        total = sum(self._counts.values())
        if total > before:
            valid = sum(self._counts.get(name, 0) for name in SCORED)
            ends = [f"{number} truncated" for name, number in self._counts.items() if name == "limit"]
            ends += [f"agent crashed on {number}" for name, number in self._counts.items() if name == "crashed"]
            ends += [f"{number} lost" for name, number in self._counts.items() if name == "lost"]
            mean = f", mean reward {self._reward / valid:.3f}" if valid else ""
            yield ", ".join([f"{counted(total, 'sample')} done{mean}", *ends])


def row_in_words(row: Mapping[str, Any]) -> Iterator[str]:
    """Format a row of metrics.jsonl: a line for each evaluated split, and one for the step."""
    step, time = row.get("step"), row.get("time")
    when = f"[{duration(float(time)):>7}] " if isinstance(time, int | float) else ""
    for score in chain.from_iterable(held_out_scores([row]).values()):
        share = row.get(f"eval/{score.split}/share_of_step")
        mixed = f", {1 - share:.0%} of tokens by other versions" if isinstance(share, float) and share < 1 else ""
        figure = f"{score.score:.3f} ± {score.stderr:.3f} (n={score.n}{mixed})"
        yield f"{when}held-out ({one_line(score.split, 40)}) after step {step}: {figure}"
    known = {
        "reward": (REWARD, "{:.3f}"),
        "truncated": ("episode/truncated", "{:.0%}"),
        "replies cut": ("episode/cut_replies", "{:.0%}"),
        "staleness": ("staleness/max", "{:.0f}"),
        "entropy": ("grpo_loss/entropy", "{:.3f}"),
        "tokens/s": ("generator/tokens_per_s", "{:,.0f}"),
        "loss": ("sft/loss", "{:.4f}"),
    }
    figures = [
        f"{name} {form.format(row[key])}"
        for name, (key, form) in known.items()
        if isinstance(row.get(key), int | float)
    ]
    if figures:
        yield f"{when}step {step}  {'  '.join(figures)}"
