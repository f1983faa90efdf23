"""Qwen 3.5's gated delta layers in vLLM on a CPU, in any precision; vLLM's own kernels take bfloat16 only.

The layers' states are vLLM's: of each sequence the last columns of the convolution, and the state of the rule.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from trainers.compat.vllm import PACKAGE
from trainers.model.delta import causal_convolution, delta_step, gated_delta_rule


def patch_delta() -> None:
    """Make vLLM compute gated delta layers with `trainers.model.delta` in this process."""
    delta_attention.__annotations__["layer_name"] = PACKAGE.get("vllm.utils.torch_utils:LayerNameType")
    PACKAGE.replace("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:cpu_gdn_attention_core", delta_attention)
    # keeps a convolution's weight in the order of the files, [F, 1, W], so that it can be loaded again
    PACKAGE.replace("vllm._custom_ops:causal_conv1d_weight_pack", lambda weight: weight.unsqueeze(1))


def delta_attention(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: Any
) -> None:
    """Compute a layer for the T tokens of a step: those of decoding requests first, then those of prompts.

    `mixed_qkv`, [T, F], is before the convolution, `b`, [T, H], before the sigmoid, and `a`, [T, H], before the gate.
    The result is written into `core_attn_out`, [T, H, V].
    """
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM measures memory
        return
    step: Any = context.attn_metadata[layer.prefix]
    requests = step.num_decodes + step.num_prefills
    bounds: list[int] = step.non_spec_query_start_loc[: requests + 1].tolist()
    total = bounds[-1]
    if not total:
        return
    slots = step.non_spec_state_indices_tensor[:requests].long()
    begun = torch.ones(requests, dtype=torch.bool)
    if step.has_initial_state is not None:
        begun = step.has_initial_state[:requests]
    columns, memory = layer.kv_cache[0], layer.kv_cache[1]
    lengths = [end - start for start, end in pairwise(bounds)]

    mixed = _convolved(layer, mixed_qkv[:total], columns, slots, begun, lengths)
    query, key, value = (part[0] for part in layer.rearrange_mixed_qkv(mixed))
    group = layer.num_v_heads // layer.num_k_heads
    query, key = (part.repeat_interleave(group, 1) for part in (query, key))
    decay = -layer.A_log.float().exp() * torch.nn.functional.softplus(a[:total].float() + layer.dt_bias.float())
    strength = b[:total].float().sigmoid()
    states = torch.where(begun[:, None, None, None], memory[slots].mT.float(), 0.0)
    tokens = query, key, value, decay, strength
    out, states = delta_step(*tokens, states) if max(lengths) == 1 else gated_delta_rule(*tokens, lengths, states)
    memory[slots] = states.mT.to(memory.dtype)
    core_attn_out[:total] = out.to(core_attn_out.dtype)


def _convolved(
    layer: Any, rows: torch.Tensor, columns: torch.Tensor, slots: torch.Tensor, begun: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """Apply a layer's convolution to the tokens of R requests, [T, F], and store what their next tokens need.

    `columns`, [slots, W - 1, F], has the last tokens of all requests, which are replaced; `slots`, [R], is the slot of
    each request, and `begun`, [R], whether it has tokens before this step.
    """
    weight = layer.conv1d.weight.flatten(1)
    back, requests = weight.shape[1] - 1, torch.arange(len(lengths))
    counts = torch.tensor(lengths)
    ends = counts.cumsum(0)
    # each request's tokens after its last ones, which take `back` rows
    own = torch.arange(len(rows)) + back * (requests.repeat_interleave(counts) + 1)
    earlier = (ends - counts + back * requests)[:, None] + torch.arange(back)
    joined = rows.new_empty(len(rows) + back * len(lengths), rows.shape[1])
    joined[earlier] = torch.where(begun[:, None, None], columns[slots], 0.0).to(joined.dtype)
    joined[own] = rows
    columns[slots] = joined[(ends + back * requests)[:, None] + torch.arange(back)].to(columns.dtype)
    return causal_convolution(joined, weight, torch.full((len(joined),), back))[own]
