"""What a request gets does not depend on what happens to be under way beside it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from forge_env.rollout.episode import episode_seed
from trainers.compat import vllm as compat
from trainers.compat.torch import has_onednn, multiply_with_onednn
from trainers.compat.vllm import ROWS, padded_gemm
from trainers.generator.policy import turn_seed

pytestmark = pytest.mark.stack


class Layer:
    """A linear layer as vLLM prepares it on a CPU; remembers how many rows it was given."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    def cpu_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.rows.add(len(x))
        return torch.nn.functional.linear(x, weight, bias)


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(256, 128), (128, 384), (1024, 128)])
def test_a_row_of_a_product_is_the_same_beside_any_others(
    shape: tuple[int, int], threads: int, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "has_onednn", lambda: onednn and has_onednn())
    if not onednn:
        multiply_with_onednn.cache_clear()  # `linear` uses MKL again, if another test has replaced `mm`
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight, x = torch.randn(*shape), torch.randn(300, shape[1])
        layer, whole = Layer(), padded_gemm(Layer(), x, weight)
        for rows in (*range(1, 70), 127, 255):
            assert torch.equal(padded_gemm(layer, x[:rows], weight), whole[:rows]), rows
            assert torch.equal(padded_gemm(Layer(), x[None, :rows], weight)[0], whole[:rows]), rows
        assert compat.has_onednn() or min(layer.rows) == ROWS * threads
    finally:
        torch.set_num_threads(before)


def test_every_request_has_a_seed_of_its_own() -> None:
    episodes = [f"train-{position}-{member}" for position in range(100) for member in range(8)]
    seeds = {turn_seed(episode_seed(run, name), turn) for run in (0, 1) for name in episodes for turn in range(4)}
    assert len(seeds) == 2 * 800 * 4
    assert max(seeds) < 2**63
    assert max(episode_seed(0, name) for name in episodes) < 2**32
    assert turn_seed(episode_seed(0, "train-3-1"), 2) == turn_seed(episode_seed(0, "train-3-1"), 2)
