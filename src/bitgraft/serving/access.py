"""Middleware for every request: API keys, request ids, metrics, traces and the access log."""

import base64
import hashlib
import hmac
import time
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bitgraft.errors import ServingError
from bitgraft.serving.engine import Service
from bitgraft.serving.logs import access_log, request_id, valid_or_new_id

PUBLIC = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")
NO_KEY = {"error": "this service needs an API key: send it as X-API-Key, or as Authorization: Bearer KEY"}
CHALLENGE = 'Basic realm="bitgraft", charset="UTF-8"'  # makes a browser ask for the key, as a password


def read_keys(path: Path | None) -> tuple[bytes, ...]:
    """Return the hashes of the keys in a file with one key per line and comments after #; none without a file."""
    if path is None:
        return ()
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as cause:
        raise ServingError(f"cannot read API keys from {path}: {getattr(cause, 'strerror', cause)}") from cause
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or min(map(len, keys)) < 8:
        raise ServingError(f"{path} must hold one API key per line, each with at least 8 characters")
    return tuple(map(_hash, keys))


def is_authorized(headers: Headers, keys: tuple[bytes, ...], *, basic: bool = True) -> bool:
    """Check for a valid key in X-API-Key, in a bearer token, or in the password of basic authentication."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    candidates = [headers.get("x-api-key", "").strip()]
    if scheme.lower() == "bearer":
        candidates.append(credentials.strip())
    elif basic and scheme.lower() == "basic":
        candidates.append(_password(credentials))
    # sum, not any: comparing every pair keeps the time independent of the keys
    return sum(hmac.compare_digest(_hash(one), key) for one in candidates for key in keys) > 0


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:  # not base64, or not UTF-8
        return ""


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Access:
    """Check the key before reading the body; identify, count, time, trace and log every request."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service, settings = app, service, service.settings
        self._keys = (*settings.keys, *settings.admin_keys) if settings.keys else ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status, headers = time.perf_counter(), 500, Headers(scope=scope)
        id = valid_or_new_id(headers.get("x-request-id", ""))
        token = request_id.set(id)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id.encode())]
            await send(message)

        app = self._app
        if self._keys and scope["path"] not in PUBLIC and not is_authorized(headers, self._keys):
            app = JSONResponse(NO_KEY, 401, {"WWW-Authenticate": CHALLENGE, "Connection": "close"})
        with self._service.tracing.request(scope["method"], dict(headers)) as span:
            try:
                await app(scope, receive, send_with_id)
            finally:
                route = getattr(scope.get("route"), "path", "none")  # the client's path would be an unbounded label
                span |= {"http.route": route, "http.response.status_code": status, "http.request.id": id}
                self._record(scope, route, status, time.perf_counter() - start)
                request_id.reset(token)

    def _record(self, scope: Scope, route: str, status: int, seconds: float) -> None:
        metrics = self._service.metrics
        metrics.requests.labels(route, str(status)).inc()
        metrics.seconds.labels(route).observe(seconds)
        if not access_log.disabled:
            fields = {
                "client": (scope.get("client") or ("",))[0],
                "method": scope["method"],
                "path": scope["path"],
                "route": route,
                "task": scope.get("path_params", {}).get("task"),
                "status": status,
                "milliseconds": round(1000 * seconds, 3),
            }
            access_log.info("%s %s %d", scope["method"], scope["path"], status, extra={"fields": fields})
