"""What every request passes: is it allowed, and how long did it take."""

import json
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bitgraft.serving.keys import CHALLENGE, OPEN, allowed
from bitgraft.serving.metrics import Metrics

NO_KEY = {"error": "this service needs an API key: send it as X-API-Key, or as Authorization: Bearer KEY"}


class Guard:
    """The key is checked before anything of the body is read."""

    def __init__(self, app: ASGIApp, metrics: Metrics, keys: tuple[bytes, ...]) -> None:
        self._app, self._metrics, self._keys = app, metrics, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), [500]

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        try:
            if not self._keys or scope["path"] in OPEN or allowed(scope["headers"], self._keys):
                await self._app(scope, receive, note)
            else:
                await _turn_away(note)
        finally:
            route = getattr(scope.get("route"), "path", "none")  # never what a client made up: that has no end
            self._metrics.requests.labels(route, str(status[0])).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - began)


async def _turn_away(send: Any) -> None:
    body = json.dumps(NO_KEY).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "www-authenticate": CHALLENGE,
        "connection": "close",
    }
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 401, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
