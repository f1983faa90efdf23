"""scripts/test.sh and scripts/setup.sh with stub programs: what they select, ask, install, start and print."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCKER = '#!/bin/sh\n[ -e "$STUBS/up" ]\n'
DOCKERD = """\
#!/bin/sh
trap 'rm -f "$STUBS/up"; touch "$STUBS/stopped"; exit 0' TERM
touch "$STUBS/up"
while :; do sleep 0.05; done
"""
BROKEN = "#!/bin/sh\necho no cgroups >&2\nexit 1\n"
PYTHON = """\
#!/bin/sh
[ "$2" != benchmarks ] || { echo "kits: $*" >&2; exit ${KITS_EXIT:-0}; }
[ -e "$STUBS/up" ] && echo with a daemon
echo "args: $*"
exit ${PYTEST_EXIT:-0}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    for name in ("test.sh", "outside.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    stub(tmp_path / ".venv/bin/python", PYTHON)
    (tmp_path / "stubs").mkdir()
    stub(tmp_path / "stubs/docker", DOCKER)
    return tmp_path


def stub(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def run(checkout: Path, *arguments: str, user: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    stubs = checkout / "stubs"
    stub(stubs / "id", f"#!/bin/sh\necho {user}\n")
    stub(stubs / "apt-get", "#!/bin/sh\nexit 1\n")
    base = {"PATH": f"{stubs}:{os.environ['PATH']}", "STUBS": str(stubs), "DOCKERD_LOG": str(stubs / "log")}
    stdin = options.pop("stdin", subprocess.DEVNULL)
    command = ["bash", str(checkout / "scripts/test.sh"), *arguments]
    return subprocess.run(command, env={**base, **options}, stdin=stdin, capture_output=True, text=True, check=False)


def test_setup_ends_with_the_line_that_activates_the_environment(tmp_path: Path) -> None:
    """Also if there is nothing to install; targets that only need the environment don't print it."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    stub(tmp_path / "scripts/setup.sh", "#!/bin/sh\n")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text("ACTIVE=yes\n")
    stub(tmp_path / ".venv/bin/python", "#!/bin/sh\n")
    make = ["make", "-C", str(tmp_path), "--no-print-directory"]
    shown = subprocess.run([*make, "setup", "STACK=cpu"], capture_output=True, text=True, check=True).stdout
    last = shown.splitlines()[-1]
    assert subprocess.run(
        ["sh", "-c", f"{last} && echo $ACTIVE"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout == "yes\n"  # fmt: skip
    assert "activate" not in subprocess.run([*make, "bench"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("part", "selection"), [("core", "-m core or not slow "), ("rest", "-m not (core or not slow) "), ("all", "")]
)
def test_options_are_passed_on_and_a_running_daemon_is_kept(checkout: Path, part: str, selection: str) -> None:
    (checkout / "stubs/up").touch()
    result = run(checkout, part, "-k", "name")
    assert f"args: -m pytest -n 4 {selection}-k name" in result.stdout.splitlines()
    assert "with a daemon" in result.stdout
    assert ("make test-rest" in result.stdout) == (part == "core")
    assert (checkout / "stubs/up").exists()


def test_root_starts_a_daemon_which_is_stopped_at_the_end(checkout: Path) -> None:
    stub(checkout / "stubs/dockerd", DOCKERD)
    result = run(checkout, "all", PYTEST_EXIT="3")
    assert result.returncode == 3
    assert "test would start dockerd" in result.stdout
    assert "with a daemon" in result.stdout
    assert (checkout / "stubs/stopped").exists()
    assert not (checkout / "stubs/up").exists()


@pytest.mark.parametrize(
    ("answer", "environ", "starts"), [("y", {}, True), ("n", {}, False), ("", {}, False), ("n", {"YES": "1"}, True)]
)
def test_terminal_is_asked_before_a_daemon(checkout: Path, answer: str, environ: dict[str, str], starts: bool) -> None:
    stub(checkout / "stubs/dockerd", DOCKERD)
    ours, terminal = pty.openpty()
    try:
        os.write(ours, f"{answer}\n".encode() * 3)
        result = run(checkout, "core", stdin=terminal, **environ)
    finally:
        os.close(ours)
        os.close(terminal)
    assert ("with a daemon" in result.stdout) == starts
    assert ("left out: tests of the Docker engine (to add them: apt-get" in result.stdout) != starts


def test_other_users_see_which_tests_are_left_out(checkout: Path) -> None:
    result = run(checkout, "core", user=1000)
    assert result.returncode == 0
    assert "args: -m pytest" in result.stdout
    assert "test: left out: tests of the Docker engine" in result.stdout.partition("args:")[2]


def test_the_log_of_a_daemon_that_fails_to_start_is_shown(checkout: Path) -> None:
    stub(checkout / "stubs/dockerd", BROKEN)
    result = run(checkout, "core")
    assert "no cgroups" in result.stderr
    assert "left out: tests of the Docker engine" in result.stdout


@pytest.mark.parametrize("user", [0, 1000])
def test_ci_fails_without_a_daemon(checkout: Path, user: int) -> None:
    stub(checkout / "stubs/dockerd", BROKEN)
    result = run(checkout, "core", user=user, CI="true")
    assert result.returncode == 1
    assert "args:" not in result.stdout


def test_third_party_suites_run_and_their_failure_counts(checkout: Path) -> None:
    (checkout / "stubs/up").touch()
    assert "kits: -m benchmarks conformance --ci" in run(checkout, "rest").stderr
    assert run(checkout, "all", KITS_EXIT="4").returncode == 4
    assert "kits" not in run(checkout, "all", "-k", "name").stderr
    assert "kits" in run(checkout, "rest", "-k", "name", CI="true").stderr
    assert "kits" not in run(checkout, "core", CI="true").stderr


ENVIRONMENT = """\
#!/bin/sh
case "$2" in
*importlib*) exit ${NO_ROCM:-0};;
*version_info*) exec "$REAL" "$@";;
esac
"""


@pytest.mark.parametrize("there", [True, False])
def test_for_amd_gpus_nothing_of_the_environment_is_replaced(tmp_path: Path, there: bool) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("setup.sh", "outside.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "rocm.txt").write_text("torchtitan==0.3.0\n")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "theirs/bin").mkdir(parents=True)
    stub(tmp_path / "theirs/bin/python", ENVIRONMENT)
    stub(tmp_path / "theirs/bin/uv", '#!/bin/sh\necho "uv $*"\n')
    kept = tmp_path / "theirs/lib/vllm"
    kept.mkdir(parents=True)
    environ = {"STACK": "rocm", "VENV": "theirs", "PYTHON": sys.executable, "REAL": sys.executable}
    found = subprocess.run(
        ["bash", str(tmp_path / "scripts/setup.sh")],
        env={"PATH": os.environ["PATH"], "NO_ROCM": str(int(not there)), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert kept.is_dir(), "the environment was made anew"
    installed = [line for line in found.stdout.splitlines() if line.startswith("uv pip install")]
    if there:
        assert found.returncode == 0, found.stderr
        assert installed == [
            "uv pip install --python theirs/bin/python --no-deps -r requirements/rocm.txt",
            "uv pip install --quiet --python theirs/bin/python --no-deps -e .",
        ]
    else:
        assert (found.returncode, installed) == (1, [])
        assert "an environment that has vLLM for ROCm and the torch it came with, and theirs has not" in found.stderr


def test_what_is_added_for_amd_gpus_is_of_the_cuda_set_and_has_no_torch() -> None:
    added, cuda = (
        set((ROOT / "requirements" / f"{stack}.txt").read_text().splitlines()[1:]) for stack in ("rocm", "gpu")
    )
    assert added < cuda
    names = {line.partition("==")[0] for line in added}
    assert {"torchtitan", "torchmonarch", "torchstore", "renderers", "pydantic"} <= names
    assert not names & {"torch", "triton", "vllm"}
    assert not [name for name in names if name.startswith(("nvidia", "cuda"))]


@pytest.mark.parametrize(
    ("failed", "again", "status", "runs", "flaky"),
    [(0, 0, 0, 1, False), (1, 0, 0, 2, True), (3, 0, 0, 2, True), (4, 0, 1, 1, False), (2, 1, 1, 2, False)],
)
def test_failed_tests_run_again(checkout: Path, failed: int, again: int, status: int, runs: int, flaky: bool) -> None:
    (checkout / "stubs/up").touch()
    cache = ".pytest_cache/v/cache"
    stub(
        checkout / ".venv/bin/python",
        f"""#!/bin/sh
[ "$2" != benchmarks ] || exit 0
echo "run: $*"
case "$*" in *--last-failed*) exit {again} ;; esac
[ {failed} != 0 ] || exit 0
mkdir -p {cache}
for number in $(seq {failed}); do
  echo "  \\"tests/test_a.py::test_$number\\": true,"
done >{cache}/lastfailed
exit 1
""",
    )
    (checkout / cache).mkdir(parents=True)
    (checkout / cache / "lastfailed").write_text('{\n  "tests/test_old.py::test_old": true\n}')
    done = run(checkout, "rest")
    assert (done.returncode, done.stdout.count("run: ")) == (status, runs), done.stdout + done.stderr
    assert ("flaky, passed only when run again: tests/test_a.py::test_1" in done.stdout) is flaky
    assert "test_old" not in done.stdout


def test_the_record_of_failed_tests_stays_if_arguments_select_tests(checkout: Path) -> None:
    record = checkout / ".pytest_cache/v/cache/lastfailed"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    (checkout / "stubs/up").touch()
    run(checkout, "core", "--lf", PYTEST_EXIT="1")
    assert record.exists()
