"""Attention with variable-length kernels, replaced by CPU functions, compared with attention over the padded grid."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import SDPBackend  # noqa: E402

from trainers.titan import attention  # noqa: E402
from trainers.titan.attention import PackedAttention  # noqa: E402
from trainers.titan.layout import PackedLayout, VarlenLayout, layout_of  # noqa: E402

pytestmark = pytest.mark.stack
CPU = torch.device("cpu")
LENGTHS = [5, 1, 17, 8]


def causal_by_bounds(q: Any, k: Any, v: Any, bounds: Any, width: int, scale: float | None) -> Any:
    """Causal attention within each sequence, [T, heads, head dim], in float64."""
    assert bounds.dtype == torch.int32
    assert width == int((bounds[1:] - bounds[:-1]).max())
    outs = []
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        q1, k1, v1 = (each[begin:end].transpose(0, 1)[None].double() for each in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q1, k1, v1, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs).to(q.dtype)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace both GPU kernels; returns the names of those that were called."""
    called: list[str] = []

    def flash(
        q: Any, k: Any, v: Any, bounds: Any, other: Any, width: int, other_width: int, *, scale: Any, **options: Any
    ) -> Any:
        assert (bounds is other, width, options["window_size"]) == (True, other_width, (-1, 0))
        assert q.dtype == k.dtype == v.dtype
        assert options["enable_gqa"] == (q.shape[1] != k.shape[1])
        called.append("flash")
        return causal_by_bounds(q, k, v, bounds, width, scale)

    def efficient(q: Any, k: Any, v: Any, bounds: Any, width: int, scale: float | None) -> Any:
        assert q.shape[1] == k.shape[1] == v.shape[1], "this kernel doesn't support grouped queries"
        called.append("efficient")
        return causal_by_bounds(q, k, v, bounds, width, scale)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash)
    monkeypatch.setattr(attention, "efficient_attention", efficient)
    return called


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, "efficient"), (torch.bfloat16, "flash")])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_kernels_for_varying_lengths_give_what_the_grid_gives(
    kernels: list[str], dtype: Any, kernel: str, scale: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, sum(LENGTHS), heads, 16, generator=generator, dtype=dtype).requires_grad_()
        for heads in (4, 2, 2)
    )
    module = PackedAttention(PackedAttention.Config(scale=scale))
    weights = torch.randn(1, sum(LENGTHS), 4, 16, generator=generator, dtype=dtype)
    results = []
    for layout in (PackedLayout.of(LENGTHS, CPU), VarlenLayout.of(LENGTHS, CPU)):
        out = module(q, k, v, attention_masks=layout, enable_gqa=True)
        results.append([out, *torch.autograd.grad((out * weights).sum(), (q, k, v))])
    for grid, varlen in zip(*results, strict=True):
        torch.testing.assert_close(varlen, grid, **({} if dtype == torch.float32 else {"atol": 5e-2, "rtol": 5e-2}))
    assert kernels == [kernel]


def test_autocast_applies_to_the_kernels(kernels: list[str]) -> None:
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = PackedAttention(PackedAttention.Config())(q, k, v, attention_masks=VarlenLayout.of([4], CPU))
    assert out.dtype == torch.bfloat16
    assert kernels == ["flash"]


def test_only_a_gpu_has_such_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(layout_of(LENGTHS, CPU), PackedLayout)
    asked: list[Any] = []
    monkeypatch.setattr(VarlenLayout, "of", lambda *arguments: asked.append(arguments))
    layout_of(LENGTHS, torch.device("cuda"))
    assert asked == [(LENGTHS, torch.device("cuda"))]


def test_no_kernel_that_plans_for_every_shape() -> None:
    assert SDPBackend.CUDNN_ATTENTION not in PackedAttention(PackedAttention.Config()).sdpa_backends
