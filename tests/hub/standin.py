"""A stand-in for the hub on loopback: its API for models, trees, revisions, and file downloads with LFS redirects and ranges."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LFS = (".safetensors", ".gguf")


def git_blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    """Commits (files by name) and the refs that name them."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False


@dataclass
class Faults:
    """What goes wrong. `cut` breaks the connection after so many bytes, `cuts` times; `corrupt` flips a byte that often."""

    cut: int = 0
    cuts: int = 0
    corrupt: int = 0
    ignore_range: bool = False


@dataclass
class StandIn:
    repos: dict[str, Repo]
    faults: Faults = field(default_factory=Faults)
    ranges: list[str] = field(default_factory=list)
    sent: int = 0
    endpoint: str = ""
    cdn: str = ""


def oid(name: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if name.endswith(LFS) else git_blob_id(data)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StandIn

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        if path[:2] == ["api", "models"]:
            self._api("/".join(path[2:4]), path[4:], body)
        elif path[0] == "cdn":
            self._cdn(path[1], body)
        elif path[2:3] == ["resolve"]:
            self._resolve("/".join(path[:2]), path[3], "/".join(path[4:]), body)
        else:
            self._send(404, b"{}", body)

    def _repo(self, name: str, body: bool) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None:
            self._send(401, b'{"error":"Repository not found"}', body, {"X-Error-Code": "RepoNotFound"})
        elif repo.gated:
            self._send(401, b'{"error":"Access is restricted"}', body, {"X-Error-Code": "GatedRepo"})
            return None
        return repo

    def _commit(self, repo: Repo, revision: str, body: bool) -> str | None:
        commit = repo.refs.get(revision, revision if revision in repo.commits else None)
        if commit is None:
            self._send(404, b'{"error":"Invalid rev id"}', body, {"X-Error-Code": "RevisionNotFound"})
        return commit

    def _api(self, name: str, rest: list[str], body: bool) -> None:
        repo = self._repo(name, body)
        if repo is None:
            return
        revision = rest[1] if rest else "main"
        commit = self._commit(repo, revision, body)
        if commit is None:
            return
        files = repo.commits[commit]
        answer: object
        if rest and rest[0] == "tree":
            answer = [
                {"type": "file", "path": path, "size": len(data), "oid": git_blob_id(data)}
                | (
                    {"lfs": {"oid": oid(path, data), "size": len(data), "pointerSize": 134}}
                    if path.endswith(LFS)
                    else {}
                )
                for path, data in files.items()
            ]
        else:
            siblings = [{"rfilename": path} for path in files]
            answer = {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": [], "private": False}
        self._send(200, json.dumps(answer).encode(), body, {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str, body: bool) -> None:
        repo = self._repo(name, body)
        if repo is None:
            return
        commit = self._commit(repo, revision, body)
        if commit is None:
            return
        data = repo.commits[commit].get(file)
        if data is None:
            self._send(404, b"{}", body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{oid(file, data)}"'}
        if file.endswith(LFS):
            headers |= {
                "Location": f"{self.hub.cdn}/cdn/{oid(file, data)}",
                "X-Linked-Etag": f'"{oid(file, data)}"',
                "X-Linked-Size": str(len(data)),
            }
            self._send(302, b"", body, headers)
        else:
            self._send(200, data, body, headers)

    def _cdn(self, digest: str, body: bool) -> None:
        blobs = {
            oid(n, d): d for r in self.hub.repos.values() for files in r.commits.values() for n, d in files.items()
        }
        data, faults = blobs[digest], self.hub.faults
        asked = self.headers.get("Range")
        status, start = 200, 0
        if asked:
            self.hub.ranges.append(asked)
            if not faults.ignore_range:
                status, start = 206, int(asked.removeprefix("bytes=").partition("-")[0])
        sent = data[start:]
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        if faults.corrupt > 0:
            faults.corrupt -= 1
            sent = sent[:-1] + bytes([sent[-1] ^ 1])
        if faults.cuts > 0 and len(sent) > faults.cut:
            faults.cuts -= 1
            sent = sent[: faults.cut]
            self.close_connection = True
        self.hub.sent += len(sent)
        self.wfile.write(sent)
        self.wfile.flush()

    def _send(self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


@contextmanager
def standing_in(repos: dict[str, Repo]) -> Iterator[StandIn]:
    hub = StandIn(repos)
    # As in life, large files lie on another host than the API.
    with _serving(hub) as hub.endpoint, _serving(hub) as hub.cdn:
        yield hub


@contextmanager
def _serving(hub: StandIn) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
