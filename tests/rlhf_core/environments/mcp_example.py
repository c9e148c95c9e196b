"""A server of the Model Context Protocol, made with its SDK; its argument may be what it does wrong at the start."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.utilities.types import Image

server = MCPServer("shop")
basket: list[str] = []
wire = os.dup(1)  # which the SDK keeps from tools
wrong = sys.argv[1] if len(sys.argv) > 1 else ""


@server.tool()
def put(thing: str, count: int = 1) -> str:
    """Puts things into the basket."""
    basket.extend([thing] * count)
    return ", ".join(basket)


@server.tool()
def total() -> dict[str, int]:
    """Returns what the basket costs."""
    return {"costs": 3 * len(basket)}


@server.tool()
def refuse() -> str:
    """Raises an error."""
    raise ValueError("not sold here")


@server.tool()
def hang() -> str:
    """Never answers."""
    time.sleep(1000)
    return "late"


@server.tool()
def die() -> str:
    """Ends the process."""
    os._exit(3)


@server.tool()
def babble() -> str:
    """Writes something that is no message to standard output."""
    os.write(wire, b"this is no JSON\n")
    time.sleep(1000)
    return "late"


@server.tool()
def picture() -> Image:
    """Returns an image."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
def nothing() -> list[str]:
    """Returns no content."""
    return []


if wrong == "more":

    @server.tool()
    def more() -> str:
        """Is not in the first version."""
        return "more"


if __name__ == "__main__":
    if wrong == "hang":
        time.sleep(1000)
    if wrong == "die":
        sys.exit("it has no key")
    if wrong == "babble":
        os.write(1, b"Welcome!\n")
        time.sleep(1000)
    if wrong == "http":
        server.run("streamable-http", port=int(sys.argv[2]))
    server.run("stdio")
