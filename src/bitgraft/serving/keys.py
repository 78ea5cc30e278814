"""API keys: who may ask. Kept and compared as hashes, in a time that does not depend on the key."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from bitgraft.errors import ServingError

OPEN = ("/healthz", "/readyz")
CHALLENGE = 'Basic realm="bitgraft", charset="UTF-8"'
"""Makes a browser ask for the key, as a password, so that the page works as well."""


def read_keys(path: str | Path) -> tuple[bytes, ...]:
    """One key to a line; lines that are empty or begin with # are none."""
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as cause:
        raise ServingError(f"the API keys cannot be read from {path}: {cause}") from cause
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or min(map(len, keys)) < 8:
        raise ServingError(f"{path} should have an API key of at least 8 characters on each line")
    return tuple(map(_hashed, keys))


def allowed(headers: Iterable[tuple[bytes, bytes]], keys: tuple[bytes, ...]) -> bool:
    """Whether one of the keys came along: as X-API-Key, as a bearer token, or as the password of a browser's user."""
    given = [_hashed(key) for key in _given(headers)]
    return sum(hmac.compare_digest(one, key) for one in given for key in keys) > 0


def _given(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    found = []
    for name, value in headers:
        text = value.decode("latin-1").strip()
        scheme, _, rest = text.partition(" ")
        if name == b"x-api-key":
            found.append(text)
        elif name == b"authorization" and scheme.lower() == "bearer":
            found.append(rest.strip())
        elif name == b"authorization" and scheme.lower() == "basic":
            found.append(_password(rest))
    return found[:4]


def _password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
