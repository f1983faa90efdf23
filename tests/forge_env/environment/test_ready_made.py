"""The ready-made tools on real engines: what they do, what they say when it goes wrong, and what they may take."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import forge_env as fe
from forge_env.environment.tool_environment import given_answer
from forge_env.errors import UsageError
from forge_env.sandbox import WORK, SandboxEngine
from forge_env.types import FunctionCall, Message, ToolCall
from tests.sandboxes.conftest import WITH_SLOW_DOCKER, engine_fixture

pytestmark = pytest.mark.asyncio(loop_scope="module")


engine = engine_fixture(*WITH_SLOW_DOCKER)


class Workshop(fe.SandboxEnvironment):
    """Every tool there is."""

    api_version = 1
    rubric = fe.Rubric(fe.rewards.exact_match)
    bash = fe.tools.bash()
    shell = fe.tools.bash(name="shell", stateful=True)
    python = fe.tools.python()
    program = fe.tools.python(name="program", stateful=False)
    editor = fe.tools.files(name="edit")
    submit = fe.tools.submit()
    quick = fe.tools.bash(name="quick", timeout_s=3, output_chars=50, max_calls=3)
    quick_python = fe.tools.python(name="quick_python", timeout_s=2)

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt="Work.", split=split, data={"answer": "done"})

    def files(self, task: fe.Task) -> dict[str, str | bytes]:
        return {"src/a.py": "one = 1\ntwo = 2\nthree = 3\n", "raw": b"\xff\xfe", "empty": "", ".hidden": "x"}


@pytest_asyncio.fixture(loop_scope="module")
async def env(engine: SandboxEngine) -> AsyncIterator[Workshop]:
    env = Workshop(Workshop.config_class(max_turns=100, wall_s=60.0), sandboxes=engine)
    await env.reset(seed=0)
    yield env
    await env.close()


async def say(env: Workshop, tool: str, **arguments: Any) -> str:
    observation, _, terminated, truncated, _ = await env.step(fe.call_tool(tool, **arguments))
    assert (terminated, truncated) == (False, False)
    return observation[0].content


def several(*calls: tuple[str, dict[str, Any]]) -> Message:
    made = [FunctionCall(name=name, arguments=json.dumps(arguments)) for name, arguments in calls]
    numbered = [ToolCall(id=str(number), function=function) for number, function in enumerate(made)]
    return Message(role="assistant", tool_calls=numbered)


async def test_what_lives_on_from_call_to_call(env: Workshop) -> None:
    for tool, said in [("bash", "/work \n"), ("shell", "/tmp 1\n")]:
        assert await say(env, tool, command=f"x=1; cd /tmp; touch {WORK}/made") == "[no output]"
        assert await say(env, tool, command='echo "$PWD $x"') == said
    assert await say(env, "python", code="x = 20\nx + 1") == "21\n"
    failed = await say(env, "python", code="print(x)\n1 / 0")
    assert failed.startswith(
        '20\nTraceback (most recent call last):\n  File "<cell>", line 2, in <module>\n    1 / 0\n'
    )
    assert failed.endswith("ZeroDivisionError: division by zero\n\n[exit code 1]")
    assert await say(env, "python", code="x") == "20\n"
    assert "NameError" in await say(env, "program", code="print(x)")
    assert await say(env, "program", code="import os; print(os.path.exists('made'))") == "True\n"


async def test_nothing_of_an_episode_is_in_the_next(env: Workshop) -> None:
    await say(env, "python", code="x = 1")
    await say(env, "shell", command="y=1; touch left")
    await env.reset(seed=1)
    assert "NameError" in await say(env, "python", code="x")
    assert await say(env, "shell", command='echo "[$y]"; ls left') == (
        "[]\nls: cannot access 'left': No such file or directory\n\n[exit code 2]"
    )


async def test_calls_of_one_message_share_a_session_in_order(env: Workshop) -> None:
    calls = [("python", {"code": "x = 1"}), ("python", {"code": "x += 1"}), ("python", {"code": "x"})]
    observation, *_ = await env.step(several(*calls))
    assert [message.content for message in observation] == ["[no output]", "[no output]", "2\n"]


async def test_time_limits_and_sessions_that_end(env: Workshop) -> None:
    assert await say(env, "quick", command="echo begun; sleep 60") == "begun\n\n[stopped: it took too long]"
    await say(env, "quick_python", code="x = 1")
    assert "[stopped: it took too long]" in await say(env, "quick_python", code="while True: pass")
    assert await say(env, "quick_python", code="x") == "1\n"  # interrupted, not ended
    ended = await say(env, "python", code="import os; os._exit(3)")
    assert ended == "[exit code 3]\n[the python session has ended; the next call begins a new one]"
    after = await say(env, "python", code="'x' in globals()")
    assert after == "[a new python session: only files of the last one remain]\nFalse\n"


async def test_a_call_that_is_given_up_leaves_no_session_behind(engine: SandboxEngine) -> None:
    env = Workshop(Workshop.config_class(tool_timeout_s=1.0, wall_s=60.0), sandboxes=engine)
    await env.reset(seed=0)
    assert await say(env, "python", code="x = 1; import time; time.sleep(60)") == "Error: python timed out after 1 s"
    assert (await say(env, "python", code="1 + 1")).endswith("\n2\n")
    await env.close()


async def test_memory_of_sessions_is_the_configs(engine: SandboxEngine) -> None:
    env = Workshop(Workshop.config_class(memory_mb=100), sandboxes=engine)
    await env.reset(seed=0)
    assert "MemoryError" in await say(env, "python", code="x = bytearray(200 << 20)")
    await env.close()


async def test_output_and_calls_are_limited(env: Workshop) -> None:
    said = await say(env, "quick", command="seq 100")
    assert said.startswith("1\n2\n3\n")
    assert "[... 242 characters left out ...]" in said
    assert said.endswith("99\n100\n")
    assert len(await say(env, "python", code="print('x' * 10**6)")) < env.config.max_tool_output_chars + 100
    for _ in range(3):
        last = await say(env, "quick", command="true")
    assert last == "Error: quick can be called 3 times only"


async def test_viewing_and_editing(env: Workshop) -> None:
    path = "src/a.py"
    for arguments, said in [
        ({"command": "view", "path": "."}, "./ holds:\nempty\nraw\nsrc/\nsrc/a.py"),
        ({"command": "view", "path": f"{WORK}/src"}, "src/ holds:\na.py"),
        ({"command": "view", "path": path}, "     1\tone = 1\n     2\ttwo = 2\n     3\tthree = 3"),
        ({"command": "view", "path": f"{WORK}/{path}", "view_range": [2, -1]}, "     2\ttwo = 2\n     3\tthree = 3"),
        ({"command": "view", "path": "empty"}, "empty is empty."),
        ({"command": "create", "path": "new/b.txt", "file_text": "a\nb\n"}, "Wrote new/b.txt: 2 lines."),
        (
            {"command": "str_replace", "path": path, "old_str": "two = 2\n", "new_str": "two = 1 + 1\nmore = 0\n"},
            f"Edited {path}:\n     1\tone = 1\n     2\ttwo = 1 + 1\n     3\tmore = 0\n     4\tthree = 3",
        ),
        ({"command": "str_replace", "path": path, "old_str": "more = 0\n"}, None),
        (
            {"command": "insert", "path": path, "insert_line": 0, "insert_text": "# top"},
            f"Edited {path}:\n     1\t# top\n     2\tone = 1\n     3\ttwo = 1 + 1\n     4\tthree = 3",
        ),
        ({"command": "insert", "path": path, "insert_line": 4, "insert_text": "end\n"}, None),
    ]:  # fmt: skip
        answer = await say(env, "edit", **arguments)
        assert said is None or answer == said
    assert await env.read_text(path) == "# top\none = 1\ntwo = 1 + 1\nthree = 3\nend\n"
    assert await env.read_text("new/b.txt") == "a\nb\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"command": "view", "path": "/etc/passwd"}, "'/etc/passwd' is not inside the work folder"),
        ({"command": "create", "path": "../x", "file_text": ""}, "'../x' is not inside the work folder"),
        ({"command": "view", "path": "nowhere"}, "No such file or directory: nowhere"),
        ({"command": "view", "path": "raw"}, "raw is not UTF-8 text (2 bytes)"),
        ({"command": "view", "path": "src/a.py", "view_range": [3]}, "view_range=[3] is not valid: give two line"),
        ({"command": "view", "path": "src/a.py", "view_range": [9, 12]}, "is not valid: the file has 3 lines"),
        ({"command": "create", "path": "src", "file_text": "x"}, "Is a directory: src"),
        ({"command": "create", "path": "x"}, "`file_text` is missing: create needs it"),
        ({"command": "str_replace", "path": "src/a.py"}, "`old_str` is missing: str_replace needs it"),
        ({"command": "str_replace", "path": "src/a.py", "old_str": ""}, "`old_str` is empty"),
        ({"command": "str_replace", "path": "src/a.py", "old_str": "x"}, "`old_str` does not occur in src/a.py"),
        ({"command": "str_replace", "path": "src/a.py", "old_str": " = "}, "occurs 3 times in src/a.py, at lines 1, 2"),
        ({"command": "insert", "path": "src/a.py", "insert_line": 4, "insert_text": "x"}, "src/a.py has 3 lines"),
        ({"command": "delete", "path": "src/a.py"}, "command: should be 'view', 'create', 'str_replace' or"),
        ({"command": "view", "path": "a\0b"}, "is not inside the work folder"),
    ],
)
async def test_mistakes_are_answered(env: Workshop, arguments: dict[str, Any], said: str) -> None:
    answer = await say(env, "edit", **arguments)
    assert answer.startswith("Error: ")
    assert said in answer


async def test_a_link_leads_to_nothing_of_the_host(env: Workshop) -> None:
    await say(env, "bash", command="ln -s /etc/shadow link; ln -s loop loop; mkfifo pipe")
    for path in ("link", "loop", "pipe"):
        answer = await say(env, "edit", command="view", path=path)
        assert answer.startswith("Error: "), answer


@pytest.mark.parametrize("tool", ["bash", "shell", "python", "program"])
async def test_odd_source_is_answered(env: Workshop, tool: str) -> None:
    argument = "command" if tool in ("bash", "shell") else "code"
    assert (await say(env, tool, **{argument: "echo \0"})).startswith(
        ("Error: ", "SyntaxError: ", "ValueError: ")  # before Python 3.11.4 the last
    )
    assert await say(env, tool, **{argument: ""}) == "[no output]"
    assert await say(env, tool, **{argument: "'"})


async def test_submit_ends_the_episode_with_an_answer(env: Workshop) -> None:
    observation, reward, terminated, *_ = await env.step(fe.call_tool("submit", answer="done"))
    assert (observation[0].content, reward, terminated, given_answer(env)) == ("Submitted.", 1.0, True, "done")


async def test_submit_without_an_answer_and_by_other_names() -> None:
    class Hand(fe.ToolEnvironment):
        rubric = fe.Rubric(fe.rewards.exact_match)
        submit = fe.tools.submit(name="finish", with_answer=False, description="End.")

        def task(self, split: str, index: int) -> fe.Task:
            return fe.Task(id="0", prompt="?", split=split, data={"answer": ""})

    env = Hand()
    await env.reset(seed=0)
    (spec,) = env.tools
    assert (spec.name, spec.description, spec.parameters["properties"]) == ("finish", "End.", {})
    _, reward, terminated, *_ = await env.step(fe.call_tool("finish"))
    assert (reward, terminated) == (1.0, True)


async def test_where_they_belong() -> None:
    class Plain(fe.ToolEnvironment):
        rubric = fe.Rubric(fe.rewards.exact_match)
        bash = fe.tools.bash()

    with pytest.raises(UsageError, match=r"Plain\.bash needs a SandboxEnvironment \(derive Plain from fe\.Sand"):
        Plain()

    class Hidden(fe.SandboxEnvironment):
        rubric = fe.Rubric(fe.rewards.exact_match)
        files = fe.tools.files()

    with pytest.raises(UsageError, match=r"Hidden\.files hides SandboxEnvironment\.files \(call the attribute .*else"):
        Hidden()

    class Fewer(Workshop):
        python = None

    assert "python" in {spec.name for spec in Workshop().tools}
    assert "python" not in {spec.name for spec in Fewer().tools}
    with pytest.raises(AttributeError, match="no attribute 'zsh'"):
        fe.tools.zsh  # type: ignore[attr-defined] # noqa: B018
