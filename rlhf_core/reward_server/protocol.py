"""HTTP as uvicorn reads it, with our form of an error for what is no HTTP."""

from __future__ import annotations

import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Protocol(HttpToolsProtocol):
    def send_400_response(self, msg: str) -> None:
        body = json.dumps({"detail": "the request is no HTTP: send it as `curl` does, and without TLS"}).encode()
        head = ("HTTP/1.1 400 Bad Request", "content-type: application/json", f"content-length: {len(body)}")
        self.transport.write("\r\n".join((*head, "connection: close", "", "")).encode() + body)
        self.transport.close()
