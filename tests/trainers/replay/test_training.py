"""Steps of a recorded run, trained again: equal to the bit, and the first difference is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from forge_env.cli.main import main
from forge_env.config import RunConfig
from forge_env.config.reader import render
from forge_env.config.recipe import ModelSection, TinyModel
from forge_env.policy import Reply
from forge_env.run import Run, RunFolder
from forge_env.run.recording import settings
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message
from trainers.buffer.packed import pack
from trainers.buffer.sequences import BatchSizes, in_batch
from trainers.buffer.types import Held, Reservation
from trainers.loop.record import trained_row
from trainers.losses.grpo import GRPOLoss
from trainers.losses.load import make_loss
from trainers.losses.types import LossOutput, TokenBatch, needs
from trainers.model.tiny import hf_config
from trainers.titan.device import use_device
from trainers.titan.engine import TitanEngine
from trainers.titan.model import TitanModel

pytestmark = [pytest.mark.stack, pytest.mark.slow]
STEPS, SAVED, VOCABULARY = 4, 2, 320


class Loss(GRPOLoss):
    """GRPO's loss with a line that a test changes: it matters only if an advantage is above 0.5, as in step 3."""

    change: Callable[[LossOutput, TokenBatch], LossOutput] = staticmethod(lambda output, batch: output)

    def __call__(self, batch: TokenBatch) -> LossOutput:
        output = super().__call__(batch)
        return type(self).change(output, batch) if bool((batch.advantages > 0.5).any()) else output


def episode(rng: np.random.Generator, group: int, member: int, version: int) -> Trajectory:
    turns, before = [], 0
    for _ in range(2):
        prompt, ids = rng.integers(0, VOCABULARY, 6), rng.integers(0, VOCABULARY, 5)
        values = -rng.random(5).astype(np.float32) * 6
        reply = Reply(Message(role="assistant"), prompt, ids, values, [version] * 5, continues=before)
        before += 11
        turns.append(Turn([Message(role="user", content="?")], reply))
    return Trajectory(
        f"train-{group}-{member}", "env", "task", turns=turns, reward=member / 3, group=group, member=member
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run as the loop records it, trained by the engine in this process."""
    root = tmp_path_factory.mktemp("runs")
    shape = TinyModel(layers=2, dim=64, heads=2, kv_heads=1, hidden_dim=96, vocab_size=VOCABULARY)
    config = RunConfig.model_validate(
        {
            "environment": {"name": "coding_rlvr"},
            "model": {"max_length": 64},
            "trainer": {"threads": 2, "minibatches": 2, "optimizer": {"lr": 1e-2, "warmup_steps": 0}},
            "grpo": {"steps": STEPS, "groups_per_step": 2, "group_size": 2, "loss": {"name": f"{__name__}:Loss"}},
        }
    )
    folder = RunFolder(root / "run")
    folder.create()
    folder.config.write_text(render(config))
    model = folder.root / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(hf_config(ModelSection(tiny=shape), VOCABULARY, 2)))
    run, rng = Run(config, folder), np.random.default_rng(0)
    device, section, loss = use_device(with_gpus=False), config.trainer, make_loss(config.grpo.loss)
    titan = TitanModel(model, max_length=64, device=device.torch)
    titan.save_hf(model / "saved")
    engine = TitanEngine(
        titan, section.optimizer, device=device, steps=STEPS, microbatch_tokens=section.microbatch_tokens, threads=2
    )
    run.began(0, engine.fingerprint(), model="model/saved", recipe=settings(config))
    for step in range(1, STEPS + 1):
        held = []
        for group in (2 * step, 2 * step + 1):
            played = [episode(rng, group, member, step - 1) for member in range(2)]
            for each in played:
                run.trajectory(each, "train")
            size = 0.75 if step == 3 else 0.25
            packed = pack(played, [np.full(10, sign * size, np.float32) for sign in (1, -1)])
            held.append(Held(group, step - 1, 20, 0.5, packed, uses=1))
        segments = in_batch(each.group.segments() for each in held)
        sizes = BatchSizes.of(segments, needs(loss).computed)
        engine.train_share(engine.share(sizes, 2), sizes.pick(segments), loss)
        run.trained(step, trained_row(Reservation.of(step - 1, held)), engine.fingerprint())
        if step == SAVED:
            saved = folder.checkpoints / f"step-{step:06d}"
            engine.save(saved)
            (saved / "checkpoint.json").write_text("{}")
    run.close()
    folder.release()
    return folder.root


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(recorded, tmp_path / "run")


def replay(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    code = main(["replay", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.core
def test_every_step_is_equal_to_the_bit(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = replay(capsys, recorded)
    assert code == 0, text
    assert f"{STEPS} of {STEPS} steps are equal to the bit" in text
    code, text = replay(capsys, recorded, "--from", 3, "--json")
    assert code == 0, text
    assert [json.loads(line)["step"] for line in text.splitlines()[:2]] == [3, 4], "from the checkpoint of step 2"


@pytest.mark.core
def test_a_changed_line_of_the_loss_is_named_at_its_first_step(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubled(output: LossOutput, batch: TokenBatch) -> LossOutput:
        return LossOutput(output.loss * 2, output.metrics)

    def pulled(output: LossOutput, batch: TokenBatch) -> LossOutput:
        pull = (batch.logprobs - batch.logprobs.detach()).sum()
        return LossOutput(output.loss + pull, output.metrics)

    for change, what in ((doubled, "loss ("), (pulled, "gradients of ")):
        monkeypatch.setattr(Loss, "change", staticmethod(change))
        code, text = replay(capsys, recorded, "--until-different")
        assert code == 1
        assert f"The first step that differs is 3: {what}" in text
        assert "step    2  equal" in text
        assert "step    4" not in text
    code, text = replay(capsys, recorded, "--tolerance", "1e-6")
    assert code == 1
    assert "distance" in text


def test_a_counterfactual_changes_steps_after_a_point(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def after_2(change: str) -> list[dict[str, Any]]:
        code, text = replay(capsys, recorded, "--from", 2, "--with", change, "--json")
        assert code == 0, text
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        assert [row["step"] for row in rows] == [3, 4]
        return rows

    clipped = after_2("loss.clip_low=0.0")
    assert clipped[0]["differences"][0].startswith("loss (")
    slow = after_2("trainer.optimizer.lr=1e-3")
    assert slow[0]["differences"][0].startswith("weights of "), "the first update's gradient is the recorded one"
    assert slow[1]["differences"][0] == "log-probs"
    code, text = replay(capsys, recorded, "--with", "seed=1")
    assert (code, "would change more than training" in text) == (2, True)


def test_changed_tokens_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (run / "trained.jsonl").read_text().splitlines()]
    rows[2]["groups"][0]["credit"] = rows[1]["groups"][0]["credit"]
    rows[2]["groups"][1]["credit"] = rows[3]["groups"][1]["credit"]  # step 3's, with larger advantages
    (run / "trained.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, text = replay(capsys, run)
    assert code == 1
    assert "The first step that differs is 2: tokens of group 5" in text


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: (run / "trained.jsonl").unlink(), "has no trained step"),
        (lambda run: (run / "config.yaml").unlink(), "is not the folder of a run"),
        (lambda run: shutil.rmtree(run / "model"), "the model that the run started from is not in"),
        (lambda run: (run / "trajectories/train.jsonl").unlink(), "logging.trajectories=all"),
    ],
)
def test_what_is_missing_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], object], message: str
) -> None:
    spoil(run)
    code, text = replay(capsys, run)
    assert (code, message in text) == (2, True), text


def test_a_run_of_an_older_version_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (run / "trained.jsonl").read_text().splitlines()]
    old = [{name: value for name, value in row.items() if name != "fingerprint"} for row in rows if "step" in row]
    (run / "trained.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in old))
    code, text = replay(capsys, run)
    assert (code, "an older version recorded the run" in text) == (2, True), text


def test_another_model_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = run / "checkpoints" / f"step-{SAVED:06d}" / "model"
    code, text = replay(capsys, run, "--model", trained)
    assert (code, "are not those that the run had after step 0" in text) == (2, True), text
