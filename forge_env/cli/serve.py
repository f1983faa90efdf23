"""`forge-env serve`: an environment for the clients of other frameworks."""

from __future__ import annotations

import argparse
import asyncio

from forge_env.cli.describe import environment_options
from forge_env.errors import UsageError
from forge_env.registry import environment_class, make_config


def run_serve(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    options = environment_options(args)
    make_config(args.name, environment_class(args.name), options)
    _check(args)
    try:
        from forge_env.serve.openenv import app_of, serve
        from forge_env.serve.sessions import ServeLimits
    except ImportError as error:
        raise UsageError(f"serving needs {error.name}", fix='pip install "forge-env[openenv]"') from error
    limits = ServeLimits(args.max_sessions, args.step_timeout, args.idle_timeout, args.reconnect)

    def ready(port: int) -> None:
        host = "localhost" if args.host in ("0.0.0.0", "127.0.0.1", "::") else args.host
        address = f"http://{host}:{port}"
        print(f"{args.name} is served at {address} (OpenEnv) and {address}/mcp (MCP); Ctrl-C stops", flush=True)

    asyncio.run(
        serve(app_of(args.name, sandbox=args.sandbox, limits=limits, **options), args.host, args.port, ready=ready)
    )
    return 0


def _check(args: argparse.Namespace) -> None:
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port {args.port} is not a port", fix="use 1 to 65535, or 0 for a free one")
    if args.max_sessions < 1:
        raise UsageError("--max-sessions must be at least 1")
    for option in ("step_timeout", "idle_timeout", "reconnect"):
        if not getattr(args, option) >= (0 if option == "reconnect" else 1e-9):
            raise UsageError(f"--{option.replace('_', '-')} must be above 0 seconds")
