"""Losses against those of verl and TRL: their own functions, cut from their packages, without the rest of these."""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_env.config.recipe import LossSection
from tests.trainers.losses import loss_formulas as formulas
from tests.trainers.losses.test_losses import batch_of, tensor
from trainers.losses.load import make_loss

torch = pytest.importorskip("torch")
CASES = 20


def cut(package: str, file: str, *names: str, **known: Any) -> SimpleNamespace:
    """Functions of a file of an installed package, or methods of its classes, which know `known` and each other."""
    spec = find_spec(package)
    assert spec.submodule_search_locations is not None
    path = Path(next(iter(spec.submodule_search_locations)), file)
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    kept = [node for node in found if node.name in names]
    assert sorted(node.name for node in kept) == sorted(names)
    for node in kept:
        node.decorator_list = []
    later = ast.parse("from __future__ import annotations")  # their types are not needed
    module = ast.Module([*later.body, *kept], type_ignores=[])
    namespace = {"torch": torch, **known}
    exec(compile(module, str(path), "exec"), namespace)
    return SimpleNamespace(**namespace)


class Padded:
    """A case as rows of one length, as both have it."""

    def __init__(self, case: formulas.Case) -> None:
        self.count = max(case.sequences) + 1
        rows = [[t for t, row in enumerate(case.sequences) if row == own] for own in range(self.count)]
        self.length = max(map(len, rows))
        self.places = torch.tensor([own * self.length + i for own, row in enumerate(rows) for i in range(len(row))])
        self.now = tensor(case.now).requires_grad_()
        self.sampled, self.advantages = self.rows(tensor(case.sampled)), self.rows(tensor(case.advantages))
        self.reference = self.rows(tensor(case.reference))
        self.mask = self.rows(torch.ones_like(self.now))

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """[sequences, tokens] of [all tokens]; 0 where a row has no token."""
        empty = torch.zeros(self.count * self.length, dtype=flat.dtype)
        return empty.index_put((self.places,), flat).reshape(self.count, self.length)


class Config(SimpleNamespace):
    """verl's, of which its losses ask attributes and `get`."""

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def verl(name: str, mode: str, padded: Padded, **options: Any) -> torch.Tensor:
    masked = cut("verl", "utils/torch_functional.py", "masked_sum", "masked_mean")
    known = {"verl_F": masked, "AlgoConfig": (), "ActorConfig": Config}
    loss = f"compute_policy_loss_{name}"
    cores = cut("verl", "trainer/ppo/core_algos.py", "agg_loss", loss, **known)
    config = Config(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, global_batch_info={})
    vars(config).update(options)
    arguments = (padded.sampled, padded.rows(padded.now), padded.advantages, padded.mask)
    value: torch.Tensor = getattr(cores, loss)(*arguments, loss_agg_mode=mode, config=config)[0]
    return value


def trl(name: str, padded: Padded, level: str = "token", low: float = 0.2, high: float = 0.2, **options: Any) -> Any:
    seen = torch.nanmean  # metrics, which are not compared
    loss = cut("trl", "trainer/grpo_trainer.py", "_compute_loss", nanmin=seen, nanmax=seen)._compute_loss
    own = (padded.rows(padded.now), torch.zeros_like(padded.mask), None)
    same = SimpleNamespace(reduce=lambda x, **_: x, gather=lambda x: x, num_processes=1)
    args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1, **options}
    self = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: own,
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=same,
        args=SimpleNamespace(**args),
        aux_loss_enabled=False,
        beta=options.get("beta", 0.0),
        current_gradient_accumulation_steps=1,
        epsilon_high=high,
        epsilon_low=low,
        importance_sampling_level=level,
        loss_type=name,
        max_completion_length=padded.length,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        _entropy_bonus_enabled=False,
    )
    ids = torch.zeros_like(padded.mask)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": padded.mask,
        "advantages": padded.advantages,
        "old_per_token_logps": padded.sampled,
        "ref_per_token_logps": padded.reference,
        "num_items_in_batch": padded.mask.sum(),
    }
    return loss(self, None, inputs)


BY_TOKEN, BY_SEQUENCE = "token-mean", "seq-mean-token-mean"
Peer = Callable[[Padded], torch.Tensor]
VERL: dict[str, tuple[str, dict[str, Any], Peer]] = {
    "DAPO": (
        "dapo",
        {},
        lambda p: verl("vanilla", BY_TOKEN, p, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0),
    ),
    "GRPO": (
        "grpo",
        {"aggregation": "sequence", "clip_high": 0.2, "dual_clip": 3.0},
        lambda p: verl("vanilla", BY_SEQUENCE, p),
    ),
    "Dr. GRPO": (
        "dr_grpo",
        {"horizon": 5.0, "dual_clip": 3.0},
        lambda p: verl("vanilla", "seq-mean-token-sum-norm", p),
    ),
    "GSPO": (
        "gspo",
        {},
        lambda p: verl("gspo", BY_SEQUENCE, p, clip_ratio_low=3e-4, clip_ratio_high=4e-4),
    ),
    "SAPO": ("sapo", {"aggregation": "sequence"}, lambda p: verl("sapo", BY_SEQUENCE, p, tau_pos=1.0, tau_neg=1.05)),
    "CISPO": (
        "cispo",
        {"clip_low": 0.3, "clip_high": 0.5},
        lambda p: verl("cispo", BY_TOKEN, p, clip_ratio_low=0.3, clip_ratio_high=0.5),
    ),
}
TRL: dict[str, tuple[str, dict[str, Any], Peer]] = {
    "DAPO": ("grpo", {}, lambda p: trl("dapo", p, high=0.28)),
    "GRPO": ("grpo", {"aggregation": "sequence", "clip_high": 0.2}, lambda p: trl("grpo", p)),
    "GRPO with KL": (
        "grpo",
        {"aggregation": "sequence", "clip_high": 0.2, "beta": 0.3},
        lambda p: trl("grpo", p, beta=0.3),
    ),
    "Dr. GRPO": ("dr_grpo", {"horizon": 5.0}, lambda p: trl("dr_grpo", p)),
    "GSPO": ("gspo", {}, lambda p: trl("grpo", p, level="sequence", low=3e-4, high=4e-4)),
    "SAPO": (
        "sapo",
        {"aggregation": "sequence"},
        lambda p: trl("sapo", p, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05),
    ),
    "CISPO": ("cispo", {"clip_high": 0.5}, lambda p: trl("cispo", p, high=1.5)),
}


def check(name: str, options: dict[str, Any], peer: Peer) -> None:
    """The peer's gradient, and its value, on random batches. verl adds 1e-8 to a sequence's length."""
    for seed in range(CASES):
        case = formulas.random_case(seed, spread=(0.05, 0.4, 1.5)[seed % 3], moved=False)
        batch, padded = batch_of(case), Padded(case)
        own = make_loss(LossSection(name=name, options=options))(batch).loss
        (slopes,) = torch.autograd.grad(own, batch.logprobs)
        theirs = peer(padded)
        (their_slopes,) = torch.autograd.grad(theirs, padded.now)
        assert math.isclose(own.item(), theirs.item(), rel_tol=1e-7, abs_tol=1e-7), seed
        assert (slopes - their_slopes).abs().max().item() < 1e-7, seed


@pytest.mark.parametrize("name", VERL)
def test_verls_losses_are_the_same(name: str) -> None:
    check(*VERL[name])


@pytest.mark.parametrize("name", TRL)
def test_trls_losses_are_the_same(name: str) -> None:
    check(*TRL[name])
