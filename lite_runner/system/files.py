"""Files: atomic writes, temporary ones, checksums, free disk space, reading JSON strictly.

What is temporary is locked by the process that uses it, and has a name by which the next run knows
it: of one whose process was killed, the lock has gone with it, and it is removed.

JSON may be written by anybody. Python's own reader lets pass what fails far from the file: a number
that no float holds, half of a surrogate pair that no print encodes, the last of two equal keys,
nesting that ends the stack.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault

GROUP_MAY_READ = 0o640  # the mode of files with texts and logs, less what the umask takes
SUFFIX = ".lite_runner"
_YOUNG_S = 10.0  # it may have been made a moment ago, and not be locked yet
MAX_FILE_BYTES = 1 << 20
SAMPLED_PARTS, SAMPLED_BYTES = 16, 1 << 16  # of a file, of each part


def sha256_of(*paths: Path) -> str:
    """SHA-256 of the concatenated contents of files, as hex."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


def folder_size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # the file may be renamed concurrently
                size += Path(place, name).lstat().st_size
    return size


def readable(size: int) -> str:
    """A number of bytes for humans: 538.1 MB."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def sync_folder(folder: Path) -> None:
    """fsync `folder`, so that a rename in it survives a crash; does nothing where unsupported."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def require_space(folder: Path, needed: int) -> None:
    """Raise EnvironmentFault unless the existing `folder` has `needed` bytes free."""
    disk = shutil.disk_usage(folder)
    if disk.total == 0:
        raise EnvironmentFault(f"{folder}: holds no files of users", "choose another folder")
    if disk.free < needed:
        raise EnvironmentFault(
            f"{folder}: the disk is too small: {disk.free // 2**20:,} MiB free, "
            f"{math.ceil(needed / 2**20):,} MiB needed",
            "free some space or choose another folder",
        )


def cache_dir() -> Path:
    """The cache folder of downloads and derived files; may not exist yet."""
    chosen = os.environ.get("LITE_RUNNER_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "lite_runner"


def user_path(text: str, where: str) -> Path:
    """The path that a user typed, with its ~ resolved. Raises ConfigError that begins with `where`
    for the ~NAME of nobody."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{where}: {text}: there is no such user, or no home of theirs") from None


def make_folder(folder: Path, hint: str = "choose a writable folder") -> None:
    """Create `folder` and its parents; the cache folder among them is the owner's alone. Raises
    EnvironmentFault with `hint`."""
    try:
        with contextlib.suppress(RuntimeError):  # of a user without a home
            if folder.is_relative_to(cache := cache_dir()):
                cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or error
        with contextlib.suppress(OSError):  # a folder that cannot be looked into
            for link in (folder, *folder.parents):
                if link.is_symlink() and not link.exists():
                    why = f"{link} is a link to {link.readlink()}, which does not exist"
        raise EnvironmentFault(f"{folder}: cannot be created: {why}", hint) from error


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """An empty folder to fill; on exit it atomically replaces `target`, a file or a folder.

    A process killed midway leaves either the old or the new one intact, and at most a temporary
    .NAME.*.lite_runner beside it, which the next run removes. Raises EnvironmentFault if it
    cannot be written.
    """
    make_folder(target.parent)
    try:
        with temporary_folder(target.name, target.parent) as folder:
            fresh = folder / target.name
            fresh.mkdir()
            yield fresh
            sync_folder(fresh)
            put_in_place(fresh, target)
            sync_folder(target.parent)
    except OSError as error:
        raise EnvironmentFault(
            f"{target}: cannot be written: {error.strerror or error}",
            "check the permissions of the folder and the free space",
        ) from error


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """The path of a file to write; on exit it atomically replaces `target`. See `new_folder`."""
    make_folder(target.parent)
    try:
        with temporary_folder(target.name, target.parent) as folder:
            fresh = folder / target.name
            yield fresh
            fresh.replace(target)
    except OSError as error:
        raise EnvironmentFault(
            f"{target}: cannot be written: {error.strerror or error}",
            "check the permissions of the folder and the free space",
        ) from error
    sync_folder(target.parent)


def put_in_place(fresh: Path, target: Path) -> None:
    """Atomically rename `fresh` to `target`, on the same disk; a file or folder that was there is
    moved to where `fresh` was, or beside it."""
    if not target.exists() or not _exchange(fresh, target):
        if target.exists():  # the file system cannot exchange: two renames
            target.rename(fresh.with_name("old"))
        fresh.rename(target)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically; False if the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    code = rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange)
    return bool(code == 0)


@contextlib.contextmanager
def atomic_write(path: Path, size: int = 0) -> Iterator[IO[bytes]]:
    """A temporary file that is renamed to `path` once it is complete and synced.

    `size`: bytes that will be written, checked against the free space first. Creates the folder.
    Raises EnvironmentFault if it cannot be written.
    """
    make_folder(path.parent)
    require_space(path.parent, size)
    temporary = temporary_beside(path)
    try:
        with temporary.open("xb") as file:
            lock(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise EnvironmentFault(
            f"{path}: cannot be written: {error.strerror or error}",
            "check the permissions of the folder and the free space",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def temporary_folder(name: str = "", parent: Path | None = None) -> Iterator[Path]:
    """An empty folder `parent`/.NAME.*.lite_runner, removed at the end; `parent`: the system's.

    Raises OSError.
    """
    parent = parent or Path(tempfile.gettempdir())
    remove_orphans(parent)
    with tempfile.TemporaryDirectory(
        prefix=f".{name}." if name else ".", suffix=SUFFIX, dir=parent, ignore_cleanup_errors=True
    ) as folder:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            lock(handle)
            yield Path(folder)
        finally:
            os.close(handle)


@contextlib.contextmanager
def memory_file(name: str, content: bytes) -> Iterator[Path]:
    """A file in memory for other processes of this user, gone with this process at the latest.

    Raises OSError.
    """
    with os.fdopen(os.memfd_create(name), "wb") as file:
        file.write(content)
        file.flush()
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def temporary_beside(path: Path) -> Path:
    """The name of a new file to write and then rename to `path`, which nobody can guess; `lock` it
    once it is open."""
    remove_orphans(path.parent)
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{SUFFIX}")


def lock(handle: int) -> None:
    """Hold an open temporary file against `remove_orphans`, until it is closed.

    Where the file system has no such locks, as some NFS, nobody gets one, and nothing is removed.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)


def remove_orphans(parent: Path) -> None:
    """Remove leftovers of this user's killed processes in `parent`, if that is certain."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(".") and entry.name.endswith(SUFFIX):
                with contextlib.suppress(OSError):
                    _remove_orphan(Path(entry.path))


def _remove_orphan(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if found.st_uid != os.getuid() or time.time() - found.st_mtime < _YOUNG_S:
            return
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: it is in use
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def sampled_digest(paths: Sequence[Path]) -> str:
    """SHA-256 over the names and sizes of files and parts of each, from its start to its end: what
    tells two checkpoints apart without reading them whole; 64 hexadecimal digits."""
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            whole.update(f"{path.name} {size}\n".encode("utf-8", "surrogateescape"))
            for part in range(SAMPLED_PARTS):
                file.seek(max(0, size - SAMPLED_BYTES) * part // (SAMPLED_PARTS - 1))
                whole.update(file.read(SAMPLED_BYTES))
    return whole.hexdigest()


def read_small(path: Path, what: str, most: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a file of at most `most`.

    Raises OSError, whose strerror says why: missing, unreadable, too large to be `what`; and
    ValueError for a path with a NUL.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes; not {what}")
    return data


MAX_JSON_BYTES = 16 << 20
MAX_JSON_DEPTH = 64
MAX_DIGITS = 40  # of an integer; transformers writes 31 for a length without a limit
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(data: bytes | str, *, constants: bool = False) -> Any:
    """The value of a JSON text, bytes being UTF-8. Every key, text and number in it is usable, but
    for Python's own NaN and Infinity, where `constants` lets them pass.

    Raises ValueError, and so JSONDecodeError, for whatever is wrong with it.
    """
    text = data if isinstance(data, str) else data.decode("utf-8-sig")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=float if constants else _constant,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check_depth(value)
    if _SURROGATE_ESCAPE.search(text):
        shown = json.dumps(value, ensure_ascii=False)
        if half := _SURROGATE.search(shown):
            near = shown[max(half.start() - 20, 0) : half.end()]
            raise ValueError(f"half of a surrogate pair, no character, in {near!a}")
    return value


def read_json(
    path: Path,
    what: str = "valid JSON",
    *,
    most: int = MAX_JSON_BYTES,
    hint: str = "",
    constants: bool = False,
) -> Any:
    """The value in a JSON file of at most `most` bytes.

    Raises ArtifactError, "{path}: not {what}: ...", or where it cannot be read.
    """
    try:
        with path.open("rb") as file:
            # read() makes a buffer of as many bytes at once; a pipe has no size.
            size = os.fstat(file.fileno()).st_size or most
            data = file.read(min(most, size) + 1)
        if len(data) > most:
            raise ValueError(f"more than {most:,} bytes")
        return parse_json(data, constants=constants)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}", hint) from error
    except ValueError as error:  # of a path with a NUL as well
        raise ArtifactError(f"{path}: not {what}: {error}", hint) from error


def read_json_object(
    path: Path,
    what: str = "valid JSON",
    *,
    most: int = MAX_JSON_BYTES,
    hint: str = "",
    constants: bool = False,
) -> dict[str, Any]:
    """As `read_json`, of a file that holds an object."""
    value = read_json(path, what, most=most, hint=hint, constants=constants)
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ArtifactError(f"{path}: not {what}: a JSON {kind}, expected an object", hint)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} occurs twice")
            seen.add(key)
    return found


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits: {text[:20]}...")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is out of the range of floats")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        objects = [one.values() for one in level if isinstance(one, dict)]
        lists = [one for one in level if isinstance(one, list)]
        if not objects and not lists:
            return
        level = [child for children in (*objects, *lists) for child in children]
    raise ValueError("nested too deeply")
