"""torch: the class of gloo process groups, and private functions of DTensor, checkpoints, attention and products."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from trainers.compat import Package

if TYPE_CHECKING:
    import torch

PACKAGE = Package("torch", ("2.13.0",))
_function = cache(PACKAGE.function)
X86 = ("x86_64", "AMD64")
CAUSAL = 2
"""Value of `custom_mask_type` in torch's memory-efficient kernel: causal, the last query at the last key."""


def replace_gloo(group: type) -> None:
    """Make `group`, a subclass of `ProcessGroupGloo`, the class of the gloo groups that this process will create."""
    PACKAGE.replace("torch.distributed.distributed_c10d:ProcessGroupGloo", group)


def offset_of_shard(tensor: Any) -> tuple[int, ...]:
    """First index of this rank's shard of a DTensor, in each dimension."""
    locate = _function(
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset", "global_shape", "mesh", "placements"
    )
    _, offset = locate(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


def set_element(state: dict[str, Any], path: Sequence[str | int], value: Any) -> None:
    """Set a value in nested dictionaries and lists, as checkpoints name it."""
    _function("torch.distributed.checkpoint._traverse:set_element", "root_dict", "path", "value")(state, path, value)


def efficient_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    width: int,
    key_width: int,
    scale: float | None,
) -> torch.Tensor:
    """Compute memory-efficient causal attention within each sequence of a packed row, on a GPU.

    Inputs and output are [T, heads, head dim]. `bounds` has the index of the first query of each sequence, then the
    number of queries, [S + 1] int32, and `width` is the largest number of a sequence; likewise those of keys and
    values. A sequence may have more keys than queries; its last query is at its last key.
    `scaled_dot_product_attention` uses the same kernel, but has no argument for the sequences' bounds.
    """
    import torch

    attend = torch.ops.aten._efficient_attention_forward
    grad = torch.is_grad_enabled()
    out, *_ = attend(
        q[None], k[None], v[None], None, bounds, key_bounds, width, key_width, 0.0, CAUSAL, grad, scale=scale
    )
    attended: torch.Tensor = out[0]
    return attended


@cache
def has_onednn() -> bool:
    """Whether `product` works here: torch is built with oneDNN, and the processor is one that this was checked on."""
    import torch

    return platform.machine() in X86 and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a linear layer on a CPU with oneDNN, in float32, without gradients: [..., in], [out, in] -> [..., out].

    From two rows on, a row's result doesn't depend on the number of rows.
    """
    import torch

    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


@cache
def multiply_with_onednn() -> Any:
    """Make `torch.mm` use oneDNN for float32 on a CPU, in this process, where it can; backward passes use `mm` too.

    MKL, which torch uses, leaves out AVX-512 on AMD's processors and takes twice as long there. Limited to AVX2, both
    are equally fast. Intel's processors were not measured.
    """
    import torch

    if not has_onednn():
        return None

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        fits = left.ndim == right.ndim == 2 and left.shape[1] == right.shape[0] and left.numel() and right.numel()
        if fits and left.dtype is right.dtype is torch.float32:
            return product(left, right.t())
        return torch.mm(left, right, out=left.new_empty(0))  # torch's own

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it replaces a function
        library.impl("mm", multiply, "CPU", allow_override=True)  # type: ignore[no-untyped-call]
    return library  # kept by the cache: without it, torch's own function returns
