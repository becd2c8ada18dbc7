"""A small MCP server for tests, over stdio, or over HTTP if it is given a port."""

import os
import subprocess
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def refuse() -> str:
    """Refuse."""
    raise ToolError("not today")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def start(command: str) -> str:
    """Start a process in this one's group, and another in a session of its own; return their numbers."""
    places = (False, True)
    return " ".join(str(subprocess.Popen(command.split(), start_new_session=is_new).pid) for is_new in places)


@server.tool()
def grade(response: str, answer: str) -> str:
    """Grade an answer."""
    return "0.5" if answer in response else "nothing"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
