"""`forge-env serve`: serve an environment to clients of other frameworks."""

from __future__ import annotations

import argparse

from forge_env.cli.command import Parser, add_environment, environment_options
from forge_env.config.reader import Source, build, values
from forge_env.config.serving import ServeConfig
from forge_env.errors import UsageError
from forge_env.interrupts import run_until_interrupted


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    add_environment(parser)
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="HOST",
        help="additional host name under which clients may reach this server; repeatable (also $FORGE_ENV_NAMES, "
        "separated by spaces)",
    )
    parser.keys(ServeConfig)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    server_keys = [item for item in args.overrides if item.flag and item.key in ServeConfig.model_fields]
    config = build(ServeConfig, Source("", {}), values(server_keys, ServeConfig))
    args.overrides = [item for item in args.overrides if item not in server_keys]
    name, options = environment_options(args)
    try:
        import websockets  # noqa: F401 - without it, uvicorn has no WebSocket support

        from forge_env.http.server import serve
        from forge_env.serve.openenv import app_of
    except ImportError as error:
        raise UsageError(f"serving needs {error.name}", fix='pip install "forge-env[openenv]"') from error

    def ready(port: int) -> None:
        host = "localhost" if config.host in ("0.0.0.0", "127.0.0.1", "::") else config.host
        address = f"http://{host}:{port}"
        print(f"{name} is served at {address} (OpenEnv) and {address}/mcp (MCP); Ctrl-C stops", flush=True)

    app = app_of(
        name,
        sandbox=args.sandbox,
        docker_host=args.docker_host,
        limits=config,
        names=[config.host, *args.name],
        **options,
    )
    run_until_interrupted(serve(app, config.host, config.port, ready=ready))
    return 0
