"""A world drawn by seed, with rooms on a grid, locked doors, keys and things; its rules and a shortest-plan solver."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

WAYS = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}
BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}
ROOMS = (
    *("hall", "kitchen", "cellar", "library", "garden", "attic", "study", "pantry", "chapel", "stable", "workshop"),
    *("gallery", "nursery", "laundry", "greenhouse", "armory"),
)
COLORS = ("red", "blue", "green")
THINGS = ("lamp", "violin", "telescope", "teapot", "globe", "mirror")
SIZES = {1: (4, 0, 1), 2: (7, 1, 1), 3: (11, 2, 1), 4: (15, 3, 2)}
"""Level -> number of rooms, locked doors and wanted things."""
TRIES = 1000


@dataclass(frozen=True, slots=True)
class State:
    """Game state: the player's room, the place of each thing and key (a room or "you"), and the colors still locked."""

    room: str
    places: tuple[tuple[str, str], ...]
    locked: frozenset[str]

    def at(self, place: str) -> list[str]:
        """Names of the things in a room, or carried by the player if `place` is "you"."""
        return [name for name, room in self.places if room == place]


@dataclass(frozen=True, slots=True)
class World:
    """Exits of each room, door colors by `(room, way)`, the start state, and the wanted things with their target."""

    exits: Mapping[str, Mapping[str, str]]
    doors: Mapping[tuple[str, str], str]
    start: State
    wanted: tuple[str, ...]
    target: str

    def done(self, state: State) -> bool:
        """Whether every wanted thing is in the target room."""
        return all(room == self.target for name, room in state.places if name in self.wanted)

    def commands(self, state: State) -> list[str]:
        """Possible commands in a state, in a stable order."""
        commands = []
        for way in self.exits[state.room]:
            color = self.doors.get((state.room, way))
            if color not in state.locked:
                commands.append(f"go {way}")
            elif f"{color} key" in state.at("you"):
                commands.append(f"unlock {way}")
        commands += [f"take {name}" for name in state.at(state.room)]
        return commands + [f"drop {name}" for name in state.at("you")]

    def after(self, state: State, command: str) -> State:
        """The state after `command`, one of `commands(state)`."""
        verb, _, what = command.partition(" ")
        if verb == "go":
            return replace(state, room=self.exits[state.room][what])
        if verb == "unlock":
            return replace(state, locked=state.locked - {self.doors[state.room, what]})
        target = "you" if verb == "take" else state.room
        return replace(state, places=tuple((name, target if name == what else at) for name, at in state.places))

    def describe(self, state: State) -> str:
        """Describe the current room, its exits and things, and the things carried."""
        exits = []
        for way in self.exits[state.room]:
            color = self.doors.get((state.room, way))
            lock = "" if color is None else f" (the {color} door, {'locked' if color in state.locked else 'open'})"
            exits.append(way + lock)
        here, held = state.at(state.room), state.at("you")
        return (
            f"You are in the {state.room}. Exits: {', '.join(exits)}. "
            f"Here: {', '.join(here) or 'nothing'}. You carry: {', '.join(held) or 'nothing'}."
        )

    def solvable_with(self, colors: frozenset[str]) -> bool:
        """Whether all wanted things can reach the target if only doors of these colors may be unlocked."""
        places = dict(self.start.places)
        reached, grown = {self.start.room}, True
        while grown:
            usable = {color for color in colors if places.get(f"{color} key") in reached}
            grown = False
            for room in sorted(reached):
                for way, following in self.exits[room].items():
                    color = self.doors.get((room, way))
                    if following not in reached and (color is None or color in usable):
                        reached.add(following)
                        grown = True
        return {self.target, *(places[name] for name in self.wanted)} <= reached

    def plan(self) -> list[str] | None:
        """A shortest list of commands that solves the world, by breadth-first search; None if it can't be solved."""
        before: dict[State, tuple[State, str] | None] = {self.start: None}
        waiting = deque([self.start])
        while waiting:
            state = waiting.popleft()
            if self.done(state):
                return list(_way_back(before, state))[::-1]
            for command in self.commands(state):
                if self._is_worth_it(state, command) and (following := self.after(state, command)) not in before:
                    before[following] = (state, command)
                    waiting.append(following)
        return None

    def _is_worth_it(self, state: State, command: str) -> bool:
        """Whether a command can be part of a shortest plan: dropping things elsewhere or taking others never helps."""
        verb, _, what = command.partition(" ")
        if verb == "take":
            return what.endswith(" key") or (what in self.wanted and state.room != self.target)
        return verb != "drop" or (what in self.wanted and state.room == self.target)


def _way_back(before: Mapping[State, tuple[State, str] | None], state: State) -> Iterator[str]:
    while (step := before[state]) is not None:
        state, command = step
        yield command


@lru_cache(maxsize=64)
def draw_world(seed: str, level: int) -> World:
    """Draw the world of a seed: it is solvable, and only with all of its keys."""
    rng = Random(f"text_world/{seed}/{level}")
    for _ in range(TRIES):
        world = _draw(rng, *SIZES[level])
        keys = world.start.locked
        if world.solvable_with(keys) and not any(world.solvable_with(keys - {color}) for color in keys):
            return world
    raise AssertionError(f"no world of level {level} in {TRIES} tries")


def _draw(rng: Random, count: int, locks: int, things: int) -> World:
    """Draw a world: rooms form a tree rooted at the first, and randomly chosen edges are locked doors."""
    names = rng.sample(ROOMS, count)
    spots = {(0, 0): names[0]}
    exits: dict[str, dict[str, str]] = {name: {} for name in names}
    edges: list[tuple[str, str]] = []
    for name in names[1:]:
        free = [
            (spot, way) for spot in spots for way, (x, y) in WAYS.items() if (spot[0] + x, spot[1] + y) not in spots
        ]
        spot, way = rng.choice(free)
        spots[spot[0] + WAYS[way][0], spot[1] + WAYS[way][1]] = name
        exits[spots[spot]][way] = name
        exits[name][BACK[way]] = spots[spot]
        edges.append((spots[spot], way))
    doors: dict[tuple[str, str], str] = {}
    for color, (room, way) in zip(COLORS, rng.sample(edges, locks), strict=False):
        doors[room, way] = doors[exits[room][way], BACK[way]] = color
    wanted = tuple(rng.sample(THINGS, things))
    others = [name for name in THINGS if name not in wanted][:2]
    keys = [f"{color} key" for color in COLORS[:locks]]
    target = rng.choice(names)
    elsewhere = [name for name in names if name != target]
    places = tuple((name, rng.choice(elsewhere)) for name in [*wanted, *others, *keys])
    return World(exits, doors, State(names[0], places, frozenset(COLORS[:locks])), wanted, target)
