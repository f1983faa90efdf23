"""Measure memory and time of the last layer: log-probabilities and entropies of tokens with their gradients, computed
tile by tile, over the whole vocabulary at once, and in chunks of tokens that autograd recomputes.

python -m benchmarks loss_memory --tokens 512 2048 --repeats 3 --record

Each measurement runs in its own process, in turns. The peak is that of the resident set (VmHWM, reset before the
passes, minus the size before), so it includes everything that torch allocates: the weight's gradient, but not the
weight and the hidden states.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.report import record, spread, table
from trainers.titan.device import use_device
from trainers.titan.head import logprobs_and_entropy

VOCABULARY, WIDTH = 151_936, 1024
"""Sizes of Qwen3 0.6B."""
CHUNK = 256
"""Tokens per chunk."""
Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def all_at_once(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute logits [N, V] and their log-softmax as a whole, and the entropy as a metric."""
    logits = (hidden @ weight.t()).float() / 1.0
    log_probs = torch.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(-1, targets[:, None])[:, 0]
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return chosen, entropy


def checkpointed(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `all_at_once` over chunks of tokens, with each chunk recomputed in the backward pass."""
    chunks = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    outputs = [checkpoint(all_at_once, rows, weight, ids, use_reentrant=False) for rows, ids in chunks]
    logprobs, entropy = (torch.cat(values) for values in zip(*outputs, strict=True))
    return logprobs, entropy


WAYS: dict[str, Way] = {
    "all at once": all_at_once,
    "chunks, recomputed": checkpointed,
    "tile by tile": logprobs_and_entropy,
}


def resident(name: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(way: str, tokens: int, passes: int) -> dict[str, float]:
    """Return peak bytes of `passes` forward and backward passes, and the median seconds of one, in this process."""
    use_device(with_gpus=False)
    torch.manual_seed(0)
    weight = (torch.randn(VOCABULARY, WIDTH) * 0.02).requires_grad_()
    hidden = torch.randn(tokens, WIDTH).requires_grad_()
    targets = torch.randint(VOCABULARY, (tokens,))

    def run(count: int) -> None:
        weight.grad = hidden.grad = None
        logprobs, _ = WAYS[way](hidden[:count], weight, targets[:count])
        logprobs.sum().backward()  # type: ignore[no-untyped-call]

    run(8)
    weight.grad = hidden.grad = None
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    seconds = []
    for _ in range(passes):
        started = time.perf_counter()
        run(tokens)
        seconds.append(time.perf_counter() - started)
    return {"peak": resident("VmHWM") - before, "seconds": statistics.median(seconds)}


def main() -> None:
    """Measure every size in every way, print, and write the section if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure, args.tokens[0], args.passes)))
        return
    rows = []
    for tokens in args.tokens:
        results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(args.repeats):
            for way in WAYS:
                options = ["--measure", way, "--tokens", str(tokens), "--passes", str(args.passes)]
                output = subprocess.run(
                    [sys.executable, "-m", "benchmarks.loss_memory", *options],
                    check=True,
                    stdout=subprocess.PIPE,
                    text=True,
                ).stdout
                results[way].append(json.loads(output))
        floor = results["all at once"]
        for way, runs in results.items():
            peaks, seconds = [run["peak"] for run in runs], [run["seconds"] for run in runs]
            slower = [run["seconds"] / other["seconds"] for run, other in zip(runs, floor, strict=True)]
            rows.append(
                [
                    f"{tokens:,}",
                    way,
                    spread([peak / 1e9 for peak in peaks]),
                    f"{statistics.median(peaks) / (4 * tokens * VOCABULARY):.2f}",
                    f"{statistics.median(peaks) / statistics.median(run['peak'] for run in floor):.2f}",
                    spread(seconds),
                    spread(slower),
                ]
            )
            print(rows[-1], flush=True)
    columns = ["target tokens", "way", "peak GB", "of N x V x 4 bytes", "of all at once", "seconds", "of all at once"]
    lines = [
        *table(columns, rows),
        "",
        f"One layer of {WIDTH} x {VOCABULARY:,} (Qwen3 0.6B) in float32 on one thread, forward and backward: "
        f"log-probabilities, entropies as a metric, gradients of weight and hidden states. The peak is that of the "
        f"resident set of a process, without weight and hidden states; {4 * WIDTH * VOCABULARY / 1e9:.2f} GB of it are "
        f"the weight's gradient, which all have. Median (smallest to largest) of {args.repeats} processes of "
        f"{args.passes} passes, in turns.",
    ]
    print("\n".join(lines))
    if args.record:
        record("loss_memory", "Memory of the loss", "make bench ARGS='loss_memory --record'", lines)


if __name__ == "__main__":
    main()
