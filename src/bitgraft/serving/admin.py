"""Tasks changed over HTTP: put, removed, rolled back, tried on a share of the traffic. Only with an admin key."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request

from bitgraft.errors import UnsafeNameError
from bitgraft.serving.access import allowed
from bitgraft.serving.engine import Service
from bitgraft.serving.examples import CHANGED, answer
from bitgraft.serving.refusals import Refusal
from bitgraft.serving.uploads import Uploads
from bitgraft.serving.versions import Versions
from bitgraft.store import Store
from bitgraft.task import check_name

OFF = "tasks cannot be changed over HTTP here: start the service with --admin-key-file"
NO_KEY = "changing tasks needs an admin key: send it as X-API-Key, or as Authorization: Bearer KEY"
BODY = {
    "requestBody": {
        "required": True,
        "description": "A task file of the store's backbone.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
Canary = Annotated[
    float | None, Query(gt=0, le=1, description="The share of traffic for it; without this, it replaces the task.")
]


def add_admin(app: FastAPI, service: Service, uploads: Uploads) -> None:
    settings, versions = service.settings, Versions(Store(service.settings.store))

    def guard(request: Request) -> None:
        """No basic authentication: a browser would send that along with any page's request."""
        if not settings.admin_keys:
            raise Refusal(403, OFF)
        if not allowed(request.headers, settings.admin_keys, basic=False):
            raise Refusal(401, NO_KEY)

    def route(method: str, path: str, **options: Any) -> Callable[..., Any]:
        return app.api_route(
            path, methods=[method], dependencies=[Depends(guard)], responses=answer(CHANGED), **options
        )

    @route("PUT", "/v1/tasks/{task}", openapi_extra=BODY)
    async def put(request: Request, task: str, canary: Canary = None) -> dict[str, Any]:
        """Add or replace a task, or try a new version on a share of the traffic. Checked whole before it is stored."""
        _check_name(task)
        part = versions.part()
        try:
            await _save(request, uploads, part, settings.max_task)
            return await service.change("put", task, str(part), canary)
        finally:
            part.unlink(missing_ok=True)

    @route("DELETE", "/v1/tasks/{task}")
    async def remove(task: str) -> dict[str, Any]:
        """Remove a task. Its file is kept as the previous version, so a rollback brings it back."""
        return await service.change("remove", task)

    @route("POST", "/v1/tasks/{task}/rollback")
    async def rollback(task: str) -> dict[str, Any]:
        """Go back to the previous version; once more, and the newer one is back."""
        return await service.change("rollback", task)

    @route("POST", "/v1/tasks/{task}/promote")
    async def promote(task: str) -> dict[str, Any]:
        """Give the canary all traffic."""
        return await service.change("promote", task)

    @route("DELETE", "/v1/tasks/{task}/canary")
    async def end_canary(task: str) -> dict[str, Any]:
        """End the canary."""
        return await service.change("end_canary", task)


def _check_name(task: str) -> None:
    try:
        check_name(task)
    except UnsafeNameError as problem:
        raise Refusal(400, str(problem)) from problem


async def _save(request: Request, uploads: Uploads, part: Path, limit: int) -> None:
    try:
        with open(part, "xb") as file:
            async for chunk in uploads.stream(request, limit, "the task file"):
                file.write(chunk)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
    except OSError as problem:
        raise Refusal(507, f"the store cannot be written: {problem.strerror}") from problem
