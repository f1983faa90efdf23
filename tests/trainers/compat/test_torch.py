"""What `trainers.compat.torch` assumes about torch."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from tests.trainers.compat.sources import source
from trainers.compat import torch as compat


def test_an_element_is_set_in_nested_dictionaries_and_lists() -> None:
    state: dict[str, Any] = {}
    compat.set_element(state, ("optimizer", "state", 1, "step"), 2)
    assert state == {"optimizer": {"state": [None, {"step": 2}]}}


def test_gloo_groups_are_made_of_the_class_that_is_replaced() -> None:
    assert "backend_class = ProcessGroupGloo(" in source("torch.distributed.distributed_c10d:_new_process_group_helper")


def test_the_location_of_a_shard_is_its_shape_and_its_offset() -> None:
    text = source("torch.distributed.tensor._utils:compute_local_shape_and_global_offset")
    assert "-> tuple[tuple[int, ...], tuple[int, ...]]:" in text
    assert "of a DTensor on its current global rank" in text


def products(rows: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Products of [300, 64] with [128, 64], in the layouts of forward and backward passes, and at their edges."""
    left, right = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    (left @ right.t()).square().sum().backward()
    return {
        "forward": rows @ weight.t(),
        "of a sum": torch.ones(()).expand(300, 128) @ weight,
        "with steps": rows[::3, ::2] @ weight[:, ::2].t(),
        "by rows": left.grad,
        "by weights": right.grad,
        "one row": rows[:1] @ weight.t(),
        "no row": rows[:0] @ weight.t(),
        "no column": rows[:, :0] @ weight[:, :0].t(),
        "in double precision": rows.double() @ weight.double().t(),
    }


def test_onednn_multiplies_as_torch_does() -> None:
    """In another process, since the replacement stays."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(largest_difference).result() < 1e-5


def largest_difference() -> float:
    rows, weight = torch.randn(300, 64), torch.randn(128, 64)
    before = products(rows, weight)
    compat.multiply_with_onednn()
    after = products(rows, weight)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        rows @ weight
    with pytest.raises(RuntimeError, match="must be a matrix"):
        torch.mm(rows[0], weight.t())
    assert [item.shape for item in before.values()] == [item.shape for item in after.values()]
    scales = {name: item.abs().max() for name, item in before.items() if item.numel()}
    return max(float((before[name] - after[name]).abs().max() / scale) for name, scale in scales.items())
