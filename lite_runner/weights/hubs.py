"""Model hubs: Hugging Face, ModelScope and Modelers.

Each lists, over its own HTTP API, a repository's files at a revision with their URLs, sizes and
digests; the rest (`repository`) is the same for all.
"""

from __future__ import annotations

import hashlib
import os
import queue
import re
import socket
import threading
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lite_runner.errors import of_http
from lite_runner.records import dataclass
from lite_runner.system.files import parse_json
from lite_runner.weights.download import open_url

CONNECT_SECONDS = 4.0  # of connecting to a hub before it counts as unreachable
ANSWER_SECONDS = 10.0
MAX_LISTING = 64 << 20  # bytes
MAX_FOLDERS = 200
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # git's SHA-1 of a blob, or SHA-256
_COMMIT = re.compile(r"[\w.-]{1,80}")


@dataclass(frozen=True)
class HubFile:
    """A file of a repository, as its hub lists it."""

    url: str
    size: int | None  # bytes; None: unknown
    digest: str  # as of `Remote`; "": unknown


@dataclass(frozen=True)
class Listing:
    """The files of a repository at a commit, by path."""

    commit: str
    files: Mapping[str, HubFile]


class Hub(ABC):
    """A hub, by its API."""

    scheme: str  # scheme of its URIs
    title: str
    folder: str  # below cache_dir()
    branch: str  # the default revision
    variables: tuple[str, ...]  # environment variables of the address; the first that is set
    address: str  # the default address

    @property
    def endpoint(self) -> str:
        """The address of the API."""
        given = (os.environ.get(name, "").strip() for name in self.variables)
        found = next(filter(None, given), self.address).rstrip("/")
        return found if "://" in found else f"https://{found}"

    def listing(self, name: str, revision: str, folder: str | None) -> Listing:
        """The files of a repository: where the API lists one folder at a time those of its root,
        and with `folder` those below that. Raises OSError, ValueError."""
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise OSError("HF_HUB_OFFLINE is set, so no hub is contacted")
        check_reachable(self.endpoint)
        try:
            return self._listing(name, revision, folder)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a response of its API: {error!r}") from error

    @abstractmethod
    def _listing(self, name: str, revision: str, folder: str | None) -> Listing:
        """As `listing`; KeyError, TypeError or AttributeError where an answer is malformed."""

    @abstractmethod
    def headers(self) -> dict[str, str]:
        """The headers of each request, with the user's token, if any."""

    @property
    @abstractmethod
    def remedy(self) -> str:
        """The hint for a repository that is not available."""

    def _ask(self, path: str, query: Mapping[str, str]) -> Any:
        url = f"{self.endpoint}/{path}?{urllib.parse.urlencode(query)}"
        with of_http(), open_url(url, self.headers(), ANSWER_SECONDS) as answer:
            text = answer.read(MAX_LISTING + 1)
        if len(text) > MAX_LISTING:
            raise ValueError(f"the list of its files has more than {MAX_LISTING:,} bytes")
        return parse_json(text)


class HuggingFace(Hub):
    scheme, title, folder, branch = "hf", "Hugging Face", "hub", "main"
    variables, address = ("HF_ENDPOINT",), "https://huggingface.co"
    remedy = "set HF_ENDPOINT to a mirror (HF_TOKEN for a gated model)"

    def headers(self) -> dict[str, str]:
        return _bearer(_hugging_face_token())

    def _listing(self, name: str, revision: str, folder: str | None) -> Listing:
        at = urllib.parse.quote(revision, safe="")
        found = self._ask(f"api/models/{name}/revision/{at}", {"blobs": "true"})
        commit = _commit(found["sha"])
        files = {}
        for one in found["siblings"]:
            path = one["rfilename"]
            digest = (one.get("lfs") or {}).get("sha256") or one.get("blobId")
            url = f"{self.endpoint}/{name}/resolve/{commit}/{urllib.parse.quote(path)}"
            files[path] = _file(url, one.get("size"), digest)
        return Listing(commit, _safe(files))


class ModelScope(Hub):
    scheme, title, folder, branch = "ms", "ModelScope", "modelscope", "master"
    variables, address = ("MODELSCOPE_ENDPOINT", "MODELSCOPE_DOMAIN"), "https://modelscope.cn"
    remedy = "set MODELSCOPE_ENDPOINT to another address (MODELSCOPE_API_TOKEN for a private model)"

    def headers(self) -> dict[str, str]:
        token = os.environ.get("MODELSCOPE_API_TOKEN", "").strip()
        return _bearer(token) | ({"Cookie": f"m_session_id={token}"} if token else {})

    def _listing(self, name: str, revision: str, folder: str | None) -> Listing:
        root = f"api/v1/models/{name}/repo"
        found = self._ask(f"{root}/files", {"Revision": revision, "Recursive": "True"})
        if not found.get("Success", True):
            raise OSError(str(found.get("Message") or found.get("Code")))
        files = {}
        for one in found["Data"]["Files"] or ():
            if one.get("Type") != "tree":
                query = urllib.parse.urlencode({"Revision": revision, "FilePath": one["Path"]})
                url = f"{self.endpoint}/{root}?{query}"
                files[one["Path"]] = _file(url, one.get("Size"), one.get("Sha256"))
        if not files:  # the API answers for revisions that do not exist
            raise OSError(f"it has no files at revision {revision}")
        # The API gives no commit for the whole.
        state = "".join(f"{path}\0{file.digest}\n" for path, file in sorted(files.items()))
        return Listing(hashlib.sha1(state.encode()).hexdigest(), _safe(files))


class Modelers(Hub):
    scheme, title, folder, branch = "modelers", "Modelers", "modelers", "main"
    variables, address = ("OPENMIND_HUB_ENDPOINT",), "https://modelers.cn"
    remedy = "set OPENMIND_HUB_ENDPOINT to another address (OPENMIND_HUB_TOKEN for a private model)"

    def headers(self) -> dict[str, str]:
        return _bearer(os.environ.get("OPENMIND_HUB_TOKEN", "").strip())

    def _listing(self, name: str, revision: str, folder: str | None) -> Listing:
        waiting, commit, files = [""], "", {}
        if folder:
            waiting.append(folder)
        for place in waiting:
            found = self._ask(f"api/v1/file/{name}", {"ref": revision, "path": place})["data"]
            commit = commit or _commit(found["last_commit"]["commit"]["commit_sha"])
            for one in found["tree"]:
                path = one["path"]
                if one["type"] == "file":
                    at = urllib.parse.quote(revision, safe="")
                    url = f"{self.endpoint}/api/v1/file/{name}/{at}/media/"
                    files[path] = _file(
                        url + urllib.parse.quote(path), one.get("size"), one.get("etag")
                    )
                elif folder is not None and path not in waiting and path.startswith(folder):
                    waiting.append(path)
                    if len(waiting) > MAX_FOLDERS:
                        raise ValueError(f"it has more than {MAX_FOLDERS} folders")
        return Listing(commit, _safe(files))


HUBS: dict[str, Hub] = {
    "hf": HuggingFace(),
    "ms": ModelScope(),
    "modelscope": ModelScope(),
    "modelers": Modelers(),
}


def check_reachable(address: str) -> None:
    """Raise OSError unless a connection to the host, or to the proxy for it, is made soon; neither
    a name server nor a firewall that drops packets takes longer."""
    import urllib.request

    parts = urllib.parse.urlsplit(address)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    place = (parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443))
    outcome: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()

    def connect() -> None:
        try:
            socket.create_connection(place, CONNECT_SECONDS).close()
            outcome.put(None)
        except (OSError, UnicodeError) as error:  # not a valid host name
            outcome.put(error if isinstance(error, OSError) else OSError(str(error)))

    threading.Thread(target=connect, name="connect", daemon=True).start()
    try:
        error = outcome.get(timeout=CONNECT_SECONDS)
    except queue.Empty:
        raise TimeoutError(f"no connection within {CONNECT_SECONDS:g} s") from None
    if error is not None:
        raise error


def hugging_face_cache() -> Path:
    """The folder in which Hugging Face's own tools cache repositories."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if given := os.environ.get(name):
            return Path(given).expanduser()
    return _hugging_face_home() / "hub"


def _hugging_face_home() -> Path:
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(above, "huggingface")).expanduser()


def _hugging_face_token() -> str:
    """The token that huggingface_hub would find; "": none."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if given := os.environ.get(name, "").strip():
            return given
    file = Path(os.environ.get("HF_TOKEN_PATH") or _hugging_face_home() / "token").expanduser()
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _file(url: str, size: object, digest: object) -> HubFile:
    known = isinstance(digest, str) and DIGEST.fullmatch(digest)
    return HubFile(
        url, size if isinstance(size, int) and size >= 0 else None, str(digest) if known else ""
    )


def _commit(value: object) -> str:
    """A name of a folder. Raises ValueError."""
    if not isinstance(value, str) or not _COMMIT.fullmatch(value) or value.startswith("."):
        raise ValueError(f"the answer names no commit: {value!r}")
    return value


def _safe(files: Mapping[str, HubFile]) -> dict[str, HubFile]:
    """The files whose joined paths stay below a folder."""
    return {path: file for path, file in files.items() if _is_below(path.split("/"))}


def _is_below(parts: Iterable[str]) -> bool:
    return all(part.isprintable() and "\\" not in part and part.strip(".") for part in parts)
