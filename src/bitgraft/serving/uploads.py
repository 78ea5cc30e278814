"""Read request bodies, with limits on the size and time of each and on the memory of all."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from bitgraft.serving.http_error import HttpError
from bitgraft.serving.settings import Settings

MIN_RATE = 50_000  # bytes per second that earn a client more time
MAX_FIELDS, MAX_FIELD_BYTES = 1000, 1024  # of a form, files excluded
USAGE = """send the image as the body (curl --data-binary @FILE -H 'Content-Type: image/jpeg') \
or as a file in a form (curl -F image=@FILE)"""
T = TypeVar("T")
Stream = AsyncGenerator[bytes, None]
Upload = tuple[list[bytes], list[str]]
"""Images, and the `task` fields of a form."""


class Uploads:
    """Limit the total bytes of all open requests."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._held = settings, 0

    @asynccontextmanager
    async def read(self, request: Request, parse: Callable[[Request, Stream], Awaitable[T]]) -> AsyncIterator[T]:
        """Parse a request's body while it arrives. Its bytes count as held until the block ends."""
        held = 0

        async def counted() -> Stream:
            nonlocal held
            async for chunk in self.stream(request, self._settings.max_upload, "the upload"):
                held += len(chunk)
                self._held += len(chunk)
                if self._held > self._settings.max_reading:
                    raise HttpError(503, "too many uploads at once: try again later", 1)
                yield chunk

        try:
            yield await parse(request, counted())
        finally:
            self._held -= held

    async def images(self, request: Request, stream: Stream) -> Upload:
        """Parse the images: the body, or every file of a form."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            if kind == "application/x-www-form-urlencoded":  # curl --data instead of --data-binary
                raise HttpError(415, USAGE)
            if kind == "multipart/form-data":
                return await self._form(request, stream)
            if data := await body(request, stream):
                return [data], []
            raise HttpError(400, "there is no image: send it as the body, or as a file in a form")
        except HttpError:
            with suppress(HttpError):  # read the rest, or a client that is still sending would not see why
                async for _ in stream:
                    pass
            raise

    async def stream(self, request: Request, limit: int, what: str) -> Stream:
        """Yield the body in chunks. Raise an `HttpError` if it is too large or too slow."""
        received, chunks = 0, request.stream()
        deadline = time.monotonic() + self._settings.patience
        too_large = HttpError(413, f"{what} is larger than {limit / 1e6:g} MB: send less at once")
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_large
        while True:
            left = deadline + received / MIN_RATE - time.monotonic()
            try:
                chunk = await asyncio.wait_for(anext(chunks), max(left, 0.0))
            except StopAsyncIteration:
                return
            except ClientDisconnect as problem:
                raise HttpError(400, f"the connection closed before {what} was complete") from problem
            except TimeoutError as problem:
                raise HttpError(408, f"{what} was too slow and has been stopped") from problem
            received += len(chunk)
            if received > limit:
                raise too_large
            yield chunk

    async def _form(self, request: Request, stream: Stream) -> Upload:
        limits = {"max_files": self._settings.max_queue, "max_fields": MAX_FIELDS, "max_part_size": MAX_FIELD_BYTES}
        parser = MultiPartParser(request.headers, stream, **limits)
        parser.spool_max_size = 2 * self._settings.max_upload  # never reached, so nothing is written to disk
        try:
            form = await parser.parse()
        except HttpError:
            raise
        except (MultiPartException, ValueError, KeyError) as problem:
            reason = getattr(problem, "message", "") or "it does not match its Content-Type"
            raise HttpError(400, f"the form cannot be read: {reason.rstrip('.')}") from problem
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        images, tasks = [await file.read() for file in files], [str(name) for name in form.getlist("task")]
        await form.close()
        if not images:
            raise HttpError(400, "there is no image in the form: send it as a file")
        return images, tasks


async def body(request: Request, stream: Stream) -> bytes:
    return b"".join([chunk async for chunk in stream])
