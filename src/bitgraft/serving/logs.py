"""The service's log, as text or as one JSON object per line. The JSON log includes every request."""

import json
import logging
import re
import time
import uuid
from contextvars import ContextVar
from typing import Literal

TEXT = "%(asctime)s %(process)d %(levelname)s %(message)s"
SAFE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
access_log = logging.getLogger("bitgraft.access")
access_log.disabled = True  # enabled by the JSON format
request_id: ContextVar[str] = ContextVar("request_id", default="")


def set_up_logging(form: Literal["text", "json"]) -> None:
    logging.basicConfig(format=TEXT)
    for name in ("bitgraft", "uvicorn"):  # others, such as ONNX's exporter, log pages of details
        logging.getLogger(name).setLevel(logging.INFO)
    access_log.disabled = form == "text"
    if form == "json":
        for handler in logging.root.handlers:
            handler.setFormatter(JsonFormatter())


def valid_or_new_id(id: str) -> str:
    """Return the client's request id if it is safe in a header and a log, else a new one."""
    return id if SAFE_ID.fullmatch(id) else uuid.uuid4().hex


class JsonFormatter(logging.Formatter):
    """Format a record as JSON; `extra={"fields": {...}}` adds keys."""

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
        if id := request_id.get():
            line["request_id"] = id
        return json.dumps(line | getattr(record, "fields", {}))
