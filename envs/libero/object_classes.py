"""The classes of objects and scenes that tasks name, and the classes that LIBERO-PRO adds."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.resources.abc import Traversable
from typing import Any

from dzrobot.envs.libero.task_packages import PRO

_MODELS: Mapping[str, str] = {
    "articulated_objects": "articulated_objects/{0}.xml",
    "google_scanned_objects": "stable_scanned_objects/{0}/{0}.xml",
    "hope_objects": "stable_hope_objects/{0}/{0}.xml",
    "self_designed_object": "custom_objects/{0}/{0}.xml",
    "turbosquid_objects": "turbosquid_objects/{0}/{0}.xml",
}
"""Where the classes of a module have their models, in the folder of the assets."""


def object_models(root: Traversable) -> dict[str, str]:
    """Return the model of every class of objects, by the name that tasks use.

    Nothing is imported: the classes are found in the source.

    Args:
        root: Folder of the benchmark.
    """
    found = {}
    for module, model in _MODELS.items():
        file = root / "envs" / "objects" / f"{module}.py"
        for name in _registered(file, "object") if file.is_file() else ():
            found[_key(name)] = model.format(_key(name))
    return found


def scene_classes(root: Traversable) -> frozenset[str]:
    """Return the classes of scenes, by the names that tasks use."""
    files = [file for file in (root / "envs" / "problems").iterdir() if file.name.endswith(".py")]
    return frozenset(name.lower() for file in files for name in _registered(file, "problem"))


def register_pro_classes() -> None:
    """Let LIBERO, which is imported, make the objects that only LIBERO-PRO has.

    Classes of LIBERO's own keep their meaning. Registering twice is harmless.

    Raises:
        MissingDependencyError: LIBERO-PRO was not downloaded.
    """
    base: Any = import_module("libero.libero.envs.base_object")
    added = object_models(PRO.files()).keys() - base.OBJECTS_DICT.keys()
    if not added:
        return
    with _only_new_classes(base):
        for module in _MODELS:
            PRO.module("envs/objects", module)


@contextmanager
def _only_new_classes(base: Any) -> Iterator[None]:
    """Let LIBERO skip classes that it has, where it would fail: PRO's modules repeat them."""
    strict = {name: getattr(base, name) for name in _REGISTERS}

    def lenient(name: str, table: Mapping[str, Any]) -> Any:
        def register(target: Any) -> Any:
            return target if _key(target.__name__) in table else strict[name](target)

        return register

    for name, table in _REGISTERS.items():
        setattr(base, name, lenient(name, getattr(base, table)))
    try:
        yield
    finally:
        for name, original in strict.items():
            setattr(base, name, original)


_REGISTERS: Mapping[str, str] = {
    "register_object": "OBJECTS_DICT",
    "register_visual_change_object": "VISUAL_CHANGE_OBJECTS_DICT",
}


def _key(name: str) -> str:
    """Return the name that tasks use: a word for every capital and every digit, as in LIBERO."""
    return "_".join(re.sub(r"([A-Z0-9])", r" \1", name).split()).lower()


def _registered(file: Traversable, kind: str) -> list[str]:
    pattern = rf"^@register_{kind}\s+(?:@\w+\s+)*class (\w+)"
    return re.findall(pattern, file.read_text(encoding="utf-8"), flags=re.MULTILINE)
