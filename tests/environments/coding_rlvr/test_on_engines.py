"""The same episodes on real engines as on the stand-in: what the other tests assume of sandboxes is true."""

from __future__ import annotations

import pytest

from environments.coding_rlvr import CodingRLVR, CodingRLVRConfig
from environments.coding_rlvr.conversation import as_answer
from forge_env.sandbox import SandboxEngine
from tests.environments.coding_rlvr.fake_engine import FakeEngine
from tests.environments.coding_rlvr.test_environment import call
from tests.sandboxes.conftest import ENGINES, engine_fixture

OPTIONS = CodingRLVRConfig(wall_s=3.0, cpu_s=1.0)


engine = engine_fixture(*ENGINES)


async def told(engine: SandboxEngine, code: str) -> str:
    env = CodingRLVR(OPTIONS, sandboxes=engine)
    await env.reset(options={"split": "train", "index": 0})
    observation, *_ = await env.step(call(code))
    await env.close()
    return observation[0].content


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "code",
    [
        "def f(*arguments):\n    return None",
        "def f(*arguments):\n    return [1, 'two', {'a': (3, 4.5)}]",
        "def f(*arguments):\n    raise ValueError('no')",
        "def f(*arguments):\n    return undefined",
        "def f(:",
        "x = 1",
        "print('hello')\ndef f(*arguments):\n    return True",
        "import nothing_of_that_name",
    ],
)
async def test_the_report_is_the_same_as_the_stand_ins(engine: SandboxEngine, code: str) -> None:
    assert await told(engine, code) == await told(FakeEngine(), code)


@pytest.mark.asyncio(loop_scope="module")
async def test_gold_and_wrong_answers(engine: SandboxEngine) -> None:
    env = CodingRLVR(OPTIONS, sandboxes=engine)
    for index in range(10):
        await env.reset(options={"split": "eval", "index": index})
        assert (await env.step(env.current_task.gold or ""))[1] == 1.0
        await env.reset(options={"split": "eval", "index": index})
        assert (await env.step(as_answer("def f(*arguments):\n    return None")))[1] == 0.0


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "def f(*arguments):\n    while True: pass",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "x = 'a' * (1 << 40)",
        "class A:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(*arguments):\n    return A()",
        "import os, sys\nos.kill(os.getppid(), 9)",
    ],
)
async def test_hostile_code_fails_and_the_episode_goes_on(engine: SandboxEngine, code: str) -> None:
    text = await told(engine, code)
    assert text.startswith("0/2 passed\n")
    env = CodingRLVR(OPTIONS, sandboxes=engine)
    await env.reset(options={"split": "train", "index": 0})
    _, reward, terminated, *_ = await env.step(as_answer(code))
    assert (reward, terminated) == (0.0, True)
