"""TorchTitan's model and our engine around it: gradients, schedules, checkpoints."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from forge_env.config.models import ModelSection, OptimizerSection, TinyModel  # noqa: E402
from trainers.losses.sft import SFTLoss  # noqa: E402
from trainers.model.tiny import hf_config  # noqa: E402
from trainers.titan.batch import TokenSequence  # noqa: E402
from trainers.titan.device import use_device  # noqa: E402
from trainers.titan.engine import TitanEngine  # noqa: E402
from trainers.titan.model import TitanModel  # noqa: E402

pytestmark = pytest.mark.stack
VOCABULARY = 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import json

    path = tmp_path_factory.mktemp("model")
    shape = TinyModel(layers=2, dim=64, heads=2, kv_heads=1, hidden_dim=96, vocab_size=VOCABULARY)
    (path / "config.json").write_text(json.dumps(hf_config(ModelSection(tiny=shape), VOCABULARY, 2)))
    return path


def engine(folder: Path, *, threads: int = 1, seed: int = 0, dtype: str = "float32", **optimizer: float) -> TitanEngine:
    device = use_device(with_gpus=False)
    model = TitanModel(folder, max_length=128, device=device.torch, seed=seed, dtype=dtype)
    section = OptimizerSection(lr=1e-2, warmup_steps=0, decay_start=1.0).model_copy(update=optimizer)
    return TitanEngine(model, section, device=device, steps=20, microbatch_tokens=256, threads=threads, seed=seed)


def sequences(count: int, seed: int = 0) -> list[TokenSequence]:
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        length = rng.randrange(8, 60)
        result.append(
            TokenSequence([rng.randrange(VOCABULARY) for _ in range(length)], [False] * 4 + [True] * (length - 4))
        )
    return result


def weights(trained: TitanEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trained.model.state_dict_hf().items()}


def test_training_lowers_the_loss_of_what_it_sees(folder: Path) -> None:
    trained, data = engine(folder, muon_lr=1e-2), sequences(6)
    losses = [trained.train(data, SFTLoss())["loss"] for _ in range(15)]
    assert losses[-1] < losses[0] - 1


def test_microbatches_side_by_side_give_the_gradients_of_one_after_another(folder: Path) -> None:
    alone, together, data = engine(folder), engine(folder, threads=3), sequences(12)
    for _ in range(3):
        one, many = alone.train(data, SFTLoss()), together.train(data, SFTLoss())
        assert many["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_the_gradient_norm_is_clipped(folder: Path) -> None:
    free, clipped, data = engine(folder, max_norm=1e9), engine(folder, max_norm=1e-6), sequences(4)
    assert free.train(data, SFTLoss())["grad_norm"] == pytest.approx(clipped.train(data, SFTLoss())["grad_norm"])
    # AdamW normalises, so what tells is the first moment.
    moments = [next(iter(e.optimizer.optimizers[0].state.values()))["exp_avg"].norm() for e in (free, clipped)]
    assert moments[1] < 1e-3 * moments[0]


def test_metrics_are_means_however_many_minibatches(folder: Path) -> None:
    data = sequences(8)
    metrics = engine(folder, lr=1e-9).train(data, SFTLoss(), minibatches=4)
    whole = engine(folder, lr=1e-9).train(data, SFTLoss())
    assert metrics["entropy"] == pytest.approx(whole["entropy"], rel=0.02)
    assert 0 <= metrics["padding"] < 1


def test_a_checkpoint_continues_as_if_nothing_had_happened(folder: Path, tmp_path: Path) -> None:
    data = sequences(8)
    whole = engine(folder)
    for _ in range(2):
        whole.train(data, SFTLoss(), minibatches=2)
    whole.save(tmp_path)
    resumed = engine(folder, seed=99)
    resumed.load(tmp_path)
    for _ in range(2):
        assert (
            resumed.train(data, SFTLoss(), minibatches=2)["loss"] == whole.train(data, SFTLoss(), minibatches=2)["loss"]
        )
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name])


def test_a_saved_folder_is_a_hugging_face_checkpoint(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trained, data = engine(folder, seed=3), sequences(3)
    trained.model.save_hf(tmp_path / "saved")
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for item, ours in zip(data, trained.logprobs(data), strict=True):
        ids = torch.tensor([item.token_ids])
        with torch.no_grad():
            table = torch.log_softmax(theirs(ids).logits[0, 3:-1], -1)
        expected = table.gather(-1, ids[0, 4:, None])[:, 0].tolist()
        assert ours == pytest.approx(expected, abs=1e-4)


def test_the_seed_decides_the_weights(folder: Path) -> None:
    first, same, other = (weights(engine(folder, seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_bfloat16_computes_less_exactly_and_keeps_float32_weights(folder: Path) -> None:
    data = sequences(3)
    exact, rough = engine(folder).logprobs(data), engine(folder, dtype="bfloat16").logprobs(data)
    differences = [abs(a - b) for x, y in zip(exact, rough, strict=True) for a, b in zip(x, y, strict=True)]
    assert 1e-6 < max(differences) < 0.2
    assert all(tensor.dtype == torch.float32 for tensor in weights(engine(folder, dtype="bfloat16")).values())


def test_the_learning_rate_warms_up_and_decays(folder: Path) -> None:
    trained = engine(folder, warmup_steps=4, decay_start=0.5, min_lr_ratio=0.1)
    rates = [trained.learning_rate()["learning_rate"]]
    for _ in range(19):
        trained.train(sequences(1), SFTLoss())
        rates.append(trained.learning_rate()["learning_rate"])
    assert rates[0] < rates[3] == max(rates)
    assert rates[-1] < 0.3 * max(rates)
