"""`SandboxSpec(packages=...)`: from the index that pip uses, once, into a layer that any later sandbox has at once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import docker
import pytest
import pytest_asyncio

from forge_env.errors import SandboxUnavailableError, UsageError
from forge_env.sandbox import Limits, SandboxEngine, SandboxSpec, open_engine
from sandboxes.images import cache, packages, rootfs

from .conftest import ENGINES, require
from .wheels import use_wheels, write_wheel

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
SOURCE = "ANSWER = 42\ndef main(): print('it runs', ANSWER)\n"


def counted_installs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What is installed from now on, in order."""
    done: list[tuple[str, ...]] = []
    install = packages._install

    def counting(wanted: Any, python: packages.Python, folder: Path) -> None:
        done.append(tuple(wanted))
        install(wanted, python, folder)

    monkeypatch.setattr(packages, "_install", counting)
    return done


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("wheels")
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_wheels(folder, monkeypatch, ())
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield folder


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def engine(request: Any, index: Path) -> AsyncIterator[SandboxEngine]:
    require(request.param)
    async with open_engine(request.param, concurrency=3, warm=0) as engine:
        yield engine
        tags = package_images(engine)
    remove(tags)


def package_images(engine: SandboxEngine) -> list[str]:
    """Images that it made of packages: none where it has no images."""
    made = [task.result() for task in getattr(engine, "_images", {}).values() if not task.exception()]
    return [tag for tag in made if "/packages:" in tag]


def remove(tags: list[str]) -> None:
    for tag in tags:
        docker.from_env().images.remove(tag, force=True)


def unique(index: Path, engine: SandboxEngine) -> str:
    """A package that nobody has installed before, in the index."""
    name = f"fe_{engine.name}_{os.urandom(4).hex()}"
    write_wheel(name, "1.5", SOURCE, index)
    return name


@pytest.mark.slow
async def test_installed_once_and_found(engine: SandboxEngine, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = unique(index, engine)
    installs = counted_installs(monkeypatch)
    spec = SandboxSpec(packages=(f"{name}>=1",))

    async def use() -> tuple[str, str, bool]:
        async with engine.session(spec) as sandbox:
            imported = await sandbox.run_python(f"import {name}; print({name}.ANSWER)")
            program = await sandbox.exec([f"{name}-run"])
            python = await sandbox.exec(["python3", "-c", f"import {name}; open({name}.__file__, 'w')"])
            return imported.stdout, program.stdout, python.ok

    assert await asyncio.gather(*(use() for _ in range(3))) == [("42\n", "it runs 42\n", False)] * 3
    assert installs == [(f"{name}>=1",)]
    async with engine.session() as without:
        assert "ModuleNotFoundError" in (await without.run_python(f"import {name}")).stderr


async def test_modules_that_are_imported_ahead(engine: SandboxEngine, index: Path) -> None:
    name = unique(index, engine)
    write_wheel(f"{name}_born", "1", "import os\nPROCESS = os.getpid()\n", index)
    spec = SandboxSpec(packages=(f"{name}_born",), preload=(f"{name}_born", "no_such_module_at_all"))
    script = f"""
import os, subprocess, sys
import helper
import {name}_born as born
print("ahead" if born.PROCESS != os.getpid() else "late", end=" ")
print(sys.argv, __name__, __file__, helper.SAYS, os.environ["GIVEN"])
print(subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, text=True).stdout.strip())
sys.exit(3)
"""
    async with engine.session(spec) as sandbox:
        await sandbox.write_files({"main.py": script, "helper.py": "SAYS = 'hello'", "bad.py": "def ("})

        async def run(*argv: str, **env: str) -> tuple[int | None, str, str]:
            process = await sandbox.spawn(argv, env={"GIVEN": "5", **env})
            result = await process.wait(60)
            assert result is not None
            return result.exit_code, result.stdout, result.stderr

        for _ in range(1000):  # it is imported once the sandbox has nothing to do
            status, said, wrong = await run("python", "main.py", "a b")
            if not said.startswith("late"):
                break
        assert said == "ahead ['main.py', 'a b'] __main__ main.py hello 5\n7\n", wrong
        assert status == 3
        assert (await run("python", "-c", "print(8)"))[:2] == (0, "8\n")
        await sandbox.write_files({"other/aside.py": "SAYS = 'aside'"})
        await sandbox.write_file("path/main.py", "import sys, aside; print(aside.SAYS, sys.flags.utf8_mode)")
        status, said, wrong = await run("python", "path/main.py", PYTHONPATH="other", PYTHONUTF8="1")
        assert (status, said) == (0, "aside 1\n"), wrong
        status, said, _ = await run("python", "main.py", PATH="/nowhere")
        assert (status, said) == (127, "")
        status, _, wrong = await run("python3", "bad.py")
        assert (status, "SyntaxError" in wrong) == (1, True)
        status, _, wrong = await run("python3", "none.py")
        assert (status, "can't open file" in wrong) == (2, True)
    with pytest.raises(UsageError, match="is not a module"):
        SandboxSpec(preload=("import os",))


async def test_modules_that_change_their_process_when_imported(engine: SandboxEngine, index: Path) -> None:
    name = unique(index, engine)
    source = """
import os, sys
PROCESS = os.getpid()
os.environ["SET_AT_IMPORT"] = "1"
sys.path.append("/nowhere")
"""
    write_wheel(f"{name}_sets", "1", source, index)
    write_wheel(f"{name}_exits", "1", "raise SystemExit('not here')\n", index)
    modules = (f"{name}_exits", f"{name}_sets")
    spec = SandboxSpec(packages=modules, preload=modules)
    probe = f"""
import os
import {name}_sets as sets
print("ahead" if sets.PROCESS != os.getpid() else "late")
try:
    import {name}_exits
except SystemExit as error:
    print(error)
"""
    said = []
    async with open_engine(engine.name, concurrency=1, warm=0) as one:
        for _ in range(2):
            async with one.session(spec) as sandbox:
                for _ in range(1000):  # they are imported once the sandbox has nothing to do
                    result = await sandbox.run_python(probe)
                    if not result.stdout.startswith("late"):
                        break
                said.append(result.stdout)
        stats, tags = one.stats(), package_images(one)
    remove(tags)
    assert stats["started"] == 1, stats
    assert said == ["ahead\nnot here\n"] * 2


async def test_a_package_that_the_index_lacks_is_named(engine: SandboxEngine, index: Path) -> None:
    name = unique(index, engine)
    for asked in ("no_such_package_at_all", f"{name}>=7"):
        with pytest.raises(UsageError, match=rf"{asked}.* is not in the index that pip uses") as caught:
            await engine.acquire(SandboxSpec(packages=(asked,)))
        assert "pip config list" in str(caught.value)
    assert [name for name in os.listdir(cache.cache_folder()) if name.startswith("building-")] == []


async def test_packages_serve_tests_and_calls(engine: SandboxEngine, index: Path) -> None:
    name = unique(index, engine)
    async with engine.session(SandboxSpec(packages=(f"{name}>=1",))) as sandbox:
        files = {"own.py": f"import {name}\ndef f(): return {name}.ANSWER\n"}
        tests = "from own import f\ndef test_f(): assert f() == 42\n"
        both = f"import {name}\nfrom own import f\ndef test_f(): assert f() == {name}.ANSWER\n"
        for text, how in ((tests, "apart"), (both, "counted")):  # classes may be registered with it
            result = await sandbox.run_tests(
                files=files, tests={"test_own.py": text}, packages=[name], limits=Limits(wall_s=5)
            )
            assert (result.passed, result.how) == (True, how)


async def test_pip_that_is_missing_or_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    python = packages.this_python("/site", "/bin")
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: the disk is full\n")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: failed)
    with pytest.raises(SandboxUnavailableError, match="the disk is full"):
        packages.ensure_layer(["x"], python)
    monkeypatch.setattr(packages, "has_pip", lambda: False)
    with pytest.raises(SandboxUnavailableError, match="needs pip, which is missing"):
        packages.ensure_layer(["x"], python)
    assert [name for name in os.listdir(cache.cache_folder()) if name.startswith("packages-")] == []


async def test_wheels_for_another_python_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    commands: list[list[str]] = []

    def record(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", record)
    other = packages.Python("3.99", "x86_64", "glibc 2.31", "/site", "/bin")
    packages.ensure_layer(["x"], other)
    packages.ensure_layer(["x"], packages.this_python("/site", "/bin"))
    packages.ensure_layer(["x"], other)
    first, second = commands
    assert "3.99" in first
    assert "manylinux_2_31_x86_64" in first
    assert "manylinux_2_32_x86_64" not in first
    assert "--platform" not in second
    assert "--only-binary=:all:" in first


async def test_programs_run_with_the_sandboxs_python_wherever_this_one_is(tmp_path: Path) -> None:
    heads = {
        "plain": "#!/usr/bin/python3.11\n",
        "pip": "#!/bin/sh\n'''exec' \"/a folder/bin/python\" \"$0\" \"$@\"\n' '''\n",
        "uv": "#!/bin/sh\n'''exec' '/a folder/bin/python' \"$0\" \"$@\"\n' '''\n",
    }
    (tmp_path / "site" / "bin").mkdir(parents=True)
    for name, head in {**heads, "shell": "#!/bin/sh\n"}.items():
        (tmp_path / "site" / "bin" / name).write_text(f"{head}print('python')\n")
    packages._arrange(tmp_path, packages.this_python("/site", "/bin"))
    written = {name: (tmp_path / "bin" / name).read_text() for name in [*heads, "shell"]}
    assert written.pop("shell") == "#!/bin/sh\nprint('python')\n"
    assert set(written.values()) == {"#!/usr/bin/python3\nprint('python')\n"}


async def test_libraries_are_found_whose_path_has_a_blank() -> None:
    lines = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibz.so.1 => /a folder/libz.so.1 (0x00007f)\n\tlibno.so => not found\n"
    assert rootfs._LINKED.findall(f"{lines}\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n") == [
        "/a folder/libz.so.1",
        "/lib64/ld-linux-x86-64.so.2",
    ]


async def test_what_is_no_package_is_refused() -> None:
    for wrong in ("--find-links=x", "-r requirements.txt", "x; rm", "git+https://x/y", "./x", "", "http://x"):
        with pytest.raises(UsageError, match="is not a package"):
            SandboxSpec(packages=(wrong,))
    with pytest.raises(UsageError, match="single string"):
        SandboxSpec(packages="numpy")  # type: ignore[arg-type]
    for right in ("numpy", "numpy==2.1.0", "numpy>=2,<3", "requests[socks] ~= 2.0", "ruamel.yaml", "x!=1.*"):
        assert SandboxSpec(packages=[right]).packages == (right,)  # type: ignore[arg-type]


async def test_python_of_this_machine_reads_where_layers_are_mounted() -> None:
    from sandboxes.images import rootfs

    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    assert version in rootfs.site_folder()
    assert (cache.ensure_rootfs() / rootfs.site_folder()).is_dir()
