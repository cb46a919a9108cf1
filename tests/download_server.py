"""A server on this machine that speaks the protocols of three hubs and that of a package index.

It can break connections off, stop in the middle of a file, and never answer.
"""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE = (".safetensors", ".gguf", ".bin")  # kept by Git LFS
COMMIT = "c0ffee" + "0" * 34
_PIECE = 1 << 14


@dataclass
class Behaviour:
    """The served files, and how they are served; it may change while the server runs."""

    repositories: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)  # name -> files
    packages: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)  # name -> wheels
    claimed: Mapping[str, int] = field(default_factory=dict)  # sizes that files do not have
    cut: int = 0  # bytes after which a connection with weights breaks off; 0: it does not
    hold: bool = False  # ... in silence
    silent: bool = False  # nothing is answered
    status: int = 0  # of every file, in place of the file
    sizes: bool = True  # the hub says how long files are, and their digests
    body: bytes = b""  # of every answer, in place of what was asked for
    kind: str = "application/json"  # of that body
    address: str = ""  # of the server
    html: bool = False  # the index answers in HTML alone
    key: str = ""  # that the Authorization header must have
    asked: list[str] = field(default_factory=list)  # the paths, with the ranges
    sent: int = 0  # bytes of files

    @property
    def files_asked(self) -> list[str]:
        parts = ("/resolve/", "/wheels/", "FilePath=", "/media/")
        return [path for path in self.asked if any(part in path for part in parts)]


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """The address of a server, until the end of the context."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            found = f" {self.headers['Range']}" if "Range" in self.headers else ""
            behaviour.asked.append(self.path + found)
            if behaviour.silent:
                ended.wait()
                self.close_connection = True
                return
            if behaviour.key and self.headers.get("Authorization") != behaviour.key:
                self.answer(401, b"{}")
                return
            if behaviour.body:
                self.answer(200, behaviour.body, behaviour.kind)
                return
            path = urllib.parse.unquote(self.path.split("?")[0]).strip("/").split("/")
            query = dict(urllib.parse.parse_qsl(self.path.partition("?")[2]))
            try:
                if path[:2] == ["api", "models"]:
                    self.listing("/".join(path[2:-2]))
                elif path[:3] == ["api", "v1", "models"]:
                    self.model_scope("/".join(path[3:5]), path[5:], query)
                elif path[:3] == ["api", "v1", "file"]:
                    self.modelers("/".join(path[3:5]), path[5:], query)
                elif path[2:3] == ["resolve"]:
                    self.file(behaviour.repositories["/".join(path[:2])]["/".join(path[4:])])
                elif path[0] == "simple":
                    self.index(path[1])
                else:
                    assert path[0] == "wheels"
                    self.file(behaviour.packages[path[1]][path[2]])
            except (KeyError, IndexError, AssertionError):
                self.answer(404, b"{}")
            except OSError:  # the client has gone
                self.close_connection = True

        def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def listing(self, name: str) -> None:
            siblings: list[dict[str, Any]] = []
            for file, content in behaviour.repositories[name].items():
                sibling: dict[str, Any] = {"rfilename": file}
                if behaviour.sizes:
                    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                    size = behaviour.claimed.get(file, len(content))
                    sibling |= {"size": size, "blobId": blob}
                    if file.endswith(LARGE):
                        digest = hashlib.sha256(content).hexdigest()
                        lfs = {"size": size, "sha256": digest, "pointerSize": 130}
                        sibling["lfs"] = lfs
                siblings.append(sibling)
            body = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}
            self.answer(200, json.dumps(body | {"private": False, "downloads": 0}).encode())

        def model_scope(self, name: str, rest: list[str], query: Mapping[str, str]) -> None:
            """As modelscope-hub 0.1 asks: all files have a SHA-256, folders are in the list, and a
            revision that there is not has no files."""
            found = behaviour.repositories[name]
            if rest == ["repo"]:
                self.file(found[query["FilePath"]])
                return
            assert rest == ["repo", "files"]
            files: list[dict[str, Any]] = [
                {"Path": folder, "Type": "tree", "Size": 0}
                for folder in {file.rpartition("/")[0] for file in found} - {""}
            ]
            for file, content in found.items():
                entry = {"Path": file, "Type": "blob", "Size": len(content)}
                files.append(entry | {"Sha256": hashlib.sha256(content).hexdigest()})
            there = query["Revision"] in ("master", COMMIT)
            data = {"Files": files if there else None, "LatestCommitter": {"ShortId": COMMIT[:8]}}
            self.answer(200, json.dumps({"Code": 200, "Data": data, "Success": True}).encode())

        def modelers(self, name: str, rest: list[str], query: Mapping[str, str]) -> None:
            """As openmind_hub 1.3 asks: a folder at a time, digests are git's or, of large files,
            SHA-256."""
            found = behaviour.repositories[name]
            if rest[1:2] == ["media"]:
                self.file(found["/".join(rest[2:])])
                return
            assert not rest and query["ref"] == "main"
            prefix = f"{query['path']}/" if query.get("path") else ""
            tree: dict[str, dict[str, Any]] = {}
            for file, content in found.items():
                name, separator, _ = file.removeprefix(prefix).partition("/")
                if not file.startswith(prefix):
                    continue
                if separator:
                    tree[name] = {"type": "dir", "path": prefix + name}
                    continue
                blob = hashlib.sha1(b"blob %d\0" % len(content) + content)
                digest = hashlib.sha256(content) if file.endswith(LARGE) else blob
                entry = {"type": "file", "path": file, "size": len(content)}
                tree[name] = entry | {"etag": digest.hexdigest(), "is_lfs": file.endswith(LARGE)}
            commit = {"commit": {"commit_sha": COMMIT, "created": "2025-01-01T00:00:00Z"}}
            data = {"tree": list(tree.values()), "last_commit": commit}
            self.answer(200, json.dumps({"data": data}).encode())

        def index(self, package: str) -> None:
            wheels = behaviour.packages[package]
            digests = {name: hashlib.sha256(body).hexdigest() for name, body in wheels.items()}
            if behaviour.html:
                links = [
                    f'<a href="../../wheels/{package}/{name}#sha256={digest}">{name}</a>'
                    for name, digest in digests.items()
                ]
                self.answer(200, "\n".join(links).encode(), "text/html")
                return
            files = [
                {
                    "filename": name,
                    "url": f"/wheels/{package}/{name}",
                    "hashes": {"sha256": digest},
                    "size": len(wheels[name]),
                }
                for name, digest in digests.items()
            ]
            body = {"meta": {"api-version": "1.1"}, "name": package, "files": files}
            kind = "application/vnd.pypi.simple.v1+json"
            self.answer(200, json.dumps(body).encode(), kind)

        def file(self, content: bytes) -> None:
            if behaviour.status:
                self.answer(behaviour.status, b"")
                return
            first = 0
            if "Range" in self.headers:
                first = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
                if first >= len(content):
                    self.answer(416, b"")
                    return
                self.send_response(206)
                last = len(content) - 1
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(content) - first))
            self.end_headers()
            whole = not behaviour.cut or self.path.endswith(".json")
            end = len(content) if whole else min(len(content), first + behaviour.cut)
            for at in range(first, end, _PIECE):
                piece = content[at : min(at + _PIECE, end)]
                self.wfile.write(piece)
                behaviour.sent += len(piece)
            if behaviour.hold and not whole:
                self.wfile.flush()
                ended.wait()
            self.close_connection = end < len(content)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    behaviour.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield behaviour.address
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
