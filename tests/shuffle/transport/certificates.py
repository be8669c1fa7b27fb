"""Certificates for tests, as a site would make them: an authority, and what it has signed."""

from __future__ import annotations

import datetime
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from distributed import Security

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates; its own is `pem`."""

    def __init__(self, name: str = "cluster") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.pem = self.signed(self.name, self.key, DAY, ca=True)

    def signed(self, subject: x509.Name, key: Any, lasts: datetime.timedelta, ca: bool = False) -> str:
        """A certificate that began ten days ago and lasts from now on; less than nothing: it has expired."""
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 10 * DAY)
            .not_valid_after(now + lasts)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .sign(self.key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM).decode()

    def member(self, lasts: datetime.timedelta = DAY, **more: Any) -> Security:
        """Security of a cluster whose members all have one certificate of this authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "member")])
        cert = self.signed(subject, key, lasts)
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()
        roles = ("client", "scheduler", "worker")
        return Security(
            require_encryption=True,
            tls_ca_file=self.pem,
            **{f"tls_{role}_cert": cert for role in roles},
            **{f"tls_{role}_key": text for role in roles},
            **more,
        )
