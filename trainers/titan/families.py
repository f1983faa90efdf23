"""Model families that the trainer supports, as TorchTitan models configured by a Hugging Face config.

A family names its model, its rotary positions and its entry in TorchTitan's registry. That entry has the adapter
between TorchTitan's and Hugging Face's weight names, and the function that shards the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RoPE, TransformerBlock
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_router_config,
    make_token_dispatcher_config,
)
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from trainers.model.folder import (
    GEMMA4,
    QWEN3_5,
    feed_forward_width,
    heads,
    is_linear,
    is_mixture,
    rope_parameters,
    window,
)
from trainers.titan.attention import PackedAttention
from trainers.titan.decoder import ScoringLlama, ScoringQwen
from trainers.titan.experts import Experts
from trainers.titan.fused import FusedFeedForward, FusedQKV, FusedStateDictAdapter, shard_fused
from trainers.titan.gemma import (
    GemmaBlock,
    GemmaFeedForward,
    GemmaNorm,
    GemmaStateDictAdapter,
    ScaledEmbedding,
    shard_gemma,
)
from trainers.titan.gemma4 import (
    ExpertsBeside,
    GeluExperts,
    Gemma4Attention,
    Gemma4Block,
    Gemma4Norm,
    Gemma4StateDictAdapter,
    LayerInput,
    LayerInputs,
    ScoringGemma4,
)
from trainers.titan.gpt_oss import ClampedExperts, GptOssStateDictAdapter, SinkAttention
from trainers.titan.head import Head
from trainers.titan.names import RenamingStateDictAdapter
from trainers.titan.qwen3_5 import GatedAttention, Qwen35StateDictAdapter, delta_config
from trainers.titan.rope import rope_config

Init = dict[str, Callable[..., Any]]


class QwenStateDictAdapter(RenamingStateDictAdapter):
    """TorchTitan's adapter for Qwen 3, extended by the biases of Qwen 2."""

    block_names: ClassVar[Mapping[str, str]] = {
        f"self_attn.{name}_proj.bias": f"attention.qkv_linear.w{name}.bias" for name in "qkv"
    }


@dataclass(frozen=True, slots=True)
class Family:
    """TorchTitan's components for a model family.

    Attributes:
        adapter: class that converts between its weight names and Hugging Face's.
        parallelize: checkpoints activations, compiles and shards a module, in place.
        shard: sets in a config how tensor parallelism splits the model.
        qk_norm: whether queries and keys have norms.
        qkv_bias: whether the projections of queries, keys and values have biases.
        gated: whether the output of attention is multiplied by a gate.
        sinks: whether attention has sinks, and its output, the router and the experts have biases.
        feed_forward: class of its feed-forward layers without experts.
        experts: class of its experts.
    """

    model: type[ScoringLlama | ScoringQwen]
    block: type[TransformerBlock]
    rope: type[RoPE]
    adapter: type[StateDictAdapter]
    parallelize: Callable[..., Any]
    shard: Callable[[Any], None]
    qk_norm: bool = False
    qkv_bias: bool = False
    gated: bool = False
    sinks: bool = False
    norm: type[RMSNorm] = RMSNorm
    embedding: type[Embedding] = Embedding
    feed_forward: type[FeedForward | FusedFeedForward] = FeedForward
    experts: type[Experts] = Experts

    @property
    def fused(self) -> bool:
        """Whether queries, keys and values are one matrix, and gate and up another."""
        return self.feed_forward is FusedFeedForward


_LLAMA = Family(
    ScoringLlama,
    Llama3TransformerBlock,
    ComplexRoPE,
    llama3.model_registry("debugmodel").state_dict_adapter,
    llama3.model_registry("debugmodel").parallelize_fn,
    partial(set_llama3_sharding_config, enable_sp=True),
)
_QWEN = Family(
    ScoringQwen,
    Qwen3TransformerBlock,
    CosSinRoPE,
    QwenStateDictAdapter,
    qwen3.model_registry("debugmodel").parallelize_fn,
    partial(set_qwen3_sharding_config, enable_sp=True, enable_ep=False),
    qk_norm=True,
)
_PHI: dict[str, Any] = {"rope": CosSinRoPE, "adapter": FusedStateDictAdapter, "shard": shard_fused}
_PHI |= {"feed_forward": FusedFeedForward}
_GEMMA: dict[str, Any] = {"block": GemmaBlock, "adapter": GemmaStateDictAdapter, "shard": shard_gemma}
_GEMMA |= {"norm": GemmaNorm, "embedding": ScaledEmbedding, "feed_forward": GemmaFeedForward}
_GEMMA4 = _GEMMA | {"block": Gemma4Block, "adapter": Gemma4StateDictAdapter, "norm": Gemma4Norm}
_GEMMA4 |= {"model": ScoringGemma4, "experts": GeluExperts}
_GEMMA4 |= {"shard": lambda config: None}  # `check_heads` rejects tensor parallelism for the family
_QWEN3_5: dict[str, Any] = {"gated": True, "adapter": Qwen35StateDictAdapter, "norm": GemmaNorm}
_QWEN3_5 |= {"shard": lambda config: None}  # `check_heads` rejects tensor parallelism for the family
FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": replace(_QWEN, qk_norm=False, qkv_bias=True),
    "qwen3": _QWEN,
    "qwen3_moe": _QWEN,
    "smollm3": replace(_QWEN, qk_norm=False),
    "phi3": replace(_LLAMA, **_PHI),
    "gemma3_text": replace(_QWEN, **_GEMMA),
    GEMMA4: replace(_QWEN, **_GEMMA4),
    **dict.fromkeys(QWEN3_5, replace(_QWEN, **_QWEN3_5)),
    "gpt_oss": replace(
        _QWEN, qk_norm=False, qkv_bias=True, sinks=True, experts=ClampedExperts, adapter=GptOssStateDictAdapter
    ),
}
"""Families by the `model_type` in `config.json`."""


def titan_config(hf: Mapping[str, Any], max_length: int) -> Any:
    """Build TorchTitan's model config from a Hugging Face config, for sequences of up to `max_length`."""
    family = FAMILIES[hf["model_type"]]
    dim, layers = hf["hidden_size"], hf["num_hidden_layers"]
    normal: Init = {"weight": partial(nn.init.normal_, std=hf.get("initializer_range", 0.02)), "bias": nn.init.zeros_}
    residual: Init = {**normal, "weight": partial(nn.init.normal_, std=0.02 / (2 * layers) ** 0.5)}
    tied = bool(hf.get("tie_word_embeddings", False))
    norms = [field.name for field in fields(family.block.Config) if field.name.endswith("_norm")]
    is_gemma4 = hf["model_type"] == GEMMA4
    size = hf["hidden_size_per_layer_input"] if is_gemma4 else 0

    def block(layer: int) -> TransformerBlock.Config:
        mixture = is_mixture(hf, layer)
        parts: dict[str, Any] = {name: _norm(family, dim, hf) for name in norms}
        if is_linear(hf, layer):
            parts["attention"] = delta_config(hf, normal, residual)
        else:
            parts["attention"] = _attention(family, hf, layer, max_length, normal, residual)
        if mixture:
            parts["moe"] = _mixture(family, hf, normal, residual)
        if not mixture or is_gemma4:
            parts["feed_forward"] = _feed_forward(family, hf, layer, normal, residual)
        if size:
            parts["layer_input"] = LayerInput.Config.of(size, _norm(family, dim, hf), normal, residual)
        return family.block.Config(**parts)

    more = {"layer_inputs": LayerInputs.Config.of(hf, _norm(family, size, hf), normal)} if size else {}
    return family.model.Config(
        vocab_size=hf["vocab_size"],
        dim=dim,
        norm=_norm(family, dim, hf),
        enable_weight_tying=tied,
        tok_embeddings=family.embedding.Config(
            num_embeddings=hf["vocab_size"],
            embedding_dim=dim,
            param_init={"weight": skip_param_init} if tied else normal,
        ),
        lm_head=Head.Config(
            in_features=dim,
            out_features=hf["vocab_size"],
            softcap=hf.get("final_logit_softcapping") or None,
            param_init=normal,
        ),
        layers=[block(layer) for layer in range(layers)],
        **more,
    )


def tensor_shapes(hf: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a checkpoint with this Hugging Face config, by their names there."""
    config = titan_config(hf, 1)
    with torch.device("meta"):
        state = config.build().state_dict()
    tensors = FAMILIES[hf["model_type"]].adapter(config, None).to_hf(state)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _norm(family: Family, size: int, hf: Mapping[str, Any]) -> RMSNorm.Config:
    neutral = nn.init.zeros_ if family.norm is GemmaNorm else nn.init.ones_
    return family.norm.Config(normalized_shape=size, eps=hf["rms_norm_eps"], param_init={"weight": neutral})


def _feed_forward(family: Family, hf: Mapping[str, Any], layer: int, normal: Init, residual: Init) -> Any:
    dim, hidden = hf["hidden_size"], feed_forward_width(hf, layer)
    if family.fused:
        return FusedFeedForward.Config(
            w13=Linear.Config(in_features=dim, out_features=2 * hidden, param_init=normal),
            w2=Linear.Config(in_features=hidden, out_features=dim, param_init=residual),
        )
    plain = make_ffn_config(dim=dim, hidden_dim=hidden, w1_param_init=normal, w2w3_param_init=residual)
    kind: Any = family.feed_forward
    return kind.Config(w1=plain.w1, w2=plain.w2, w3=plain.w3)


def _attention(family: Family, hf: Mapping[str, Any], layer: int, max_length: int, normal: Init, residual: Init) -> Any:
    (head_dim, kv_heads), rope = heads(hf, layer), rope_parameters(hf, layer)
    scale = hf["query_pre_attn_scalar"] ** -0.5 if "query_pre_attn_scalar" in hf else None
    if rope["rope_type"] == "yarn":
        # YaRN's temperature (Peng et al. 2023, equation 22), which TorchTitan expects the attention to apply
        scale = head_dim**-0.5 * (0.1 * math.log(rope["factor"]) + 1.0) ** 2
    attention = make_gqa_config(
        dim=hf["hidden_size"],
        n_heads=hf["num_attention_heads"],
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        wqkv_param_init=normal,
        wo_param_init=residual,
        inner_attention=PackedAttention.Config(scale=scale, window=window(hf, layer)),
        rope=rope_config(family.rope, hf, layer, max_length),
        qk_norm=_norm(family, head_dim, hf) if family.qk_norm else None,
    )
    if hf["model_type"] == GEMMA4:
        attention = Gemma4Attention.Config.of(attention, hf, layer)
    if family.gated:
        attention = GatedAttention.Config.of(attention)
    if family.sinks:
        attention = SinkAttention.Config.of(attention, hf.get("initializer_range", 0.02))
    if family.fused:
        attention.qkv_linear = _fused_qkv(hf, normal)
    elif family.qkv_bias:
        attention.qkv_linear.wq.bias = attention.qkv_linear.wkv.bias = True
    return attention


def _fused_qkv(hf: Mapping[str, Any], normal: Init) -> FusedQKV.Config:
    heads, kv_heads, head_dim = hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"]
    rows = (heads + 2 * kv_heads) * head_dim
    matrix = Linear.Config(in_features=hf["hidden_size"], out_features=rows, param_init=normal)
    return FusedQKV.Config(head_dim=head_dim, n_heads=heads, n_kv_heads=kv_heads, wqkv=matrix)


def _mixture(family: Family, hf: Mapping[str, Any], normal: Init, residual: Init) -> MoE.Config:
    dim, experts, top_k = hf["hidden_size"], hf["num_experts"], hf["num_experts_per_tok"]
    weight, last, bias = normal["weight"], residual["weight"], normal["bias"]
    inits = dict.fromkeys(("w1_EFD", "w3_EFD", "gate_up"), weight) | dict.fromkeys(("w2_EDF", "down"), last)
    inits |= {"gate_up_bias": bias, "down_bias": bias}
    routed = RoutedExperts.Config(
        inner_experts=family.experts.Config(
            dim=dim, hidden_dim=hf["moe_intermediate_size"], num_experts=experts, param_init=inits
        ),
        token_dispatcher=make_token_dispatcher_config(num_experts=experts, top_k=top_k, comm_backend="standard"),
    )
    router = make_router_config(
        dim=dim,
        num_experts=experts,
        gate_param_init=normal,
        top_k=top_k,
        score_func="softmax",
        route_norm=bool(hf.get("norm_topk_prob", hf["model_type"] != "qwen3_moe")),
        bias=family.sinks,
    )
    shared = None
    if width := hf.get("shared_expert_intermediate_size"):
        plain = make_ffn_config(dim=dim, hidden_dim=width, w1_param_init=normal, w2w3_param_init=residual)
        gate = Linear.Config(in_features=dim, out_features=1, param_init=normal)
        shared = SigmoidGatedFeedForward.Config(w1=plain.w1, w2=plain.w2, w3=plain.w3, gate=gate)
    # no load-balancing bias: neither checkpoints nor generators support it
    mixture = make_moe_config(
        num_experts=experts,
        router=router,
        routed_experts=routed,
        shared_experts=shared,
        load_balance_coeff=None,
    )
    return ExpertsBeside.Config.of(mixture, _norm(family, dim, hf)) if hf["model_type"] == GEMMA4 else mixture
