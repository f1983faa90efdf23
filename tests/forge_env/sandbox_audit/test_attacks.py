"""Every hostile program of the catalogue on both engines, next to a neighbour that must not be affected."""

from __future__ import annotations

import pytest

from forge_env.sandbox import SandboxEngine
from forge_env.sandbox_audit.attacks import ATTACKS, Attack
from forge_env.sandbox_audit.audit import Neighbour, try_attack

pytestmark = pytest.mark.asyncio(loop_scope="module")


def _parameter(attack: Attack) -> object:
    # Attacks that end at a time limit are slow; conftest.py marks Docker's.
    marks = [pytest.mark.slow, pytest.mark.core] if attack.group in ("starvation", "cheating") else []
    return pytest.param(attack, id=f"{attack.group}: {attack.name}", marks=marks)


@pytest.mark.parametrize("attack", [_parameter(attack) for attack in ATTACKS])
async def test_contained(engine: SandboxEngine, witness: Neighbour, attack: Attack) -> None:
    before = engine.stats()
    assert await try_attack(engine, attack, witness) == []
    after = engine.stats()
    for loss in ("lost", "poisoned"):
        assert after.get(loss, 0) == before.get(loss, 0), f"the sandbox was {loss}, and replaced: {after.get('dirt')}"


async def test_no_memory_of_earlier_programs(engine: SandboxEngine, witness: Neighbour) -> None:
    scan = (
        "import re\nneedle = b'NEEDLE' + b'-77'\nfound = 0\nfor line in open('/proc/self/maps'):\n"
        "    a, b = (int(x, 16) for x in line.split()[0].split('-'))\n    if 'rw' in line.split()[1]:\n"
        "        try:\n            f = open('/proc/self/mem', 'rb', 0); f.seek(a)\n"
        "            found += f.read(b - a).count(needle)\n"
        "        except (OSError, ValueError): pass\nprint(found <= 1)\n"
    )
    for _ in range(3):
        async with engine.session() as sandbox:
            await sandbox.run_python("x = 'NEEDLE' + '-77'", stdin="NEEDLE-77")
            assert (await sandbox.run_python(scan)).stdout == "True\n"
    assert await witness.work() == []
