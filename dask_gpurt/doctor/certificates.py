"""`end_of`: when a certificate ends. A reader of the few fields of X.509 on the way to it.

The standard library tells it of a peer only, and the cryptography package is no requirement.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
#: tags of ASN.1
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


def end_of(pem: str, of: Callable[[Iterable[float]], float] = min) -> float:
    """The earliest end among the certificates in PEM text or a file, or another one of them, in seconds since 1970.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        There is no certificate in it.
    """
    if "-----BEGIN" not in pem:
        with open(pem, encoding="ascii", errors="replace") as f:
            pem = f.read()
    found = _CERTIFICATE.findall(pem)
    if not found:
        raise ValueError("there is no certificate in it")
    return of(_end(ssl.PEM_cert_to_DER_cert(text)) for text in found)


def _end(der: bytes) -> float:
    certificate = _inside(der, _SEQUENCE)
    fields = _inside(certificate, _SEQUENCE)
    tag, _, rest = _next(fields)
    if tag == _VERSION:
        _, _, rest = _next(rest)  # the serial number
    for _ in ("signature", "issuer"):
        _, _, rest = _next(rest)
    _, _, after_begin = _next(_inside(rest, _SEQUENCE))
    tag, value, _ = _next(after_begin)
    if tag == _UTC_TIME:  # two digits of the year: 1950 to 2049
        century = b"19" if value[:2] >= b"50" else b"20"
        value = century + value
    elif tag != _GENERALIZED_TIME:
        raise ValueError(f"a time of type {tag:#x} in a certificate")
    return datetime.strptime(value.decode(), "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _inside(data: bytes, expected: int) -> bytes:
    tag, value, _ = _next(data)
    if tag != expected:
        raise ValueError(f"not a certificate: type {tag:#x} where {expected:#x} is due")
    return value


def _next(data: bytes) -> tuple[int, bytes, bytes]:
    """The tag and value of the first element, and what follows it."""
    if len(data) < 2:
        raise ValueError("not a certificate: it ends early")
    tag, length, start = data[0], data[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start], "big")
    if len(data) < start + length:
        raise ValueError("not a certificate: it ends early")
    return tag, data[start : start + length], data[start + length :]
