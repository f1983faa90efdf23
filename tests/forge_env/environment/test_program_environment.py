"""Programs that bring their own loop are played as any environment, whatever they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

import forge_env as fe
from forge_env.environment.acp_client import acp_argv
from forge_env.errors import ContextLengthExceeded, EnvironmentBugError, UsageError
from forge_env.gateway.request import ModelRequest
from forge_env.gateway.server import Access, shared_gateway
from forge_env.policy import LimitReached, Policy, PolicySession, Reply
from forge_env.rollout.episode import EpisodeLimits, run_episode
from forge_env.rollout.scripted import GoldPolicy
from forge_env.sandbox import ExecResult, SandboxEngine
from forge_env.types import Message, Observation, StepResult, ToolSpec
from tests.sandboxes.conftest import require

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", autouse=True)
def _client() -> None:
    """Half a second of imports, which a process that only collects the tests does without."""
    global openai
    import openai


ASK = """
import json, os, sys, threading, time, urllib.error, urllib.request

def ask(*messages, **more):
    body = json.dumps({"model": "m", "messages": messages, **more}).encode()
    url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(url, body, head)) as answer:
        return json.load(answer)["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}
"""
LOOP = """
from asking import *
messages = [user(sys.argv[1])]
while True:
    messages.append(ask(*messages))
    if "DONE" in messages[-1]["content"]:
        break
    messages.append(user("Go on."))
open("answer.txt", "w").write(messages[-1]["content"])
print("said", messages[-1]["content"])
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[SandboxEngine]:
    require("local")
    async with fe.open_engine("local", concurrency=1) as engine:  # one sandbox: a leak would block the next
        yield engine


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["local", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])],
)
async def either(request: pytest.FixtureRequest) -> AsyncIterator[SandboxEngine]:
    require(request.param)
    async with fe.open_engine(request.param, concurrency=1, warm=0) as engine:
        yield engine


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nothing_is_left() -> AsyncIterator[None]:
    """Whatever a program did, no key of an episode's opens anything after it, and nobody waits for an answer."""
    yield
    gateway = await shared_gateway()
    assert gateway.open_episodes == 0
    waiting = [task for task in asyncio.all_tasks() if "ProgramEnvironment" in repr(task.get_coro())]
    assert waiting == []


async def right(task: fe.Task, env: fe.ProgramEnvironment) -> float:
    return float(await env.read_text("answer.txt") == "DONE 42")


class Agent(fe.ProgramEnvironment):
    """A program that answers a question."""

    command = ("python", "agent.py", "{instruction}")
    rubric = fe.Rubric(right)
    program = LOOP

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt="What is the answer?", split=split)

    def files(self, task: fe.Task) -> dict[str, str | bytes]:
        return {"asking.py": ASK, "agent.py": type(self).program}


class Hurried(Agent):
    """Its program has time to start and to ask, then hardly any."""

    async def step(self, action: fe.Action) -> StepResult:
        self.config = self.config.model_copy(update={"wall_s": 0.1})
        return await super().step(action)


class Crowded(Agent):
    """Its first request is answered when a second one is open."""

    def __init__(self, config: fe.ProgramEnvironmentConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        self.open = asyncio.Semaphore(0)

    async def _ask(self, request: ModelRequest) -> Message:
        self.open.release()
        return await super()._ask(request)

    async def step(self, action: fe.Action) -> StepResult:
        for _ in range(2):
            await self.open.acquire()
        return await super().step(action)


class Says(Policy):
    """Says one thing after the other, in whichever conversation; remembers what it was told."""

    def __init__(self, *replies: str | Reply | Exception) -> None:
        self.replies = list(replies)
        self.told: list[list[Observation]] = []

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        return _Says(self)


class _Says(PolicySession):
    def __init__(self, policy: Says) -> None:
        self.policy = policy
        self.told: list[Observation] = []
        policy.told.append(self.told)

    async def reply(self, observation: Observation) -> Reply:
        self.told.append(observation)
        said = self.policy.replies.pop(0)
        if isinstance(said, Exception):
            raise said
        return said if isinstance(said, Reply) else Reply(Message(role="assistant", content=said))


async def play(
    engine: SandboxEngine,
    replies: Sequence[str | Reply | Exception],
    program: str = LOOP,
    limits: EpisodeLimits | None = None,
    base: type[Agent] = Agent,
    **config: Any,
) -> tuple[fe.Trajectory, Says]:
    policy = Says(*replies)
    kind = type("Agent", (base,), {"program": program})

    def make() -> fe.ProgramEnvironment:
        made: fe.ProgramEnvironment = kind(fe.ProgramEnvironmentConfig(**config), sandboxes=engine)
        return made

    return await run_episode(make, policy, seed=3, limits=limits or EpisodeLimits()), policy


async def test_a_program_is_played_turn_by_turn_and_scored_by_what_it_left(either: SandboxEngine) -> None:
    trajectory, policy = await play(either, ["Hm.", "DONE 42"])
    assert (trajectory.reward, trajectory.terminated, trajectory.answer) == (1.0, True, "said DONE 42")
    [told] = policy.told
    assert [message.content for news in told for message in news] == ["What is the answer?", "Go on."]
    assert [turn.message.content for turn in trajectory.turns] == ["Hm.", "DONE 42"]
    ended, *left = trajectory.final_observation[0].content.split("\n\n")
    assert (ended, left[0][:37]) == ("[the program has ended]\nsaid DONE 42", "[it wrote __pycache__/asking.cpython-")
    assert left[0].endswith("[it wrote answer.txt: 7 bytes]\nDONE 42")
    assert all(turn.step_s > 0.0 for turn in trajectory.turns), "how long the program took after each answer"
    assert trajectory.metrics == {"right": 1.0, "turns": 2.0, "conversations": 1.0, "exit_code": 0.0}
    trajectory, _ = await play(either, ["DONE 41"])
    assert trajectory.reward == 0.0


async def test_nothing_but_the_model_can_be_reached(either: SandboxEngine) -> None:
    program = """
from asking import *
import socket
seen = []
for url in ("http://127.0.0.1:80/", "http://example.org/", "http://169.254.169.254/"):
    try:
        urllib.request.urlopen(url, timeout=60)
    except urllib.error.HTTPError as error:
        seen.append(str(error.code))
    except OSError as error:
        seen.append(type(error).__name__)
os.environ["OPENAI_API_KEY"] = "another"
try:
    ask(user("hello"))
except urllib.error.HTTPError as error:
    seen.append(str(error.code))
    os.environ["OPENAI_API_KEY"] = os.environ["ANTHROPIC_API_KEY"]
print(ask(user(" ".join(seen)))["content"])
"""
    trajectory, policy = await play(either, ["bye"], program)
    assert policy.told[0][0][0].content == "URLError 403 403 401", "nobody listens on its own loopback"
    assert trajectory.answer == "bye"


@pytest.mark.parametrize(
    ("program", "wall_s", "why"),
    [
        ("print('hello')", 60.0, r"sent no request to the model: hello"),
        ("raise SystemExit('no model')", 60.0, r"sent no request to the model: no model.*exit code 1"),
        ("import time; time.sleep(1000)", 1.0, r"sent no request to the model within 1 s: .*took too long.*wall_s"),
    ],
)
async def test_a_program_that_never_asks_is_a_bug(engine: SandboxEngine, program: str, wall_s: float, why: str) -> None:
    with pytest.raises(EnvironmentBugError, match=rf"(?s){why}"):
        await play(engine, [], program, wall_s=wall_s)


async def test_a_program_that_never_stops_asking_is_truncated_and_scored(either: SandboxEngine) -> None:
    stubborn = """
from asking import *
open("answer.txt", "w").write("DONE 42")
while True:
    try:
        ask(user("Again?"))
    except urllib.error.HTTPError:
        time.sleep(0.1)
"""
    trajectory, _ = await play(either, ["Yes."] * 3, stubborn, max_turns=3, grace_s=0.1)
    assert (trajectory.truncation, trajectory.reward, len(trajectory.turns)) == ("turns", 1.0, 3)
    assert trajectory.metrics["exit_code"] == -1.0


async def test_limits_let_it_come_to_its_end(engine: SandboxEngine) -> None:
    careful = """
from asking import *
messages = [user("Count.")]
try:
    while True:
        messages += [ask(*messages), user("More.")]
except urllib.error.HTTPError as error:
    open("answer.txt", "w").write("DONE 42")
    print(error.code, json.load(error)["error"]["message"])
"""
    patient = {"grace_s": 60.0}
    trajectory, _ = await play(engine, ["1", "2", "3"], careful, max_turns=3, **patient)
    assert (trajectory.truncation, trajectory.reward, len(trajectory.turns)) == ("turns", 1.0, 3)
    assert trajectory.answer == "403 all 3 requests of this episode are used up"
    trajectory, _ = await play(engine, ["1", "2", "3"], careful, EpisodeLimits(max_turns=2), **patient)
    assert (trajectory.truncation, trajectory.reward, len(trajectory.turns)) == ("turns", 1.0, 2)
    full = ContextLengthExceeded("the conversation has 90 of 80 tokens")
    trajectory, _ = await play(engine, ["1", full], careful, **patient)
    assert (trajectory.truncation, trajectory.reward, len(trajectory.turns)) == ("context", 1.0, 1)
    trajectory, _ = await play(engine, ["1", LimitReached("budget")], careful, **patient)
    assert (trajectory.truncation, trajectory.reward, len(trajectory.turns)) == ("budget", 1.0, 1)
    assert trajectory.answer == "403 the episode has ended: its limit of budget is reached"


@pytest.mark.slow
async def test_a_program_that_hangs_after_an_answer_is_ended(engine: SandboxEngine) -> None:
    hanging = "from asking import *\nprint('waiting', flush=True)\nask(user('?'))\ntime.sleep(1000)"
    trajectory, _ = await play(engine, ["So."], hanging, base=Hurried)
    assert (trajectory.truncation, trajectory.reward, trajectory.metrics["exit_code"]) == ("program_time", 0.0, -1.0)
    assert trajectory.final_observation[0].content.startswith("[the program has ended]\nwaiting\n")


async def test_program_of_refused_requests_is_stopped(engine: SandboxEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_env.http.limits.MAX_REFUSED", 5)
    mischievous = """
from asking import *
import urllib.error
open("answer.txt", "w").write("DONE 42")
print(ask(user("Once?"))["content"], flush=True)
while True:
    try:
        ask("no message")
    except urllib.error.HTTPError:
        pass
"""
    trajectory, _ = await play(engine, ["yes"], mischievous, grace_s=0.1)
    assert (trajectory.truncation, trajectory.reward, len(trajectory.turns)) == ("refused_requests", 1.0, 1)
    never = mischievous.replace('print(ask(user("Once?"))["content"], flush=True)\n', "")
    with pytest.raises(EnvironmentBugError, match="its last 5 requests were refused"):
        await play(engine, [], never, grace_s=0.1)


async def test_a_program_that_hangs_up_in_the_middle_of_a_request(either: SandboxEngine) -> None:
    impatient = """
from asking import *
import socket
host, port = os.environ["OPENAI_BASE_URL"].removeprefix("http://").removesuffix("/v1").split(":")
body = json.dumps({"messages": [user("left")]}).encode()
key = os.environ["OPENAI_API_KEY"]
def hang_up(after):
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: {host}\\r\\nAuthorization: Bearer {key}\\r\\n"
        whole = head.encode() + b"Content-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body
        connection.sendall(whole[:after])
for after in (10, 60, -1):
    hang_up(after)
print(ask(user("Still there?"))["content"])
"""
    trajectory, policy = await play(either, ["yes"], impatient)
    assert trajectory.answer == "yes"
    assert policy.told[0][0][0].content == "Still there?"


@pytest.mark.slow
async def test_a_program_that_forks_until_it_can_no_more(either: SandboxEngine) -> None:
    """Its children end with it, also those that have left its group of processes, and the sandbox is as before."""
    forking = """
from asking import *
children = 0
try:
    while children < 10_000:
        if os.fork() == 0:
            if children % 2:
                os.setsid()
            time.sleep(1000)
        children += 1
except OSError:
    pass
print(ask(user("Is it enough?"))["content"], children < 10_000)
"""
    trajectory, _ = await play(either, ["yes"], forking)
    assert (trajectory.answer, trajectory.metrics["exit_code"]) == ("yes True", 0.0)
    counting = """
from asking import *
others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid(), os.getppid())]
print(ask(user("Who is there?"))["content"], sum("agent.py" in open(f"/proc/{n}/cmdline").read() for n in others))
"""
    trajectory, _ = await play(either, ["me"], counting)
    assert trajectory.answer == "me 0"


async def test_a_key_is_its_episode_and_no_other_program_finds_it() -> None:
    """A program that was given the key of an episode that runs beside it speaks for that one, and is charged nothing;
    by itself it finds none but its own.
    """
    require("local")
    key, stolen = asyncio.get_running_loop().create_future(), asyncio.Event()

    class Owner(Agent):
        """Is answered when the other has asked, too."""

        program = "from asking import *\nprint(ask(user('mine'))['content'])"

        async def _ask(self, request: ModelRequest) -> Message:
            if key.done():
                stolen.set()
            else:
                key.set_result(self._access.key)
            return await super()._ask(request)

        async def step(self, action: fe.Action) -> StepResult:
            await stolen.wait()
            return await super().step(action)

    class Thief(Agent):
        program = """
from asking import *
import pathlib, re
own, other = os.environ["OPENAI_API_KEY"], os.environ["BACKWARDS"][::-1]
places = [*pathlib.Path("/proc").glob("[0-9]*/environ"), *pathlib.Path("/proc").glob("[0-9]*/cmdline")]
for folder in (".", "/tmp", "/dev/shm"):
    places += pathlib.Path(folder).rglob("*")
seen = set()
for place in places:
    try:
        seen.update(re.findall("fe-[0-9a-f]{48}", place.read_text(errors="replace")))
    except OSError:
        pass
os.environ["OPENAI_API_KEY"] = other
told = ask(user("stolen"))["content"]
os.environ["OPENAI_API_KEY"] = own
print(told, ask(user(f"found {len(seen - {own})}"))["content"])
"""

        def environment(self, task: fe.Task) -> dict[str, str]:
            return {"BACKWARDS": key.result()[::-1]}

    pays, steals = Says("for mine", "for stolen"), Says("for own")
    async with fe.open_engine("local", concurrency=2) as engine:
        owner = asyncio.create_task(run_episode(lambda: Owner(sandboxes=engine), pays, seed=1))
        await asyncio.wait([owner, key], return_when=asyncio.FIRST_COMPLETED)
        thief = await run_episode(lambda: Thief(sandboxes=engine), steals, seed=1)
        owned = await owner
    assert [told[0][0].content for told in pays.told] == ["mine", "stolen"]
    assert [told[0][0].content for told in steals.told] == ["found 0"]
    assert (len(owned.turns), owned.metrics["conversations"], owned.answer) == (2, 2.0, "for mine")
    assert (len(thief.turns), thief.answer) == (1, "for stolen for own")


async def test_a_reply_that_was_cut_short_is_passed_on_as_such(engine: SandboxEngine) -> None:
    asking = """
from asking import *
import asking
load = asking.json.load
whole = []
asking.json.load = lambda file: whole.append(load(file)) or whole[-1]
ask(user("?"))
print(whole[0]["choices"][0]["finish_reason"])
"""
    short = Reply(Message(role="assistant", content="It is"), stop_reason="length")
    trajectory, _ = await play(engine, [short], asking)
    assert trajectory.answer == "length"
    assert trajectory.turns[0].reply.stop_reason == "length"


async def test_gold_actions_are_taken_in_turn_by_all_conversations(engine: SandboxEngine) -> None:
    class Twice(Agent):
        program = """
from asking import *
said = ask(user("First?"))["content"] + ask(user("Second?"))["content"]
open("answer.txt", "w").write(said)
"""

        def gold_actions(self, task: fe.Task) -> list[fe.Action] | None:
            return ["DONE", " 42"]

    for _ in range(2):
        trajectory = await run_episode(lambda: Twice(sandboxes=engine), GoldPolicy(), seed=1)
        assert (trajectory.reward, trajectory.metrics["conversations"]) == (1.0, 2.0)


async def test_where_a_conversation_goes_back_is_recorded(engine: SandboxEngine) -> None:
    retrying = """
from asking import *
messages = [user("Try.")]
messages.append(ask(*messages))
for number in range(2):
    said = ask(*messages, user(f"Go on, {number}."))
print(said["content"])
"""
    trajectory, policy = await play(engine, ["1", "2", "3"], retrying)
    assert trajectory.info["branches"] == {
        "c2": {"why": "branched off", "seat": "c1", "turns": 1, "messages": 2},
    }
    assert [turn.seat for turn in trajectory.turns] == ["c1", "c1", "c2"]
    assert [message.content for message in policy.told[1][0]] == ["Try.", "1", "Go on, 1."], (
        "who can't fork is told all"
    )


@pytest.mark.slow
async def test_a_program_that_ignores_its_end_leaves_nothing(either: SandboxEngine) -> None:
    """Nor do its child and the request that it has left open."""
    resisting = """
from asking import *
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    while True:
        time.sleep(1)
threading.Thread(target=ask, args=[user("left open")]).start()
threading.Thread(target=ask, args=[user("?")]).start()
while True:
    time.sleep(1)
"""
    trajectory, _ = await play(either, ["So."], resisting, base=Crowded, max_turns=1, grace_s=0.1)
    assert (trajectory.truncation, trajectory.reward, len(trajectory.turns)) == ("turns", 0.0, 1)
    assert trajectory.metrics["exit_code"] == -1.0
    trajectory, _ = await play(either, ["DONE 42"])  # in the same sandbox, the only one
    assert trajectory.reward == 1.0


async def test_conversations_side_by_side_are_kept_apart(engine: SandboxEngine) -> None:
    parallel = """
from asking import *
main = [user("Plan.")]
main.append(ask(*main))
found = {}
def sub(name):
    history = [user(f"Helper {name}.")]
    for _ in range(2):
        history += [ask(*history), user("More.")]
    found[name] = history
threads = [threading.Thread(target=sub, args=[name]) for name in "ab"]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(ask(*main, user("Sum up."))["content"])
"""
    trajectory, policy = await play(engine, ["plan", "1", "2", "3", "4", "sum"], parallel)
    assert trajectory.answer == "sum"
    assert trajectory.metrics["conversations"] == 3.0
    first = {told[0][0].content: [message.content for news in told for message in news] for told in policy.told}
    assert first == {
        "Plan.": ["Plan.", "Sum up."],
        "Helper a.": ["Helper a.", "More."],
        "Helper b.": ["Helper b.", "More."],
    }


async def test_a_program_that_strips_answers_keeps_its_conversation(engine: SandboxEngine) -> None:
    stripping = """
from asking import *
messages = [user("Plan.")]
for _ in range(4):
    answer = ask(*messages)
    messages += [{**answer, "content": answer["content"].strip()}, user("More.")]
"""
    trajectory, policy = await play(engine, ["I look.\n", "\n\n", " Found.\n\n", "Done."], stripping)
    assert (trajectory.metrics["conversations"], trajectory.metrics["rewritten/white_space"]) == (1.0, 3.0)
    assert [message.content for news in policy.told[0] for message in news] == ["Plan.", "More.", "More.", "More."]
    assert [turn.reply.message.content for turn in trajectory.turns][1] == "\n\n"


@pytest.mark.parametrize("limit", [None, 3])
async def test_conversations_may_earn_for_themselves(engine: SandboxEngine, limit: int | None) -> None:
    """In the record, also where a limit ended the episode; the score stays the rubric's."""

    class Judging(Agent):
        program = """
from asking import *
open("answer.txt", "w").write("DONE 42")
first = ask(user("Helper."))["content"]
main = [user("Plan.")]
for _ in range(3):
    main += [ask(*main), user(first)]
"""

        def credits(self) -> dict[str, float]:
            assert list(self.conversations) == ["c1", "c2"]
            return {name: 0.25 for name, said in self.conversations.items() if said[1].content == "nothing"}

    limits = EpisodeLimits(max_turns=limit)
    trajectory = await run_episode(lambda: Judging(sandboxes=engine), Says("nothing", *"abc"), seed=1, limits=limits)
    assert (trajectory.truncation, trajectory.reward) == ("turns" if limit else None, 1.0)
    assert trajectory.info["credits"] == {"c1": 0.25}
    assert fe.Trajectory.from_dict(trajectory.to_dict()).info["credits"] == {"c1": 0.25}

    class Wrong(Judging):
        def credits(self) -> dict[str, float]:
            return {"c7": 1.0}

    with pytest.raises(EnvironmentBugError, match=r"Wrong.credits returned .*'c7': 1.0.*of c1, c2"):
        await run_episode(lambda: Wrong(sandboxes=engine), Says("nothing", *"abc"), seed=1)


async def judged_elsewhere(env: Agent) -> float:
    async with env.fresh_sandbox() as fresh:
        return float(await fresh.read_files() == {})


async def test_a_command_that_is_one_string_is_refused() -> None:
    class OneString(Agent):
        command = "python agent.py"

    with pytest.raises(UsageError, match=r"OneString.command is a string \(set `command = \('python', 'agent.py'\)`"):
        OneString()


async def test_a_program_is_judged_where_it_never_was(engine: SandboxEngine) -> None:
    """Its sandbox is gone by then; the files that it left are there, as they were when it ended."""

    async def careless(env: Agent) -> float:
        assert await env.read_text("./answer.txt") == "DONE 42"
        result = await env.sandbox.run_python("print(open('answer.txt').read())")
        return float(result.stdout == "DONE 42")

    kind = type("Agent", (Agent,), {"rubric": fe.Rubric(careless)})
    with pytest.raises(UsageError, match=r"released for a fresh one.*fresh_sandbox"):
        await run_episode(lambda: kind(sandboxes=engine), Says("DONE 42"), seed=1)
    trajectory, _ = await play(engine, ["DONE 42"])
    assert trajectory.reward == 1.0


async def test_what_a_program_left_running_keeps_no_episode_open(engine: SandboxEngine) -> None:
    """A program has ended when its first process has, whoever of its children asks on."""

    class Leaving(Function):
        async def _ask(self, request: ModelRequest) -> Message:
            self.seen.set()
            return await super()._ask(request)

        async def run(self, task: fe.Task, access: Access) -> ExecResult:
            async with openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key) as client:
                await client.responses.create(model="any", input="first")
            self.seen = asyncio.Event()
            self.child = asyncio.create_task(self.ask_on(access))
            await self.seen.wait()
            return ExecResult(exit_code=0, stdout="done")

        async def ask_on(self, access: Access) -> str:
            async with openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key) as client:
                with pytest.raises(openai.PermissionDeniedError) as told:
                    await client.responses.create(model="any", input="second")
            return told.value.message

        seen = asyncio.Event()

    env = Leaving(sandboxes=engine)
    trajectory = await run_episode(lambda: env, Says("one"), seed=1)
    assert (trajectory.terminated, len(trajectory.turns), trajectory.answer) == (True, 1, "done")
    assert "the episode has ended" in await env.child


async def test_a_fresh_sandbox_for_the_judge_needs_no_second_one(engine: SandboxEngine) -> None:
    kind = type("Agent", (Agent,), {"rubric": fe.Rubric(judged_elsewhere)})
    trajectory = await run_episode(lambda: kind(sandboxes=engine), Says("DONE 42"), seed=1)
    assert trajectory.reward == 1.0


async def test_what_a_program_left_is_in_the_record(engine: SandboxEngine) -> None:
    """What it wrote or changed, not what it was given; of everything the beginning, and of much no more than that."""
    kind = type("Agent", (Agent,), {"rubric": fe.Rubric(judged_elsewhere)})
    writing = """
from asking import *
import shutil
shutil.rmtree("__pycache__")
ask(user("?"))
os.mkdir("out")
for name, data in (("a.txt", b"first\\n"), ("b.bin", b"\\0" * 9), ("c.txt", b"c" * 5000), ("out/d.txt", b"last")):
    open(name, "wb").write(data)
print("done")
"""
    trajectory, _ = await play(engine, ["So."], writing, base=kind, output_chars=100)
    (said,) = trajectory.final_observation
    kept = "c" * (100 - len("first\n"))
    assert said.content == (
        "[the program has ended]\ndone\n\n[it wrote a.txt: 6 bytes]\nfirst\n[it wrote b.bin: 9 bytes]\n"
        f"[it wrote c.txt: 5000 bytes]\n{kept}\n[it wrote out/d.txt: 4 bytes]"
    )
    many = "from asking import *\nask(user('?'))\nfor n in range(101): open(f'{n:03}', 'w').close()"
    trajectory, _ = await play(engine, ["So."], many, base=kind)
    assert trajectory.final_observation[0].content.endswith("[it wrote 099: 0 bytes]\n[and 2 more files]")


class Function(Agent):
    """A program that is a function of this process."""

    async def run(self, task: fe.Task, access: Access) -> ExecResult:
        async with openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key) as client:
            answer = await client.responses.create(model="any", input=task.prompt)
        if answer.output_text == "fail":
            raise ValueError("I can't")
        await self.sandbox.write_text("answer.txt", answer.output_text)
        return ExecResult(exit_code=0, stdout="done")


async def test_a_function_with_a_client_is_a_program_too(engine: SandboxEngine) -> None:
    trajectory = await run_episode(lambda: Function(sandboxes=engine), Says("DONE 42"), seed=1)
    assert (trajectory.reward, trajectory.answer) == (1.0, "done")
    trajectory = await run_episode(lambda: Function(sandboxes=engine), Says("fail"), seed=1)
    assert trajectory.reward == 0.0
    assert "ValueError: I can't" in trajectory.final_observation[0].content


async def test_tools_that_run_at_the_provider_are_counted(engine: SandboxEngine) -> None:
    class Searching(Agent):
        async def run(self, task: fe.Task, access: Access) -> ExecResult:
            async with openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key) as client:
                for tools in ([{"type": "web_search"}] * 2, [{"type": "web_search"}, {"type": "mcp"}]):
                    sent: Any = tools
                    await client.responses.create(model="any", input="?", tools=sent)
            return ExecResult(exit_code=0)

    trajectory = await run_episode(lambda: Searching(sandboxes=engine), Says("a", "b"), seed=1)
    counts = {name: value for name, value in trajectory.metrics.items() if name.startswith("left_out/")}
    assert counts == {"left_out/web_search": 2.0, "left_out/mcp": 1.0}


ACP_AGENT = """
from asking import *

def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

def receive():
    return json.loads(sys.stdin.readline())

def called(method, **result):
    request = receive()
    assert request["method"] == method, request
    return request["params"]

called("initialize"), send(id=1, result={"protocolVersion": 1})
called("session/new"), print("not JSON", flush=True), send(id=2, result={"sessionId": "s"})
(part,) = called("session/prompt")["prompt"]
send(id=7, method="fs/read_text_file", params={})
assert receive()["error"]["code"] == -32601
options = [{"optionId": "no", "kind": "reject_once"}, {"optionId": "yes", "kind": "allow_once"}]
send(id=8, method="session/request_permission", params={"options": options})
assert receive()["result"]["outcome"] == {"outcome": "selected", "optionId": "yes"}
answer = ask(user(part["text"]))["content"]
open("answer.txt", "w").write(answer)
chunk = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": answer}}
send(method="session/update", params={"sessionId": "s", "update": chunk})
if answer == "crash":
    sys.exit(3)
send(id=3, result={"stopReason": "end_turn" if "DONE" in answer else "refusal"})
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("answer", "code", "why"),
    [("DONE 42", 0.0, ""), ("no", 1.0, "the agent stopped: refusal"), ("crash", 1.0, "ended with exit code 3")],
)
async def test_an_agent_that_speaks_acp_is_driven(engine: SandboxEngine, answer: str, code: float, why: str) -> None:
    class Protocol(Agent):
        program = ACP_AGENT

        def argv(self, task: fe.Task) -> list[str]:
            return acp_argv(task.prompt, ["python", "agent.py"])

    trajectory = await run_episode(lambda: Protocol(sandboxes=engine), Says(answer), seed=1)
    assert trajectory.turns[0].observation[0].content == "What is the answer?"
    assert (trajectory.reward, trajectory.answer) == (float(answer == "DONE 42"), answer)
    assert trajectory.metrics["exit_code"] == code, trajectory.final_observation[0].content
    assert why in trajectory.final_observation[0].content


async def test_a_program_meets_the_end_of_its_standard_input(engine: SandboxEngine) -> None:
    trajectory, _ = await play(engine, ["DONE 42"], "from asking import *\nsys.stdin.read()" + LOOP)
    assert trajectory.reward == 1.0


@pytest.mark.parametrize("reads", [True, False])
async def test_images_are_counted_and_refused_for_a_policy_that_reads_text(engine: SandboxEngine, reads: bool) -> None:
    """A program is told, and may go on without; so are programs in training."""

    class Looking(Agent):
        async def run(self, task: fe.Task, access: Access) -> ExecResult:
            async with openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key) as client:
                await client.responses.create(model="any", input="?")
                url = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
                shown: Any = [{"role": "user", "content": [url]}]
                try:
                    await client.responses.create(model="any", input=shown)
                except openai.BadRequestError as error:
                    return ExecResult(exit_code=0, stdout=str(error))
            return ExecResult(exit_code=0)

    policy = Says("a", "b")
    policy.reads_images = reads
    trajectory = await run_episode(lambda: Looking(sandboxes=engine), policy, seed=1)
    assert (trajectory.metrics.get("images"), len(trajectory.turns)) == ((1.0, 2) if reads else (None, 1))
    assert ("this model reads text only" in trajectory.answer) is not reads


async def test_an_episode_that_is_cancelled_ends_its_program(engine: SandboxEngine) -> None:
    asked = asyncio.Event()

    class Waits(_Says):
        async def reply(self, observation: Observation) -> Reply:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    class Patient(Says):
        def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
            return Waits(self)

    playing = asyncio.ensure_future(run_episode(lambda: Agent(sandboxes=engine), Patient(), seed=1))
    await asked.wait()
    playing.cancel()
    await asyncio.wait([playing])
    trajectory, _ = await play(engine, ["DONE 42"])
    assert trajectory.reward == 1.0
