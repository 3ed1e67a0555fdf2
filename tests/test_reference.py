"""Every public name is documented, and the site's builder refuses one that is not."""

from pathlib import Path

import griffe
import pytest
from scripts import loaded

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def generate():
    """Return the hook that makes the reference pages."""
    with loaded(ROOT / "docs" / "generate.py") as module:
        yield module


@pytest.fixture(scope="module")
def package():
    """Return dzrobot as its source says."""
    return griffe.load("dzrobot", search_paths=[str(ROOT)])


def test_every_public_name_is_documented(generate, package):
    assert generate.complaints(package) == []


def test_every_exported_name_has_an_entry(generate, package):
    exported = dict(generate.exports(package))
    assert {"dzrobot", "dzrobot.envs", "dzrobot.policies", "dzrobot.training"} <= exported.keys()
    pages = "\n".join(
        line for name in ["dzrobot", *generate.packages()] for line in generate.modules(name)
    )
    listed = set(pages.split())
    for names in exported.values():
        for member in names.values():
            assert member.canonical_path.rpartition(".")[0] in listed


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("class Arm:\n    pass", "pkg.Arm: no docstring"),
        ('class Arm:\n    """An arm."""\n    def go(self): ...', "pkg.Arm.go: no docstring"),
        ('class Arm:\n    """An arm."""\n    reach: float = 1.0', "pkg.Arm.reach: an attribute"),
        ('def go(speed: float) -> None:\n    """Go."""', "pkg.go: says nothing of the parameter"),
        ('def at() -> NDArray[Any]:\n    """Return it."""', "pkg.at: takes or returns an array"),
        (
            'def go() -> None:\n    """Go."""\n    raise SafetyError("too far")',
            "pkg.go: raises SafetyError and does not say so",
        ),
        ('def _go(speed):\n    pass\n\nLIMIT = 1\n"""In m."""\n__all__ = ["LIMIT"]', None),
    ],
)
def test_what_is_not_documented_is_said(generate, tmp_path, code, said):
    name = next((word for word in ("Arm", "at", "go") if f" {word}" in f" {code}"), "")
    exports = "" if "__all__" in code else f"\n__all__ = [{name!r}]"
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text(f'"""A package."""\n\n\n{code}\n{exports}\n')
    found = generate.complaints(griffe.load("pkg", search_paths=[str(tmp_path)]))
    assert [line for line in found if said and line.startswith(said)] == found
    assert bool(found) == (said is not None)
