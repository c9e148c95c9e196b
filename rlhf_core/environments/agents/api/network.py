"""The network on which other machines and containers reach the policy: TLS, with a certificate of the run."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rlhf_core.system.certificate import self_signed


@dataclass(frozen=True, slots=True)
class Network:
    listen: str  # address of this machine
    host: str  # name or address in URLs, which the certificate is for
    tls: ssl.SSLContext
    certificate: str  # PEM, for clients

    @classmethod
    def of(cls, listen: str, host: str) -> Network:
        """Make a key, which never leaves this process's memory and a file of a moment, and its certificate."""
        signed = self_signed([host])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with TemporaryDirectory() as folder:  # of this user alone; ssl reads keys from files
            chain = Path(folder) / "chain.pem"
            chain.touch(mode=0o600)
            chain.write_text(signed.key + signed.certificate, encoding="ascii")
            context.load_cert_chain(chain)
        return cls(listen, host, context, signed.certificate)

    def root(self, port: int) -> str:
        return f"https://{f'[{self.host}]' if ':' in self.host else self.host}:{port}"
