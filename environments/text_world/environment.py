"""Environment that answers each command with the player's view, until all wanted things are in the target room."""

from __future__ import annotations

from random import Random
from typing import Literal

from pydantic import Field

import forge_env as fe
from environments.seeds import draw_seed
from environments.text_world.world import draw_world
from forge_env.environment.tool_environment import ToolEnvironmentConfig
from forge_env.rewards.spans import last_between
from forge_env.types import Action, Message, Observation, Task

Level = Literal[1, 2, 3, 4]


class TextWorldConfig(ToolEnvironmentConfig):
    """World selection and turn limit."""

    max_turns: int = Field(80, ge=1)
    """Maximum number of messages, including those without a valid command."""
    max_tool_calls: int = Field(0, ge=0, le=0)
    """Always 0: there are no tools."""
    levels: list[Level] = Field([1, 2, 3, 4], min_length=1)
    """1: 4 rooms; 2: 7 rooms, 1 locked door; 3: 11 rooms, 2 locked doors; 4: 15 rooms, 3 locked doors, 2 things."""


def done(env: TextWorld) -> float:
    """1 if all wanted things are in the target room; otherwise 0."""
    return float(env.world.done(env.state))


def rooms_seen(env: TextWorld) -> float:
    """Number of different rooms visited."""
    return float(len(env.seen))


def not_possible(env: TextWorld) -> float:
    """Number of messages without a possible command."""
    return float(env.refused)


class TextWorld(fe.ToolEnvironment):
    """Find things in a house of up to fifteen rooms with locked doors, and bring them to a target room."""

    api_version = 1
    config_class = TextWorldConfig
    system_prompt = (
        "You are in a house of many rooms. Each message is one command: <action>go north</action>, "
        "<action>take lamp</action>, <action>drop lamp</action>, <action>unlock east</action> (with the key of the "
        "door's color) or <action>look</action>. You can carry everything at once."
    )
    config: TextWorldConfig
    rubric = fe.Rubric([done], metrics=[rooms_seen, not_possible])

    def task(self, split: str, index: int) -> Task:
        """The `index`-th world of `split`; one world in five belongs to `eval`."""
        rng = Random(f"text_world/{self.config.seed}/{split}/{index}")
        level = rng.choice(self.config.levels)
        seed = draw_seed(rng, split)
        world = draw_world(seed, level)
        things = " and ".join(f"the {name}" for name in world.wanted)
        return Task(
            id=f"{split}-{self.config.seed}-{index}",
            prompt=f"Bring {things} to the {world.target} and drop what you brought there.",
            data={"public_world": seed},
            difficulty=level,
            tags=[f"{len(world.exits)}_rooms"],
            split=split,
        )

    def gold_actions(self, task: Task) -> list[Action] | None:
        """The commands of a shortest plan."""
        plan = draw_world(*_drawn_from(task)).plan()
        return None if plan is None else [f"<action>{command}</action>" for command in plan]

    def prompt(self, task: Task) -> Observation:
        """The task followed by the description of the first room."""
        world = draw_world(*_drawn_from(task))
        *system, job = super().prompt(task)
        return [*system, Message(role="user", content=f"{job.content}\n{world.describe(world.start)}")]

    async def setup(self, task: Task) -> None:
        """Draw the world and reset the player's state and counters."""
        self.world = draw_world(*_drawn_from(task))
        self.state = self.world.start
        self.seen = {self.state.room}
        self.refused = 0

    def is_final(self, message: Message) -> bool:
        """Always False: the game ends once all wanted things are in the target room, or with the last turn."""
        return False

    async def respond(self, message: Message) -> Observation:
        """Apply a command and describe the room; an impossible command is refused."""
        command = command_of(message.content)
        if command in self.world.commands(self.state):
            self.state = self.world.after(self.state, command)
            self.seen.add(self.state.room)
            if self.world.done(self.state):
                self.submit(command)
                return []
            notice = ""
        elif command == "look":
            notice = ""
        else:
            self.refused += 1
            notice = f"You can't do that: {command[:40]!r}. "
        return [Message(role="user", content=notice + self.world.describe(self.state))]


def _drawn_from(task: Task) -> tuple[str, int]:
    return task.data["public_world"], task.difficulty


def command_of(text: str) -> str:
    """The last tagged command of a message, or the whole message, normalized to lower case and single spaces."""
    tagged = last_between(text, "<action>", "</action>")
    return " ".join((text if tagged is None else tagged)[:200].lower().split())
