"""Routes that change tasks: put, remove, roll back, and canaries. They need an admin key."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request

from bitgraft.backbone.files import check_name
from bitgraft.serving.access import is_authorized
from bitgraft.serving.engine import Service
from bitgraft.serving.examples import CANARY, CHANGED, REMOVED, TASK_FILE, example
from bitgraft.serving.http_error import HttpError
from bitgraft.serving.uploads import Uploads
from bitgraft.serving.versions import Versions
from bitgraft.store import Store

OFF = "tasks cannot be changed over HTTP: start the service with --admin-key-file"
NO_KEY = "changing tasks needs an admin key: send it as X-API-Key, or as Authorization: Bearer KEY"
Canary = Annotated[
    float | None, Query(gt=0, le=1, description="Share of the task's requests; without it, the file replaces the task.")
]
REMOVE = "Remove a task. Its file becomes the previous version, so a rollback restores it."
ROLL_BACK = "Swap the task with its previous version. A second rollback undoes the first."
ACTIONS = (
    ("DELETE", "", "remove", REMOVE, REMOVED),
    ("POST", "/rollback", "rollback", ROLL_BACK, CHANGED),
    ("POST", "/promote", "promote", "Replace the task with its canary.", CHANGED),
    ("DELETE", "/canary", "end_canary", "Remove the canary.", CHANGED),
)


def add_admin(app: FastAPI, service: Service, uploads: Uploads) -> None:
    settings, versions = service.settings, Versions(Store(service.settings.store))

    def guard(request: Request) -> None:
        """Reject basic authentication: a browser would attach it to requests from any page."""
        if not settings.admin_keys:
            raise HttpError(403, OFF)
        if not is_authorized(request.headers, settings.admin_keys, basic=False):
            raise HttpError(401, NO_KEY)

    router = APIRouter(prefix="/v1/tasks/{task}", dependencies=[Depends(guard)])

    @router.put("", openapi_extra=TASK_FILE, responses=example(CANARY))
    async def put(request: Request, task: str, canary: Canary = None) -> dict[str, Any]:
        """Add or replace a task, or send a share of its requests to a new version. The file is checked first."""
        check_name(task)
        part = versions.part()
        try:
            await _save(request, uploads, part, settings.max_task)
            if canary is None:
                return await service.change("put", task, part)
            return await service.change("put_canary", task, part, canary)
        finally:
            part.unlink(missing_ok=True)

    for method, path, action, about, reply in ACTIONS:
        endpoint, shown = _endpoint(service, action), example(reply)
        router.add_api_route(path, endpoint, methods=[method], name=action, description=about, responses=shown)
    app.include_router(router)


def _endpoint(service: Service, action: str) -> Callable[[str], Awaitable[dict[str, Any]]]:
    async def endpoint(task: str) -> dict[str, Any]:
        return await service.change(action, task)

    return endpoint


async def _save(request: Request, uploads: Uploads, part: Path, limit: int) -> None:
    try:
        with open(part, "xb") as file:
            async for chunk in uploads.stream(request, limit, "the task file"):
                file.write(chunk)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
    except OSError as problem:
        raise HttpError(507, f"cannot write to the store: {problem.strerror}") from problem
