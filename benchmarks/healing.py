"""Measure the cost of generator deaths: steps per minute with two generators, undisturbed and with one killed a minute.

python -m benchmarks healing [--minutes 3] [--record]

Both are `forge-env train` runs of the same recipe with all their real processes, one after the other. Recovery time is
measured from a generator's death until the run logs that it is back.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path

from benchmarks.chaos.runs import SHORT, START_S, Run
from benchmarks.frame import main, table

SETTINGS: dict[str, object] = {
    **SHORT,
    "grpo.groups_per_step": 4,
    "grpo.group_size": 6,
    "generator.num_replicas": 2,
    "grpo.max_off_policy_steps": 2,
    "grpo.steps": 100_000,
    "checkpoint.every": 0,
    "sandbox.engine": "local",
}


def run_for(cache: Path, minutes: int, *, deaths: bool) -> tuple[float, list[float]]:
    """Return steps per minute, and the seconds of each recovery."""
    with tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        run = Run(Path(scratch), cache, SETTINGS, resume=False)
        try:
            if not run.until(lambda: run.steps, START_S):
                raise SystemExit(f"the run did not start: {run.said}")
            began, first = time.monotonic(), len(run.steps)
            for minute in range(minutes):
                run.until(lambda at=began + 60 * minute + 20: time.monotonic() > at, 60)
                if deaths:
                    random.choice(run.look()["generator"]).kill()
                run.until(lambda at=began + 60 * (minute + 1): time.monotonic() > at, 60)
            pace = (len(run.steps) - first) / ((time.monotonic() - began) / 60)
            return pace, recoveries(run.log)
        finally:
            run.process.terminate()
            run.process.wait()
            run.leave_nothing()


def recoveries(log: str) -> list[float]:
    """Return the seconds from each death in the log to the line that reports the replica back."""
    result, died = [], {}
    for line in log.splitlines():
        if match := re.match(r"(\S+ \S+) .* generator (\d) (died|is back)", line):
            at = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f")
            if match[3] == "died":
                died[match[2]] = at
            elif match[2] in died:
                result.append((at - died.pop(match[2])).total_seconds())
    return result


def measure(args: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="fc-", dir="/tmp") as cache:
        calm, _ = run_for(Path(cache), args.minutes, deaths=False)
        troubled, back = run_for(Path(cache), args.minutes, deaths=True)
    rows = [
        ["steps a minute, undisturbed", f"{calm:.1f}"],
        ["steps a minute, a generator of two killed every minute", f"{troubled:.1f} ({troubled / calm:.0%})"],
        ["seconds from a death to full service", f"{statistics.median(back):.1f} (at most {max(back):.1f})"],
    ]
    return table(["what", "figure"], rows)


if __name__ == "__main__":
    main("Generators that die", measure, minutes=3)
