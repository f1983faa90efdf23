"""The programs of docs/training.md run as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from trainers.losses.types import TokenBatch  # noqa: E402

pytestmark = pytest.mark.stack
PAGE = Path(__file__).resolve().parents[3] / "docs" / "training.md"


def test_the_loss_of_the_page_works() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict[str, object] = {}
    exec(program, names)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = TokenBatch(
        logprobs=logprobs,
        entropy=torch.zeros(2),
        behavior_logprobs=torch.tensor([-1.0, -2.0]),
        advantages=torch.tensor([1.0, -1.0]),
        sequence_ids=torch.zeros(2, dtype=torch.long),
        total_tokens=2,
        total_sequences=1,
    )
    loss = names["Reinforce"]()(batch).loss  # type: ignore[operator]
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 0.5]
