"""Generator and trainer side by side in one process, family after family; it runs in a separate process."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from forge_env.config import RunConfig
from forge_env.config.recipe import EnvironmentSection, GeneratorSection, LoRASection, ModelSection
from forge_env.trajectory import Segment
from trainers.generator.arguments import ADAPTERS, caches_prefixes_on_cpu, engine_arguments, show_model
from trainers.generator.generator import import_engine
from trainers.generator.types import Completion, SamplingOptions
from trainers.model.adapter import layer_shapes
from trainers.model.folder import read_hf_config

if TYPE_CHECKING:
    from trainers.titan.device import Device

UPDATES = 5
"""Weight updates in a test; some errors appear only from the second one on."""


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


class Pair:
    """A generator and the trainer's model of one checkpoint, in this process."""

    def __init__(self, folder: Path, engine_args: dict[str, Any], device: Device, dtype: str = "float32") -> None:
        import torch

        from tests.trainers.model.checkpoints import VOCABULARY
        from trainers.generator.engine import InProcessEngine

        self._folder, self._device, self._dtype = folder, device, dtype
        self.load_model()
        self.engine = InProcessEngine(engine_args)
        self._prompts = torch.randint(0, VOCABULARY, (8, 40), generator=torch.Generator().manual_seed(0)).numpy()

    def load_model(self, lora: LoRASection | None = None) -> None:
        """Load the trainer's model from the folder, with new adapters if `lora` is given."""
        from trainers.titan.model import TitanModel
        from trainers.titan.score import Scorer

        self.model = TitanModel(self._folder, max_length=256, device=self._device.torch, dtype=self._dtype, lora=lora)
        self._scorer = Scorer(self.model, device=self._device, microbatch_tokens=2048)

    async def sample(self, tokens: int) -> list[Completion]:
        """Completions of the prompts, of at most `tokens` each."""
        options = SamplingOptions(max_tokens=tokens)
        return await asyncio.gather(*(self.engine.generate(prompt, options) for prompt in self._prompts))

    def mismatch(self, completions: list[Completion]) -> NDArray[np.float32]:
        """Differences between both sides' log-probabilities, one for each sampled token."""
        rows = [np.concatenate([each.prompt_ids, each.token_ids]) for each in completions]
        ours = self._scorer.logprobs([Segment(row, np.arange(len(row)) >= 40) for row in rows])
        return abs(np.concatenate(ours) - np.concatenate([each.logprobs for each in completions]))

    async def update(self, version: int, noise: float = 0.02) -> int:
        """Change the trained weights `UPDATES` times, with requests in flight.

        `version` is that of the first update. Returns the largest number of versions that sampled one completion.
        """
        import torch

        in_flight = asyncio.ensure_future(self.sample(100))
        for number in range(version, version + UPDATES):
            with torch.no_grad():
                for parameter in self.model.module.parameters():
                    if parameter.requires_grad:
                        parameter.add_(noise * torch.randn_like(parameter))
            await self.engine.load_weights(self._published, number)
        return max(len(set(each.versions.tolist())) for each in await in_flight)

    def _published(self) -> list[tuple[str, Any]]:
        return [(part.name, part.values) for part in self.model.published()]


async def observe(name: str, folder: Path, *, beside: bool = False) -> dict[str, Any]:
    """Largest differences between both sides' log-probabilities, before and after weights swapped in flight.

    With `beside` only those of adapters, which the generator keeps apart from the weights, as it does in bfloat16.
    """
    from tests.trainers.model.checkpoints import write_checkpoint
    from trainers.titan.device import use_device
    from trainers.weights.checksum import checksums, total

    if not beside:
        write_checkpoint(name, folder)
    show_model(str(folder))
    config = RunConfig(
        environment=EnvironmentSection(name="coding_rlvr"),
        model=ModelSection(path=str(folder), max_length=256),
        generator=GeneratorSection(max_num_seqs=8, engine_args={"num_gpu_blocks_override": 256}),
    )
    apart = {"hf_overrides": {"quantization_config": {"quant_method": ADAPTERS, "rank": 8}}} if beside else {}
    cached = {"enable_prefix_caching": caches_prefixes_on_cpu(str(folder))}
    pair = Pair(folder, engine_arguments(config, folder) | cached | apart, use_device(with_gpus=False))
    first = await pair.sample(40)

    async def updated(version: int, noise: float) -> dict[str, Any]:
        swapped = await pair.update(version, noise)
        after = pair.mismatch(await pair.sample(40))
        return {"after": float(after.max()), "moved": float(pair.mismatch(first).max()), "swapped": swapped}

    # With much noise, float32 is less exact: a gated delta layer's norm removes the size of what it reads, and Phi 4
    # mini with long factors differs by 1.2e-5 instead of 2.4e-6.
    noise = 0.02 if name.startswith("Qwen 3.5") or name == "Phi 4 mini" else 0.05
    if beside:
        pair.load_model(LoRASection())
        found = await updated(1, noise)
        await pair.engine.close()
        return found
    before = float(pair.mismatch(first).max())
    found = {"before": before, **await updated(1, 0.02)}
    held, whole = await pair.engine.checksum()
    found["held"] = not whole or held == total(checksums(pair.model.state_dict_hf().items()))

    pair.load_model()  # the base model's weights again, also in the generator
    await pair.engine.load_weights(lambda: list(pair.model.state_dict_hf().items()), UPDATES + 1)
    first_layer = next(name for name in layer_shapes(read_hf_config(folder)) if name.startswith("q"))
    pair.load_model(LoRASection(targets=[first_layer, "o_proj"]))
    found["adapted"] = await updated(UPDATES + 2, noise)
    await pair.engine.close()
    return found
