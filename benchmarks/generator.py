"""Generator throughput: requests through the Monarch actor against vLLM's engine stepped by hand.

python -m benchmarks generator --repeats 3

The same small untrained model, prompts and sampling in both; each in a process of its own, in turns. What the actor
adds is everything between a rollout and the engine: routing, messages between processes, delivery, per-token versions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import forge_env as fe
from benchmarks.report import record, spread, table
from forge_env.config import RunConfig
from forge_env.config.models import EnvironmentSection
from trainers.generator.types import SamplingOptions
from trainers.loop.stack import Stack, engine_arguments, prepare_controller

TOKENS = 96
PROMPT = 80
BURSTS = 4
"""Of which the first, in which memory is touched for the first time, does not count."""


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts, [count][P], none of them in the prefix cache of those of another seed."""
    rng = random.Random(seed)
    return [[rng.randrange(10, 300) for _ in range(PROMPT)] for _ in range(count)]


def recipe() -> RunConfig:
    """The default sizes."""
    return RunConfig(environment=EnvironmentSection(name="coding_rlvr"))


async def through_actor(folder: Path, count: int) -> float:
    """Tokens a second of `count` concurrent calls."""
    async with Stack(recipe()) as stack:
        generators = await stack.launch_generators(folder)
        await generators.setup()

        async def all_of(these: list[list[int]]) -> int:
            calls = (generators.generate(prompt, SamplingOptions(max_tokens=TOKENS)) for prompt in these)
            return sum(len(completion.token_ids) for completion in await asyncio.gather(*calls))

        speeds = []
        for burst in range(BURSTS):
            started = time.perf_counter()
            sampled = await all_of(prompts(count, burst))
            speeds.append(sampled / (time.perf_counter() - started))
        await generators.halt()
    return statistics.median(speeds[1:])


def by_hand(folder: Path, count: int) -> float:
    """Tokens a second of vLLM's engine, all requests given at once."""
    from trainers.generator.engine import prepare_process

    section = recipe().generator
    prepare_process(with_gpus=section.with_gpus, threads=section.threads, kv_cache_gb=section.kv_cache_gb)
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arguments = {"skip_tokenizer_init": True, "disable_log_stats": True, **engine_arguments(recipe(), folder)}
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))

    def all_of(these: list[list[int]], name: str) -> int:
        for index, prompt in enumerate(these):
            params = SamplingParams(
                max_tokens=TOKENS, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
            )
            engine.add_request(f"{name}{index}", {"prompt_token_ids": prompt}, params)
        sampled = 0
        while engine.has_unfinished_requests():
            sampled += sum(len(output.outputs[0].token_ids) for output in engine.step())
        return sampled

    speeds = []
    for burst in range(BURSTS):
        started = time.perf_counter()
        sampled = all_of(prompts(count, burst), f"{burst}-")
        speeds.append(sampled / (time.perf_counter() - started))
    return statistics.median(speeds[1:])


async def build(folder: Path) -> None:
    """A model folder with random weights."""
    from trainers.model.tiny import build_tiny_folder

    config = recipe()
    tiny = build_tiny_folder(config.model, fe.make("coding_rlvr"), 0, folder / "tiny")
    async with Stack(config) as stack:
        trainer = await stack.start_trainer(tiny)
        await trainer.save_model(str(folder / "model"))


def one(way: str, folder: Path, count: int) -> float:
    """One measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.generator", "--way", way, "--folder", str(folder)]
    output = subprocess.run([*command, "--requests", str(count)], check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(output.stdout.splitlines()[-1]))


def main() -> None:
    """Measure both in turns, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--way", choices=["actor", "by hand", "build"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    prepare_controller()
    if args.way == "build":
        asyncio.run(build(args.folder))
        print(0)
    elif args.way == "actor":
        print(json.dumps(asyncio.run(through_actor(args.folder, args.requests))))
    elif args.way == "by hand":
        print(json.dumps(by_hand(args.folder, args.requests)))
    else:
        compare(args.requests, args.repeats)


def compare(count: int, repeats: int) -> None:
    """Both ways in turns."""
    speeds: dict[str, list[float]] = {"actor": [], "by hand": []}
    with tempfile.TemporaryDirectory(prefix="forge-env-") as scratch:
        one("build", Path(scratch), 0)
        for _ in range(repeats):
            for way, values in speeds.items():
                values.append(one(way, Path(scratch) / "model", count))
    ratio = statistics.median(speeds["actor"]) / statistics.median(speeds["by hand"])
    rows: list[list[Any]] = [[name, spread(values), ""] for name, values in speeds.items()]
    rows[0][2] = f"{ratio:.0%} of the engine by hand"
    lines = table(["way", "tokens/s", ""], rows)
    print("\n".join(lines))
    about = (
        f"{count} requests at once, {PROMPT} prompt tokens, {TOKENS} sampled, batches of 128; median of "
        f"{BURSTS - 1} such bursts in a process, and of {repeats} processes, in turns."
    )
    record("generator", "Generator throughput", "make bench ARGS=generator", [*lines, "", about])


if __name__ == "__main__":
    main()
