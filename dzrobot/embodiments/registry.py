"""Find an embodiment by name: a built-in tag, or ``module:NAME`` from the user's own code."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from dzrobot.embodiments.robots.franka_pnp import FRANKA_PNP
from dzrobot.embodiments.robots.libero_mini import LIBERO_MINI
from dzrobot.embodiments.robots.libero_sim import LIBERO_SIM
from dzrobot.embodiments.robots.oxe_droid import OXE_DROID
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import UnknownNameError, preview, suggest

EMBODIMENTS: Mapping[str, Embodiment] = {
    embodiment.tag: embodiment for embodiment in (LIBERO_SIM, LIBERO_MINI, FRANKA_PNP, OXE_DROID)
}
"""The built-in robots, by tag."""

DEFAULT_ATTRIBUTE = "EMBODIMENT"
"""What a module is asked for when only its name is given."""


def load_embodiment(name: str) -> Embodiment:
    """Return the embodiment ``name``.

    Args:
        name: A built-in tag (``libero_sim``), ``module:NAME`` (``my_robot:UR5``), or a module that
            holds ``EMBODIMENT``. The import path is searched, then the current folder.

    Raises:
        UnknownNameError: no such tag, module or attribute, or the attribute is no Embodiment.
    """
    if name in EMBODIMENTS:
        return EMBODIMENTS[name]
    module_name, colon, attribute = name.partition(":")
    with _current_folder_importable():
        if not _is_dotted_name(module_name) or not (colon or _is_module(module_name)):
            raise UnknownNameError(
                f"unknown embodiment {name!r}.{suggest(name, EMBODIMENTS)} Known: "
                f"{', '.join(EMBODIMENTS)}. Your own robot is written 'module:NAME'; the module "
                f"must be on the import path or in {Path.cwd()}."
            )
        module = _import(module_name, name)
    return _attribute(module, attribute or DEFAULT_ATTRIBUTE)


def _import(module_name: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that is there but misses a dependency of its own is the user's traceback to read.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UnknownNameError(
            f"embodiment {name!r}: there is no module {module_name!r} on the import path or in "
            f"{Path.cwd()}; install it, set PYTHONPATH, or change to its folder."
        ) from error


def _attribute(module: ModuleType, attribute: str) -> Embodiment:
    held = {key: value for key, value in vars(module).items() if isinstance(value, Embodiment)}
    if attribute in held:
        return held[attribute]
    given = (
        f"is a {type(vars(module)[attribute]).__name__}"
        if attribute in vars(module)
        else "does not exist"
    )
    raise UnknownNameError(
        f"{module.__name__}:{attribute} {given}.{suggest(attribute, held)} Embodiments in "
        f"{module.__name__}: {preview(held)}."
    )


def _is_dotted_name(name: str) -> bool:
    return all(word.isidentifier() for word in name.split("."))


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@contextmanager
def _current_folder_importable() -> Iterator[None]:
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
