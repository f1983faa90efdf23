"""Measure the cost of checkpoints to a run, the time to resume, and the cost of seeds per request.

    python -m benchmarks checkpoints [--steps 12] [--record]

A shortened run of `coding_rlvr` (small groups, a barely warmed-up model) saves after every step. Reported are the
seconds that the trainer was blocked and the seconds of writing in the background. By default a checkpoint is saved
every five minutes and with evaluations, so both are also given as shares of one minute. The run is then resumed:
seconds from the command to the first trained step. Finally one engine samples the same requests with and without seeds
per request, in turns; the unit is tokens per CPU second, because the machine may be shared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import record, spread, table

SHORT = [
    *("grpo.groups_per_step=6", "grpo.group_size=4", "evaluation.num_tasks=16"),
    *("evaluation.extra_num_tasks=4", "checkpoint.every=1", "sandbox.engine=local"),
]
ROUNDS = 8


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "forge_env", "train", "coding_rlvr", "--name", "run", *SHORT, *arguments]


def trained(run: Path) -> list[dict[str, Any]]:
    """Return the last row of every trained step, in order of steps."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = {row["step"]: row for row in map(json.loads, lines) if "reward/mean" in row}
    return [rows[step] for step in sorted(rows)]


def environment(root: Path) -> dict[str, str]:
    """Return environment variables that cache compiled modules, as in an installed package."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**environ, "PYTHONPYCACHEPREFIX": str(root / "compiled")}


def saving(root: Path, steps: int) -> list[list[object]]:
    """Train and return table rows with the cost of saving."""
    words = command(f"grpo.steps={steps}")
    subprocess.run(words, cwd=root, env=environment(root), check=True, stdout=subprocess.DEVNULL)
    run = root / "runs" / "run"
    rows = trained(run)
    stalled = [row.get("time/trainer/save", 0.0) for row in rows[1:]]  # each row covers the time since the previous row
    matches = re.findall(
        r"step \d+ saved: ([\d.]+) MiB in ([\d.]+) s .*?'snapshot_s': ([\d.e-]+)", (run / "run.log").read_text()
    )
    sizes, writes, copies = ([float(value) for value in column] for column in zip(*matches, strict=True))
    return [
        ["size, MiB", spread(sizes)],
        ["state copied, s", spread(copies)],
        ["trainer stood still, s", spread(stalled)],
        ["... of a minute", f"{statistics.median(stalled) / 60:.2%}"],
        ["from the begin to the rename, s", spread(writes)],
        ["... of a minute", f"{statistics.median(writes) / 60:.2%}"],
    ]


def resuming(root: Path, steps: int) -> float:
    """Return the seconds from `--resume` to the first trained step."""
    run = root / "runs" / "run"
    before, started = len(trained(run)), time.perf_counter()
    words = command("--resume", f"grpo.steps={steps + 1}")
    process = subprocess.Popen(words, cwd=root, env=environment(root), stdout=subprocess.DEVNULL)
    seconds = None
    while process.poll() is None:
        if seconds is None and len(trained(run)) > before:
            seconds = time.perf_counter() - started
        time.sleep(0.1)
    if process.returncode or seconds is None:
        raise SystemExit("the resumed run failed")
    return seconds


async def seeds(model: Path) -> dict[str, list[float]]:
    """Return tokens per CPU second for each round, with and without seeds."""
    from forge_env.config import load_config
    from trainers.generator.arguments import engine_arguments, prepare_process
    from trainers.generator.engine import InProcessEngine
    from trainers.generator.types import SamplingOptions

    prepare_process(with_gpus=False, threads=1, kv_cache_gb=1)
    engine = InProcessEngine(engine_arguments(load_config("coding_rlvr"), model))
    rates: dict[str, list[float]] = {"with seeds": [], "without": []}
    for number in range(ROUNDS + 1):
        for name in sorted(rates, reverse=bool(number % 2)):
            started = time.process_time()
            calls = []
            for index in range(128):
                seed = 1000 * number + index if name == "with seeds" else None
                options = SamplingOptions(max_tokens=96, seed=seed, shaping={"ignore_eos": True})
                calls.append(engine.generate([10 + index // 8] * 100, options))
            sampled = sum(len(one.token_ids) for one in await asyncio.gather(*calls))
            if number:  # the first round touches memory for the first time
                rates[name].append(sampled / (time.process_time() - started))
    await engine.close()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--record", action="store_true", help="write docs/benchmarks.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as folder:
        root = Path(folder)
        rows = saving(root, args.steps)
        print("\n".join(table(["", ""], rows)), flush=True)
        rows.append(["from `--resume` to the first step trained, s", f"{resuming(root, args.steps):.1f}"])
        print(rows[-1], flush=True)
        rates = asyncio.run(seeds(root / "runs" / "run" / "checkpoints" / "resumed"))
    rows += [[f"tokens per CPU second {name}", spread(values)] for name, values in rates.items()]
    lines = table(["", ""], rows)
    print("\n".join(lines))
    print(json.dumps({name: statistics.median(values) for name, values in rates.items()}))
    if args.record:
        record("checkpoints", "Checkpoints", "make bench ARGS='checkpoints --record'", lines)


if __name__ == "__main__":
    main()
