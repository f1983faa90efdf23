"""Which room may import which: the arrows of the architecture, read from the code itself."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "vllm", "torchtitan", "torchstore", "monarch"}
ROOMS = ("forge_env", "forge_env_verifiers", "sandboxes", "environments", "trainers", "apps")
MAY_IMPORT = {
    "forge_env": {"forge_env"},
    "forge_env_verifiers": {"forge_env"},
    "sandboxes": {"sandboxes", "forge_env"},
    "environments": {"environments", "forge_env"},
    "trainers": {"trainers", "forge_env"},
    "apps": {"apps", "trainers", "forge_env"},
}


def statements(node: ast.AST, wanted: Callable[[ast.AST], bool] = lambda _: True) -> Iterator[ast.AST]:
    """Every statement below `node`, also in what is wanted of them; expressions import nothing."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, part, ()):
            if wanted(child):
                yield child
                yield from statements(child, wanted)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Names of everything that a file imports, wherever in it."""
    found: list[str] = []
    for node in statements(tree(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return tuple(found)


def files(room: str) -> list[Path]:
    return [path for path in sorted((ROOT / room).rglob("*.py")) if "templates" not in path.parts]


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_inwards(room: str) -> None:
    for path in files(room):
        known = {name.split(".")[0] for name in imports(path)} & set(ROOMS)
        assert known <= MAY_IMPORT[room], f"{path.relative_to(ROOT)} imports {known - MAY_IMPORT[room]}"


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "trainers"])
def test_only_trainers_import_torch(room: str) -> None:
    for path in files(room):
        heavy = {name.split(".")[0] for name in imports(path)} & HEAVY
        assert not heavy, f"{path.relative_to(ROOT)} imports {heavy}"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def runs(node: ast.AST) -> bool:
    """Whether it is more than what only the type checker reads."""
    return not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """Modules of `known` that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in statements(tree(path), runs):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= inside or ({node.module} & known)
    return found - {module_name(path)}


def test_no_module_imports_itself_in_a_circle() -> None:
    paths = {module_name(path): path for room in ROOMS for path in files(room)}
    graph = {name: imported_modules(path, set(paths)) for name, path in paths.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(f"an import circle: {' -> '.join(reversed(error.args[1]))}") from None


def layers(package: str) -> list[str]:
    """Folders and files of a package in the order of the architecture page, the highest layer first."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(rf"^{package}/ .*\n((?:  .*\n)+)", page, re.MULTILINE)
    return [line.split()[0].removesuffix("/").removesuffix(".py") for line in block[1].splitlines()]


@pytest.mark.parametrize("package", ["forge_env", "trainers"])
def test_a_layer_imports_only_lower_layers(package: str) -> None:
    order = layers(package)
    core = order.index("*") if "*" in order else len(order)
    paths = {module_name(path): path for path in files(package) if path.parent != ROOT / package or path.stem[0] != "_"}

    def depth(module: str) -> int:
        name = module.split(".")[1]
        return order.index(name) if name in order else core

    for module, path in paths.items():
        above = [name for name in imported_modules(path, set(paths)) if depth(name) < depth(module)]
        assert not above, f"{path.relative_to(ROOT)} imports {', '.join(above)}, of a higher layer"


def test_the_core_knows_no_folder() -> None:
    """Type-checking imports count too, except for the environment that a policy's session gets."""
    known = {module_name(path) for path in files("forge_env")}
    for path in (ROOT / "forge_env").glob("*.py"):
        if path.stem not in ("__init__", "__main__", "registry"):
            folders = {name for name in imports(path) if name in known and name.count(".") > 1}
            assert folders <= ({"forge_env.environment.base"} if path.stem == "policy" else set()), path


def test_only_actors_and_compat_import_monarch() -> None:
    for path in files("trainers"):
        if not {"actors", "compat"} & set(path.parts):
            assert not [name for name in imports(path) if name.split(".")[0] == "monarch"], path


def test_only_compat_imports_private_modules_of_the_training_stack() -> None:
    redirected = {"monarch._rust_bindings"}  # the library whose calls `trainers.actors.sockets` redirects
    for path in files("trainers"):
        if "compat" not in path.parts:
            private = {name for name in imports(path) if name.split(".")[0] in HEAVY and "._" in name}
            assert private <= redirected, f"{path.relative_to(ROOT)} imports {private}"


@pytest.mark.parametrize("room", ["forge_env", "trainers"])
def test_tests_mirror_the_rooms(room: str) -> None:
    folders = {path.parent.name for path in (ROOT / room).glob("*/__init__.py")}
    assert folders <= {path.parent.name for path in (ROOT / "tests" / room).glob("*/test_*.py")}


def test_the_architecture_page_shows_every_folder() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    for room in ("forge_env", "trainers"):
        folders = [path.parent.name for path in sorted((ROOT / room).glob("*/__init__.py"))]
        assert len(folders) > 5
        assert not [name for name in folders if not re.search(rf"^  {name}/ +\w", page, re.MULTILINE)]


TIME_OF_DAY = {
    "forge_env/gateway/request.py": "when an answer was given, for programs",
    "environments/verifiers/endpoint.py": "a message's time, as its library wants it",
    "forge_env/cli/sandbox.py": "the age of a sandbox that another process has made",
    "forge_env/rollout/episode.py": "when an episode began, for people",
    "forge_env/run/clock.py": "by how much the wall clocks of two hosts differ, for the log",
    "forge_env/view/runs.py": "how long ago a run was written to, for people",
    "forge_env/run/metrics.py": "a TensorBoard event's time",
    "forge_env/run/trackers.py": "when MLflow's metrics were logged",
    "sandboxes/box.py": "whether a sandbox has set its clock",
    "sandboxes/runner/supervisor.py": "the sandbox's own",
}
"""What may know it: all else measures time by clocks that nobody sets."""


def test_a_clock_that_is_set_moves_nothing() -> None:
    for room in ROOMS:
        for path in files(room):
            if "attacks" not in path.parts and str(path.relative_to(ROOT)) not in TIME_OF_DAY:
                assert "time.time()" not in path.read_text(), path


def test_no_tracked_file_names_a_registry_or_a_path_of_this_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    words = ["files.python" + "hosted", "pypi" + ".org", "index-url" + " http", "/root/" + ".pyenv"]
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in {".py", ".toml", ".txt", ".md", ".yaml", ".sh", ".cfg", ""} and path.is_file():
            text = path.read_text(errors="replace")
            assert not [word for word in words if word in text], name
