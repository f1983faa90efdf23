"""Two ranks (gloo, CPU) are one trainer: gradients, weights, metrics and checkpoints of one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from forge_env.config.recipe import LoRASection, ModelSection, TinyModel
from forge_env.errors import UsageError
from tests.trainers.titan.ranks import (
    VOCABULARY,
    check_weights,
    engine,
    forked,
    four,
    head_inputs,
    head_outputs,
    observe,
    run_ranks,
    sequences,
    tree,
    two,
    weights,
)
from trainers.losses.grpo import GRPOLoss, GSPOLoss
from trainers.losses.sft import SFTLoss
from trainers.model.export import read_weights
from trainers.model.tiny import hf_config

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]
GRADIENT_ERROR = 1e-6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shape = TinyModel(layers=2, dim=64, heads=2, kv_heads=2, hidden_dim=96, vocab_size=VOCABULARY)
    result = {}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    kinds: dict[str, dict[str, Any]] = {
        "tied": {},
        "llama": {"model_type": "llama", "tie_word_embeddings": False},
        "mixture": {"model_type": "qwen3_moe", "tie_word_embeddings": False, **experts},
        "fused": {
            "model_type": "phi3",
            "tie_word_embeddings": False,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 12, "long_factor": [2.0] * 12},
            "original_max_position_embeddings": 16,
        },
        "windowed": {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
        },
        "capped": {
            "model_type": "gemma4_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
            "rope_parameters": None,
        },
        "delta": {
            "model_type": "qwen3_5_text",
            "layer_types": ["linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 16,
        },
    }
    shared = {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 48}
    kinds["delta mixture"] = kinds["delta"] | shared | experts
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
    sinks = {"model_type": "gpt_oss", "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "sliding_window": 8}
    kinds["sink mixture"] = {**sinks, **experts, "rope_scaling": yarn, "attention_bias": True}
    kinds["shared keys"] = kinds["capped"] | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
    }
    kinds["capped mixture"] = kinds["capped"] | experts | {"enable_moe_block": True, "top_k_experts": 2}
    for name, changes in kinds.items():
        result[name] = tmp_path_factory.mktemp(name)
        config = hf_config(ModelSection(tiny=shape), VOCABULARY, 2) | changes
        (result[name] / "config.json").write_text(json.dumps(config))
    return result


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Path:
    """Where checkpoints lie: the one that a single rank writes after one step is there."""
    path = tmp_path_factory.mktemp("work")
    alone = engine(folders["tied"])
    alone.train(sequences(), SFTLoss(), minibatches=2)
    alone.save(path / "by-one")
    for kind in ("tied", "llama", "fused"):  # adapters need a base with weights
        engine(folders[kind]).model.save_hf(path / kind)
    return path


@pytest.fixture(scope="module")
def seen(folders: dict[str, Path], work: Path) -> dict[str, Any]:
    return run_ranks(2, folders, work, two)


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def check_alike(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert largest_difference(one["gradients"], two["gradients"]) < GRADIENT_ERROR
    check_weights(one["weights"], two["weights"])
    for first, second in zip(one["metrics"], two["metrics"], strict=True):
        for name in ("loss", "entropy", "grad_norm", "learning_rate"):
            assert second[name] == pytest.approx(first[name], rel=1e-4), name
    for first, second in zip(one["logprobs"], two["logprobs"], strict=True):
        assert second == pytest.approx(first, abs=1e-3)


@pytest.mark.parametrize(
    ("parallelism", "kind"),
    [
        *(
            (parallelism, kind)
            for parallelism in ("fsdp", "tensor", "context")
            for kind in ("tied", "llama", "fused", "windowed")
        ),
        ("fsdp", "mixture"),
        ("context", "mixture"),
        ("fsdp", "sink mixture"),
        ("context", "sink mixture"),
        ("fsdp", "capped"),
        ("context", "capped"),
        ("fsdp", "capped mixture"),
        ("context", "capped mixture"),
        ("fsdp", "shared keys"),
        ("context", "shared keys"),
        ("fsdp", "delta"),
        ("fsdp", "delta mixture"),
    ],
)
def test_two_ranks_equal_one(folders: dict[str, Path], seen: dict[str, Any], kind: str, parallelism: str) -> None:
    check_alike(observe(engine(folders[kind])), seen[f"{parallelism} {kind}"])


@pytest.mark.parametrize("parallelism", ["fsdp", "tensor", "context"])
def test_two_ranks_compute_a_tree(folders: dict[str, Path], seen: dict[str, Any], parallelism: str) -> None:
    separate = engine(folders["tied"])
    separate.share_prefixes = False
    check_alike(observe(separate, data=tree(), loss=GRPOLoss()), seen[f"tree {parallelism}"])


def test_a_vocabulary_in_unequal_parts_gives_what_it_gives_whole(seen: dict[str, Any]) -> None:
    expected = head_outputs(*head_inputs())
    for found in seen["vocabulary"]:
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("parallelism", ["fsdp", "tensor", "context"])
@pytest.mark.parametrize("kind", ["tied", "llama", "fused"])
def test_two_ranks_train_the_adapters_of_one(work: Path, seen: dict[str, Any], kind: str, parallelism: str) -> None:
    expected, observed = observe(engine(work / kind, lora=LoRASection())), seen[f"adapters {parallelism} {kind}"]
    assert any(".lora_b." in name for name in expected["gradients"])
    check_alike(expected, observed)


def test_ranks_save_adapters_and_compute_without_them(work: Path, seen: dict[str, Any]) -> None:
    without, base = seen["adapters saved"][:3], seen["adapters saved"][3:]
    for one, other in zip(without, base, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    alone = engine(work / "llama", lora=LoRASection())
    alone.load(work / "adapters-by-two")
    again = engine(work / "llama", lora=LoRASection())
    again.train(sequences(), SFTLoss(), minibatches=2)
    check_weights(weights(alone), weights(again))
    check_weights(weights(alone), read_weights(work / "merged-by-two"))


def test_loss_of_whole_sequences_over_split_ranks(folders: dict[str, Path], seen: dict[str, Any]) -> None:
    check_alike(observe(engine(folders["tied"]), loss=GSPOLoss()), seen["by sequence"])
    alone = observe(engine(folders["tied"]), data=forked(), loss=GSPOLoss())
    for parallelism in ("fsdp", "context"):
        check_alike(alone, seen[f"forked {parallelism}"])


def test_four_ranks_combine_parallelisms(folders: dict[str, Path], tmp_path: Path) -> None:
    expected = observe(engine(folders["tied"]))
    seen = run_ranks(4, folders, tmp_path, four)
    separate = engine(folders["tied"])
    separate.share_prefixes = False
    check_alike(observe(separate, data=tree(), loss=GRPOLoss()), seen.pop("tree"))
    for name, observed in seen.items():
        assert largest_difference(expected["gradients"], observed["gradients"]) < GRADIENT_ERROR, name
        check_alike(expected, observed)


def test_ranks_without_a_sequence_keep_up(folders: dict[str, Path], seen: dict[str, Any]) -> None:
    check_alike(observe(engine(folders["tied"]), data=sequences(1)), seen["fewer sequences than ranks"])


def test_all_ranks_skip_an_update_that_one_of_them_spoils(folders: dict[str, Path], seen: dict[str, Any]) -> None:
    assert seen["skipped"]["by rank"] == [(1, 0, 1), (1, 0, 1)]
    alone = engine(folders["tied"])
    alone.train([], SFTLoss())
    alone.train(sequences(), SFTLoss())
    check_weights(weights(alone), seen["skipped"]["weights"])


def test_recomputed_activations_give_the_same(folders: dict[str, Path], seen: dict[str, Any]) -> None:
    check_alike(observe(engine(folders["tied"])), seen["recomputed"])
    check_alike(observe(engine(folders["shared keys"])), seen["recomputed shared keys"])


@pytest.mark.usefixtures("seen")
def test_one_rank_goes_on_where_two_went_on_from_one(folders: dict[str, Path], work: Path) -> None:
    undisturbed, resumed = engine(folders["tied"]), engine(folders["tied"])
    resumed.load(work / "by-one-then-two")
    for trained, steps in ((undisturbed, 3), (resumed, 1)):
        for _ in range(steps):
            trained.train(sequences(), SFTLoss(), minibatches=2)
    assert resumed.updates == undisturbed.updates == 6
    check_weights(weights(resumed), weights(undisturbed))


def test_ranks_train_while_a_checkpoint_is_written(seen: dict[str, Any], work: Path, folders: dict[str, Path]) -> None:
    second, third, again, further = seen["saved beside training"]
    assert (again, further) == (second, third)
    alone = engine(folders["tied"])
    alone.load(work / "beside-1")
    assert alone.train(sequences(), SFTLoss(), minibatches=2)["loss"] == pytest.approx(second, rel=1e-5)


def test_a_full_disk_of_one_rank_fails_on_all_and_keeps_nobody_waiting(seen: dict[str, Any]) -> None:
    assert seen["disk full"] == [[True, True, True], [True, True, True]]


def test_a_folder_that_is_no_checkpoint_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="not a checkpoint"):
        engine(folders["tied"]).load(folders["tied"])
