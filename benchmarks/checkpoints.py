"""Measure the cost of checkpoints to a run, the time to resume, and the cost of a seed per request.

A shortened run of `coding_rlvr` saves after every step, and is resumed. By default a checkpoint is saved every five
minutes and with evaluations, so seconds are also given as shares of one minute. With and without seeds one engine
samples the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.frame import FORGE_ENV, compiled, main, spread, table, take_turns, trained

SHORT = [
    *("grpo.groups_per_step=6", "grpo.group_size=4", "evaluation.num_tasks=16"),
    *("evaluation.extra_num_tasks=4", "checkpoint.every=1", "sandbox.engine=local"),
]
ROUNDS = 8


def start(root: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [*FORGE_ENV, "train", "coding_rlvr", "--name", "run", *SHORT, *arguments]
    return subprocess.Popen(command, cwd=root, env=compiled(root / "compiled"), stdout=subprocess.DEVNULL)


def saving(root: Path, steps: int) -> list[list[object]]:
    """Train and return table rows with the cost of saving."""
    if start(root, f"grpo.steps={steps}").wait():
        raise SystemExit("the run failed")
    run = root / "runs" / "run"
    stalled = [row.get("time/trainer/save", 0.0) for row in trained(run)[1:]]  # each since the previous row
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
    before, started, seconds = len(trained(run)), time.perf_counter(), None
    process = start(root, "--resume", f"grpo.steps={steps + 1}")
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

    async def rate(with_seeds: bool) -> float:
        started, calls = time.process_time(), []
        for index in range(128):
            options = SamplingOptions(max_tokens=96, seed=index if with_seeds else None, shaping={"ignore_eos": True})
            calls.append(engine.generate([10 + index // 8] * 100, options))
        sampled = sum(len(one.token_ids) for one in await asyncio.gather(*calls))
        return sampled / (time.process_time() - started)

    try:
        return await take_turns({"with seeds": partial(rate, True), "without": partial(rate, False)}, ROUNDS, warm_up=1)
    finally:
        await engine.close()


def measure(args: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as folder:
        root = Path(folder)
        rows = saving(root, args.steps)
        rows.append(["from `--resume` to the first step trained, s", f"{resuming(root, args.steps):.1f}"])
        rates = asyncio.run(seeds(root / "runs" / "run" / "checkpoints" / "resumed"))
    rows += [[f"tokens per CPU second {name}", spread(values)] for name, values in rates.items()]
    return table(["", ""], rows)


if __name__ == "__main__":
    main("Checkpoints", measure, steps=12)
