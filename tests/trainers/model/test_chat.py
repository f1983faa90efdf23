"""Messages to tokens and back: exact over turns, compact for a small vocabulary, tolerant of what a model writes."""

from __future__ import annotations

import random
from collections.abc import Hashable
from pathlib import Path

import pytest

pytest.importorskip("renderers")

from hypothesis import given, settings
from hypothesis import strategies as st

import forge_env as fe
from forge_env.environment.base import Environment
from forge_env.errors import ContextLengthExceeded, UsageError
from forge_env.types import Message
from trainers.generator.policy import GeneratorPolicy
from trainers.generator.types import Completion, SamplingOptions
from trainers.model.chat import Chat, FolderTokenizer
from trainers.model.tokenizer import build_tokenizer, save_tokenizer

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def environment() -> Environment:
    return fe.make("coding_rlvr", levels=[1, 2])


@pytest.fixture(scope="module")
def chat(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(build_tokenizer(environment, "qwen3", 1024, seed=0, samples=300), folder)
    return Chat(FolderTokenizer(folder))


def demonstrations(environment: Environment, count: int) -> list[list[Message]]:
    rng = random.Random(3)
    return [environment.demonstrate(environment.task("train", index), rng) for index in range(count)]  # type: ignore[attr-defined]


def test_a_demonstration_is_the_prompt_then_what_the_model_would_sample(chat: Chat, environment: Environment) -> None:
    for messages in demonstrations(environment, 20):
        ids, mask = chat.render_training(messages, environment.tools)
        first = next(index for index, message in enumerate(messages) if message.role == "assistant")
        prompt = chat.render(messages[:first], environment.tools)
        assert ids[: len(prompt)] == prompt
        assert not any(mask[: len(prompt)])
        assert mask[len(prompt)]


def test_turns_extend_the_tokens_before_them(chat: Chat, environment: Environment) -> None:
    """Played back turn by turn, a demonstration gives the same tokens as rendered at once: no drift, no fork."""
    for messages in demonstrations(environment, 20):
        ids, mask = chat.render_training(messages, environment.tools)
        prompt = chat.render(messages[:2], environment.tools)
        for index in range(2, len(messages), 2):
            end = next(position for position in range(len(prompt), len(ids)) if not mask[position])
            sampled = ids[len(prompt) : end]
            assert chat.parse(sampled, environment.tools, prompt).content == messages[index].content
            if index + 1 < len(messages):
                extended = chat.extend(prompt, sampled, [messages[index + 1]], environment.tools)
                assert extended is not None
                assert extended == ids[: len(extended)]
                prompt = extended


def test_a_tool_call_is_parsed(chat: Chat, environment: Environment) -> None:
    text = '<tool_call>\n{"name": "python", "arguments": {"code": "def f(x):\\n    return x"}}\n</tool_call><|im_end|>'
    message = chat.parse(chat.tokenizer.encode(text), environment.tools, [])
    assert [call.function.name for call in message.tool_calls] == ["python"]
    assert "return x" in message.tool_calls[0].function.arguments


@settings(max_examples=60, deadline=None)
@given(token_ids=st.lists(st.integers(0, 600), max_size=60))
def test_any_tokens_parse_to_a_message(chat: Chat, environment: Environment, token_ids: list[int]) -> None:
    message = chat.parse(token_ids, environment.tools, [])
    assert message.role == "assistant"


def test_prompts_are_short(chat: Chat, environment: Environment) -> None:
    """The chat format's fixed phrases cost one token each, so a prompt is about its task."""
    lengths = [len(chat.render(messages[:2], environment.tools)) for messages in demonstrations(environment, 50)]
    assert sum(lengths) / len(lengths) < 100


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        FolderTokenizer(tmp_path)


class Script:
    """A generator that says what it is told to."""

    def __init__(self, chat: Chat, texts: list[str]) -> None:
        self.chat, self.texts, self.prompts = chat, texts, []  # type: ignore[var-annotated]
        self.options: list[SamplingOptions] = []
        self.conversations: list[Hashable] = []

    async def __call__(self, prompt_ids: list[int], options: SamplingOptions, session: Hashable) -> Completion:
        self.prompts.append(prompt_ids)
        self.conversations.append(session)
        self.options.append(options)
        ids = self.chat.tokenizer.encode(self.texts.pop(0))
        return Completion(prompt_ids, ids, [-0.1] * len(ids), [7] * len(ids), "stop", 7)


async def test_a_policy_session_never_forks_on_its_own_turns(chat: Chat, environment: Environment) -> None:
    call = '<tool_call>\n{"name": "python", "arguments": {"code": "x"}}\n</tool_call><|im_end|>'
    script = Script(chat, [call, "done<|im_end|>"])
    session = GeneratorPolicy(chat, script, max_length=400, max_tokens=50).session(environment.tools)
    first = await session.reply([Message(role="system", content="s"), Message(role="user", content="q")])
    second = await session.reply([Message(role="tool", content="1/2 passed", tool_call_id="call_0")])
    assert not second.forked
    assert second.continues == first.prompt_length + len(first.token_ids)
    assert second.message.content == "done"
    assert second.versions.tolist() == [7] * len(second.token_ids)
    assert script.conversations[0] == script.conversations[1]
    assert script.options[1].priority < script.options[0].priority, "an episode under way goes before a new one"


async def test_a_full_context_truncates_instead_of_sampling(chat: Chat, environment: Environment) -> None:
    script = Script(chat, ["a<|im_end|>"])
    policy = GeneratorPolicy(chat, script, max_length=40, max_tokens=50)
    with pytest.raises(ContextLengthExceeded):
        await policy.session(environment.tools).reply([Message(role="user", content="abc " * 60)])
    await policy.session([]).reply([Message(role="user", content="hi")])
    assert script.options[0].max_tokens + len(script.prompts[0]) <= 40
