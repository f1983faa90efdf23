"""Uses of other packages that go beyond their public interfaces: private names and monkeypatches.

There is one module per package. It states the versions that it was checked with, and checks its assumptions before it
relies on them. `tests/trainers/compat` fails if another version is installed, so an upgrade begins by reading the
module.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from forge_env.errors import ForgeError


class ChangedPackageError(ForgeError):
    """A package no longer has what forge-env relies on beyond its public interface."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package of which private names are used, and the versions that the uses were checked with.

    `name` is that of the distribution; several for builds of the same package, separated by `|`.
    """

    name: str
    checked: tuple[str, ...]

    @property
    def installed(self) -> str | None:
        """Installed version without its local part, such as `+cpu`; None if the package is not installed."""
        for name in self.name.split("|"):
            try:
                return version(name).partition("+")[0]
            except PackageNotFoundError:
                continue
        return None

    def get(self, path: str) -> Any:
        """Return a name of the package by its path `module:name`; the name may be dotted.

        Raises:
            ChangedPackageError: the module or the name does not exist.
        """
        module, _, names = path.partition(":")
        try:
            item: Any = importlib.import_module(module)
            for name in names.split("."):
                item = getattr(item, name)
        except (ImportError, AttributeError) as error:
            raise self.changed(f"{path} does not exist") from error
        return item

    def function(self, path: str, *parameters: str) -> Any:
        """Return a function of the package; it must exist, and its first `parameters` must have these names."""
        function = self.get(path)
        first = list(inspect.signature(function).parameters)[: len(parameters)]
        self.require(first == list(parameters), f"{path} is a function of ({', '.join(parameters)})")
        return function

    def replace(self, path: str, replacement: Any) -> None:
        """Replace a name of the package in this process by its like: a function with its parameters, or of its type.

        Raises:
            ChangedPackageError: the name does not exist, has other parameters, or is of another type.
        """
        self.require(_form(self.get(path)) == _form(replacement), f"{path} is {_form(replacement)}")
        module, _, names = path.partition(":")
        owner, _, name = names.rpartition(".")
        setattr(self.get(f"{module}:{owner}") if owner else importlib.import_module(module), name, replacement)

    def require(self, holds: bool, assumption: str) -> None:
        """Raise a `ChangedPackageError` unless an assumption about the package holds."""
        if not holds:
            raise self.changed(f"forge-env assumes that {assumption}")

    def changed(self, what: str) -> ChangedPackageError:
        """Make the error for a change of the package."""
        return ChangedPackageError(
            f"{self.name} {self.installed} is not supported: {what}",
            fix=f"install {self.name.partition('|')[0]} {self.checked[-1]}, with which this was checked",
        )


def _form(item: Any) -> str:
    if inspect.isfunction(item):
        return f"a function of ({', '.join(inspect.signature(item).parameters)})"
    return f"a {type(item).__name__}"
