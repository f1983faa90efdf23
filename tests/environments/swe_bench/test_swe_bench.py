"""`swe_bench:FILE`: issues of repositories, judged test by test; instances that don't do what they say are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from environments.swe_bench import SWEBench, SWEBenchConfig
from environments.swe_bench.environment import passing
from environments.swe_bench.instances import files_at, read_instances
from environments.swe_bench.small import _commit, _diff, make
from forge_env.environment.optional import gold_files, hand_in, unplayable
from forge_env.errors import UsageError
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy, ReplayPolicy
from forge_env.sandbox import ExecResult, SandboxEngine, TestsResult
from tests.environments.coding_rlvr.fake_engine import FakeEngine
from tests.sandboxes.conftest import engine_fixture


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("small"))


engine = engine_fixture()


def changed(small: Path, folder: Path, **fields: object) -> str:
    """A file with the first instance alone, otherwise filled in."""
    lines = [{**json.loads(line), **fields} for line in small.read_text().splitlines()[:1]]
    (folder / "one.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder / "one.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
async def test_each_is_proved_and_its_patch_solves_it(small: Path, engine: SandboxEngine) -> None:
    env = SWEBench(SWEBenchConfig(file=str(small)), sandboxes=engine)
    tasks = [env.task("train", index) for index in range(env.num_tasks("train"))]
    assert [task.tags[0] for task in tasks] == ["small/packaging", "small/docstring-parser", "small/h11"]
    assert await unplayable(env, tasks) == {}
    for task in tasks:
        solved = await run_episode(lambda: fe.make(f"swe_bench:{small}", sandboxes=engine), GoldPolicy(), task=task)
        assert (solved.valid, solved.reward, solved.metrics["tests_passed"]) == (True, 1.0, 1.0), solved.error
    none = ReplayPolicy(["Done."])
    idle = await run_episode(lambda: fe.make(f"swe_bench:{small}", sandboxes=engine), none, task=tasks[0])
    assert (idle.reward, idle.metrics["tests_passed"]) == (0.0, pytest.approx(1 / 3))
    assert not any(path.startswith(".git") or "test_packaging" in path for path in env.files(tasks[0]))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
async def test_instances_that_do_not_do_what_they_say(small: Path, engine: SandboxEngine, tmp_path: Path) -> None:
    first = read_instances(str(small))[0]
    fails, passes = json.dumps(first.fail_to_pass), json.dumps(first.pass_to_pass)
    gone = json.dumps([f"{first.test_paths[0]}::Tests::test_none"])
    for fields, why in (
        ({"FAIL_TO_PASS": passes, "PASS_TO_PASS": "[]"}, "test_one passes before the patch already"),
        ({"FAIL_TO_PASS": fails, "PASS_TO_PASS": fails}, "test_run doesn't pass before the patch"),
        ({"patch": ""}, "test_run doesn't pass after the patch"),
        ({"FAIL_TO_PASS": gone}, "the test tests/test_packaging_one.py::Tests::test_none does not exist"),
        ({"base_commit": "0" * 40}, "has no commit 0000"),
        ({"patch": "--- a/none.py\n+++ b/none.py\n@@ -1 +1 @@\n-x\n+y\n"}, "a patch does not apply"),
    ):
        read_instances.cache_clear()
        given = SWEBenchConfig(file=changed(small, tmp_path, **fields), repositories=str(small.parent / "repositories"))
        env = SWEBench(given, sandboxes=engine)
        found = await unplayable(env, [env.task("train", 0)])
        assert why in found[first.instance_id]


def test_the_same_packages_give_the_same_commits(small: Path, tmp_path: Path) -> None:
    again = make(tmp_path)
    assert again.read_text() == small.read_text()
    first = read_instances(str(small))[0]
    repository = str(small.parent / "repositories" / "small__packaging")
    before, after = files_at(repository, first.base_commit), files_at(repository, first.base_commit, first.patch)
    assert [path for path in after if after[path] != before[path]] == ["packaging/utils.py"]


def test_files_that_cant_be_read(small: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        fe.make(f"swe_bench:{tmp_path / 'none.jsonl'}")
    (tmp_path / "bad.jsonl").write_text('\n{"instance_id": "a"}\n')
    with pytest.raises(UsageError, match=r"bad.jsonl, line 2: repo: Field required"):
        fe.make(f"swe_bench:{tmp_path / 'bad.jsonl'}")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="no instance in"):
        fe.make(f"swe_bench:{tmp_path / 'empty.jsonl'}")


def test_files_as_others_write_them(small: Path, tmp_path: Path) -> None:
    row = json.loads(small.read_text().splitlines()[0])
    fail, passing = row.pop("FAIL_TO_PASS"), row.pop("PASS_TO_PASS")
    fail = json.loads(fail) if isinstance(fail, str) else fail
    path = tmp_path / "instances.json"
    path.write_text(json.dumps([{**row, "fail_to_pass": repr(fail), "pass_to_pass": None}]))
    [instance] = read_instances(str(path))
    assert (instance.fail_to_pass, instance.pass_to_pass) == (fail, [])
    twice = tmp_path / "twice.jsonl"
    twice.write_text(json.dumps({**row, "FAIL_TO_PASS": fail, "PASS_TO_PASS": passing}) + "\n")
    twice.write_text(twice.read_text() * 2)
    with pytest.raises(UsageError, match=r"several instances have one id: .*remove all but one"):
        read_instances(str(twice))
    path.write_text(json.dumps([{**row, "FAIL_TO_PASS": fail, "base_commit": "--output=x"}]))
    read_instances.cache_clear()
    with pytest.raises(UsageError, match="line 1: base_commit"):
        read_instances(str(path))


def test_only_what_was_reported_to_have_passed_counts() -> None:
    def result(**outcomes: Any) -> TestsResult:
        by_test = {test.replace("__", "t.py::"): outcome for test, outcome in outcomes.items()}
        return TestsResult(False, 1, [], ExecResult(0), outcomes=by_test)

    passed, failed = "passed", "failed"
    assert passing(result(__a=passed), ["t.py::a", "t.py::b"]) == {"t.py::a"}
    assert passing(result(), ["t.py::a"]) == set()
    assert passing(result(__a="skipped"), ["t.py::a"]) == set()
    several = result(**{"__b[1]": passed, "__b[a: b]": failed, "__c[1]": passed, "__c[2]": passed, "__cc": failed})
    assert passing(several, ["t.py::b[1]", "t.py::b[a: b]", "t.py::b", "t.py::c", "t.py::c[3]"]) == {
        "t.py::b[1]",
        "t.py::c",  # all of its parameters
    }


WRONG, RIGHT = "def kind(text):\n    return text\n", "def kind(text):\n    return text.partition(':')[0]\n"


def parametrised(folder: Path, value: str, test_id: str) -> str:
    """A file with one instance, whose test has one parameter."""
    test = (
        f"import pytest\nfrom kinds import kind\n\n\n@pytest.mark.parametrize('text', [{value!r}])\n"
        "def test_kind(text):\n    assert kind(text) == text.partition(':')[0] != text\n\n\n"
        "def test_plain():\n    assert kind('a') == 'a'\n"
    )
    instance = {
        "instance_id": "one",
        "repo": "o/n",
        "base_commit": _commit(folder / "repositories/o__n", {"kinds.py": WRONG}),
        "problem_statement": "kind() keeps what follows the colon.\u2028Mend it.",
        "patch": _diff("kinds.py", WRONG, RIGHT),
        "test_patch": _diff("tests/test_kinds.py", "", test),
        "FAIL_TO_PASS": [f"tests/test_kinds.py::test_kind{test_id}"],
        "PASS_TO_PASS": ["tests/test_kinds.py::test_plain"],
    }
    (folder / "one.jsonl").write_text(json.dumps(instance, ensure_ascii=False), encoding="utf-8")
    return str(folder / "one.jsonl")


@pytest.mark.parametrize(
    ("value", "test_id"),
    [("a: b", "[a: b]"), ("a::b", "[a::b]"), ("a[0]: x", "[a[0]: x]"), ("a b]: c", "[a b]: c]"), ("a: b", "")],
)
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_ids_with_colons_and_brackets(tmp_path: Path, engine: SandboxEngine, value: str, test_id: str) -> None:
    file = parametrised(tmp_path, value, test_id)

    def make() -> fe.Environment:
        return fe.make("swe_bench", file=file, packages=["pytest"], sandboxes=engine)

    task = make().task("train", 0)
    assert await unplayable(make(), [task]) == {}
    idle = await run_episode(make, ReplayPolicy(["Done."]), task=task)
    solved = await run_episode(make, GoldPolicy(), task=task)
    assert (idle.reward, idle.metrics["tests_passed"], solved.reward) == (0.0, 0.5, 1.0)


@pytest.mark.parametrize("test_id", ["[x:", "[", "[a b"])
async def test_ids_that_the_data_set_cut_are_named_and_not_played(tmp_path: Path, test_id: str) -> None:
    env = fe.make("swe_bench", file=parametrised(tmp_path, "x: y", test_id), sandboxes=FakeEngine())
    task = env.task("train", 0)
    why = f"1 of 2 test ids are truncated, so it can't be judged: tests/test_kinds.py::test_kind{test_id}"
    assert await unplayable(env, [task]) == {"one": why}
    with pytest.raises(UsageError, match="instance one: 1 of 2 test ids are truncated"):
        await env.reset(options={"task": task})
    await env.close()


def test_what_the_agent_repairs_is_no_judge(tmp_path: Path) -> None:
    test = "def test_one():\n    pass\n"
    wrong = {"pkg/mod.py": "a = 1\n", "pkg/data.txt": "d\n", "pkg/a b.py": "b\n", "pkg/test_old.py": test}
    beside = {"pkg/tests/helper.py": "h\n", "pkg/tests/fixed.py": "f\n", "pkg/tests/test_new.py": test}
    removed = "diff --git a/pkg/a b.py b/pkg/a b.py\ndeleted file mode 100644\n--- a/pkg/a b.py\t\n+++ /dev/null\n"
    patch = _diff("pkg/mod.py", "a = 1\n", "a = 2\n") + _diff("pkg/tests/fixed.py", "f\n", "g\n")
    instance = {
        "instance_id": "one",
        "repo": "o/n",
        "base_commit": _commit(tmp_path / "repositories/o__n", {**wrong, **beside}),
        "problem_statement": "a",
        "patch": f"{patch}{removed}@@ -1 +0,0 @@\n-b\n",
        "test_patch": "",
        "FAIL_TO_PASS": ["pkg/test_old.py::test_one", "pkg/tests/test_new.py::test_one"],
    }
    (tmp_path / "one.jsonl").write_text(json.dumps(instance))
    env = SWEBench(SWEBenchConfig(file=str(tmp_path / "one.jsonl")))
    task = env.task("train", 0)
    assert set(env.hidden_tests(task)) == {"pkg/test_old.py", "pkg/tests/test_new.py", "pkg/tests/helper.py"}
    handed_in = hand_in(env, task, gold_files(env, task))
    assert fe.call_tool("bash", command="rm -f -- 'pkg/a b.py'") in handed_in
