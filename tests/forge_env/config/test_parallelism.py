"""Degrees of parallelism that can't make up the trainer's processes are refused with the recipe."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from forge_env.config.recipe import TrainerSection


@pytest.mark.parametrize(
    ("procs", "degrees"),
    [
        (1, {}),
        (4, {}),
        (4, {"data_parallel_shard_degree": 4}),
        (4, {"tensor_parallel_degree": 2}),
        (8, {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2, "context_parallel_degree": 2}),
    ],
)
def test_degrees_make_up_the_processes(procs: int, degrees: dict[str, int]) -> None:
    assert TrainerSection.model_validate({"procs": procs, "parallelism": degrees}).procs == procs


@pytest.mark.parametrize(
    ("procs", "degrees", "fix"),
    [
        (2, {"data_parallel_shard_degree": 4}, "use trainer.procs=4"),
        (4, {"tensor_parallel_degree": 3}, "use trainer.procs=3"),
        (8, {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 2}, "use trainer.procs=2"),
        (1, {"context_parallel_degree": 2}, "use trainer.procs=2"),
    ],
)
def test_other_degrees_are_refused_with_the_fix(procs: int, degrees: dict[str, int], fix: str) -> None:
    with pytest.raises(ValidationError, match=fix):
        TrainerSection.model_validate({"procs": procs, "parallelism": degrees})


@pytest.mark.parametrize("degree", [0, -2])
def test_a_degree_is_a_number_of_processes(degree: int) -> None:
    with pytest.raises(ValidationError, match="at least 1, or -1"):
        TrainerSection.model_validate({"parallelism": {"data_parallel_shard_degree": degree}})
