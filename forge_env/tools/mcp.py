"""Tools of MCP servers, through the official SDK (`pip install mcp`).

    class Files(fe.ToolEnvironment):
        async def setup(self, task):
            self.server = await McpServer.connect("https://tools.example/mcp")
            self.server.add_tools_to(self)

        async def cleanup(self):
            await self.server.close()

Every connection is a separate session, so a server behind a URL keeps episodes apart. A server that runs as a local
program has one session, so every episode starts a new process, unless `connect(..., shared=True)` declares that the
server keeps no state between calls. The process runs outside any sandbox: give agents only programs that you trust with
the machine. Its standard error is logged.

Errors answered by the server go to the model; a lost server raises `InfrastructureError`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from forge_env import redaction
from forge_env.errors import InfrastructureError, ToolError, UsageError, root_cause
from forge_env.sharing import Shared
from forge_env.tools.schema import LONGEST_NAME, UNSAFE, Tool
from forge_env.types import ToolSpec

if TYPE_CHECKING:
    from forge_env.environment.tool_environment import ToolEnvironment

log = logging.getLogger(__name__)
LONGEST_LINE = 10_000
"""Maximum bytes of a logged line; longer lines are split."""
CONNECTION_CLOSED = -32000
"""Error code of the SDK for a lost server; servers may use the same code for other errors."""


class McpServer:
    """An episode's connection to one MCP server, possibly shared with other episodes."""

    def __init__(self, connection: Connection, holding: AsyncExitStack) -> None:
        self._connection = connection
        self._holding = holding
        self.tools = [McpTool(self, name, spec) for name, spec in connection.tools.items()]

    @classmethod
    async def connect(cls, target: Any, *, shared: bool = False, timeout_s: float = 30.0) -> McpServer:
        """Connect and list the tools.

        Args:
            target: URL of a streamable HTTP server, `mcp.StdioServerParameters`, or a server object in this process.
            shared: whether all episodes of the event loop share one connection and, for a local program, one process.
                Only for servers that keep no state between calls: the episodes then share a session.
            timeout_s: wall-clock limit for connecting in seconds.

        Raises:
            InfrastructureError: the server can't be reached.
        """
        redaction.learn(getattr(target, "env", None), "env")
        redaction.learn_arguments(getattr(target, "args", []))
        redaction.learn(target, "url")
        key = _Target(repr(target), timeout_s, target)
        holding = AsyncExitStack()
        connection = await holding.enter_async_context(_SHARED.use(key) if shared else _connected(key))
        if connection.gone and shared:  # another episode lost the connection
            _SHARED.forget(key)
            await holding.aclose()
            connection = await holding.enter_async_context(_SHARED.use(key))
        return cls(connection, holding)

    def add_tools_to(self, env: ToolEnvironment) -> None:
        """Offer all tools of the server to the agent."""
        for tool in self.tools:
            env.add_tool(tool)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call one tool. `ToolError`: the server refused the call, or the tool failed."""
        return await self._connection.call(name, arguments)

    async def close(self) -> None:
        """Disconnect; further calls have no effect."""
        await self._holding.aclose()


@dataclass(frozen=True)
class _Target:
    """Key of a shared server: targets with equal text and timeout are the same server."""

    name: str
    timeout_s: float
    target: Any = field(compare=False)


class Connection:
    """A client of the SDK, held by a separate task, because the SDK ties a client to the task that opened it."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._client: Any = None
        self._closing = asyncio.Event()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tools: dict[str, ToolSpec] = {}
        """Tools by their name on the server."""
        self.gone = False
        self.stderr = StderrLog(_name_of(target))
        self.keeper = asyncio.create_task(self._keep())

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call one tool; see `McpServer.call`."""
        from mcp import MCPError

        if self.keeper.done() or self.gone:
            raise self._lost()
        calling = asyncio.ensure_future(self._client.call_tool(name, arguments))
        try:
            await asyncio.wait([calling, self.keeper], return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise self._lost()
            result = calling.result()
        except MCPError as error:
            if error.code == CONNECTION_CLOSED and not await self._answers():
                raise self._lost() from error
            raise ToolError(str(error)) from error
        except OSError as error:
            raise InfrastructureError(f"the MCP server failed: {error}") from error
        finally:
            calling.cancel()
        text = shown(result)
        if result.is_error:
            raise ToolError(text or f"{name} failed")
        return text

    def _lost(self) -> InfrastructureError:
        self.gone = True
        return InfrastructureError(f"the MCP server is gone{self.stderr.told()}")

    async def _answers(self) -> bool:
        from mcp import MCPError

        try:
            await self._client.list_tools()
        except (MCPError, OSError):
            return False
        return True

    async def close(self) -> None:
        """Disconnect, and end a local program."""
        self._closing.set()
        await asyncio.wait([self.keeper])

    async def _keep(self) -> None:
        try:
            from mcp import Client, StdioServerParameters
            from mcp.client.stdio import stdio_client
        except ImportError:
            self.ready.set_exception(UsageError("MCP tools need the `mcp` package", fix="pip install mcp"))
            return
        try:
            async with AsyncExitStack() as stack:
                target = self._target
                if isinstance(target, StdioServerParameters):
                    target = stdio_client(target, errlog=await stack.enter_async_context(self.stderr.open()))
                client = await stack.enter_async_context(Client(target))
                self._client = client
                self.tools = await _list_tools(client)
                self.ready.set_result(None)
                await self._closing.wait()
        except Exception as error:  # task boundary: raised to the caller of `connect`, later errors are logged
            self.gone, why = True, root_cause(error)
            if self.ready.done():
                log.warning("the connection to MCP server %s failed: %s", self.stderr.name, why, exc_info=error)
                return
            lost = InfrastructureError(f"can't connect to the MCP server: {why}{self.stderr.told()}")
            lost.__cause__ = error
            self.ready.set_exception(lost)


@asynccontextmanager
async def _connected(to: _Target) -> AsyncIterator[Connection]:
    connection = Connection(to.target)
    try:
        async with asyncio.timeout(to.timeout_s):
            await asyncio.shield(connection.ready)
    except BaseException as error:  # also if cancelled: no server may be left running
        connection.keeper.cancel()
        await asyncio.wait([connection.keeper])
        if isinstance(error, TimeoutError):
            note = connection.stderr.told()
            raise InfrastructureError(f"no MCP server answered within {to.timeout_s:g} s{note}") from error
        raise
    try:
        yield connection
    finally:
        await connection.close()


_SHARED: Shared[_Target, Connection] = Shared(_connected)


class StderrLog(asyncio.Protocol):
    """Logs a local server's standard error line by line."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rest = b""
        self._last = ""
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TextIO]:
        """Open the file for the server's standard error; remaining output is logged on exit."""
        reading, writing = os.pipe()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(reading, "rb", 0))
        try:
            with os.fdopen(writing, "w") as file:
                yield file
            with suppress(TimeoutError):  # a program started by the server may still hold the pipe open
                async with asyncio.timeout(1):
                    await self._ended.wait()
        finally:
            transport.close()

    def told(self) -> str:
        """The last line, as a suffix for error messages."""
        return f"; last output: {self._last}" if self._last else ""

    def data_received(self, data: bytes) -> None:
        """Log the lines that are complete, or too long to wait for their end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._log(line)

    def connection_lost(self, exc: Exception | None) -> None:
        """Log the last line."""
        self._log(self._rest)
        self._ended.set()

    def _log(self, line: bytes) -> None:
        if text := line.decode(errors="replace").strip():
            self._last = redaction.redact(text)[:300]
            log.info("MCP server %s: %s", self.name, text[:LONGEST_LINE])


def _name_of(target: Any) -> str:
    """Name of a server in the log."""
    if isinstance(target, str):
        return target
    words = [str(getattr(target, "command", type(target).__name__)), *getattr(target, "args", [])]
    return redaction.redact(" ".join(words))[:80]


def shown(result: Any) -> str:
    """A tool's result (`mcp.types.CallToolResult`) as text for the model; other content is replaced by its type."""
    blocks = [_block(block) for block in result.content]
    if result.structured_content is not None and not any(block.type == "text" for block in result.content):
        blocks.append(
            json.dumps(result.structured_content, ensure_ascii=False)
        )  # if there is text, it already holds this
    return "\n".join(blocks)


def _block(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource_link":
        about = [text for text in (block.title or block.name, block.description) if text]
        return f"[{': '.join(about)}]({block.uri})"
    if block.type == "resource":
        resource = block.resource
        text = getattr(resource, "text", None)
        return str(text) if text is not None else f"[{resource.mime_type or 'binary file'}: {resource.uri}]"
    return f"[{block.type}: {getattr(block, 'mime_type', None) or 'not text'}]"


def safe_names(names: Iterable[str]) -> dict[str, str]:
    """Map a server's tool names to unique names that endpoints accept: up to 64 letters, digits, `_` and `-`."""
    safe: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(names, key=lambda name: UNSAFE.search(name) is not None or len(name) > LONGEST_NAME):
        start = UNSAFE.sub("_", name)[:LONGEST_NAME] or "tool"
        numbers = (f"{start[: LONGEST_NAME - len(str(number)) - 1]}_{number}" for number in itertools.count(2))
        safe[name] = next(each for each in itertools.chain([start], numbers) if each not in taken)
        taken.add(safe[name])
    return safe


async def _list_tools(client: Any) -> dict[str, ToolSpec]:
    specs: dict[str, ToolSpec] = {}
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            parameters = {"type": "object", "properties": {}, **tool.input_schema}
            specs[tool.name] = ToolSpec(name=tool.name, description=tool.description or "", parameters=parameters)
        cursor = page.next_cursor
        if cursor is None:
            safe = safe_names(specs)
            return {name: spec.model_copy(update={"name": safe[name]}) for name, spec in specs.items()}


class McpTool(Tool):
    """One tool of a server; the server validates the arguments."""

    def __init__(self, server: McpServer, name: str, spec: ToolSpec) -> None:
        self._server = server
        self._name = name
        self.timeout_s = self.max_calls = None
        self.in_thread = False
        self.is_async = True
        self.spec = spec

    def parse(self, arguments: str) -> dict[str, Any]:
        """Parse the model's JSON object, and check that the required members are present."""
        data = self.read(arguments)
        if missing := [name for name in self.spec.parameters.get("required", []) if name not in data]:
            raise ToolError(f"wrong arguments: {missing[0]}: missing. {self.usage()}")
        return data

    async def invoke(self, owner: Any, arguments: dict[str, Any]) -> str:
        """Call the tool on the server."""
        return await self._server.call(self._name, arguments)
