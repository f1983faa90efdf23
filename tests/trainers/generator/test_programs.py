"""Whatever a program does with its history, what is trained on is what was sampled, after what it was sampled after."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("renderers")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import forge_env as fe
from forge_env.errors import ContextLengthExceeded
from forge_env.gateway.request import ModelRequest
from forge_env.gateway.server import Access
from forge_env.http.limits import RefusedRequestError
from forge_env.policy import Reply
from forge_env.rollout.episode import EpisodeLimits, run_episode
from forge_env.sandbox import ExecResult, SandboxEngine
from forge_env.trajectory import Turn
from forge_env.types import Message, ToolSpec
from tests.sandboxes.conftest import require
from trainers.generator.policy import GeneratorPolicy
from trainers.generator.types import Completion, SamplingOptions
from trainers.model.chat import Chat, FolderTokenizer
from trainers.model.folder import local_folder

pytestmark = pytest.mark.stack
TOOLS = [ToolSpec(name="look", description="Look.", parameters={"type": "object", "properties": {}})]
SAYS = ("def f", "return 1", "<tool_call>", '{"name": "look", "arguments": {}}', "</tool_call>", "<think>", " ", "\n")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    require("local")
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(runner: asyncio.Runner) -> Iterator[SandboxEngine]:
    opening = fe.open_engine("local", concurrency=1)
    yield runner.run(opening.__aenter__())
    runner.run(opening.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def chat() -> Chat:
    folder = local_folder("coding_rlvr_base")
    assert folder is not None
    return Chat(FolderTokenizer(folder))


class Sampler:
    """A model that says anything; every token has a log-probability of its own, by which it is found again."""

    def __init__(self, chat: Chat, dice: random.Random) -> None:
        self.chat, self.dice = chat, dice
        self.asked: list[tuple[NDArray[np.int32], Completion]] = []
        self.count = 0

    async def __call__(self, prompt: NDArray[np.int32], options: SamplingOptions, conversation: object) -> Completion:
        await asyncio.sleep(0)
        said = "".join(self.dice.choices(SAYS, k=self.dice.randint(0, 5)))
        ids = self.chat.tokenizer.encode(said) + self.chat.stop_token_ids[:1]
        if cut := self.dice.random() < 0.2:
            ids = ids[:-1] or ids
        numbers = -np.arange(self.count, self.count + len(ids), dtype=np.float32)
        self.count += len(ids)
        completion = Completion(
            prompt_ids=np.empty(0, np.int32),
            token_ids=np.array(ids, np.int32),
            logprobs=numbers,
            versions=np.zeros(len(ids), np.int32),
            stop_reason="length" if cut else "stop",
            generator_version=0,
        )
        self.asked.append((prompt.copy(), completion))
        return completion


def nothing(env: Meddler) -> float:
    return 0.0


class Meddler(fe.ProgramEnvironment):
    """A program that goes on, retries, cuts, reorders, summarises, changes what tools said, and asks side by side."""

    rubric = fe.Rubric(nothing)
    dice: random.Random

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt="?", split=split)

    async def run(self, task: fe.Task, access: Access) -> ExecResult:
        dice, histories = self.dice, [[Message(role="system", content="Help."), Message(role="user", content="?")]]

        async def ask(history: list[Message]) -> None:
            request = ModelRequest(list(history), TOOLS)
            try:
                [answer] = await access.answers(request)
            except RefusedRequestError:
                return
            histories.append([*history, answer.message])

        for _ in range(dice.randint(1, 8)):
            await asyncio.gather(*(ask(self.changed(dice.choice(histories))) for _ in range(dice.choice([1, 1, 3]))))
        return ExecResult(exit_code=0)

    def changed(self, history: list[Message]) -> list[Message]:
        dice, history = self.dice, list(history)
        last = history[-1]
        history += [Message(role="tool", content="nothing", tool_call_id=call.id) for call in last.tool_calls]
        if last.role == "assistant" and not last.tool_calls:
            history.append(Message(role="user", content=dice.choice(["Go on.", "And?"])))
        match dice.randrange(9):
            case 0:
                return [each for each in history if each.role != "assistant"]
            case 1:
                middle = history[1:]
                dice.shuffle(middle)
                return [history[0], *middle]
            case 2:
                return [history[0], Message(role="user", content="In short: nothing."), *history[-1:]]
            case 3:
                return history[: dice.randint(2, len(history))]
            case 4:
                return [each.model_copy(update={"content": each.content.strip()}) for each in history]
            case 5:
                return [*history, Message(role="user", content=str(dice.random()))]
        return history


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_trained_tokens_are_sampled_ones(runner: asyncio.Runner, engine: SandboxEngine, chat: Chat, seed: int) -> None:
    dice = random.Random(seed)
    sampler = Sampler(chat, dice)

    def make() -> Meddler:
        made = Meddler(sandboxes=engine)
        made.dice = dice
        return made

    policy = GeneratorPolicy(chat, sampler, max_length=4000, max_tokens=50)
    episode = runner.run(run_episode(make, policy, seed=1, limits=EpisodeLimits()))
    assert episode.valid, episode.error
    segments = fe.Trajectory.from_dict(episode.to_dict()).segments()
    assert sum(int(segment.mask.sum()) for segment in segments) == sampler.count, "each token once"
    found = {-int(segment.logprobs[at]): (segment, at) for segment in segments for at in np.flatnonzero(segment.mask)}
    for prompt, completion in sampler.asked:
        segment, start = found[-int(completion.logprobs[0])]
        end = start + len(completion.token_ids)
        np.testing.assert_array_equal(segment.token_ids[:start], prompt, "after what it was sampled after")
        np.testing.assert_array_equal(segment.token_ids[start:end], completion.token_ids)
        np.testing.assert_array_equal(segment.logprobs[start:end], completion.logprobs)
        assert segment.mask[start:end].all()
    by_seat: dict[str, list[Turn]] = {}
    for turn in episode.turns:
        by_seat.setdefault(turn.seat, []).append(turn)
    whole = {id(turn): tokens for turns in by_seat.values() for turn, tokens in _whole(turns)}
    for seat, branch in episode.info.get("branches", {}).items():
        first = by_seat[seat][0] if seat in by_seat else None
        if first is not None and branch["turns"] and not first.reply.forked:
            before = whole[id(by_seat[branch["seat"]][branch["turns"] - 1])]
            np.testing.assert_array_equal(first.reply.prompt_ids[: len(before)], before, "the other's own tokens")


def _whole(turns: list[Turn]) -> Iterator[tuple[Turn, NDArray[np.int32]]]:
    """Turns of a conversation, each with all tokens to its end."""
    before = np.empty(0, np.int32)
    for turn in turns:
        reply = turn.reply
        assert reply.continues in (0, len(before))
        before = np.concatenate([before[: reply.continues], reply.prompt_ids, reply.token_ids])
        yield turn, before


class Interrupter(fe.ProgramEnvironment):
    """A program that has system messages in the middle, which some formats don't know."""

    rubric = fe.Rubric(lambda answer: float(answer == "told"))

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt="?", split=split)

    async def run(self, task: fe.Task, access: Access) -> ExecResult:
        await access.answers(ModelRequest([Message(role="user", content="?")]))
        history = [Message(role="user", content="In short: nothing."), Message(role="system", content="Hurry.")]
        with pytest.raises(RefusedRequestError, match="its limit of format is reached"):
            await access.answers(ModelRequest(history))
        return ExecResult(exit_code=0, stdout="told")


def test_what_a_format_cannot_write_ends_the_episode_and_not_the_run(
    runner: asyncio.Runner, engine: SandboxEngine, caplog: pytest.LogCaptureFixture
) -> None:
    folder = local_folder("coding_rlvr_base")
    assert folder is not None
    chat = Chat(FolderTokenizer(folder), "nemotron-3")
    policy = GeneratorPolicy(chat, Sampler(chat, random.Random(1)), max_length=4000, max_tokens=50)
    episode = runner.run(run_episode(lambda: Interrupter(sandboxes=engine), policy, seed=1))
    assert (episode.valid, episode.truncation, episode.reward, len(episode.turns)) == (True, "format", 1.0, 1)
    assert "System message must be at the beginning" in caplog.text


async def test_a_branch_goes_on_from_the_very_tokens(chat: Chat) -> None:
    """What the model spelled in its own way stays so in a conversation that goes back to it."""
    spelled = chat.tokenizer.encode('<tool_call>\n{"arguments":{},   "name":"look"}\n</tool_call>')
    answer = np.array([*spelled, *chat.stop_token_ids[:1]], np.int32)
    prompts: list[NDArray[np.int32]] = []

    async def generate(prompt: NDArray[np.int32], options: SamplingOptions, conversation: object) -> Completion:
        prompts.append(prompt)
        numbers = np.zeros(len(answer), np.float32)
        return Completion(np.empty(0, np.int32), answer, numbers, np.zeros(len(answer), np.int32), "stop", 0)

    policy = GeneratorPolicy(chat, generate, max_length=4000, max_tokens=50)
    session = policy.session(TOOLS, seed=1)
    first = await session.reply([Message(role="user", content="?")])
    assert first.message.tool_calls[0].function.name == "look"
    second, _ = [
        await session.reply([Message(role="tool", content=text, tool_call_id="call_0")]) for text in ("one", "two")
    ]
    branch = session.fork(1, TOOLS, seed=2)
    reply = await branch.reply([Message(role="tool", content="another", tool_call_id="call_0")])
    assert (reply.continues, reply.forked) == (0, False)
    np.testing.assert_array_equal(reply.prompt_ids, prompts[-1])
    begun = np.concatenate([prompts[0], answer])
    np.testing.assert_array_equal(prompts[-1][: len(begun)], begun)
    again = await branch.reply([Message(role="tool", content="more", tool_call_id="call_0")])
    assert again.continues == len(prompts[-2]) + len(answer)
    deeper = branch.fork(1, TOOLS)
    await deeper.reply([Message(role="tool", content="else", tool_call_id="call_0")])
    np.testing.assert_array_equal(prompts[-1][: len(prompts[-3])], prompts[-3])

    resumed = policy.session(TOOLS, seed=3)
    asked = [[Message(role="user", content="?")], [Message(role="tool", content="one", tool_call_id="call_0")]]
    assert resumed.resume(list(zip(asked, [first, second], strict=True)))
    await resumed.reply([Message(role="tool", content="two", tool_call_id="call_0")])
    np.testing.assert_array_equal(prompts[-1], prompts[2])
    assert not policy.session(TOOLS).resume([(asked[0], Reply(first.message))])

    more = [*TOOLS, ToolSpec(name="write")]
    offered = session.fork(2, more)
    await offered.reply([Message(role="tool", content="written", tool_call_id="call_0")])
    head = chat.render([Message(role="user", content="?")], more)
    rest = prompts[1][len(prompts[0]) :]
    np.testing.assert_array_equal(prompts[-1][: len(head) + len(rest)], [*head, *rest])
    assert len(head) > len(prompts[0])


async def test_others_go_on_while_megabytes_are_spelled(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may send as much as the gateway takes: that its episode ends so costs no other episode seconds."""
    spelling, others = threading.Event(), threading.Event()

    def render(*_: object) -> list[int]:
        spelling.set()
        assert others.wait(60), "nobody else had a turn"
        return [0] * 5000

    async def generate(prompt: NDArray[np.int32], options: SamplingOptions, conversation: object) -> Completion:
        raise AssertionError("there is no room")

    monkeypatch.setattr(chat, "render", render)
    session = GeneratorPolicy(chat, generate, max_length=4000, max_tokens=50).session([], seed=1)
    asking = asyncio.create_task(session.reply([Message(role="user", content="x" * (1 << 20))]))
    await asyncio.to_thread(spelling.wait)
    others.set()
    with pytest.raises(ContextLengthExceeded, match="5000 of 4000"):
        await asking
