"""One thing that is wrong with a recipe."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dzrobot.policies.dreamzero.checkpoints.hub import is_hub_file, is_hub_id


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    field: str
    """Dotted name in the recipe."""

    message: str


def missing_path(field: str, path: str, *, one_file: bool = False) -> Iterator[Problem]:
    """Refuse a local path that is not there; hub ids are looked up later.

    Args:
        field: Dotted name in the recipe.
        path: As it was written.
        one_file: Whether ``owner/name/file.pth``, a file of a repository, may stand there too.
    """
    known = is_hub_file(path) if one_file else False
    if not Path(path).expanduser().exists() and not known and not is_hub_id(path):
        form = "owner/name/file.pth" if one_file else "owner/name"
        yield Problem(field, f"{path} does not exist; give a local path or a hub id {form}")
