"""SHA-256 of every file of a checkpoint, so that damage on a disk does not pass for weights.

``SHA256SUMS`` has the format of the command ``sha256sum``, which checks it as well.
"""

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from dzrobot.documents import read_bytes
from dzrobot.errors import CheckpointError, preview
from dzrobot.files import cache_folder, write_text
from dzrobot.policies.dreamzero.checkpoints.sources import WeightSource

CHECKSUMS_FILE = "SHA256SUMS"

_LINE = re.compile(r"([0-9a-f]{64})  ([^/\x00][^\x00]*)")
_THREADS = 8
"""Files read at once: one thread hashes 1 to 2 GB/s, a fast disk reads more."""

_MUCH = 2**31
"""Bytes whose reading takes long enough to say so."""

_DIGEST = re.compile(r"[0-9a-f]{64}")

DCP_DESCRIPTION = ".metadata"
"""File of a distributed checkpoint that says what lies in the others."""

_log = logging.getLogger(__name__)


def write_checksums(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the checksums of every file below ``folder`` beside them.

    Args:
        folder: The files.
        known: Checksums of some of them, by path below ``folder``; these are not read again.
    """
    known = known or {}
    names = sorted(_files(folder))
    digests = {**known, **_digests(folder, [name for name in names if name not in known])}
    lines = [f"{digests[name]}  {name}\n" for name in names]
    write_text(folder / CHECKSUMS_FILE, "".join(lines))


def check_checksums(path: Path, *, share: tuple[int, int] = (0, 1)) -> int:
    """Read every file of a folder and compare it with its checksum; return how many there are.

    The checksum of a single file is looked for beside it.

    Args:
        path: Folder or file.
        share: Reads part I of N; the parts are of about the same size. Missing files are reported
            whichever part they belong to.

    Raises:
        CheckpointError: There are no checksums, or a file is missing, changed or unreadable.
    """
    folder = path if path.is_dir() else path.parent
    file = folder / CHECKSUMS_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{folder} has no {CHECKSUMS_FILE}: damage cannot be detected; copy the whole folder "
            "again"
        )
    wanted = _parsed(file)
    if folder != path:
        if path.name not in wanted:
            raise CheckpointError(
                f"{file} has no checksum of {path.name}: damage cannot be detected"
            )
        wanted = {path.name: wanted[path.name]}
    held = set(_files(folder))
    if lost := wanted.keys() - held:
        raise CheckpointError(f"{folder} lacks {preview(lost)}; copy the whole folder again")
    found = _digests(folder, _share(folder, sorted(wanted), *share))
    if changed := [name for name, digest in found.items() if wanted[name] != digest]:
        raise CheckpointError(
            f"{folder} is damaged: {preview(changed)} is not what was written (its checksum "
            f"differs from {CHECKSUMS_FILE}); copy it again or use another checkpoint"
        )
    return len(wanted)


def _parsed(file: Path) -> dict[str, str]:
    try:
        text = read_bytes(file, CheckpointError).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is damaged (byte {error.start})") from error
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None or ".." in Path(match[2]).parts:
            raise CheckpointError(f"{file} is damaged: {line[:80]!r} is not a line of checksums")
        found[match[2]] = match[1]
    if not found:
        raise CheckpointError(f"{file} is damaged: it names no file")
    return found


def _files(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return [name for p in paths if (name := p.relative_to(folder).as_posix()) != CHECKSUMS_FILE]


def _share(folder: Path, names: list[str], index: int, count: int) -> list[str]:
    """Return the files of part ``index``: each, the largest first, goes to the smallest part."""
    sizes = {name: (folder / name).stat().st_size for name in names}
    parts: list[list[str]] = [[] for _ in range(count)]
    totals = [0] * count
    for name in sorted(names, key=lambda name: -sizes[name]):
        smallest = totals.index(min(totals))
        parts[smallest].append(name)
        totals[smallest] += sizes[name]
    return parts[index]


def _digests(folder: Path, names: list[str]) -> dict[str, str]:
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return dict(
            zip(names, pool.map(lambda name: _file_digest(folder / name), names), strict=True)
        )


def _file_digest(file: Path) -> str:
    try:
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}; copy it again") from error


def weights_hash(source: WeightSource, *, read: bool = True) -> str:
    """Return the SHA-256 that names weights by every byte of their files; empty without files.

    Of one file it is what ``sha256sum FILE`` says; of several, what ``sha256sum FILES | sha256sum``
    says in their folder, with the names sorted. A file is read only if nothing knows its checksum
    yet: neither ``SHA256SUMS`` beside it, nor the hub's cache, which names files by it, nor an
    earlier call on this machine.

    Args:
        source: The weights.
        read: Whether such files are read; else the result is empty where one would have to be.

    Raises:
        CheckpointError: A file cannot be read.
    """
    return files_hash(_weight_files(source), read=read)


def files_hash(files: Iterable[Path], *, read: bool = True) -> str:
    """Return the hash of files as :func:`weights_hash` makes it; empty without files.

    Raises:
        CheckpointError: A file cannot be read.
    """
    paths = sorted(files)
    if not paths:
        return ""
    known = {path: digest for path in paths if (digest := _known_digest(path))}
    unknown = [path for path in paths if path not in known]
    if unknown and not read:
        return ""
    if size := sum(path.stat().st_size for path in unknown):
        say = _log.warning if size > _MUCH else _log.info
        say("reading %.1f GB of weights for their hash, once on this machine", size / 1e9)
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            hashed = dict(zip(unknown, pool.map(_file_digest, unknown), strict=True))
        for path, digest in hashed.items():
            _remember(path, digest)
        known |= hashed
    if len(paths) == 1:
        return known[paths[0]]
    root = Path(os.path.commonpath([path.parent for path in paths]))
    lines = sorted(f"{known[path]}  {path.relative_to(root).as_posix()}\n" for path in paths)
    lines.sort(key=lambda line: line.partition("  ")[2])
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _weight_files(source: WeightSource) -> Iterator[Path]:
    for file in {info.file for info in source.tensors.values()}:
        if file.name == DCP_DESCRIPTION:
            yield from file.parent.glob("*.distcp")
        elif file.is_file():
            yield file


def _known_digest(path: Path) -> str:
    """Return the checksum of ``path`` if it is on record, else an empty text."""
    for folder in (path.parent, path.parent.parent):
        sums = folder / CHECKSUMS_FILE
        # A file that was written after its checksum may be another one.
        if sums.is_file() and path.stat().st_mtime_ns < sums.stat().st_mtime_ns:
            name = path.relative_to(folder).as_posix()
            if digest := _parsed(sums).get(name):
                return digest
    blob = path.resolve()
    if blob.parent.name == "blobs" and _DIGEST.fullmatch(blob.name):
        return blob.name
    try:
        kept = _record(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
    return kept if _DIGEST.fullmatch(kept) else ""


def _remember(path: Path, digest: str) -> None:
    try:
        write_text(_record(path), digest)
    except OSError as error:
        # It is read again next time.
        _log.info("the hash of %s is not kept: %s", path, error)


def _record(path: Path) -> Path:
    """Return where the checksum of ``path`` is kept, as long as the file is the same one."""
    file = path.resolve()
    about = file.stat()
    key = f"{file}:{about.st_size}:{about.st_mtime_ns}:{about.st_ino}"
    return cache_folder() / "checksums" / hashlib.sha256(os.fsencode(key)).hexdigest()


_RUNS = 16
_RUN_LENGTH = 64


def fingerprint(source: WeightSource, names: Iterable[str]) -> str:
    """Return a hash of the named tensors: names, shapes and 1024 evenly spread values of each.

    Values are compared as bfloat16, so a float32 copy of bfloat16 weights (or the rounding of
    float32 weights) is the same base.
    """
    digest = hashlib.sha256()
    found = {name: _tensor_digest(tensor) for name, tensor in source.stream(sorted(names))}
    for name in sorted(found):
        digest.update(f"{name}:{found[name]};".encode())
    return digest.hexdigest()


def _tensor_digest(tensor: Tensor) -> str:
    flat = tensor.reshape(-1)
    step = max(
        _RUN_LENGTH,
        (flat.numel() - _RUN_LENGTH) // (_RUNS - 1) if flat.numel() > _RUN_LENGTH else 1,
    )
    # Short runs rather than single values: each touches one page of a mapped file.
    runs = [flat[start : start + _RUN_LENGTH] for start in range(0, flat.numel(), step)]
    values = torch.cat(runs).to(device="cpu", dtype=torch.bfloat16)
    # Negative zero and zero are one weight.
    values = values + torch.zeros((), dtype=torch.bfloat16)
    shape = "" if flat.numel() == 1 else tuple(tensor.shape)
    return hashlib.sha256(
        f"{shape}".encode() + values.view(torch.uint8).numpy().tobytes()
    ).hexdigest()
