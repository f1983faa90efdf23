"""Compare the trainer's tokens per second with a bare TorchTitan step on the same batch, and measure padding.

The batch has 32 sequences of the default recipe's model. The floor is TorchTitan's Qwen3 with causal attention, AdamW
and gradient clipping. It starts from padded rows, computes logits at every position, and has no metrics. The trainer
starts from token sequences and does everything that it does in a run, entropy, ratios and clip fractions included, but
computes logits only for the tokens that it trains on. Rows without a number of threads have one thread.

The last table has tokens per CPU second of forward and backward passes in one thread, for groups of eight episodes that
share their prompt (`trainer.share_prefixes`). All tokens of all sequences count, shared or not.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3 import Qwen3Model

from benchmarks.frame import in_turns, main, ratio, shape_folder, spread, table, timed
from forge_env.config.recipe import ModelSection, OptimizerSection
from forge_env.trajectory import Segment
from trainers.losses import GRPOLoss
from trainers.model.folder import read_hf_config
from trainers.titan.batch import collate
from trainers.titan.device import use_device
from trainers.titan.engine import TitanEngine
from trainers.titan.families import titan_config
from trainers.titan.model import TitanModel
from trainers.titan.optimizer import build_optimizer

MAX_LENGTH = 512
VOCABULARY = 1024
MICROBATCH_TOKENS = 2048  # default of the recipe
IGNORED = -100
FLOOR = "bare TorchTitan"
LLAMA_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
}


def episodes(count: int) -> list[Segment]:
    """Make sequences with prompts of 60 tokens and answers of widely varying length, as in rollouts."""
    rng = random.Random(0)
    result = []
    for _ in range(count):
        answer = min(MAX_LENGTH - 60, max(10, round(rng.lognormvariate(4.4, 0.5))))
        ids = np.array([rng.randrange(VOCABULARY) for _ in range(60 + answer)], np.int32)
        mask = np.arange(len(ids)) >= 60
        advantages = mask * np.float32(rng.uniform(-1, 1))
        result.append(Segment(ids, mask, mask * np.float32(-6.9), advantages=advantages))
    return result


def bare_step(folder: Path, data: Sequence[Segment]) -> Callable[[], None]:
    """Return a function for one update with TorchTitan alone."""
    model_config = titan_config(read_hf_config(folder), MAX_LENGTH)
    for layer in model_config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    head = model_config.lm_head  # forge-env's head computes no logits
    model_config.lm_head = Linear.Config(
        in_features=head.in_features, out_features=head.out_features, param_init=head.param_init
    )
    torch.manual_seed(0)
    module = Qwen3Model(model_config)
    with torch.no_grad():
        module.init_states(buffer_device=torch.device("cpu"))
    section = OptimizerSection()
    optimizer = build_optimizer(module, section, use_device(with_gpus=False))
    batches = []
    for rows in by_length(data):
        tokens = torch.zeros(len(rows), len(rows[0].token_ids), dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORED)
        for number, row in enumerate(rows):
            ids, learned = torch.from_numpy(row.token_ids).long(), torch.from_numpy(row.mask)
            tokens[number, : len(ids)] = ids
            labels[number, : len(ids) - 1] = ids[1:].masked_fill(~learned[1:], IGNORED)
        batches.append((tokens, torch.arange(tokens.shape[1]).repeat(len(rows), 1), labels.flatten()))
    targets = sum(int(sequence.mask.sum()) for sequence in data)

    def step() -> None:
        for tokens, positions, labels in batches:
            logits = module(tokens, attention_masks=None, positions=positions).flatten(0, 1).float()
            loss = cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / targets
            loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(module.parameters(), section.max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_length(data: Sequence[Segment]) -> list[list[Segment]]:
    """Divide sequences, the longest first, into batches of up to `MICROBATCH_TOKENS` in padded rows."""
    left, batches = sorted(data, key=lambda item: len(item.token_ids), reverse=True), []
    while left:
        count = max(1, MICROBATCH_TOKENS // len(left[0].token_ids))
        batches.append(left[:count])
        left = left[count:]
    return batches


def trainer_step(folder: Path, data: Sequence[Segment], *, threads: int) -> Callable[[], object]:
    """Return a function for one update with the trainer, as in a run."""
    device = use_device(with_gpus=False)
    model = TitanModel(folder, max_length=MAX_LENGTH, device=device.torch)
    engine = TitanEngine(
        model,
        OptimizerSection(),
        device=device,
        steps=1000,
        microbatch_tokens=MICROBATCH_TOKENS,
        threads=threads,
    )
    loss = GRPOLoss()
    return lambda: engine.train(data, loss)


GROUPS: dict[str, tuple[ModelSection, dict[str, Any], int, int, int, int, int]] = {
    "the default recipe's model": (ModelSection(), {"vocab_size": VOCABULARY}, 65, 0, 65, 24, MICROBATCH_TOKENS),
    "a Llama of 135M parameters": (ModelSection(), LLAMA_135M, 75, 24, 44, 4, 512),
}
"""Model, changes of its config, tokens of a prompt, those common to all prompts, mean tokens of a reply, groups, and
tokens of a microbatch."""


def groups(count: int, prompt: int, common: int, reply: int, vocabulary: int) -> list[Segment]:
    """Make groups of eight sequences with random prompts and replies."""
    rng = np.random.default_rng(0)
    first, result = rng.integers(0, vocabulary, common), []
    for _ in range(count):
        question = np.concatenate([first, rng.integers(0, vocabulary, prompt - common)])
        for length in rng.normal(reply, 0.3 * reply, 8).clip(4, None).astype(int):
            ids = np.concatenate([question, rng.integers(0, vocabulary, length)])
            mask = np.arange(len(ids)) >= prompt
            advantages = mask * np.float32(rng.normal())
            result.append(Segment(ids, mask, mask * np.float32(-6.9), advantages=advantages))
    return result


def shared_prefixes(repeats: int) -> list[list[str]]:
    """Measure forward and backward passes with each sequence apart and with shared prefixes; return rows of a table."""
    device, loss, rows = use_device(with_gpus=False), GRPOLoss(), []
    for name, (section, changes, prompt, common, reply, count, budget) in GROUPS.items():
        data = groups(count, prompt, common, reply, changes["vocab_size"])
        with tempfile.TemporaryDirectory() as temporary:
            folder = shape_folder(Path(temporary, "shape"), section, VOCABULARY, changes)
            model = TitanModel(folder, max_length=MAX_LENGTH, device=device.torch)
        options: dict[str, Any] = {"device": device, "steps": 1000, "microbatch_tokens": budget}

        def rate(engine: TitanEngine, data: list[Segment] = data) -> float:
            _, cpu = timed(lambda: engine.forward_backward(data, loss))
            engine.clear_gradients()
            return tokens_of(data) / cpu

        ways = {
            way: partial(rate, TitanEngine(model, OptimizerSection(), share_prefixes=share, **options))
            for way, share in (("apart", False), ("shared", True))
        }
        apart, shared = in_turns(ways, repeats, warm_up=1).values()
        shapes = f"{count} groups, prompts of {prompt} tokens ({common} common to all), replies of {reply}"
        rows.append([name, shapes, spread(apart), spread(shared), f"{ratio(shared, apart):.2f}x"])
    return rows


def tokens_of(data: Sequence[Segment]) -> int:
    return sum(len(sequence.token_ids) for sequence in data)


def padding(data: Sequence[Segment]) -> dict[str, float]:
    """Return the share of padding among the computed tokens, by layout of rows."""
    lengths, answers = [len(item.token_ids) for item in data], [int(item.mask.sum()) for item in data]
    prompt = max(length - answer for length, answer in zip(lengths, answers, strict=True))
    computed = {
        "longest prompt + longest answer": len(data) * (prompt + max(answers)),
        "rows sorted by length": sum(len(rows) * len(rows[0].token_ids) for rows in by_length(data)),
        "packed": collate(data, torch.device("cpu")).tokens.numel(),
    }
    return {name: 1 - sum(lengths) / tokens for name, tokens in computed.items()}


def compare(repeats: int, sequences: int) -> tuple[dict[str, list[Any]], list[Segment]]:
    """Return tokens per second of wall and of CPU time; steps take turns, after one warm-up each."""
    data = episodes(sequences)
    with tempfile.TemporaryDirectory() as temporary:
        folder = shape_folder(Path(temporary, "shape"), ModelSection(), VOCABULARY)
        steps: dict[str, Callable[[], object]] = {
            FLOOR: bare_step(folder, data),
            "trainer": trainer_step(folder, data, threads=1),
            "trainer, 2 threads": trainer_step(folder, data, threads=2),
        }
        taken = in_turns({name: partial(timed, step) for name, step in steps.items()}, repeats, warm_up=1)
    tokens = tokens_of(data)
    rates = {
        name: [[tokens / seconds for seconds in clock] for clock in zip(*each, strict=True)]
        for name, each in taken.items()
    }
    return rates, data


def measure(args: argparse.Namespace) -> list[str]:
    logging.disable(logging.INFO)
    rates, data = compare(args.repeats, args.sequences)
    rows = []
    for name, columns in rates.items():
        shares = [f"{ratio(mine, bare):.0%}" for mine, bare in zip(columns, rates[FLOOR], strict=True)]
        rows.append([name, *map(spread, columns), *shares])
    columns = ["", "tokens/s", "tokens per CPU second", "of the floor (wall)", "of the floor (CPU)"]
    shares = table(["padding", "share of the tokens computed"], [[k, f"{v:.1%}"] for k, v in padding(data).items()])
    shared = table(["model", "batch", "each apart", "shared", "gain"], shared_prefixes(max(1, args.repeats // 3)))
    return [*table(columns, rows), "", *shares, "", *shared]


if __name__ == "__main__":
    main("Trainer", measure, repeats=9, sequences=32)
