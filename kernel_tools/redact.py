"""The one filter that every outgoing string passes: displays, logs, errors, files of ours.

It knows the exact values that were registered as secret, and the shapes that secrets have in URLs and
headers. It must never raise and never be the only guard: secrets are kept out first, filtered second.
"""

from __future__ import annotations

import re
import threading
from typing import Any
from urllib.parse import quote

MASK = "***"

# Shorter values ("admin", "1234") would blank ordinary words; their owners are kept out by design, not here.
SHORTEST_SECRET = 6

_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    # Presigned URLs: the whole query is the credential.
    (
        re.compile(
            r"(https?://[^\s?'\"<>]+)\?[^\s'\"<>]*X-Amz-Signature=[^\s'\"<>]*", re.IGNORECASE
        ),
        rf"\1?{MASK}",
    ),
    (
        re.compile(r"(X-Amz-(?:Signature|Credential|Security-Token)=)[^\s&'\"<>]+", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    # Kaggle's proxy: /k/<id>/<JWE>/proxy, the path is the credential.
    (re.compile(r"(/k/\d+/)[^/\s'\"<>]{8,}(/proxy)"), rf"\1{MASK}\2"),
    (
        re.compile(r"([?&](?:token|access_token|api_key|key)=)[^\s&'\"<>]+", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    (
        re.compile(
            r"(Authorization\s*[:=]\s*['\"]?(?:token|bearer|basic)\s+)[^\s'\",}]+", re.IGNORECASE
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"(https?://[^\s/:@'\"<>]+:)[^\s/@'\"<>]+(@)"), rf"\1{MASK}\2"),
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}\b"), MASK),
)

_lock = threading.Lock()
_secrets: set[str] = set()


def register_secret(value: str | None) -> None:
    """Mask this exact value, raw and URL-quoted, wherever `redact` is applied from now on."""
    if value and len(value) >= SHORTEST_SECRET:
        with _lock:
            _secrets.update({value, quote(value, safe="")})


def redact(text: str) -> str:
    """Return `text` with registered secrets and credential-shaped parts replaced by `***`."""
    with _lock:
        known = sorted(_secrets, key=len, reverse=True)
    for secret in known:
        if secret in text:
            text = text.replace(secret, MASK)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_all(value: Any) -> Any:
    """Return JSON-like `value` with every text in it redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redact_all(item) for item in value]
    return value
