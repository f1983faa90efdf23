"""A model by its sizes: parameters, multiplications, keys and values, from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from forge_env.config.recipe import ModelSection
from forge_env.errors import UsageError
from trainers.model.folder import check_hf_config, is_mixture, local_folder, read_hf_config
from trainers.model.tiny import hf_config


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder.

    Attributes:
        name: of the model.
        layers: transformer blocks, of which `mixtures` have experts.
        dim: width of the residual stream.
        heads: of queries, and `kv_heads` of keys and values, each of size `head_dim`.
        hidden: width of a feed-forward layer, or of one expert.
        vocabulary: tokens.
        tied: embedding and head are one matrix.
        qk_norm: queries and keys have norms.
        qkv_bias: their projections have biases.
        experts: of a layer that has any, of which a token uses `active`.
    """

    name: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    tied: bool
    qk_norm: bool = False
    qkv_bias: bool = False
    mixtures: int = 0
    experts: int = 0
    active: int = 0
    expert_hidden: int = 0

    @classmethod
    def of(cls, hf: Mapping[str, Any], name: str) -> Shape:
        """From a Hugging Face config."""
        mixtures = sum(is_mixture(hf, layer) for layer in range(hf["num_hidden_layers"]))
        return cls(
            name=name,
            layers=hf["num_hidden_layers"],
            dim=hf["hidden_size"],
            heads=hf["num_attention_heads"],
            kv_heads=hf["num_key_value_heads"],
            head_dim=hf["head_dim"],
            hidden=hf["intermediate_size"],
            vocabulary=hf["vocab_size"],
            tied=bool(hf.get("tie_word_embeddings", False)),
            qk_norm=hf["model_type"].startswith("qwen3"),
            qkv_bias=hf["model_type"] == "qwen2",
            mixtures=mixtures,
            experts=hf["num_experts"] if mixtures else 0,
            active=hf["num_experts_per_tok"] if mixtures else 0,
            expert_hidden=hf["moe_intermediate_size"] if mixtures else 0,
        )

    @property
    def queries(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all keys, or all values, of a token."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of a head of its own."""
        return self.vocabulary * self.dim

    @property
    def attention(self) -> int:
        """Parameters of a block besides its feed-forward layers."""
        matrices = 2 * self.dim * (self.queries + self.keys)
        biases = (self.queries + 2 * self.keys) * self.qkv_bias
        return matrices + biases + 2 * self.dim + 2 * self.head_dim * self.qk_norm

    @property
    def dense_block(self) -> int:
        """Parameters of a block without experts."""
        return self.attention + 3 * self.dim * self.hidden

    @property
    def mixture_block(self) -> int:
        """Parameters of a block with experts, all of them."""
        return self.attention + self.dim * self.experts + 3 * self.experts * self.dim * self.expert_hidden

    @property
    def largest_block(self) -> int:
        """Parameters of the largest block."""
        return self.mixture_block if self.mixtures else self.dense_block

    @property
    def blocks(self) -> int:
        """Parameters of all blocks."""
        return self.mixtures * self.mixture_block + (self.layers - self.mixtures) * self.dense_block

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.blocks + self.embedding * (1 if self.tied else 2) + self.dim

    @property
    def idle(self) -> int:
        """Parameters of experts that a token is not sent to."""
        return 3 * self.mixtures * (self.experts - self.active) * self.dim * self.expert_hidden

    @property
    def computed(self) -> int:
        """Parameters that a token is multiplied with, besides the head."""
        return self.blocks - self.idle

    def context_flops(self, length: float) -> float:
        """Operations of attention for a token with `length` tokens before it: scores and sum, a multiply-add each."""
        return 4.0 * self.layers * self.queries * length

    def kv_bytes(self, bytes_each: int) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.keys * bytes_each


@cache
def published() -> Mapping[str, Mapping[str, Any]]:
    """What `config.json` says of models on the hub that recipes name, so that planning needs no network."""
    text = files("trainers.plan").joinpath("models.yaml").read_text(encoding="utf-8")
    models: dict[str, Mapping[str, Any]] = yaml.safe_load(text)
    return models


def hub_config(name: str) -> dict[str, Any]:
    """A model's `config.json`: as published, or from the hub's cache on this machine.

    Raises:
        UsageError: it is not known here.
    """
    if name in published():
        return check_hf_config(dict(published()[name]), name)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    if not isinstance(cached, str):
        raise UsageError(
            f"the shape of {name} isn't known here",
            fix=f"fetch its config.json once (hf download {name} config.json), or use a folder. "
            f"Known are {', '.join(published())}",
        )
    return read_hf_config(Path(cached).parent)


def model_config(section: ModelSection) -> dict[str, Any]:
    """`config.json` of the model that a recipe names.

    Raises:
        UsageError: there is no such folder, or a hub's model whose shape isn't known here.
    """
    if section.path == "tiny":
        return hf_config(section, section.tiny.vocab_size, 0)
    return named_config(section.path)


def named_config(path: str) -> dict[str, Any]:
    """`config.json` of a folder, or of a model on the hub."""
    folder = local_folder(path)
    return hub_config(path) if folder is None else read_hf_config(folder)
