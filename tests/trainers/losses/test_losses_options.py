"""Options of losses: each changes something, wrong ones are refused early, and a user's own loss works."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic.dataclasses import dataclass as pydantic_dataclass

torch = pytest.importorskip("torch")

from forge_env.config import load_config  # noqa: E402
from forge_env.config.reader import arguments  # noqa: E402
from forge_env.config.recipe import LossSection  # noqa: E402
from forge_env.errors import ForgeError, PluginError, UsageError  # noqa: E402
from forge_env.plugins import installed  # noqa: E402
from tests.trainers.losses import loss_formulas as formulas  # noqa: E402
from tests.trainers.losses.test_losses import batch_of  # noqa: E402
from trainers.loop.checks import check_loss  # noqa: E402
from trainers.losses import LossOutput, Needs, PolicyLoss, Surrogate, TokenBatch  # noqa: E402
from trainers.losses.corrections import CORRECTIONS, OPTIONS  # noqa: E402
from trainers.losses.load import GROUP, make_loss  # noqa: E402
from trainers.losses.padded import PaddedLoss  # noqa: E402
from trainers.losses.policy import BY_TOKEN  # noqa: E402
from trainers.losses.types import needs  # noqa: E402

pytestmark = pytest.mark.stack
torch.set_num_threads(1)
OURS = {name: entry.load() for name, entry in installed(GROUP).items() if entry.value.startswith("trainers.")}

# For every option: what it is changed to, and what has to be set beside it, before and after.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "beta": (0.2, {"beta": 0.1}),
    "kl": ("k2", {"beta": 0.1}),
    "entropy_coef": (0.01, {}),
    "aggregation": ("sequence", {"aggregation": "token", "horizon": None}),
    "horizon": (100.0, {"aggregation": "fixed_horizon", "horizon": 50.0}),
    "correction": ("decoupled", {}),
    "dual_clip": (1.05, {}),
    "clip_low": (0.01, {"clip_low": 0.3}),
    "clip_high": (0.01, {"clip_high": 0.3}),
    "clip_ratio": (0.01, {}),
    "tau_pos": (2.0, {}),
    "tau_neg": (2.0, {}),
}
CORRECTION_CHANGES: dict[str, Any] = {"cap": 1.05, "low": 0.95, "high": 1.05, "level": "sequence"}


def observed(name: str, options: dict[str, Any]) -> tuple[float, list[float]]:
    case = formulas.random_case(8, lengths=(4, 2, 6, 1), spread=0.5)
    batch = batch_of(case)
    loss = make_loss(LossSection(name=name, options=options))(batch).loss
    return loss.item(), torch.autograd.grad(loss, batch.logprobs)[0].tolist()


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in OURS for option in arguments(OURS[name])[0]])
def test_every_option_of_every_loss_changes_something(name: str, option: str) -> None:
    changed, beside = CHANGES[option]
    assert observed(name, beside) != observed(name, {**beside, option: changed})


@pytest.mark.parametrize(
    ("correction", "option"),
    [
        (name, field.name)
        for name, kind in CORRECTIONS.items()
        for field in dataclasses.fields(kind)
        if field.name != "name"
    ],
)
@pytest.mark.parametrize("name", OURS)
def test_every_option_of_every_correction_changes_something(name: str, correction: str, option: str) -> None:
    chosen = {"name": correction, option: CORRECTION_CHANGES[option]}
    assert observed(name, {"correction": correction}) != observed(name, {"correction": chosen})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_hihg": 0.3}, "grpo.loss.options.clip_hihg: unknown key (did you mean grpo.loss.options.clip_high?)"),
        ({"whatever": 1}, "grpo.loss.options.whatever: unknown key (known here: clip_low, clip_high, beta"),
        ({"correction": "tiss"}, "there is no correction 'tiss': did you mean 'tis'?"),
        ({"correction": {"name": "tis", "kap": 2}}, "kap: unknown key (did you mean grpo.loss.options.correction.cap"),
        ({"correction": {"cap": 2}}, "correction"),
        ({"correction": {"name": "icepop", "low": 3, "high": 2}}, "low must be less than high"),
        ({"kl": "k4", "beta": 1}, "grpo.loss.options.kl: should be 'k1', 'k2' or 'k3', not 'k4'"),
        ({"kl": "k2"}, "kl=k2 has no effect while beta is 0"),
        ({"horizon": 10}, "horizon and aggregation=fixed_horizon need each other"),
        ({"aggregation": "fixed_horizon"}, "horizon and aggregation=fixed_horizon need each other"),
        ({"dual_clip": 0.5}, "dual_clip: should be greater than 1, not 0.5"),
        ({"clip_low": 1.5}, "clip_low: should be less than or equal to 1, not 1.5"),
        ({"beta": "much"}, "beta: should be a valid number, not 'much'"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_with_what_was_meant(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_loss(LossSection(options=options))
    assert message in caught.value.message


def test_a_loss_travels_to_the_trainers_process() -> None:
    for name in OURS:
        loss = make_loss(LossSection(name=name, options={"correction": {"name": "tis", "cap": 3}}))
        assert pickle.loads(pickle.dumps(loss)) == loss


def test_a_loss_says_what_it_needs() -> None:
    plain = make_loss(LossSection())
    assert not any(dataclasses.asdict(needs(plain)).values())
    wanting = make_loss(LossSection(options={"beta": 0.1, "correction": {"name": "tis", "level": "sequence"}}))
    assert all(dataclasses.asdict(needs(wanting)).values())
    assert needs(own("Short")) == Needs(zero_advantage=True, whole_sequences=True), "it declares nothing"
    assert needs(own("Mine")).computed == "all", "its surrogate is its own, and declares nothing"
    assert needs(own("Declared")).computed == "segments"
    assert needs(own("DeclaredRows")) == Needs(zero_advantage=False)
    assert needs(make_loss(LossSection(name="gspo"))).computed == "sequences"


def batch_with_silence(seed: int, silent: tuple[int, ...]) -> TokenBatch:
    """Random tokens of which these sequences have no advantage; all ratios are within every clip."""
    case = formulas.random_case(seed, lengths=(4, 2, 6, 1), spread=0.5)
    batch = batch_of(case)
    noise = 1e-5 * torch.randn(2, len(batch.logprobs), dtype=torch.float64)
    batch.behavior_logprobs, batch.proximal_logprobs = batch.logprobs.detach() + noise
    for sequence in silent:
        batch.advantages[batch.sequence_ids == sequence] = 0.0
    return batch


TERMS: list[dict[str, Any]] = [
    {},
    {"dual_clip": 1.05},
    {"beta": 0.1},
    {"beta": 0.1, "kl": "k1"},
    {"entropy_coef": 0.1},
    {"correction": "tis"},
    {"correction": {"name": "icepop", "level": "geometric"}},
    {"correction": {"name": "tis", "level": "sequence"}, "aggregation": "sequence", "horizon": None},
]


@pytest.mark.parametrize("options", TERMS, ids=str)
@pytest.mark.parametrize("name", OURS)
def test_what_a_loss_declares_is_what_its_gradient_does(name: str, options: dict[str, Any]) -> None:
    plain = {"beta": 0.0} if name == "simple_grpo" else {}
    loss = make_loss(LossSection(name=name, options={**plain, **options}))
    at_silent, across = 0.0, 0.0
    for seed in range(4):
        batch = batch_with_silence(seed, (1, 3))
        for values in (batch.logprobs, batch.entropy):
            values.requires_grad_()
        slopes = torch.autograd.grad(loss(batch).loss, (batch.logprobs, batch.entropy), allow_unused=True)
        silent = (batch.sequence_ids == 1) | (batch.sequence_ids == 3)
        at_silent = max(at_silent, *(float(slope[silent].abs().max()) for slope in slopes if slope is not None))
        assert batch.proximal_logprobs is not None
        step = torch.zeros_like(batch.behavior_logprobs)
        step[0] = 1e-4  # the first token of a sequence: do its other tokens notice?
        moved = dataclasses.replace(
            batch,
            behavior_logprobs=batch.behavior_logprobs - step,
            proximal_logprobs=batch.proximal_logprobs - 2 * step,
        )
        (other,) = torch.autograd.grad(loss(moved).loss, batch.logprobs)
        rest = batch.sequence_ids == 0
        rest[0] = False
        across = max(across, float((other - slopes[0])[rest].abs().max()))
    assert (at_silent > 0) == needs(loss).zero_advantage
    assert (across > 0) == needs(loss).whole_sequences


# A user's own losses.


class Contract(torch.nn.Module):
    """As in the documents: padded rows in, one number out."""

    def __init__(self, clip_range: float = 0.2, beta: float = 0.1) -> None:
        super().__init__()
        self.clip_range = clip_range
        self.beta = beta

    def forward(
        self,
        logprobs: torch.Tensor,
        ref_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        padding_mask: torch.Tensor,
    ) -> torch.Tensor:
        assert logprobs.shape == ref_logprobs.shape == padding_mask.shape
        assert advantages.shape == (len(logprobs), 1)
        ratio = torch.exp(logprobs - ref_logprobs)
        bounded = torch.clamp(ratio, 1 - self.clip_range, 1 + self.clip_range)
        loss = -torch.minimum(ratio * advantages, bounded * advantages) + self.beta * (logprobs - ref_logprobs)
        return (loss * padding_mask).sum() / padding_mask.sum()


class Everything:
    """Takes every argument there is; the reference may be missing."""

    def __call__(
        self,
        logprobs: torch.Tensor,
        behavior_logprobs: torch.Tensor,
        proximal_logprobs: torch.Tensor,
        entropy: torch.Tensor,
        advantages: torch.Tensor,
        padding_mask: torch.Tensor,
        ref_logprobs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert ref_logprobs is None
        weight = (proximal_logprobs - behavior_logprobs).exp()
        return -weight * logprobs * advantages - 0.1 * entropy


class Demanding:
    """Asks for what nobody has."""

    def __call__(self, logprobs: torch.Tensor, critic_values: torch.Tensor) -> torch.Tensor:
        return logprobs * critic_values


@dataclasses.dataclass
class Short:
    """A loss in a few lines, on flat tokens."""

    scale: float = 1.0

    def __call__(self, batch: TokenBatch) -> LossOutput:
        return LossOutput(-self.scale * (batch.logprobs * batch.advantages).sum() / batch.total_tokens)


@pydantic_dataclass(config=OPTIONS)
class Mine(PolicyLoss):
    """Vanilla policy gradient with every shared option."""

    temper: float = 1.0

    def surrogate(self, batch: TokenBatch, log_ratios: torch.Tensor) -> Surrogate:
        return Surrogate(-self.temper * log_ratios.exp() * batch.advantages, log_ratios.exp())


@pydantic_dataclass(config=OPTIONS)
class Declared(PolicyLoss):
    """As `Mine`, and says that its tokens stand alone."""

    surrogate_needs: ClassVar[Needs] = BY_TOKEN

    def surrogate(self, batch: TokenBatch, log_ratios: torch.Tensor) -> Surrogate:
        return Surrogate(-log_ratios.exp() * batch.advantages, log_ratios.exp())


class DeclaredRows:
    """A padded loss that declares what it needs."""

    needs = Needs(zero_advantage=False)

    def __call__(self, logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return -logprobs * advantages


def own(name: str, **options: Any) -> Any:
    return make_loss(LossSection(name=f"{__name__}:{name}", options=options))


def test_the_documents_contract_is_a_loss() -> None:
    case = formulas.random_case(1)
    batch = batch_of(case)
    assert needs(own("Contract")).reference
    output = own("Contract", clip_range=0.1, beta=0.05)(batch)
    expected = 0.0
    for now, reference, advantage in zip(case.now, case.reference, case.advantages, strict=True):
        ratio = float(torch.exp(torch.tensor(now - reference, dtype=torch.float64)))
        bounded = min(max(ratio, 0.9), 1.1)
        expected += -min(ratio * advantage, bounded * advantage) + 0.05 * (now - reference)
    assert output.loss.item() == pytest.approx(expected / case.num_tokens)
    assert {"kl_ref", "mismatch_max"} <= set(output.metrics)
    output.loss.backward()
    assert batch.logprobs.grad.ne(0).any()


def test_the_documents_contract_over_microbatches() -> None:
    case = formulas.random_case(1)
    batch, loss = batch_of(case), own("Contract")
    parts = 0.0
    for chosen in (batch.sequence_ids < 2, batch.sequence_ids >= 2):
        fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        part = {key: value[chosen] if isinstance(value, torch.Tensor) else value for key, value in fields.items()}
        parts += loss(TokenBatch(**part)).loss.item()
    assert parts == pytest.approx(loss(batch).loss.item())


def test_a_padded_loss_may_ask_for_more_and_return_tokens() -> None:
    case = formulas.random_case(1)
    loss = own("Everything")
    assert needs(loss) == Needs(proximal=True)
    case.reference = None
    batch = batch_of(case)
    weights = (batch.proximal - batch.behavior_logprobs).exp()
    expected = (-weights * batch.logprobs * batch.advantages - 0.1 * batch.entropy).mean()
    assert loss(batch).loss.item() == pytest.approx(expected.item())


def test_a_padded_loss_gets_one_advantage_a_sequence_or_says_so() -> None:
    case = formulas.random_case(1)
    case.advantages[1] += 1
    with pytest.raises(UsageError, match="one advantage per sequence"):
        own("Everything")(batch_of(dataclasses.replace(case, reference=None)))


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(PluginError, match="has unknown parameters: critic_values") as caught:
        own("Demanding")
    assert "padding_mask" in (caught.value.fix or "")


def test_a_positional_only_argument_is_refused() -> None:
    def positional(logprobs: torch.Tensor, /) -> torch.Tensor:
        return logprobs.mean()

    with pytest.raises(PluginError, match=r"'positional' takes `logprobs` by position only \(remove the `/`"):
        PaddedLoss(positional, "positional")


def test_a_loss_on_flat_tokens_is_taken_as_it_is() -> None:
    loss = own("Short", scale=2)
    assert isinstance(loss, Short)
    with pytest.raises(UsageError, match=r"options.scael: unknown key \(did you mean grpo.loss.options.scale\?\)"):
        own("Short", scael=2)


@pytest.mark.parametrize(
    "overrides",
    [
        ["grpo.loss.options={beta: 0.1}"],
        ["grpo.loss={name: simple_grpo, options: {}}"],
        [f"grpo.loss={{name: '{__name__}:Contract', options: {{}}}}"],
    ],
    ids=str,
)
def test_a_loss_without_the_reference_it_needs_is_refused(overrides: list[str]) -> None:
    with pytest.raises(ForgeError, match="the recipe has none") as caught:
        check_loss(load_config("coding_rlvr", overrides))
    assert "grpo.reference.source=initial" in (caught.value.fix or "")
    check_loss(load_config("coding_rlvr", [*overrides, "grpo.reference.source=initial"]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.reference.source=lagging", "every goes with source=lagging"),
        ("grpo.reference={source: initial, every: 3}", "every goes with source=lagging"),
        ("grpo.reference.with_gpus=true", "with_gpus needs a reference model: set source"),
        ("grpo.reference.source=initail", "initial"),
    ],
)
def test_an_idle_option_of_the_reference_is_refused(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config("coding_rlvr", [override])


def test_the_losses_of_the_page_work() -> None:
    import re

    page = Path(__file__).resolve().parents[3] / "docs" / "losses.md"
    batch = batch_of(formulas.random_case(1))
    for program in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        names: dict[str, Any] = {}
        exec(program, names)
        loss = next(value for value in names.values() if isinstance(value, type) and value.__module__ == "builtins")()
        assert (PaddedLoss(loss) if hasattr(loss, "forward") else loss)(batch).loss.isfinite()
