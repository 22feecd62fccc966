"""A self-signed certificate for mutual TLS between the parts of an embedded service, and for nobody else.

The standard library cannot make one; pycryptodome, which the minio SDK needs anyway, makes the key and
the signature, and the few structures of RFC 5280 are written out here.
"""

from __future__ import annotations

import base64
import secrets
from datetime import datetime, timedelta, timezone
from ipaddress import IPv4Address

# Object identifiers, in DER: RFC 5480 (ecdsa-with-SHA256), X.520 (commonName), RFC 5280 (the extensions).
_ECDSA_SHA256 = bytes.fromhex("06082a8648ce3d040302")
_COMMON_NAME = bytes.fromhex("0603550403")
_BASIC_CONSTRAINTS = bytes.fromhex("0603551d13")
_SUBJECT_ALT_NAME = bytes.fromhex("0603551d11")

_SEQUENCE, _SET, _INTEGER, _BIT_STRING, _OCTET_STRING = 0x30, 0x31, 0x02, 0x03, 0x04
_UTF8, _UTC_TIME, _TRUE = 0x0C, 0x17, bytes.fromhex("0101ff")


def self_signed(
    name: str, *, address: str = "127.0.0.1", now: datetime | None = None
) -> tuple[str, str]:
    """Return (certificate, private key) as PEM: ECDSA P-256, its own CA, good for ten years.

    Args:
        name: its common name.
        address: the IPv4 address that it stands for.
        now: start of its life (default: yesterday, so that a clock set back does no harm).
    """
    from Crypto.Hash import SHA256
    from Crypto.PublicKey import ECC
    from Crypto.Signature import DSS

    start = (datetime.now(timezone.utc) if now is None else now) - timedelta(days=1)
    key = ECC.generate(curve="P-256")
    algorithm = _der(_SEQUENCE, _ECDSA_SHA256)
    subject = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _COMMON_NAME, _der(_UTF8, name.encode()))))
    extensions = _der(
        _SEQUENCE,
        _der(_SEQUENCE, _BASIC_CONSTRAINTS, _TRUE, _der(_OCTET_STRING, _der(_SEQUENCE, _TRUE))),
        _der(
            _SEQUENCE,
            _SUBJECT_ALT_NAME,
            _der(_OCTET_STRING, _der(_SEQUENCE, _der(0x87, IPv4Address(address).packed))),
        ),
    )
    body = _der(
        _SEQUENCE,
        _der(0xA0, _der(_INTEGER, b"\x02")),  # version 3
        _der(_INTEGER, b"\x01" + secrets.token_bytes(15)),  # serial number, positive
        algorithm,
        subject,  # its own issuer
        _der(_SEQUENCE, _time(start), _time(start + timedelta(days=3650))),
        subject,
        key.public_key().export_key(format="DER"),
        _der(0xA3, extensions),
    )
    signature = DSS.new(key, "fips-186-3", encoding="der").sign(SHA256.new(body))
    certificate = _der(_SEQUENCE, body, algorithm, _der(_BIT_STRING, b"\x00", signature))
    return (
        _pem("CERTIFICATE", certificate),
        _pem("PRIVATE KEY", key.export_key(format="DER", use_pkcs8=True)),
    )


def _der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    if len(body) < 128:
        return bytes([tag, len(body)]) + body
    length = len(body).to_bytes((len(body).bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + body


def _time(moment: datetime) -> bytes:
    return _der(_UTC_TIME, moment.strftime("%y%m%d%H%M%SZ").encode())


def _pem(label: str, der: bytes) -> str:
    text = base64.encodebytes(der).decode().replace("\n", "")
    lines = [text[i : i + 64] for i in range(0, len(text), 64)]
    return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----", ""])
