"""Compare adapter updates with full weight updates to a generator: bytes sent and seconds per stage.

One trainer and one generator on a CPU, with a model shaped like Qwen3-0.6B and random weights. Values are medians over
the versions.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.accept import QWEN3_0_6B
from benchmarks.frame import main, shape_folder, table
from forge_env.config import RunConfig
from forge_env.config.recipe import EnvironmentSection, GeneratorSection, LoRASection, ModelSection
from trainers.loop.stack import Stack, prepare_controller
from trainers.titan.device import use_device
from trainers.titan.model import TitanModel

TIMES = ("snapshot_s", "push_s", "pull_s", "stall_s")


def make(root: Path) -> Path:
    """Save a checkpoint folder with random bfloat16 weights."""
    shape = shape_folder(root / "shape", ModelSection(tiny=QWEN3_0_6B), 151_936)
    device = use_device(with_gpus=False).torch
    TitanModel(shape, max_length=256, device=device).save_hf(root / "model", "bfloat16")
    return root / "model"


async def row(folder: Path, lora: LoRASection | None, versions: int) -> list[object]:
    """Return one table row: the mode, bytes per version, and median seconds per stage over the versions."""
    config = RunConfig(
        environment=EnvironmentSection(name="coding_rlvr"),
        model=ModelSection(path=str(folder), max_length=256),
        generator=GeneratorSection(max_num_seqs=8, spare=False),
        lora=lora,
    )
    updates: list[dict[str, float]] = []
    async with Stack(config) as stack:
        trainer = await stack.start_trainer(folder)
        generators = await stack.start_generators(folder)
        for version in range(1, versions + 1):
            published, pushed = await (await trainer.begin_push(version))
            updates.append(await generators.update_weights(version, published) | pushed)
        await generators.halt()
    medians = [f"{statistics.median(each[name] for each in updates):.3f}" for name in TIMES]
    return ["all weights" if lora is None else f"adapters, rank {lora.rank}", f"{updates[0]['bytes']:,.0f}", *medians]


async def measure(args: argparse.Namespace) -> list[str]:
    prepare_controller()
    with tempfile.TemporaryDirectory(prefix="forge-env-") as scratch:
        folder = make(Path(scratch))
        rows = [await row(folder, lora, args.versions) for lora in (None, LoRASection())]
    return table(["0.6 B parameters", "bytes", *TIMES], rows)


if __name__ == "__main__":
    main("Adapters and all weights to a generator", measure, versions=4)
