"""Padded rows, the documents' batches, as sequences."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from forge_env.errors import UsageError
from trainers.titan.rows import from_rows

pytestmark = pytest.mark.stack

RESPONSE = torch.tensor([[7, 8, 9], [5, 6, 0]])
TARGETS = {
    "response": RESPONSE,
    "padding_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    "advantages": torch.tensor([[0.5], [-1.0]]),
    "ref_logprobs": torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, 0.0]]),
}
INPUTS = {"tokens": torch.cat([torch.tensor([[1, 2], [0, 3]]), RESPONSE], 1)}


def test_rows_become_sequences_without_their_padding() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]])
    first, second = from_rows([INPUTS | {"attention_mask": mask}], [TARGETS])
    assert first.token_ids.tolist() == [1, 2, 7, 8, 9]
    assert first.mask.tolist() == [False, False, True, True, True]
    assert first.ref_logprobs.tolist() == [0, 0, -1, -2, -3]
    assert first.advantages.tolist() == [0, 0, 0.5, 0.5, 0.5]
    assert second.token_ids.tolist() == [3, 5, 6]
    assert second.ref_logprobs.tolist() == [0, -4, -5]
    assert second.advantages.tolist() == [0, -1, -1]


def test_prompts_without_a_mask_are_taken_whole() -> None:
    assert from_rows([INPUTS], [TARGETS])[1].token_ids.tolist() == [0, 3, 5, 6]


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        ({}, TARGETS, "lacks inputs.tokens"),
        (INPUTS, {key: TARGETS[key] for key in ("response", "advantages")}, "lacks targets.padding_mask"),
        (INPUTS, TARGETS | {"reward": torch.zeros(2)}, "unknown targets reward"),
        ({"tokens": INPUTS["tokens"][:1]}, TARGETS, "side by side"),
        (INPUTS, TARGETS | {"advantages": torch.zeros(3)}, "3 advantages for 2 rows"),
        (INPUTS, TARGETS | {"ref_logprobs": torch.zeros(2, 2)}, "ref_logprobs has the shape"),
    ],
)
def test_refused_batches(inputs: dict[str, torch.Tensor], targets: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_rows([inputs], [targets])


def test_inputs_without_targets_are_refused() -> None:
    with pytest.raises(UsageError, match="2 inputs but 1 targets"):
        from_rows([INPUTS, INPUTS], [TARGETS])
