"""Attention with variable-length kernels, replaced by CPU functions, compared with attention over the padded grid."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")


from trainers.titan import attention  # noqa: E402
from trainers.titan.attention import PackedAttention  # noqa: E402
from trainers.titan.layout import PackedLayout, Row, VarlenLayout, layout_of  # noqa: E402

pytestmark = pytest.mark.stack
CPU = torch.device("cpu")
LENGTHS = [5, 1, 17, 8, 12, 9]
ALONE, TREE = Row.of(LENGTHS), Row.of(LENGTHS, [0, 1, 0, 5, 8, 9])


def causal_by_bounds(
    q: Any, k: Any, v: Any, bounds: Any, key_bounds: Any, width: int, key_width: int, scale: float | None
) -> Any:
    """Causal attention within each sequence, the last query at the last key, [T, heads, head dim], in float64."""
    assert bounds.dtype == key_bounds.dtype == torch.int32
    assert width == int(bounds.diff().max())
    assert key_width == int(key_bounds.diff().max())
    outs = []
    for place in range(len(bounds) - 1):
        own, seen = (slice(*each[place : place + 2].tolist()) for each in (bounds, key_bounds))
        q1, k1, v1 = (each.transpose(0, 1)[None].double() for each in (q[own], k[seen], v[seen]))
        queries, keys = q1.shape[2], k1.shape[2]
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        out = torch.nn.functional.scaled_dot_product_attention(
            q1, k1, v1, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs).to(q.dtype)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace both GPU kernels; returns the names of those that were called."""
    called: list[str] = []

    def flash(
        q: Any, k: Any, v: Any, bounds: Any, of_keys: Any, width: int, key_width: int, *, scale: Any, **options: Any
    ) -> Any:
        assert options["window_size"] == (-1, 0)
        assert q.dtype == k.dtype == v.dtype
        assert options["enable_gqa"] == (q.shape[1] != k.shape[1])
        called.append("flash")
        return causal_by_bounds(q, k, v, bounds, of_keys, width, key_width, scale)

    def efficient(
        q: Any, k: Any, v: Any, bounds: Any, of_keys: Any, width: int, key_width: int, scale: float | None
    ) -> Any:
        assert q.shape[1] == k.shape[1] == v.shape[1], "this kernel doesn't support grouped queries"
        called.append("efficient")
        return causal_by_bounds(q, k, v, bounds, of_keys, width, key_width, scale)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash)
    monkeypatch.setattr(attention, "efficient_attention", efficient)
    return called


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, "efficient"), (torch.bfloat16, "flash")])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("row", [ALONE, TREE], ids=["alone", "tree"])
def test_kernels_equal_the_grid(kernels: list[str], dtype: Any, kernel: str, scale: float | None, row: Row) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, len(row), heads, 16, generator=generator, dtype=dtype).requires_grad_() for heads in (4, 2, 2)
    )
    module = PackedAttention(PackedAttention.Config(scale=scale))
    weights = torch.randn(1, len(row), 4, 16, generator=generator, dtype=dtype)
    results = []
    for layout in (PackedLayout.of(row, CPU), VarlenLayout.of(row, CPU)):
        out = module(q, k, v, attention_masks=layout, enable_gqa=True)
        results.append([out, *torch.autograd.grad((out * weights).sum(), (q, k, v))])
    for grid, varlen in zip(*results, strict=True):
        torch.testing.assert_close(varlen, grid, **({} if dtype == torch.float32 else {"atol": 5e-2, "rtol": 5e-2}))
    assert kernels == [kernel]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("row", [ALONE, TREE], ids=["alone", "tree"])
def test_sinks_take_part_in_the_softmax_and_get_gradients(row: Row, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, len(row), heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator).requires_grad_()
    module = PackedAttention(PackedAttention.Config(scale=0.3, window=window))
    weights = torch.randn(1, len(row), 4, 16, generator=generator)
    theirs = plain(q[0], k[0], v[0], sinks, row, window)
    ours = module(q, k, v, attention_masks=PackedLayout.of(row, CPU), enable_gqa=True, sinks=sinks)
    results = [[out, *torch.autograd.grad((out * weights).sum(), (q, k, v, sinks))] for out in (ours, theirs)]
    for grid, expected in zip(*results, strict=True):
        torch.testing.assert_close(grid, expected)


def test_sinks_in_bfloat16_are_not_rounded_again() -> None:
    lengths = [3, 6]
    q, v = torch.zeros(1, 9, 4, 16, dtype=torch.bfloat16), torch.ones(1, 9, 4, 16, dtype=torch.bfloat16)
    sinks = torch.tensor([-2.0, 2.0, 5.0, 20.0], dtype=torch.bfloat16)
    layout = PackedLayout.of(Row.of(lengths), CPU)
    out = PackedAttention(PackedAttention.Config(scale=0.3))(q, q, v, attention_masks=layout, sinks=sinks)
    visible = torch.cat([torch.arange(1, length + 1) for length in lengths])[:, None]
    expected = visible / (visible + sinks.float().exp())
    torch.testing.assert_close(out[0, ..., 0].float(), expected, atol=0, rtol=2**-6)


def plain(q: Any, k: Any, v: Any, sinks: Any, row: Row, window: int | None) -> Any:
    """Attention with a scale of 0.3, token by token, [1, T, heads, head dim]."""
    outputs = {}
    for path in row.paths:
        for index, token in enumerate(path):
            visible = path[max(0, index + 1 - (window or len(path))) : index + 1]
            keys, values = k[visible].repeat_interleave(2, 1), v[visible].repeat_interleave(2, 1)
            scores = torch.cat([0.3 * torch.einsum("hd,shd->hs", q[token], keys), sinks[:, None]], -1)
            outputs[token] = torch.einsum("hs,shd->hd", scores.softmax(-1)[:, :-1], values)
    return torch.stack([outputs[token] for token in range(len(row))])[None]


def test_autocast_applies_to_the_kernels(kernels: list[str]) -> None:
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = PackedAttention(PackedAttention.Config())(q, k, v, attention_masks=VarlenLayout.of(Row.of([4]), CPU))
    assert out.dtype == torch.bfloat16
    assert kernels == ["flash"]


def test_only_a_gpu_has_such_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(layout_of(ALONE, CPU), PackedLayout)
    asked: list[Any] = []
    for kind in (PackedLayout, VarlenLayout):
        monkeypatch.setattr(kind, "of", lambda *arguments, kind=kind: asked.append((kind, *arguments)))
    cuda = torch.device("cuda")
    layout_of(ALONE, cuda)
    layout_of(ALONE, cuda, padded=True)
    assert asked == [(VarlenLayout, ALONE, cuda), (PackedLayout, ALONE, cuda)]
