"""Parts of Gemma 4 that Gemma 3 lacks.

All models have norms of values and a scale for each block. In 31B and 26B-A4B, keys of full attention are also values.
In E2B and E4B, layers have per-layer embeddings, and the last ones share the keys and values of an earlier layer. In
26B-A4B, experts are in parallel with the feed-forward layer.

A block gets its per-layer embeddings and shared keys and values as arguments, and returns those that later blocks use.
So recomputation, FSDP and packed rows treat them like other activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torchtitan.models.common import Embedding
from torchtitan.models.common.attention import BaseQKVLinear, GQAttention
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.module import Module

from trainers.compat.torchtitan import arguments, same_config
from trainers.model.folder import keys_are_values, kv_source
from trainers.titan.decoder import ScoringQwen
from trainers.titan.experts import Experts
from trainers.titan.gemma import GemmaBlock, GemmaStateDictAdapter, gelu, normed
from trainers.titan.layout import ContextLayout, RowLayout

Init = Mapping[str, Callable[..., Any]]
KeysValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer, [B, T, heads, head dim] each."""


class Gemma4Norm(RMSNorm):  # type: ignore[misc]
    """RMS norm that multiplies by its weight in float32, before rounding."""

    Config = same_config(RMSNorm)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the norm to the last dimension."""
        return normed(input, self.eps, self.weight.float())


class Projections(BaseQKVLinear):  # type: ignore[misc]
    """Projections to queries, keys and values; keys are also values without `wv`; without `wk`, there are neither."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseQKVLinear.Config):  # type: ignore[misc]
        """One config for each projection."""

        wq: Linear.Config
        wk: Linear.Config | None
        wv: Linear.Config | None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.wq, self.wk, self.wv = (
            None if each is None else each.build() for each in (config.wq, config.wk, config.wv)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Project tokens, [B, T, D] -> [B, T, heads, head dim] each."""

        def heads(layer: Any) -> Any:
            return None if layer is None else layer(x).unflatten(-1, (-1, self.head_dim))

        key = heads(self.wk)
        return heads(self.wq), key, key if self.wv is None else heads(self.wv)


class Gemma4Attention(GQAttention):  # type: ignore[misc]
    """TorchTitan's attention with a norm of values that has no weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):  # type: ignore[misc]
        """TorchTitan's fields and the sharing of keys and values.

        `kv_source` is the earlier layer whose keys and values this one shares, None if it computes them; `stores_kv`:
        later layers share them.
        """

        kv_source: int | None
        stores_kv: bool

        @classmethod
        def of(cls, plain: GQAttention.Config, hf: Mapping[str, Any], layer: int) -> Gemma4Attention.Config:
            """Build the config of a layer from TorchTitan's, which is modified."""
            source, qkv = kv_source(hf, layer), plain.qkv_linear
            plain.qkv_linear = Projections.Config(
                head_dim=qkv.head_dim,
                wq=qkv.wq,
                wk=None if source is not None else qkv.wkv,
                wv=None if source is not None or keys_are_values(hf, layer) else qkv.wkv,
            )
            plain.inner_attention.scale = 1.0
            # for random weights, because attention does not scale scores
            plain.qk_norm.param_init = {"weight": partial(nn.init.constant_, val=plain.head_dim**-0.25)}
            stores = any(kv_source(hf, later) == layer for later in range(layer + 1, hf["num_hidden_layers"]))
            return cls(**arguments(plain), kv_source=source, stores_kv=stores)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.stores_kv = config.stores_kv
        if config.kv_source is not None:
            del self.k_norm

    def forward(
        self,
        x: torch.Tensor,
        attention_masks: RowLayout | ContextLayout,
        positions: torch.Tensor | None = None,
        shared_kv: KeysValues | None = None,
    ) -> tuple[torch.Tensor, KeysValues | None]:
        """Apply the layer, [B, T, D] -> [B, T, D]; also returns the keys and values that later ones share."""
        query, key, value = self.qkv_linear(x)
        query = self.q_norm(query)
        if shared_kv is None:
            query, key = self.rope(query, self.k_norm(key), positions)
            value = normed(value, self.k_norm.eps)
        else:
            query, _ = self.rope(query, query[:, :, :0], positions)
            key, value = shared_kv
        attended = self.inner_attention(
            query, key, value, attention_masks=attention_masks, scale=self.scaling, enable_gqa=self.enable_gqa
        )
        return self.wo(attended.flatten(2)), (key, value) if self.stores_kv else None


class GeluExperts(Experts):
    """Experts with the tanh approximation of GELU; gate and up are the first and last rows of one matrix."""

    Config = same_config(Experts)

    def __init__(self, config: Any) -> None:
        Module.__init__(self)
        self.num_experts = experts = config.num_experts
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * config.hidden_dim, config.dim))
        self.down = nn.Parameter(torch.empty(experts, config.dim, config.hidden_dim))

    def apply_experts(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Apply each expert to its rows, [R, D] -> [R, D]; `ends` [E] are the indices after the last row of each."""
        gate, up = self.product(rows, self.gate_up.mT, ends).chunk(2, -1)
        return self.product(gelu(gate) * up, self.down.mT, ends)


class ScaledRouter(TokenChoiceTopKRouter):  # type: ignore[misc]
    """TorchTitan's router with a norm and scales of its input, and a scale for the output of each expert."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):  # type: ignore[misc]
        """TorchTitan's fields and the norm's epsilon."""

        eps: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.eps = config.eps
        self.scale = nn.Parameter(torch.empty(config.gate.in_features))
        self.expert_scale = nn.Parameter(torch.empty(config.num_experts))

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weights and indices of the chosen experts, [B, T, K], and probabilities of all, [B, T, E]."""
        scaled = normed(x_BLD, self.eps) * self.scale * x_BLD.shape[-1] ** -0.5
        weights, chosen, probabilities = super().forward(scaled, expert_bias_E)
        return weights * self.expert_scale[chosen], chosen, probabilities


class NormedExperts(RoutedExperts):  # type: ignore[misc]
    """TorchTitan's routed experts with a norm of their input, which the router doesn't share."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc]
        """TorchTitan's fields and the norm."""

        norm: RMSNorm.Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm = config.norm.build()

    def forward(self, x_BLD: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        """Apply the experts, [B, T, D] -> [B, T, D]."""
        out: torch.Tensor = super().forward(self.norm(x_BLD), *routing)
        return out


class ExpertsBeside(MoE):  # type: ignore[misc]
    """Mixture of experts in parallel with a feed-forward layer; both outputs have norms."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):  # type: ignore[misc]
        """TorchTitan's fields and the norms of the outputs."""

        dense_norm: RMSNorm.Config
        out_norm: RMSNorm.Config

        @classmethod
        def of(cls, plain: MoE.Config, norm: RMSNorm.Config) -> ExpertsBeside.Config:
            """Build the config from TorchTitan's, which is modified, with norms like `norm`."""
            scales = {"scale": nn.init.ones_, "expert_scale": nn.init.ones_}
            plain.router = ScaledRouter.Config(**arguments(plain.router) | {"param_init": scales}, eps=norm.eps)
            plain.routed_experts = NormedExperts.Config(**arguments(plain.routed_experts), norm=norm)
            return cls(**arguments(plain), dense_norm=norm, out_norm=norm)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.dense_norm, self.out_norm = config.dense_norm.build(), config.out_norm.build()

    def forward(self, x: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Apply the experts to `x` and add the output of the feed-forward layer, [B, T, D] each -> [B, T, D]."""
        out: torch.Tensor = self.dense_norm(dense) + self.out_norm(super().forward(x))
        return out


class LayerInput(Module):  # type: ignore[misc]
    """Gate and projection of a layer's per-layer embeddings, whose output is added to the residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """Gate, projection and norm of the output."""

        gate: Linear.Config
        projection: Linear.Config
        norm: RMSNorm.Config

        @classmethod
        def of(cls, size: int, norm: RMSNorm.Config, normal: Init, residual: Init) -> LayerInput.Config:
            """Build the config for embeddings of width `size` and the initial weights of both matrices."""
            dim = norm.normalized_shape
            return cls(
                gate=Linear.Config(in_features=dim, out_features=size, param_init=normal),
                projection=Linear.Config(in_features=size, out_features=dim, param_init=residual),
                norm=norm,
            )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate, self.projection, self.norm = config.gate.build(), config.projection.build(), config.norm.build()

    def forward(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Apply the layer, [B, T, D] and [B, T, P] -> [B, T, D]."""
        out: torch.Tensor = self.norm(self.projection(gelu(self.gate(x)) * embedded))
        return out


class LayerInputs(Module):  # type: ignore[misc]
    """Per-layer embeddings: for each layer, one of the token plus a projection of its input embedding."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """One config for each part; the size of `norm` is that of one layer's embedding."""

        embeddings: Embedding.Config
        projection: Linear.Config
        norm: RMSNorm.Config

        @classmethod
        def of(cls, hf: Mapping[str, Any], norm: RMSNorm.Config, normal: Init) -> LayerInputs.Config:
            """Build the config from a Hugging Face config and the initial weights of both matrices."""
            width = hf["num_hidden_layers"] * norm.normalized_shape
            return cls(
                embeddings=Embedding.Config(num_embeddings=hf["vocab_size"], embedding_dim=width, param_init=normal),
                projection=Linear.Config(in_features=hf["hidden_size"], out_features=width, param_init=normal),
                norm=norm,
            )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.norm.normalized_shape
        self.embeddings = config.embeddings.build()
        self.projection, self.norm = config.projection.build(), config.norm.build()

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Per-layer embeddings of tokens with input embeddings `hidden`, [B, T] and [B, T, D] -> [B, T, P] each."""
        projected = self.projection(hidden) * hidden.shape[-1] ** -0.5
        embedded = self.embeddings(tokens) * self.size**0.5
        both = self.norm(projected.unflatten(-1, (-1, self.size))) + embedded.unflatten(-1, (-1, self.size))
        inputs: tuple[torch.Tensor, ...] = (both * 0.5**0.5).unbind(2)
        return inputs


class Gemma4Block(GemmaBlock):
    """Gemma 3's block with a scale of its output, which is loaded from the checkpoint and not trained."""

    @dataclass(kw_only=True, slots=True)
    class Config(GemmaBlock.Config):
        """Gemma 3's fields and the per-layer embeddings; `moe` is in parallel with the feed-forward layer."""

        layer_input: LayerInput.Config | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.experts = None if config.moe is None else config.moe.build()
        self.layer_input = None if config.layer_input is None else config.layer_input.build()
        self.register_buffer("scale", torch.ones(1))

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        self.scale.fill_(1.0)

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        attention_masks: RowLayout | ContextLayout,
        positions: torch.Tensor | None = None,
        embedded: torch.Tensor | None = None,
        shared_kv: KeysValues | None = None,
    ) -> tuple[torch.Tensor, KeysValues | None]:
        """Apply the block, [B, T, D] -> [B, T, D]; also returns the keys and values that later ones share."""
        attended, stored = self.attention(self.attention_norm(x), attention_masks, positions, shared_kv)
        x = x + self.attention_out_norm(attended)
        out = self.feed_forward(self.ffn_norm(x))
        if self.experts is not None:
            out = self.experts(x, out)
        x = x + self.ffn_out_norm(out)
        if self.layer_input is not None:
            x = x + self.layer_input(x, embedded)
        return x * self.scale.to(x.dtype), stored


class ScoringGemma4(ScoringQwen):
    """Decoder whose blocks share keys and values and have per-layer embeddings."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScoringQwen.Config):  # type: ignore[misc]
        """TorchTitan's fields and the per-layer embeddings."""

        layer_inputs: LayerInputs.Config | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layer_inputs = None if config.layer_inputs is None else config.layer_inputs.build()
        self.kv_sources = [block.attention.kv_source for block in config.layers]

    def apply_blocks(
        self, tokens: torch.Tensor, attention_masks: RowLayout | ContextLayout, positions: torch.Tensor
    ) -> torch.Tensor:
        """Embed tokens and apply all blocks, [1, T] -> [1, T, D]."""
        hidden: torch.Tensor = self.tok_embeddings(tokens)
        inputs = [None] * len(self.kv_sources) if self.layer_inputs is None else self.layer_inputs(tokens, hidden)
        stored: dict[int | None, KeysValues | None] = {}
        for number, layer in enumerate(self.layers.values()):
            shared_kv = stored.get(self.kv_sources[number])
            hidden, stored[number] = layer(hidden, attention_masks, positions, inputs[number], shared_kv)
        return hidden


class Gemma4StateDictAdapter(GemmaStateDictAdapter):
    """Gemma 3's adapter with the names of the other parts."""

    names: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens_per_layer.weight": "layer_inputs.embeddings.weight",
        "model.per_layer_model_projection.weight": "layer_inputs.projection.weight",
        "model.per_layer_projection_norm.weight": "layer_inputs.norm.weight",
    }
    block_names: ClassVar[Mapping[str, str]] = {
        **GemmaStateDictAdapter.block_names,
        "layer_scalar": "scale",
        "per_layer_input_gate.weight": "layer_input.gate.weight",
        "per_layer_projection.weight": "layer_input.projection.weight",
        "post_per_layer_input_norm.weight": "layer_input.norm.weight",
        "router.proj.weight": "experts.router.gate.weight",
        "router.scale": "experts.router.scale",
        "router.per_expert_scale": "experts.router.expert_scale",
        "experts.gate_up_proj": "experts.routed_experts.inner_experts.gate_up",
        "experts.down_proj": "experts.routed_experts.inner_experts.down",
        "pre_feedforward_layernorm_2.weight": "experts.routed_experts.norm.weight",
        "post_feedforward_layernorm_1.weight": "experts.dense_norm.weight",
        "post_feedforward_layernorm_2.weight": "experts.out_norm.weight",
    }
