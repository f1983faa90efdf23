"""Measure generator throughput: requests through the Monarch actor compared with stepping vLLM's engine directly.

All requests are sent at once: 80 prompt tokens, 96 sampled tokens, batches of 128. The actor, and a loop that steps the
engine by hand, use the same small untrained model, prompts and sampling, each in its own process. They take turns burst
by burst. The actor adds everything between a rollout and the engine: routing, messages between processes, delivery,
per-token policy versions.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

import forge_env as fe
from benchmarks.frame import call, main, ratios, running, spread, table, take_turns
from forge_env.config import RunConfig
from forge_env.config.recipe import EnvironmentSection
from trainers.generator.arguments import engine_arguments
from trainers.generator.types import SamplingOptions
from trainers.loop.stack import Stack, prepare_controller

TOKENS = 96
PROMPT = 80


def prompts(count: int, seed: int) -> list[list[int]]:
    """Return random prompts, [count][P]; prompts of different seeds share no entries of the prefix cache."""
    rng = random.Random(seed)
    return [[rng.randrange(10, 300) for _ in range(PROMPT)] for _ in range(count)]


def recipe() -> RunConfig:
    """Return the recipe with default sizes."""
    return RunConfig(environment=EnvironmentSection(name="coding_rlvr"))


def by_hand(folder: str, count: int) -> None:
    """Run one burst of `count` requests through vLLM's engine for each line on stdin; print its tokens per second."""
    from trainers.generator.arguments import prepare_process

    section = recipe().generator
    prepare_process(with_gpus=section.with_gpus, threads=section.threads, kv_cache_gb=section.kv_cache_gb)
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arguments = {"skip_tokenizer_init": True, "disable_log_stats": True, **engine_arguments(recipe(), Path(folder))}
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    params = SamplingParams(max_tokens=TOKENS, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    for burst, _ in enumerate(sys.stdin):
        started, sampled = time.perf_counter(), 0
        for index, prompt in enumerate(prompts(count, burst)):
            engine.add_request(f"{burst}-{index}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            sampled += sum(len(output.outputs[0].token_ids) for output in engine.step())
        print(sampled / (time.perf_counter() - started), flush=True)


async def compare(folder: Path, count: int, bursts: int) -> dict[str, list[float]]:
    """Return tokens per second through the actor and by hand, for each burst."""
    from trainers.model.tiny import build_tiny_folder

    config, model = recipe(), folder / "model"
    tiny = build_tiny_folder(config.model, fe.make("coding_rlvr"), 0, folder / "tiny")
    async with Stack(config) as stack:
        trainer = await stack.start_trainer(tiny)
        await trainer.save_model(str(model))
    async with Stack(recipe()) as stack:
        generators = await stack.start_generators(model)
        seeds = iter(range(bursts + 2))

        async def actor() -> float:
            started, options = time.perf_counter(), SamplingOptions(max_tokens=TOKENS)
            calls = (generators.generate(prompt, options) for prompt in prompts(count, next(seeds)))
            sampled = sum(len(completion.token_ids) for completion in await asyncio.gather(*calls))
            return sampled / (time.perf_counter() - started)

        with running(call("benchmarks.generator:by_hand", str(model), count)) as process:
            assert process.stdin
            assert process.stdout

            def hand() -> float:
                print(file=process.stdin, flush=True)
                return float(process.stdout.readline())  # type: ignore[union-attr]

            rates = await take_turns({"actor": actor, "by hand": hand}, bursts, warm_up=2)
        await generators.halt()
    return rates


async def measure(args: argparse.Namespace) -> list[str]:
    prepare_controller()
    with tempfile.TemporaryDirectory(prefix="forge-env-") as scratch:
        rates = await compare(Path(scratch), args.requests, args.bursts)
    actor, hand = rates.values()
    shares = [100 * share for share in ratios(actor, hand)]
    rows = [["actor", spread(actor), spread(shares)], ["by hand", spread(hand), "100"]]
    return table(["way", "tokens/s", "% of the engine by hand"], rows)


if __name__ == "__main__":
    main("Generator throughput", measure, requests=512, bursts=12)
