"""Measure how much a new version of the weights differs from the previous one: elements, and blocks of bytes.

Each run of the default recipe has a constant learning rate and AdamW, and keeps every version. Each version is compared
bit by bit with the previous one. Values are means over the versions, as shares of all weights. Rows with bfloat16 are
of weights as a trainer in float32 publishes them for generators in bfloat16. The last column is for sending each
changed element with its position, 4 bytes.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.frame import main, table, train

KIB = 1024
BLOCKS = (1 * KIB, 4 * KIB, 64 * KIB)
INDEX_BYTES = 4
"""Size of an element's index if elements are sent individually."""


def versions(lr: str, steps: int, root: Path) -> list[Path]:
    """Train and return the weight files after each step, in order."""
    optimizer = {"lr": lr, "schedule": "constant", "decay_start": 0.5, "warmup_steps": 0}
    keys = [f"trainer.optimizer.{name}={value}" for name, value in optimizer.items()]
    keys += [f"grpo.steps={steps}", "checkpoint.every=1", f"checkpoint.keep={steps}"]
    folder = train(f"lr-{lr}", *keys, "evaluation.every=0", "evaluation.num_tasks=8", root=root)
    return sorted(folder.glob("checkpoints/step-*/model/model.safetensors"))


def blocks(differ: torch.Tensor, size: int) -> float:
    """Return the share of blocks of `size` elements that contain a difference."""
    padded = torch.nn.functional.pad(differ, (0, -len(differ) % size))
    return padded.view(-1, size).any(1).float().mean().item()


def flat(path: Path, dtype: torch.dtype) -> torch.Tensor:
    """Load all weights as one flat tensor, [N]."""
    weights = load_file(path)
    return torch.cat([weights[name].flatten().to(dtype) for name in sorted(weights)])


def row(lr: str, dtype: torch.dtype, paths: list[Path]) -> list[object]:
    """Return a table row with means over the versions."""
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    pairs = [before != after for before, after in pairwise(flat(path, dtype).view(bits) for path in paths)]
    elements = sum(each.float().mean().item() for each in pairs) / len(pairs)
    shares = [sum(blocks(each, size // dtype.itemsize) for each in pairs) / len(pairs) for size in BLOCKS]
    singly = elements * (dtype.itemsize + INDEX_BYTES) / dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    return [lr, name, f"{elements:.2%}", *(f"{share:.1%}" for share in shares), f"{singly:.1%}"]


def measure(args: argparse.Namespace) -> list[str]:
    rows = []
    for lr in args.lrs:
        with tempfile.TemporaryDirectory() as folder:
            paths = versions(lr, args.steps, Path(folder))
            rows += [row(lr, dtype, paths) for dtype in (torch.float32, torch.bfloat16)]
    sizes = [f"blocks of {size // KIB} KiB" for size in BLOCKS]
    columns = ["learning rate", "weights", "elements that change", *sizes, "bytes, changed elements one by one"]
    return table(columns, rows)


if __name__ == "__main__":
    main("What a version changes", measure, lrs=["3e-4", "1e-5", "1e-6"], steps=8)
