"""`forge-env serve`: an environment for the clients of other frameworks."""

from __future__ import annotations

import argparse

from forge_env.cli.command import Parser, add_environment, environment_options
from forge_env.errors import UsageError
from forge_env.interrupts import run_until_interrupted


def add_arguments(parser: Parser) -> None:
    """Describe the command."""
    add_environment(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: 8000)")
    for flag, default, text in (
        ("--max-sessions", 64, "maximum episodes at once"),
        ("--step-timeout", 300.0, "seconds that a step may take"),
        ("--idle-timeout", 1800.0, "seconds without a request after which a session is closed"),
        ("--reconnect", 60.0, "seconds in which a client may reconnect to its session"),
    ):
        kind = type(default)
        metavar = "N" if kind is int else "S"
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: {default:g})")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    name, options = environment_options(args)
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
        print(f"{name} is served at {address} (OpenEnv) and {address}/mcp (MCP); Ctrl-C stops", flush=True)

    app = app_of(name, sandbox=args.sandbox, docker_host=args.docker_host, limits=limits, **options)
    run_until_interrupted(serve(app, args.host, args.port, ready=ready))
    return 0


def _check(args: argparse.Namespace) -> None:
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port {args.port} is not a port", fix="use 1 to 65535, or 0 for a free one")
    if args.max_sessions < 1:
        raise UsageError("--max-sessions must be at least 1")
    for option in ("step_timeout", "idle_timeout", "reconnect"):
        if not getattr(args, option) >= (0 if option == "reconnect" else 1e-9):
            raise UsageError(f"--{option.replace('_', '-')} must be above 0 seconds")
