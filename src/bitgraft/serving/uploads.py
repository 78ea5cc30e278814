"""A request's body, read with a limit on its bytes, on its time, and on what all requests together take."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from bitgraft.serving.refusals import Refusal, busy
from bitgraft.serving.settings import Settings

RATE = 50_000  # bytes per second that a client must keep up once its patience is used up
FIELDS = 1000  # fields of a form besides its files
FIELD_BYTES = 1024  # of one of them


@dataclass
class Upload:
    """What a client sent."""

    pictures: list[bytes] = field(default_factory=list)
    fields: dict[str, list[str]] = field(default_factory=dict)


class Intake:
    """Counts the bytes of all requests at work, so that they cannot fill the memory together."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._held = 0

    @asynccontextmanager
    async def upload(self, request: Request) -> AsyncIterator[Upload]:
        """The images of a request: its body as it is, or every file of a form. They count until they are answered."""
        held = [0]
        try:
            yield await self._read(request, held)
        finally:
            self._held -= held[0]

    async def _read(self, request: Request, held: list[int]) -> Upload:
        stream = self._stream(request, held)
        try:
            return await self._understood(request, stream)
        except ClientDisconnect as problem:
            raise Refusal(400, "the connection ended before the image was there") from problem
        except Refusal as problem:
            if problem.status in (400, 415):  # who is still sending when the line is closed never reads why
                with suppress(Refusal, ClientDisconnect):
                    async for _ in stream:
                        pass
            raise

    async def _understood(self, request: Request, stream: AsyncGenerator[bytes, None]) -> Upload:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/x-www-form-urlencoded":  # what curl --data sends, where --data-binary was meant
            raise Refusal(
                415,
                "send the image as the body (curl --data-binary @FILE -H 'Content-Type: image/jpeg') "
                "or as a file of a form (curl -F image=@FILE)",
            )
        if kind == "multipart/form-data":
            return await self._form(request, stream)
        data = b"".join([chunk async for chunk in stream])
        if not data:
            raise Refusal(400, "there is no image: send one as the body, or as a file of a form")
        return Upload([data])

    async def _stream(self, request: Request, held: list[int]) -> AsyncGenerator[bytes, None]:
        """The body's pieces, until one is too many."""
        most, began, chunks = self._settings.max_upload, time.monotonic(), request.stream().__aiter__()
        if int(_number(request.headers.get("content-length"))) > most:
            raise _too_large(most)
        while True:
            left = began + self._settings.patience + held[0] / RATE - time.monotonic()
            try:
                chunk = await asyncio.wait_for(anext(chunks), max(left, 0.0))
            except StopAsyncIteration:
                return
            except TimeoutError as problem:
                raise Refusal(408, "the image came too slowly: the upload was ended") from problem
            held[0] += len(chunk)
            self._held += len(chunk)
            if held[0] > most:
                raise _too_large(most)
            if self._held > self._settings.max_reading:
                raise busy("too many uploads at once: come back later", 1)
            yield chunk

    async def _form(self, request: Request, stream: AsyncGenerator[bytes, None]) -> Upload:
        parser = MultiPartParser(
            request.headers,
            stream,
            max_files=self._settings.max_queue,
            max_fields=FIELDS,
            max_part_size=FIELD_BYTES,
        )
        parser.spool_max_size = 2 * self._settings.max_upload  # never reached: nothing goes to a temporary file
        upload = Upload()
        try:
            form = await parser.parse()
        except Refusal:
            raise
        except (MultiPartException, ValueError, KeyError) as problem:
            reason = getattr(problem, "message", "") or "it is not what its header says"
            raise Refusal(400, f"the form cannot be read: {reason.rstrip('.')}") from problem
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                upload.pictures.append(await value.read())
            else:
                upload.fields.setdefault(name, []).append(value)
        await form.close()
        if not upload.pictures:
            raise Refusal(400, "there is no image in the form: send one as a file")
        return upload


def _too_large(most: int) -> Refusal:
    return Refusal(413, f"the upload is larger than {most / 1e6:g} MB: send less at once")


def _number(text: str | None) -> str:
    return text if text is not None and text.isascii() and text.isdigit() else "0"
