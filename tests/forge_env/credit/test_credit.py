"""Credit of tool calls: which call decided an episode, and what can't be told."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import forge_env as fe
from forge_env.cli.main import main
from forge_env.config.evaluation import EvaluationConfig
from forge_env.config.reader import changed_yaml, read_as, render
from forge_env.config.recipe import RunConfig
from forge_env.credit.recorded import recorded_episode
from forge_env.errors import UsageError
from forge_env.trajectory import Trajectory, TrajectoryWriter, read_trajectories
from forge_env.types import Message, Task, ToolSpec

DOORS = ("red", "green", "blue", "white")
ROOMS = 5
DECISIVE = 3
"""Turn whose door decides the episode."""


async def opened(env: Vault, task: Task) -> float:
    return float(env.is_open)


class Vault(fe.ToolEnvironment):
    """Five rooms in a row; only the door chosen in the third matters."""

    api_version = 1
    rubric = fe.Rubric(opened)
    answers: ClassVar[dict[int, list[str]]] = {}
    """Room -> further words of its answers, each used once."""
    breaks: ClassVar[Iterator[bool]] = iter(())
    """Whether the next tool calls fail."""

    def num_tasks(self, split: str) -> int:
        return 50

    def task(self, split: str, index: int) -> Task:
        return Task(id=f"{split}-{index}", prompt="Go.", data={"good": random.Random(index).choice(DOORS)}, split=split)

    def prompt(self, task: Task) -> list[Message]:
        return [Message(role="user", content=f"Go through {ROOMS} doors.{self._words(0)}")]

    async def setup(self, task: Task) -> None:
        self.room, self.is_open, self.good = 0, False, task.data["good"]

    def _words(self, room: int) -> str:
        words = self.answers.get(room, [])
        return f" {words.pop()}" if words else ""

    @fe.tool
    async def go(self, door: str) -> str:
        """Go through a door.

        Args:
            door: its color.
        """
        self.room += 1
        if next(Vault.breaks, False):
            raise RuntimeError("the door is stuck")
        if self.room == DECISIVE:
            self.is_open = door == self.good
        if self.room == ROOMS:
            self.submit(door)
        return f"You are in room {self.room}.{self._words(self.room)}"


class Rooms(Vault):
    """The same without tools: every message is a door."""

    def is_final(self, message: Message) -> bool:
        return False

    async def respond(self, message: Message) -> list[Message]:
        return [Message(role="user", content=await self.go(message.content))]


rng = random.Random(0)


def guess(messages: list[Message], tools: list[ToolSpec]) -> Message:
    """Go through a random door."""
    return fe.call_tool("go", door=rng.choice(DOORS))


def stubborn(messages: list[Message], tools: list[ToolSpec]) -> Message:
    """Go through the red door."""
    return fe.call_tool("go", door="red")


def pairs(messages: list[Message], tools: list[ToolSpec]) -> Message:
    """Go through two random doors at once."""
    calls = [fe.call_tool("go", door=rng.choice(DOORS)).tool_calls[0] for _ in range(2)]
    return Message(
        role="assistant", tool_calls=[call.model_copy(update={"id": f"c{i}"}) for i, call in enumerate(calls)]
    )


def speak(messages: list[Message], tools: list[ToolSpec]) -> str:
    """Say a random door."""
    return rng.choice(DOORS)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    rng.seed(0)
    Vault.answers, Vault.breaks = {}, iter(())


def recorded(out: Path, policy: str = "guess", env: str = "Vault", epochs: int = 1, tasks: int = 20) -> Path:
    fe.evaluate(f"{__name__}:{env}", f"{__name__}:{policy}", out=out, epochs=epochs, num_tasks=tasks)
    return out


def episodes(root: Path, reward: float = 1.0) -> list[Trajectory]:
    return [one for one in read_trajectories(root / "trajectories" / "eval.jsonl") if one.reward == reward]


def credit(root: Path, episode: Trajectory, *flags: str) -> dict[str, Any]:
    assert main(["credit", str(root), episode.id, "--out", str(root / "out"), *flags]) == 0
    content: dict[str, Any] = json.loads((root / "out" / "credit.json").read_text())
    return content


def values(content: dict[str, Any]) -> list[float]:
    return [call["credit"]["value"] for call in content["calls"]]


def is_clear(call: dict[str, Any]) -> bool:
    return not call["credit"]["low"] <= 0 <= call["credit"]["high"]


def test_the_decisive_call_has_the_credit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = recorded(tmp_path / "e")
    episode = episodes(root)[0]
    content = credit(root, episode)
    assert [call["turn"] for call in content["calls"] if is_clear(call)] == [DECISIVE]
    best = content["calls"][DECISIVE - 1]
    assert best["credit"]["value"] == pytest.approx(0.75, abs=0.3)
    assert (best["name"], best["after"]["value"]) == ("go", 1.0)
    assert 0 < best["repeated"] < 1
    assert sum(values(content)) == pytest.approx(1.0 - content["calls"][0]["before"]["value"])
    assert content["cost"]["continuations"] == 5 * 16
    assert content["cost"]["replayed"] == 16 * (0 + 1 + 2 + 3 + 4)
    assert content["cost"]["turns"] == 16 * (5 + 4 + 3 + 2 + 1)
    lines = capsys.readouterr().out.splitlines()
    marked = [line for line in lines if "\u2588" in line]
    assert len(marked) == 1
    assert marked[0].split()[0] == str(DECISIVE)


@pytest.mark.slow
def test_the_decisive_call_is_identified_in_95_percent_of_episodes(tmp_path: Path) -> None:
    root = recorded(tmp_path / "e", epochs=4, tasks=50)
    wins = episodes(root)[:40]
    assert len(wins) == 40
    right = 0
    for episode in wins:
        content = credit(root, episode, "--json")
        best = max(content["calls"], key=lambda call: abs(call["credit"]["value"]))
        right += best["turn"] == DECISIVE and is_clear(best)
    assert right >= 38


def test_one_turn_needs_only_its_own_continuations(tmp_path: Path) -> None:
    root = recorded(tmp_path / "e")
    content = credit(root, episodes(root)[0], "--turn", str(DECISIVE), "-n", "8")
    assert [call["turn"] for call in content["calls"]] == [DECISIVE]
    assert content["cost"]["continuations"] == 2 * 8


def test_messages_without_calls_have_credits(tmp_path: Path) -> None:
    root = recorded(tmp_path / "e", "speak", "Rooms")
    content = credit(root, episodes(root)[0])
    assert [call["turn"] for call in content["calls"] if is_clear(call)] == [DECISIVE]
    assert content["calls"][0]["name"] == ""
    assert content["calls"][0]["arguments"] in DOORS


def test_calls_of_one_message_are_told_apart(tmp_path: Path) -> None:
    root = recorded(tmp_path / "e", "pairs", tasks=50)
    episode = episodes(root)[0]
    content = credit(root, episode, "--model", f"{__name__}:guess")
    calls = content["calls"]
    assert [call["turn"] for call in calls] == [1, 1, 2, 2, 3, 3]
    assert [number for number, call in enumerate(calls) if is_clear(call)] == [2]  # the first call of the second turn


def test_inevitable_call_has_no_credit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = recorded(tmp_path / "e", "stubborn")
    content = credit(root, episodes(root)[0])
    assert values(content) == [0.0] * ROOMS
    assert {call["repeated"] for call in content["calls"]} == {1.0}
    assert "turn 1 and 4 more: every continuation made the same call again" in capsys.readouterr().out


def test_credits_end_where_answers_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Vault.answers = {4: [f"It is {time}." for time in range(20)]}
    root = recorded(tmp_path / "e")
    Vault.answers = {4: [f"It is {time}." for time in range(20, 1000)]}
    content = credit(root, episodes(root)[0])
    assert content["differs"] == 4
    assert [call["credit"] is None for call in content["calls"]] == [False, False, False, True, True]
    assert is_clear(content["calls"][DECISIVE - 1])
    assert (
        "its answer to turn 4 differs when the actions are played again (recorded: 'You are" in capsys.readouterr().out
    )


def test_a_reward_that_differs_leaves_only_the_last_call_unknown(tmp_path: Path) -> None:
    root = recorded(tmp_path / "e")
    path = root / "trajectories" / "eval.jsonl"
    episode = episodes(root)[0]
    episode.reward = 0.5
    path.unlink()
    with_writer(path, [episode])
    content = credit(root, episode)
    assert (content["differs"], content["difference"]) == (5, "recorded: reward 0.5; now: reward 1")
    assert [call["credit"] is None for call in content["calls"]] == [False] * 4 + [True]


def with_writer(path: Path, trajectories: Sequence[Trajectory]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.stem}.index.jsonl").unlink(missing_ok=True)
    writer = TrajectoryWriter(path)
    for trajectory in trajectories:
        writer.write(trajectory)
    writer.close()


def test_lost_continuations_are_counted_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = recorded(tmp_path / "e")
    episode = episodes(root)[0]
    Vault.breaks = iter([False] * ROOMS + [True] * 7)  # the first episode verifies
    content = credit(root, episode)
    assert content["lost"] == 7
    assert content["cost"]["continuations"] == ROOMS * 16
    assert "7 continuations were lost, and don't count" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [("--model", "gold"), ("--turn", "6"), ("--turn", "0"), ("-n", "1")])
def test_what_can_not_be_estimated_is_refused(flags: tuple[str, ...], tmp_path: Path) -> None:
    root = recorded(tmp_path / "e")
    assert main(["credit", str(root), episodes(root)[0].id, *flags]) == 2
    assert not (root / "credit").exists() or not list((root / "credit").rglob("*"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["credit", *arguments]) == 2
    return capsys.readouterr().err


def test_bad_input_has_one_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = recorded(tmp_path / "e")
    name = episodes(root)[0].id
    assert "has no episode 'nobody'" in refused(capsys, str(root), "nobody")
    assert main(["credit", str(root), name, "--model", "m", "--base-url", "http://localhost:9/v1"]) == 1
    assert "no connection to http://localhost:9/v1" in capsys.readouterr().err
    Vault.breaks = iter([False] * ROOMS + [True] * 1000)
    assert main(["credit", str(root), name]) == 1
    assert "all continuations were lost: " in capsys.readouterr().err
    Vault.breaks = iter([True] * 1000)
    assert main(["credit", str(root), name]) == 1
    assert "the door is stuck" in capsys.readouterr().err
    Vault.breaks = iter(())
    Vault.answers = {0: ["Now."]}
    assert "its first observation differs" in refused(capsys, str(root), name)
    config = (root / "config.yaml").read_text()
    (root / "config.yaml").write_text(config.replace(":Vault", ":Gone"))
    assert main(["credit", str(root), name]) == 1
    assert "has no attribute 'Gone'" in capsys.readouterr().err
    (root / "config.yaml").unlink()
    assert "the environment and its settings are not recorded" in refused(capsys, str(root), name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"valid": False, "error": "it broke"}, "was lost: it broke"),
        ({"turns": []}, "has no turns"),
        ({"rewards": {"white": 1.0}}, "several seats"),
        ({"task_id": "eval-3"}, "has changed since"),
    ],
)
def test_episodes_that_can_not_be_continued_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = recorded(tmp_path / "e", tasks=4)
    episode = next(read_trajectories(root / "trajectories" / "eval.jsonl"))
    for name, value in changes.items():
        setattr(episode, name, value)
    with_writer(root / "trajectories" / "eval.jsonl", [episode])
    assert message in refused(capsys, str(root), episode.id)


def training_run(root: Path, source: Path) -> Trajectory:
    """The folder of a training run with an episode."""
    episode = episodes(source)[0]
    episode.id, episode.info, episode.group, episode.member = "train-0-0", {}, 0, 0
    config = RunConfig.model_validate({"environment": {"name": f"{__name__}:Vault"}})
    with_writer(root / "trajectories" / "train.jsonl", [episode])
    (root / "config.yaml").write_text(render(config))
    return episode


def test_episodes_of_training_runs_have_credits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "run"
    episode = training_run(root, recorded(tmp_path / "e"))
    assert "has no checkpoint to continue with" in refused(capsys, str(root), episode.id)
    content = credit(root, episode, "--model", f"{__name__}:guess")
    assert [call["turn"] for call in content["calls"] if is_clear(call)] == [DECISIVE]


def test_a_training_run_continues_with_its_newest_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "run"
    episode = training_run(root, recorded(tmp_path / "e"))
    for step in ("step-1", "step-2"):
        model = root / "checkpoints" / step / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    config = recorded_episode(root, episode, kind="train", changed={}).config
    assert config.model == f"vllm:{root}/checkpoints/step-2/model"
    assert (config.temperature, config.max_tokens) == (1.0, RunConfig.model_fields["grpo"].default.max_tokens_per_turn)


def changed_config(root: Path, **settings: Any) -> None:
    config = read_as(EvaluationConfig, root / "config.yaml").model_copy(update=settings)
    (root / "config.yaml").write_text(changed_yaml(config))


def test_another_endpoint_gets_neither_the_key_nor_the_socket_of_the_recorded_one(tmp_path: Path) -> None:
    root = recorded(tmp_path / "e")
    address = "https://llm.corp/v1"
    changed_config(root, model="m", base_url=address, api_key_env="CORP_KEY", uds="/run/corp.sock")

    def endpoint(**changed: Any) -> tuple[str, str | None]:
        config = recorded_episode(root, episodes(root)[0], kind="eval", changed=changed).config
        return config.api_key_env, config.uds

    other = "https://api.other/v1"
    assert endpoint(model="n") == endpoint(base_url=address) == ("CORP_KEY", "/run/corp.sock")
    assert endpoint(model="n", base_url=other) == ("OPENAI_API_KEY", None)
    assert endpoint(base_url=other, api_key_env="OTHER_KEY") == ("OTHER_KEY", None)


def test_redacted_settings_are_refused_unless_changed(tmp_path: Path) -> None:
    root = recorded(tmp_path / "e")
    changed_config(root, sandbox_options={"api_key": "(redacted API_KEY)"})
    with pytest.raises(UsageError, match="sandbox_options"):
        recorded_episode(root, episodes(root)[0], kind="eval", changed={"model": "n"})


def test_wrong_options_are_refused_for_training_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "run"
    episode = training_run(root, recorded(tmp_path / "e"))
    message = refused(capsys, str(root), episode.id, "--model", f"{__name__}:guess", "--temperature", "-1")
    assert "temperature" in message
    assert "pydantic" not in message
    message = refused(capsys, str(root), episode.id, "--model", "m", "--api-key-env", "not a name")
    assert "should be the name of an environment variable" in message


def test_episodes_of_two_evaluations_have_two_folders(tmp_path: Path) -> None:
    root = tmp_path / "run"
    episode = training_run(root, recorded(tmp_path / "e"))
    for kind in ("eval-00010", "eval-00020"):
        with_writer(root / "trajectories" / f"{kind}.jsonl", [episode])
        flags = ("--kind", kind, "--model", f"{__name__}:guess", "--turn", "3", "-n", "2")
        assert main(["credit", str(root), episode.id, *flags]) == 0
    names = {path.name for path in (root / "credit").iterdir()}
    assert names == {f"eval-00010-{episode.id}", f"eval-00020-{episode.id}"}
