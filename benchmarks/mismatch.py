"""Trainer against generator: how far their log-probabilities of the same tokens are apart, after weight updates.

python -m benchmarks mismatch --updates 0 8 24

The whole stack with the default recipe's small model: requests are in flight while the weights are trained, pushed
and swapped. After so many updates new requests are sampled, and the trainer scores their tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import forge_env as fe
from benchmarks.report import record, table
from forge_env.config import RunConfig
from forge_env.config.recipe import EnvironmentSection, OptimizerSection
from forge_env.trajectory import Segment
from trainers.generator.pool import GeneratorPool
from trainers.generator.types import Completion, SamplingOptions
from trainers.loop.stack import Stack, prepare_controller
from trainers.losses.sft import SFTLoss
from trainers.model.tiny import build_tiny_folder

REQUESTS = 64
OPTIONS = SamplingOptions(max_tokens=96)
Row = list[object]


def prompts() -> list[list[int]]:
    """Random prompts, [REQUESTS][P]."""
    rng = random.Random(0)
    return [[rng.randrange(10, 300) for _ in range(60)] for _ in range(REQUESTS)]


def sequence(completion: Completion) -> Segment:
    """The completion with its sampled tokens as targets."""
    prompt, sampled = completion.prompt_ids, completion.token_ids
    return Segment(np.array([*prompt, *sampled]), np.arange(len(prompt) + len(sampled)) >= len(prompt))


async def sample(generators: GeneratorPool) -> list[Completion]:
    """One completion of each prompt."""
    return await asyncio.gather(*(generators.generate(prompt, OPTIONS) for prompt in prompts()))


async def measure(counts: Sequence[int], scratch: Path) -> list[Row]:
    """A row for each number of updates."""
    config = RunConfig(environment=EnvironmentSection(name="coding_rlvr"))
    folder = build_tiny_folder(config.model, fe.make("coding_rlvr"), 0, scratch / "tiny")
    rows: list[Row] = []
    async with Stack(config) as stack:
        await stack.open_store()
        trainer = await stack.start_trainer(folder)
        await trainer.save_model(str(scratch / "model"))
        generators = await stack.start_generators(scratch / "model")
        await trainer.configure(OptimizerSection(lr=1e-3), loss=SFTLoss(), steps=1000, microbatch_tokens=4096)
        done = 0
        for count in sorted(counts):
            in_flight = asyncio.ensure_future(sample(generators))
            for version in range(done + 1, count + 1):
                await trainer.train_step([Segment(np.array([*prompts()[0], *[7] * 20]), np.arange(80) >= 60)])
                await generators.update_weights(version, await trainer.push_weights(version))
            done = count
            await in_flight
            completions = await sample(generators)
            theirs = await trainer.logprobs([sequence(completion) for completion in completions])
            apart = [
                abs(ours - other)
                for completion, values in zip(completions, theirs, strict=True)
                for ours, other in zip(completion.logprobs, values, strict=True)
            ]
            rows.append([count, len(apart), f"{max(apart):.1e}", f"{sum(apart) / len(apart):.1e}"])
        await generators.halt()
    return rows


def main() -> None:
    """Measure, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, nargs="+", default=[0, 8, 24], help="after how many to compare")
    args = parser.parse_args()
    prepare_controller()
    with tempfile.TemporaryDirectory(prefix="forge-env-") as scratch:
        rows = asyncio.run(measure(args.updates, Path(scratch)))
    lines = table(["updates in flight", "tokens", "largest difference", "mean"], rows)
    print("\n".join(lines))
    about = "Log-probabilities in float32 on the CPU: vLLM's as it sampled, TorchTitan's of the same tokens. Aim: 1e-5."
    record("mismatch", "Trainer against generator", "make bench ARGS=mismatch", [*lines, "", about])


if __name__ == "__main__":
    main()
