"""Generator and trainer side by side in one process, family after family; a process of its own runs it."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from forge_env.config import RunConfig
from forge_env.config.recipe import EnvironmentSection, GeneratorSection, LoRASection, ModelSection
from forge_env.trajectory import Segment
from trainers.generator.arguments import ADAPTERS, caches_prefixes_on_cpu, engine_arguments, show_model
from trainers.generator.generator import import_engine
from trainers.generator.types import Completion, SamplingOptions
from trainers.model.adapter import layer_shapes
from trainers.model.folder import read_hf_config

UPDATES = 5
"""The second load of weights is the first that can be wrong in its own way."""


def run_parity(names: list[str], out: Path) -> dict[str, dict[str, Any]]:
    """What `observe` finds for checkpoints of these names."""
    process = multiprocessing.get_context("spawn").Process(target=_main, args=(names, out))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert not (out / "vllm" / "modelinfos").exists(), "vLLM started a process to look at a model"
    found: dict[str, dict[str, Any]] = json.loads((out / "found.json").read_text())
    return found


def _main(names: list[str], out: Path) -> None:
    os.environ["VLLM_CACHE_ROOT"] = str(out / "vllm")  # of a machine on which vLLM has met no model
    import_engine(with_gpus=False, threads=1, kv_cache_gb=1)
    found: dict[str, Any] = {}
    for name in names:
        found[name] = asyncio.run(observe(name, out / name))
        found[name]["beside"] = asyncio.run(observe(name, out / name, beside=True))
    (out / "found.json").write_text(json.dumps(found))


def _published(model: Any) -> list[tuple[str, Any]]:
    return [(part.name, part.values) for part in model.published()]


async def observe(name: str, folder: Path, *, beside: bool = False) -> dict[str, Any]:
    """Largest differences between both sides' log-probabilities, before and after weights swapped in flight.

    With `beside` only those of adapters, which the generator keeps apart from the weights, as it does in bfloat16.
    """
    import torch

    from tests.trainers.model.checkpoints import VOCABULARY, write_checkpoint
    from trainers.generator.engine import InProcessEngine
    from trainers.titan.device import use_device
    from trainers.titan.model import TitanModel
    from trainers.titan.score import Scorer
    from trainers.weights.checksum import checksums, total

    if not beside:
        write_checkpoint(name, folder)
    show_model(str(folder))
    device = use_device(with_gpus=False)
    model = TitanModel(folder, max_length=256, device=device.torch)
    scorer = Scorer(model, device=device, microbatch_tokens=2048)
    config = RunConfig(
        environment=EnvironmentSection(name="coding_rlvr"),
        model=ModelSection(path=str(folder), max_length=256),
        generator=GeneratorSection(max_num_seqs=8, engine_args={"num_gpu_blocks_override": 256}),
    )
    apart = {"hf_overrides": {"quantization_config": {"quant_method": ADAPTERS, "rank": 8}}} if beside else {}
    cached = {"enable_prefix_caching": caches_prefixes_on_cpu(str(folder))}
    engine = InProcessEngine(engine_arguments(config, folder) | cached | apart)
    prompts = torch.randint(0, VOCABULARY, (8, 40), generator=torch.Generator().manual_seed(0)).numpy()

    async def sample(tokens: int) -> list[Completion]:
        options = SamplingOptions(max_tokens=tokens)
        return await asyncio.gather(*(engine.generate(prompt, options) for prompt in prompts))

    def mismatch(completions: list[Completion]) -> float:
        rows = [np.concatenate([item.prompt_ids, item.token_ids]) for item in completions]
        theirs = scorer.logprobs([Segment(row, np.arange(len(row)) >= 40) for row in rows])
        return max(float(abs(ours.logprobs - other).max()) for ours, other in zip(completions, theirs, strict=True))

    # With much noise, float32 is less exact: a gated delta layer's norm removes the size of what it reads, and Phi 4
    # mini with long factors differs by 1.2e-5 instead of 2.4e-6.
    noise = 0.02 if name.startswith("Qwen 3.5") or name == "Phi 4 mini" else 0.05

    async def adapted(section: LoRASection, version: int) -> dict[str, float]:
        nonlocal scorer
        model = TitanModel(folder, max_length=256, device=device.torch, lora=section)
        scorer = Scorer(model, device=device, microbatch_tokens=2048)
        in_flight = asyncio.ensure_future(sample(100))
        for more in range(UPDATES):
            with torch.no_grad():
                for parameter in model.module.parameters():
                    if parameter.requires_grad:
                        parameter.add_(noise * torch.randn_like(parameter))
            await engine.load_weights(partial(_published, model), version + more)
        swapped = max(len(set(item.versions.tolist())) for item in await in_flight)
        return {"after": mismatch(await sample(40)), "moved": mismatch(first), "swapped": swapped}

    first = await sample(40)
    if beside:
        found = await adapted(LoRASection(), 1)
        await engine.close()
        return found
    before = mismatch(first)
    in_flight = asyncio.ensure_future(sample(100))
    for version in range(1, UPDATES + 1):
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        await engine.load_weights(partial(_published, model), version)
    swapped = max(len(set(item.versions.tolist())) for item in await in_flight)
    found = {"before": before, "after": mismatch(await sample(40)), "moved": mismatch(first), "swapped": swapped}
    held, whole = await engine.checksum()
    found["held"] = not whole or held == total(checksums(model.state_dict_hf().items()))

    model = TitanModel(folder, max_length=256, device=device.torch)
    await engine.load_weights(lambda: list(model.state_dict_hf().items()), UPDATES + 1)  # the base model's again
    first_layer = next(name for name in layer_shapes(read_hf_config(folder)) if name.startswith("q"))
    found["adapted"] = await adapted(LoRASection(targets=[first_layer, "o_proj"]), UPDATES + 2)
    await engine.close()
    return found
