"""An attack that succeeds is noticed: shown where nothing guards against it, for all that then harm nobody."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from forge_env.errors import SandboxError
from forge_env.sandbox import ExecResult, Sandbox, SandboxEngine, SandboxSpec, Usage
from forge_env.sandbox_audit.attacks import ATTACKS, LEAK, Attack
from forge_env.sandbox_audit.audit import Neighbour, carry_out, differences, neighbour, try_attack
from tests.forge_env.sandbox.plain import PlainEngine
from tests.sandboxes.conftest import engine_fixture

from .unguarded import UnguardedSandbox, all_powerful

pytestmark = pytest.mark.asyncio(loop_scope="module")
INNOCENT = Attack("innocent", "leftovers", "Do nothing.", "print(1)")


def _named(*groups: str) -> list[object]:
    found = [attack for attack in ATTACKS if attack.group in groups and attack.unguarded]
    return [pytest.param(attack, id=f"{attack.group}: {attack.name}") for attack in found]


engine = engine_fixture(warm=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def witness(engine: SandboxEngine) -> AsyncIterator[Neighbour]:
    async with neighbour(engine) as witness:
        yield witness


@pytest.mark.parametrize("attack", _named("escape", "network"))
async def test_reaching_the_host_is_noticed(attack: Attack, tmp_path: Path) -> None:
    if attack.unguarded == "root" and not all_powerful():
        pytest.skip("only root could succeed")
    problems = await carry_out(UnguardedSandbox(tmp_path), attack)
    assert [problem for problem in problems if problem.startswith((LEAK, "the engine read"))], problems


@pytest.mark.parametrize("attack", _named("cheating"))
async def test_cheating_is_noticed(attack: Attack, tmp_path: Path) -> None:
    assert "it passed its tests" in await carry_out(UnguardedSandbox(tmp_path), attack)


@pytest.mark.parametrize("attack", _named("leftovers"))
async def test_leaving_something_is_noticed(engine: SandboxEngine, witness: Neighbour, attack: Attack) -> None:
    async with engine.session() as sandbox:
        problems = await try_attack(PlainEngine(sandbox), attack, witness)
    assert any(
        "were left" in problem or "no longer works" in problem or "does not work" in problem for problem in problems
    ), problems


async def test_innocence_is_not_accused(engine: SandboxEngine, witness: Neighbour) -> None:
    async with engine.session() as sandbox:
        assert await try_attack(PlainEngine(sandbox), INNOCENT, witness) == []
    honest = "def f(x): return {1: 70417, 2: 80231}[x]"
    async with engine.session() as sandbox:
        attack = Attack("honest", "cheating", "Be honest.", honest, earns=2)
        assert await try_attack(PlainEngine(sandbox), attack, witness) == []


async def test_every_change_is_noticed(witness: Neighbour) -> None:
    def look(now: object) -> ExecResult:
        return ExecResult(0, stdout=json.dumps(now))

    assert differences(look(witness.usual), witness.usual) == []
    for name, value in witness.usual.items():
        changed = {**witness.usual, name: value + 1 if isinstance(value, int) else "changed"}
        assert [problem for problem in differences(look(changed), witness.usual) if problem.startswith(name)], name
    assert differences(ExecResult(None, 9), witness.usual)


async def test_an_attack_that_ends_late_each_time_is_noticed(tmp_path: Path) -> None:
    class Late(UnguardedSandbox):
        def __init__(self, *ends: float) -> None:
            super().__init__(tmp_path)
            self.ends = list(ends)

        async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
            return replace(await super().exec(argv), usage=Usage(wall_s=self.ends.pop(0)))

    assert await carry_out(Late(9.0, 8.0, 9.0, 0.1), INNOCENT) == ["ended late 3 times, at best after 8.0s"]
    assert await carry_out(Late(9.0, 9.0, 0.1, 0.1), INNOCENT) == []


async def test_a_lost_sandbox_is_noticed(engine: SandboxEngine, witness: Neighbour) -> None:
    class Losing(PlainEngine):
        async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
            raise SandboxError("gone")

    assert any("lost a sandbox" in problem for problem in await try_attack(Losing(witness.sandbox), INNOCENT, witness))


async def test_harm_to_the_neighbour_is_noticed_once(engine: SandboxEngine) -> None:
    async with neighbour(engine) as victim:
        assert await victim.work() == []
        await victim.sandbox.write_file("mine", b"touched")
        assert await victim.work() == ["the neighbour's file was changed"]
        assert await victim.work() == []
        await victim.session.run("turns = 40")
        assert await victim.work() == ["the neighbour's session lost its state"]
        await victim.process.kill()
        assert await victim.work() == ["the neighbour's process ended"]
        await victim.session.close()
        assert "session has ended" in (await victim.work())[0]
        await engine.release(victim.sandbox)
        assert await victim.work() != []  # what is missed first depends on how far the wipe is
        assert await victim.work() == []
