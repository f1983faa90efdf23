"""Measure generator throughput: requests through the Monarch actor compared with stepping vLLM's engine directly.

python -m benchmarks generator --bursts 12

Both use the same small untrained model, prompts and sampling, each in its own process. Both stay loaded and take turns
burst by burst, because the speed of a shared machine can halve from one minute to the next. The actor adds everything
between a rollout and the engine: routing, messages between processes, delivery, per-token policy versions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import forge_env as fe
from benchmarks.report import record, spread, table
from forge_env.config import RunConfig
from forge_env.config.recipe import EnvironmentSection
from trainers.generator.arguments import engine_arguments
from trainers.generator.pool import GeneratorPool
from trainers.generator.types import SamplingOptions
from trainers.loop.stack import Stack, prepare_controller

TOKENS = 96
PROMPT = 80
WARM_UP = 2
"""Discarded first bursts, which touch memory for the first time."""


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Return random prompts, [count][P]; prompts of different seeds share no entries of the prefix cache."""
    rng = random.Random(seed)
    return [[rng.randrange(10, 300) for _ in range(PROMPT)] for _ in range(count)]


def recipe() -> RunConfig:
    """Return the recipe with default sizes."""
    return RunConfig(environment=EnvironmentSection(name="coding_rlvr"))


async def through_actor(generators: GeneratorPool, count: int, burst: int) -> float:
    """Return tokens per second of `count` concurrent calls."""
    started = time.perf_counter()
    options = SamplingOptions(max_tokens=TOKENS)
    calls = (generators.generate(prompt, options) for prompt in prompts(count, burst))
    sampled = sum(len(completion.token_ids) for completion in await asyncio.gather(*calls))
    return sampled / (time.perf_counter() - started)


def by_hand(folder: Path, count: int) -> None:
    """Run one burst of `count` requests through vLLM's engine for each line on stdin; print its tokens per second."""
    from trainers.generator.arguments import prepare_process

    section = recipe().generator
    prepare_process(with_gpus=section.with_gpus, threads=section.threads, kv_cache_gb=section.kv_cache_gb)
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arguments = {"skip_tokenizer_init": True, "disable_log_stats": True, **engine_arguments(recipe(), folder)}
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    params = SamplingParams(max_tokens=TOKENS, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    for burst, _ in enumerate(sys.stdin):
        started = time.perf_counter()
        for index, prompt in enumerate(prompts(count, burst)):
            engine.add_request(f"{burst}-{index}", {"prompt_token_ids": prompt}, params)
        sampled = 0
        while engine.has_unfinished_requests():
            sampled += sum(len(output.outputs[0].token_ids) for output in engine.step())
        print(json.dumps(sampled / (time.perf_counter() - started)), flush=True)


class ByHand:
    """Process that runs `by_hand`."""

    def __init__(self, folder: Path, count: int) -> None:
        command = [sys.executable, "-m", "benchmarks.generator", "--by-hand", str(folder), "--requests", str(count)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def burst(self) -> float:
        """Run one burst; returns tokens per second."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def end(self) -> None:
        """Close stdin and wait until the process has exited."""
        self._process.communicate()


async def build(folder: Path) -> None:
    """Create a model folder with random weights."""
    from trainers.model.tiny import build_tiny_folder

    config = recipe()
    tiny = build_tiny_folder(config.model, fe.make("coding_rlvr"), 0, folder / "tiny")
    async with Stack(config) as stack:
        trainer = await stack.start_trainer(tiny)
        await trainer.save_model(str(folder / "model"))


async def compare(folder: Path, count: int, bursts: int) -> list[tuple[float, float]]:
    """Return tokens per second through the actor and by hand for each burst; which one is first alternates."""
    await build(folder)
    pairs = []
    async with Stack(recipe()) as stack:
        generators = await stack.start_generators(folder / "model")
        hand = ByHand(folder / "model", count)
        for burst in range(WARM_UP + bursts):
            actor = await through_actor(generators, count, burst) if burst % 2 else 0.0
            engine = hand.burst()
            pairs.append((actor or await through_actor(generators, count, burst), engine))
        hand.end()
        await generators.halt()
    return pairs[WARM_UP:]


def main() -> None:
    """Measure both in turns and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--bursts", type=int, default=12)
    parser.add_argument("--by-hand", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.by_hand is not None:
        by_hand(args.by_hand, args.requests)
        return
    prepare_controller()
    with tempfile.TemporaryDirectory(prefix="forge-env-") as scratch:
        pairs = asyncio.run(compare(Path(scratch), args.requests, args.bursts))
    actor, hand = zip(*pairs, strict=True)
    ratios = [100 * one / other for one, other in pairs]
    rows = [["actor", spread(actor), spread(ratios)], ["by hand", spread(hand), "100"]]
    lines = table(["way", "tokens/s", "% of the engine by hand"], rows)
    print("\n".join(lines))
    about = (
        f"{args.requests} requests at once, {PROMPT} prompt tokens, {TOKENS} sampled, batches of 128; median (smallest "
        f"to largest) of {args.bursts} bursts and of their ratios, the two taking turns burst by burst."
    )
    record("generator", "Generator throughput", "make bench ARGS=generator", [*lines, "", about])


if __name__ == "__main__":
    main()
