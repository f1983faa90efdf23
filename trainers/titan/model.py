"""TorchTitan's Qwen3 from a Hugging Face checkpoint folder, and back."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from forge_env.files import written_whole
from trainers.model.folder import check_heads, read_hf_config
from trainers.titan.attention import PackedAttention
from trainers.titan.batch import Microbatch
from trainers.titan.layout import ContextLayout, PackedLayout
from trainers.titan.parallel import Ranks, Sharding, whole

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


class PolicyModel(Qwen3Model):  # type: ignore[misc]
    """TorchTitan's Qwen3 that scores the vocabulary only where a target has to be predicted.

    The head is part of the model's one forward call, so that FSDP sees whole passes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):  # type: ignore[misc]
        """As Qwen3's."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: PackedLayout | ContextLayout | None = None,
        predictors: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Scores [N, V] at `predictors`, [N] indices into the flattened [B, T] rows."""
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, attention_masks, positions)
        hidden = self.norm(hidden)
        if isinstance(hidden, DTensor):  # tensor parallel: the same on all its ranks
            hidden = hidden.to_local()
        chosen = hidden.flatten(0, 1).index_select(0, predictors)
        scores: torch.Tensor = whole(self.lm_head(chosen))
        return scores


def titan_config(hf: dict[str, Any], max_length: int) -> PolicyModel.Config:
    """TorchTitan's model config with the shape of a Hugging Face Qwen3 config."""
    dim, head_dim, layers = hf["hidden_size"], hf["head_dim"], hf["num_hidden_layers"]
    rope_theta = hf.get("rope_theta") or (hf.get("rope_parameters") or {}).get("rope_theta", 1e6)
    normal = {"weight": partial(nn.init.normal_, std=hf.get("initializer_range", 0.02)), "bias": nn.init.zeros_}
    residual = {**normal, "weight": partial(nn.init.normal_, std=0.02 / (2 * layers) ** 0.5)}
    tied = bool(hf.get("tie_word_embeddings", False))

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=hf["rms_norm_eps"], param_init={"weight": nn.init.ones_})

    def block() -> Qwen3TransformerBlock.Config:
        attention = make_gqa_config(
            dim=dim,
            n_heads=hf["num_attention_heads"],
            n_kv_heads=hf["num_key_value_heads"],
            head_dim=head_dim,
            wqkv_param_init=normal,
            wo_param_init=residual,
            inner_attention=PackedAttention.Config(),
            rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=max_length, theta=rope_theta),
            qk_norm=norm(head_dim),
        )
        ffn = make_ffn_config(
            dim=dim, hidden_dim=hf["intermediate_size"], w1_param_init=normal, w2w3_param_init=residual
        )
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(dim), ffn_norm=norm(dim), attention=attention, feed_forward=ffn
        )

    return PolicyModel.Config(
        vocab_size=hf["vocab_size"],
        dim=dim,
        norm=norm(dim),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=hf["vocab_size"],
            embedding_dim=dim,
            param_init={"weight": skip_param_init} if tied else normal,
        ),
        lm_head=Linear.Config(in_features=dim, out_features=hf["vocab_size"], param_init=normal),
        layers=[block() for _ in range(layers)],
    )


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
        self._adapter = Qwen3StateDictAdapter(self.config, None)
        self._seed = seed
        self.module: Any = self._build()
        if not self.ranks.alone or self.weight_files():
            self.load_hf(self._initial_weights())
        parameters = sum(parameter.numel() for parameter in self.module.parameters())
        # Multiply-adds of attention per squared token, and over those of linear layers per token; causal, so halved.
        self.attention_cost: int = hf["num_hidden_layers"] * hf["num_attention_heads"] * hf["head_dim"]
        self.quadratic_cost = self.attention_cost / parameters
        self.head_parameters: int = hf["vocab_size"] * hf["hidden_size"]
        embeddings = self.head_parameters * (1 if self.config.enable_weight_tying else 2)
        self.layer_parameters: int = parameters - embeddings

    def _build(self) -> Any:
        """The module on its device, sharded; its weights are random only where there is one rank."""
        torch.manual_seed(self._seed)
        if self.ranks.alone:
            module = self.config.build().to(self._device)
            with torch.no_grad():
                module.init_states(buffer_device=self._device)
            self.ranks.parallelize(module, self.sharding, self.dtype)
            return module
        check_heads(read_hf_config(self.folder), self.ranks.tensor_degree)
        set_qwen3_sharding_config(self.config, enable_sp=True, enable_ep=False)
        with torch.device("meta"):
            module = self.config.build()
        self.ranks.parallelize(module, self.sharding, self.dtype)
        module.to_empty(device=self._device)
        with torch.no_grad():
            module.init_states(buffer_device=self._device)
        return module

    def _initial_weights(self) -> dict[str, torch.Tensor]:
        """From the checkpoint, or random ones that don't depend on the number of ranks."""
        if files := self.weight_files():
            return {name: tensor for file in files for name, tensor in load_file(file).items()}
        torch.manual_seed(self._seed)
        module = self.config.build()
        with torch.no_grad():
            module.init_states(buffer_device=torch.device("cpu"))
        weights: dict[str, torch.Tensor] = self._adapter.to_hf(module.state_dict())
        return weights

    def weight_files(self) -> list[Path]:
        """The folder's safetensors files; none for a checkpoint that is yet to be trained."""
        return sorted(self.folder.glob("*.safetensors"))

    def logits(self, batch: Microbatch) -> torch.Tensor:
        """Scores over the vocabulary for each target, in float32: [N, V]."""
        with self._precision():
            logits: torch.Tensor = self.module(batch.tokens, batch.positions, batch.layout, batch.predictors)
        return logits.float()

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
        named = self._adapter.from_hf(dict(state))
        if self.ranks.alone:
            self.module.load_state_dict(named, strict=True)
        else:
            set_model_state_dict(self.module, named, options=StateDictOptions(full_state_dict=True, strict=True))

    def save_hf(self, folder: Path, dtype: str = "float32") -> None:
        """Write a complete Hugging Face folder; it appears whole or not at all. A collective: all ranks call it."""
        weights = self.state_dict_hf()
        if self.ranks.first:
            self.write_hf({name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}, folder)

    def write_hf(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Write whole weights under Hugging Face names as a complete folder."""
        with written_whole(folder) as staging:
            staging.mkdir()
            for name in ("config.json", *TOKENIZER_FILES):
                if (self.folder / name).is_file():
                    shutil.copy(self.folder / name, staging / name)
            state = {name: tensor.contiguous().cpu() for name, tensor in weights.items()}
            save_file(state, str(staging / "model.safetensors"), metadata={"format": "pt"})
