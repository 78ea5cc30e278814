"""Middleware that every request passes: API keys, request ids, and what is counted, traced and logged."""

import base64
import binascii
import hashlib
import hmac
import time
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bitgraft.errors import ServingError
from bitgraft.serving.engine import Service
from bitgraft.serving.logs import accept_id, access, request_id

OPEN = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")
NO_KEY = {"error": "this service needs an API key: send it as X-API-Key, or as Authorization: Bearer KEY"}
CHALLENGE = 'Basic realm="bitgraft", charset="UTF-8"'  # makes a browser ask for the key, as a password


def read_keys(path: str | Path) -> tuple[bytes, ...]:
    """The hashes of the keys in a file: one key per line, comments begin with #."""
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as cause:
        raise ServingError(f"the API keys cannot be read from {path}: {cause}") from cause
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or min(map(len, keys)) < 8:
        raise ServingError(f"{path} must hold one API key per line, each of at least 8 characters")
    return tuple(map(_hashed, keys))


def allowed(headers: Headers, keys: tuple[bytes, ...], *, basic: bool = True) -> bool:
    """Whether a key was sent: as X-API-Key, as a bearer token, or as the password of basic authentication."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    given = [headers.get("x-api-key", "").strip()]
    if scheme.lower() == "bearer":
        given.append(credentials.strip())
    elif basic and scheme.lower() == "basic":
        given.append(_password(credentials))
    # every pair is compared, in a time that does not depend on the key
    return sum(hmac.compare_digest(_hashed(one), key) for one in given for key in keys) > 0


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Access:
    """Checks the key before anything of the body is read; names, counts, times, traces and logs every request."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service, settings = app, service, service.settings
        self._keys = (*settings.keys, *settings.admin_keys) if settings.keys else ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, headers = time.perf_counter(), 500, Headers(scope=scope)
        asked = accept_id(headers.get("x-request-id", ""))
        named = request_id.set(asked)

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", asked.encode())]
            await send(message)

        app = self._app
        if self._keys and scope["path"] not in OPEN and not allowed(headers, self._keys):
            app = JSONResponse(NO_KEY, 401, {"WWW-Authenticate": CHALLENGE, "Connection": "close"})
        with self._service.tracing.request(scope["method"], dict(headers)) as span:
            try:
                await app(scope, receive, watch)
            finally:
                route = getattr(scope.get("route"), "path", "none")  # not the client's path: there are endless ones
                span |= {"http.route": route, "http.response.status_code": status, "http.request.id": asked}
                self._note(scope, route, status, time.perf_counter() - began)
                request_id.reset(named)

    def _note(self, scope: Scope, route: str, status: int, seconds: float) -> None:
        metrics = self._service.metrics
        metrics.requests.labels(route, str(status)).inc()
        metrics.seconds.labels(route).observe(seconds)
        if not access.disabled:
            fields = {
                "client": (scope.get("client") or ("",))[0],
                "method": scope["method"],
                "path": scope["path"],
                "route": route,
                "task": scope.get("path_params", {}).get("task"),
                "status": status,
                "milliseconds": round(1000 * seconds, 3),
            }
            access.info("%s %s %d", scope["method"], scope["path"], status, extra={"fields": fields})
