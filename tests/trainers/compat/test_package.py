"""`Package`: errors for names that a package no longer has, or that no longer mean the same."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from trainers.compat import ChangedPackageError, Package

PACKAGE = Package("pytest", ("1.0",))


@pytest.mark.parametrize("name", ["monarch", "torch", "torchstore", "torchtitan", "vllm"])
def test_the_installed_version_was_checked(name: str) -> None:
    pytest.importorskip("torchstore" if name == "torchstore" else "torch")
    package = import_module(f"trainers.compat.{name}").PACKAGE
    if package.installed is None:
        pytest.skip(f"{package.name} is not installed")
    assert package.installed in package.checked


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("compat_example")

    class Engine:
        def size(self) -> int:
            return 1

    module.Engine, module.device = Engine, "cuda"
    monkeypatch.setitem(sys.modules, "compat_example", module)
    return module


def test_a_missing_name_and_a_broken_assumption_name_the_version_to_install() -> None:
    with pytest.raises(ChangedPackageError, match=r"pytest .* is not supported: pytest:nothing does not exist.*1\.0"):
        PACKAGE.get("pytest:nothing")
    with pytest.raises(ChangedPackageError, match="assumes that two is three"):
        PACKAGE.require(2 == 3, "two is three")
    assert Package("no-such-package|pytest", ()).installed == pytest.__version__


def test_a_name_is_replaced_by_its_like(module: Any) -> None:
    PACKAGE.replace("compat_example:device", "cpu")
    PACKAGE.replace("compat_example:Engine.size", lambda self: 2)
    assert (module.device, module.Engine().size()) == ("cpu", 2)
    assert PACKAGE.function("compat_example:Engine.size", "self")(None) == 2


@pytest.mark.parametrize(
    ("path", "replacement", "problem"),
    [
        ("device", None, "device is a NoneType"),
        ("Engine.size", lambda self, unit: 2, r"Engine\.size is a function of \(self, unit\)"),
        ("Engine.length", lambda self: 2, r"Engine\.length does not exist"),
    ],
)
def test_a_name_that_changed_is_not_replaced(module: Any, path: str, replacement: Any, problem: str) -> None:
    with pytest.raises(ChangedPackageError, match=problem):
        PACKAGE.replace(f"compat_example:{path}", replacement)
    assert (module.device, module.Engine().size()) == ("cuda", 1)


def test_a_function_with_other_parameters_is_refused(module: Any) -> None:
    with pytest.raises(ChangedPackageError, match=r"Engine\.size is a function of \(self, unit\)"):
        PACKAGE.function("compat_example:Engine.size", "self", "unit")
