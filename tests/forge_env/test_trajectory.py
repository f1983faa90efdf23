"""Trajectories: exact token sequences, kept on disk with nothing lost, in the old form and the new."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import tracemalloc
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env.errors import UsageError
from forge_env.policy import NO_TOKENS, Reply
from forge_env.reading import LARGEST_NUMBER
from forge_env.trajectory import Segment, Trajectory, TrajectoryWriter, Turn, read_trajectories
from forge_env.types import FunctionCall, Message, ToolCall

TOKENS = st.lists(st.integers(0, 3) | st.integers(0, 2**31 - 1), max_size=6)
TEXTS = st.text(max_size=8) | st.sampled_from(["\ud800", "a\nb\r\u2028c", "\u00e9\U0001f40d", "\0"])
FIGURES = st.floats(-LARGEST_NUMBER, LARGEST_NUMBER)
JSON = st.dictionaries(TEXTS, st.none() | st.booleans() | st.integers() | FIGURES | TEXTS, max_size=3)
NAMES = st.sampled_from(["add", "python"])
PERHAPS = st.none() | TEXTS
NUMBERS = st.none() | st.integers(0, 3)
METRICS = st.dictionaries(NAMES, FIGURES)
LIMITS = st.none() | st.just("turns")
STARTED = st.just(0.0) | st.just(1.8e9)


@st.composite
def messages(draw: st.DrawFn, role: Any = None) -> Message:
    calls = [
        ToolCall(id=f"call_{index}", function=FunctionCall(name=draw(NAMES), arguments=draw(TEXTS)))
        for index in range(draw(st.integers(0, 2)))
    ]
    role = role or draw(st.sampled_from(["system", "user", "assistant", "tool"]))
    return Message(role=role, content=draw(TEXTS), tool_calls=calls, reasoning_content=draw(PERHAPS))


OBSERVED = st.lists(messages(), max_size=2)
ANSWERS = messages("assistant")


@st.composite
def token_replies(draw: st.DrawFn, *, whole: bool = False) -> list[tuple[list[int], Reply]]:
    """Replies of a conversation with the whole prompt of each: it goes on, forks, says nothing, gives no tokens.

    With `whole`, the replies keep their whole prompts, as a policy's session may leave them.
    """
    done: list[tuple[list[int], Reply]] = []
    before: Any = NO_TOKENS
    for _ in range(draw(st.integers(0, 5))):
        message = draw(ANSWERS)
        if draw(st.integers(0, 5)) == 0:
            done.append(([], Reply(message, metadata=draw(JSON))))
            continue
        prompt, sampled = draw(TOKENS), draw(TOKENS)
        if draw(st.integers(0, 3)):
            prompt = [*np.asarray(before, np.int32).tolist(), *prompt]
        logprobs = [draw(st.floats(-100, 0, width=32)) for _ in sampled]
        versions = sorted(draw(st.integers(-1, 3)) for _ in sampled)
        stop = draw(st.sampled_from(["stop", "length"]))
        reply = Reply(message, prompt, sampled, logprobs, versions, stop, metadata=draw(JSON))
        if not whole:
            before = reply.follow(before)
        elif prompt or sampled:
            before = np.array(prompt + sampled)
        done.append((prompt, reply))
    return done


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    turns = [
        Turn(
            draw(OBSERVED),
            reply,
            *(draw(FIGURES) for _ in range(3)),
            calls_s=draw(st.lists(FIGURES, max_size=2)),
        )
        for _, reply in draw(token_replies(whole=draw(st.booleans())))
    ]
    return Trajectory(
        id=draw(TEXTS),
        environment="env",
        task_id="task",
        turns=turns,
        final_observation=draw(OBSERVED),
        reward=draw(FIGURES),
        answer=draw(PERHAPS),
        metrics=draw(METRICS),
        truncation=draw(LIMITS),
        error=draw(PERHAPS),
        tags=draw(st.lists(TEXTS, max_size=2)),
        info=draw(JSON),
        group=draw(NUMBERS),
        member=draw(NUMBERS),
        started=draw(STARTED),
    )


def old_segments(turns: list[tuple[list[int], Reply]]) -> list[Any]:
    """What a segment is: turns whose whole prompt begins with all tokens of the sequence so far continue it."""
    result: list[Any] = []
    current: Any = None
    for prompt, reply in turns:
        sampled = list(reply.token_ids)
        if not sampled:
            continue
        if current is None or prompt[: len(current[0])] != current[0]:
            current = ([], [], [], [])
            result.append(current)
        ids, mask, logprobs, versions = current
        observed = prompt[len(ids) :]
        ids += observed + sampled
        mask += [False] * len(observed) + [True] * len(sampled)
        logprobs += [0.0] * len(observed) + list(reply.logprobs)
        versions += [-1] * len(observed) + list(reply.versions)
    return result


def plain(segment: Segment) -> Any:
    arrays = (segment.token_ids, segment.mask, segment.logprobs, segment.versions)
    assert [array.dtype for array in arrays] == [np.int32, np.bool_, np.float32, np.int32]
    assert segment.advantages.tolist() == [0.0] * len(segment)
    return tuple(array.tolist() for array in arrays)


@given(turns=token_replies() | token_replies(whole=True))
def test_segments_are_the_fewest_exact_sequences(turns: list[tuple[list[int], Reply]]) -> None:
    episode = Trajectory("e", "env", "task", turns=[Turn([], reply) for _, reply in turns])
    assert [plain(segment) for segment in episode.segments()] == old_segments(turns)


@given(turns=token_replies())
def test_a_reply_keeps_what_it_adds_to_the_turn_before(turns: list[tuple[list[int], Reply]]) -> None:
    conversation: list[int] = []
    for prompt, reply in turns:
        if not reply.has_tokens:
            continue
        assert conversation[: reply.continues] + list(reply.prompt_ids) == prompt
        assert reply.prompt_length == len(prompt)
        assert reply.forked == (prompt[: len(conversation)] != conversation)
        assert reply.continues in (0, len(conversation))
        conversation = prompt + list(reply.token_ids)


def test_a_reply_that_continues_what_was_not_there_is_refused() -> None:
    message = Message(role="assistant")
    turns = [Turn([], Reply(message, [1], [2], [-0.5], [0])), Turn([], Reply(message, [3], [4], [-0.5], [0]))]
    turns[1].reply.continues = 7
    with pytest.raises(UsageError, match="a reply continues 7 tokens, and 2 came before it"):
        Trajectory("e", "env", "task", turns=turns).segments()
    with pytest.raises(ValueError, match="2, 1 and 1 sampled tokens, log-probs and versions"):
        Reply(message, [1], [2, 3], [-0.5], [0])


@given(episodes=st.lists(trajectories(), max_size=3))
def test_what_is_written_is_read_back(episodes: list[Trajectory], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("trajectories") / "a.jsonl"
    with TrajectoryWriter(path) as writer:
        for episode in episodes:
            writer.write(episode)
    assert path.read_bytes().count(b"\n") == len(episodes)
    again = list(read_trajectories(path))
    assert again == episodes
    for episode, read in zip(episodes, again, strict=True):
        assert [plain(segment) for segment in read.segments()] == [plain(segment) for segment in episode.segments()]


def test_people_can_read_a_record(tmp_path: Path) -> None:
    reply = Reply(Message(role="assistant", content="Größe: 4 \U0001f40d"), [70_000, 1], [2], [-0.5], [3])
    with TrajectoryWriter(tmp_path / "a.jsonl") as writer:
        writer.write(Trajectory("e", "env", "task", turns=[Turn([Message(role="user", content="wie groß?")], reply)]))
    line = (tmp_path / "a.jsonl").read_text(encoding="utf-8")
    assert line.startswith('{"schema":6,"id":"e",')
    assert '{"role":"user","content":"wie groß?"}' in line
    assert '"content":"Größe: 4 \U0001f40d"' in line
    assert json.loads(line)["tokens"] == {"ids": "i4:cAECEQAAAQAAAAAA", "logprobs": "f4:AAAAvw==", "versions": [[3, 1]]}


def test_a_record_is_linear_in_the_episode(tmp_path: Path) -> None:
    """Each of 50 turns has 100 tokens, and is conditioned on all before it."""
    rng = np.random.default_rng(0)
    episode, before = Trajectory("e", "env", "task"), NO_TOKENS
    for _ in range(50):
        ids = rng.integers(0, 150_000, 100, np.int32)
        prompt = np.concatenate([np.asarray(before, np.int32), ids[:50]])
        reply = Reply(Message(role="assistant"), prompt, ids[50:], -rng.random(50, np.float32), np.full(50, 1))
        before = reply.follow(before)
        episode.turns.append(Turn([], reply))
    (segment,) = episode.segments()
    assert len(segment) == 5_000
    with TrajectoryWriter(tmp_path / "a.jsonl") as writer:
        writer.write(episode)
    assert (tmp_path / "a.jsonl").stat().st_size < 12 * 5_000


RECORD = (
    '{"schema":6,"id":"a","environment":"arithmetic","task_id":"train-3","split":"train","reward":1.0,"answer"'
    ':null,"metrics":{"turns":2.0},"terminated":true,"truncated":false,"truncation":null,"valid":true,"error":'
    'null,"retries":0,"wall_s":0.5,"waited_s":0.0,"difficulty":1,"tags":["t"],"info":{"index":3},"turns":[{"ob'
    'servation":[{"role":"user","content":"\\u00e9"}],"message":{"role":"assistant","content":"one"},"generate_'
    's":0.1,"step_s":0.2,"metadata":{"usage":{"prompt":2}},"tokens":[0,2,2]},{"observation":[{"role":"tool","c'
    'ontent":"4","tool_call_id":"c"}],"message":{"role":"assistant","content":"two"},"reward":1.0,"generate_s"'
    ':0.1,"step_s":0.2,"stop_reason":"length","tokens":[4,1,1]},{"observation":[],"message":{"role":"assistant'
    '","content":"three"},"generate_s":0.1,"step_s":0.2,"forked":true,"tokens":[0,1,1]},{"observation":[],"mes'
    'sage":{"role":"assistant","content":""},"generate_s":0.0,"step_s":0.0}],"final_observation":[{"role":"use'
    'r","content":"done"}],"tokens":{"ids":"i4z:eAFjZGJmYWXjZGPAAQAD+gAl","logprobs":"f4:AAAAAAAAAAAAgICAv76/v'
    'w==","versions":[[7,2],[8,2]]}}'
    "\n"
)
"""A record as it stands in files."""


def test_a_recorded_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(RECORD)
    (read,) = read_trajectories(path)
    assert [segment.token_ids.tolist() for segment in read.segments()] == [[1, 2, 3, 4, 5, 6], [9, 6]]
    assert read.segments()[0].versions.tolist() == [-1, -1, 7, 7, -1, 8]
    assert [turn.reply.forked for turn in read.turns] == [False, False, True, False]
    assert read.turns[0].observation[0].content == "\u00e9"
    assert read.turns[0].reply.metadata == {"usage": {"prompt": 2}}
    assert (read.turns[1].reply.stop_reason, read.turns[1].reward, read.turns[1].step_s) == ("length", 1.0, 0.2)
    assert (read.reward, read.info, read.final_observation[0].content) == (1.0, {"index": 3}, "done")


@cache
def bomb() -> str:
    """64 KiB that would unpack to 64 MiB."""
    return "i4z:" + base64.b64encode(zlib.compress(bytes(1 << 26))).decode()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda record: record["tokens"].update(ids="i4:!"), "not a trajectory"),
        (lambda record: record["tokens"].update(ids="i4z:AAAA"), "not a trajectory"),
        (lambda record: record["tokens"].update(ids="f4:AAAA"), "is expected"),
        (lambda record: record["tokens"].update(ids="i4:AAAAAA=="), "the number of tokens"),
        (lambda record: record["tokens"].update(versions=[[3, 2]]), "the number of versions differs"),
        (lambda record: record["tokens"].update(versions=[[3, 10**12]]), "the number of versions differs"),
        (lambda record: record["tokens"].update(versions=[[3, 2], [3, -1]]), "the number of versions differs"),
        (lambda record: record["tokens"].update(ids=bomb()), "the number of tokens"),
        (lambda record: record.update(reward="much"), "reward is not float"),
        (lambda record: record.update(answer=[3]), "answer is not str"),
        (lambda record: record.update(tags=[3]), "tags is not list"),
        (lambda record: record.update(rewards={"white": "x"}), "rewards is not dict"),
        (lambda record: record["turns"][0].update(calls_s=["long"]), "calls_s is not list"),
        (lambda record: record["turns"][0].update(generate_s=None), "generate_s is not float"),
        (lambda record: record.pop("tokens"), "not a trajectory"),
        (lambda record: record["turns"][0].pop("tokens"), "not a trajectory"),
    ],
)
def test_damaged_tokens_are_named(tmp_path: Path, change: Any, reason: str) -> None:
    reply = Reply(Message(role="assistant"), [1, 70_000], [2], [-0.5], [3])
    record = Trajectory("e", "env", "task", turns=[Turn([], reply)]).to_dict()
    change(record)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(UsageError, match=reason):
        list(read_trajectories(path))


def test_what_a_record_claims_takes_no_memory(tmp_path: Path) -> None:
    """64 MiB in 64 KiB of text are not unpacked where the turns have three tokens."""
    damaged = json.loads(record())
    damaged["tokens"]["ids"] = bomb()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="the number of tokens"):
            Trajectory.from_dict(damaged)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_a_record_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(RECORD.replace('"schema":6', '"schema":7', 1))
    damage: list[str] = []
    with pytest.raises(UsageError, match="reads up to version 6"):
        list(read_trajectories(path, on_damage=damage.append))
    assert damage == []


def test_a_damaged_version_costs_its_record_only(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.jsonl", record()
    path.write_text(re.sub(r'"schema": ?6', '"schema": "5"', whole, count=1) + f"\n{whole}\n")
    damage: list[str] = []
    assert len(list(read_trajectories(path, on_damage=damage.append))) == 1
    assert len(damage) == 1


def test_the_program_in_the_docs_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "decisions" / "trajectories.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    path = tmp_path / "train.jsonl"
    path.write_text(RECORD)
    exec(program.replace("runs/first/trajectories/train.jsonl", str(path)), {})
    assert capsys.readouterr().out == "1.0 3\n1.0 1\n"


def record() -> str:
    reply = Reply(Message(role="assistant"), [1, 70_000], [2, 3], [-0.5] * 2, [3] * 2)
    return json.dumps(Trajectory("e", "env", "task", turns=[Turn([Message(role="user")], reply)]).to_dict())


@given(
    start=st.integers(len('{"schema": 6, '), len(record())),
    length=st.integers(0, 12),
    text=st.text(st.sampled_from('"{}[],:0123456789.-eutzf=A'), max_size=6),
)
def test_any_damaged_record(start: int, length: int, text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path, whole = tmp_path_factory.mktemp("damage") / "a.jsonl", record()
    path.write_text(f"{whole[:start]}{text}{whole[start + length :]}\n{whole}\n")
    damage: list[str] = []
    assert len(list(read_trajectories(path, on_damage=damage.append))) + len(damage) == 2


def test_without_tokens_no_numpy_is_loaded() -> None:
    """Evaluating starts quickly where the endpoint gives no tokens."""
    program = (
        "import sys, forge_env.endpoint.policy, forge_env.rollout.episode\n"
        "from forge_env.trajectory import *\nfrom forge_env.policy import Reply\nfrom forge_env.types import Message\n"
        "reply = Reply(Message(role='assistant'))\nassert reply.follow(()) == ()\n"
        "played = Trajectory('e', 'env', 'task', turns=[Turn([], reply)])\n"
        "assert Trajectory.from_dict(played.to_dict()) == played and not played.segments()\n"
        "print(played.oldest_version, 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == (
        "-1 False\n"
    )


def test_images_are_kept() -> None:
    seen = Message(role="user", content="What is it?", images=("data:image/png;base64,AA==",))
    turn = Turn([seen], Reply(Message(role="assistant", content="A dot.")))
    trajectory = Trajectory(id="i", environment="e", task_id="t", turns=[turn], final_observation=[seen])
    again = Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict())))
    assert again.messages == trajectory.messages == [seen, turn.message, seen]
