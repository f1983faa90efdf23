"""Measure the duration of `forge-env validate` for each bundled environment.

    python -m benchmarks.validation [NAME...] [--record]

Each validation is a separate process, as on the command line, with sandboxes of the local engine and cached images.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from typing import Any

import forge_env as fe
from benchmarks.report import record, table

AIM_S = 10
ABOUT = (
    "One process each, from its start to its end, one after the other; sandboxes of the local engine, with images and "
    "packages in the cache. CPU is of the process and what it waited for, its sandboxes included. An environment that "
    "does not pass ends the benchmark."
)


def seconds(name: str) -> tuple[float, float]:
    """Validate an environment, which must succeed; return wall and CPU seconds."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "forge_env", "validate", name, "--sandbox", "local"],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    bundled = [e.name for e in fe.list_environments() if e.source.startswith("forge-env ") and not e.needs]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="environments instead of all that come with forge-env")
    parser.add_argument("--record", action="store_true", help="write the table to docs/benchmarks.md")
    args = parser.parse_args()
    names = args.names or bundled
    seconds(names[0])  # fills caches
    rows: list[list[Any]] = [[name, *seconds(name), AIM_S] for name in names]
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    about = f"{ABOUT} Load of the machine at the end {load}."
    lines = [*table(["`forge-env validate`", "seconds", "of CPU", "aim (seconds)"], rows), "", about]
    print("\n".join(lines))
    if args.record:
        record("validation", "Validating an environment", "make bench ARGS='validation --record'", lines)


if __name__ == "__main__":
    main()
