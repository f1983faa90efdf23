"""TorchTitan models that are loaded from, and saved to, Hugging Face checkpoint folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.common.moe import GroupedExperts

from forge_env.config.recipe import LoRASection
from forge_env.errors import UsageError
from forge_env.files import written_whole
from trainers.model import adapter
from trainers.model.folder import (
    check_compilable,
    check_heads,
    check_windows,
    heads,
    is_linear,
    read_hf_config,
    tensors_in,
    unused_tensors,
    weight_files,
    window,
)
from trainers.model.merging import scaled
from trainers.model.parts import Part
from trainers.model.writer import read_companions, write_model
from trainers.titan.batch import Microbatch
from trainers.titan.families import FAMILIES, tensor_shapes, titan_config
from trainers.titan.head import EAGER
from trainers.titan.lora import Adapters
from trainers.titan.parallel import Ranks, Sharding, whole
from trainers.titan.shards import Shards

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check_weights(folder: Path) -> None:
    """Refuse a checkpoint whose files don't hold the tensors its `config.json` declares; only file headers are read."""
    hf = read_hf_config(folder)
    expected, tensors = tensor_shapes(hf), tensors_in(folder)
    shapes = {name: shape for name, (_, shape) in tensors.items()}
    kinds = {kind for kind, _ in tensors.values()}
    again = "fetch the checkpoint again"
    if absent := [name for name in expected if name not in shapes]:
        raise UsageError(f"{folder} lacks {_first(absent)}", fix=again)
    tokens = shapes[EMBEDDING][0]
    if tokens != hf["vocab_size"]:
        raise UsageError(
            f"{folder} has another vocabulary than its config.json: embeddings of {tokens} tokens, "
            f"vocab_size={hf['vocab_size']}",
            fix=again,
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise UsageError(f"{name} in {folder} has the shape {shapes[name]}, config.json says {shape}", fix=again)
    known = expected.keys() | unused_tensors(hf)
    unknown = [name for name in shapes if name not in known and not name.endswith((HEAD, "rotary_emb.inv_freq"))]
    if unknown:
        raise UsageError(
            f"{folder} has {_first(unknown)}, which a {hf['model_type']!r} model lacks",
            fix="use a checkpoint without it",
        )
    if other := sorted(kinds - {"F32", "BF16", "F16"}):
        raise UsageError(
            f"{folder} has weights of type {', '.join(other)}", fix="use a checkpoint in bfloat16 or float32"
        )
    declared = hf.get("dtype") or hf.get("torch_dtype")
    if declared == "float32" and (lower := sorted(kinds - {"F32"})):
        raise UsageError(
            f"{folder} has weights of type {', '.join(lower)}, config.json says float32",
            fix=f"{again}, or correct its dtype: the lost precision can't be restored",
        )


def _first(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} other tensors"


class TitanModel:
    """A TorchTitan model, sharded over the ranks of its trainer, with the adapter to Hugging Face names.

    Its arithmetic is in `dtype`; weights are float32. With `lora`, `adapters` are trained on top of the folder's
    weights; their files name the base model `base_name`, by default the folder.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_length: int,
        device: torch.device,
        seed: int = 0,
        dtype: str = "float32",
        sharding: Sharding | None = None,
        lora: LoRASection | None = None,
        base_name: str | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._companions = read_companions(self.folder)
        self._base_name = base_name or str(self.folder)
        self.sharding = sharding or Sharding()
        self.ranks = Ranks(self.sharding.dims, device)
        self._device = device
        self.dtype = getattr(torch, dtype)
        self._hf = hf = read_hf_config(folder)
        if device.type == "cuda":
            check_windows(self.folder, hf, max_length, in_float32=self.dtype == torch.float32)
        with_attention = [layer for layer in range(hf["num_hidden_layers"]) if not is_linear(hf, layer)]
        if self.sharding.compile:
            check_compilable(self.folder, hf)
        self.config = titan_config(hf, max_length)
        self._family = FAMILIES[hf["model_type"]]
        self.has_sinks = self._family.sinks
        self._adapter = self._family.adapter(self.config, None)
        self._shards = Shards(self._adapter, first=self.ranks.first)
        self._seed = seed
        self.adapters: Adapters | None = None
        if not self.ranks.alone:
            check_heads(hf, self.ranks.tensor_degree, 1 if self.ranks.context is None else self.ranks.context.degree)
            self._family.shard(self.config)
        if lora is not None:
            self.adapters = Adapters(lora, hf, self.config, self._adapter)
            self.config = self.adapters.config
        self.module: Any = self._build()
        if weight_files(self.folder):
            self.load_folder(self.folder)
        elif not self.ranks.alone:
            self.load_hf(self._random_weights())
        parameters = sum(parameter.numel() for parameter in self.module.parameters())
        # Multiply-adds of attention per squared token, halved because it is causal, without layers whose window is
        # bounded or that keep a state; then the same relative to the multiply-adds of linear layers per token.
        unbounded = [heads(hf, layer)[0] for layer in with_attention if (window(hf, layer) or max_length) >= max_length]
        self.attention_cost: int = hf["num_attention_heads"] * sum(unbounded)
        self.quadratic_cost = self.attention_cost / parameters
        self.head_parameters: int = hf["vocab_size"] * hf["hidden_size"]
        tables = [module.weight.numel() for module in self.module.modules() if isinstance(module, nn.Embedding)]
        embeddings = sum(tables) + (0 if self.config.enable_weight_tying else self.head_parameters)
        self.adapter_parameters: int = 0 if lora is None else adapter.adapter_parameters(lora, hf)
        idle = self._idle_parameters(hf) + self.adapter_parameters
        self.layer_parameters: int = parameters - embeddings - idle

    def _idle_parameters(self, hf: Mapping[str, Any]) -> int:
        """Number of expert parameters that a token is not routed to."""
        mixtures = [module for module in self.module.modules() if isinstance(module, GroupedExperts)]
        held = sum(parameter.numel() for mixture in mixtures for parameter in mixture.parameters())
        return held - held * hf["num_experts_per_tok"] // hf["num_experts"] if held else 0

    def _build(self) -> Any:
        """Build the sharded module on its device.

        With several ranks its initial weights are not usable: load others (`_random_weights` or a folder's).
        """
        torch.manual_seed(self._seed)
        with self._device if self.ranks.alone else torch.device("meta"):
            module = self.config.build()
        if self.sharding.compile:
            module.lm_head.kernels = EAGER.compiled()
        if not self.ranks.alone:
            self.ranks.parallelize(module, self._family.parallelize, self.sharding, self.dtype)
            module.to_empty(device=self._device)
        with torch.no_grad():
            module.init_states(buffer_device=self._device)
        if self.ranks.alone:
            self.ranks.parallelize(module, self._family.parallelize, self.sharding, self.dtype)
        return module

    def _random_weights(self) -> dict[str, torch.Tensor]:
        """The initial weights of a single rank, for any number of ranks."""
        torch.manual_seed(self._seed)
        module = self.config.build()
        with torch.no_grad():
            module.init_states(buffer_device=torch.device("cpu"))
        weights: dict[str, torch.Tensor] = self._adapter.to_hf(module.state_dict())
        return weights

    def score(self, batch: Microbatch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each target at this temperature, float32 [N] each."""
        enabled = self.dtype != torch.float32 and self.ranks.alone  # with several ranks, FSDP sets the precision
        with torch.autocast(self._device.type, dtype=self.dtype, enabled=enabled):
            scored: tuple[torch.Tensor, torch.Tensor] = self.module(
                batch.tokens, batch.positions, batch.layout, batch.predictors, batch.target_ids, temperature
            )
        return scored

    def state_dict_hf(self) -> dict[str, torch.Tensor]:
        """Whole weights under Hugging Face names, without a tied head.

        A collective: the first rank gets the result, in main memory if there are several ranks; the others get nothing.
        """
        named = self.module.state_dict()
        if self.config.enable_weight_tying:
            named.pop("lm_head.weight", None)
        state = self._gathered(named)
        if self.adapters is not None and state:
            state = self.adapters.merge(state)
        converted: dict[str, torch.Tensor] = self._adapter.to_hf(state)
        return converted

    def trained_state(self) -> dict[str, torch.Tensor]:
        """This rank's shards of the weights, by TorchTitan's names, if all are trained; a collective.

        Adapters, which are small, are gathered: the first rank gets them under PEFT's names, and the others get
        nothing.
        """
        named: dict[str, torch.Tensor] = self.module.state_dict()
        if self.adapters is None:
            return named
        state = self._gathered({name: item for name, item in named.items() if ".lora_" in name})
        return self.adapters.to_peft(state) if state else {}

    def published(self) -> list[Part]:
        """Parts of `trained_state` that this rank publishes for generators; only adapters are gathered."""
        state = self.trained_state()
        return self._parts(state) if self.adapters is None else Part.all_of(scaled(state, self.adapters.scaling))

    def _parts(self, state: Mapping[str, torch.Tensor]) -> list[Part]:
        """This rank's parts of weights under TorchTitan's names; of replicas, only one rank has a part."""
        return [part for name, item in state.items() for part in self._shards.parts(name, item)]

    def _gathered(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gather whole tensors on the first rank; the others get nothing.

        With several ranks, the result is in main memory.
        """
        state: dict[str, torch.Tensor] = {}
        for name, item in named.items():
            tensor = whole(item).detach()  # one at a time: no rank ever holds all of them on its device
            if self.ranks.first:
                state[name] = tensor if self.ranks.alone else tensor.cpu()
        return state

    def base(self) -> AbstractContextManager[None]:
        """Context in which the model computes as it did before its adapters were trained."""
        return nullcontext() if self.adapters is None else self.adapters.off(self.module)

    def load_hf(self, state: dict[str, torch.Tensor]) -> None:
        """Copy whole weights under Hugging Face names into the model, each rank its shard; adapters are reset."""
        self._copy(self._adapter.from_hf(dict(state)) | self._fresh_adapters(), strict=True)

    def load_folder(self, folder: Path) -> None:
        """Copy the weights of a checkpoint folder into the model; each rank reads only its own shards.

        Adapters are reset.
        """
        fresh = self._fresh_adapters()
        if fresh:
            self._copy(fresh, strict=False)
        self._reshard()
        state = {name: item for name, item in self.module.state_dict().items() if name not in fresh}
        with ExitStack() as stack, torch.no_grad():
            files = [stack.enter_context(safe_open(file, framework="pt")) for file in weight_files(folder)]
            file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping
            parts = [part for name, item in state.items() for part in self._shards.parts(name, item, copies=True)]
            if missing := {part.name for part in parts} - file_of.keys():
                raise UsageError(f"the weights in {folder} lack {_first(sorted(missing))}", fix="fetch it again")
            for part in parts:
                part.put(file_of[part.name].get_slice(part.name)[part.box])

    def _copy(self, named: Mapping[str, torch.Tensor], *, strict: bool) -> None:
        if self.ranks.alone:
            self.module.load_state_dict(named, strict=strict)
        else:
            self._reshard()
            set_model_state_dict(
                self.module, dict(named), options=StateDictOptions(full_state_dict=True, strict=strict)
            )

    def _reshard(self) -> None:
        """Shard the outermost module again, which holds whole weights after a pass without gradients."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def _fresh_adapters(self) -> dict[str, torch.Tensor]:
        return {} if self.adapters is None else self.adapters.fresh(self._seed)

    def load_trained(self, folder: Path) -> None:
        """Load what `write_trained` wrote; adapters must belong to this base model and its layers."""
        if self.adapters is None:
            self.load_folder(folder / "model")
            return
        header = self.ranks.gather(self._base_header if self.ranks.first else None)[0]
        adapter.check_base(folder / adapter.FOLDER, self.folder, header)
        self._copy(self.adapters.from_peft(load_file(folder / adapter.FOLDER / adapter.WEIGHTS)), strict=False)

    def write_trained(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Write `trained_state` into a checkpoint: `model/` (a Hugging Face folder) or `adapter/` (PEFT's format).

        A collective of the ranks' `saving_group`. Raises the errors of `write_model`.
        """
        if self.adapters is None:
            self._write(state, folder / "model", torch.float32)
        elif self.ranks.first:
            with written_whole(folder / adapter.FOLDER) as staging:
                staging.mkdir()
                adapter.write_config(adapter.peft_config(self.adapters.section, self._hf, self._base_name), staging)
                tensors = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
                save_file(tensors, staging / adapter.WEIGHTS, self._base_header)

    def _write(self, state: Mapping[str, torch.Tensor], folder: Path, dtype: torch.dtype) -> None:
        write_model(self._parts(state), self._companions, folder, dtype=dtype, group=self.ranks.saving_group)

    @cached_property
    def _base_header(self) -> dict[str, str]:
        return adapter.weights_header(self.folder)

    def save_hf(self, folder: Path, dtype: str = "float32") -> None:
        """Write a complete Hugging Face folder; it appears complete or not at all.

        A collective: every rank writes its shards of the weights, with adapters added to them.
        """
        state = self.module.state_dict()
        if self.adapters is not None:
            state = self.adapters.merge(state)
        with written_whole(folder) if self.ranks.first else nullcontext() as staging:
            self._write(state, self.ranks.gather(staging)[0], getattr(torch, dtype))
        self.ranks.gather(None)  # barrier: no rank continues before the folder exists
