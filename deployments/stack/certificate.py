"""The certificate that authenticates SeaweedFS' processes to each other; without its key no inner port answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deployments.stack.settings import LOOPBACK, write_private
from rlhf_core.system.certificate import self_signed


def write_certificate(folder: Path) -> None:
    """Write a new key and its self-signed certificate, for servers and clients on loopback."""
    folder.mkdir(exist_ok=True, mode=0o700)
    signed = self_signed([LOOPBACK])
    write_private(folder / "key.pem", signed.key)
    write_private(folder / "certificate.pem", signed.certificate)


def seaweedfs_variables(folder: Path) -> Mapping[str, str]:
    """Return SeaweedFS' security.toml (`weed scaffold -config=security`) as variables: mutual TLS, except S3's port."""
    certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    variables = {
        "WEED_GRPC_CA": certificate,
        "WEED_HTTPS_CLIENT_ENABLED": "true",
        "WEED_HTTPS_FILER_DISABLE_TLS_VERIFY_CLIENT_CERT": "false",
    }
    grpc = ("MASTER", "VOLUME", "FILER", "S3", "ADMIN", "WORKER", "CLIENT")
    https = ("MASTER", "VOLUME", "FILER", "ADMIN", "CLIENT")
    for section in (*(f"GRPC_{name}" for name in grpc), *(f"HTTPS_{name}" for name in https)):
        variables |= {f"WEED_{section}_CERT": certificate, f"WEED_{section}_KEY": key}
    return variables | {f"WEED_HTTPS_{name}_CA": certificate for name in https}
