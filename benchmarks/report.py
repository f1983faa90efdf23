"""Tables and records of benchmarks: each benchmark has a section in docs/benchmarks.md, replaced by every new run.

record("evaluation", "Evaluation", "make bench ARGS=evaluation", [*table(columns, rows), "", "How to read it."])
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from forge_env.files import write_whole

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
PREAMBLE = """# Benchmarks

Every section is written by the command it names. Peers and floors are measured in the same run, in turns; the machines
are shared, so read ratios rather than absolute times.
"""


def record(name: str, title: str, command: str, lines: Sequence[str], *, document: Path = DOCUMENT) -> None:
    """Write the section of one benchmark.

    Args:
        name: marks the section; an existing section of this name is replaced in place, a new one is appended.
        title: heading of the section.
        command: command that repeats the measurement.
        lines: Markdown lines.
        document: file to write to.
    """
    text = document.read_text(encoding="utf-8") if document.exists() else PREAMBLE
    head = f"`{command}`, {time.strftime('%Y-%m-%d')}, {machine()}."
    section = "\n".join([f"<!-- {name} -->", f"## {title}", "", head, "", *lines, f"<!-- end of {name} -->"])
    old = re.compile(rf"<!-- {re.escape(name)} -->.*?<!-- end of {re.escape(name)} -->", re.DOTALL)
    text = old.sub(lambda _: section, text) if old.search(text) else f"{text.rstrip()}\n\n{section}\n"
    write_whole(document, text)


def has_succeeded(folder: Path) -> bool:
    """Whether a training run ended successfully."""
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_text(encoding="utf-8")).get("exit") == "success"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Format a Markdown table; floats have three significant digits."""
    lines = [list(columns), ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Format values as `median (smallest to largest)`."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}g} ({low:.{digits}g} to {high:.{digits}g})"


def machine() -> str:
    """Describe this machine: cores, processor, memory and Python version."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = platform.machine()
    if Path("/proc/cpuinfo").exists():
        named = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        processor = named[1].strip() if named else processor
    return f"{len(os.sched_getaffinity(0))} cores ({processor}), {memory:.0f} GiB, Python {platform.python_version()}"
