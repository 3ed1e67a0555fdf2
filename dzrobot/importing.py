"""Names that are imported when they are used first, or because a user wrote ``module:name``."""

import ast
import importlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from dzrobot.errors import (
    ConfigError,
    DzrobotError,
    MissingDependencyError,
    UnknownNameError,
    preview,
    printable,
    suggest,
)


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose names live in other modules.

    The imports below ``if TYPE_CHECKING`` say where: type checkers follow them, and at run time a
    module is loaded when one of its names is used first.

    Args:
        package: The package's ``__name__``.
    """

    @cache
    def homes() -> dict[str, str]:
        source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
        blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
        lines = [node for block in blocks for node in block.body]
        imports = [node for node in lines if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes()[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes()})

    return get, names


def required(what: str, extra: str, *packages: str) -> None:
    """Raise unless all ``packages`` are installed; nothing is imported.

    Args:
        what: What needs them, for the message.
        extra: Of this package, that installs them.
        packages: Names to import them by.

    Raises:
        MissingDependencyError: some are missing.
    """
    if missing := [name for name in packages if find_spec(name) is None]:
        raise MissingDependencyError(f"{what} needs {' and '.join(missing)}: {install(extra)}")


def install(extra: str) -> str:
    """Return the command that installs ``extra`` of this package, as it was itself installed."""
    checkout = (Path(__file__).resolve().parents[1] / "pyproject.toml").exists()
    return f"pip install -e '.[{extra}]'" if checkout else f"pip install 'dzrobot[{extra}]'"


def is_reference(text: str) -> bool:
    """Return whether ``text`` has the form ``module:name``; nothing is imported."""
    module, colon, name = text.partition(":")
    return bool(colon) and is_module_name(module) and name.isidentifier()


def is_module_name(text: str) -> bool:
    """Return whether ``text`` has the form of a module's name; nothing is imported."""
    return all(word.isidentifier() for word in text.split("."))


def module_exists(name: str) -> bool:
    """Return whether the import path or the current folder has the module ``name``.

    Only packages around it are imported.
    """
    with current_folder_importable():
        try:
            return find_spec(name) is not None
        except ModuleNotFoundError:
            return False


def load_reference(text: str, kind: str, expected: Any = object) -> Any:
    """Return what ``module:name`` names; the import path is searched, then the current folder.

    Args:
        text: As a user wrote it.
        kind: What it is to name, for messages: ``"policy"``.
        expected: Its class; ``collections.abc.Callable`` for what is called.

    Raises:
        UnknownNameError: not of that form, no such module, or nothing of that name and class in it.
    """
    if not is_reference(text):
        raise UnknownNameError(f"{kind} {text[:200]!r} is not written 'module:name'")
    module_name, _, name = text.partition(":")
    names = vars(load_module(module_name, f"{kind} {text!r}"))
    fitting = {
        key: value
        for key, value in names.items()
        if isinstance(value, expected) and not key.startswith("_")
    }
    if name in names and isinstance(names[name], expected):
        return names[name]
    given = f"is a {type(names[name]).__name__}" if name in names else "does not exist"
    raise UnknownNameError(
        f"{kind}: {module_name}:{name} {given}.{suggest(name, fitting)} In {module_name} there "
        f"are: {preview(fitting)}."
    )


SLOW_IMPORT_S = 10.0
"""After how long the user is told which module is still being imported."""


@contextmanager
def _told_if_slow(name: str, what: str) -> Iterator[None]:
    """Say, once, that the module takes long: one that hangs would be silent for ever."""
    said = f"{what}: the module {name!r} is still being imported after {SLOW_IMPORT_S:g} s"
    # Not at the top: `import dzrobot` has no use for it.
    from logging import getLogger

    warn = getLogger(__name__).warning
    timer = threading.Timer(SLOW_IMPORT_S, warn, [f"{said}; Ctrl-C ends it"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def load_module(name: str, what: str) -> ModuleType:
    """Return the module ``name``; the import path is searched, then the current folder.

    Args:
        name: Dotted name.
        what: What asks for it, for messages: ``"embodiment 'my_robot:UR5'"``.

    Raises:
        UnknownNameError: no such module.
        ConfigError: it raises an error itself; names the error, its file and line.
    """
    with current_folder_importable(), _told_if_slow(name, what):
        try:
            return importlib.import_module(name)
        except MissingDependencyError:
            raise
        except ModuleNotFoundError as error:
            # What a module that is there lacks itself is for the user to read.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise _failed(name, what, error) from error
            raise UnknownNameError(
                f"{what}: there is no module {name!r} on the import path or in {Path.cwd()}; "
                "install it, set PYTHONPATH, or change to its folder."
            ) from error
        except Exception as error:
            # Nothing narrower: a user's module may raise anything.
            raise _failed(name, what, error) from error


def _failed(name: str, what: str, error: Exception) -> ConfigError:
    """Return the error of a module that raises one while it is imported, in two lines."""
    raised = error.msg if isinstance(error, SyntaxError) else str(error)
    text = f"{type(error).__name__}: {raised}"
    if isinstance(error, DzrobotError):
        text = raised
    shown = printable(" ".join(text.split()))
    place = raised_at(error)
    return ConfigError(f"{what}: the module {name!r} does not import:\n{shown} ({place})")


def raised_at(error: BaseException) -> str:
    """Return the line of a user's code that an error comes from, as ``file:line``.

    Of a module that is being imported that is a line of its own, not one of a library it calls.
    """
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = list(traceback.extract_tb(error.__traceback__))
    imported = next((n for n, frame in enumerate(frames) if frame.filename == __file__), None)
    if imported is not None:
        machinery = ("<", __file__, importlib.__file__)
        own = [f for f in frames[imported:] if not f.filename.startswith(machinery)]
        folder = str(Path(own[0].filename).parent) if own else ""
        frames = [f for f in own if f.filename.startswith(folder)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no file"


@contextmanager
def current_folder_importable() -> Iterator[None]:
    """Look in the current folder too, and last: a console script does not look there at all."""
    folder = str(Path.cwd())
    if folder in sys.path or "" in sys.path:
        yield
        return
    sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
