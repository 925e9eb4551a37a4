"""A server written with the MCP project's own Python library, whichever of its two lines is installed beside it.

Run by an environment that has the library (`build/servers/*`), never by ours.
"""

from __future__ import annotations

try:
    from mcp.server import MCPServer as Server  # 2.x
    from mcp.server.mcpserver import Context
except ImportError:
    from mcp.server.fastmcp import Context  # 1.x
    from mcp.server.fastmcp import FastMCP as Server
try:
    from mcp.types import ToolAnnotations
except ImportError:
    from mcp_types import ToolAnnotations

server = Server("peer")


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def add(a: int, b: int) -> int:
    """The sum of two integers."""
    return a + b


@server.tool()
def echo(text: str) -> str:
    """The text again."""
    return text


@server.tool()
def fail(text: str) -> str:
    """Raises."""
    raise ValueError(text)


@server.tool()
async def report(steps: int, context: Context) -> str:
    """Reports progress and logs on the way."""
    for step in range(steps):
        await context.report_progress(step, steps)
        await context.info(f"step {step}")
    return "reported"


if __name__ == "__main__":
    server.run()
