"""Self-checks of a training run at its start and after a resume, so that broken training does not go unnoticed.

    clause      checks that                                                              if broken
    prompt      the model's first prompts contain the words of their tasks               the run stops
    log-probs   trainer and generator agree on log-probabilities of sampled tokens       the run stops
    weights     generators serve the trainer's weights, which change with training       the run stops
    rounding    rounding to bfloat16 leaves most of what training changes                a warning
    tokens      batch tokens equal sampled tokens, by count and hash, at every step      the run stops
    rewards     rewards differ                                                           a warning
    answers     the model answers different tasks differently                            a warning
    scores      no score relies on tests that the judged code could have changed         a warning

If continuing would train something other than the recipe describes, the run stops with advice where to look; a result
that may be due to the task itself is a warning. The checks have no settings. Each is decided once per session and costs
nothing afterwards, except for the hash of the tokens, which is compared at every step. docs/trust.md explains the
tolerances.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_env.errors import ContractError, InfrastructureError
from forge_env.run import Run
from forge_env.run.contract import CLAUSES, Clause, Verdict
from forge_env.trajectory import NOT_CHEAT_PROOF, Segment
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.packed import GroupRecord
from trainers.buffer.sequences import targets
from trainers.buffer.types import Reservation
from trainers.generator.pool import GeneratorPool
from trainers.generator.types import SamplingOptions
from trainers.loop.trainer import TrainerHandle
from trainers.rollout.opening import Opening

if TYPE_CHECKING:
    from trainers.weights.checksum import Served, Sums
    from trainers.weights.transport import Published

TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}
"""Maximum mean absolute difference of log-probabilities, in nats, by `model.dtype`."""
ONE_SIDED = 5e-3
"""Maximum absolute value of the mean signed difference, in nats: rounding errors go in both directions."""
STANDARD_ERRORS = 4
"""Standard errors by which the mean signed difference must exceed 0 to count as one-sided."""
TOLERANCE_TF32 = 1e-2
"""As `TOLERANCE`, in nats, for float32 on GPUs, whose kernels may multiply with 10 bits of mantissa."""
SEQUENCES = 16
"""Maximum number of sequences of the first batch whose log-probabilities are compared."""
PROBES, PROBE_TOKENS = 4, 32
"""If older weights sampled that batch: number of its prompts to sample again, and maximum tokens of each answer."""
TASKS = 4
"""Number of tasks whose prompts and answers are compared with each other."""
STEPS = 3
"""Number of steps with equal rewards, or of versions with unchanged weights, after which a warning is shown."""
KEPT = 0.5
"""Share of the weights' change that rounding must leave."""
ROUNDED_STEPS = 10
"""Steps after the learning rate's warm-up within which it must: changes in one direction add up."""
OF_TASKS = ("prompt", "answers")
"""Clauses about the beginnings of groups, which rollout workers examine only once, at their start."""
FEWEST_WORDS = 0.5
"""Fraction of a task's words that its prompt must contain; with less, the model is not shown its task."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of the generator's and the trainer's log-probabilities of the same tokens, in nats.

    Attributes:
        shift: mean signed difference, generator minus trainer.
        shift_error: standard error of `shift`.
    """

    tokens: int
    mean: float
    largest: float
    shift: float = 0.0
    shift_error: float = 0.0

    @property
    def one_sided(self) -> bool:
        """Whether the difference is biased more than rounding explains."""
        return abs(self.shift) > max(ONE_SIDED, STANDARD_ERRORS * self.shift_error)

    @classmethod
    def between(cls, trainer: Sequence[Any], generator: Sequence[Any]) -> Difference:
        """Compare log-probabilities of the same tokens, [N] for each sequence; non-finite differences are left out."""
        values = np.concatenate(generator) - np.concatenate(trainer) if len(trainer) else np.empty(0)
        values = values[np.isfinite(values)].astype(np.float64)
        if not len(values):
            return cls(0, 0.0, 0.0)
        sizes = np.abs(values)
        error = float(values.std() / np.sqrt(len(values)))
        return cls(len(values), float(sizes.mean()), float(sizes.max()), float(values.mean()), error)


class Contract:
    """Judges the clauses in one session of a run."""

    def __init__(
        self, run: Run, trainer: TrainerHandle, generators: GeneratorPool, buffer: LocalReplayBuffer[Any]
    ) -> None:
        self._run, self._trainer, self._generators, self._buffer = run, trainer, generators, buffer
        self._verdicts: dict[str, Verdict] = {}
        self._openings: dict[str, Opening] = {}
        self.begin_again()

    def begin_again(self) -> None:
        """Reset after the run returned to a checkpoint: check all clauses again that weights or training affect."""
        self._step = 0
        self._verdicts = {clause: self._verdicts[clause] for clause in OF_TASKS if clause in self._verdicts}
        self._rewards: list[Any] = []
        self._signal = False
        self._scores_doubtful = False
        self._served: dict[int, int] = {}
        """Checksums of the weights that replicas held last, by number."""
        self._sums: Sums | None = None
        """The trainer's last checksums."""
        self._unchanged = 0

    # --- verdicts

    def _is_open(self, clause: str) -> bool:
        return clause not in self._verdicts

    def _say(self, clause: str, verdict: Verdict, text: str) -> None:
        self._verdicts[clause] = verdict
        self._run.contract(Clause(clause, verdict, text, self._step))

    def _break(self, clause: str, text: str, fix: str) -> ContractError:
        self._say(clause, "broken", text)
        return ContractError(f"the run's contract is broken ({CLAUSES[clause]}): {text}", fix=f"{fix} (docs/trust.md)")

    def close(self) -> None:
        """End the session and report undecided clauses as open."""
        waits = {
            "prompt": f"fewer than {TASKS} tasks were played",
            "log-probs": "no token was sampled by the weights that trained on it",
            "weights": "no newer weights arrived",
            "rounding": f"fewer than {ROUNDED_STEPS} steps were trained after the warm-up",
            "tokens": "no sequence was trained on",
            "rewards": f"fewer than {STEPS} steps were trained, and all their rewards are the same",
            "answers": f"fewer than {TASKS} tasks were played",
            "scores": "no step was trained",
        }
        if self._run.config.model.dtype == "float32":
            del waits["rounding"]
        for clause in filter(self._is_open, waits):
            self._say(clause, "open", waits[clause])

    # --- prompt and answers

    def opened(self, opening: Opening | None) -> None:
        """Add the opening of a group, and judge `prompt` and `answers` when there are enough tasks."""
        if opening is None or not (self._is_open("prompt") or self._is_open("answers")):
            return
        self._openings.setdefault(opening.task, opening)
        if len(self._openings) >= TASKS:
            self._judge_openings(list(self._openings.values()))

    def _judge_openings(self, found: Sequence[Opening]) -> None:
        if self._is_open("prompt"):
            if all(len(opening.missing) > (1 - FEWEST_WORDS) * opening.words for opening in found):
                some = ", ".join(found[0].missing[:5])
                raise self._break(
                    "prompt",
                    f"the model's prompt for task {found[0].task!r} lacks {len(found[0].missing)} of the "
                    f"{found[0].words} words that the environment wrote: {some}; likewise for {len(found)} tasks",
                    "check model.renderer and the tokenizer of model.path: does `forge-env trajectory` show the task?",
                )
            if lacking := [opening for opening in found if opening.missing]:
                words = ", ".join(lacking[0].missing[:5])
                self._say(
                    "prompt", "doubtful", f"{len(lacking)} of {len(found)} prompts lack words of their task: {words}"
                )
            elif len({opening.prompt for opening in found}) == 1:
                text = f"the prompts of {len(found)} different tasks are the same: the model can't distinguish them"
                self._say("prompt", "doubtful", text)
            else:
                words_seen = sum(opening.words for opening in found)
                self._say("prompt", "holds", f"all {words_seen:,} words of {len(found)} tasks are in their prompts")
        if self._is_open("answers"):
            answers = [answer for opening in found for answer in opening.answers]
            different = len(set(answers))
            if different == 1 and len(answers) > 1:
                text = f"all {len(answers)} first answers to {len(found)} different tasks are the same"
                self._say("answers", "doubtful", f"{text}: the model ignores the task, or has collapsed")
            else:
                self._say("answers", "holds", f"{different:,} different first answers to {len(found)} tasks")

    # --- log-probabilities

    async def before_training(self, batch: Reservation) -> None:
        """Compare log-probabilities of trainer and generator on a batch that is about to be trained on."""
        self._step = batch.step
        if not self._is_open("log-probs"):
            return
        sizes = await self._buffer.batch_sizes(batch.step)
        count = sizes.total_segments
        chosen = np.unique(np.linspace(0, count - 1, min(count, SEQUENCES)).astype(int)).tolist() if count else []
        segments = await self._buffer.sequences(batch.step, chosen)
        sampled = [segment for segment in segments if _sampled_by(segment, batch.step)]
        what = "of the first batch"
        if not sampled:
            sampled, what = await self._probe(segments, batch.step), "of answers to prompts of the first batch"
        if not sampled:
            return  # try again with the next batch
        trainer_logprobs = await self._trainer.logprobs(sampled)
        generator_logprobs = [segment.logprobs[targets(segment)] for segment in sampled]
        self._judge_logprobs(Difference.between(trainer_logprobs, generator_logprobs), what)

    async def _probe(self, segments: Sequence[Segment], version: int) -> list[Segment]:
        """Sample answers to a few prompts of these sequences, and return those sampled by the trainer's weights."""
        config = self._run.config
        requests = []
        for number, segment in enumerate(segments[:PROBES]):
            (sampled,) = np.nonzero(segment.versions >= 0)
            prompt = segment.token_ids[: sampled[0]] if len(sampled) else segment.token_ids
            room = min(PROBE_TOKENS, config.model.max_length - len(prompt))
            options = SamplingOptions(max_tokens=room, temperature=config.grpo.temperature, seed=number)
            if room > 0 and len(prompt):
                requests.append(self._generators.generate(prompt, options))
        answers = []
        for completion in await asyncio.gather(*requests, return_exceptions=True):
            if isinstance(completion, InfrastructureError):  # a generator is being restarted; the next batch is tried
                continue
            if isinstance(completion, BaseException):
                raise completion
            ids = np.concatenate([completion.prompt_ids, completion.token_ids])
            new = np.arange(len(ids)) >= len(completion.prompt_ids)
            logprobs, versions = np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32)
            logprobs[new], versions[new] = completion.logprobs, completion.versions
            segment = Segment(ids, new, logprobs, versions)
            answers += [segment] if _sampled_by(segment, version) else []
        return answers

    def _judge_logprobs(self, found: Difference, what: str) -> None:
        config = self._run.config
        dtype, on_gpus = config.model.dtype, config.generator.with_gpus or config.trainer.with_gpus
        bound = TOLERANCE_TF32 if dtype == "float32" and on_gpus else TOLERANCE[dtype]
        if not found.tokens:
            return
        text = (
            f"{found.tokens:,} tokens {what} differ by {found.mean:.1e} nats on average, {found.largest:.1e} at most "
            f"(at most {bound:g} on average in {dtype})"
        )
        if found.one_sided:
            which = "likelier" if found.shift > 0 else "less likely"
            text += f", and the generator finds them {which} by {abs(found.shift):.1e} on average"
        if found.mean > bound or found.one_sided or not np.isfinite(found.mean):
            raise self._break(
                "log-probs",
                text,
                "trainer and generators don't compute the same distribution: check generator.engine_args, "
                "model.dtype and grpo.temperature; is the model's folder the one that both loaded?",
            )
        self._say("log-probs", "holds", text)

    # --- weights

    async def before_weights(self) -> None:
        """Record the checksums of trainer and generators before this session's first training step."""
        if self._is_open("weights"):
            self._sums = await self._trainer.checksums()
            self._served = {number: served.held for number, served in (await self._generators.checksums()).items()}

    async def weights_sent(self) -> Sums | None:
        """Return the trainer's checksums of weights it just published; None if the clause is already decided."""
        return await self._trainer.checksums() if self._is_open("weights") else None

    async def weights_arrived(self, version: int, published: Published, trained: Sums | None) -> None:
        """Compare the generators' weights with the trainer's before another version is published."""
        if trained is None or not self._is_open("weights"):
            return
        by_replica = await self._generators.checksums(published)
        current = {number: served for number, served in by_replica.items() if served.version == version}
        for number, served in current.items():
            if fault := _fault(served, trained):
                raise self._break(
                    "weights",
                    f"generator {number} {fault} (version {version})",
                    "it does not sample from the trained policy: check its process in run.log, generator.engine_args, "
                    "and other code that loads weights",
                )
        changed = [number for number, served in current.items() if self._served.get(number, served.held) != served.held]
        self._served |= {number: served.held for number, served in current.items()}
        moved, self._sums = self._sums is not None and trained != self._sums, trained
        if changed:
            served = current[changed[0]]
            extent = "all of them" if served.whole else "those that they loaded"
            count = "1 generator serves" if len(changed) == 1 else f"{len(changed)} generators serve"
            text = f"{count} version {version}, which differs from the previous one and equals"
            self._say("weights", "holds", f"{text} the trainer's by checksum ({len(trained):,} tensors, {extent})")
        elif current:
            self._unchanged += 1
            if self._unchanged >= STEPS:
                text = f"the weights are the same after {self._unchanged} versions: training has no effect"
                if moved:  # changes below the generators' precision, or generators don't use the weights they receive
                    text = f"the generators' weights are the same after {self._unchanged} versions"
                self._say("weights", "doubtful", f"{text}; check trainer.optimizer.lr and groups/with_signal")

    # --- tokens and rewards

    def trained(self, groups: Sequence[GroupRecord], figures: Mapping[str, float]) -> None:
        """Judge tokens, rounding, rewards and scores after a training step.

        Args:
            figures: the step's metrics, and counts from the trainer's audit of its tokens
                (`trainers.generator.receipt.Audit`).
        """
        self._step += 1
        self._judge_rounding(figures)
        self._judge_tokens(figures)
        self._judge_rewards(groups)
        self._judge_scores(groups)

    def _judge_rounding(self, figures: Mapping[str, float]) -> None:
        kept = figures.get("trainer/change_kept")
        if kept is None or not self._is_open("rounding"):
            return
        optimizer = self._run.config.trainer.optimizer
        text = f"{kept:.1%} of what {self._step} steps changed in the weights is left in bfloat16"
        if kept >= KEPT:
            self._say("rounding", "holds", f"{text}, in which the generators compute")
        elif self._step >= optimizer.warmup_steps + ROUNDED_STEPS:
            fix = "use model.dtype=float32, or lora with its higher learning rate"
            self._say(
                "rounding",
                "doubtful",
                f"{text}, in which the generators compute: with trainer.optimizer.lr={optimizer.lr:g}, they lag behind "
                f"the trainer until changes add up; {fix}",
            )

    def tokens_differ(self, error: ContractError) -> ContractError:
        """Break the `tokens` clause because the trainer refused a step; return the error to raise."""
        assert error.fix is not None
        return self._break("tokens", error.message, error.fix.removesuffix(" (docs/trust.md)"))

    def _judge_tokens(self, figures: Mapping[str, float]) -> None:
        sequences, tokens, unsigned = (int(figures.get(name, 0)) for name in ("sequences", "tokens", "unsigned"))
        if not self._is_open("tokens") or not sequences:
            return
        if unsigned:
            text = f"no generator has signed {unsigned:,} of {sequences:,} sequences, so it is unknown"
            self._say("tokens", "doubtful", f"{text} whether they are the sampled ones")
        else:
            text = f"all {tokens:,} tokens of the {sequences:,} sequences of step {self._step}"
            self._say("tokens", "holds", f"{text} are the sampled ones, by count and hash; every step is checked")

    def _judge_rewards(self, groups: Sequence[GroupRecord]) -> None:
        if not self._is_open("rewards"):
            return
        self._rewards.append(np.concatenate([group.column("reward") for group in groups]))
        self._signal |= any(group.has_signal for group in groups)
        rewards = np.concatenate(self._rewards)
        low, high = float(rewards.min()), float(rewards.max())
        if high > low:
            self._say("rewards", "holds", f"{len(rewards):,} episodes earned {low:g} to {high:g}")
        elif len(self._rewards) >= STEPS:
            text = f"all {len(rewards):,} episodes of {STEPS} steps earned {low:g}"
            if self._signal:
                self._say("rewards", "holds", f"{text}; the signal comes from elsewhere")
            else:
                fix = "there is nothing to learn: check the rubric with `forge-env validate`, or try easier tasks"
                self._say("rewards", "doubtful", f"{text}: {fix}")

    def _judge_scores(self, groups: Sequence[GroupRecord]) -> None:
        """Warn at the first step with a doubtful score, even after steps without any."""
        if self._scores_doubtful:
            return
        flagged = [group.metrics[NOT_CHEAT_PROOF] for group in groups if NOT_CHEAT_PROOF in group.columns]
        doubtful = int(sum(map(np.sum, flagged)))
        episodes = sum(len(group.table) for group in groups)
        if doubtful:
            self._scores_doubtful = True
            fix = "let tests run apart (docs/sandboxes/judging.md), or set environment.options.require_cheat_proof=true"
            text = f"{doubtful:,} of {episodes:,} episodes were scored by tests in the judged code's process: {fix}"
            self._say("scores", "doubtful", text)
        elif self._is_open("scores"):
            text = f"none of {episodes:,} episodes was scored by tests that the judged code could have changed"
            self._say("scores", "holds", text)


def _sampled_by(segment: Segment, version: int) -> bool:
    """Whether all sampled tokens of `segment` are from policy `version`, and it has target tokens."""
    versions = segment.versions[segment.versions >= 0]
    return bool(len(targets(segment)) and len(versions) and (versions == version).all())


def _fault(served: Served, trained: Sums) -> str | None:
    """Describe how a generator's weights differ from the trainer's; None if they don't."""
    if served.taken is not None and served.taken != trained:
        wrong = [name for name in {**trained, **served.taken} if trained.get(name) != served.taken.get(name)]
        return f"received other weights than the trainer's: {len(wrong)} tensors differ, {wrong[0]} among them"
    if served.expected is not None and served.held != served.expected:
        return "serves other weights than it received"
    return None
