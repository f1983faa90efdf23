"""Adapters: what is trained, saved, published and added to the base model's weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from forge_env.config.finding import checkpoint_folder
from forge_env.config.recipe import LoRASection, OptimizerSection
from forge_env.errors import UsageError
from forge_env.trajectory import Segment
from tests.trainers.model.checkpoints import CHECKPOINTS, VOCABULARY, their_logprobs, write_checkpoint
from trainers.losses.sft import SFTLoss
from trainers.model.adapter import CONFIG, FOLDER, PREFIX, WEIGHTS, block_shapes, check_base, targets
from trainers.model.folder import read_hf_config
from trainers.model.merging import whole_weights
from trainers.titan.device import use_device
from trainers.titan.engine import TitanEngine
from trainers.titan.flops import Throughput, Work
from trainers.titan.model import TitanModel

pytestmark = [pytest.mark.stack, pytest.mark.slow]
MISMATCH = 1e-5
TOKENS = torch.randint(0, VOCABULARY, (3, 120), generator=torch.Generator().manual_seed(0))
SEQUENCES = [Segment(row, np.arange(len(row)) > 0) for row in TOKENS.numpy()]
DEFAULT = LoRASection()
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def engine(folder: Path, lora: LoRASection | None = DEFAULT) -> TitanEngine:
    device = use_device(with_gpus=False)
    model = TitanModel(folder, max_length=128, device=device.torch, lora=lora)
    section = OptimizerSection(lr=1e-2, warmup_steps=0)
    return TitanEngine(model, section, device=device, steps=10, microbatch_tokens=256)


def scores(trained: TitanEngine) -> Any:
    return np.stack(trained.logprobs(SEQUENCES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("Llama 3.2", tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_family_learns_by_adapters_and_is_merged_and_published_as_it_computes(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path / "base", shards=True)
    trained = engine(folder)
    before = {key: value.clone() for key, value in trained.model.module.state_dict().items()}
    first = scores(trained)
    assert np.array_equal(first, scores(engine(folder, None)))  # B is zero
    for _ in range(3):
        trained.train(SEQUENCES, SFTLoss())
    after = scores(trained)
    assert abs(after - first).max() > 0.1
    changed = {key for key, value in trained.model.module.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {key for key in before if ".lora_" in key}
    with trained.model.base():
        assert np.array_equal(scores(trained), first)
    assert np.array_equal(scores(trained), after)

    trained.model.save_hf(tmp_path / "merged")
    assert abs(their_logprobs(tmp_path / "merged", TOKENS).numpy() - after).max() <= MISMATCH
    assert abs(scores(engine(tmp_path / "merged", None)) - after).max() <= MISMATCH
    whole = trained.model.state_dict_hf()
    sent = dict(whole_weights(sent_by(trained.model).items(), folder, everything=True))
    assert {key for key in sent if key != "lm_head.weight"} == {key for key in whole if key != "lm_head.weight"}
    assert max(float((sent[key] - whole[key]).abs().max()) for key in whole) <= 1e-6


def sent_by(model: TitanModel) -> dict[str, torch.Tensor]:
    """What a trainer of one rank publishes."""
    return {part.name: part.values for part in model.published()}


def by_hand(model: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Weights as PEFT's documentation says: W + alpha / r B A for every layer in the file."""
    config = json.loads((adapter / CONFIG).read_text())
    factors = load_file(adapter / WEIGHTS)
    weights = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name in [name for name in factors if ".lora_A." in name]:
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert any(layer == target or layer.endswith(f".{target}") for target in config["target_modules"])
        up = factors[name.replace("lora_A", "lora_B")]
        weights[f"{layer}.weight"] += config["lora_alpha"] / config["r"] * up @ factors[name]
    return weights


@pytest.mark.parametrize("name", ["Llama 3.2", "Qwen 3", "Qwen 3 MoE"])
def test_a_checkpoint_has_adapters_as_peft_reads_them_and_no_weights(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path / "base")
    trained = engine(folder, LoRASection(rank=4, alpha=2.0))
    trained.train(SEQUENCES, SFTLoss())
    trained.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "model").exists()
    saved = tmp_path / "saved" / FOLDER
    assert {path.name for path in saved.iterdir()} == {CONFIG, WEIGHTS}
    weights, merged = by_hand(folder, saved), trained.model.state_dict_hf()
    assert all(torch.allclose(weights[key], merged[key], atol=1e-6) for key in merged)

    resumed = engine(folder, LoRASection(rank=4, alpha=2.0))
    resumed.load(tmp_path / "saved")
    for each in (trained, resumed):
        each.train(SEQUENCES, SFTLoss())
    assert np.array_equal(scores(trained), scores(resumed))


def test_adapters_of_another_model_or_recipe_are_refused(folder: Path, tmp_path: Path) -> None:
    trained = engine(folder)
    trained.train(SEQUENCES, SFTLoss())
    trained.save(tmp_path / "saved")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    check_base(tmp_path / "saved" / FOLDER, other)  # the same weights at another place
    engine(other, None).model.save_hf(other)
    changed = engine(folder, None)
    changed.train(SEQUENCES, SFTLoss())
    changed.model.save_hf(tmp_path / "changed")
    with pytest.raises(UsageError, match=f"another base model than {tmp_path / 'changed'}.*trained on {folder}"):
        engine(tmp_path / "changed").load(tmp_path / "saved")
    with pytest.raises(UsageError, match="has the shape"):
        engine(folder, LoRASection(rank=2)).load(tmp_path / "saved")
    with pytest.raises(UsageError, match="targets has no such layer"):
        engine(folder, LoRASection(targets=["q_proj"])).load(tmp_path / "saved")
    with pytest.raises(UsageError, match="contains no LoRA adapters"):
        engine(folder).load(_without(tmp_path / "saved", CONFIG))


def _without(folder: Path, name: str) -> Path:
    (folder / FOLDER / name).unlink()
    return folder


def test_a_version_of_the_shipped_model_is_ten_times_smaller() -> None:
    folder = checkpoint_folder("coding_rlvr_base")
    assert folder is not None

    def size(weights: Mapping[str, torch.Tensor]) -> int:
        return sum(tensor.nbytes for tensor in weights.values())

    adapted, whole = engine(folder).model, engine(folder, None).model
    assert size(sent_by(whole)) >= 10 * size(sent_by(adapted))
    assert adapted.adapter_parameters * 4 == size(sent_by(adapted))
    assert whole.layer_parameters == adapted.layer_parameters


def test_frozen_weights_cost_two_thirds_of_trained_ones(folder: Path) -> None:
    work = Work(tokens=90, targets=60, computed=90, attended=1000)
    device = use_device(with_gpus=False)
    adapted, whole = (Throughput(engine(folder, lora).model, device) for lora in (DEFAULT, None))
    assert 2 / 3 < adapted.flops(work) / whole.flops(work) < 1


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_layers_are_those_of_the_model_that_is_built(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path)
    hf, adapters = read_hf_config(folder), engine(folder).model.adapters
    built: list[dict[str, tuple[int, int]]] = [{} for _ in range(hf["num_hidden_layers"])]
    for layer in adapters.layers:
        _, block, *_, name = layer.peft.removeprefix(PREFIX + "model.").split(".")
        built[int(block)][name] = layer.out, layer.into
    assert built == [block_shapes(hf, block) for block in range(len(built))]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from(LAYERS), min_size=1),
    st.integers(1, 64),
)
def test_only_what_is_named_gets_an_adapter(folder: Path, names: list[str], rank: int) -> None:
    section = LoRASection(rank=rank, targets=names)
    model = TitanModel(folder, max_length=128, device=torch.device("cpu"), lora=section)
    assert {layer.peft.rpartition(".")[2] for layer in model.adapters.layers} == set(names)
    trained = [name for name, parameter in model.module.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * len(set(names))
    state = model.trained_state()
    back = model.adapters.to_peft(model.adapters.from_peft(state))
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_wrong_layers_and_ranks_are_refused_by_name(folder: Path) -> None:
    hf = read_hf_config(folder)
    with pytest.raises(UsageError, match="no layer 'wq' that can have an adapter") as refused:
        targets(LoRASection(targets=["q_proj", "wq"]), hf)
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in str(refused.value.fix)
    with pytest.raises(UsageError, match=r"lora.rank=65 is more than q_proj has \(128 x 64\)"):
        targets(LoRASection(rank=65), hf)
    assert targets(LoRASection(rank=96, targets=["q_proj"]), hf | {"hidden_size": 128}) == ["q_proj"]
