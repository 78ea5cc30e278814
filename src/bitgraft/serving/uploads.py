"""A request's body, read with limits on its size, its time, and the memory that all requests take together."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from bitgraft.serving.refusals import Refusal
from bitgraft.serving.settings import Settings

RATE = 50_000  # bytes per second that a client must keep up when its patience is used up
FIELDS, FIELD_BYTES = 1000, 1024  # limits of a form besides its files


HOW = """send the image as the body (curl --data-binary @FILE -H 'Content-Type: image/jpeg') \
or as a file of a form (curl -F image=@FILE)"""
Upload = tuple[list[bytes], list[str]]
"""Images, and the fields `task` of a form."""


class Uploads:
    """Counts the bytes of all open requests, so that together they cannot fill the memory."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._held = settings, 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Upload]:
        """The images of a request: its body, or every file of a form. Their bytes count until the block ends."""
        async with self._counted(request) as stream:
            yield await self._parse(request, stream)

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """A request's body as it is, whose bytes count until the block ends."""
        async with self._counted(request) as stream:
            yield b"".join([chunk async for chunk in stream])

    @asynccontextmanager
    async def _counted(self, request: Request) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """The body in chunks; together, those of all requests must fit into the memory for them."""
        held = 0

        async def stream() -> AsyncGenerator[bytes, None]:
            nonlocal held
            async for chunk in self.stream(request, self._settings.max_upload, "the upload"):
                held += len(chunk)
                self._held += len(chunk)
                if self._held > self._settings.max_reading:
                    raise Refusal(503, "too many uploads at once: try later", 1)
                yield chunk

        try:
            yield stream()
        finally:
            self._held -= held

    async def _parse(self, request: Request, stream: AsyncGenerator[bytes, None]) -> Upload:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            if kind == "application/x-www-form-urlencoded":  # curl --data, where --data-binary was meant
                raise Refusal(415, HOW)
            if kind == "multipart/form-data":
                return await self._form(request, stream)
            if data := b"".join([chunk async for chunk in stream]):
                return [data], []
            raise Refusal(400, "there is no image: send one as the body, or as a file of a form")
        except Refusal as problem:
            if problem.status in (400, 415):  # a client that is still sending would not read why it was refused
                with suppress(Refusal):
                    async for _ in stream:
                        pass
            raise

    async def stream(self, request: Request, limit: int, what: str) -> AsyncGenerator[bytes, None]:
        """The body in chunks, until it is too large or too slow."""
        received, chunks = 0, request.stream()
        deadline = time.monotonic() + self._settings.patience
        too_large = Refusal(413, f"{what} is larger than {limit / 1e6:g} MB: send less at once")
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_large
        while True:
            left = deadline + received / RATE - time.monotonic()
            try:
                chunk = await asyncio.wait_for(anext(chunks), max(left, 0.0))
            except StopAsyncIteration:
                return
            except ClientDisconnect as problem:
                raise Refusal(400, f"the connection ended before {what} had arrived") from problem
            except TimeoutError as problem:
                raise Refusal(408, f"{what} came too slowly and was stopped") from problem
            received += len(chunk)
            if received > limit:
                raise too_large
            yield chunk

    async def _form(self, request: Request, stream: AsyncGenerator[bytes, None]) -> Upload:
        limits = {"max_files": self._settings.max_queue, "max_fields": FIELDS, "max_part_size": FIELD_BYTES}
        parser = MultiPartParser(request.headers, stream, **limits)
        parser.spool_max_size = 2 * self._settings.max_upload  # never reached: nothing goes to a temporary file
        try:
            form = await parser.parse()
        except Refusal:
            raise
        except (MultiPartException, ValueError, KeyError) as problem:
            reason = getattr(problem, "message", "") or "it is not what its header says"
            raise Refusal(400, f"the form cannot be read: {reason.rstrip('.')}") from problem
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        images, tasks = [await file.read() for file in files], [str(name) for name in form.getlist("task")]
        await form.close()
        if not images:
            raise Refusal(400, "there is no image in the form: send one as a file")
        return images, tasks
