"""TorchTitan's Qwen3 from a Hugging Face checkpoint folder, and back."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from trainers.model.folder import read_hf_config, written_whole

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def titan_config(hf: dict[str, Any], max_length: int) -> Qwen3Model.Config:
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
            # Rows are padded on the right, where causal attention alone keeps them apart from the padding.
            inner_attention=ScaledDotProductAttention.Config(),
            rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=max_length, theta=rope_theta),
            qk_norm=norm(head_dim),
        )
        ffn = make_ffn_config(
            dim=dim, hidden_dim=hf["intermediate_size"], w1_param_init=normal, w2w3_param_init=residual
        )
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(dim), ffn_norm=norm(dim), attention=attention, feed_forward=ffn
        )

    return Qwen3Model.Config(
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
    """A TorchTitan model together with the adapter to Hugging Face names."""

    def __init__(
        self, folder: str | Path, *, max_length: int, device: torch.device, seed: int = 0, dtype: str = "float32"
    ) -> None:
        self.folder = Path(folder)
        self._device = device
        self._dtype = getattr(torch, dtype)
        config = titan_config(read_hf_config(folder), max_length)
        self.config = config
        self._adapter = Qwen3StateDictAdapter(config, None)
        torch.manual_seed(seed)
        self.module: Any = config.build().to(device)
        with torch.no_grad():
            self.module.init_states(buffer_device=device)
        if self.weight_files():
            self.load_hf({name: tensor for file in self.weight_files() for name, tensor in load_file(file).items()})
        self.module._skip_lm_head = True  # logits are wanted at sampled positions only

    def weight_files(self) -> list[Path]:
        """The folder's safetensors files; none for a checkpoint that is yet to be trained."""
        return sorted(self.folder.glob("*.safetensors"))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Final hidden states of right-padded rows: [B, T] int64 -> [B, T, D]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        with self._precision():
            hidden: torch.Tensor = self.module(tokens, attention_masks=None, positions=positions)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary in float32: [..., D] -> [..., V]."""
        with self._precision():
            logits: torch.Tensor = self.module.lm_head(hidden)
        return logits.float()

    def _precision(self) -> torch.autocast:
        """Weights and optimizer stay in float32; arithmetic is in the recipe's precision."""
        return torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32)

    def state_dict_hf(self) -> dict[str, torch.Tensor]:
        """Weights under Hugging Face names; a tied head is left out."""
        state: dict[str, torch.Tensor] = self._adapter.to_hf(self.module.state_dict())
        if self.config.enable_weight_tying:
            state.pop("lm_head.weight", None)
        return {name: tensor.detach() for name, tensor in state.items()}

    def load_hf(self, state: dict[str, torch.Tensor]) -> None:
        """Copy weights under Hugging Face names into the model."""
        self.module.load_state_dict(self._adapter.from_hf(dict(state)), strict=True)

    def save_hf(self, folder: Path) -> None:
        """Write a complete Hugging Face folder; it appears whole or not at all."""
        with written_whole(folder) as staging:
            for name in ("config.json", *TOKENIZER_FILES):
                if (self.folder / name).is_file():
                    shutil.copy(self.folder / name, staging / name)
            state = {name: tensor.contiguous().cpu() for name, tensor in self.state_dict_hf().items()}
            save_file(state, str(staging / "model.safetensors"), metadata={"format": "pt"})
