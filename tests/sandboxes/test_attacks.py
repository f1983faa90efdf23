"""The built-in attacks on both engines, and what they could not show. The large suite is in tests/hostile."""

from __future__ import annotations

import pytest

from forge_env.sandbox import SandboxEngine
from forge_env.sandbox.attacks import ATTACKS
from forge_env.sandbox.audit import Attack, try_attack

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_contained(engine: SandboxEngine, attack: Attack) -> None:
    assert await try_attack(engine, attack) == []
    assert "poisoned" not in engine.stats()


async def test_no_memory_of_earlier_programs(engine: SandboxEngine) -> None:
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
