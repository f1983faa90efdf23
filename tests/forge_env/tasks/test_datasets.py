"""Tasks from files and hubs, and the order they come in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from environments.mixture import Mixture
from forge_env.environment.single_turn import SingleTurnConfig
from forge_env.errors import ForgeError, InfrastructureError, UsageError
from forge_env.registry import unregister
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy
from forge_env.tasks.datasets import DatasetConfig, StreamedTasks, load_tasks
from forge_env.tasks.order import MixtureOrder, TaskOrder
from forge_env.validation.checks import Validator
from tests.forge_env.rollout.test_episode import Golden

ROWS = [{"question": f"{i} + 1?", "answer": str(i + 1), "level": i % 3 + 1} for i in range(50)]
COLUMNS = {"prompt": "question", "gold": "answer", "answer": "answer", "difficulty": "level"}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    """A file of rows, one a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class QAConfig(SingleTurnConfig):
    dataset: DatasetConfig


class QA(fe.SingleTurnEnvironment):
    """Questions from a file."""

    config_class = QAConfig
    reward = fe.rewards.exact_match

    def tasks(self, split: str) -> Any:
        return load_tasks(self.config.dataset, split)


def hub_layout(folder: Path) -> None:
    """A folder as the hub keeps a dataset: two configurations, two splits, Parquet in parts."""
    pa = pytest.importorskip("pyarrow")
    write = pytest.importorskip("pyarrow.parquet").write_table
    parts = {"main/train-00000-of-00002": ROWS[:20], "main/train-00001-of-00002": ROWS[20:40]}
    parts |= {"main/test-00000-of-00001": ROWS[40:], "hard/train-00000-of-00001": ROWS[:5]}
    for name, rows in parts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  default: true\n  data_files:\n"
        "  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n"
        "- config_name: hard\n  data_files:\n  - split: train\n    path: hard/train-*\n---\n"
    )


@pytest.fixture(params=["jsonl", "json", "parquet", "hub", "stream"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The same rows in every kind of source; hub datasets from a folder on disk."""
    kind = request.param
    if kind == "json":
        (tmp_path / "all.json").write_text(json.dumps(ROWS))
        return {"path": str(tmp_path / "all.json")}
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(ROWS), tmp_path / "all.parquet")
        return {"path": str(tmp_path / "all.parquet")}
    written(tmp_path / "all.jsonl", *ROWS)
    if kind == "jsonl":
        return {"path": str(tmp_path / "all.jsonl")}
    pytest.importorskip("datasets")
    return {"path": "hub/rows", "streaming": kind == "stream"}


@pytest.fixture(autouse=True)
def local_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`datasets.load_dataset("hub/rows")` reads a local file, through the real library."""
    datasets = pytest.importorskip("datasets")
    real = datasets.load_dataset
    monkeypatch.setattr("forge_env.tasks.datasets.check_hub", lambda dataset: None)

    def load(path: str, name: str | None, *, split: str, streaming: bool) -> Any:
        if Path(path).is_dir():
            return real(path, name, split=split, streaming=streaming, cache_dir=str(tmp_path / "cache"))
        if path != "hub/rows":
            raise FileNotFoundError(f"Dataset {path!r} doesn't exist on the Hub")
        files = str(tmp_path / "all.jsonl")
        return real("json", data_files=files, split=split, streaming=streaming, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load)


@pytest.mark.slow
async def test_any_source_makes_an_environment(source: dict[str, Any]) -> None:
    def make() -> QA:
        return QA(QAConfig.model_validate({"dataset": {**source, "columns": COLUMNS, "eval_fraction": 0.3}}))

    env = make()
    failed = [check async for check in Validator(make, num_tasks=5).run() if check.status == "failed"]
    assert failed == []
    count = len(ROWS) if isinstance(env.tasks("train"), StreamedTasks) else None
    train = {env.task("train", index).prompt for index in range(count or env.num_tasks("train") or 0)}
    held_out = {env.task("eval", index).prompt for index in range(count or env.num_tasks("eval") or 0)}
    assert train.isdisjoint(held_out)
    assert train | held_out == {row["question"] for row in ROWS}
    assert 5 <= len(held_out) <= 25
    task = env.task("train", 0)
    assert (task.gold, task.data["answer"], task.difficulty) == (task.data["answer"], task.gold, task.data["level"])
    assert (await run_episode(make, GoldPolicy(), task=task)).reward == 1.0


def test_splits_may_be_files_or_the_datasets_own(tmp_path: Path) -> None:
    for name, rows in (("a", ROWS[:3]), ("b", ROWS[3:5])):
        written(tmp_path / f"{name}.jsonl", *rows)
    for path, splits in (
        (tmp_path, {"train": "a", "eval": "b"}),
        (tmp_path / "a.jsonl", {"train": "a.jsonl", "eval": "b.jsonl"}),
    ):
        config = DatasetConfig(path=str(path), splits=splits, columns=COLUMNS, num_tasks=2)
        assert [task.prompt for task in load_tasks(config, "train")] == ["0 + 1?", "1 + 1?"]
        assert [task.id for task in load_tasks(config, "eval")] == ["eval-0", "eval-1"]


def test_files_of_a_folder_that_hold_no_rows(tmp_path: Path) -> None:
    written(tmp_path / "train-00000-of-00001.jsonl", {"prompt": "a"})
    written(tmp_path / "test-00000-of-00001.jsonl", {"prompt": "b"})
    (tmp_path / "dataset_infos.json").write_text("{}")
    config = DatasetConfig(path=str(tmp_path), splits={"train": "train", "eval": "test"})
    assert [load_tasks(config, split)[0].prompt for split in ("train", "eval")] == ["a", "b"]
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(UsageError, match=r"written by save_to_disk .*to_parquet"):
        load_tasks(config)


def test_a_gzipped_file_must_be_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    with pytest.raises(UsageError, match="gunzip it"):
        load_tasks(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_in_the_hubs_layout(streaming: bool, tmp_path: Path) -> None:
    hub_layout(tmp_path / "gsm")
    given = {"path": str(tmp_path / "gsm"), "name": "main", "streaming": streaming, "columns": COLUMNS}
    config = DatasetConfig.model_validate({**given, "splits": {"train": "train", "eval": "test"}})
    train, held_out = load_tasks(config, "train"), load_tasks(config, "eval")
    assert [train[index].prompt for index in range(40)] == [row["question"] for row in ROWS[:40]]
    assert [held_out[index].prompt for index in range(10)] == [row["question"] for row in ROWS[40:]]
    hard = DatasetConfig.model_validate({**given, "name": "hard", "splits": {"train": "train"}})
    assert load_tasks(hard, "train")[4].prompt == "4 + 1?"
    mistakes: list[tuple[dict[str, Any], str]] = [({"name": "soft"}, "soft"), ({"splits": {"train": "tra"}}, "tra")]
    for wrong, said in mistakes:
        with pytest.raises(ForgeError, match=f"can't load dataset.*{said}"):
            load_tasks(DatasetConfig.model_validate({**given, **wrong}), "train")[0]


def test_a_stream_is_read_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            assert name.partition(".")[0] != "torch"

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])
    hub_layout(tmp_path / "gsm")
    given = {"path": str(tmp_path / "gsm"), "streaming": True, "shuffle_buffer": 5, "columns": COLUMNS}
    assert load_tasks(DatasetConfig.model_validate(given), "train")[0].prompt in [row["question"] for row in ROWS]


def test_a_stream_can_be_shuffled_by_seed(tmp_path: Path) -> None:
    hub_layout(tmp_path / "gsm")

    def order(seed: int) -> list[str]:
        given = {"path": str(tmp_path / "gsm"), "splits": {"train": "train"}, "columns": COLUMNS, "streaming": True}
        config = DatasetConfig.model_validate({**given, "shuffle_buffer": 30, "shuffle_seed": seed})
        tasks = load_tasks(config, "train")
        return [tasks[index].prompt for index in range(40)]

    assert set(order(1)) == {row["question"] for row in ROWS[:40]}
    assert order(1) == order(1) != order(2)
    assert order(1) != [row["question"] for row in ROWS[:40]]


@pytest.mark.slow
def test_a_stream_that_is_open_at_the_end_is_no_noise(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    hub_layout(tmp_path / "gsm")
    code = (
        "import forge_env as fe\n"
        f"config = fe.DatasetConfig(path={str(tmp_path / 'gsm')!r}, splits={{'train': 'train'}},"
        " columns={'prompt': 'question'}, streaming=True)\n"
        "print(fe.load_tasks(config, 'train')[1].prompt)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("1 + 1?\n", "")


def test_a_stream_that_breaks_goes_on_where_it_did() -> None:
    failures = 2

    def source() -> Iterator[fe.Task]:
        nonlocal failures
        for number in range(6):
            if number == 3 and failures:
                failures -= 1
                raise InfrastructureError("the connection broke")
            yield fe.Task(id=str(number), prompt="?")

    tasks = StreamedTasks(source)
    assert tasks[1].id == "1"
    for _ in range(2):
        with pytest.raises(InfrastructureError):
            tasks[4]
    assert [tasks[index].id for index in range(8)] == ["0", "1", "2", "3", "4", "5", "0", "1"]


@pytest.mark.slow
def test_a_hub_that_is_out_of_reach_is_said_at_once() -> None:
    pytest.importorskip("huggingface_hub")
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "forge_env", "info", "gsm8k", "dataset=openai/gsm8k"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "can't load dataset 'openai/gsm8k': http://127.0.0.1:9 can't be reached" in done.stderr
    assert "HF_HUB_OFFLINE=1" in done.stderr
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"path": "missing.jsonl"}, "no file missing.jsonl"),
        ({"columns": {"prompt": "questoin"}}, "no column 'questoin'.*did you mean 'question'"),
        ({"columns": {}}, "no column 'prompt'.*map one"),
        ({"columns": {**COLUMNS, "tags": "question"}}, r"row 0: tags: .*list.*\{tags: null\} takes none"),
        ({"columns": {**COLUMNS, "difficulty": "question"}}, "row 0: difficulty: should be a valid integer, not "),
        ({"splits": {"eval": "all"}}, "`splits` has no 'train'"),
        ({"eval_fraction": 0.0}, None),
        ({"path": __file__}, "can't read tasks from .*test_datasets.py"),
        ({"path": "no/such"}, "can't load dataset 'no/such'.*doesn't exist"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], expected: str | None, tmp_path: Path) -> None:
    written(tmp_path / "all.jsonl", *ROWS)
    config = DatasetConfig.model_validate({"path": str(tmp_path / "all.jsonl"), "columns": COLUMNS, **changes})
    if expected is None:
        with pytest.raises(UsageError, match="no tasks for split 'eval'"):
            load_tasks(config, "eval")
        return
    with pytest.raises(ForgeError, match=expected):
        load_tasks(config, "train")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("bad.jsonl", b'{"prompt": "a"}\n\n[1]\n', "line 3: a row is a JSON object"),
        ("latin.jsonl", b'{"prompt": "a"}\n{"prompt": "\xe9"}\n', r"line 2: not UTF-8: .*save it as UTF-8"),
        ("latin.json", b'[{"prompt": "\xe9"}]', r"latin.json: not UTF-8: .*save it as UTF-8"),
        ("latin.csv", b"prompt,gold\na,\xe9\n", r"latin.csv: not UTF-8: .*save it as UTF-8"),
        ("excel.csv", "prompt,gold\na,b\n".encode("utf-16"), "excel.csv: not UTF-8: .*iconv -f utf-16"),
        ("list.jsonl", b'[{"prompt": "a"},\n{"prompt": "b"}]', "line 1: not valid JSON.*must be named .json"),
        ("lfs.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS.*git lfs pull"),
        ("german.csv", b"prompt;gold\na;b\n", r"row 0: no column 'prompt'.*separated by commas, not by ';'"),
        ("cut.parquet", b"PAR1", "cut.parquet: "),
        ("short.csv", b"prompt,gold\na,b\nc\n", "short.csv, line 3: a row needs 2 values: prompt, gold"),
        ("open.csv", b'prompt,gold\n"a,b\n', "open.csv, line 2: not valid CSV: unexpected end of data"),
        ("two.csv", b"prompt,gold,gold\na,b,c\n", r"two.csv, line 1: several columns are called 'gold' .*rename"),
        ("two.jsonl", b'{"prompt": "a", "prompt": "b"}', "two.jsonl, line 1: several columns are called 'prompt'"),
        ("two.json", b'[{"prompt": "a", "x": {"k": 1, "k": 2}}]', "two.json: several columns are called 'k'"),
        ("ids.csv", b"prompt,id\na,x\nb,y\nc,x\nd,x\n", r"several rows have one id: 'x' \(rows 0, 2, 3\) .*id: null"),
        ("ids.jsonl", b'{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}', r"one id: '1' \(rows 0, 1\)"),
    ],
)
def test_a_file_that_cant_be_read_is_named(name: str, content: bytes, expected: str, tmp_path: Path) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=expected):
        load_tasks(DatasetConfig(path=str(tmp_path / name), eval_fraction=0.0), "train")


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", '{"prompt": "a"}'), ("a.json", '[{"prompt": "a"}]'), ("a.csv", "prompt\na\n")]
)
def test_files_of_windows_begin_with_a_mark(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert load_tasks(DatasetConfig(path=str(tmp_path / name), eval_fraction=0.0), "train")[0].prompt == "a"


def test_a_path_alone_will_do(tmp_path: Path) -> None:
    (tmp_path / "sums.csv").write_text("prompt,gold\n" + "".join(f"{n} + 1,{n + 1}\n" for n in range(9)))
    tasks = load_tasks(tmp_path / "sums.csv")
    assert all(task.gold == str(eval(task.prompt)) and task.split == "train" for task in tasks)
    os.utime(tmp_path / "sums.csv", (0, 0))
    assert load_tasks(str(tmp_path / "sums.csv")) is load_tasks(tmp_path / "sums.csv")


@pytest.mark.parametrize(("path", "splits"), [("", {}), ("rows.jsonl", {}), ("other.jsonl", {"train": "rows.jsonl"})])
def test_a_file_that_changed_is_read_again(path: str, splits: dict[str, str], tmp_path: Path) -> None:
    config = DatasetConfig(path=str(tmp_path / path), splits=splits)
    for gold in ("1", "2", "12"):
        written(tmp_path / "rows.jsonl", {"prompt": "p", "gold": gold})
        assert load_tasks(config, "train")[0].gold == gold


def test_a_row_that_lacks_a_column_is_named(tmp_path: Path) -> None:
    rows = [{"question": "1 + 1", "answer": "2"}, {"question": "2 + 2"}]
    path = written(tmp_path / "rows.jsonl", *rows)
    config = DatasetConfig(path=str(path), columns={"prompt": "question", "gold": "answer"})
    with pytest.raises(UsageError, match=r"rows.jsonl, row 1, unlike those before it, has no column 'answer'"):
        load_tasks(config, "train")


def one_task(tmp_path: Path, row: dict[str, Any], **columns: str | None) -> fe.Task:
    path = written(tmp_path / "one.jsonl", {"prompt": "p", **row})
    return load_tasks(DatasetConfig(path=str(path), eval_fraction=0.0, columns=columns), "train")[0]


@pytest.mark.parametrize(
    ("row", "expected", "data"),
    [
        ({"difficulty": "hard", "tags": "algebra"}, {}, {"difficulty": "hard", "tags": "algebra"}),
        ({"difficulty": None, "tags": None, "gold": None, "id": None}, {}, {}),
        (
            {"difficulty": 2.0, "tags": ["a"], "gold": 7, "id": 5},
            {"difficulty": 2, "tags": ["a"], "gold": "7", "id": "5"},
            {},
        ),
        ({"gold": ["7"], "id": {"a": 1}, "n": 1}, {}, {"gold": ["7"], "id": {"a": 1}, "n": 1}),
    ],
)
def test_fields_as_columns(row: dict[str, Any], expected: dict[str, Any], data: dict[str, Any], tmp_path: Path) -> None:
    expected = {"id": "train-0", "prompt": "p", "split": "train", **expected}
    assert one_task(tmp_path, row) == fe.Task(**expected, data=data)


def test_a_column_can_be_mapped_or_left_alone(tmp_path: Path) -> None:
    row = {"difficulty": 3, "level": 4.0, "gold": "x"}
    assert one_task(tmp_path, row, difficulty=None).difficulty == 1
    assert one_task(tmp_path, row, difficulty=None).data == {"difficulty": 3, "level": 4.0}
    assert one_task(tmp_path, row, difficulty="level").difficulty == 4
    assert one_task(tmp_path, row, gold="level").gold == "4.0"
    with pytest.raises(UsageError, match=r"row 0: prompt: .*valid string.*\{prompt: COLUMN\} takes another; columns: "):
        one_task(tmp_path, {"prompt": ["chat"]})


@given(st.integers(1, 50), st.integers(), st.integers(0, 5))
def test_every_epoch_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = TaskOrder(count, seed=seed)
    indices = [order[position] for position in range(epoch * count, (epoch + 1) * count)]
    assert sorted(indices) == list(range(count))
    assert indices == [TaskOrder(count, seed=seed)[position] for position in range(epoch * count, (epoch + 1) * count)]


def test_other_orders() -> None:
    assert [TaskOrder(3, shuffle=False)[position] for position in range(5)] == [0, 1, 2, 0, 1]
    assert TaskOrder(None)[10**9] == 10**9
    with pytest.raises(UsageError):
        TaskOrder(0)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 10), min_size=1), st.integers())
def test_a_mixture_uses_every_task_of_a_component_once_and_in_proportion(weights: dict[str, float], seed: int) -> None:
    order = MixtureOrder(weights, seed=seed)
    drawn = [order[position] for position in range(400)]
    for name, weight in weights.items():
        positions = [inner for component, inner in drawn if component == name]
        assert sorted(positions) == list(range(len(positions)))
        assert abs(len(positions) / 400 - weight / sum(weights.values())) <= 0.05 + 0.01 * len(weights)


async def test_a_mixture_plays_the_environments_it_is_made_of(tmp_path: Path) -> None:
    written(tmp_path / "all.jsonl", *ROWS)
    fe.register("qa", QA)
    fe.register("golden", Golden)
    options = {"dataset": {"path": str(tmp_path / "all.jsonl"), "columns": COLUMNS}}
    try:
        chosen = {"qa": {"weight": 3, "options": options}, "golden": {"options": {"max_turns": 2}}}

        def make() -> fe.Environment:
            return fe.make("mixture", environments=chosen)

        env = make()
        assert isinstance(env, Mixture)
        tasks = [env.task("train", index) for index in range(100)]
        assert Counter(task.tags[0] for task in tasks) == {"qa": 75, "golden": 25}
        assert tasks[0].id.startswith(f"{tasks[0].tags[0]}/")
        played = [await run_episode(make, GoldPolicy(), task=task) for task in tasks[:10]]
        assert all(trajectory.reward == 1.0 for trajectory in played)
        golden = next(task for task in tasks if task.tags[0] == "golden")
        await env.reset(options={"task": golden})
        assert "add" in [tool.name for tool in env.tools]
        await env.close()
    finally:
        unregister("qa")
        unregister("golden")


CHAT = [{"role": "system", "content": "Answer in a box."}, {"role": "user", "content": "2 + 2?"}]
SAID = {"role": "assistant", "content": "4"}
PARTS = [{"type": "text", "text": "2 + 2?"}]


@pytest.mark.parametrize(
    ("row", "columns", "shown", "gold"),
    [
        ({"prompt": CHAT, "reward_model": {"ground_truth": "4"}}, {"gold": "reward_model.ground_truth"}, CHAT, "4"),
        ({"prompt": CHAT, "completion": [SAID]}, {"gold": "completion"}, CHAT, "4"),
        ({"prompt": [*CHAT, SAID, CHAT[1]]}, {}, [*CHAT, SAID, CHAT[1]], None),
        ({"prompt": [{"role": "user", "content": PARTS}]}, {}, CHAT[1:], None),
        ({"prompt": CHAT}, {"prompt": None, "messages": "prompt"}, CHAT, None),
        ({"messages": [*CHAT, SAID]}, {}, CHAT, None),
        ({"conversations": [{"from": "system", "value": "Answer in a box."}, {"from": "human", "value": "2 + 2?"},
                            {"from": "gpt", "value": "4"}]}, {"messages": "conversations"}, CHAT, None),
        ({"question": "2 + 2?", "info": {"a": {"b": 4}}}, {"prompt": "question", "gold": "info.a.b"}, CHAT[1:], "4"),
        ({"question": "2 + 2?", "a": ' {"b": {"c": "4"}}'}, {"prompt": "question", "gold": "a.b.c"}, CHAT[1:], "4"),
        ({"question": "2 + 2?", "a.b": "x", "a": {"b": "y"}}, {"prompt": "question", "gold": "a.b"}, CHAT[1:], "x"),
        ({"prompt": json.dumps(CHAT), "answers": {"text": ["4"]}}, {"gold": "answers.text.0"}, CHAT, "4"),
        ({"prompt": [{"role": "developer", "content": "Answer in a box."}, CHAT[1]]}, {}, CHAT, None),
        ({"messages": json.dumps(CHAT), "a": '["3", {"b": "4"}]'}, {"gold": "a.1.b"}, CHAT, "4"),
        ({"prompt": "2 + 2?", "gold": float("nan"), "id": float("nan")}, {}, CHAT[1:], None),
        ({"messages": [*CHAT, SAID, CHAT[1]]}, {}, [*CHAT, SAID, CHAT[1]], None),
        ({"prompt": str(CHAT), "answer": "['3', '4']"}, {"gold": "answer.1"}, CHAT, "4"),
        ({"a": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "2 + 2?"}]}]}},
         {"prompt": "a.input"}, CHAT[1:], None),
        ({"prompt": [{**CHAT[1], "weight": 1, "id": "m1", "annotations": []}]}, {}, CHAT[1:], None),
        ({"prompt": [CHAT[1], {"role": "model", "content": "4"}, CHAT[1]]}, {}, [CHAT[1], SAID, CHAT[1]], None),
        ({"prompt": "2 + 2?", "image": {"bytes": "", "path": "a"}}, {"image": "image"}, CHAT[1:], None),
        ({"prompt": "2 + 2?", "image": {"bytes": "", "path": "a"}}, {"image": None}, CHAT[1:], None),
        ({"prompt": "2 + 2?", "image": {"bytes": "", "path": "a"}}, {"name": "image.path"}, CHAT[1:], None),
        ({"prompt": "2 + 2?", "image": {"bytes": None, "path": None}}, {}, CHAT[1:], None),
        ({"prompt": str(CHAT), "answer": "['3'\n '4']"}, {"gold": "answer.1"}, CHAT, "4"),
        ({"prompt": str(CHAT), "answer": "[3 4]"}, {"gold": "answer.1"}, CHAT, "4"),
    ],
)  # fmt: skip
def test_rows_of_other_frameworks(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str | None], shown: list[Any], gold: str | None
) -> None:
    path = written(tmp_path / "rows.jsonl", row)
    [task] = load_tasks(DatasetConfig(path=str(path), eval_fraction=0.0, columns=columns), "train")
    assert [
        message.to_openai() for message in QA(QAConfig(dataset=DatasetConfig(path=str(path)))).prompt(task)
    ] == shown
    assert (task.gold, task.id) == (gold, "train-0")


@pytest.mark.parametrize(
    ("row", "columns", "said"),
    [
        ({"prompt": [*CHAT, SAID]}, {}, "row 0: prompt: it must end with a user message, but ends with assistant"),
        ({"prompt": []}, {}, "row 0: prompt: it must end with a user message, but ends with nothing"),
        ({"prompt": [{"role": "judge", "content": ""}]}, {}, "row 0: not a message: role"),
        ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, {}, "a part of its content is neither"),
        ({"prompt": "p", "a": {"b": 1}}, {"gold": "a.c"}, "has no column 'a.c'"),
        ({"prompt": "p", "a": "text"}, {"gold": "a.b"}, "has no column 'a.b'"),
        ({"prompt": "p", "a": "{text"}, {"gold": "a.b"}, "has no column 'a.b'"),
        ({"prompt": "p", "a": "text"}, {"choices": "a"}, "row 0: choices: not a list of texts"),
        ({"prompt": "p", "a": []}, {"choices": "a"}, "row 0: choices: not a list of texts"),
        ({"prompt": "p", "a": [{"key": "A", "value": "x"}]}, {"choices": "a"}, "row 0: choices: not a list of texts"),
        ({"prompt": "p", "a": [["x"]]}, {"gold": "a.1.0"}, "has no column 'a.1.0'"),
        ({"prompt": float("nan")}, {}, "row 0: the prompt is null"),
        ({"prompt": " \n"}, {}, "row 0: the prompt is empty"),
        ({"messages": [{"role": "user", "content": None}]}, {}, "row 0: the prompt is empty"),
        ({"prompt": "<image>?", "images": [{"bytes": "", "path": None}]}, {}, "'images' has images, .*images: null"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}]},
            {},
            "row 0: the prompt has an image",
        ),
        ({"prompt": "?", "c": ["x", "y"], "a": "z"}, {"choices": "c", "gold": "a"}, "'z' is none of the choices"),
        ({"prompt": "?", "c": ["x", "y"], "a": -1}, {"choices": "c", "answer": "a"}, "-1 is none of the choices"),
        ({"prompt": "?", "c": ["x", "x"], "a": "x"}, {"choices": "c", "answer": "a"}, "'x' is none of the choices"),
    ],
)
def test_rows_that_are_no_tasks(tmp_path: Path, row: dict[str, Any], columns: dict[str, str], said: str) -> None:
    path = written(tmp_path / "rows.jsonl", row)
    with pytest.raises(UsageError, match=said):
        load_tasks(DatasetConfig(path=str(path), eval_fraction=0.0, columns=columns), "train")


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        (1, "B"),
        (1.0, "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("1", "B"),
        ("4", "C"),
        ("C", "C"),
        ("D", "D"),
        ("b", "B"),
        (" 5", "B"),
        ("A, C", "A, C"),
        (None, None),
        (["A", "B"], ["A", "B"]),
    ],
)
def test_the_answer_among_choices_becomes_a_letter(tmp_path: Path, answer: object, letter: object) -> None:
    path = written(tmp_path / "rows.jsonl", {"q": "2 + 2?", "c": ["3", "5", "4", 22], "answer": answer})
    columns = {"prompt": "q", "choices": "c", "answer": "answer"}
    [task] = load_tasks({"path": str(path), "columns": columns})
    assert task.prompt == "2 + 2?\n\nA. 3\nB. 5\nC. 4\nD. 22"
    assert task.data == {"answer": letter}


@pytest.mark.parametrize(
    "choices",
    [{"A": "x", "C": "y"}, '["x", null, "y"]', {"text": ["x", "y"], "label": ["A", "C"]}, ["x", None, "y", None]],
)
def test_choices_are_written_in_several_ways(tmp_path: Path, choices: object) -> None:
    path = written(tmp_path / "rows.jsonl", {"prompt": "?", "c": choices})
    assert load_tasks({"path": str(path), "columns": {"choices": "c"}})[0].prompt == "?\n\nA. x\nC. y"


def test_a_system_message_of_a_row_takes_the_place_of_the_environments_own(tmp_path: Path) -> None:
    class Told(QA):
        system_prompt = "Be brief."

    env = Told(QAConfig(dataset=DatasetConfig(path="x")))
    task = fe.Task(id="0", prompt="?", history=[fe.Message(role="system", content="Be long.")])
    assert [message.content for message in env.prompt(task)] == ["Be long.", "?"]
    assert [message.content for message in env.prompt(fe.Task(id="0", prompt="?"))] == ["Be brief.", "?"]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r"])
def test_a_row_ends_with_a_line_feed_alone(tmp_path: Path, mark: str) -> None:
    text = json.dumps({"prompt": f"a{mark}b"}, ensure_ascii=False) + "\r\n"
    (tmp_path / "rows.jsonl").write_bytes(text.encode() * 2)
    tasks = load_tasks(DatasetConfig(path=str(tmp_path / "rows.jsonl"), eval_fraction=0.0), "train")
    assert [task.prompt for task in tasks] == [f"a{mark}b"] * 2


def test_fields_and_rows_of_any_size(tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text("prompt,gold\n" + "x" * 200_000 + ",4\n")
    [task] = load_tasks(DatasetConfig(path=str(tmp_path / "long.csv"), eval_fraction=0.0), "train")
    assert len(task.prompt) == 200_000
    deep = '{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    for name, text in (("deep.jsonl", f"{deep}\n"), ("deep.json", f"[{deep}]")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=rf"{name}.*nested"):
            load_tasks(DatasetConfig(path=str(tmp_path / name), eval_fraction=0.0), "train")


def test_a_dictionary_says_where_tasks_come_from(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"question": "1 + 1?", "gold": "2"})
    (task,) = load_tasks({"path": str(path), "columns": {"prompt": "question"}}, "eval")
    assert (task.prompt, task.gold) == ("1 + 1?", "2")
    with pytest.raises(UsageError, match="colums: unknown key"):
        load_tasks({"path": str(path), "colums": {}})


def test_a_parquet_file_with_two_columns_of_one_name(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table([["a"], ["b"], ["c"]], names=["prompt", "gold", "gold"])
    parquet.write_table(table, tmp_path / "two.parquet")
    with pytest.raises(UsageError, match=r"two.parquet: several columns are called 'gold'"):
        load_tasks(tmp_path / "two.parquet")


def test_columns_without_a_name_and_ids_that_are_not_taken_may_repeat(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,id,,\na,x,,\nb,x,,\n")
    tasks = load_tasks({"path": str(tmp_path / "a.csv"), "columns": {"id": None}})
    assert [tasks[index].id for index in range(2)] == ["train-0", "train-1"]


def test_a_number_counts_the_nulls_of_padded_choices(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", {"prompt": "?", "c": ["x", None, "y"], "answer": 2})
    [task] = load_tasks({"path": str(path), "columns": {"choices": "c", "answer": "answer"}})
    assert task.data == {"answer": "C"}
