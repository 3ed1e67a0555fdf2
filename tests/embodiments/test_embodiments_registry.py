"""Finding embodiments by name: built in, on the import path, in the current folder."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dzrobot.embodiments.registry import (
    EMBODIMENTS,
    described_embodiment,
    description_of,
    load_embodiment,
)
from dzrobot.embodiments.spec import Gripper
from dzrobot.errors import CheckpointError, ConfigError, UnknownNameError

ROBOT = """
from dataclasses import replace
from dzrobot.embodiments.robots.libero_sim import LIBERO_SIM
UR5 = replace(LIBERO_SIM, tag="ur5")
EMBODIMENT = replace(LIBERO_SIM, tag="default")
NOT_A_ROBOT = 5
"""


@pytest.fixture
def cell(tmp_path, monkeypatch):
    """A folder with a user's module, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    (tmp_path / "my_cell_robot.py").write_text(ROBOT)
    yield tmp_path
    sys.modules.pop("my_cell_robot", None)


@pytest.mark.parametrize("tag", EMBODIMENTS)
def test_built_in(tag):
    assert load_embodiment(tag).tag == tag


def test_from_the_current_folder(cell):
    before = list(sys.path)
    assert load_embodiment("my_cell_robot:UR5").tag == "ur5"
    assert load_embodiment("my_cell_robot").tag == "default"
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "libero_sm",
            "Did you mean 'libero_sim'.*Known: libero_sim, libero_mini, franka_pnp, "
            "franka_mini, oxe_droid, droid_mini, agibot, yam",
        ),
        ("nowhere_to_be_found:UR5", "no module 'nowhere_to_be_found'.*PYTHONPATH"),
        ("my_cell_robot.deeper:UR5", "no module 'my_cell_robot.deeper'"),
        (
            "my_cell_robot:UR6",
            "UR6 does not exist. Did you mean 'UR5'.*EMBODIMENT, LIBERO_SIM, UR5",
        ),
        ("my_cell_robot:NOT_A_ROBOT", "NOT_A_ROBOT is a int"),
        ("json", "json:EMBODIMENT does not exist"),
        ("", "unknown embodiment ''"),
        (":UR5", "unknown embodiment ':UR5'"),
        ("my-robot:UR5", "unknown embodiment 'my-robot:UR5'"),
    ],
)
def test_refusals_say_what_is_there(cell, name, message):
    with pytest.raises(UnknownNameError, match=message):
        load_embodiment(name)


BROKEN = {
    "import a_library_that_is_missing": r"ModuleNotFoundError: .*a_library_that_is_missing.*:2\)",
    "from dzrobot.embodiments.templates import side_by_side; side_by_side(1, 2, 3)":
        r"TypeError: side_by_side\(\) takes .*:2\)",
    "def f(:": r"SyntaxError: .*:2\)",
    "import json; json.loads('{')": r"JSONDecodeError: .*:2\)",
}  # fmt: skip


@pytest.mark.parametrize("line", BROKEN)
def test_a_fault_inside_the_users_module_is_two_lines_that_name_its_own(cell, line):
    name = f"my_cell_broken_{list(BROKEN).index(line)}"
    (cell / f"{name}.py").write_text(f"# A robot.\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_embodiment(f"{name}:UR5")
    first, second = str(caught.value).splitlines()
    assert f"the module {name!r} does not import" in first
    assert re.fullmatch(BROKEN[line], second)
    assert str(cell / f"{name}.py") in second


def test_describing_a_robot_imports_nothing_heavy():
    code = (
        "import sys; from dzrobot.embodiments.registry import load_embodiment; "
        "load_embodiment('oxe_droid'); print([m for m in ('torch', 'cv2', 'mujoco') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "[]"


def test_what_checkpoints_of_each_robot_are_shown():
    """Published LIBERO and Franka checkpoints saw one frame per call, DROID's servers keep four."""
    assert {tag: robot.history for tag, robot in EMBODIMENTS.items()} == {
        "libero_sim": "off", "franka_pnp": "off", "oxe_droid": "recent", "libero_mini": "recent",
        "agibot": "recent", "franka_mini": "recent", "droid_mini": "recent",
        "yam": "recent",
    }  # fmt: skip


def test_pictures_of_another_size_are_written_behind_the_name(cell):
    robot = load_embodiment("oxe_droid@240x424")
    assert {view.resolution for view in robot.views} == {(240, 424)}
    known = load_embodiment("oxe_droid")
    assert robot == known.at_resolution(240, 424)
    assert (robot.tag, robot.image_size) == (known.tag, known.image_size)
    assert load_embodiment("my_cell_robot:UR5@48x64").views[0].resolution == (48, 64)
    with pytest.raises(UnknownNameError, match="unknown embodiment 'libero_sim@48'"):
        load_embodiment("libero_sim@48")
    with pytest.raises(ConfigError, match="whole pixels above 0"):
        load_embodiment("libero_sim@0x64")


def test_yam_is_that_of_the_published_recipe():
    """yam_relative.yaml: 14 numbers, all relative; three views of 176 x 320 in quadrants."""
    robot = load_embodiment("yam")
    assert (robot.state_dim, robot.action_dim, robot.image_size) == (14, 14, (352, 640))
    assert [part.name for part in robot.action] == [
        "left_joint_pos", "left_gripper_pos", "right_joint_pos", "right_gripper_pos"
    ]  # fmt: skip
    assert [part.reference for part in robot.action] == list(robot.state_keys)
    top, left, right = robot.video_keys
    assert robot.tiles == ((top, right), (left, None))
    assert (robot.timing.control_hz, robot.timing.action_horizon) == (30, 24)
    assert "top-left view shows the top camera" in robot.prompt


@pytest.mark.parametrize("tag", EMBODIMENTS)
def test_a_description_is_data_and_is_read_back_equal(tag):
    text = json.dumps(description_of(EMBODIMENTS[tag]))
    assert described_embodiment(json.loads(text), "file", CheckpointError) == EMBODIMENTS[tag]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(speed=1), "does not read speed"),
        (lambda d: d["action"][0].update(scale=2.0), r"does not read action\.0\.scale"),
        (lambda d: d["action"][0].update(dim="7"), r"does not read action\.0\.dim"),
        (lambda d: d["views"][0].update(key="wrist"), "must be 'video.<name>'"),
        (lambda d: d["state"][-1].update(encoder="os:system"), "does not read|in no tile|cannot"),
        (lambda d: d.pop("tiles"), "tiles: is missing"),
    ],
)  # fmt: skip
def test_what_a_description_says_beyond_this_version_is_refused(change, message):
    description = description_of(EMBODIMENTS["oxe_droid"])
    change(description)
    with pytest.raises(CheckpointError, match=message):
        described_embodiment(description, "file", CheckpointError)


def test_a_robot_that_holds_code_is_not_described():
    class Odd(Gripper):
        pass

    robot = EMBODIMENTS["libero_sim"]
    sense = replace(robot.state[0], key="state.touch", encoder="touch:Touch")
    odd = replace(robot.action[0], gripper=Odd(index=6))
    assert description_of(replace(robot, state=(*robot.state, sense))) is None
    assert description_of(replace(robot, action=(odd,))) is None
