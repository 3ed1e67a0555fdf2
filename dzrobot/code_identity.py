"""Which code made a result: version, commit, and a hash of what the code consists of."""

import functools
import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

import dzrobot
from dzrobot.documents import parse_json
from dzrobot.errors import ConfigError

CODE = "dzrobot_code"
"""Field of an evaluation's card, and of what a server says of itself: a list of
:class:`CodeIdentity`, since results of different code may be mixed on request."""

_PACKAGE = Path(dzrobot.__file__).resolve().parent

_COUNTED = (".py", ".yaml", ".json", ".xml", ".urdf")
"""Endings of the files that are hashed. Documents, the look of pages and weights are not: weights
have a hash of their own."""

_SOURCES = ("dzrobot", "envs", "policies", "training")
"""Folders of a checkout that hold the package."""

_SHOWN = 12

_Text = Annotated[str, Field(max_length=200)]


@dataclass(frozen=True, kw_only=True)
class CodeIdentity:
    """The code of one program; two with equal hashes are the same code."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    version: _Text
    """Version of dzrobot."""

    commit: _Text = ""
    """Commit of the checkout, or of what pip installed from, with ``-modified`` where files of the
    package differ from it. Empty: a wheel has none."""

    content: _Text = ""
    """SHA-256 over the files of the package. Empty: it was not recorded."""

    modules: Mapping[_Text, _Text] = field(default_factory=dict)
    """SHA-256 of the user's own modules that take part, by name."""

    def is_same(self, other: "CodeIdentity") -> bool:
        """Return whether ``other`` is the same code; commits may differ in documents alone."""
        return (self.content, dict(self.modules)) == (other.content, dict(other.modules))

    @property
    def text(self) -> str:
        """For messages and tables: ``0.1.0 (commit 5bedd6ca2a9f, content 6525fd19d06d)``."""
        commit, _, modified = self.commit.partition("-")
        parts = [f"commit {commit[:_SHOWN]}{modified and ', modified'}"] if commit else []
        parts.append(f"content {self.content[:_SHOWN]}" if self.content else "content not recorded")
        parts += [f"{name} {digest[:_SHOWN]}" for name, digest in sorted(self.modules.items())]
        return f"{self.version} ({', '.join(parts)})"

    @property
    def name(self) -> str:
        """Twelve letters that tell it from other code."""
        if not self.modules:
            return self.content[:_SHOWN]
        whole = f"{self.content} {sorted(self.modules.items())}"
        return hashlib.sha256(whole.encode()).hexdigest()[:_SHOWN]

    def plain(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


@functools.cache
def package_code() -> CodeIdentity:
    """Return the identity of this package; found once per process, in about 20 ms."""
    return CodeIdentity(
        version=dzrobot.__version__, commit=package_commit(), content=content_hash(_PACKAGE)
    )


def code_with(modules: Iterable[str]) -> CodeIdentity:
    """Return the identity of this package together with a user's own code.

    Args:
        modules: Names of imported modules. Those that are the user's count, and what they have
            imported of the user's own; what is installed counts by its version elsewhere.
    """
    hashes = {name: _digest(file) for name, file in _own_modules(modules).items()}
    return replace(package_code(), modules=hashes)


def check_unchanged(content: str) -> None:
    """Check that the package's files are still those that a run began with.

    A process that is started later imports what lies on the disk then.

    Args:
        content: Of the code that the run began with.

    Raises:
        ConfigError: they have changed.
    """
    if content_hash(_PACKAGE) != content:
        raise ConfigError(
            f"the files of dzrobot in {_PACKAGE} have changed since this run began: what starts "
            "now would be other code. Give the same command again; run long studies from a "
            "worktree at a fixed commit"
        )


def counted_files(folder: Path) -> Iterator[Path]:
    """Yield the files below ``folder`` that make up code, links to folders followed."""
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(place, name) for name in names if name.endswith(_COUNTED))


def content_hash(folder: Path) -> str:
    """Return the SHA-256 over the counted files below ``folder``, links to folders followed.

    A checkout, an editable install and a wheel of the same code give the same.
    """
    listed = sorted((file.relative_to(folder).as_posix(), file) for file in counted_files(folder))
    lines = [f"{_digest(file)}  {name}\n" for name, file in listed]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def package_commit() -> str:
    """Return the commit of the checkout, or of the repository that pip installed from.

    Empty: a wheel has none, or git cannot tell.
    """
    root = _PACKAGE.parent
    if (root / ".git").exists():
        command = [
            "git", "-C", str(root), "status", "--porcelain=v2", "--branch", "--", *_SOURCES,
        ]  # fmt: skip
        try:
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            # No git here, or a checkout of another user: the hash of the content remains.
            return ""
        lines = said.stdout.splitlines()
        head = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), "")
        is_modified = any(not line.startswith("#") for line in lines)
        return f"{head}-modified" if head and is_modified else head
    try:
        origin = distribution("dzrobot").read_text("direct_url.json")
    except PackageNotFoundError:
        return ""
    found = parse_json((origin or "{}").encode(), dict[str, Any], "direct_url.json", ConfigError)
    commit = found.get("vcs_info", {}).get("commit_id")
    return commit if isinstance(commit, str) else ""


def _own_modules(names: Iterable[str]) -> dict[str, Path]:
    """Return the files of the user's modules among ``names``, and of those that they use."""
    found: dict[str, Path] = {}
    waiting = [module for name in names if (module := sys.modules.get(name)) is not None]
    while waiting:
        module = waiting.pop()
        file = _own_file(module)
        if file is not None and module.__name__ not in found:
            found[module.__name__] = file
            waiting += _used(module)
    return found


def _own_file(module: ModuleType) -> Path | None:
    named = vars(module).get("__file__")
    if not isinstance(named, str) or not named.endswith(".py"):
        return None
    file = Path(named).resolve()
    others = (*(_PACKAGE.parent / name for name in _SOURCES), Path(sysconfig.get_path("stdlib")))
    is_installed = {"site-packages", "dist-packages"} & {*file.parts}
    return None if is_installed or any(file.is_relative_to(one) for one in others) else file


def _used(module: ModuleType) -> Iterator[ModuleType]:
    for value in tuple(vars(module).values()):
        home: ModuleType | None = None
        if isinstance(value, ModuleType):
            home = value
        elif isinstance(value, type | FunctionType):
            home = sys.modules.get(value.__module__)
        if home is not None:
            yield home
