"""Sizes of a model from its `config.json`: parameters, operations, and bytes of keys and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from forge_env.config.finding import checkpoint_folder
from forge_env.config.recipe import ModelSection
from forge_env.errors import UsageError, suggestion
from forge_env.models import MODELS
from trainers.model.folder import (
    GEMMA4,
    QWEN3_5,
    check_hf_config,
    feed_forward_width,
    heads,
    is_linear,
    is_mixture,
    keys_are_values,
    kv_source,
    local_folder,
    read_hf_config,
    window,
)
from trainers.model.tiny import hf_config


@dataclass(frozen=True, slots=True)
class Delta:
    """The sizes of a gated delta layer.

    Attributes:
        keys: width of all queries, or all keys, of a token.
        key_dim: width of one of them.
        heads: number of heads of values, each with its own state.
        value_dim: width of one of them.
    """

    keys: int = 0
    key_dim: int = 0
    heads: int = 0
    value_dim: int = 0
    width: int = 0

    @classmethod
    def of(cls, hf: Mapping[str, Any]) -> Delta:
        """Create the sizes from a Hugging Face config."""
        key_dim = hf["linear_key_head_dim"]
        return cls(
            keys=hf["linear_num_key_heads"] * key_dim,
            key_dim=key_dim,
            heads=hf["linear_num_value_heads"],
            value_dim=hf["linear_value_head_dim"],
            width=hf["linear_conv_kernel_dim"],
        )

    @property
    def values(self) -> int:
        """Width of all values of a token."""
        return self.heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Width of queries, keys and values of a token."""
        return 2 * self.keys + self.values

    def parameters(self, dim: int) -> int:
        """Parameters of the layer, for a residual stream of width `dim`."""
        matrices = dim * (self.mixed + 2 * self.values + 2 * self.heads)
        return matrices + self.mixed * self.width + 2 * self.heads + self.value_dim

    @property
    def state(self) -> int:
        """Elements of the states of all heads, and of the convolution's last tokens, of one sequence."""
        return self.values * self.key_dim + self.mixed * (self.width - 1)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder.

    Attributes:
        hidden: width of a feed-forward layer without experts.
        tied: whether embedding and head are one matrix.
        out_norms: whether the outputs of attention and of feed-forward layers have norms too.
        scaled: whether blocks multiply their output by a scale.
        windowed: number of blocks in which a token attends to the last `window` tokens only.
        window: size of that window.
        parts: number and shape of each kind of block, if their attention or feed-forward layers differ in size.
        keys_are_values: whether the keys of attention are also its values.
        shares_kv: whether attention shares the keys and values of an earlier block.
        layer_input: width of per-layer embeddings; 0: there are none.
        gated: whether the output of attention is multiplied by a gate, as wide as the queries.
        linear: number of blocks with a gated delta layer, which keeps a state, instead of attention.
        qkv_bias: whether the projections of queries, keys and values have biases.
        sinks: whether attention has sinks, and its output, the router and the experts have biases.
        mixtures: number of blocks with experts.
        beside: whether experts are in parallel with a feed-forward layer instead of replacing it.
        active: number of experts that a token uses.
        expert_hidden: width of one expert.
        shared_hidden: width of the gated expert that every token uses.
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
    sinks: bool = False
    out_norms: bool = False
    scaled: bool = False
    windowed: int = 0
    window: int = 0
    parts: tuple[tuple[int, Shape], ...] = ()
    keys_are_values: bool = False
    shares_kv: bool = False
    layer_input: int = 0
    gated: bool = False
    linear: int = 0
    delta: Delta = Delta()
    mixtures: int = 0
    beside: bool = False
    experts: int = 0
    active: int = 0
    expert_hidden: int = 0
    shared_hidden: int = 0

    @classmethod
    def of(cls, hf: Mapping[str, Any], name: str) -> Shape:
        """Create a shape from a Hugging Face config."""
        layers = range(hf["num_hidden_layers"])
        mixtures = sum(is_mixture(hf, layer) for layer in layers)
        linear = sum(is_linear(hf, layer) for layer in layers)
        windows = [size for layer in layers if (size := window(hf, layer)) is not None]
        shape = cls(
            name=name,
            layers=hf["num_hidden_layers"],
            dim=hf["hidden_size"],
            heads=hf["num_attention_heads"],
            kv_heads=hf["num_key_value_heads"],
            head_dim=hf["head_dim"],
            hidden=hf.get("intermediate_size", 0),
            vocabulary=hf["vocab_size"],
            tied=bool(hf.get("tie_word_embeddings", False)),
            qk_norm=hf["model_type"].startswith(("qwen3", "gemma")),
            qkv_bias=hf["model_type"] in ("qwen2", "gpt_oss"),
            sinks=hf["model_type"] == "gpt_oss",
            out_norms=hf["model_type"].startswith("gemma"),
            scaled=hf["model_type"] == GEMMA4,
            windowed=len(windows),
            window=max(windows, default=0),
            gated=hf["model_type"] in QWEN3_5,
            linear=linear,
            delta=Delta.of(hf) if linear else Delta(),
            layer_input=(hf["hidden_size_per_layer_input"] or 0) if hf["model_type"] == GEMMA4 else 0,
            mixtures=mixtures,
            beside=hf["model_type"] == GEMMA4 and mixtures > 0,
            experts=hf["num_experts"] if mixtures else 0,
            active=hf["num_experts_per_tok"] if mixtures else 0,
            expert_hidden=hf["moe_intermediate_size"] if mixtures else 0,
            shared_hidden=hf.get("shared_expert_intermediate_size", 0) if mixtures else 0,
        )
        if hf["model_type"] != GEMMA4:
            return shape
        parts = Counter(shape._part(hf, layer) for layer in layers)
        return replace(shape, parts=tuple((count, part) for part, count in parts.items()))

    def _part(self, hf: Mapping[str, Any], layer: int) -> Shape:
        head_dim, kv_heads = heads(hf, layer)
        return replace(
            self,
            head_dim=head_dim,
            kv_heads=kv_heads,
            hidden=feed_forward_width(hf, layer),
            window=window(hf, layer) or 0,
            keys_are_values=keys_are_values(hf, layer),
            shares_kv=kv_source(hf, layer) is not None,
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
        """Parameters of the embedding; an untied head has as many."""
        return self.vocabulary * self.dim

    @property
    def projections(self) -> int:
        """Parameters of the projection matrices of attention."""
        keys = 0 if self.shares_kv else (2 - self.keys_are_values) * self.keys
        return self.dim * ((2 + self.gated) * self.queries + keys)

    @property
    def attention(self) -> int:
        """Parameters of a block with attention, except its feed-forward layers and experts."""
        biases = (self.queries + 2 * self.keys) * self.qkv_bias + (self.dim + self.heads) * self.sinks
        norms = 2 * self.dim * (1 + self.out_norms) + (2 - self.shares_kv) * self.head_dim * self.qk_norm
        inputs = self.dim * (2 * self.layer_input + 1) if self.layer_input else 0
        return self.projections + biases + norms + self.scaled + inputs

    @property
    def mixture(self) -> int:
        """Parameters of a mixture of experts: the router, all experts, and the shared one with its gate.

        In parallel with a feed-forward layer, it also has norms and scales.
        """
        shared = 3 * self.dim * self.shared_hidden + self.dim * (self.shared_hidden > 0)
        biases = self.experts * (1 + 2 * self.expert_hidden + self.dim) * self.sinks
        scales = (4 * self.dim + self.experts) * self.beside
        return self.dim * self.experts + 3 * self.experts * self.dim * self.expert_hidden + shared + biases + scales

    def dense(self, experts: bool) -> int:
        """Width of the feed-forward layer that every token uses in a block, with or without experts."""
        return self.shared_hidden if experts and not self.beside else self.hidden

    @property
    def used(self) -> int:
        """Width of the feed-forward layers that a token uses in a block."""
        dense = max(shape.dense(self.mixtures > 0) for _, shape, _, _ in self.kinds)
        return self.expert_hidden * self.active + dense

    @property
    def kinds(self) -> tuple[tuple[int, Shape, bool, bool], ...]:
        """Kinds of blocks: their number, shape, whether they have experts, and whether they have gated delta layers."""
        experts = self.mixtures > 0
        if self.parts:
            return tuple((count, part, experts, False) for count, part in self.parts)
        if self.linear:  # then experts are in all blocks or in none
            return (self.layers - self.linear, self, experts, False), (self.linear, self, experts, True)
        return (self.layers - self.mixtures, self, False, False), (self.mixtures, self, True, False)

    def block(self, experts: bool, linear: bool) -> int:
        """Parameters of a block of this kind."""
        layer = self.delta.parameters(self.dim) + 2 * self.dim if linear else self.attention
        dense = 0 if experts and not self.beside else 3 * self.dim * self.hidden
        return layer + dense + (self.mixture if experts else 0)

    @property
    def largest_block(self) -> int:
        """Parameters of the largest block."""
        return max(shape.block(experts, linear) for count, shape, experts, linear in self.kinds if count)

    @property
    def blocks(self) -> int:
        """Parameters of all blocks."""
        return sum(count * shape.block(experts, linear) for count, shape, experts, linear in self.kinds)

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.blocks + self.embedding * (1 if self.tied else 2) + self.dim + self.layer_inputs

    @property
    def layer_inputs(self) -> int:
        """Parameters of all per-layer embeddings, their projection and their norm."""
        width = self.layers * self.layer_input
        return (self.vocabulary + self.dim) * width + self.layer_input

    @property
    def idle(self) -> int:
        """Parameters of the experts that a token does not use, in all blocks."""
        return 3 * self.mixtures * (self.experts - self.active) * self.dim * self.expert_hidden

    @property
    def computed(self) -> int:
        """Parameters that a token is multiplied with, except the head."""
        return self.blocks - self.idle + self.dim * self.layers * self.layer_input

    def context_flops(self, length: float) -> float:
        """Attention operations of a token after `length` tokens: a multiply-add each for scores and weighted sum.

        A gated delta layer reads and changes its states: three multiply-adds for each element of them.
        """
        if self.parts:
            seen = sum(count * min(length, part.window or length) * part.queries for count, part in self.parts)
        else:
            seen = (self.layers - self.windowed - self.linear) * length * self.queries
            seen += self.windowed * min(length, self.window) * self.queries
        return 4.0 * seen + 6.0 * self.linear * self.delta.values * self.delta.key_dim

    def kv_bytes(self, bytes_each: int) -> int:
        """Bytes of one token's keys and values in all layers that have them."""
        stored = [count * shape.keys for count, shape, _, linear in self.kinds if not (linear or shape.shares_kv)]
        return 2 * sum(stored) * bytes_each


@cache
def published() -> Mapping[str, Mapping[str, Any]]:
    """Load the `config.json` contents of hub models that recipes name, so that planning needs no network."""
    text = files("trainers.plan").joinpath("models.yaml").read_text(encoding="utf-8")
    models: dict[str, Mapping[str, Any]] = yaml.safe_load(text)
    return models


def hub_config(name: str) -> dict[str, Any]:
    """Load a hub model's `config.json`, from `models.yaml` or from the hub's cache on this machine."""
    if name in published():
        return check_hf_config(dict(published()[name]), name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # not a valid name on the hub
        cached = None
    if not isinstance(cached, str):
        similar = {known.lower(): known for known in published()}.get(name.lower())
        fetch = f"check the name, or fetch its config.json once: hf download {name} config.json"
        raise UsageError(
            f"the shape of {name} is unknown: it is no folder, and the hub's cache has no config.json of it",
            fix=f"did you mean {similar!r}?" if similar else suggestion(name, published(), fetch),
        )
    return read_hf_config(Path(cached).parent)


def model_config(section: ModelSection) -> dict[str, Any]:
    """Load `config.json` of the model that a recipe names; errors as in `named_config`."""
    if section.path == "tiny":
        return hf_config(section, section.tiny.vocab_size, 0)
    return named_config(section.path)


def named_config(path: str) -> dict[str, Any]:
    """Load `config.json` of a folder, or of a model on the hub or of `forge-env model get`."""
    folder = checkpoint_folder(path) if path in MODELS else local_folder(path)
    return hub_config(path) if folder is None else read_hf_config(folder)
