"""What a run makes sure of at its start: each clause holds where all is well, and is seen where it is broken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from forge_env.config import RunConfig, load_config
from forge_env.errors import ContractError, GeneratorError
from forge_env.policy import Reply
from forge_env.run import Run, RunFolder
from forge_env.run.contract import CLAUSES, Clause, in_a_sentence, read_contract
from forge_env.trajectory import Segment, Trajectory, Turn
from forge_env.types import Message
from tests.trainers.loop.dry_run import dry_run
from tests.trainers.loop.stand_ins import STAND_INS, Events, Generator, TitanTrainer
from trainers.buffer.packed import FIXED, GroupRecord, PackedGroup, load_buffer, pack, save_buffer
from trainers.buffer.sequences import BatchSizes, Computed, targets
from trainers.buffer.types import Reservation
from trainers.generator.receipt import Audit, audit, receipt
from trainers.generator.types import Completion, SamplingOptions
from trainers.loop.contract import STEPS, TASKS, TOLERANCE, Contract, Difference
from trainers.rollout.opening import Opening, lacking, opening
from trainers.weights.checksum import Served, checksum, checksums, held_by, together, total

pytestmark = pytest.mark.stack
IN_FLOAT32 = [clause for clause in CLAUSES if clause != "rounding"]
GOOD = {"sequences": 2.0, "tokens": 6.0, "altered": 0.0, "unsigned": 0.0}


@pytest.fixture
def config() -> RunConfig:
    return load_config("coding_rlvr", ["grpo.steps=4"])


@pytest.fixture
def run(config: RunConfig, tmp_path: Path) -> Run:
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    return Run(config, folder)


def segment(version: int = 0, logprob: float = -1.0) -> Segment:
    ids, logprobs = [5, 6, 7, 8, 9], [0.0, 0.0, logprob, logprob, logprob]
    return Segment(ids, [False, False, True, True, True], logprobs, [-1, -1, *[version] * 3], [0, 0, 1, 1, 1])


class Buffer:
    """Holds two sequences for every step."""

    def __init__(self, version: int = 0) -> None:
        self.segments = [segment(version), segment(version)]

    async def batch_sizes(self, step: int, computed: Computed = "all") -> BatchSizes:
        return BatchSizes.of(self.segments)

    async def sequences(self, step: int, numbers: list[int]) -> list[Segment]:
        return [self.segments[number] for number in numbers]


class Trainer:
    """Finds every token as likely as `logprob` says; its weights are one number."""

    def __init__(self, logprob: float = -1.0) -> None:
        self.logprob, self.weights = logprob, 1

    async def logprobs(self, sequences: list[Segment]) -> list[Any]:
        return [np.full(len(targets(own)), self.logprob, np.float32) for own in sequences]

    async def checksums(self) -> dict[str, int]:
        return {"a": self.weights, "b": 7}


class Serving:
    """A generator that holds what it was sent, unless `held` says otherwise."""

    def __init__(self) -> None:
        self.version, self.sent, self.whole = 0, {"a": 1, "b": 7}, True
        self.held: int | None = None
        self.asked = 0

    def send(self, version: int, weights: int) -> None:
        self.version, self.sent = version, {"a": weights, "b": 7}

    async def checksums(self, published: Any = None) -> dict[int, Served]:
        held = total(self.sent) if self.held is None else self.held
        return {0: Served(self.version, self.sent if published else None, held, self.whole)}

    async def generate(self, prompt_ids: Any, options: SamplingOptions, session: object = None) -> Completion:
        self.asked += 1
        return Completion(prompt_ids, [7, 8], [-1.0, -1.0], [self.version] * 2, "stop", self.version)


def made(run: Run, trainer: Any = None, serving: Any = None, buffer: Any = None) -> Contract:
    return Contract(run, trainer or Trainer(), serving or Serving(), buffer or Buffer())


def said(run: Run) -> dict[str, Clause]:
    return {own.clause: own for own in read_contract(run.folder.contract)}


def group(rewards: list[float], *, signal: bool = True) -> GroupRecord:
    table = np.array([[reward, 0.0, 1, 3, 0, 0] for reward in rewards])
    return GroupRecord("task", FIXED, table, signal)


def begins(task: str, prompt: str = "", answers: tuple[str, ...] = ("x", "y"), missing: int = 0) -> Opening:
    return Opening(task, prompt or task, 10, tuple(f"word{number}" for number in range(missing)), answers)


async def all_is_well(contract: Contract, trainer: Trainer, serving: Serving) -> None:
    """A first step, as `System` has it."""
    await contract.before_weights()
    for number in range(TASKS):
        contract.opened(begins(f"task-{number}", answers=(f"{number}",)))
    await contract.before_training(Reservation(0, [0], [0], [1], 6))
    contract.trained([group([0.0, 1.0])], GOOD)
    trainer.weights = 2
    sums = await contract.weights_sent()
    serving.send(1, 2)
    await contract.weights_arrived(1, "somewhere", sums)
    contract.close()


async def test_a_healthy_run_keeps_it_and_says_so(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    trainer, serving = Trainer(), Serving()
    contract = made(run, trainer, serving)
    with caplog.at_level("INFO"):
        await all_is_well(contract, trainer, serving)
    assert [own.clause for own in read_contract(run.folder.contract)] == IN_FLOAT32
    assert {own.verdict for own in said(run).values()} == {"holds"}
    assert run.summary["contract"] == dict.fromkeys(run.summary["contract"], "holds")
    assert not run.state.warnings
    for clause in IN_FLOAT32:
        assert f"contract: {clause}: holds: " in caplog.text
    assert serving.asked == 0
    assert await contract.weights_sent() is None, "it costs nothing any more"
    assert in_a_sentence(read_contract(run.folder.contract)) == "Self-checks: 7/7 passed."
    contract.begin_again()  # the run was set back: weights, tokens and rewards are looked at again
    assert await contract.weights_sent() is not None
    contract.close()
    assert {clause for clause, own in said(run).items() if own.verdict == "holds"} == {"prompt", "answers"}


async def test_a_trainer_with_another_model_than_the_generators(run: Run) -> None:
    contract = made(run, Trainer(-1.1))
    with pytest.raises(ContractError, match=r"agree on log-probabilities.*differ by 1\.0e-01 nats") as caught:
        await contract.before_training(Reservation(0, [0], [0], [1], 6))
    assert caught.value.fix is not None
    assert "docs/trust.md" in caught.value.fix
    assert said(run)["log-probs"].verdict == "broken"


async def test_what_is_allowed_depends_on_the_precision(config: RunConfig, tmp_path: Path) -> None:
    half = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    (tmp_path / "half").mkdir()
    run = Run(half, RunFolder(tmp_path / "half"))
    await made(run, Trainer(-1.004)).before_training(Reservation(0, [0], [0], [1], 6))
    assert said(run)["log-probs"].verdict == "holds"
    with pytest.raises(ContractError, match=r"and the generator finds them likelier by 2\.0e-02"):
        await made(run, Trainer(-1.02)).before_training(Reservation(0, [0], [0], [1], 6))
    with pytest.raises(ContractError, match=r"differ by 5\.0e-02 nats on average.*at most 0\.03"):
        await made(run, Trainer(-1.05)).before_training(Reservation(0, [0], [0], [1], 6))


def differences(change: str, value: float, sharpness: float) -> list[Difference]:
    """Of ten batches of 400 tokens that a generator samples in another way than the trainer computes."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4000, 500, generator=generator) * sharpness
    trainer = torch.log_softmax(scores, -1)
    if change == "noise":
        sampled = torch.log_softmax(scores + value * torch.randn(scores.shape, generator=generator), -1)
    elif change == "temperature":
        sampled = torch.log_softmax(scores / value, -1)
    else:
        ranked, order = trainer.exp().sort(-1, descending=True)
        inside = torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, order, ranked.cumsum(-1) - ranked < value)
        sampled = torch.log_softmax(trainer.masked_fill(~inside, -1e9), -1)
    ids = torch.multinomial(sampled.exp(), 1, generator=generator)
    theirs, ours = (values.gather(-1, ids)[:, 0].numpy().reshape(10, -1) for values in (sampled, trainer))
    return [Difference.between([one], [other]) for one, other in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("sharpness", [3.5, 6.0])
@pytest.mark.parametrize(
    ("change", "value", "broken"),
    [
        ("noise", 0.01, False),
        ("noise", 0.03, False),
        ("temperature", 0.95, True),
        ("temperature", 1.05, True),
        ("temperature", 0.8, True),
        ("top_p", 0.98, True),
        ("top_p", 0.9, True),
    ],
)
def test_rounding_passes_another_distribution_not(change: str, value: float, broken: bool, sharpness: float) -> None:
    found = [own.mean > TOLERANCE["bfloat16"] or own.one_sided for own in differences(change, value, sharpness)]
    assert found == [broken] * 10


async def test_after_a_resume_the_generators_are_asked_where_the_batch_is_older(run: Run) -> None:
    serving = Serving()
    serving.version = 8
    await made(run, Trainer(), serving, Buffer(version=7)).before_training(Reservation(8, [0], [7], [1], 6))
    assert serving.asked == 2
    assert "answers to prompts" in said(run)["log-probs"].text
    with pytest.raises(ContractError):
        await made(run, Trainer(-3.0), serving, Buffer(version=7)).before_training(Reservation(8, [0], [7], [1], 6))


async def test_a_generator_that_dies_while_it_is_asked_ends_no_run(run: Run) -> None:
    serving = Serving()
    serving.version = 8

    async def dies(*_: object) -> Completion:
        raise GeneratorError("replica 0 died")

    answers, serving.generate = serving.generate, dies
    contract = made(run, Trainer(), serving, Buffer(version=7))
    await contract.before_training(Reservation(8, [0], [7], [1], 6))
    assert "log-probs" not in said(run)
    serving.generate = answers
    await contract.before_training(Reservation(8, [0], [7], [1], 6))
    assert said(run)["log-probs"].verdict == "holds"


@pytest.mark.parametrize(
    ("sent", "held", "whole", "fault"),
    [
        (1, None, True, "received other weights than the trainer's: 1 tensors differ, a among them"),
        (3, None, True, "received other weights than the trainer's: 1 tensors differ, a among them"),
        (2, 99, True, "serves other weights than it received"),
        (1, None, False, "received other weights than the trainer's: 1 tensors differ, a among them"),
    ],
)
async def test_missing_or_wrong_weights(run: Run, sent: int, held: int | None, whole: bool, fault: str) -> None:
    trainer, serving = Trainer(), Serving()
    serving.whole = whole
    contract = made(run, trainer, serving)
    await contract.before_weights()
    trainer.weights = 2
    sums = await contract.weights_sent()
    serving.send(1, sent)
    serving.held = held
    with pytest.raises(ContractError, match=fault):
        await contract.weights_arrived(1, "somewhere", sums)
    assert said(run)["weights"].verdict == "broken"


async def test_weights_that_never_change_are_a_warning(run: Run) -> None:
    trainer, serving = Trainer(), Serving()
    contract = made(run, trainer, serving)
    await contract.before_weights()
    for version in range(1, STEPS + 1):
        assert "weights" not in said(run)
        serving.send(version, 1)
        await contract.weights_arrived(version, "somewhere", await contract.weights_sent())
    assert said(run)["weights"].verdict == "doubtful"
    assert any("training has no effect" in text for text in run.state.warnings)


@pytest.mark.parametrize("whole", [True, False])
async def test_changes_that_no_sum_shows_end_no_run(run: Run, whole: bool) -> None:
    """Sums of bits may cancel out, and a small adapter may be lost in the rounding of what it is merged with."""
    trainer, serving = Trainer(), Serving()
    serving.whole = whole
    contract = made(run, trainer, serving)
    await contract.before_weights()
    for version in range(1, STEPS + 1):
        sent = {"a": 1 + version, "b": 7 - version}
        serving.version, serving.sent = version, sent
        await contract.weights_arrived(version, "somewhere", sent)
    assert said(run)["weights"].verdict == "doubtful"
    assert "the generators' weights are the same" in said(run)["weights"].text


async def test_a_replica_that_is_held_is_looked_at_later(run: Run) -> None:
    trainer, serving = Trainer(), Serving()
    contract = made(run, trainer, serving)
    await contract.before_weights()
    trainer.weights = 2
    await contract.weights_arrived(1, "somewhere", await contract.weights_sent())
    assert "weights" not in said(run)
    contract.close()
    assert said(run)["weights"].verdict == "open"


def test_constant_rewards_are_a_warning_and_others_are_not(run: Run) -> None:
    contract = made(run)
    for _ in range(STEPS):
        assert "rewards" not in said(run)
        contract.trained([group([0.5, 0.5], signal=False)], GOOD)
    assert said(run)["rewards"].verdict == "doubtful"
    assert "all 6 episodes of 3 steps earned 0.5: there is nothing to learn" in said(run)["rewards"].text
    assert len(run.state.warnings) == 1
    again = made(run)
    for _ in range(STEPS):
        again.trained([group([0.5, 0.5])], GOOD)  # a teacher's signal
    assert said(run)["rewards"].verdict == "holds"


@pytest.mark.parametrize(("last", "verdict"), [(0.6, "holds"), (0.02, "doubtful")])
def test_rounding_is_judged_after_the_warm_up(config: RunConfig, tmp_path: Path, last: float, verdict: str) -> None:
    optimizer = config.trainer.optimizer.model_copy(update={"lr": 1e-6, "warmup_steps": 2})
    config.trainer.optimizer, config.model.dtype = optimizer, "bfloat16"
    (folder := RunFolder(tmp_path / "half")).root.mkdir()
    contract = made(run := Run(config, folder))
    for kept in (*np.linspace(0.001, 0.02, 11), last):
        assert "rounding" not in said(run)
        contract.trained([group([0.0, 1.0])], {**GOOD, "trainer/change_kept": kept})
    clause = said(run)["rounding"]
    assert (clause.verdict, clause.step) == (verdict, 12)
    assert clause.text.startswith(f"{last:.1%} of what 12 steps changed")
    assert ("model.dtype=float32" in clause.text) == (verdict == "doubtful") == bool(run.state.warnings)


def test_scores_that_a_cheat_could_have_earned_are_a_warning(run: Run) -> None:
    contract = made(run)
    contract.trained([group([0.0, 1.0])], GOOD)
    assert said(run)["scores"].verdict == "holds"
    columns = (*FIXED, "not_cheat_proof")
    table = np.array([[1.0, 0.0, 1, 3, 0, 0, 1.0], [0.0, 0.0, 1, 3, 0, 0, 0.0]])
    for _ in range(2):
        contract.trained([GroupRecord("task", columns, table, True)], GOOD)
    assert said(run)["scores"].verdict == "doubtful"
    assert "1 of 2 episodes" in said(run)["scores"].text
    assert len(run.state.warnings) == 1


def test_a_model_that_answers_the_same_to_everything(run: Run) -> None:
    contract = made(run)
    for number in range(TASKS):
        contract.opened(begins(f"task-{number}", answers=("same", "same")))
    assert said(run)["answers"].verdict == "doubtful"
    assert said(run)["prompt"].verdict == "holds"


def test_a_prompt_without_its_task(run: Run) -> None:
    contract = made(run)
    for number in range(TASKS - 1):
        contract.opened(begins(f"task-{number}", missing=6))
    with pytest.raises(ContractError, match=r"the prompt contains the task.*lacks 6 of the 10 words.*for 4 tasks"):
        contract.opened(begins("another", missing=6))
    assert said(run)["prompt"].verdict == "broken"
    contract = made(run)
    for number in range(TASKS):
        contract.opened(begins(f"task-{number}", missing=6 if number else 0))
    assert said(run)["prompt"].verdict == "doubtful", "it is with one of the tasks"
    contract = made(run)
    for number in range(TASKS):
        contract.opened(begins(f"task-{number}", missing=1))
    assert said(run)["prompt"].verdict == "doubtful"
    contract = made(run)
    for number in range(TASKS):
        contract.opened(begins(f"task-{number}", prompt="the same"))
    assert "can't distinguish them" in said(run)["prompt"].text


def test_how_a_group_begins() -> None:
    messages = [Message(role="system", content="Be brief."), Message(role="user", content="What is\n2 + 2?")]
    replies = [Reply(Message(role="assistant"), [1, 2], [3 + own], [-1.0], [0]) for own in (0, 1)]
    episodes = [Trajectory(str(own), "env", "task", turns=[Turn(messages, reply)]) for own, reply in enumerate(replies)]
    seen = opening(episodes, lambda ids: f"<system>Be brief.<user>What is {ids}")
    assert (seen.task, seen.words, len(set(seen.answers))) == ("task", 7, 2)
    assert seen.missing == ("+", "2?")
    assert opening([], lambda ids: "") is None
    decomposed = "Tie\u0302\u0301ng Vie\u0323\u0302t"  # a tokenizer may compose accents, or lower letters
    assert lacking(decomposed.split(), "ti\u1ebfng vi\u1ec7t") == ()


# ---
# Tokens: what generators sign for


def sampled() -> Trajectory:
    """Two turns, the second of which continues the first."""
    turns = []
    for continues, prompt, ids in ((0, [5, 6, 7], [8, 9]), (5, [10, 11], [12, 13, 14])):
        logprobs = np.array([-0.25 * token for token in ids], np.float32)
        signed = receipt(np.array(prompt), np.array(ids), logprobs)
        reply = Reply(Message(role="assistant"), prompt, ids, logprobs, [3] * len(ids), continues=continues)
        reply.receipt = signed
        turns.append(Turn([], reply))
    return Trajectory("train-0-0", "env", "task", turns=turns, reward=1.0, group=0, member=0)


def packed(episode: Trajectory) -> PackedGroup:
    return pack([episode], [np.full(5, 0.5, np.float32)])


def test_tokens_keep_their_receipt_through_episode_buffer_and_checkpoint(tmp_path: Path) -> None:
    save_buffer({"groups": [packed(sampled())]}, tmp_path / "buffer.safetensors")
    [group] = load_buffer(tmp_path / "buffer.safetensors")["groups"]
    [own] = group.segments()
    assert own.token_ids.tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert audit([own, *packed(sampled()).segments()]) == Audit(2, 10, 0, 0)


@pytest.mark.parametrize("what", ["token", "order", "logprob", "shifted", "cut", "not sampled"])
def test_other_tokens_than_the_sampled_ones(what: str) -> None:
    [own] = packed(sampled()).segments()
    own.token_ids = own.token_ids.copy()
    if what == "token":
        own.token_ids[8] += 1
    elif what == "order":
        own.token_ids[[7, 8]] = own.token_ids[[8, 7]]
    elif what == "logprob":
        own.logprobs[8] += 1e-3
    elif what == "shifted":
        own.mask, own.versions = np.roll(own.mask, 1), np.roll(own.versions, 1)
    elif what == "cut":
        own.mask[-1], own.versions[-1] = False, -1
    else:
        own.mask[0] = True
    assert audit([own]).altered == 1


def test_tokens_that_nobody_signed_for(run: Run) -> None:
    episode = sampled()
    episode.turns[0].reply.receipt = None
    figures = audit(packed(episode).segments())
    assert (figures.altered, figures.unsigned) == (0, 1)
    made(run).trained([group([0.0, 1.0])], {"sequences": 1.0, "tokens": 5.0, "unsigned": 1.0})
    assert said(run)["tokens"].verdict == "doubtful"


def test_the_trainer_refuses_tokens_that_were_swapped() -> None:
    from trainers.titan.trainer import TitanTrainer as Real

    trainer: Any = SimpleNamespace(_model=SimpleNamespace(ranks=SimpleNamespace(together=dict)))
    [own] = packed(sampled()).segments()
    assert Real._check_tokens(trainer, [own])["contract/tokens"] == 5
    own.token_ids = own.token_ids.copy()
    own.token_ids[8] += 1
    with pytest.raises(ContractError, match="1 of 1 token sequences of this step are not what the generators sampled"):
        Real._check_tokens(trainer, [own])


# ---
# Checksums of weights


def test_checksums_are_the_same_however_weights_are_cut_joined_or_padded() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(8, 4), torch.randn(2, 4)
    whole = checksums([("q", q), ("k", k)])
    assert together([checksums([("q", q[:3])]), checksums([("q", q[3:]), ("k", k)])]) == whole
    module = torch.nn.Linear(4, 12, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.cat([q, k, torch.zeros(2, 4)]))
    assert held_by(module) == total(whole)
    assert checksum(q, torch.bfloat16) == checksum(q.to(torch.bfloat16)) != checksum(q)
    q[0, 0] += 1e-6
    assert checksums([("q", q), ("k", k)]) != whole


# ---
# A whole run, of which only the processes are stand-ins


class Deaf(Generator):
    """New weights never reach it."""

    async def do_checksums(self, *published: Any) -> Any:
        return Served(self.version_had, {"w": self.version_had} if published[0] else None, 0, whole=True)


class Other(TitanTrainer):
    async def do_logprobs(self, sequences: Any) -> list[Any]:
        return [values - 0.5 for values in await super().do_logprobs(sequences)]


def failed(events: Events) -> str:
    return "".join(details for _, what, details in events if what == "failed")


def test_a_run_keeps_its_contract(tmp_path: Path) -> None:
    events = dry_run({"grpo.groups_per_step": 4}, tmp_path)
    assert not failed(events)
    found = read_contract(RunFolder(tmp_path / "runs" / "run").contract)
    assert {own.clause: own.verdict for own in found} == dict.fromkeys(IN_FLOAT32, "holds"), found
    assert sum("contract" in details for _, what, details in events if what == "metrics") == 0


@pytest.mark.parametrize(("actor", "clause"), [(Deaf, "weights"), (Other, "log-probs")])
def test_a_run_that_would_train_something_else_ends(tmp_path: Path, actor: Any, clause: str) -> None:
    role = "Generator" if actor is Deaf else "TitanTrainer"
    events = dry_run({"grpo.groups_per_step": 4}, tmp_path, {**STAND_INS, role: actor})
    assert CLAUSES[clause] in failed(events)
    found = {own.clause: own.verdict for own in read_contract(RunFolder(tmp_path / "runs" / "run").contract)}
    assert found[clause] == "broken"


def test_a_clause_is_one_line_of_a_file_that_a_full_disk_may_cut(tmp_path: Path) -> None:
    assert read_contract(tmp_path / "contract.jsonl") == []
    (tmp_path / "contract.jsonl").write_text(
        '{"schema": 1, "clause": "tokens", "verdict": "open", "text": "a", "step": 0}\n'
        '{"schema": 1, "clause": "tokens", "verdict": "holds", "text": "b", "step": 1}\n{"schema": 1, "cla'
    )
    assert read_contract(tmp_path / "contract.jsonl") == [Clause("tokens", "holds", "b", 1)]
    assert in_a_sentence([]) == ""
