"""Measure memory and time of the last layer: tile by tile, over the whole vocabulary at once, and in recomputed chunks.

One layer of 1024 x 151,936 (Qwen3 0.6B) in float32 on one thread, forward and backward: log-probabilities, entropies as
a metric, gradients of weight and hidden states. Each measurement runs in its own process. The peak is its largest
resident set (VmHWM), less weight and hidden states. It includes 0.62 GB for the weight's gradient, which every way
needs.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.frame import apart, in_turns, main, ratio, spread, table, timed
from trainers.titan.device import use_device
from trainers.titan.head import logprobs_and_entropy

VOCABULARY, WIDTH = 151_936, 1024
"""Sizes of Qwen3 0.6B."""
CHUNK = 256
"""Tokens per chunk."""


def all_at_once(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute logits [N, V] and their log-softmax as a whole, and the entropy as a metric."""
    logits = (hidden @ weight.t()).float() / 1.0
    log_probs = torch.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(-1, targets[:, None])[:, 0]
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return chosen, entropy


def in_chunks(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `all_at_once` over chunks of tokens, with each chunk recomputed in the backward pass."""
    chunks = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    outputs = [checkpoint(all_at_once, rows, weight, ids, use_reentrant=False) for rows, ids in chunks]
    logprobs, entropy = (torch.cat(values) for values in zip(*outputs, strict=True))
    return logprobs, entropy


WAYS = {"all at once": all_at_once, "chunks, recomputed": in_chunks, "tile by tile": logprobs_and_entropy}


def resident(name: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def passes(way: str, tokens: int) -> tuple[int, float]:
    """Return peak bytes and seconds of a forward and a backward pass, in this process."""
    use_device(with_gpus=False)
    torch.manual_seed(0)
    weight = (torch.randn(VOCABULARY, WIDTH) * 0.02).requires_grad_()
    hidden = torch.randn(tokens, WIDTH).requires_grad_()
    targets = torch.randint(VOCABULARY, (tokens,))

    def run(count: int) -> None:
        logprobs, _ = WAYS[way](hidden[:count], weight, targets[:count])
        logprobs.sum().backward()  # type: ignore[no-untyped-call]

    run(8)
    weight.grad = hidden.grad = None
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    seconds, _ = timed(lambda: run(tokens))
    return resident("VmHWM") - before, seconds


def measure(args: argparse.Namespace) -> list[str]:
    rows = []
    for tokens in args.tokens:
        ways = {way: partial(apart, "benchmarks.loss_memory:passes", way, tokens) for way in WAYS}
        taken = {way: list(zip(*each, strict=True)) for way, each in in_turns(ways, args.repeats).items()}
        floor_peaks, floor_seconds = taken["all at once"]
        for way, (peaks, seconds) in taken.items():
            whole = statistics.median(peaks) / (4 * tokens * VOCABULARY)
            of_floor = f"{ratio(peaks, floor_peaks):.2f}"
            size = [spread([each / 1e9 for each in peaks]), f"{whole:.2f}", of_floor]
            rows.append([f"{tokens:,}", way, *size, spread(seconds), f"{ratio(seconds, floor_seconds):.2f}"])
    columns = ["target tokens", "way", "peak GB", "of N x V x 4 bytes", "of all at once", "seconds", "of all at once"]
    return table(columns, rows)


if __name__ == "__main__":
    main("Memory of the loss", measure, tokens=[512, 2048], repeats=3)
