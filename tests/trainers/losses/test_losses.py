"""Losses against independent formulas and finite differences, in float64; and the parts they are made of."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forge_env.config.recipe import LossSection  # noqa: E402
from forge_env.plugins import installed  # noqa: E402
from tests.trainers.losses import loss_formulas as formulas  # noqa: E402
from trainers.losses import SFTLoss, TokenBatch  # noqa: E402
from trainers.losses.load import GROUP, make_loss  # noqa: E402
from trainers.losses.primitives import (  # noqa: E402
    kl_estimate,
)

pytestmark = pytest.mark.stack
torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other
NAMES = ("grpo", "dr_grpo", "dapo", "simple_grpo", "gspo", "reinforce", "cispo", "sapo")
CORRECTIONS: tuple[Any, ...] = (
    None,
    "tis",
    "icepop",
    "decoupled",
    {"name": "tis", "level": "sequence", "cap": 1.3},
    {"name": "tis", "level": "geometric", "cap": 1.05},
    {"name": "icepop", "level": "sequence", "low": 0.8, "high": 1.6},
    {"name": "icepop", "low": 0.9, "high": 1.1},
    {"name": "decoupled", "cap": 1.1},
    {"name": "decoupled", "cap": None},
)
SHARED: tuple[dict[str, Any], ...] = (
    {},
    {"beta": 0.3},
    {"beta": 0.3, "kl": "k1"},
    {"beta": 0.3, "kl": "k2", "dual_clip": 1.1},
    {"entropy_coef": 0.05, "aggregation": "sequence", "horizon": None},
    {"aggregation": "fixed_horizon", "horizon": 7.0},
    {"aggregation": "token", "horizon": None, "dual_clip": 1.2},
)
OWN: dict[str, dict[str, Any]] = {
    "grpo": {"clip_low": 0.05, "clip_high": 0.1},
    "dr_grpo": {"clip_low": 0.3, "clip_high": 0.01},
    "dapo": {"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 1.3},
    "simple_grpo": {"beta": 0.0},
    "gspo": {"clip_low": 0.1, "clip_high": 0.2},
    "reinforce": {"clip_ratio": 1.5},
    "cispo": {"clip_low": 0.3, "clip_high": 0.2},
    "sapo": {"tau_pos": 2.0, "tau_neg": 0.5},
}


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch_of(case: formulas.Case) -> TokenBatch:
    return TokenBatch(
        logprobs=tensor(case.now).requires_grad_(),
        entropy=tensor(case.entropy),
        behavior_logprobs=tensor(case.sampled),
        advantages=tensor(case.advantages),
        sequence_ids=torch.tensor(case.sequences),
        total_tokens=case.num_tokens,
        total_sequences=len(set(case.sequences)),
        ref_logprobs=None if case.reference is None else tensor(case.reference),
        proximal_logprobs=None if case.proximal is None else tensor(case.proximal),
    )


def assert_equals_formula(name: str, options: dict[str, Any], case: formulas.Case) -> None:
    batch = batch_of(case)
    value = make_loss(LossSection(name=name, options=options))(batch).loss
    (slopes,) = torch.autograd.grad(value, batch.logprobs)
    assert value.item() == pytest.approx(formulas.loss(name, options, case, case.now, case.now), rel=1e-12, abs=1e-12)
    assert slopes.tolist() == pytest.approx(formulas.gradient(name, options, case), rel=1e-5, abs=2e-8)


def test_every_registered_loss_has_a_formula() -> None:
    assert set(installed(GROUP)) >= set(NAMES)
    ours = {name for name, entry in installed(GROUP).items() if entry.value.startswith("trainers.")}
    assert ours == set(NAMES)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_are_the_formulas(name: str, seed: int) -> None:
    for options in ({}, OWN[name]):
        assert_equals_formula(name, options, formulas.random_case(seed))


@pytest.mark.parametrize("shared", SHARED, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_shared_options_are_the_formulas(name: str, shared: dict[str, Any]) -> None:
    assert_equals_formula(name, shared, formulas.random_case(11, spread=0.6))


@pytest.mark.parametrize("moved", [True, False], ids=["proximal", "first-update"])
@pytest.mark.parametrize("correction", CORRECTIONS[1:], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_corrections_are_the_formulas(name: str, correction: Any, moved: bool) -> None:
    assert_equals_formula(name, {"correction": correction}, formulas.random_case(5, spread=0.5, moved=moved))


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_loss_is_the_policy_gradient(name: str) -> None:
    case = formulas.random_case(3, spread=0.0, moved=False)
    options: dict[str, Any] = {"aggregation": "token"}
    options |= {"beta": 0.0} if name == "simple_grpo" else {"horizon": None} if name == "dr_grpo" else {}
    batch = batch_of(case)
    output = make_loss(LossSection(name=name, options=options))(batch)
    (slopes,) = torch.autograd.grad(output.loss, batch.logprobs)
    assert torch.allclose(slopes, -batch.advantages / case.num_tokens)
    assert output.metrics["ratio_mean"].item() == pytest.approx(1)
    assert output.metrics["clip_fraction"].item() == 0
    assert output.metrics["mismatch_max"].item() == 0


def test_clip_fractions_tell_the_sides_apart() -> None:
    now = tensor([0.0, 0.0, 0.0, 0.0]).requires_grad_()
    batch = TokenBatch(
        logprobs=now,
        entropy=torch.zeros(4),
        behavior_logprobs=tensor([-1.0, -1.0, 1.0, 1.0]),
        advantages=tensor([1.0, -1.0, 1.0, -1.0]),
        sequence_ids=torch.zeros(4, dtype=torch.long),
        total_tokens=4,
        total_sequences=1,
    )
    metrics = make_loss(LossSection())(batch).metrics
    assert {name: value.item() for name, value in metrics.items() if "clip" in name} == {
        "clip_fraction": 0.5,
        "clip_fraction_low": 0.25,
        "clip_fraction_high": 0.25,
    }
    assert metrics["mismatch_mean"].item() == metrics["mismatch_max"].item() == 1


def test_kl_estimates_of_two_known_distributions() -> None:
    policy, reference = tensor([0.7, 0.2, 0.1]), tensor([0.3, 0.3, 0.4])
    exact = float((policy * (policy / reference).log()).sum())
    for kind in ("k1", "k3"):
        assert float((policy * kl_estimate(policy.log(), reference.log(), kind)).sum()) == pytest.approx(exact)
    logits = policy.log().requires_grad_()
    (right,) = torch.autograd.grad((logits.softmax(0) * (logits.log_softmax(0) - reference.log())).sum(), logits)
    for kind in ("k1", "k2"):  # the mean of the estimate's gradient over samples is the gradient of the divergence
        estimate = kl_estimate(logits.log_softmax(0), reference.log(), kind)
        (mean,) = torch.autograd.grad((policy * estimate).sum(), logits)
        assert torch.allclose(mean, right)


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    case = formulas.random_case(4)
    assert SFTLoss()(batch_of(case)).loss.item() == pytest.approx(-case.now.mean())
