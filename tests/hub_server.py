"""A model hub on loopback, as far as a download needs one: metadata of a commit, and files with ETag and Range.

It can misbehave on request: cut the connection after some bytes, flip a byte, ignore Range, claim a size.
"""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LFS_THRESHOLD = 1 << 16


def blob_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class HubServer:
    """One repository at one commit. Use as a context manager; `endpoint` is its address."""

    repo: str
    commit: str
    files: dict[str, bytes]
    cut_after: dict[str, int] = field(default_factory=dict)
    """File name -> bytes sent in one response before the connection is dropped; popped by the request it hits."""
    corrupt: set[str] = field(default_factory=set)
    """Files served with their first byte flipped."""
    ignore_range: bool = False
    claimed_size: dict[str, int] = field(default_factory=dict)
    """File name -> the size the metadata gives instead of the real one."""
    gated: bool = False
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """(path, Range) of every GET of a file."""
    sent: dict[str, int] = field(default_factory=dict)
    """File name -> body bytes sent."""
    authorizations: set[str | None] = field(default_factory=set)

    def __enter__(self) -> "HubServer":
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.respond(self)

            do_HEAD = do_GET

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def siblings(self) -> list[dict[str, object]]:
        described = []
        for name, content in self.files.items():
            entry = {
                "rfilename": name,
                "size": self.claimed_size.get(name, len(content)),
                "blobId": blob_sha1(content),
            }
            if len(content) >= LFS_THRESHOLD:
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            described.append(entry)
        return described

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        self.authorizations.add(handler.headers.get("Authorization"))
        if path.startswith("/api/models/"):
            return self.respond_metadata(handler, path.removeprefix("/api/models/"))
        return self.respond_file(handler, path.removeprefix("/"))

    def respond_metadata(self, handler: BaseHTTPRequestHandler, path: str) -> None:
        repo, _, revision = path.partition("/revision/")
        if repo != self.repo:
            return self.fail(handler, 404, "RepoNotFound")
        if self.gated:
            return self.fail(handler, 403, "GatedRepo")
        if revision not in (self.commit, "main"):
            return self.fail(handler, 404, "RevisionNotFound")
        body = json.dumps({"id": self.repo, "sha": self.commit, "siblings": self.siblings()}).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return None

    def respond_file(self, handler: BaseHTTPRequestHandler, path: str) -> None:
        prefix = f"{self.repo}/resolve/{self.commit}/"
        name = path.removeprefix(prefix)
        if not path.startswith(prefix) or name not in self.files:
            return self.fail(handler, 404, "EntryNotFound")
        content = self.files[name]
        etag = hashlib.sha256(content).hexdigest() if len(content) >= LFS_THRESHOLD else blob_sha1(content)
        if name in self.corrupt:
            content = bytes([content[0] ^ 1]) + content[1:]
        requested = handler.headers.get("Range")
        start = 0
        if requested and not self.ignore_range:
            start = int(requested.removeprefix("bytes=").split("-")[0])
        handler.send_response(206 if start else 200)
        handler.send_header("ETag", f'"{etag}"')
        handler.send_header("X-Repo-Commit", self.commit)
        handler.send_header("Accept-Ranges", "bytes")
        handler.send_header("Content-Length", str(len(content) - start))
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        handler.end_headers()
        if handler.command == "HEAD":
            return None
        self.requests.append((name, requested))
        limit = self.cut_after.pop(name, None)
        body = content[start:] if limit is None else content[start : start + limit]
        handler.wfile.write(body)
        self.sent[name] = self.sent.get(name, 0) + len(body)
        if limit is not None:
            handler.wfile.flush()
            handler.close_connection = True
            handler.connection.shutdown(2)
        return None

    def fail(self, handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
        handler.send_response(status)
        handler.send_header("X-Error-Code", code)
        handler.send_header("Content-Length", "0")
        handler.end_headers()
