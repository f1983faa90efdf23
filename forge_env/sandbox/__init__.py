"""Sandboxes, in which all model-written code runs. Engines are plug-ins that implement `SandboxEngine`."""

from forge_env.sandbox.capabilities import (
    Archives,
    Images,
    Interpreter,
    Interpreters,
    Inventory,
    Judging,
    Process,
    Programs,
)
from forge_env.sandbox.engines import available_engines, open_engine, reap_abandoned
from forge_env.sandbox.protocol import HOLDER, TENANT, Sandbox, SandboxEngine, on_behalf_of, phase, seen_by
from forge_env.sandbox.results import (
    CallOutcome,
    CallsResult,
    ExecResult,
    How,
    Outcome,
    OutputChunk,
    RunningSandbox,
    TestsResult,
    Usage,
)
from forge_env.sandbox.spec import SANDBOXES_PER_CPU, WORK, Limits, SandboxSpec

__all__ = [
    "HOLDER",
    "SANDBOXES_PER_CPU",
    "TENANT",
    "WORK",
    "Archives",
    "CallOutcome",
    "CallsResult",
    "ExecResult",
    "How",
    "Images",
    "Interpreter",
    "Interpreters",
    "Inventory",
    "Judging",
    "Limits",
    "Outcome",
    "OutputChunk",
    "Process",
    "Programs",
    "RunningSandbox",
    "Sandbox",
    "SandboxEngine",
    "SandboxSpec",
    "TestsResult",
    "Usage",
    "available_engines",
    "on_behalf_of",
    "open_engine",
    "phase",
    "reap_abandoned",
    "seen_by",
]
