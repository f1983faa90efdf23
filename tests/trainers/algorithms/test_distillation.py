"""Recipes that on-policy distillation can't run are refused before anything starts."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from forge_env.config import load_config
from forge_env.errors import UsageError
from trainers.algorithms.distillation import Distillation

TEACHER = "grpo.reference={source: path, path: teacher}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "has no teacher"),
        (["grpo.reference={source: lagging, every: 2}"], "has no teacher"),
        ([TEACHER, "grpo.advantage.name=leave_one_out"], r"grpo\.advantage means nothing"),
        ([TEACHER, "grpo.filter.name=with_signal"], r"grpo\.filter means nothing"),
        ([TEACHER, "grpo.loss={name: grpo, options: {beta: 0.1}}"], "the reference model is the teacher"),
    ],
)
def test_what_it_refuses(overrides: list[str], said: str) -> None:
    config = load_config("coding_rlvr", ["method=distillation", "grpo.group_size=1", *overrides])
    with pytest.raises(UsageError, match=said):
        Distillation.check(config)


def test_a_teacher_is_enough() -> None:
    Distillation.check(load_config("coding_rlvr", ["method=distillation", "grpo.group_size=1", TEACHER]))
