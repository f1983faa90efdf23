"""TorchTitan's model and our engine around it: gradients, schedules, checkpoints."""

from __future__ import annotations

import io
import math
import pickle
import random
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.utils.flop_counter import FlopCounterMode

from forge_env.config.recipe import ModelSection, OptimizerSection, TinyModel
from forge_env.errors import ForgeError, UsageError
from forge_env.trajectory import Segment
from trainers.buffer.sequences import BatchSizes
from trainers.losses.grpo import GRPOLoss
from trainers.losses.sft import SFTLoss
from trainers.losses.types import LossOutput, TokenBatch
from trainers.model.tiny import hf_config
from trainers.model.writer import read_companions, write_model
from trainers.titan import checkpoint
from trainers.titan.attention import PackedAttention
from trainers.titan.batch import Microbatch
from trainers.titan.checkpoint import write
from trainers.titan.device import use_device
from trainers.titan.engine import MAX_SKIPPED_UPDATES, TitanEngine
from trainers.titan.flops import Work
from trainers.titan.layout import PackedLayout, Row, VarlenLayout
from trainers.titan.model import TitanModel
from trainers.titan.optimizer import Float32Muon, orthogonalize
from trainers.titan.parallel import Sharding

pytestmark = pytest.mark.stack
VOCABULARY = 320
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import json

    path = tmp_path_factory.mktemp("model")
    shape = TinyModel(layers=2, dim=64, heads=2, kv_heads=1, hidden_dim=96, vocab_size=VOCABULARY)
    (path / "config.json").write_text(json.dumps(hf_config(ModelSection(tiny=shape), VOCABULARY, 2)))
    return path


def engine(
    folder: Path,
    *,
    threads: int = 1,
    seed: int = 0,
    dtype: str = "float32",
    recompute: str = "none",
    microbatch_tokens: int = 256,
    **optimizer: float | str,
) -> TitanEngine:
    device, sharding = use_device(with_gpus=False), Sharding(activation_checkpoint=recompute)
    model = TitanModel(folder, max_length=128, device=device.torch, seed=seed, dtype=dtype, sharding=sharding)
    section = OptimizerSection(lr=1e-2, warmup_steps=0, decay_start=1.0).model_copy(update=optimizer)
    options: dict[str, Any] = {"microbatch_tokens": microbatch_tokens, "threads": threads, "seed": seed}
    return TitanEngine(model, section, device=device, steps=20, **options)


def sequences(count: int, seed: int = 0) -> list[Segment]:
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        length = rng.randrange(8, 60)
        ids = np.array([rng.randrange(VOCABULARY) for _ in range(length)])
        result.append(Segment(ids, np.arange(length) >= 4))
    return result


def microbatches(trained: TitanEngine, data: list[Segment]) -> list[Microbatch]:
    lengths = np.array([len(item.token_ids) for item in data])
    return [trained.collate(run, data) for run in trained.microbatches(lengths, np.zeros_like(lengths))]


def weights(trained: TitanEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trained.model.state_dict_hf().items()}


def test_training_lowers_the_loss_of_what_it_sees(folder: Path) -> None:
    trained, data = engine(folder, muon_lr=1e-2), sequences(6)
    losses = [trained.train(data, SFTLoss())["loss"] for _ in range(15)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_muon_on_a_cpu_is_torchs_in_float32(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    ours, theirs = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.clone())
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.05, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = Float32Muon([ours], **options), torch.optim.Muon([theirs], **options)
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert (ours - theirs).norm() < 0.03 * (theirs - weight).norm()
    assert torch.equal(optimizers[0].state[ours]["momentum_buffer"], optimizers[1].state[theirs]["momentum_buffer"])
    values = torch.linalg.svdvals(orthogonalize(theirs.grad))
    assert 0.6 < values.median() < values.max() < 1.3


def test_no_microbatch_waits_for_the_values_of_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = engine(folder)
    reads: list[str] = []

    def counted(name: str, read: Callable[[torch.Tensor], Any]) -> None:
        def method(tensor: torch.Tensor) -> Any:
            reads.append(name)
            return read(tensor)

        monkeypatch.setattr(torch.Tensor, name, method)

    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        counted(name, getattr(torch.Tensor, name))
    counts = []
    for count in (2, 40):
        data = sequences(count)
        passes = len(microbatches(trained, data))
        reads.clear()
        trained.forward_backward(data, SFTLoss())
        counts.append((passes > 3, len(reads)))
    (few, once), (many, still) = counts
    assert (few, many) == (False, True)
    assert once == still


def test_microbatches_side_by_side_give_the_gradients_of_one_after_another(folder: Path) -> None:
    alone, together, data = engine(folder), engine(folder, threads=3), sequences(12)
    for _ in range(3):
        one, many = alone.train(data, SFTLoss()), together.train(data, SFTLoss())
        assert many["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_a_checkpoint_goes_on_with_another_number_of_threads(folder: Path, tmp_path: Path) -> None:
    """Muon's matrices are shared out to two optimizers where there are threads for both."""
    data, after = sequences(12), []
    for saving, loading in ((1, 2), (2, 1)):
        saved, alone = engine(folder, threads=saving, muon_lr=1e-2), engine(folder, threads=saving, muon_lr=1e-2)
        for trained in (saved, alone):
            trained.train(data, SFTLoss())
        saved.save(tmp_path / f"{saving}")
        other = engine(folder, threads=loading, muon_lr=1e-2, seed=1)
        other.load(tmp_path / f"{saving}")
        for trained in (other, alone):
            trained.train(data, SFTLoss())
        after.append(largest_difference(weights(other), weights(alone)))
    assert max(after) < 1e-4


def gradients(trained: TitanEngine, data: list[Segment]) -> dict[str, torch.Tensor]:
    trained.forward_backward(data, SFTLoss())
    named = trained.model.module.named_parameters()
    return {name.replace("_checkpoint_wrapped_module.", ""): parameter.grad for name, parameter in named}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("count", [1, 2, 11])
def test_packed_rows_give_the_logprobs_and_gradients_of_single_ones(folder: Path, count: int) -> None:
    apart, packed, data = engine(folder, microbatch_tokens=1), engine(folder), sequences(count, seed=5)
    together = microbatches(packed, data)
    assert count == 1 or any(
        isinstance(batch.layout, PackedLayout) and sum(grid.rows for grid in batch.layout.grids) > 1
        for batch in together
    )
    with torch.no_grad():
        logprobs = torch.cat([packed.forward(batch)[0] for batch in together])
    alone = [value for item in data for value in apart.logprobs([item])[0]]
    assert logprobs.tolist() == pytest.approx(alone, abs=2e-6)
    assert largest_difference(gradients(apart, data), gradients(packed, data)) < 1e-6


def saved_bytes(trained: TitanEngine, data: list[Segment]) -> int:
    """Memory of what the forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = microbatches(trained, data)[0]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = trained.forward(batch)
    assert logprobs.requires_grad
    return sum(kept.values())


def operations(trained: TitanEngine, data: list[Segment]) -> int:
    """Floating-point operations of a forward and backward pass, recomputation included."""
    with FlopCounterMode(display=False) as counter:
        trained.forward_backward(data, SFTLoss())
    return int(counter.get_total_flops())


def test_recomputed_activations_take_less_memory_and_give_the_same_gradients(folder: Path) -> None:
    data = sequences(12)
    assert saved_bytes(engine(folder, recompute="full"), data) < saved_bytes(engine(folder), data) / 2
    work = {name: operations(engine(folder, recompute=name), data) for name in ("none", "selective", "full")}
    assert work["none"] < work["selective"] < work["full"] <= work["none"] * 4 / 3
    expected = gradients(engine(folder), data)
    for name in ("selective", "full"):
        assert largest_difference(expected, gradients(engine(folder, recompute=name), data)) < 1e-6
    side_by_side = gradients(engine(folder, recompute="full", threads=2), data)
    assert largest_difference(expected, side_by_side) < 1e-6


def test_compile_compiles_every_block(folder: Path) -> None:
    sharding = Sharding(compile=True)
    compiled = TitanModel(folder, max_length=128, device=CPU, sharding=sharding)
    plain = TitanModel(folder, max_length=128, device=CPU)
    for model, expected in ((compiled, True), (plain, False)):
        assert {layer._compiled_call_impl is not None for layer in model.module.layers.values()} == {expected}


def test_rows_of_other_lengths_do_not_compile_attention_again() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._subclasses.fake_tensor import FakeTensorMode

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(PackedAttention(PackedAttention.Config()), backend=counter, fullgraph=True)
    for lengths in ([5, 9, 7], [6, 10, 8, 2], [11, 4], [3, 3, 3, 12]):
        row = Row.of(lengths)
        with FakeTensorMode(allow_non_fake_inputs=True):  # the kernel is on GPUs only
            sizes = ((1, len(row), heads, 16) for heads in (4, 2, 2))
            q, k, v = (torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes)
            out = compiled(q, k, v, attention_masks=VarlenLayout.of(row, CPU), enable_gqa=True)
            torch.autograd.grad(out.float().sum(), (q, k, v))
    assert counter.frame_count <= 2, "once with fixed and once with variable lengths"


def test_a_trainer_starts_without_the_compiler_and_can_still_compile() -> None:
    code = (
        "import sys, torch\n"
        "from trainers.titan.device import use_device\n"
        "use_device(False)\n"
        "import trainers.titan.engine\n"
        "print('torch._inductor.compile_fx' in sys.modules)\n"
        "compiled = []\n"
        "backend = lambda graph, inputs: compiled.append(graph) or graph.forward\n"
        "torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))\n"
        "print(len(compiled))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "1"]


def test_minibatches_add_up_until_the_optimizer_steps(folder: Path) -> None:
    data = sequences(8)
    once, twice = engine(folder), engine(folder)
    single = gradients(once, data)
    single = {name: gradient.clone() for name, gradient in single.items()}
    twice.forward_backward(data, SFTLoss())
    double = gradients(twice, data)
    assert largest_difference(double, {name: 2 * gradient for name, gradient in single.items()}) < 1e-6
    assert twice.accumulated == 2 * once.accumulated > 0
    twice.clear_gradients()
    assert twice.accumulated == 0
    assert largest_difference(gradients(twice, data), single) == 0


def test_the_gradient_norm_is_clipped(folder: Path) -> None:
    free, clipped, data = engine(folder, max_norm=1e9), engine(folder, max_norm=1e-6), sequences(4)
    assert free.train(data, SFTLoss())["grad_norm"] == pytest.approx(clipped.train(data, SFTLoss())["grad_norm"])
    # AdamW normalises, so what tells is the first moment.
    moments = [next(iter(e.optimizer.optimizers[0].state.values()))["exp_avg"].norm() for e in (free, clipped)]
    assert moments[1] < 1e-3 * moments[0]


class Spoiled(SFTLoss):
    """A loss that is not finite, or whose gradient isn't, in some of its calls."""

    def __init__(self, factor: float, calls: Sequence[int] | None = None) -> None:
        self.factor, self.calls, self.called = factor, calls, 0

    def __call__(self, batch: TokenBatch) -> LossOutput:
        output = super().__call__(batch)
        if self.calls is None or self.called in self.calls:
            spoiled = (self.factor * output.loss.exp().clamp(max=1e30)) ** 2
            output.loss = spoiled if self.factor > 1 else output.loss * self.factor
        self.called += 1
        return output


def state(trained: TitanEngine) -> dict[str, torch.Tensor]:
    moments = trained.optimizer.state_dict()
    kept = {name: value.clone() for name, value in moments.items() if isinstance(value, torch.Tensor)}
    assert kept
    return {**weights(trained), **kept}


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_update_that_is_not_finite_changes_nothing_and_is_counted(folder: Path, factor: float, threads: int) -> None:
    trained, data = engine(folder, threads=threads), sequences(6)
    trained.train(data, SFTLoss())
    before = state(trained)
    metrics = trained.train(data, Spoiled(factor))
    assert metrics["skipped_updates"] == 1
    assert "loss" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert trained.updates == 1
    assert trained.accumulated == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(trained).items())
    assert trained.train(data, SFTLoss())["skipped_updates"] == 0
    assert trained.updates == 2


def test_a_spoiled_minibatch_costs_its_own_update_only(folder: Path) -> None:
    trained = engine(folder, microbatch_tokens=10_000)  # a microbatch each
    metrics = trained.train(sequences(8), Spoiled(float("nan"), calls=[1]), minibatches=4)
    assert metrics["skipped_updates"] == 1
    assert trained.updates == 3
    assert metrics["loss"] == pytest.approx(5.8, abs=0.5), "a mean over the three others"


def test_many_updates_that_are_not_finite_end_the_run_with_the_cause(folder: Path) -> None:
    trained, data = engine(folder), sequences(2)
    for _ in range(MAX_SKIPPED_UPDATES - 1):
        trained.train(data, Spoiled(float("nan")))
    trained.train(data, SFTLoss())
    for _ in range(MAX_SKIPPED_UPDATES - 1):
        trained.train(data, Spoiled(float("nan")))
    with pytest.raises(ForgeError, match=f"{MAX_SKIPPED_UPDATES} updates in a row.*loss nan"):
        trained.train(data, Spoiled(float("nan")))


def test_metrics_are_means_however_many_minibatches(folder: Path) -> None:
    data = sequences(8)
    metrics = engine(folder, lr=1e-9).train(data, SFTLoss(), minibatches=4)
    whole = engine(folder, lr=1e-9).train(data, SFTLoss())
    assert metrics["entropy"] == pytest.approx(whole["entropy"], rel=0.02)
    assert 0 <= metrics["padding"] < 1


def test_training_goes_on_while_a_checkpoint_is_written(folder: Path, tmp_path: Path) -> None:
    data, trained = sequences(8), engine(folder)
    trained.train(data, SFTLoss(), minibatches=2)
    for round in range(2):  # the second copy goes where the first one lay
        trained.save(tmp_path / f"at-once-{round}")
        taken = trained.snapshot()
        trained.train(data, SFTLoss(), minibatches=2)
        write(taken, trained.model, tmp_path / f"later-{round}")
        states = []
        for name in ("at-once", "later"):
            resumed = engine(folder, seed=99)
            resumed.load(tmp_path / f"{name}-{round}")
            resumed.train(data, SFTLoss(), minibatches=2)  # weights, moments, schedule, minibatches: all of it
            states.append(weights(resumed))
        for name, tensor in weights(trained).items():
            assert torch.equal(states[0][name], tensor)
            assert torch.equal(states[1][name], tensor)


def test_what_cannot_be_written_is_an_error_like_any_other(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "optimizer" / "__0_0.distcp").mkdir(parents=True)
    with pytest.raises(RuntimeError, match="rank 0 could not write its shards: IsADirectoryError"):
        engine(folder).save(tmp_path)


def test_a_folder_that_lacks_a_tensor_is_refused(folder: Path, tmp_path: Path) -> None:
    trained = engine(folder)
    parts = [part for part in trained.model.published() if part.name != "model.layers.1.mlp.up_proj.weight"]
    write_model(parts, read_companions(folder), tmp_path / "part", dtype=torch.float32)
    before = weights(trained)
    with pytest.raises(UsageError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        trained.model.load_folder(tmp_path / "part")
    assert largest_difference(weights(trained), before) == 0


class Hostile:
    """Pickled, it writes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("place", ["state.pt", "optimizer/.metadata"])
def test_a_checkpoint_that_somebody_else_wrote_runs_no_code(folder: Path, tmp_path: Path, place: str) -> None:
    engine(folder).save(tmp_path)
    if place == "state.pt":
        torch.save({"schedule": Hostile(tmp_path / "run")}, tmp_path / place)
    else:
        (tmp_path / place).write_bytes(pickle.dumps(Hostile(tmp_path / "run")))
    with pytest.raises((ForgeError, pickle.UnpicklingError)):
        engine(folder).load(tmp_path)
    assert not (tmp_path / "run").exists()


class Attribute:
    """Pickles as an attribute of something, as Python 3.11.0 to 3.11.3 pickles members of enumerations."""

    def __init__(self, of: object, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self.of, self.name)


def test_an_index_reads_members_of_torch_s_enumeration_and_no_other_attributes() -> None:
    def read(name: str, of: object) -> object:
        return checkpoint._Unpickler(io.BytesIO(pickle.dumps(Attribute(of, name)))).load()

    contiguous = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert read(contiguous.name, _MEM_FORMAT_ENCODING) is contiguous
    with pytest.raises(UsageError, match="reads an attribute"):
        read("fromkeys", OrderedDict)


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
    found = rates(engine(folder, warmup_steps=4, decay_start=0.5, min_lr_ratio=0.1))
    assert found[0] < found[3] == max(found)
    assert found[-1] < 0.3 * max(found)


def rates(trained: TitanEngine) -> list[float]:
    found = []
    for _ in range(20):
        found.append(trained.learning_rate()["learning_rate"])
        trained.train(sequences(1), SFTLoss())
    return found


@pytest.mark.parametrize("loss", [SFTLoss(), GRPOLoss(correction="tis")])
def test_a_step_without_anything_to_learn_is_a_step_of_the_schedule(folder: Path, loss: Any) -> None:
    trained, idle, fresh = (engine(folder, warmup_steps=4) for _ in range(3))
    trained.train(sequences(4), SFTLoss())
    before = weights(idle)
    metrics = idle.train([], loss, minibatches=2)
    assert metrics["tokens"] == 0
    assert idle.learning_rate() == trained.learning_rate() != fresh.learning_rate()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(idle).items())


def test_schedules_decay_in_their_shapes(folder: Path) -> None:
    shapes = {
        name: rates(engine(folder, warmup_steps=0, decay_start=0.0, min_lr_ratio=0.0, schedule=name))
        for name in ("linear", "cosine", "constant")
    }
    assert len(set(shapes["constant"])) == 1
    half, quarter = len(shapes["linear"]) // 2, len(shapes["linear"]) // 4
    assert shapes["cosine"][quarter] > shapes["linear"][quarter] > shapes["cosine"][-quarter]
    assert shapes["cosine"][half] == pytest.approx(shapes["linear"][half], rel=0.1)


def test_throughput_counts_the_work_of_parameters_and_attention(folder: Path) -> None:
    trained = engine(folder)
    everything = sum(parameter.numel() for parameter in trained.model.module.parameters())
    head = trained.model.module.lm_head.weight.numel()  # tied: the embedding is the same, and looking up is no work
    attention = 2 * 2 * 32  # layers * heads * head size
    sequence = Segment(np.arange(10), np.arange(10) >= 6)
    work = 6 * ((everything - head) * 10 + head * 4 + attention * 100)
    assert trained.throughput.flops(Work(10, 4, 10, 100)) == pytest.approx(work)
    assert trained.share(BatchSizes.of([sequence])).work == Work(10, 4, 10, 100)
    metrics = trained.train(sequences(4), SFTLoss())
    assert metrics["tokens"] == sum(len(item.token_ids) for item in sequences(4))
    assert metrics["tokens_per_s"] == pytest.approx(metrics["tokens"] / metrics["train_s"])
    assert "mfu" not in metrics, "a CPU has no peak to compare with"
