"""What every model family needs of vLLM: the log-probabilities of the trainer, also after updates in flight."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from tests.trainers.generator.family_parity import run_parity

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]
MISMATCH = 1e-5
# Llama 3.1 and Mistral are computed by what computes Llama 3.2, and Qwen 3 is compared in `test_stack.py`
NAMES = ["Llama 3.2", "Qwen 2.5", "Qwen 3, YaRN", "Qwen 3 MoE", "SmolLM 3"]
NAMES += ["Phi 3", "Phi 4 mini", "Phi 4 mini, short", "Gemma 3, scaled", "Gemma 4", "Gemma 4 E2B", "Gemma 4 MoE"]
NAMES += ["Qwen 3.5", "Qwen 3.5 MoE", "gpt-oss"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_parity(NAMES, tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize("name", NAMES)
def test_weights_swapped_in_flight_leave_generator_and_trainer_in_agreement(found: dict[str, Any], name: str) -> None:
    seen = found[name]
    assert max(seen["before"], seen["after"]) <= MISMATCH
    assert seen["swapped"] > 1, "no request was in flight over an update"
    assert seen["held"], "the checksum of the weights that the engine holds differs"
    assert seen["moved"] > 0.1, "the updates changed nothing, so agreement proves nothing"


@pytest.mark.parametrize("way", ["adapted", "beside"])
@pytest.mark.parametrize("name", NAMES)
def test_adapters_added_in_flight_leave_them_in_agreement_too(found: dict[str, Any], name: str, way: str) -> None:
    """Added to the weights, as in float32, or computed beside them, as in bfloat16."""
    seen = found[name][way]
    assert seen["after"] <= MISMATCH
    assert seen["swapped"] > 1
    assert seen["moved"] > 0.1
