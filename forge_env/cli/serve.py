"""`forge-env serve`: an environment for the clients of other frameworks."""

from __future__ import annotations

import argparse
import asyncio

from forge_env import __version__
from forge_env.cli.describe import environment_options
from forge_env.errors import UsageError
from forge_env.registry import environment_class, make, make_config
from forge_env.sandbox.lazy import LazyEngine


def run_serve(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    options = environment_options(args)
    cls = environment_class(args.name)
    make_config(args.name, cls, options)
    try:
        from forge_env.interop.openenv_server import make_app, serve
        from forge_env.interop.sessions import ServeLimits
    except ImportError as error:
        raise UsageError(f"serving needs {error.name}", fix='pip install "forge-env[openenv]"') from error
    limits = ServeLimits(args.max_sessions, args.step_timeout, args.idle_timeout, args.reconnect)
    description = ((cls.__doc__ or "").strip().splitlines() or [""])[0]

    def ready(port: int) -> None:
        host = "localhost" if args.host in ("0.0.0.0", "127.0.0.1", "::") else args.host
        print(f"{args.name} is served at ws://{host}:{port}/ws (OpenEnv); Ctrl-C stops", flush=True)

    async def run() -> None:
        async with LazyEngine(args.sandbox) as engine:
            app = make_app(
                args.name,
                lambda: make(args.name, sandboxes=engine, **options),
                limits=limits,
                description=description,
                version=__version__,
            )
            await serve(app, args.host, args.port, ready=ready)

    asyncio.run(run())
    return 0
