"""A hub on the loopback device: one repository, in the dialect that huggingface_hub's client speaks."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPO = "org/tiny-GGUF"
COMMIT = "1" * 40


class FakeHub:
    """One repository. `refuse` answers every request with a status and an error code of the real one's."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.commit = COMMIT
        self.refuse: tuple[int, str | None] | None = None
        self.token: str | None = None
        self.requests: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def downloads(self) -> list[str]:
        return [path.split("/", 5)[5] for method, path in self.requests if method == "GET" and "/resolve/" in path]

    def close(self) -> None:
        """Stop answering. Repeatable."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append((request.command, path))
        status, headers, body = self._find(path, request.headers.get("Authorization"))
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)

    def _find(self, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        if self.refuse is not None and (self.token is None or authorization != f"Bearer {self.token}"):
            status, code = self.refuse
            return status, {"X-Error-Code": code} if code else {}, b"{}"
        # /api/models/ORG/NAME[/revision/REVISION] and /ORG/NAME/resolve/REVISION/FILE
        is_api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").strip("/").split("/", 4)
        if "/".join(parts[:2]) != REPO:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        revision = parts[3] if len(parts) > 3 else "main"
        if revision not in ("main", self.commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if is_api:
            return 200, {"Content-Type": "application/json"}, self._info()
        body = self.files.get(parts[4])
        if body is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.commit}, b"{}"
        digest = hashlib.sha256(body).hexdigest()
        return 200, {"ETag": f'"{digest}"', "X-Repo-Commit": self.commit}, body

    def _info(self) -> bytes:
        siblings = [{"rfilename": name} for name in self.files]
        return json.dumps({"id": REPO, "modelId": REPO, "sha": self.commit, "siblings": siblings}).encode()
