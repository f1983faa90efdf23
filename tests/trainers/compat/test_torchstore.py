"""Private names of other packages: an upgrade fails here before it gives wrong results."""

from __future__ import annotations

import pytest

pytest.importorskip("torchstore")

import torchstore.api

from trainers.compat import ChangedPackageError, Package
from trainers.compat import torchstore as compat


def test_the_installed_version_was_checked() -> None:
    assert compat.PACKAGE.installed in compat.PACKAGE.checked


def test_the_store_spawns_the_controller_with_asynchronous_endpoints() -> None:
    assert torchstore.api.Controller is compat.AsyncController
    for name in compat.SYNCHRONOUS:
        assert getattr(compat.AsyncController, name) is not getattr(compat.Controller, name)


def test_a_missing_name_and_a_broken_assumption_name_the_version_to_install() -> None:
    package = Package("pytest", ("1.0",))
    with pytest.raises(ChangedPackageError, match=r"pytest .* is not supported: pytest:nothing does not exist.*1\.0"):
        package.get("pytest:nothing")
    with pytest.raises(ChangedPackageError, match="assumes that two is three"):
        package.require(2 == 3, "two is three")
    assert Package("no-such-package|pytest", ()).installed == pytest.__version__
