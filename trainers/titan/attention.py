"""Attention over packed rows.

No token attends to another sequence, except to the first tokens that both share, which are in the row once
(`trainers.titan.layout`). On a GPU, variable-length kernels read the queries in the packed row, and copies of shared
keys and values. On a CPU, and with attention sinks, attention pads each branch to a separate row; linear layers process
the packed tokens without padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common.attention import ScaledDotProductAttention

from trainers.compat.torch import efficient_attention
from trainers.model.folder import WIDEST
from trainers.titan.context import gather_tokens
from trainers.titan.layout import ContextLayout, Grid, PackedLayout, RowLayout, VarlenLayout

HALF = torch.bfloat16, torch.float16


class _Spread(torch.autograd.Function):
    """Copy tokens of a row to slots, [T, F] -> [slots, F]."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, take: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(take)
        ctx.size = tokens.shape[0]
        return tokens.index_select(0, take)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (take,) = ctx.saved_tensors
        wide = grads[0].to(torch.promote_types(grads[0].dtype, torch.float32))  # sums of few bits would be rough
        return wide.new_zeros(ctx.size, *wide.shape[1:]).index_add_(0, take, wide).to(grads[0].dtype), None


def spread(packed: torch.Tensor, take: torch.Tensor) -> torch.Tensor:
    """Copy tokens of a row to slots, [T, ...] -> [slots, ...]; a token may have several slots, or none.

    The gradients of a token's slots are added in float32.
    """
    slots: torch.Tensor = _Spread.apply(packed.flatten(1), take)  # type: ignore[no-untyped-call]
    return slots.view(-1, *packed.shape[1:])


class _Collect(torch.autograd.Function):
    """Copy the real tokens out of a padded grid, [S * L, F] -> [T, F]; the gradient of a padding slot is 0."""

    @staticmethod
    def forward(ctx: Any, grid: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots)
        ctx.size = grid.shape[0]
        return grid.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slots,) = ctx.saved_tensors
        grid = grads[0].new_zeros(ctx.size, *grads[0].shape[1:])
        return grid.index_copy_(0, slots, grads[0]), None


class PackedAttention(ScaledDotProductAttention):  # type: ignore[misc]
    """Causal attention within each sequence of a packed row.

    Argument names are TorchTitan's, because its sharding rules refer to them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):  # type: ignore[misc]
        """`scale` replaces the factor of scores that the enclosing layer passes; None: keep that one.

        A token attends to itself and those before it in a `window`; None: to all before it.
        """

        scale: float | None = None
        window: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scale, self.window = config.scale, config.window

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: RowLayout | ContextLayout,
        **options: Any,
    ) -> torch.Tensor:
        """Compute attention. Inputs and output are [1, T, heads, head dim]."""
        layout = attention_masks
        if self.scale is not None:
            options["scale"] = self.scale
        q, k, v = q_BLNH[0], k_BLNH[0], v_BLNH[0]
        if isinstance(layout, ContextLayout):
            k, v = gather_tokens(k, layout), gather_tokens(v, layout)
            layout = layout.row
        if isinstance(layout, VarlenLayout):
            assert "sinks" not in options, "variable-length kernels have no gradient for sinks"
            return attend_varlen(q, k, v, layout, options.get("scale"), self.window)[None]
        return _attend_in_grids(q, k, v, layout, self.window, options)[None]


def _attend_in_grids(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, window: int | None, options: dict[str, Any]
) -> torch.Tensor:
    """Compute attention of a packed row, [T, heads, head dim] each, in padded grids."""
    sinks: torch.Tensor | None = options.get("sinks")

    def attended(grid: Grid) -> torch.Tensor:
        def rows(packed: torch.Tensor, take: torch.Tensor) -> torch.Tensor:
            return spread(packed, take).view(grid.rows, -1, *packed.shape[1:]).transpose(1, 2)

        mask = _visible(grid, window, q.device)
        query, key, value = rows(q, grid.queries), rows(k, grid.keys), rows(v, grid.keys)
        if sinks is not None:
            query, key, value, mask = _with_sinks(query, key, value, mask, sinks.float() / options["scale"])
        out = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=options.get("scale"),
            enable_gqa=options.get("enable_gqa", False),
        )
        return out[..., : q.shape[-1]].transpose(1, 2).flatten(2).flatten(0, 1)

    slots = torch.cat([attended(grid) for grid in layout.grids])
    collected: torch.Tensor = _Collect.apply(slots, layout.slots)  # type: ignore[no-untyped-call]
    return collected.view(q.shape)


def _with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add a key without a value that every query attends to; `sinks` [heads] are its scores, divided by the scale.

    Heads, [R, heads, L, head dim], get 8 more elements, because GPU kernels need a multiple of 8. The first two are, in
    queries, the sink rounded to the data type and its rounding error; in the new key, 1. The rest are 0.
    """
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    dtype = torch.get_autocast_dtype(q.device.type) if torch.is_autocast_enabled(q.device.type) else q.dtype
    rounded = sinks.to(dtype)
    parts = torch.stack([rounded, (sinks - rounded).to(dtype)], -1)
    added = torch.nn.functional.pad(parts, (0, 6))[:, None].expand(*q.shape[:-1], 8)
    key = torch.nn.functional.pad(k.new_ones(2), (k.shape[-1], 6)).expand(*k.shape[:2], 1, -1)
    return (
        torch.cat([q.to(dtype), added], -1),
        torch.cat([torch.nn.functional.pad(k, (0, 8)), key], 2).to(dtype),
        torch.nn.functional.pad(v, (0, 8, 0, 1)).to(dtype),
        torch.nn.functional.pad(mask, (0, 1), value=True),
    )


def _visible(grid: Grid, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Keys that each query of a grid attends to, [R or 1, 1, Lq, Lk]; None: causal attention."""
    if window is None or window >= grid.key_width:
        return grid.mask
    keys = torch.arange(grid.key_width, device=device)
    queries = keys[:, None] if grid.mask is None else grid.mask.sum(-1, keepdim=True) - 1  # positions on the path
    visible = (keys <= queries) & (queries - keys < window)
    return visible[None, None] if grid.mask is None else visible


def attend_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: VarlenLayout,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Compute attention of each branch of a packed row over its path, on a GPU.

    Inputs and output are [T, heads, head dim]. 16-bit types use FlashAttention-2 (Dao 2023, arXiv 2307.08691). Others,
    and heads larger than `WIDEST`, use memory-efficient attention (Rabe and Staats 2021, arXiv 2112.05682), since
    FlashAttention-2 doesn't support them. This ignores `window`: `check_windows` rejects windows for them.
    """
    if torch.is_autocast_enabled(q.device.type):  # as `scaled_dot_product_attention` does
        q, k, v = (each.to(torch.get_autocast_dtype(q.device.type)) for each in (q, k, v))
    if layout.keys is not None:
        k, v = spread(k, layout.keys), spread(v, layout.keys)
    group = q.shape[1] // k.shape[1]
    if q.dtype not in HALF or q.shape[-1] > WIDEST:
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return efficient_attention(q, k, v, layout.bounds, layout.key_bounds, layout.width, layout.key_width, scale)
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(  # type: ignore[return-value]
        *(q, k, v, layout.bounds, layout.key_bounds, layout.width, layout.key_width),
        scale=scale,
        # tokens before and after; the last query of a branch is at the last key of its path
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=group > 1,
    )
