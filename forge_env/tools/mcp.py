"""Tools of any MCP server, through the official SDK (`pip install mcp`).

    class Files(fe.ToolEnvironment):
        async def setup(self, task):
            self.server = await McpServer.connect("https://tools.example/mcp")
            self.server.add_tools_to(self)

        async def cleanup(self):
            await self.server.close()

What the server answers as an error goes to the model; a server that is lost is an `InfrastructureError`. A server
that runs as a local program runs outside any sandbox: give agents only programs you trust with the machine.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from forge_env.errors import InfrastructureError, ToolError, UsageError, root_cause
from forge_env.tools.schema import Tool
from forge_env.types import ToolSpec

if TYPE_CHECKING:
    from forge_env.environment.tool_environment import ToolEnvironment

CONNECTION_CLOSED = -32000
"""How the SDK says that a server is lost; servers may use the same number for errors of their own."""


class McpServer:
    """A connection to one MCP server, kept by a task of its own (its library ties it to the task that opened it)."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._client: Any = None
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep())
        self.tools: list[McpTool] = []

    @classmethod
    async def connect(cls, target: Any, *, timeout_s: float = 30.0) -> McpServer:
        """Connect and list the tools.

        Args:
            target: URL of a streamable HTTP server, `mcp.StdioServerParameters`, or a server object in this process.
            timeout_s: wall seconds to connect.

        Raises:
            InfrastructureError: the server can't be reached.
        """
        server = cls(target)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(server._ready)
        except BaseException as error:  # cancelled too: no server may be left
            server._keeper.cancel()
            await asyncio.wait([server._keeper])
            if isinstance(error, TimeoutError):
                raise InfrastructureError(f"no MCP server answered within {timeout_s:g} s") from error
            raise
        return server

    def add_tools_to(self, env: ToolEnvironment) -> None:
        """Offer all tools of the server to the agent."""
        for tool in self.tools:
            env.add_tool(tool)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Run one tool. `ToolError`: the server refused, or the tool failed."""
        from mcp import MCPError

        if self._keeper.done():
            raise InfrastructureError("the MCP server is gone")
        calling = asyncio.ensure_future(self._client.call_tool(name, arguments))
        try:
            await asyncio.wait([calling, self._keeper], return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise InfrastructureError("the MCP server is gone")
            result = calling.result()
        except MCPError as error:
            if error.code == CONNECTION_CLOSED and not await self._answers():
                raise InfrastructureError("the MCP server is gone") from error
            raise ToolError(str(error)) from error
        except OSError as error:
            raise InfrastructureError(f"the MCP server failed: {error}") from error
        finally:
            calling.cancel()
        text = "\n".join(block.text if block.type == "text" else f"[{block.type}]" for block in result.content)
        if result.is_error:
            raise ToolError(text or f"{name} failed")
        return text

    async def _answers(self) -> bool:
        from mcp import MCPError

        try:
            await self._client.list_tools()
        except (MCPError, OSError):
            return False
        return True

    async def close(self) -> None:
        """Disconnect; may be called again."""
        self._closing.set()
        await asyncio.wait([self._keeper])

    async def _keep(self) -> None:
        try:
            from mcp import Client
        except ImportError:
            self._ready.set_exception(UsageError("MCP tools need the `mcp` package", fix="pip install mcp"))
            return
        try:
            async with Client(self._target) as client:
                self._client = client
                self.tools = await self._list(client)
                self._ready.set_result(None)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - the boundary of a task: every caller is told below
            if not self._ready.done():
                self._ready.set_exception(InfrastructureError(f"can't connect to the MCP server: {root_cause(error)}"))

    async def _list(self, client: Any) -> list[McpTool]:
        found: list[McpTool] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += [McpTool(self, tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return found


class McpTool(Tool):
    """One tool of a server; the server validates the arguments."""

    def __init__(self, server: McpServer, name: str, description: str, parameters: dict[str, Any]) -> None:
        self._server = server
        self.timeout_s = self.max_calls = None
        self.in_thread = False
        self.is_async = True
        self.spec = ToolSpec(
            name=name, description=description, parameters={"type": "object", "properties": {}, **parameters}
        )

    def parse(self, arguments: str) -> dict[str, Any]:
        """The JSON object that the model wrote, with its required members."""
        data = self.read(arguments)
        if missing := [name for name in self.spec.parameters.get("required", []) if name not in data]:
            raise ToolError(f"wrong arguments: {missing[0]}: missing. {self.usage()}")
        return data

    async def invoke(self, owner: Any, arguments: dict[str, Any]) -> str:
        """Ask the server."""
        return await self._server.call(self.spec.name, arguments)
