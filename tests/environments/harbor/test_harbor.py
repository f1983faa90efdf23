"""`harbor:FOLDER`: tasks that others have, in both formats; what can't be played is told."""

from __future__ import annotations

import errno
import io
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from environments.harbor import Harbor, HarborConfig
from environments.harbor.artifacts import Artifact, only
from environments.harbor.environment import _reward, _verdict, no_verdict, not_moved
from environments.harbor.tasks import Separate, read_folder
from forge_env.cli.main import main
from forge_env.environment.optional import unplayable
from forge_env.errors import SandboxFileError, UsageError
from forge_env.registry import given_in
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy, ReplayPolicy
from forge_env.sandbox import WORK, Archives, ExecResult, SandboxEngine
from forge_env.sandbox.engines import LazyEngine
from forge_env.trajectory import Trajectory
from forge_env.types import Action
from tests.sandboxes.conftest import engine_fixture

TASKS = Path(__file__).parent / "tasks"
NAMES = ["apart", "greeting", "needs_packages", "old_sum", "repair", "tool_at_home"]


engine = engine_fixture("docker", warm=0)


async def play(engine: SandboxEngine, name: str, *actions: Action) -> Trajectory:
    """One episode: these actions, or with none the gold ones."""

    def make() -> fe.Environment:
        return fe.make(f"harbor:{TASKS}", base_image="python", writable=["/data"], sandboxes=engine)

    task = make().task("train", NAMES.index(name))
    episode = await run_episode(make, ReplayPolicy(actions) if actions else GoldPolicy(), task=task)
    assert episode.valid, episode.error
    return episode


def run(command: str) -> Action:
    call: Action = fe.call_tool("bash", command=command)
    return call


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "needs_packages"])
async def test_the_solution_scores_1_and_doing_nothing_0(name: str, engine: SandboxEngine) -> None:
    solved = await play(engine, name)
    assert (solved.reward, solved.metrics["no_verdict"]) == (1.0, 0.0), solved.final_observation
    idle = await play(engine, name, "Done.")
    assert (idle.reward, idle.metrics["no_verdict"]) == (0.0, 0.0)


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
async def test_only_files_reach_the_tests(engine: SandboxEngine) -> None:
    honest = run("echo 'Hello, harbor!' > hello.txt")
    assert (await play(engine, "greeting", honest, "Done.")).reward == 1.0
    verdict = run(
        "mkdir -p /logs/verifier; cd /logs/verifier; echo 1 > reward.txt; echo '{\"reward\": 1}' > reward.json"
    )
    assert (await play(engine, "greeting", verdict, "Done.")).reward == 0.0
    tests = run(
        "mkdir -p /tests; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 555 /tests"
    )
    assert (await play(engine, "greeting", tests, "Done.")).reward == 0.0
    daemon = run("while :; do echo 'Hello, harbor!' > /app/hello.txt; mkdir -p /logs/verifier; sleep 0.1; done &")
    gone = run("kill %1; wait; rm -f hello.txt; pwd; echo $HOME")
    told = await play(engine, "greeting", daemon, gone, "Done.")
    assert told.turns[2].observation[0].content == "/app\n/root\n"
    assert told.reward == 0.0
    removed = run("sed -i 's/amount > coin/amount >= coin/' change.py; echo $COINS; rmdir empty")
    kept = await play(engine, "repair", removed, "Done.")
    assert kept.turns[1].observation[0].content == "50,20,10,5,2,1\n"
    assert kept.reward == 1.0, "what was removed is not there, and `reward` is the value that counts"


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
async def test_artifacts_reach_tests_in_an_image_of_their_own(engine: SandboxEngine) -> None:
    draft = "mkdir -p /data/drafts; touch /data/drafts/draft.txt; "
    right = await play(engine, "apart", run(f"{draft}printf '%s\\n' 1 16 9 4 > squares.txt"), "Done.")
    assert right.reward == 1.0, right.failures
    link = run(
        f"{draft}ln -s /grading/expected.txt squares.txt; ln -s /grading/expected.txt /logs/artifacts/sorted.txt"
    )
    assert (await play(engine, "apart", link, "Done.")).reward == 0.0
    wrong = await play(engine, "apart", run(f"{draft}echo 7 > squares.txt"), "Done.")
    assert wrong.reason == "failed test.sh"
    assert "sorted.txt" in "".join(wrong.failures), "what test.sh prints is in the record"
    assert "draft.tmp" not in "".join(wrong.failures)


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
async def test_the_agents_time_is_the_tasks(engine: SandboxEngine, tmp_path: Path) -> None:
    shutil.copytree(TASKS / "greeting", tmp_path / "greeting")
    options = {"base_image": "python", "sandboxes": engine, "max_agent_s": 0.001}

    def make() -> fe.Environment:
        return fe.make(f"harbor:{tmp_path}", **options)

    work = run("echo 'Hello, harbor!' > hello.txt; sleep 60")
    episode = await run_episode(make, ReplayPolicy([work] * 3), task=make().task("train", 0))
    assert (episode.valid, episode.truncation, len(episode.turns)) == (True, "agent_time", 1)
    assert "verified" in episode.metrics, "what there is, is scored"


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_cant_be_built_is_told_with_its_line(engine: SandboxEngine) -> None:
    env = Harbor(HarborConfig(folder=str(TASKS), base_image="python"), sandboxes=engine)
    tasks = [env.task("train", NAMES.index(name)) for name in ("greeting", "needs_packages")]
    missing = await unplayable(env, tasks)
    assert missing.keys() == {"two_services", "needs_packages"}
    assert missing["two_services"] == "it needs additional services"
    assert "`RUN apt-get update && apt-get install -y gcc`" in missing["needs_packages"]

    def make() -> fe.Environment:
        return fe.make(f"harbor:{TASKS}", base_image="python", sandboxes=engine)

    episode = await run_episode(make, GoldPolicy(), task=tasks[1])  # invalid, and no end of a run
    assert not episode.valid
    assert "task 'needs_packages' can't be played here: an image could not be built" in (episode.error or "")


def test_omitted_tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(TASKS / "two_services", tmp_path / "two_services")
    assert main(["validate", f"harbor:{tmp_path}"]) == 1
    said = capsys.readouterr().out
    assert "-- 1 can't be played here: two_services: it needs additional services" in said
    assert "!! tasks: there are none" in said


def test_both_formats_are_read() -> None:
    tasks, refused = read_folder(str(TASKS))
    assert [task.name for task in tasks] == NAMES
    assert refused == {"two_services": "it needs additional services"}
    found = {task.name: task for task in tasks}
    old, new = found["old_sum"], found["repair"]
    assert (old.workdir, old.by_exit_code, old.agent_s, old.test_variables) == (
        "/app",
        True,
        60,
        {"TEST_DIR": "/tests"},
    )
    assert (new.by_exit_code, new.memory_mb, new.variables["COINS"][:2], new.hosts) == (False, 512, "50", None)
    env = Harbor(HarborConfig(folder=str(TASKS), base_image="python", memory_mb=1024))
    repair = env.task("train", NAMES.index("repair"))
    assert env.spec_of(repair).memory_mb == 512
    assert env.spec_of(env.task("train", NAMES.index("old_sum"))).memory_mb == 1024
    assert env.spec_of(repair).writable == ("/app", "/logs", "/root", "/solution", "/tests")
    assert not env.spec_of(repair).network
    assert Harbor(HarborConfig(folder=str(TASKS), network=True)).spec_of(repair).network
    alone, _ = read_folder(str(TASKS / "repair"))
    assert [task.name for task in alone] == ["repair"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ("[environment]\ngpus = 1", "it needs GPUs"),
        ("[environment]\nos = 'windows'", "it needs another operating system"),
        ("[[steps]]\nname = 'one'", "it needs steps"),
        ("[[verifier.collect]]\ncommand = 'x'\nservice = 'db'", "it needs additional services"),
        ("artifacts = [{source = '/x', service = 'db'}]", "it needs additional services"),
        ("[verifier]\nenvironment = {gpus = 1}", "it needs GPUs"),
        ("[environment.env]\nKEY = '${KEY}'", "it needs variables of this machine: ${KEY}"),
        ("[environment]\nworkdir = '/x/$Y'", "its folder /x/$Y depends on variables"),
        ("no toml", "it can't be read: TOMLDecodeError"),
    ],
)
def test_what_a_task_asks_for_and_there_is_not(settings: str, why: str, tmp_path: Path) -> None:
    shutil.copytree(TASKS / "greeting", tmp_path / "task")
    (tmp_path / "task/task.toml").write_text(settings)
    assert why in read_folder(str(tmp_path))[1]["task"]


def test_folders_without_tasks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no task in .*task.toml or task.yaml"):
        fe.make(f"harbor:{tmp_path}")
    with pytest.raises(UsageError, match="is not a folder"):
        fe.make("harbor", folder=str(tmp_path / "none"))


def test_some_tasks_alone() -> None:
    env = fe.make(f"harbor:{TASKS}", tasks=["repair", "greeting"])
    assert [env.task("train", index).id for index in range(env.num_tasks("train") or 0)] == ["greeting", "repair"]
    with pytest.raises(UsageError, match=r"no task 'other' in .*available: apart, greeting, needs_packages, old_sum"):
        fe.make(f"harbor:{TASKS}", tasks=["other"])


def test_a_name_may_hold_the_option_that_is_needed() -> None:
    assert given_in("harbor:a/b") == ("harbor", {"folder": "a/b"})
    assert given_in("gymnasium:CartPole-v1") == ("gymnasium", {"env_id": "CartPole-v1"})
    assert given_in("harbor") == ("harbor", {})
    assert given_in("blackjack:Blackjack") == ("blackjack:Blackjack", {}), "it needs no option: an import path"
    assert given_in("my.module:Class") == ("my.module:Class", {})


def with_dockerfile(folder: Path, dockerfile: str) -> str:
    shutil.copytree(TASKS / "greeting", folder / "task")
    (folder / "task/environment/Dockerfile").write_text(dockerfile)
    return str(folder)


@pytest.mark.parametrize(
    ("dockerfile", "workdir"),
    [
        ("FROM a AS build\nWORKDIR /src\nFROM b\nWORKDIR app", "/app"),
        ("FROM a AS build\nWORKDIR /src\nFROM --platform=linux/amd64 build\nWORKDIR app", "/src/app"),
        ("FROM a\nWORKDIR /", "/"),
        ("FROM a\nRUN true", None),
        ("FROM a AS build\nWORKDIR /src\nFROM b", None),
    ],
)
def test_the_folder_is_that_of_the_last_stage(dockerfile: str, workdir: str | None, tmp_path: Path) -> None:
    tasks, refused = read_folder(with_dockerfile(tmp_path, dockerfile))
    if workdir is None:
        assert "it has no working folder" in refused["task"]
        return
    assert tasks[0].workdir == workdir
    env = Harbor(HarborConfig(folder=str(tmp_path)))
    assert "/" not in env.spec_of(env.task("train", 0)).writable


def test_an_image_alone_names_no_folder(tmp_path: Path) -> None:
    shutil.copytree(TASKS / "greeting", tmp_path / "task", ignore=shutil.ignore_patterns("Dockerfile"))
    (tmp_path / "task/task.toml").write_text("[environment]\ndocker_image = 'a'")
    assert "it has no working folder" in read_folder(str(tmp_path))[1]["task"]


async def test_a_folder_that_is_never_writable_is_the_tasks_own_problem(tmp_path: Path) -> None:
    def make() -> fe.Environment:
        return fe.make(f"harbor:{folder}", sandboxes=LazyEngine("docker"))

    folder = with_dockerfile(tmp_path, "FROM a\nWORKDIR /etc")
    episode = await run_episode(make, GoldPolicy(), task=make().task("train", 0))
    assert not episode.valid
    assert "task 'task' can't be played here: writable: '/etc' is never writable" in (episode.error or "")


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("/etc", "is never writable"),
        ("data", "is not an absolute path"),
        ("/", "not a folder"),
        (f"{WORK}/a", f"'{WORK}'"),
    ],
)
def test_a_writable_folder_that_can_never_be_is_refused_once(folder: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"writable: '{folder}' .*{said}"):
        fe.make(f"harbor:{TASKS}", writable=["/data", folder])
    assert fe.make(f"harbor:{TASKS}", writable=["/data/deep", "/data"]), "what is in another is no mistake"


class Wrote:
    """A sandbox where the tests wrote this."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def read_text(self, path: str) -> str:
        return self.text


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"reward": 1' + "0" * 400 + "}", None),
        ("[" * 100_000, None),
        ('{"reward": NaN}', None),
        ('{"reward": Infinity}', None),
        ('{"reward": 1e400}', None),
        ('{"reward": 3}', 1.0),
        ('{"reward": -3}', 0.0),
        ('{"a": 1e308, "b": 1e308, "c": 0, "d": -1}', 0.5),
    ],
)
async def test_a_verdict_is_a_number_from_0_to_1(text: str, reward: float | None) -> None:
    wrote: Any = Wrote(text)
    said = await _verdict(wrote, ExecResult(0), read_folder(str(TASKS / "greeting"))[0][0])
    assert (None if said is None else _reward(said)) == reward


class TooFull(Archives):
    """A sandbox whose folders are too large to be moved."""

    async def pack(self, folders: Sequence[str], *, leave_out: Sequence[str] = ()) -> bytes:
        raise SandboxFileError(errno.EFBIG, "too much", "/app")

    async def unpack(self, archive: bytes, *, instead_of: Sequence[str] = ()) -> None:
        raise NotImplementedError


async def test_what_cant_be_moved_has_a_metric_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    env = Harbor(HarborConfig(folder=str(TASKS / "greeting")))
    monkeypatch.setattr(Harbor, "playing", read_folder(str(TASKS / "greeting"))[0][0])
    monkeypatch.setattr(Harbor, "sandbox", TooFull())
    assert (await env.verify(), not_moved(env), no_verdict(env)) == (0.0, 1.0, 0.0)


def folder_of(tmp_path: Path, settings: str = "", script: bytes = b"#!/bin/sh\necho 1\n") -> Path:
    task = tmp_path / "one"
    for name in ("environment", "tests"):
        (task / name).mkdir(parents=True)
    (task / "environment" / "Dockerfile").write_bytes(b"\xef\xbb\xbfFROM x\r\nWORKDIR /app\r\n")
    (task / "task.toml").write_bytes(b"\xef\xbb\xbf" + settings.encode())
    (task / "instruction.md").write_bytes(b"\xef\xbb\xbfDo it.\r\n")
    (task / "tests" / "test.sh").write_bytes(script)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "read"),
    [
        ('[environment]\nmemory = "8G"', {"memory_mb": 8192}),
        ('[environment]\nmemory = "512M"', {"memory_mb": 512}),
        ('[environment]\nmemory = "1.5 GiB"', {"memory_mb": 1536}),
        ('[environment]\nmemory_mb = "1024"\nmemory = "8G"', {"memory_mb": 1024}),
        ("[environment]\nmemory_mb = 1024.0", {"memory_mb": 1024}),
        ('[environment]\nmemory = "2048"', {"memory_mb": 2048}),
        ("[environment.env]\nA = '${A:-x}/${B:-}y'", {"variables": {"A": "x/y"}}),
        ("[environment]\ngpus = 0.0", {"memory_mb": None}),
        ('[environment]\nallow_internet = "false"', {"hosts": ()}),
        ('[agent]\ntimeout_sec = "90"\n[verifier]\ntimeout_sec = 1e2', {"agent_s": 90.0, "tests_s": 100.0}),
        ("[verifier.env]\nPORT = 22", {"test_variables": {"PORT": "22"}}),
        ("[task]\nkeywords = [2024]", {"tags": ("2024",)}),
        ("", {"instruction": "Do it.", "workdir": "/app"}),
    ],
)
def test_settings_as_others_write_them(tmp_path: Path, settings: str, read: dict[str, Any]) -> None:
    tasks, refused = read_folder(str(folder_of(tmp_path, settings)))
    assert not refused
    assert {name: getattr(tasks[0], name) for name in read} == read


@pytest.mark.parametrize(
    ("settings", "script", "why"),
    [
        ("", b"#!/bin/sh\r\necho 1\r\n", "test.sh has CRLF line ends: convert it with dos2unix"),
        ("", b"\xef\xbb\xbf#!/bin/sh\n", "test.sh has a byte order mark"),
        ('[environment]\nmemory = "a lot"', b"", "it can't be read: environment.memory: should be a valid number"),
        ("[environment]\nmemory_mb = 0.5", b"", "it can't be read: environment.memory_mb: should be a valid integer"),
        ("[agent]\ntimeout_sec = nan", b"", "it can't be read: agent.timeout_sec: should be"),
        ("environment = 1", b"", "it can't be read: environment: should be a mapping"),
        ("[environment]\ngpus = 1", b"", "it needs GPUs"),
        ("[environment]\nnetwork_mode = 'none'", b"", "it can't be read: environment.network_mode: should be"),
        ("[agent]\nuser = 'nobody'", b"", "it needs a user other than root"),
        ("[environment]\nworkdir = 'app'", b"", "its folder app is not absolute"),
    ],
)
def test_settings_that_cant_be_played(tmp_path: Path, settings: str, script: bytes, why: str) -> None:
    tasks, refused = read_folder(str(folder_of(tmp_path, settings, script)))
    assert not tasks
    assert refused["one"].startswith(why)
    with pytest.raises(UsageError, match="one can't be played"):
        Harbor(HarborConfig(folder=str(tmp_path))).task("train", 0)


SEPARATE = "[verifier]\nenvironment_mode = 'separate'\n"


def separate(tmp_path: Path, settings: str) -> Separate:
    [task], refused = read_folder(str(folder_of(tmp_path, settings)))
    assert not refused
    assert task.separate is not None
    return task.separate


def test_tests_in_an_image_of_their_own() -> None:
    [task], _ = read_folder(str(TASKS / "apart"))
    assert task.separate == Separate(
        image=str(TASKS / "apart/tests"),
        has_tests=True,
        workdir="/grading",
        artifacts=(Artifact("/logs/artifacts"), Artifact("/app/squares.txt"), Artifact("/data/drafts", ("*.tmp",))),
        collect=(("sort -n squares.txt > /logs/artifacts/sorted.txt", 60.0),),
        variables={"LAST": "4"},
        hosts=None,
    )
    env = Harbor(HarborConfig(folder=str(TASKS / "apart"), base_image="python"))
    spec, of_tests = env.spec_of(env.task("train", 0)), env.tests_spec_of(env.task("train", 0))
    assert spec.writable == ("/app", "/data", "/logs", "/root", "/solution", "/tests")
    assert of_tests.writable == ("/app", "/data", "/grading", "/logs", "/root", "/tests")
    assert (of_tests.image, of_tests.base) == (str(TASKS / "apart/tests"), "python")


def test_where_tests_in_an_environment_of_their_own_run(tmp_path: Path) -> None:
    same = separate(tmp_path, SEPARATE)
    agents = str(tmp_path / "one/environment")
    assert (same.image, same.has_tests, same.workdir) == (agents, False, "/app")
    (tmp_path / "one/tests/Dockerfile").write_bytes(b"\xef\xbb\xbfFROM x\r\nWORKDIR /grade\r\n")
    read_folder.cache_clear()
    [task], _ = read_folder(str(tmp_path))
    assert (task.separate.image, task.separate.workdir) == (str(tmp_path / "one/tests"), "/grade")


@pytest.mark.parametrize(
    ("settings", "image", "workdir"),
    [
        ("[verifier.environment]\ndocker_image = 'judge'\n", "judge", "/"),
        ("[verifier.environment]\ndocker_image = 'judge'\nworkdir = '/w'\n", "judge", "/w"),
        ("[verifier.environment]\nmemory = '1G'\n", None, "/app"),
    ],
)
def test_environment_of_tests_in_the_settings(tmp_path: Path, settings: str, image: str | None, workdir: str) -> None:
    place = separate(tmp_path, settings)
    assert (place.image, place.workdir) == (image or str(tmp_path / "one/environment"), workdir)
    assert place.has_tests == (image is not None)
    assert place.artifacts == (Artifact("/logs/artifacts"),)


def test_what_an_archive_keeps_of_artifacts() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in (
            "app/a.txt",
            "app/b.txt",
            "data/x/1.py",
            "data/x/__pycache__/1.pyc",
            "data/xy",
            "data/x/deep/2.py",
        ):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
        for name, target, kind in (
            ("data/x/inside", "deep/2.py", tarfile.SYMTYPE),
            ("data/x/outside", "../../tests/expected", tarfile.SYMTYPE),
            ("data/x/absolute", "/tests/expected", tarfile.SYMTYPE),
            ("data/x/1/2/up", "../../..", tarfile.SYMTYPE),
            ("data/x/1/climbs", "2/up/../tests/expected", tarfile.SYMTYPE),
            ("data/x/hard", "data/x/1.py", tarfile.LNKTYPE),
            ("data/x/hard_outside", "app/b.txt", tarfile.LNKTYPE),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            archive.addfile(entry)

    def names(*artifacts: Artifact) -> list[str]:
        with tarfile.open(fileobj=io.BytesIO(only(out.getvalue(), artifacts))) as archive:
            return archive.getnames()

    assert names(Artifact("/app/a.txt"), Artifact("/data/x", ("*.pyc", "deep"))) == [
        "app/a.txt",
        "data/x/1.py",
        "data/x/hard",
    ]
    assert names(Artifact("/data/x", ("__pycache__", "deep/2*"))) == ["data/x/1.py", "data/x/hard"]
    everything = names(Artifact("/data/x"))
    assert "data/x/inside" in everything
    assert not {"data/x/outside", "data/x/absolute", "data/x/1/climbs"} & {*everything}


@pytest.mark.parametrize(
    ("client", "why"),
    [
        ("{build: {context: ., dockerfile: Dockerfile.dev}}", "it needs the Dockerfile Dockerfile.dev"),
        ("{build: {context: ., args: {A: 1}}}", "it needs the build option args"),
        ("{build: ., ports: ['80:80']}", "it needs ports"),
        ("{image: python, working_dir: /w}", ("python", "/w")),
        ("{build: {context: , dockerfile: ./Dockerfile, args: }}", ("", "/app")),
        ("{build: {dockerfile: Dockerfile}, environment: , volumes: }", ("", "/app")),
        ("", ("", "/app")),
    ],
)
def test_services_of_a_compose_file(tmp_path: Path, client: str, why: str | tuple[str, str]) -> None:
    (tmp_path / "task.yaml").write_text("instruction: Do it.\ntags:\n")
    (tmp_path / "run-tests.sh").write_text("true\n")
    (tmp_path / "docker-compose.yaml").write_text(f"services:\n  client: {client}\n")
    if "image" not in client:
        (tmp_path / "Dockerfile").write_text("FROM x\nWORKDIR /app\n")
    tasks, refused = read_folder(str(tmp_path))
    assert [why] == [*refused.values(), *((task.image.replace(str(tmp_path), ""), task.workdir) for task in tasks)]


def test_variables_of_a_compose_file_are_what_stands_there(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM x\nWORKDIR /app\n")
    (tmp_path / "task.yaml").write_text("instruction: Do it.\nmax_agent_timeout_sec: '90'\ntags: [2024-01-01]\n")
    (tmp_path / "run-tests.sh").write_text("true\n")
    (tmp_path / "docker-compose.yaml").write_text(
        "services:\n  client:\n    build: .\n    environment: {A: yes, B: 010, C: 12:30, D: 1_000, E: '${HOME}'}\n"
    )
    [task], _ = read_folder(str(tmp_path))
    assert task.variables == {"A": "yes", "B": "010", "C": "12:30", "D": "1_000"}
    assert (task.agent_s, task.tags) == (90.0, ("2024-01-01",))
