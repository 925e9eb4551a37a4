"""Tool servers, as the kernel speaks with them: the stdio client of MCP, and the router."""
