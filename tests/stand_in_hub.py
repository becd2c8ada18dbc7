"""A stand-in for the Hugging Face hub, with the answers that its API gave: one model repository in memory."""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """`files` are those of the newest commit, by name. `is_cut`: connections end in the middle of a commit. `hold_at`:
    number of a step, two for each request, before and after it takes effect: there it stops, and sets `is_held`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.tokens: set[str | None] = set()
        self.created: list[dict[str, Any]] = []
        self.is_cut = False
        self.hold_at: int | None = None
        self.num_steps = 0
        self.is_held, self.is_released = threading.Event(), threading.Event()

    def step(self) -> None:
        """Count a step, and hold the connection if it is the one to hold at."""
        self.num_steps += 1
        if self.num_steps - 1 == self.hold_at:
            self.is_held.set()
            self.is_released.wait(60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.step()
        path = self.path.partition("?")[0]
        if "/tree/" in path:
            self.answer([self.entry(name) for name in sorted(self.server.files)])
        else:
            self.answer({"id": "org/adder", "sha": self.sha, "siblings": [{"rfilename": n} for n in self.server.files]})

    def do_POST(self) -> None:
        self.server.step()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.path == "/api/repos/create":
            is_there = bool(self.server.created)
            self.server.created.append(json.loads(body))
            self.answer({"url": f"{self.server.url}/org/adder", "id": "org/adder"}, 409 if is_there else 200)
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [self.mode(name) for name in names]})
        elif "/commit/" in self.path:
            self.commit([json.loads(line) for line in body.splitlines()])
        else:
            self.answer({"error": f"not recorded: {self.path}"}, 404)

    @property
    def sha(self) -> str:
        return f"{len(self.server.commits):040x}"

    def entry(self, name: str) -> dict[str, Any]:
        content = self.server.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": git_digest(content)}

    def mode(self, name: str) -> dict[str, Any]:
        content = self.server.files.get(name)
        digest = None if content is None else git_digest(content)
        return {"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": digest}

    def commit(self, lines: list[dict[str, Any]]) -> None:
        if self.server.is_cut:
            self.connection.close()
            return
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    self.server.commits.append(value["summary"])
                case "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                case "deletedFile":
                    del self.server.files[value["path"]]
        address = f"{self.server.url}/org/adder/commit/{self.sha}"
        self.answer({"success": True, "commitOid": self.sha, "commitUrl": address})

    def answer(self, content: Any, status: int = 200) -> None:
        self.server.step()
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def finish(self) -> None:
        with contextlib.suppress(OSError):  # the client may have been killed
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
