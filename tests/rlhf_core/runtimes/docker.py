"""A command line that passes itself on to the socket of a `service.Docker`. Only the standard library."""

import base64
import json
import os
import socket
import sys


def main() -> None:
    line = sys.argv[2:]
    given = sys.stdin.buffer.read() if line[0] == "exec" and "--interactive" in line else b""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        asked = {"line": line, "input": base64.b64encode(given).decode()}
        connection.sendall(json.dumps(asked).encode() + b"\n")
        if line[0] == "run" and "missing" not in line:
            sys.stdin.buffer.read()
            connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as lines:
            answer = json.loads(lines.readline())
    output = base64.b64decode(answer["output"])
    target = sys.stderr if line[0] == "run" else sys.stdout
    target.buffer.write(output)
    target.flush()
    os._exit(answer["status"])


if __name__ == "__main__":
    main()
