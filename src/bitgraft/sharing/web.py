"""Download a file over https, with limits on size and time."""

import http.client
import ipaddress
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import IO, Any
from urllib.parse import SplitResult, urlsplit

from bitgraft import __version__
from bitgraft.errors import SharingError

CHUNK = 1 << 20
TIMEOUT = 30.0  # seconds without any data
DEADLINE = 3600.0  # seconds for the whole file


def download(address: str, target: Path, limit: int, timeout: float = TIMEOUT, deadline: float = DEADLINE) -> None:
    """Download one file. Any error is a `SharingError` without passwords or queries."""
    shown = without_secrets(address)
    check_address(address)
    request = urllib.request.Request(address.partition("#")[0], headers={"User-Agent": f"bitgraft/{__version__}"})
    try:
        with urllib.request.build_opener(_Redirects()).open(request, timeout=timeout) as response:
            _copy(response, target, shown, limit, time.monotonic() + deadline)
    except urllib.error.HTTPError as cause:
        with cause:  # its reason may contain a redirect's address
            status = f"{cause.code} {http.client.responses.get(cause.code, '')}".strip()
            raise SharingError(f"{shown} was not sent: the server returned {status}") from None
    except SharingError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as cause:
        inner = getattr(cause, "reason", None) or cause
        reason = getattr(inner, "strerror", None) or str(inner) or type(inner).__name__
        raise SharingError(f"{shown} could not be fetched ({reason}): check the address, or try again") from None


def check_address(address: str) -> None:
    """Allow https, and http on this machine, without a password."""
    parts = _split(address)
    if parts.username is not None or parts.password is not None:
        raise SharingError(f"{without_secrets(address)}: an address must not contain a password; remove it")
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_local(address)):
        raise SharingError(f"{without_secrets(address)} is not encrypted, so it could be tampered with: use https://")


def without_secrets(address: str) -> str:
    """Return the address without user, password, query and fragment, for messages."""
    parts = _split(address)
    return SplitResult(parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "").geturl()


def _split(address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError as cause:  # the address may hold a password, so the message does not
        raise SharingError(f"this is not an address on the web ({cause}): check it") from None


def _is_local(address: str) -> bool:
    host = _split(address).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects only to allowed addresses, and never from elsewhere to this machine."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> Any:
        try:
            check_address(newurl)
            if _is_local(newurl) and not _is_local(req.full_url):
                raise SharingError(f"{without_secrets(req.full_url)} redirects to this machine, which is refused")
        except SharingError:
            fp.close()  # urllib does not
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def _copy(response: http.client.HTTPResponse, target: Path, shown: str, limit: int, until: float) -> None:
    size, count = response.length, 0  # None if not stated
    too_large = SharingError(f"{shown} is larger than {limit / 1e6:,.0f} MB: raise --max-size if you trust it")
    if size is not None and size > limit:
        raise too_large
    with target.open("wb") as file:
        while piece := response.read1(CHUNK):
            count += len(piece)
            if count > limit:
                raise too_large
            if time.monotonic() > until:
                raise SharingError(f"{shown} took too long: only {count / 1e6:,.1f} MB arrived in time; try again")
            file.write(piece)
    if size is not None and count != size:
        raise SharingError(f"{shown} was cut off after {count:,} of {size:,} bytes: try again")
