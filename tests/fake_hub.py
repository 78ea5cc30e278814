"""As much of the Hugging Face Hub as huggingface_hub asks for, on this machine; and a plain web server beside it."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "s3cret" * 6
COMMIT = "0123456789abcdef" * 2 + "01234567"


class FakeHub:
    """Repositories by name, each with its files; `send` may change what goes over the wire."""

    def __init__(self) -> None:
        self.address = ""
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, Any] = {}
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.read_only = False
        self.send: Callable[[bytes], bytes] = lambda data: data
        self.states: Callable[[str, bytes], str] = lambda file, data: hashlib.sha256(data).hexdigest()
        self.pages: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def answer(
        self, data: Any, code: int = 200, headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        if length is not None and length != len(body):
            self.close_connection = True
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if path in self.hub.pages:
            self.hub.pages[path](self)
        elif path.startswith("/api/models/"):
            self._describe(path.removeprefix("/api/models/").partition("/revision/")[0])
        elif "/resolve/" in path:
            repo, _, rest = path[1:].partition("/resolve/")
            self._file(repo, rest.partition("/")[2])
        else:
            self._missing("EntryNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self.body()
        self.hub.asked.append(f"POST {path}")
        if self.hub.read_only or self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": f"no such right for {self.headers.get('Authorization')}"}, 403)
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.hub.repos.setdefault(name, {})
            self.hub.private[name] = asked.get("private", asked.get("visibility"))
            self.answer({"url": f"{self.hub.address}/{name}"})
        elif "/preupload/" in path:
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": f, "uploadMode": _mode(f), "shouldIgnore": False, "oid": None} for f in files]
            self.answer({"files": modes})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [{**entry, "actions": self._upload(entry["oid"])} for entry in json.loads(body)["objects"]]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            self._commit(path.removeprefix("/api/models/").partition("/commit/")[0], body)
        else:
            self._missing("EntryNotFound")

    def do_PUT(self) -> None:
        self.hub.objects[self.path.rpartition("/")[2]] = self.body()
        self.answer(b"")

    def _upload(self, oid: str) -> dict[str, Any]:
        return {"upload": {"href": f"{self.hub.address}/lfs/{oid}", "header": {}}}

    def _commit(self, repo: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.hub.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                data = self.hub.objects[value["oid"]]
                assert hashlib.sha256(data).hexdigest() == value["oid"]
                self.hub.repos[repo][value["path"]] = data
        self.answer({"commitUrl": f"{self.hub.address}/{repo}/commit/{COMMIT}", "commitOid": COMMIT})

    def _describe(self, repo: str) -> None:
        if repo not in self.hub.repos:
            return self._missing("RepoNotFound")
        siblings = [{"rfilename": f, "size": len(d), **self._lfs(f, d)} for f, d in self.hub.repos[repo].items()]
        return self.answer({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []})

    def _lfs(self, file: str, data: bytes) -> dict[str, Any]:
        if _mode(file) == "regular":
            return {}
        return {"lfs": {"size": len(data), "sha256": self.hub.states(file, data), "pointerSize": 130}}

    def _file(self, repo: str, file: str) -> None:
        data = self.hub.repos.get(repo, {}).get(file)
        if data is None:
            return self._missing("EntryNotFound")
        sent = self.hub.send(data)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{self.hub.states(file, data)}"', "Accept-Ranges": "none"}
        return self.answer(sent, headers=headers, length=len(data))

    def _missing(self, code: str) -> None:
        self.answer({"error": "not found"}, 404, {"X-Error-Code": code, "X-Error-Message": "not found"})


def _mode(file: str) -> str:
    return "lfs" if file.endswith(".safetensors") else "regular"
