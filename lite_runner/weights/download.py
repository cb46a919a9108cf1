"""Downloads over HTTP: several files at a time, resumed where they broke off, stopped by Ctrl-C.

A file is written to NAME.incomplete beside its target, and renamed once its size and digest fit.
"""

from __future__ import annotations

import base64
import http
import os
import queue
import re
import shutil
import threading
import time
import urllib.error
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lite_runner import __version__, progress
from lite_runner.errors import ArtifactError, EnvironmentFault, of_http
from lite_runner.records import dataclass
from lite_runner.system.files import make_folder
from lite_runner.system.user_cache import CACHE_HINT, digest_like

# Network modules are imported on first use: their import takes a tenth of a run without a network.
if TYPE_CHECKING:
    import http.client
    import ssl

CONNECTIONS = 4
QUIET_SECONDS = 20.0  # without a byte before the connection is given up
ATTEMPTS = 4  # in a row that receive no byte
_PASSING = (408, 425, 429)  # status codes below 500 that are retried
_CHUNK = 1 << 18
_REDRAW_S = 0.25
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")


@dataclass(frozen=True)
class Remote:
    """A file to download."""

    url: str
    target: Path
    size: int | None = None  # bytes; None: unknown
    digest: str = ""  # hex of its SHA-256, or of git's SHA-1 of a blob; "": unknown
    headers: Mapping[str, str] = field(default_factory=dict)  # not sent to where it redirects

    @property
    def part(self) -> Path:
        """The partial file."""
        return self.target.with_name(f"{self.target.name}.incomplete")

    @property
    def here(self) -> int:
        """Bytes received so far."""
        return self.part.stat().st_size if self.part.exists() else 0


def without_credentials(text: str) -> str:
    """A text with addresses, whose user names and passwords are masked."""
    return _CREDENTIALS.sub("***@", text)


def open_url(
    url: str, headers: Mapping[str, str], timeout: float | None = None
) -> http.client.HTTPResponse:
    """The answer to a request, each part of it within `timeout` seconds. Credentials, of the
    headers or the address, go to its host alone, not to another one to which that redirects.
    Raises OSError."""
    import urllib.request

    class Redirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(
            self, req: urllib.request.Request, *answer: Any
        ) -> urllib.request.Request | None:
            following = super().redirect_request(req, *answer)
            if following is not None and _host(following.full_url) == _host(req.full_url):
                for name, value in req.unredirected_hdrs.items():
                    following.add_unredirected_header(name, value)
            return following

    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    request = urllib.request.Request(parts._replace(netloc=host).geturl())
    request.add_header("User-Agent", f"lite-runner/{__version__}")
    for name, value in headers.items():
        add = request.add_header if name == "Range" else request.add_unredirected_header
        add(name, value)
    if parts.username is not None and not request.has_header("Authorization"):
        pair = (
            f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        )
        basic = base64.b64encode(pair.encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {basic}")
    secure = urllib.request.HTTPSHandler(context=_certificates())
    answer: http.client.HTTPResponse = urllib.request.build_opener(secure, Redirect).open(
        request, timeout=timeout or QUIET_SECONDS
    )
    return answer


def _host(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


@cache
def _certificates() -> ssl.SSLContext:
    """Trusted certificates: the variables of OpenSSL and of requests, the system, or certifi."""
    import ssl

    chosen = os.environ.get("REQUESTS_CA_BUNDLE")
    places = ssl.get_default_verify_paths()
    if not chosen and places.cafile is None and places.capath is None:
        import certifi

        chosen = certifi.where()
    return ssl.create_default_context(cafile=chosen)


def unwritable(path: Path, error: OSError) -> EnvironmentFault:
    """The error for a file or folder of the cache that cannot be written."""
    return EnvironmentFault(f"{path}: cannot be written: {error.strerror or error}", CACHE_HINT)


@contextmanager
def one_process(lock_file: Path, name: str) -> Iterator[None]:
    """Context in which no other process downloads `name`. Raises EnvironmentFault where the lock
    cannot be written."""
    from filelock import FileLock, Timeout

    make_folder(lock_file.parent, CACHE_HINT)
    lock = FileLock(lock_file)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            progress.note(f"waiting for another process, which downloads {name}")
            lock.acquire()
    except OSError as error:
        raise unwritable(lock_file.parent, error) from error
    try:
        yield
    finally:
        lock.release()


def check_disk(files: Sequence[Remote]) -> None:
    """Raise EnvironmentFault unless the disk has room for the missing parts of the files."""
    folder = files[0].target.parent
    make_folder(folder, CACHE_HINT)
    missing = sum(max(0, (file.size or 0) - file.here) for file in files)
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise EnvironmentFault(
            f"{folder}: the disk is too small for a download of {missing / 1e6:,.1f} MB: "
            f"{free / 1e6:,.1f} MB are free",
            CACHE_HINT,
        )


def download(files: Sequence[Remote], name: str) -> None:
    """Download to their targets the files that are not there yet, shown as `name`.

    Raises EnvironmentFault where the disk is full or cannot be written, ArtifactError where another
    file arrives than was expected, OSError where a server or the network fails.
    """
    files = [file for file in files if not file.target.exists()]
    if not files:
        return
    check_disk(files)
    sizes = [file.size for file in files if file.size is not None]
    total = sum(sizes) if len(sizes) == len(files) else None
    here = sum(file.here for file in files)
    with progress.step(f"download {name}", total, "B", done=here, phase="read") as step:
        _Transfer(files, step).run()


class _Transfer:
    """Files on their way.

    On Ctrl-C its threads, which may be waiting for a server, are left behind: they write nothing
    more, and do not keep the process from ending.
    """

    def __init__(self, files: Sequence[Remote], step: progress.Step) -> None:
        self._step = step
        self._left = len(files)
        self._alone = len(files) == 1
        self._waiting: queue.SimpleQueue[Remote] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._stopped = False
        self._writes = threading.Lock()
        for file in files:
            self._waiting.put(file)

    def run(self) -> None:
        """Wait until all files are there; the first error ends it."""
        for _ in range(min(CONNECTIONS, self._left)):
            threading.Thread(target=self._work, name="download", daemon=True).start()
        try:
            while self._left:
                try:
                    error = self._ended.get(timeout=_REDRAW_S)
                except queue.Empty:
                    self._step.advance(0)  # so that the clock advances when nothing arrives
                    continue
                if error is not None:
                    raise error
                self._left -= 1
        finally:
            with self._writes:
                self._stopped = True

    def _work(self) -> None:
        while not self._stopped and not self._waiting.empty():
            try:
                self._fetch(self._waiting.get_nowait())
            except queue.Empty:
                return
            except BaseException as error:
                self._ended.put(error)
                return
            self._ended.put(None)

    def _fetch(self, file: Remote) -> None:
        with _on_disk(file.part):
            part = file.part.open("ab")
        with part:
            failures = 0
            while file.size is None or part.tell() < file.size:
                before = part.tell()
                try:
                    with of_http():
                        self._receive(file, part)
                    break
                except OSError as error:
                    failures = failures + 1 if part.tell() <= before else 1
                    if failures == ATTEMPTS or not _may_pass(error):
                        raise
                    why = without_credentials(str(error) or type(error).__name__)
                    progress.detail(f"{file.target.name}: {why}; trying again")
                    time.sleep(2.0 ** (failures - 2))
            with self._writes, _on_disk(file.part):
                if self._stopped:
                    return
                os.fsync(part.fileno())
        _check(file)
        with self._writes, _on_disk(file.target):
            if not self._stopped:
                file.part.replace(file.target)

    def _receive(self, file: Remote, part: IO[bytes]) -> None:
        """Append the data of one connection. Raises OSError if it ends early."""
        at = part.tell()
        headers = dict(file.headers) | ({"Range": f"bytes={at}-"} if at else {})
        try:
            answer = open_url(file.url, headers)
        except urllib.error.HTTPError as error:
            error.close()
            if at and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                self._restart(part)
                raise OSError("the server's file is shorter than what was received") from error
            raise
        with answer:
            if at and answer.status != http.HTTPStatus.PARTIAL_CONTENT:
                self._restart(part)
            if self._alone and answer.length is not None:
                self._step.total = part.tell() + answer.length
            while piece := answer.read1(_CHUNK):
                with self._writes, _on_disk(file.part):
                    if self._stopped:
                        return
                    part.write(piece)
                    part.flush()
                self._step.advance(len(piece))
                if file.size is not None and part.tell() > file.size:
                    return  # `_check` refuses it
            if answer.length:  # announced bytes that did not arrive
                raise OSError("the connection was closed early")

    def _restart(self, part: IO[bytes]) -> None:
        with self._writes:
            if not self._stopped:
                self._step.advance(-part.tell())
                part.truncate(0)
                part.seek(0)


def _check(file: Remote) -> None:
    """Raise ArtifactError, and remove it, where another file has arrived than was expected."""
    size = file.here
    if file.size not in (None, size):
        found, expected = f"{size:,} bytes", f"{file.size:,}"
    else:
        found, expected = digest_like(file.part, file.digest), file.digest
    if found != expected:
        file.part.unlink()
        raise ArtifactError(
            f"{without_credentials(file.url)}: the downloaded file is damaged or not the expected "
            f"one: got {found}, expected {expected}",
            "run again to download it again; if that fails again, do not use the server's file",
        )


def _may_pass(error: OSError) -> bool:
    """True if another attempt may succeed."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code in _PASSING
    return True


@contextmanager
def _on_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error
