"""Sandboxes: where every line of model-written code runs. Engines are plug-ins behind `SandboxEngine`."""

from forge_env.sandbox.engines import available_engines, open_engine, reap_abandoned
from forge_env.sandbox.protocol import (
    SANDBOXES_PER_CPU,
    TENANT,
    CallOutcome,
    CallsResult,
    ExecResult,
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
    on_behalf_of,
)

__all__ = [
    "SANDBOXES_PER_CPU",
    "TENANT",
    "CallOutcome",
    "CallsResult",
    "ExecResult",
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
    "reap_abandoned",
]
