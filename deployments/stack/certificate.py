"""The certificate that authenticates SeaweedFS' processes to each other; without its key no inner port answers."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from deployments.stack.settings import LOOPBACK, write_private

_DAYS = 3650  # a new one is made at each start of the stack


def write_certificate(folder: Path) -> None:
    """Write a new key and its self-signed certificate, for servers and clients on loopback."""
    folder.mkdir(exist_ok=True, mode=0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "alignment")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))]), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(folder / "key.pem", private.decode())
    write_private(folder / "certificate.pem", certificate.public_bytes(pem).decode())


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
