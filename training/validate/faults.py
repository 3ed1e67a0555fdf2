"""One thing that is wrong with a recipe."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    field: str
    """Dotted name in the recipe."""

    message: str


def missing_path(field: str, path: str) -> Iterator[Fault]:
    """Refuse a local path that is not there; hub ids are looked up later."""
    if not Path(path).expanduser().exists() and not _is_hub_id(path):
        yield Fault(field, f"{path} does not exist; give a local path or a hub id owner/name")


def _is_hub_id(path: str) -> bool:
    return (
        not path.startswith(("/", ".", "~"))
        and path.count("/") == 1
        and not path.endswith((".pth", ".json"))
    )
