"""A file from a web address: encrypted, of limited size, in limited time, complete or not at all."""

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
TIMEOUT = 30.0  # seconds that a server may keep silent
DEADLINE = 3600.0  # seconds for the whole file


def download(address: str, target: Path, limit: int, timeout: float = TIMEOUT, deadline: float = DEADLINE) -> None:
    """Fetch one file. Whatever goes wrong is a `SharingError` that shows no password and no query."""
    shown = without_secrets(address)
    check_address(address)
    request = urllib.request.Request(address.partition("#")[0], headers={"User-Agent": f"bitgraft/{__version__}"})
    try:
        with urllib.request.build_opener(_Redirects()).open(request, timeout=timeout) as response:
            _copy(response, target, shown, limit, time.monotonic() + deadline)
    except urllib.error.HTTPError as cause:
        with cause:
            raise SharingError(f"{shown} was not sent: the server says {cause.code} {cause.reason}") from None
    except SharingError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as cause:
        reason = getattr(cause, "reason", None) or str(cause) or type(cause).__name__
        raise SharingError(f"{shown} could not be fetched ({reason}): check the address, or try again") from None


def check_address(address: str) -> None:
    """https, or http on this machine alone; no password in it."""
    parts = urlsplit(address)
    if parts.username is not None or parts.password is not None:
        raise SharingError(f"{without_secrets(address)}: an address with a password in it is refused; take it out")
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_local(address)):
        raise SharingError(
            f"{without_secrets(address)} is not encrypted, so anybody on the way could change it: use https://"
        )


def without_secrets(address: str) -> str:
    """The address without user, password, query and fragment, for messages."""
    parts = urlsplit(address)
    return SplitResult(parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "").geturl()


def _is_local(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to an address that a user could have given, and never from elsewhere to this machine."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> Any:
        try:
            check_address(newurl)
            if _is_local(newurl) and not _is_local(req.full_url):
                raise SharingError(f"{without_secrets(req.full_url)} points at this machine itself, which is refused")
        except SharingError:
            fp.close()  # nobody else will
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def _copy(response: http.client.HTTPResponse, target: Path, shown: str, limit: int, until: float) -> None:
    size, count = response.length, 0  # None where the server does not state it
    too_large = SharingError(f"{shown} is larger than {limit / 1e6:,.0f} MB: raise --max-size if you trust it")
    if size is not None and size > limit:
        raise too_large
    with target.open("wb") as file:
        while piece := response.read1(CHUNK):
            count += len(piece)
            if count > limit:
                raise too_large
            if time.monotonic() > until:
                raise SharingError(f"{shown} took too long: {count / 1e6:,.1f} MB had come when time was up")
            file.write(piece)
    if size is not None and count != size:
        raise SharingError(f"{shown} broke off after {count:,} of {size:,} bytes: try again")
