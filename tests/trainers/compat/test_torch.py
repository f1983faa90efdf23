"""What `trainers.compat.torch` assumes about torch."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

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
