"""A built wheel works without the checkout: plug-ins, data files, recipes and the embedded sandbox."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.sandboxes.conftest import require

ROOT = Path(__file__).parents[1]
PACKAGES = ("forge_env", "forge_env_verifiers", "environments", "sandboxes", "trainers", "apps")
PARTS = ("pyproject.toml", "README.md", "LICENSE", *PACKAGES)


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of a new virtual environment, which has the wheel and sees this one's packages.

    The wheel is built from the source distribution.
    """
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in PARTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    shutil.rmtree(source)
    venv = folder / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=folder)
    run(
        *(sys.executable, "-m", "pip", "--python", venv / "bin" / "python"),
        *("install", "--quiet", "--no-index", "--no-deps", wheel),
        cwd=folder,
    )
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


@pytest.mark.slow
def test_a_wheel_holds_every_file_of_its_packages(installed: Path) -> None:
    (packages,) = installed.parent.glob("lib/python*/site-packages")
    files = [path for part in PARTS for path in (ROOT / part).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert len(files) > 300
    assert [path for path in files if not (packages / path.relative_to(ROOT)).is_file()] == []


@pytest.mark.slow
def test_a_wheel_works_elsewhere(installed: Path, tmp_path: Path) -> None:
    code = "import forge_env, trainers, sandboxes; print(forge_env.__file__, trainers.__file__, sandboxes.__file__)"
    for place in run(installed / "python", "-c", code, cwd=tmp_path).split():
        assert Path(place).is_relative_to(installed.parent)
    forge_env = installed / "forge-env"
    assert "coding_rlvr  " in run(forge_env, "info", cwd=tmp_path)
    assert "max_off_policy_steps" in run(forge_env, "config", "coding_rlvr", cwd=tmp_path)
    run(forge_env, "new", "mine", cwd=tmp_path)
    require("local")
    evaluation = ("eval", "coding_rlvr", "-m", "gold", "-n", "2", "--sandbox", "local", "--out", "out", "--json")
    summary = json.loads(run(forge_env, *evaluation, cwd=tmp_path))
    assert summary["environments"]["coding_rlvr"]["score"]["value"] == 1.0
