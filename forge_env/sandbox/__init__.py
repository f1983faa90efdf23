"""Sandboxes: where every line of model-written code runs. Engines are plug-ins behind `SandboxEngine`."""

from forge_env.sandbox.callers import HOLDER, TENANT, on_behalf_of, phase, seen_by
from forge_env.sandbox.engines import available_engines, open_engine, reap_abandoned
from forge_env.sandbox.protocol import (
    SANDBOXES_PER_CPU,
    WORK,
    CallOutcome,
    CallsResult,
    ExecResult,
    How,
    Limits,
    OutputChunk,
    Process,
    RunningSandbox,
    Sandbox,
    SandboxEngine,
    SandboxSpec,
    Session,
    TestsResult,
    Usage,
)

__all__ = [
    "HOLDER",
    "SANDBOXES_PER_CPU",
    "TENANT",
    "WORK",
    "CallOutcome",
    "CallsResult",
    "ExecResult",
    "How",
    "Limits",
    "OutputChunk",
    "Process",
    "RunningSandbox",
    "Sandbox",
    "SandboxEngine",
    "SandboxSpec",
    "Session",
    "TestsResult",
    "Usage",
    "available_engines",
    "on_behalf_of",
    "open_engine",
    "phase",
    "reap_abandoned",
    "seen_by",
]
