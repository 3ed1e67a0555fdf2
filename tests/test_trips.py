"""The outlines of "How it works" say what ran; whether they are up to date, `--check` says."""

import sys
from pathlib import Path

import pytest
from scripts import loaded

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def trips():
    """Return the script that traces and draws."""
    with loaded(ROOT / "docs" / "trips.py") as module:
        yield module


SOURCES = {
    "envs/arm.py": "from leaf import leaf\nleaf()\ndef step():\n    own()\n    leaf()\n"
    "    raises()\ndef own():\n    pass\ndef raises():\n    try:\n        leaf(1 / 0)\n"
    "    except ZeroDivisionError:\n        import late\n        late.last()\n",
    "dzrobot/leaf.py": "def leaf():\n    return next(each for each in [1])\n",
    "dzrobot/late.py": "from leaf import leaf\nleaf()\ndef last():\n    pass\n",
    "other/arm.py": "",
}


def test_a_trip_has_each_file_once_below_the_call_that_led_to_it(trips, tmp_path, monkeypatch):
    for name, source in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
        monkeypatch.syspath_prepend(str((tmp_path / name).parent))
    monkeypatch.syspath_prepend(str(tmp_path / "envs"))
    import arm

    before = sys.getprofile()
    with trips.Trip(root=tmp_path.resolve()) as trip:
        arm.step()
    sys.setprofile(before)
    assert trip.outline().splitlines() == [
        "step    envs/arm.py",
        "  leaf  leaf.py",
        "  last  late.py",
    ]
    assert ("envs/arm.py", "own") in trip.functions
    for name in ("arm", "leaf", "late"):
        del sys.modules[name]


def made(trips, *files):
    return trips.Trip(visits=[trips.Visit(0, file, "run") for file in files])


def test_the_picture_has_every_layer_and_every_file_in_its_own(trips):
    rows = trips.layers()
    names = [name for members, _ in rows for name in members]
    assert names[0] == "cli"
    assert {"policies", "envs", "errors"} <= set(names)
    assert ["policies", "envs"] in [members for members, _ in rows]
    svg = trips.picture({"eval": made(trips, "cli.py", "envs/zebra.py", "errors.py")}, rows)
    assert 0 < svg.index(">cli</text>") < svg.index("zebra") < svg.rindex(">errors</text>")


def test_a_page_without_the_markers_of_a_trip_is_refused(trips):
    text = trips.PAGE.read_text()
    once = trips.page(text, {"load": made(trips, "policies/zebra.py")})
    assert "1 files, 0 functions:\n\n```text\nrun  policies/zebra.py\n```\n<!-- end of load" in once
    assert once.replace("zebra", "cow") == trips.page(
        once, {"load": made(trips, "policies/cow.py")}
    )
    with pytest.raises(ValueError, match="needs <!-- load"):
        trips.page(text.replace("<!-- end of load -->", ""), {"load": made(trips, "a.py")})
