"""TorchTitan's models from a Hugging Face checkpoint folder, and back."""

from __future__ import annotations

import inspect
import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from forge_env.errors import UsageError
from forge_env.files import written_whole
from trainers.model.folder import check_heads, read_hf_config, weight_files
from trainers.titan.batch import Microbatch
from trainers.titan.families import FAMILIES, Experts, tensor_shapes, titan_config
from trainers.titan.parallel import Ranks, Sharding, whole

LAYER = re.compile(r"model\.layers\.\d+\.")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# This logger has the name of its file, so that the hub's own settings don't reach it: it would tell of every save.
logging.getLogger(inspect.getfile(save_torch_state_dict)).setLevel(logging.WARNING)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def check_weights(folder: Path) -> None:
    """Refuse a checkpoint whose files don't hold what its `config.json` says; only their headers are read.

    Raises:
        UsageError: with what is wrong with them.
    """
    hf = read_hf_config(folder)
    expected, found = tensor_shapes(hf), dict[str, tuple[int, ...]]()
    kinds = set[str]()
    for file in weight_files(folder):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                found[name] = tuple(part.get_shape())
                kinds.add(part.get_dtype())
    again = "fetch the checkpoint again"
    if absent := [name for name in expected if name not in found]:
        raise UsageError(f"{folder} lacks {_first(absent)}", fix=again)
    tokens = found[EMBEDDING][0]
    if tokens != hf["vocab_size"]:
        raise UsageError(
            f"{folder} has another vocabulary than its config.json: embeddings of {tokens} tokens, "
            f"vocab_size={hf['vocab_size']}",
            fix=again,
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise UsageError(f"{name} in {folder} has the shape {found[name]}, config.json says {shape}", fix=again)
    unknown = [name for name in found if name not in expected and not name.endswith((HEAD, "rotary_emb.inv_freq"))]
    if unknown:
        raise UsageError(
            f"{folder} has {_first(unknown)}, which a {hf['model_type']!r} model lacks", fix="use a checkpoint without"
        )
    if other := sorted(kinds - {"F32", "BF16", "F16"}):
        raise UsageError(
            f"{folder} has weights of type {', '.join(other)}", fix="use a checkpoint in bfloat16 or float32"
        )
    declared = hf.get("dtype") or hf.get("torch_dtype")
    if declared == "float32" and (lower := sorted(kinds - {"F32"})):
        raise UsageError(
            f"{folder} has weights of type {', '.join(lower)}, config.json says float32",
            fix=f"{again}, or correct its dtype: the lost precision is not coming back",
        )


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """With memory of its own: an expert's weights are a part of all experts'."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _first(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} other tensors"


class TitanModel:
    """A TorchTitan model, sharded over the ranks of its trainer, with the adapter to Hugging Face names.

    Attributes:
        dtype: precision of the arithmetic; weights are float32.
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
    ) -> None:
        self.folder = Path(folder)
        self.sharding = sharding or Sharding()
        self.ranks = Ranks(self.sharding.dims, device)
        self._device = device
        self.dtype = getattr(torch, dtype)
        hf = read_hf_config(folder)
        self.config = titan_config(hf, max_length)
        self._family = FAMILIES[hf["model_type"]]
        self._adapter = self._family.adapter(self.config, None)
        self._seed = seed
        self.module: Any = self._build()
        if weight_files(self.folder):
            self.load_folder(self.folder)
        elif not self.ranks.alone:
            self.load_hf(self._random_weights())
        parameters = sum(parameter.numel() for parameter in self.module.parameters())
        # Multiply-adds of attention per squared token, and over those of linear layers per token; causal, so halved.
        self.attention_cost: int = hf["num_hidden_layers"] * hf["num_attention_heads"] * hf["head_dim"]
        self.quadratic_cost = self.attention_cost / parameters
        self.head_parameters: int = hf["vocab_size"] * hf["hidden_size"]
        embeddings = self.head_parameters * (1 if self.config.enable_weight_tying else 2)
        self.layer_parameters: int = parameters - embeddings - self._idle_parameters(hf)

    def _idle_parameters(self, hf: Mapping[str, Any]) -> int:
        """Those of experts that a token is not sent to."""
        mixtures = [module for module in self.module.modules() if isinstance(module, Experts)]
        held = sum(parameter.numel() for mixture in mixtures for parameter in mixture.parameters())
        return held - held * hf["num_experts_per_tok"] // hf["num_experts"] if held else 0

    def _build(self) -> Any:
        """The module on its device, sharded; its weights are random only where there is one rank."""
        torch.manual_seed(self._seed)
        if self.ranks.alone:
            with self._device:
                module = self.config.build()
            with torch.no_grad():
                module.init_states(buffer_device=self._device)
            self.ranks.parallelize(module, self._family.parallelize, self.sharding, self.dtype)
            return module
        check_heads(read_hf_config(self.folder), self.ranks.tensor_degree)
        self._family.shard(self.config)
        with torch.device("meta"):
            module = self.config.build()
        self.ranks.parallelize(module, self._family.parallelize, self.sharding, self.dtype)
        module.to_empty(device=self._device)
        with torch.no_grad():
            module.init_states(buffer_device=self._device)
        return module

    def _random_weights(self) -> dict[str, torch.Tensor]:
        """Those that one rank would begin with, whatever their number."""
        torch.manual_seed(self._seed)
        module = self.config.build()
        with torch.no_grad():
            module.init_states(buffer_device=torch.device("cpu"))
        weights: dict[str, torch.Tensor] = self._adapter.to_hf(module.state_dict())
        return weights

    def score(self, batch: Microbatch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each target at this temperature, float32 [N] each."""
        with self._precision():
            scored: tuple[torch.Tensor, torch.Tensor] = self.module(
                batch.tokens, batch.positions, batch.layout, batch.predictors, batch.target_ids, temperature
            )
        return scored

    def _precision(self) -> torch.autocast:
        """Weights and optimizer stay in float32; arithmetic is in the recipe's precision (sharded: FSDP's matter)."""
        enabled = self.dtype != torch.float32 and self.ranks.alone
        return torch.autocast(self._device.type, dtype=self.dtype, enabled=enabled)

    def state_dict_hf(self) -> dict[str, torch.Tensor]:
        """Whole weights under Hugging Face names; a tied head is left out.

        A collective of all ranks, of which the first has the result, in main memory, and the others have nothing.
        """
        named = self.module.state_dict()
        if self.config.enable_weight_tying:
            named.pop("lm_head.weight", None)
        state: dict[str, torch.Tensor] = {}
        for name, item in named.items():
            tensor = whole(item).detach()  # one at a time: no rank ever holds all of them on its device
            if self.ranks.first:
                state[name] = tensor if self.ranks.alone else tensor.cpu()
        converted: dict[str, torch.Tensor] = self._adapter.to_hf(state)
        return converted

    def load_hf(self, state: dict[str, torch.Tensor]) -> None:
        """Copy whole weights under Hugging Face names into the model; each rank keeps its shard."""
        self._copy(self._adapter.from_hf(dict(state)), strict=True)

    def load_folder(self, folder: Path) -> None:
        """Copy the weights of a checkpoint folder into the model, layer by layer; each rank keeps its shard.

        So no rank ever has more than one layer whole.

        Raises:
            UsageError: the files lack tensors of the model.
        """
        missing = set(self.module.state_dict())
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(file, framework="pt")) for file in weight_files(folder)]
            places = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - it is no mapping
            layers: dict[str, list[str]] = {}
            for name in places:
                found = LAYER.match(name)
                layers.setdefault(found[0] if found else "", []).append(name)
            for layer, names in layers.items():
                # TorchTitan's adapters look for the embedding, which may be the head
                state = {name: places[name].get_tensor(name) for name in dict.fromkeys([*names, EMBEDDING])}
                named = self._adapter.from_hf(state)
                if layer:
                    named = {name: tensor for name, tensor in named.items() if name.startswith("layers.")}
                self._copy(named, strict=False)
                missing -= named.keys()
        if missing:
            raise UsageError(
                f"the weights in {folder} lack {_first(sorted(missing))}", fix="fetch the checkpoint again"
            )

    def _copy(self, named: Mapping[str, torch.Tensor], *, strict: bool) -> None:
        if self.ranks.alone:
            self.module.load_state_dict(named, strict=strict)
        else:
            set_model_state_dict(
                self.module, dict(named), options=StateDictOptions(full_state_dict=True, strict=strict)
            )

    def save_hf(self, folder: Path, dtype: str = "float32") -> None:
        """Write a complete Hugging Face folder; it appears whole or not at all. A collective: all ranks call it."""
        weights = self.state_dict_hf()
        if self.ranks.first:
            self.write_hf({name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}, folder)

    def write_hf(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Write whole weights under Hugging Face names as a complete folder, in files of at most 5 GB."""
        with written_whole(folder) as staging:
            staging.mkdir()
            for name in TOKENIZER_FILES:
                if (self.folder / name).is_file():
                    shutil.copy(self.folder / name, staging / name)
            config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
            kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
            config["dtype" if "dtype" in config else "torch_dtype"] = kinds.pop()
            (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            save_torch_state_dict({name: _own(tensor.cpu()) for name, tensor in weights.items()}, staging)
