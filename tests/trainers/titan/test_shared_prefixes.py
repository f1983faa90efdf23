"""Prefixes that sequences of a microbatch share are computed once, and every result is that of separate sequences."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_env.config.recipe import LoRASection, ModelSection, OptimizerSection, TinyModel
from forge_env.trajectory import Segment
from tests.trainers.titan.ranks import VOCABULARY, tree
from trainers.buffer.sequences import LEAST_SHARED, BatchSizes, in_order, shared_with_previous, targets
from trainers.losses.corrections import TIS
from trainers.losses.grpo import GRPOLoss, GSPOLoss
from trainers.losses.sft import SFTLoss
from trainers.losses.types import Loss
from trainers.model.tiny import hf_config
from trainers.titan.attention import _attend_in_grids
from trainers.titan.batch import collate
from trainers.titan.context import Context
from trainers.titan.device import use_device
from trainers.titan.engine import TitanEngine
from trainers.titan.layout import PackedLayout, Row, VarlenLayout
from trainers.titan.model import TitanModel
from trainers.titan.packing import Sizes, plan
from trainers.titan.parallel import Sharding

pytestmark = pytest.mark.stack
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def model_folder(path: Path, **changes: Any) -> Path:
    shape = TinyModel(layers=2, dim=64, heads=2, kv_heads=1, hidden_dim=96, vocab_size=VOCABULARY)
    (path / "config.json").write_text(json.dumps(hf_config(ModelSection(tiny=shape), VOCABULARY, 2) | changes))
    return path


def engine(
    folder: Path, *, share: bool = True, apart: bool = False, recompute: str = "none", lora: LoRASection | None = None
) -> TitanEngine:
    device, tokens = use_device(with_gpus=False), 1 if apart else 300
    sharding = Sharding(activation_checkpoint=recompute)
    model = TitanModel(folder, max_length=256, device=CPU, sharding=sharding, lora=lora)
    section = OptimizerSection(lr=1e-3, warmup_steps=0)
    return TitanEngine(model, section, device=device, steps=9, microbatch_tokens=tokens, share_prefixes=share)


def gradients(trained: TitanEngine, data: list[Segment], loss: Loss) -> dict[str, torch.Tensor]:
    trained.forward_backward(data, loss)
    named = {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad.clone()
        for name, parameter in trained.model.module.named_parameters()
        if parameter.requires_grad
    }
    trained.clear_gradients()
    return named


def check_gradients(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        # of gradients above 1, a float32 holds fewer digits after the point
        assert (gradient - other[name]).abs().max() < 1e-6 * max(1.0, gradient.abs().max())


def check_alike(separate: TitanEngine, shared: TitanEngine, data: list[Segment]) -> None:
    for one, other in zip(separate.logprobs(data), shared.logprobs(data), strict=True):
        assert one.tolist() == pytest.approx(other.tolist(), abs=2e-6)
    check_gradients(gradients(separate, data, GRPOLoss()), gradients(shared, data, GRPOLoss()))


@pytest.fixture(scope="module")
def engines(folder: Path) -> tuple[TitanEngine, TitanEngine]:
    """One that computes every sequence in a row of its own, and one that shares prefixes."""
    return engine(folder, apart=True), engine(folder)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 12))
def test_tree_equals_separate_rows(engines: tuple[TitanEngine, TitanEngine], seed: int, count: int) -> None:
    separate, shared = engines
    data = tree(count, seed)
    check_alike(separate, shared, data)


@pytest.mark.parametrize(
    ("recompute", "lora", "loss"),
    [("full", None, GRPOLoss()), ("selective", None, GSPOLoss()), ("none", LoRASection(rank=4), GRPOLoss())],
    ids=["full recomputation", "selective, whole sequences", "lora"],
)
def test_recomputation_adapters_and_losses_of_whole_sequences_see_no_difference(
    folder: Path, recompute: str, lora: LoRASection | None, loss: Loss
) -> None:
    data = tree(12, 7)
    separate, shared = (engine(folder, apart=apart, recompute=recompute, lora=lora) for apart in (True, False))
    check_gradients(gradients(separate, data, loss), gradients(shared, data, loss))
    for _ in range(2):
        metrics = [each.train(data, loss, minibatches=2) for each in (separate, shared)]
        for name in ("loss", "entropy", "grad_norm"):
            assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-4, abs=1e-6)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
PENALTIES = GRPOLoss(beta=0.1, entropy_coef=0.05, correction=TIS(level="sequence", name="tis"))


@pytest.mark.parametrize("loss", [SFTLoss(), PENALTIES, GSPOLoss(aggregation="fixed_horizon", horizon=50)])
def test_experts_and_terms_of_losses_see_no_difference(tmp_path: Path, loss: Loss) -> None:
    folder = model_folder(tmp_path, model_type="qwen3_moe", tie_word_embeddings=False, **EXPERTS)
    separate, shared, reference = engine(folder, apart=True), engine(folder), engine(folder)
    data = tree(12, 7)
    for segment, logprobs in zip(data, reference.logprobs(data), strict=True):
        segment.ref_logprobs = np.zeros(len(segment.token_ids), np.float32)
        segment.ref_logprobs[targets(segment)] = logprobs + np.float32(0.3)
    check_gradients(gradients(separate, data, loss), gradients(shared, data, loss))


def test_sliding_windows_see_no_difference(tmp_path: Path) -> None:
    windows = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    changes = {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24}
    folder = model_folder(tmp_path, **changes, **windows)
    separate, shared = engine(folder, apart=True), engine(folder)
    data = tree(12, 7)
    check_alike(separate, shared, data)


def test_sinks_see_no_difference(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
    changes = {"model_type": "gpt_oss", "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
    changes |= {"rope_scaling": yarn, "attention_bias": True}
    folder = model_folder(tmp_path, **changes, **EXPERTS, sliding_window=8)
    separate, shared = engine(folder, apart=True), engine(folder)
    check_alike(separate, shared, tree(12, 7))


BORROWED = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 2}
BESIDE = {"enable_moe_block": True, "top_k_experts": 2, **EXPERTS}


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("changes", [{"attention_k_eq_v": True}, BORROWED, BESIDE], ids=str)
def test_shared_prefixes_change_nothing_in_gemma_4(tmp_path: Path, changes: dict[str, Any], recompute: str) -> None:
    kinds = ["sliding_attention", "full_attention"]
    base = {"model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 5.0}
    base |= {"num_hidden_layers": 4, "layer_types": kinds * 2, "sliding_window": 8, "hidden_size_per_layer_input": 0}
    sizes = {"global_head_dim": 64, "num_global_key_value_heads": 1}
    folder = model_folder(tmp_path, **base | sizes | changes)
    separate, shared = engine(folder, apart=True), engine(folder, recompute=recompute)
    check_alike(separate, shared, tree(12, 7))


def test_states_of_gated_delta_layers_see_no_difference(tmp_path: Path) -> None:
    sizes = {"linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_value_head_dim": 16}
    layers = {"layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4}
    changes = {"model_type": "qwen3_5_text", "linear_num_value_heads": 4, **sizes, **layers}
    folder = model_folder(tmp_path, **changes)
    separate, shared = engine(folder, apart=True), engine(folder)
    data = tree(12, 7)
    check_alike(separate, shared, data)
    packed = engine(folder, share=False)
    check_gradients(gradients(separate, data, GRPOLoss()), gradients(packed, data, GRPOLoss()))


def group(prompt: int, replies: list[int], seed: int = 0) -> list[Segment]:
    rng = np.random.default_rng(seed)
    first = rng.integers(0, VOCABULARY, prompt)
    rows = [np.concatenate([first, rng.integers(0, VOCABULARY, reply)]) for reply in replies]
    advantages = [np.full(len(ids), number - 0.5, np.float32) for number, ids in enumerate(rows)]
    return [Segment(ids, np.arange(len(ids)) >= prompt, advantages=a) for ids, a in zip(rows, advantages, strict=True)]


def test_a_prompt_is_computed_once(folder: Path) -> None:
    data = group(60, [20] * 8)
    metrics = {share: engine(folder, share=share).train(data, GRPOLoss()) for share in (False, True)}
    assert metrics[False]["tokens"] == metrics[True]["tokens"] == 640
    assert (metrics[False]["tokens_shared"], metrics[True]["tokens_shared"]) == (0, 1 - 220 / 640)
    batch = collate(data, CPU, share_prefixes=True)
    assert batch.tokens.shape == (1, 220)
    assert (batch.predictors == 59).sum() == 8, "all first tokens of replies are predicted at the prompt's end"
    assert batch.padding == 0


def test_short_beginnings_are_not_shared() -> None:
    lengths = [
        collate(group(prompt, [5, 5]), CPU, share_prefixes=True).tokens.shape[1]
        for prompt in (LEAST_SHARED - 1, LEAST_SHARED)
    ]
    assert lengths == [2 * (LEAST_SHARED + 4), LEAST_SHARED + 10]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 20), ranks=st.integers(1, 4), threads=st.integers(1, 3))
def test_a_plan_knows_the_size_of_every_row(seed: int, count: int, ranks: int, threads: int) -> None:
    data = tree(count, seed)
    sizes = BatchSizes.of(data)
    ordered = sizes.pick(data)
    planning = Sizes(sizes.lengths.tolist(), sizes.shared.tolist())
    planned = plan(planning, 300, ranks=ranks, at_least=threads if ranks == 1 else 1)
    assert len({len(runs) for runs in planned}) == 1
    runs = [run for runs in planned for run in runs if run]
    assert sorted(number for run in runs for number in run) == list(range(count))
    tokens = 0
    for run in runs:
        batch = collate([ordered[number] for number in run], CPU, share_prefixes=True)
        assert planning.work([run])[0] == batch.tokens.numel()
        assert batch.tokens.numel() <= 300 or len(run) == 1
        tokens += batch.tokens.numel()
    assert planning.work(runs)[0] == tokens
    if ranks == 1 and len(runs) > 1:
        assert len(runs) % threads == 0 or len(runs) < -(-len(runs) // threads) * threads


def test_a_microbatch_has_few_copies_of_shared_keys() -> None:
    data = group(90, [2] * 40)
    sizes = BatchSizes.of(data)
    planned = plan(Sizes(sizes.lengths.tolist(), sizes.shared.tolist()), 200)[0]
    assert [len(run) for run in planned] == [17, 17, 6], "92 tokens each; 8 * 200 fit"


def test_what_part_of_a_batch_shares_is_known_from_the_whole() -> None:
    data = tree(14, 3)
    sizes = BatchSizes.of(data)
    ordered = sizes.pick(data)
    assert in_order(ordered) == list(range(len(ordered)))
    for seed in range(20):
        places = np.array(sorted(random.Random(seed).sample(range(14), seed % 14)), np.int64)
        expected = shared_with_previous([ordered[place] for place in places])
        assert sizes.shared_among(places).tolist() == expected.tolist()


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize(("layout", "window"), [(PackedLayout, 30), (PackedLayout, 3), (VarlenLayout, 30)])
def test_tokens_see_only_their_path(degree: int, layout: type[PackedLayout | VarlenLayout], window: int) -> None:
    row = Row.of([4, 3, 5, 2, 5, 1, 30], [0, 2, 2, 0, 1, 0, 0])
    row = Row.of([*row.lengths, -len(row) % (2 * degree)], [*row.shared, 0])
    sees = np.zeros((len(row), len(row)), np.bool_)
    for path in row.paths:
        for place, token in enumerate(path):
            sees[token, path[max(0, place + 1 - window) : place + 1]] = True
    context = Context(None, 0, degree)
    orders = [context.tokens(len(row), rank) for rank in range(degree)]
    order = torch.cat(orders)
    for rank, mine in enumerate(orders):
        part = row.part(context.pieces(len(row), rank), order.argsort().numpy())
        made = layout.of(part, CPU)
        assert (seen(made, window, len(mine), len(row))[:, order.argsort()] == sees[mine]).all()


def test_keys_of_a_part_are_never_taken_for_the_whole_row() -> None:
    row = Row.of([4, 4, 4, 4])
    context = Context(None, 0, 2)
    order = torch.cat([context.tokens(len(row), rank) for rank in range(2)])
    layout = VarlenLayout.of(row.part(context.pieces(len(row), 0), order.argsort().numpy()), CPU)
    assert layout.keys is not None, "kernels would get 16 keys, and bounds of 8"
    assert VarlenLayout.of(row, CPU).keys is None


@pytest.mark.parametrize("kind", [PackedLayout, VarlenLayout])
def test_a_part_has_the_same_kind_of_layout(kind: type[PackedLayout | VarlenLayout]) -> None:
    batch = collate([Segment(np.arange(4), np.ones(4, np.bool_))], CPU)
    part = Context(None, 0, 2).part(replace(batch, layout=kind.of(batch.row, CPU)))
    assert isinstance(part.layout.row, kind)


def seen(layout: PackedLayout | VarlenLayout, window: int, queries: int, keys: int) -> np.ndarray:
    """Keys that each query attends to, [queries, keys] bool."""
    values = torch.eye(keys)[:, None]
    if isinstance(layout, PackedLayout):
        zeros = torch.zeros(queries, 1, keys), torch.zeros(keys, 1, keys)
        out = _attend_in_grids(zeros[0], zeros[1], values, layout, window, {})
        return (out[:, 0] > 0).numpy()
    result = np.zeros((queries, keys), np.bool_)
    taken = np.arange(keys) if layout.keys is None else layout.keys.numpy()
    for number in range(len(layout.bounds) - 1):
        start, stop = layout.bounds[number : number + 2].tolist()
        first, last = layout.key_bounds[number : number + 2].tolist()
        for query in range(start, stop):
            result[query, taken[first : last - (stop - 1 - query)]] = True
    return result


def test_a_family_stays_on_one_rank() -> None:
    data = [segment for seed in range(8) for segment in group(40, [10] * 8, seed)]
    sizes = BatchSizes.of(data)
    planned = plan(Sizes(sizes.lengths.tolist(), sizes.shared.tolist()), 4096, ranks=2)
    assert [len(runs) for runs in planned] == [1, 1]
    assert [len({number // 8 for number in run}) for (run,) in planned] == [4, 4]
