"""The frame that benchmarks share: options, turns, processes, training runs, tables, sections of docs/benchmarks.md.

def measure(args: argparse.Namespace) -> list[str]:
    return table(["way", "ms"], [["gateway", spread(times)]])  # the docstring's notes follow

if __name__ == "__main__":
    main("The gateway", measure, repeats=3)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import inspect
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_env.config.recipe import ModelSection
from forge_env.display.curves import merge_rows
from forge_env.files import write_whole
from forge_env.run.metrics import read_metrics

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
FORGE_ENV = [sys.executable, "-m", "forge_env"]


# --- options and sections


def main(title: str, measure: Callable[[argparse.Namespace], Any], **defaults: Any) -> None:
    """Run a benchmark as a command; `--record` writes its section, which ends with the notes in its docstring.

    Args:
        title: heading of the section.
        measure: returns the Markdown lines of the section; may be a coroutine function.
        defaults: options and their defaults. A Boolean is a flag, and a list takes several values.
    """
    module = sys.modules["__main__"]
    name = Path(str(module.__file__)).stem
    parser = argparse.ArgumentParser(
        f"benchmarks {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, default in defaults.items():
        kind: dict[str, Any] = {"action": "store_true"}
        if isinstance(default, list):
            kind = {"nargs": "*", "type": type(default[0]), "default": default}
        elif not isinstance(default, bool):
            kind = {"type": type(default), "default": default}
        parser.add_argument(f"--{option.replace('_', '-')}", help="default: %(default)s", **kind)
    parser.add_argument("--record", action="store_true", help="write the section of docs/benchmarks.md")
    args = parser.parse_args()
    lines = measure(args)
    if inspect.iscoroutine(lines):
        lines = asyncio.run(lines)
    lines = [*lines, *notes(str(module.__doc__))]
    print("\n".join(lines))
    if args.record:
        given = ["PATH" if word.startswith("/") else word for word in sys.argv[1:]]  # no path of this machine
        record(name, title, f"make bench ARGS='{' '.join([name, *given])}'", lines)


def notes(docstring: str) -> list[str]:
    """Return the paragraphs of a benchmark's docstring after the first, each as one line after a blank one."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")[1:]
    return [line for paragraph in paragraphs for line in ("", paragraph.replace("\n", " "))]


def record(name: str, title: str, command: str, lines: Sequence[str], *, document: Path = DOCUMENT) -> None:
    """Write the section of one benchmark.

    Args:
        name: marks the section; an existing section of this name is replaced in place, a new one is appended.
        title: heading of the section.
        command: command that repeats the measurement.
        lines: Markdown lines.
        document: file to write to.
    """
    text = document.read_text(encoding="utf-8")
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    head = f"`{command}`, {time.strftime('%Y-%m-%d')}, {machine()}, load at the end {load}."
    section = "\n".join([f"<!-- {name} -->", f"## {title}", "", head, "", *lines, f"<!-- end of {name} -->"])
    old = re.compile(rf"<!-- {re.escape(name)} -->.*?<!-- end of {re.escape(name)} -->", re.DOTALL)
    text = old.sub(lambda _: section, text) if old.search(text) else f"{text.rstrip()}\n\n{section}\n"
    write_whole(document, text)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Format a Markdown table; floats have three significant digits."""
    lines = [list(columns), ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Format values as `median (smallest to largest)`."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def machine() -> str:
    """Describe this machine: cores, processor, memory and Python version."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = platform.machine()
    if Path("/proc/cpuinfo").exists():
        named = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        processor = named[1].strip() if named else processor
    return f"{len(os.sched_getaffinity(0))} cores ({processor}), {memory:.0f} GiB, Python {platform.python_version()}"


# --- measuring


async def take_turns(ways: Mapping[str, Callable[[], Any]], repeats: int, *, warm_up: int = 0) -> dict[str, list[Any]]:
    """Measure every way once per round, so that other load affects all alike; return the results of each way.

    A way is a function or a coroutine function. The results of the first `warm_up` rounds, which fill caches, are
    dropped.
    """
    taken: dict[str, list[Any]] = {name: [] for name in ways}
    for number in range(warm_up + repeats):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            result = ways[name]()
            result = await result if inspect.isawaitable(result) else result
            if number >= warm_up:
                taken[name].append(result)
    return taken


def in_turns(ways: Mapping[str, Callable[[], Any]], repeats: int, *, warm_up: int = 0) -> dict[str, list[Any]]:
    """Run `take_turns` in an event loop of its own."""
    return asyncio.run(take_turns(ways, repeats, warm_up=warm_up))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio within each round."""
    return [value / other for value, other in zip(values, others, strict=True)]


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios within each round."""
    return statistics.median(ratios(values, others))


# --- processes


def call(target: str, *arguments: Any) -> list[str]:
    """Return the command that calls `MODULE:FUNCTION` with arguments in JSON, and prints its result as JSON."""
    return [sys.executable, "-m", "benchmarks.frame", target, json.dumps(arguments)]


def apart(target: str, *arguments: Any) -> Any:
    """Call `MODULE:FUNCTION`, also a coroutine function, in a new process; return its result."""
    done = subprocess.run(call(target, *arguments), check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a program in its own process group, with its output as a pipe, and kill the group on exit."""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True, **options}
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def compiled(folder: Path) -> dict[str, str]:
    """Return environment variables that cache compiled modules in a folder, as in an installed package."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**environ, "PYTHONPYCACHEPREFIX": str(folder)}


# --- models and training runs


def shape_folder(folder: Path, section: ModelSection, vocabulary: int, changes: Mapping[str, Any] = {}) -> Path:
    """Create a model folder with a config.json and without weights; returns the folder."""
    from trainers.model.tiny import hf_config

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**hf_config(section, vocabulary, 2), **changes}))
    return folder


def train(name: str, *overrides: str, recipe: str = "coding_rlvr.yaml", root: Path = Path("runs")) -> Path:
    """Return the folder of a training run, trained first unless it has succeeded before."""
    folder = root / name
    if not has_succeeded(folder):
        shutil.rmtree(folder, ignore_errors=True)
        command = [*FORGE_ENV, "train", recipe, "--name", name, f"output_dir={root}", *overrides]
        subprocess.run(command, check=True)
    return folder


def has_succeeded(folder: Path) -> bool:
    """Whether a training run ended successfully."""
    return (folder / "summary.json").exists() and summary(folder).get("exit") == "success"


def summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a training run."""
    result: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return result


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a training run, one row per step."""
    return merge_rows(read_metrics(folder / "metrics.jsonl"))


def trained(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps that a run has trained."""
    return [row for row in metrics(folder) if "reward/mean" in row]


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    result = getattr(importlib.import_module(module), function)(*json.loads(sys.argv[2]))
    print(json.dumps(asyncio.run(result) if inspect.iscoroutine(result) else result))
