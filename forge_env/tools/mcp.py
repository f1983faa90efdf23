"""Tools of any MCP server, through the official SDK (`pip install mcp`).

    class Files(fe.ToolEnvironment):
        async def setup(self, task):
            self.server = await McpServer.connect("https://tools.example/mcp")
            self.server.add_tools_to(self)

        async def cleanup(self):
            await self.server.close()

Every connection is a session of its own: a server behind a URL keeps the episodes apart. A server that runs as a
local program has one session, so every episode starts it anew, unless `connect(..., shared=True)` says that it keeps
nothing between two calls. It runs outside any sandbox: give agents only programs you trust with the machine. What it
writes to its standard error is in the log.

What the server answers as an error goes to the model; a server that is lost is an `InfrastructureError`.
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
"""Bytes of a line that is logged as one."""
CONNECTION_CLOSED = -32000
"""How the SDK says that a server is lost; servers may use the same number for errors of their own."""


class McpServer:
    """An episode's connection to one MCP server, of its own or shared with other episodes."""

    def __init__(self, connection: Connection, holding: AsyncExitStack) -> None:
        self._connection = connection
        self._holding = holding
        self.tools = [McpTool(self, name, spec) for name, spec in connection.tools.items()]

    @classmethod
    async def connect(cls, target: Any, *, shared: bool = False, timeout_s: float = 30.0) -> McpServer:
        """Connect and list the tools.

        Args:
            target: URL of a streamable HTTP server, `mcp.StdioServerParameters`, or a server object in this process.
            shared: one connection, and of a local program one process, for all episodes of the event loop. Only for
                servers that keep nothing between two calls: the episodes have one session together.
            timeout_s: wall seconds to connect.

        Raises:
            InfrastructureError: the server can't be reached.
        """
        redaction.learn(getattr(target, "env", None), "env")
        redaction.learn_arguments(getattr(target, "args", []))
        redaction.learn(target, "url")
        key = _Target(repr(target), timeout_s, target)
        holding = AsyncExitStack()
        connection = await holding.enter_async_context(_SHARED.use(key) if shared else _connected(key))
        if connection.gone and shared:  # it was lost in another episode
            _SHARED.forget(key)
            await holding.aclose()
            connection = await holding.enter_async_context(_SHARED.use(key))
        return cls(connection, holding)

    def add_tools_to(self, env: ToolEnvironment) -> None:
        """Offer all tools of the server to the agent."""
        for tool in self.tools:
            env.add_tool(tool)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Run one tool. `ToolError`: the server refused, or the tool failed."""
        return await self._connection.call(name, arguments)

    async def close(self) -> None:
        """Disconnect; may be called again."""
        await self._holding.aclose()


@dataclass(frozen=True)
class _Target:
    """A server that may be shared: two are the same whose texts are."""

    name: str
    timeout_s: float
    target: Any = field(compare=False)


class Connection:
    """A client of the SDK, kept by a task of its own (its library ties it to the task that opened it)."""

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
        """As `McpServer.call`."""
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
        """Disconnect; a local program ends."""
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
        except Exception as error:  # the boundary of a task: told to whoever connects, else logged
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
    except BaseException as error:  # cancelled too: no server may be left
        connection.keeper.cancel()
        await asyncio.wait([connection.keeper])
        if isinstance(error, TimeoutError):
            told = connection.stderr.told()
            raise InfrastructureError(f"no MCP server answered within {to.timeout_s:g} s{told}") from error
        raise
    try:
        yield connection
    finally:
        await connection.close()


_SHARED: Shared[_Target, Connection] = Shared(_connected)


class StderrLog(asyncio.Protocol):
    """What a local server writes to its standard error, as lines of the log."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rest = b""
        self._last = ""
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TextIO]:
        """The file that the server writes to; at the end, what it has written is logged."""
        reading, writing = os.pipe()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(reading, "rb", 0))
        try:
            with os.fdopen(writing, "w") as file:
                yield file
            with suppress(TimeoutError):  # where a program that the server began still has it
                async with asyncio.timeout(1):
                    await self._ended.wait()
        finally:
            transport.close()

    def told(self) -> str:
        """The last line, for messages of errors."""
        return f"; it said: {self._last}" if self._last else ""

    def data_received(self, data: bytes) -> None:
        """Log the lines that are whole, or too long."""
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
    """How the log names a server."""
    if isinstance(target, str):
        return target
    words = [str(getattr(target, "command", type(target).__name__)), *getattr(target, "args", [])]
    return redaction.redact(" ".join(words))[:80]


def shown(result: Any) -> str:
    """A tool's result (`mcp.types.CallToolResult`) as text for the model; content that isn't text is named."""
    blocks = [_block(block) for block in result.content]
    if result.structured_content is not None and not any(block.type == "text" for block in result.content):
        blocks.append(json.dumps(result.structured_content, ensure_ascii=False))  # otherwise the text has it
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
    """Tool names of a server -> names that endpoints accept: up to 64 letters, digits, `_` and `-`, all different."""
    safe: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(names, key=lambda name: UNSAFE.search(name) is not None or len(name) > LONGEST_NAME):
        start = UNSAFE.sub("_", name)[:LONGEST_NAME] or "tool"
        numbers = (f"{start[: LONGEST_NAME - len(str(number)) - 1]}_{number}" for number in itertools.count(2))
        safe[name] = next(each for each in itertools.chain([start], numbers) if each not in taken)
        taken.add(safe[name])
    return safe


async def _list_tools(client: Any) -> dict[str, ToolSpec]:
    found: dict[str, ToolSpec] = {}
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            parameters = {"type": "object", "properties": {}, **tool.input_schema}
            found[tool.name] = ToolSpec(name=tool.name, description=tool.description or "", parameters=parameters)
        cursor = page.next_cursor
        if cursor is None:
            safe = safe_names(found)
            return {name: spec.model_copy(update={"name": safe[name]}) for name, spec in found.items()}


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
        """The JSON object that the model wrote, with its required members."""
        data = self.read(arguments)
        if missing := [name for name in self.spec.parameters.get("required", []) if name not in data]:
            raise ToolError(f"wrong arguments: {missing[0]}: missing. {self.usage()}")
        return data

    async def invoke(self, owner: Any, arguments: dict[str, Any]) -> str:
        """Ask the server."""
        return await self._server.call(self._name, arguments)
