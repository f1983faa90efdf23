"""Measure how much a new version of the weights differs from the previous one: elements, and blocks of bytes.

python -m benchmarks deltas --lrs 3e-4 1e-5 1e-6

Shows whether sending only the changes to generators would pay. Real runs of the default recipe, each with a constant
learning rate, keep every version; each version is compared with the previous one in float32, and in bfloat16, as a
trainer with float32 weights publishes them for generators that compute in bfloat16.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.report import record, table

KIB = 1024
BLOCKS = (1 * KIB, 4 * KIB, 64 * KIB)
INDEX_BYTES = 4
"""Size of an element's index if elements are sent individually."""
DTYPES = (torch.float32, torch.bfloat16)


def versions(lr: str, steps: int, folder: Path) -> list[Path]:
    """Train and return the weight files after each step, in order."""
    options = [
        *("--name", "run", f"output_dir={folder}", f"grpo.steps={steps}", f"trainer.optimizer.lr={lr}"),
        *(
            "trainer.optimizer.schedule=constant",
            "trainer.optimizer.decay_start=0.5",
            "trainer.optimizer.warmup_steps=0",
        ),
        *("checkpoint.every=1", f"checkpoint.keep={steps}", "evaluation.every=0", "evaluation.num_tasks=8"),
    ]
    command = [sys.executable, "-m", "forge_env", "train", "coding_rlvr", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return sorted((folder / "run" / "checkpoints").glob("step-*/model/model.safetensors"))


def changed(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Compare two flat versions bit by bit; returns a mask of the elements that differ, [N]."""
    whole = torch.int16 if before.dtype == torch.bfloat16 else torch.int32
    return before.view(whole) != after.view(whole)


def blocks(differ: torch.Tensor, size: int) -> float:
    """Return the share of blocks of `size` elements that contain a difference."""
    padded = torch.nn.functional.pad(differ, (0, -len(differ) % size))
    return padded.view(-1, size).any(1).float().mean().item()


def flat(path: Path, dtype: torch.dtype) -> torch.Tensor:
    """Load all weights as one flat tensor, [N]."""
    weights = load_file(path)
    return torch.cat([weights[name].flatten().to(dtype) for name in sorted(weights)])


def rows(lr: str, paths: list[Path]) -> list[list[object]]:
    """Return one table row for each dtype, with means over the versions."""
    result: list[list[object]] = []
    for dtype in DTYPES:
        weights = [flat(path, dtype) for path in paths]
        pairs = [changed(before, after) for before, after in pairwise(weights)]
        elements = sum(each.float().mean().item() for each in pairs) / len(pairs)
        shares = [sum(blocks(each, size // dtype.itemsize) for each in pairs) / len(pairs) for size in BLOCKS]
        singly = elements * (dtype.itemsize + INDEX_BYTES) / dtype.itemsize
        name = str(dtype).removeprefix("torch.")
        result.append([lr, name, f"{elements:.2%}", *(f"{share:.1%}" for share in shares), f"{singly:.1%}"])
    return result


def main() -> None:
    """Train, compare versions and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lrs", nargs="+", default=["3e-4", "1e-5", "1e-6"], help="learning rates, a run each")
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    parser.add_argument("--record", action="store_true", help="write the table to docs/benchmarks.md")
    args = parser.parse_args()
    results: list[list[object]] = []
    for lr in args.lrs:
        with tempfile.TemporaryDirectory() as folder:
            paths = versions(lr, args.steps, Path(folder))
            results += rows(lr, paths)
            middle = flat(paths[0], torch.float32).abs().median().item()
    columns = [
        "learning rate",
        "weights",
        "elements that change",
        *(f"blocks of {size // KIB} KiB" for size in BLOCKS),
        "bytes, changed elements one by one",
    ]
    about = (
        f"`coding_rlvr`, {args.steps} steps, AdamW; the mean over the versions, of all weights. One by one: each "
        f"changed element with its place, {INDEX_BYTES} bytes. Half of the weights are larger than {middle:.3f}. Load "
        f"at the end {' '.join(f'{load:.1f}' for load in os.getloadavg())}."
    )
    lines = [*table(columns, results), "", about]
    print("\n".join(lines))
    if args.record:
        record("deltas", "What a version changes", "make bench ARGS='deltas --record'", lines)


if __name__ == "__main__":
    main()
