"""Compare adapter updates with full weight updates to a generator: bytes sent and seconds per stage.

python -m benchmarks adapters --versions 4

Runs the trainer and one generator on a CPU, with a model shaped like Qwen3-0.6B and random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.report import record, table
from forge_env.config import RunConfig
from forge_env.config.recipe import EnvironmentSection, GeneratorSection, LoRASection, ModelSection
from trainers.loop.stack import Stack, prepare_controller

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "attention_bias": False,
}
TIMES = ("snapshot_s", "push_s", "pull_s", "stall_s")


def make(root: Path) -> Path:
    """Save a checkpoint folder with random bfloat16 weights."""
    from trainers.titan.device import use_device
    from trainers.titan.model import TitanModel

    (root / "shape").mkdir()
    (root / "shape" / "config.json").write_text(json.dumps(SHAPE))
    device = use_device(with_gpus=False).torch
    TitanModel(root / "shape", max_length=256, device=device).save_hf(root / "model", "bfloat16")
    return root / "model"


async def measure(folder: Path, lora: LoRASection | None, versions: int) -> list[object]:
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


def main() -> None:
    """Measure both modes and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=4)
    args = parser.parse_args()
    prepare_controller()
    with tempfile.TemporaryDirectory(prefix="forge-env-") as scratch:
        folder = make(Path(scratch))
        rows = [asyncio.run(measure(folder, lora, args.versions)) for lora in (None, LoRASection())]
    lines = table(["0.6 B parameters", "bytes", *TIMES], rows)
    print("\n".join(lines))
    record("adapters", "Adapters and all weights to a generator", "make bench ARGS=adapters", lines)


if __name__ == "__main__":
    main()
