"""The service's log: lines of text, or one JSON object per line, and then one for each request as well."""

import json
import logging
import re
import time
import uuid
from contextvars import ContextVar
from typing import Literal

TEXT = "%(asctime)s %(process)d %(levelname)s %(message)s"
SAFE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
access = logging.getLogger("bitgraft.access")
access.disabled = True  # until JSON is asked for
request_id: ContextVar[str] = ContextVar("request_id", default="")


def set_up_logging(form: Literal["text", "json"]) -> None:
    logging.basicConfig(level=logging.INFO, format=TEXT)
    access.disabled = form == "text"
    if form == "json":
        for handler in logging.root.handlers:
            handler.setFormatter(JsonLines())


def accept_id(given: str) -> str:
    """The client's id for a request if it can stand in a header and a log, or a new one."""
    return given if SAFE_ID.fullmatch(given) else uuid.uuid4().hex


class JsonLines(logging.Formatter):
    """What was logged with `extra={"fields": {...}}` becomes keys of its own."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if asked := request_id.get():
            line["request_id"] = asked
        return json.dumps(line | getattr(record, "fields", {}))
