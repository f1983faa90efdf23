"""Compare a step of a real model with its floor: bare vLLM for the step's samples plus a bare trainer for its batch.

The run is `smollm2/cards`, without evaluations. Its recording gives both floors right afterwards: vLLM's `LLM`, without
forge-env's replacements in it, samples for the run's prompts as many tokens as the run did; TorchTitan's model makes
forward pass, backward pass and update of the run's batches, packed as in the run. Each has all cores to itself, and no
environment, loop, buffer, weight sync, metrics or checksums. Their sum is the floor. A ratio below 1 means that
sampling beside training uses the cores better than one after the other. Steps that fill or drain the pipeline are left
out. Aim: at most 1.15.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.frame import apart, main, spread, table, train, trained
from forge_env.config.finding import read_run
from forge_env.config.reader import build
from forge_env.config.recipe import RunConfig
from forge_env.run.recording import Recording

OVERRIDES = ("evaluation.every=0", "evaluation.num_tasks=8", "evaluation.extra_splits=[]", "checkpoint.minutes=0")
RUN, SAMPLING, TRAINING = "asynchronous step", "floor: vLLM", "floor: TorchTitan"


def opened(folder: str) -> tuple[Recording, RunConfig, Path]:
    """A run's recording, its recipe, and the folder of the model that it started from."""
    recording = Recording(Path(folder))
    config = build(RunConfig, read_run(str(recording.folder.config)))
    return recording, config, recording.root / recording.trained.beginnings[0].model


def each(work: Callable[[Any], object], items: Sequence[Any]) -> list[float]:
    """Seconds of `work` on each item, after one call that isn't counted."""
    work(items[0])
    times = [time.perf_counter()]
    for item in items:
        work(item)
        times.append(time.perf_counter())
    return [end - start for start, end in pairwise(times)]


def sampling(folder: str, steps: Sequence[int], threads: int) -> list[float]:
    """Seconds that bare vLLM takes for the samples of each step."""
    from trainers.generator.arguments import engine_arguments, process_environment

    recording, config, model = opened(folder)
    environment = process_environment(with_gpus=False, threads=threads, kv_cache_gb=config.generator.kv_cache_gb)
    os.environ.update(environment | {"VLLM_LOGGING_LEVEL": "ERROR"})
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(threads)
    llm = LLM(**engine_arguments(config, model), skip_tokenizer_init=True)

    def sample(step: int) -> None:
        replies = [turn.reply for episode in recording.played(step) for turn in episode.turns]
        llm.reset_prefix_cache()
        params = [
            SamplingParams(max_tokens=len(reply.token_ids), ignore_eos=True, logprobs=0, detokenize=False, seed=seed)
            for seed, reply in enumerate(replies)
        ]
        llm.generate([{"prompt_token_ids": reply.prompt_ids.tolist()} for reply in replies], params, use_tqdm=False)

    return each(sample, steps)


def training(folder: str, steps: Sequence[int], threads: int) -> list[float]:
    """Seconds that the bare trainer takes for the batch of each step."""
    from trainers.buffer.packed import repack
    from trainers.buffer.sequences import in_batch
    from trainers.losses.load import make_loss
    from trainers.titan.device import use_device

    recording, config, model = opened(folder)
    section, loss, device = config.trainer, make_loss(config.grpo.loss), use_device(with_gpus=False)
    from trainers.titan.engine import TitanEngine
    from trainers.titan.model import TitanModel

    engine = TitanEngine(
        TitanModel(model, max_length=config.model.max_length, device=device.torch),
        section.optimizer,
        device=device,
        steps=config.grpo.steps,
        microbatch_tokens=section.microbatch_tokens,
        temperature=config.grpo.temperature,
        threads=threads,
        share_prefixes=section.share_prefixes,
    )

    def update(step: int) -> None:
        groups = (repack(recording.episodes(item), item.credit) for item in recording.trained.steps[step])
        engine.forward_backward(in_batch(group.segments() for group in groups), loss)
        engine.optim_step()

    return each(update, steps)


def measured(rows: Sequence[Mapping[str, Any]], staleness: int) -> tuple[list[int], dict[str, float]]:
    """The steps during which the pipeline is full, and what each took on average, in seconds by part.

    The step itself comes first, then the time accounts of the trainer and the generator.
    """
    pairs = list(pairwise(rows))[staleness + 1 : -(staleness + 1)]
    parts: dict[str, list[float]] = {RUN: [row["time"] - before["time"] for before, row in pairs]}
    for _, row in pairs:
        for name, seconds in row.items():
            if name.startswith(("time/trainer/", "time/generator/")):
                parts.setdefault(name.removeprefix("time/").replace("/", ": "), []).append(seconds)
    return [int(row["step"]) for _, row in pairs], {name: sum(each) / len(pairs) for name, each in parts.items()}


def compare(root: Path, steps: int, threads: int) -> dict[str, float]:
    """Train once, then measure the floors of the same steps; returns seconds a step by part."""
    folder = train("floor", f"grpo.steps={steps}", *OVERRIDES, recipe="smollm2/cards", root=root)
    staleness = opened(str(folder))[1].grpo.max_off_policy_steps
    full, parts = measured(trained(folder), staleness)
    for name, function in ((SAMPLING, "sampling"), (TRAINING, "training")):
        parts[name] = statistics.fmean(apart(f"benchmarks.floor:{function}", str(folder), full, threads))
    shutil.rmtree(folder)  # the next round trains again
    return parts


def report(rounds: Sequence[Mapping[str, float]]) -> list[str]:
    """The table of a few rounds."""
    names = [name for name in dict.fromkeys(name for parts in rounds for name in parts) if name != RUN]
    values = {name: [parts.get(name, 0.0) for parts in rounds] for name in (RUN, *names)}
    floors = [parts[SAMPLING] + parts[TRAINING] for parts in rounds]
    rows = [[name, spread(seconds)] for name, seconds in values.items() if max(seconds) >= 0.01]
    shares = [parts[RUN] / floor for parts, floor in zip(rounds, floors, strict=True)]
    rows += [["floor: together", spread(floors)], ["ratio of step to floor", spread(shares)]]
    return table(["", "seconds a step"], rows)


def measure(args: argparse.Namespace) -> list[str]:
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="forge-env-") as root:
        return report([compare(Path(root), args.steps, threads) for _ in range(args.repeats)])


if __name__ == "__main__":
    main("A step of a real model and its floor", measure, repeats=2, steps=9)
