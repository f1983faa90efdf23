"""Measure the duration of `forge-env validate` for each bundled environment, in a process each, as on the command line.

python -m benchmarks validation [--names NAME...] [--record]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import time

import forge_env as fe
from benchmarks.frame import FORGE_ENV, main, table

AIM_S = 10
ABOUT = (
    "One process each, from its start to its end, one after the other; sandboxes of the local engine, with images and "
    "packages in the cache. CPU is of the process and what it waited for, its sandboxes included. An environment that "
    "does not pass ends the benchmark."
)


def seconds(name: str) -> tuple[float, float]:
    """Validate an environment, which must succeed; return wall and CPU seconds."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*FORGE_ENV, "validate", name, "--sandbox", "local"], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(args: argparse.Namespace) -> list[str]:
    names = [e.name for e in fe.list_environments() if e.source.startswith("forge-env ") and not e.needs]
    names = list(filter(None, args.names)) or names
    seconds(names[0])  # fills caches
    rows = [[name, *seconds(name), AIM_S] for name in names]
    return [*table(["`forge-env validate`", "seconds", "of CPU", "aim (seconds)"], rows), "", ABOUT]


if __name__ == "__main__":
    main("Validating an environment", measure, names=[""])
