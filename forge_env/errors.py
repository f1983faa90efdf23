"""Every error that forge-env raises on purpose.

The distinction that matters runs through the whole platform: what the *agent* did wrong is an
observation, never an exception; what the *infrastructure* did wrong is an `InfrastructureError`,
retried and then excluded from statistics; what the *user* wrote wrong is a `UsageError`, shown in one
line with its fix.
"""

from __future__ import annotations


class ForgeError(Exception):
    """Base of every deliberate error. `fix` says what the person can do about it."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} ({self.fix})" if self.fix else self.message

    def __reduce__(self) -> tuple[object, ...]:  # keeps `fix` when an actor in another process raises it
        return (_rebuild, (type(self), self.message, self.fix))


def _rebuild(cls: type[ForgeError], message: str, fix: str | None) -> ForgeError:
    return cls(message, fix=fix)


class UsageError(ForgeError):
    """The command line, a recipe or a call is wrong: nothing was started."""

    exit_code = 2


class ConfigError(UsageError):
    """A recipe does not validate."""


class NotRegisteredError(UsageError):
    """No environment, engine, trainer or loss of that name is installed."""


class EnvironmentBugError(ForgeError):
    """The environment's own code (prompt, tool or reward function) raised; shown with its task, never scored as zero."""


class InfrastructureError(ForgeError):
    """Something outside the agent's control failed: retry it, then mark the episode invalid."""


class SandboxError(InfrastructureError):
    """A sandbox or its engine was lost, could not start, or answered out of protocol."""


class SandboxUnavailableError(ForgeError):
    """This machine can't isolate code the way the engine needs; execution is refused."""


class GeneratorError(InfrastructureError):
    """The model endpoint or generator died or refused a request."""
