"""Files that are either there whole or not at all, and folders with one writer at a time."""

import errno
import fcntl
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, TypeVar

from dzrobot.errors import DzrobotError, preview

T = TypeVar("T")

TEMPORARY = ".partial"
"""Ends the name of what is still being written. A killed writer leaves such a file or folder."""

_log = logging.getLogger(__name__)

_MAKE_ROOM = "make room, then run the same command again"
_ADVICE = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EFBIG: "choose a folder whose files may be larger",
    errno.EROFS: "choose another folder",
    errno.EACCES: "choose another folder, or change who may use this one",
    errno.EMFILE: "allow this process more open files (ulimit -n 4096)",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "a part of the path is a file; choose another path",
    errno.EEXIST: "a file is in the place of a folder; choose another path",
}
"""What to do about a refusal of the operating system."""


_PATH_BYTES = 4095
_NAME_BYTES = 255
"""What Linux takes, whatever the file system."""
_FOLDERS = 256
"""In one path; making a folder costs a call inside a call for each above it."""


def check_path(path: Path) -> None:
    """Raise ValueError for a path that no file system takes: too long, as a whole or in a part."""
    whole, part = len(os.fsencode(path)), max(map(len, map(os.fsencode, path.parts)), default=0)
    if whole > _PATH_BYTES or part > _NAME_BYTES or len(path.parts) > _FOLDERS:
        raise ValueError(
            f"got a path of {whole} bytes in {len(path.parts)} folders with a name of {part}; "
            f"allowed: {_PATH_BYTES} bytes, {_FOLDERS} folders and {_NAME_BYTES} bytes each"
        )


def cache_folder() -> Path:
    """Return ``DZROBOT_CACHE``, else ~/.cache/dzrobot: the one folder written to by default."""
    named = os.environ.get("DZROBOT_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "dzrobot"


@contextmanager
def cached_in(folder: Path, error_class: type[DzrobotError]) -> Iterator[Path]:
    """Make ``folder``, of :func:`cache_folder`, and yield it to be written to.

    Raises:
        DzrobotError: of class ``error_class``. The system refuses; names ``DZROBOT_CACHE``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        raise error_class(
            f"cannot write to {folder} ({error.strerror or error}); set DZROBOT_CACHE to a folder "
            "that can be written, as on clusters and in containers whose home is read-only"
        ) from error


def spare_cache(folder: Path, error_class: type[DzrobotError]) -> Path:
    """Return ``folder``, made, of a cache that can be done without.

    Where it cannot be written, as in an image that is mounted read-only or in another user's home,
    a copy in a folder of this user's own below the system's temporary folder is returned.

    Raises:
        DzrobotError: of class ``error_class``. Neither can be written.
    """
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    mine = Path(tempfile.gettempdir()) / f"dzrobot-{os.getuid()}"
    with cached_in(mine, error_class):
        mine.chmod(0o700)
        copy = mine / folder.name
        if mine.is_symlink():
            raise error_class(f"{mine} is a link; remove it")
        if not copy.exists() and folder.is_dir():
            shutil.copytree(folder, copy, dirs_exist_ok=True)
        copy.mkdir(exist_ok=True)
    return copy


@contextmanager
def undone_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` if the block raises, Ctrl-C included."""
    with ExitStack() as stack:
        stack.callback(undo)
        yield
        stack.pop_all()


@contextmanager
def replacing(path: Path, *, derived: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; what is written there replaces ``path`` in one step.

    The content is on the disk before it gets its name. If the block raises, ``path`` stays as it
    was and the temporary file is removed.

    Args:
        path: The file.
        derived: Whether it can be made again, as files of a cache. Several processes may then write
            it at once, each at a temporary path of its own with the same ending, and nothing waits
            for the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = f"{uuid.uuid4().hex}{TEMPORARY}{path.suffix}" if derived else f"{path.name}{TEMPORARY}"
    temporary = path.with_name(name)
    remove(temporary)
    with undone_on_error(lambda: remove(temporary)):
        yield temporary
        if derived:
            temporary.replace(path)
        else:
            move(temporary, path)


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``, replacing it in one step."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 to ``path``, replacing it in one step."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any, *, sort_keys: bool = False) -> None:
    """Write ``value`` to ``path`` as JSON, replacing it in one step.

    Raises:
        ValueError: it holds a NaN or an infinity, which JSON does not have.
    """
    write_text(path, json.dumps(value, indent=4, sort_keys=sort_keys, allow_nan=False) + "\n")


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line to ``path``, replacing it in one step."""
    write_text(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def open_to_append(path: Path) -> TextIO:
    """Open ``path`` for lines to be added, each written as it ends; a link there is refused."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o644), "a", buffering=1, encoding="utf-8")


def append_line(path: Path, line: str) -> None:
    """Add ``line`` to ``path``; when this returns, it is on the disk. A link there is refused.

    A kill in the middle leaves a last line without its break: see :func:`whole_lines`.
    """
    with open_to_append(path) as file:
        # A name that is new has to reach the disk too.
        is_new = os.fstat(file.fileno()).st_size == 0
        file.write(f"{line}\n")
        file.flush()
        os.fsync(file.fileno())
        if is_new:
            flush(path.parent)


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Add ``row`` to ``path`` as a line of JSON; see :func:`append_line`.

    Raises:
        ValueError: it holds a NaN or an infinity, which JSON does not have.
    """
    append_line(path, json.dumps(row, allow_nan=False))


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of ``path``, without a last one that a kill left incomplete.

    The file is cut back to what is returned, so that the next line starts where a line starts. Who
    only reads uses :func:`dzrobot.documents.read_json_lines`, which changes nothing.
    """
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(path, len(whole))
    return whole.splitlines()


def in_parts(items: Iterable[T], size: Callable[[T], float], limit: float) -> list[list[T]]:
    """Return ``items`` in order, in lists that fill up to ``limit``.

    A single one above the limit gets a list of its own.

    Args:
        items: Any number.
        size: Returns the size of one.
        limit: Largest sum of sizes.
    """
    parts: list[list[T]] = []
    room = 0.0
    for one in items:
        taken = size(one)
        if not parts or taken > room:
            parts.append([])
            room = limit
        parts[-1].append(one)
        room -= taken
    return parts


def is_inside(folder: Path, path: Path) -> bool:
    """Return whether ``path`` is a file below ``folder``, also where links have been followed."""
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


def make_folders(root: Path, place: Path | str) -> Path:
    """Make ``root / place`` and return it; links in the place of folders below ``root`` go."""
    for folder in reversed([*Path(place).parents][:-1]):
        _replace_link(root / folder)
    return _replace_link(root / place)


def _replace_link(folder: Path) -> Path:
    if folder.is_symlink():
        folder.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def move(source: Path, target: Path) -> None:
    """Flush ``source`` to disk and rename it to ``target``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    flush(source)
    source.replace(target)
    flush(target.parent)


def flush(path: Path) -> None:
    """Wait until the file or folder at ``path`` is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove the file or folder at ``path``, if there is one; a link is removed, not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, refusal: DzrobotError) -> Iterator[None]:
    """Hold the lock file ``path`` for this process alone; a killed process holds nothing.

    Args:
        path: The lock file; made if it is not there. A link is refused, not followed.
        refusal: Raised if another process holds it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise refusal from error
        yield
    finally:
        os.close(handle)


@contextmanager
def one_at_a_time(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file ``path``; while another process of this machine does, say so and wait.

    Args:
        path: The lock file; made if it is not there, and removed at the end.
        what: What the other process is doing, for the message.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.warning("another process is %s: waiting for it", what)
                fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_open_as(handle, path):
                continue
            try:
                yield
            finally:
                # While it is held: whoever waits for this file sees that it has gone.
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(handle)


def _is_open_as(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


@contextmanager
def explained(what: str, error_class: type[DzrobotError]) -> Iterator[None]:
    """Turn a refusal of the operating system into one message.

    Args:
        what: What was being done, with the path: ``"write the results to runs/a"``.
        error_class: What to raise.
    """
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "choose another path")
        # Libraries put texts of their own beside the number.
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise error_class(f"cannot {what}: {reason}; {advice}") from error


@dataclass(frozen=True)
class StandIn:
    """What lies in the place of a file that was never fetched as a whole."""

    one: str
    """What it is, for one file: ``a Git LFS pointer``."""

    many: str
    """The same for several."""

    remedy: str

    def said_of(self, paths: Iterable[Path]) -> str:
        """Return the message about ``paths``, which are all of this kind."""
        named = list(paths)
        if len(named) == 1:
            return f"{named[0]} is {self.one}; {self.remedy}"
        folder = Path(os.path.commonpath(path.parent for path in named))
        shown = preview(path.relative_to(folder) for path in named)
        return f"{len(named)} files in {folder} are {self.many} ({shown}); {self.remedy}"


_AGAIN = "copy it again, or download it again (`hf download`)"
_FINISH = "finish the download: `hf download` with the same arguments goes on where it stopped"
_LFS = StandIn(
    "a Git LFS pointer, not the file itself", "Git LFS pointers, not the files themselves",
    "run `git lfs install` and `git lfs pull` in the clone, or fetch it with `hf download`",
)  # fmt: skip
_ANNEX = StandIn(
    "a git-annex pointer, not the file itself", "git-annex pointers, not the files themselves",
    "run `git annex get .` in the clone",
)  # fmt: skip
_ANSWER = StandIn(
    "a server's page or error, not the file itself",
    "a server's pages or errors, not the files themselves",
    "the download was refused or sent elsewhere (a login, a license to accept, a wrong address): "
    "sign in with `hf auth login` and use `hf download`",
)
_EMPTY = StandIn("empty", "empty", _AGAIN)
_ZEROS = StandIn(
    "filled with zeros, as an unfinished download leaves it",
    "filled with zeros, as an unfinished download leaves them", _AGAIN,
)  # fmt: skip
_NO_TARGET = StandIn(
    "a link to a file that is not there: its download was not finished, or the link was copied "
    "without its file",
    "links to files that are not there: their download was not finished, or the links were copied "
    "without their files",
    _FINISH,
)
_UNFINISHED = StandIn(
    "not there, and a download beside it was not finished",
    "not there, and a download beside them was not finished", _FINISH,
)  # fmt: skip
_BEGINNINGS = {
    b"version https://git-lfs.github.com/spec/": _LFS,
    b"version https://hawser.github.com/spec/": _LFS,
    b"# xet version ": _LFS,
    b"/annex/objects/": _ANNEX,
    b"<!doctype html": _ANSWER,
    b"<html": _ANSWER,
    b"entry not found": _ANSWER,
    b"invalid username or password": _ANSWER,
    b"access to model": _ANSWER,
    b"access to dataset": _ANSWER,
}
_MARKUP = (b"<error>", b"<html")
"""Inside XML that is the answer of a server; other XML is a file."""
_PARTS = (".incomplete", ".part", ".crdownload", ".aria2", ".download")
"""How programs that download name what is not whole yet."""
_HUB = (Path("blobs"), Path(".cache/huggingface/download"))
"""Where `hf download` keeps parts, in its cache and in a folder of one's own."""

_MOST_FILES = 10_000
"""Files of a folder that are looked at for the sake of one message."""


def stand_in(path: Path) -> StandIn | None:
    """Return what lies at ``path`` in the place of its content; None if that is not known.

    Told by its first bytes, whatever its name: pointers of Git LFS and git-annex, links without
    their file, web pages, empty files, files of zeros, parts of downloads. No file worth reading is
    one of these, so that callers ask where a file could not be read, and before they say why.
    """
    try:
        if path.is_symlink() and not path.exists():
            annexed = ".git/annex/objects/" in str(path.readlink())
            return _ANNEX if annexed else _NO_TARGET
        if not path.exists():
            return _UNFINISHED if _is_begun(path) else None
        if not path.is_file():
            return None
        with path.open("rb") as handle:
            head = handle.read(512)
    except OSError:
        return None
    if not head.strip():
        return _EMPTY
    if not head.strip(b"\0"):
        return _ZEROS
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if start.startswith(b"<?xml") and any(tag in start for tag in _MARKUP):
        return _ANSWER
    return next((kind for begin, kind in _BEGINNINGS.items() if start.startswith(begin)), None)


def _is_begun(path: Path) -> bool:
    """Return whether a download of ``path``, which is not there, or of its folder has begun."""
    if any(path.with_name(path.name + end).is_file() for end in _PARTS):
        return True
    hubs = (folder / hub for folder in list(path.parents)[:3] for hub in _HUB)
    return any(next(hub.rglob("*.incomplete"), None) for hub in hubs if hub.is_dir())


def stand_ins(paths: Iterable[Path]) -> list[str]:
    """Return one message for every kind of stand-in among ``paths``."""
    kinds: dict[StandIn, list[Path]] = {}
    for path in paths:
        if (kind := stand_in(path)) is not None:
            kinds.setdefault(kind, []).append(path)
    return [kind.said_of(found) for kind, found in kinds.items()]


def refuse_stand_ins(paths: Iterable[Path], error_class: type[DzrobotError]) -> None:
    """Raise if one of ``paths`` is a stand-in, with one message about all of them.

    Raises:
        DzrobotError: of class ``error_class``.
    """
    if messages := stand_ins(paths):
        raise error_class("\n".join(messages))


def diagnosed(path: Path, otherwise: str) -> str:
    """Return the message about a file that cannot be read, and the others around it like it.

    Args:
        path: The file.
        otherwise: What to say of it where its content is not known to be a stand-in.
    """
    kind = stand_in(path)
    if kind is None:
        return f"{path} {otherwise}"
    around = islice(path.parent.rglob("*"), _MOST_FILES)
    alike = {other for other in around if not other.is_dir() and stand_in(other) == kind}
    return kind.said_of(sorted({path, *alike}))
