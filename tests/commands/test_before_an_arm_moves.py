"""What is compared, required and written down before an arm moves."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.franka.fake_devices import HOME, FakeArm
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.make import load_workcell, make_franka
from dzrobot.envs.franka.teaching import assign, teach, workcell_text
from dzrobot.errors import ConfigError, RobotError
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.rollout.evaluation.card import card_digest
from dzrobot.rollout.evaluation.planning import EvaluationRequest, prepare
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec

VIEWS = ("video.image", "video.wrist_image")
FAKE = ["eval", "--env", "dzrobot/Franka-PnP-fake-v0", "--episodes", "1", "--max-steps", "3"]
CELL = """
address: {address}
task: {task}
cameras:
- {{key: video.image, serial: '{serial}'}}
- {{key: video.wrist_image, serial: '2'}}
reset: {{position: [0.4, 0.0, 0.4]}}
gripper: {{preset: gentle}}
limits: {{workspace_low: [0.3, -0.3, 0.02], workspace_high: [0.6, 0.3, 0.6]}}
reward: {{rule: operator}}
"""


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("DZROBOT_LOCK_FOLDER", str(tmp_path))


@pytest.fixture
def cell(tmp_path):
    """Return a function that writes a workcell file of its own."""

    def write(name="cell.yaml", address="172.16.0.2", task="stack the cups", serial="1"):
        path = tmp_path / name
        path.write_text(CELL.format(address=address, task=task, serial=serial))
        return str(path)

    return write


class Looks:
    """A policy that reads observations and never gets to see one here."""

    def __init__(self, robot):
        raise AssertionError("nothing is loaded for an environment that does not fit")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no default policy: give --checkpoint or --policy"),
        (["--checkpoint", "BUNDLED"], "trained for libero_mini, and the environment's robot is"),
        (["--checkpoint", "BUNDLED", "--embodiment", "libero_mini"], "state.state has the shape"),
        (["--policy", f"{__name__}:Looks", "--env-arg", "control_hz=20"], "20 actions per second"),
        (["--policy", f"{__name__}:Looks", "--env-arg", "action={frame: base}"], "frame 'base'"),
    ],
    ids=["no policy", "robot", "state", "rate", "frame"],
)  # fmt: skip
def test_policy_and_arm_are_compared_before_anything_is_opened(words, said, tmp_path, capsys):
    words = [str(default_checkpoint()) if word == "BUNDLED" else word for word in words]
    assert main([*FAKE, *words, "--output", str(tmp_path / "results")]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert not (tmp_path / "results").exists()


def test_no_instruction_is_made_up(cell):
    """What a policy reads and a recording carries was typed by somebody."""
    for address in ("172.16.0.2", "emulated"):
        for task in ("''", "' '"):
            with pytest.raises(ConfigError, match="task"):
                make_franka(workcell=cell(address=address, task=task))
        file = Path(cell(address=address))
        file.write_text(file.read_text().replace("task: stack the cups\n", ""))
        with pytest.raises(ConfigError, match="task"):
            make_franka(workcell=str(file))
        assert make_franka(workcell=str(file), task="wave").config.task == "wave"
    assert load_workcell("fake").task


def test_a_real_arm_is_not_moved_by_default_values(cell):
    with pytest.raises(ConfigError) as error:
        make_franka(address="172.16.0.2", reset={"position": (0.4, 0, 0.4)})
    said = str(error.value)
    needed = (
        "workspace_low", "workspace_high", "reward.rule", "gripper.preset", "task", "init-workcell"
    )  # fmt: skip
    assert all(name in said for name in needed)
    assert "reset.position" not in said
    assert make_franka(workcell=cell()).config.reset.position == (0.4, 0.0, 0.4)
    make_franka(workcell="fake", address="172.16.0.2")


@pytest.mark.parametrize("embodiment", ["franka_pnp", "oxe_droid"])
def test_a_real_arm_needs_its_grippers_preset(cell, embodiment):
    """Nothing is filled in for hardware; an emulated arm has that of the recordings."""
    file = Path(cell())
    text = file.read_text().replace("gripper: {preset: gentle}\n", "")
    views = [view.key for view in load_embodiment(embodiment).views]
    cameras = [{"key": key, "serial": str(i)} for i, key in enumerate(views)]
    file.write_text(text)
    given = {"embodiment": embodiment, "cameras": cameras}
    with pytest.raises(ConfigError, match=r"lacks gripper\.preset\. .*gentle.*published"):
        make_franka(workcell=str(file), **given)
    for hand in ({"preset": "published"}, {"kind": "none"}):
        make_franka(workcell=str(file), gripper=hand, **given)
    emulated = load_workcell("emulated", {"embodiment": embodiment}).gripper
    recorded = {"franka_pnp": ("published", 0.6), "oxe_droid": ("droid", 0.0)}
    assert (emulated.preset, emulated.settle_s) == recorded[embodiment]


def test_a_policy_drives_a_real_arm_slowly_until_someone_says_otherwise(cell, tmp_path, capsys):
    words = [
        "eval",
        "--env",
        "Franka-PnP-v0",
        "--env-arg",
        f"workcell={cell()}",
        "--policy",
        "hold",
    ]
    words += ["--episodes", "1", "--output", str(tmp_path / "results")]
    # Nobody is at a terminal here, so nothing connects.
    assert main(words) == 2
    printed = capsys.readouterr()
    assert "slow_pace" in printed.out
    assert "--unattended" in printed.err
    assert main([*words, "--full-speed"]) == 2
    assert "slow_pace" not in capsys.readouterr().out
    record = ["record", "--workcell", cell(), "--policy", "hold", "--output", str(tmp_path / "set")]
    assert main(record) == 2
    assert "--full-speed" in capsys.readouterr().err


def card_of(**arguments):
    spec = EvalSpec(
        protocol=PROTOCOLS["custom"], suites=(), env="Franka-PnP-v0", tasks=None, episodes=2,
        max_steps=None, seed=0, arguments=arguments,
    )  # fmt: skip
    return prepare(EvaluationRequest(spec=spec, policy=PolicySpec(name="hold"))).card


def test_the_card_holds_the_workcell_but_not_where_it_is(cell):
    card = card_of(workcell=cell())
    elsewhere = card_of(workcell=cell("other.yaml", address="10.0.0.9", serial="77"))
    assert card == elsewhere
    assert "172.16.0.2" not in json.dumps(card)
    assert "franky-control" in card["versions"] or "pyrealsense2" not in card["versions"]
    (suite,) = card["suites"].values()
    assert suite["workcell"]["limits"]["workspace_low"] == [0.3, -0.3, 0.02]
    assert suite["workcell"]["gripper"]["preset"] == "gentle"
    digests = {
        card_digest(card),
        card_digest(card_of(workcell=cell("task.yaml", task="sort the cups"))),
        card_digest(card_of(workcell=cell(), control_hz=5.0)),
        card_digest(card_of(workcell=cell(), firmware="5.8.0")),
        card_digest(card_of(workcell=cell(), slow_first_steps=5)),
    }
    assert len(digests) == 5


class Guided:
    """Answers questions; before each, the hand is where a person has guided it."""

    def __init__(self, arm, places, answers=()):
        self._arm, self._places, self._answers = arm, list(places), list(answers)
        self.asked = []

    def __call__(self, question):
        self.asked.append(question)
        if self._places:
            pose = HOME.copy()
            pose[:3, 3] = self._places.pop(0)
            self._arm.put(pose)
            return ""
        return self._answers.pop(0)


def test_a_workcell_is_taught_on_the_arm(tmp_path):
    arm = FakeArm()
    arm.connect()
    places = [(0.45, 0.0, 0.3), (0.31, -0.2004, 0.0153), (0.62, 0.25, 0.5)]
    guided = Guided(arm, places, ["d"])
    taught = teach(arm, guided)
    assert arm.moves == []
    assert [question.partition(" kept")[0][-9:] for question in guided.asked[2:]] == [
        "1 corner", "2 corners"
    ]  # fmt: skip
    assert "the last at (0.620, 0.250, 0.500) m" in guided.asked[-1]
    assert taught.position == (0.45, 0.0, 0.3)
    assert (taught.low, taught.high) == ((0.31, -0.201, 0.015), (0.62, 0.25, 0.5))
    np.testing.assert_allclose(np.abs(taught.euler), (np.pi, 0, 0), atol=1e-3)
    cameras = assign(["11", "22", "33"], VIEWS, Guided(arm, [], ["9", "2", "0"]))
    assert cameras == {"video.image": "33", "video.wrist_image": "11"}
    described = FrankaConfig(address="172.16.0.2")
    text = workcell_text(
        described, cameras, taught, task="put Anna's cup: upright", firmware="5.8.0"
    )
    (tmp_path / "cell.yaml").write_text(text)
    config = make_franka(workcell=str(tmp_path / "cell.yaml")).config
    assert (config.task, config.firmware) == ("put Anna's cup: upright", "5.8.0")
    assert [camera.serial for camera in config.cameras] == ["33", "11"]
    zed = dict.fromkeys(VIEWS, "/dev/v4l/by-id/usb-ZED-video-index0")
    told = workcell_text(described, zed, taught, task="wave", firmware="")
    (tmp_path / "zed.yaml").write_text(told)
    found = make_franka(workcell=str(tmp_path / "zed.yaml")).config.cameras
    assert [(camera.kind, camera.device) for camera in found] == [("uvc", zed[VIEWS[0]])] * 2
    assert config.limits.workspace_low == (0.31, -0.201, 0.015)
    assert config.reset.position == (0.45, 0.0, 0.3)
    assert config.reward.rule == "operator"
    # Values that are only explained are those of the program.
    default = FrankaConfig()
    assert (config.limits.speed_m_s, config.slow_pace) == (
        default.limits.speed_m_s, default.slow_pace
    )  # fmt: skip
    assert load_workcell(str(tmp_path / "cell.yaml")) == config


def test_a_taught_workcell_of_droid_has_its_gripper_frame_rate_and_law(tmp_path):
    arm = FakeArm()
    arm.connect()
    taught = teach(arm, Guided(arm, [(0.45, 0, 0.3), (0.3, -0.2, 0.02), (0.6, 0.2, 0.5)], ["d"]))
    device = "/dev/serial/by-id/usb-FTDI-if00-port0"
    described = FrankaConfig.model_validate(
        {"address": "172.16.0.2", "embodiment": "oxe_droid",
         "gripper": {"kind": "robotiq", "device": device}}
    )  # fmt: skip
    views = dict(zip(described.robot.video_keys, ("11", "22", "33"), strict=True))
    text = workcell_text(described, views, taught, task="", firmware="")
    assert "begin at [0, -0.628, 0, -2.513, 0, 1.885, 0]" in text
    (tmp_path / "cell.yaml").write_text(text)
    config = load_workcell(str(tmp_path / "cell.yaml"))
    gripper, controller = config.gripper, config.controller
    assert (gripper.kind, gripper.device, gripper.settle_s) == ("robotiq", device, 0.0)
    assert (gripper.preset, gripper.force_n) == ("gentle", 40.0)
    assert "were made with `droid`" in text
    assert {camera.fps for camera in config.cameras} == {30}
    assert controller.joint_stiffness == (40, 30, 50, 25, 35, 25, 10)
    assert controller.cartesian_stiffness == (400, 400, 400, 15, 15, 15)
    assert config.reset.joints == taught.joints
    usual = workcell_text(FrankaConfig(), {}, taught, task="", firmware="")
    assert "begin at" not in usual
    assert "were made with `published`" in usual


@pytest.mark.parametrize(
    ("words", "says"),
    [(("--gripper", "robotiq"), "device"), (("--gripper-device", "/dev/ttyUSB0"), "robotiq")],
)
def test_a_gripper_and_its_device_are_given_together(tmp_path, capsys, words, says):
    path = str(tmp_path / "cell.yaml")
    assert main(["init-workcell", path, "--address", "172.16.0.2", *words]) == 2
    assert says in capsys.readouterr().err


def test_devices_are_not_started_where_there_is_no_answer(tmp_path, capsys, monkeypatch):
    """A connection or the emulated devices would be waited for first."""
    opened = []
    monkeypatch.setattr("dzrobot.commands.init_workcell.write_taught", lambda *_, **__: opened)
    with Path("/dev/null").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["init-workcell", str(tmp_path / "a.yaml"), "--address", "emulated"]) == 2
    assert "standard input has ended" in capsys.readouterr().err
    read, write = os.pipe()
    with os.fdopen(read) as stdin, os.fdopen(write, "w") as typed:
        monkeypatch.setattr("sys.stdin", stdin)
        # What writes there may be waiting for the question.
        assert main(["init-workcell", str(tmp_path / "a.yaml"), "--address", "emulated"]) == 0
        typed.write("\n")
        typed.flush()
        assert main(["init-workcell", str(tmp_path / "a.yaml"), "--address", "emulated"]) == 0


def test_too_little_shown_is_said():
    arm = FakeArm()
    arm.connect()
    with pytest.raises(RobotError, match="two opposite corners"):
        teach(arm, Guided(arm, [(0.4, 0, 0.3), (0.5, 0.2, 0.31)], ["d"]))
    with pytest.raises(RobotError, match="found 1 cameras"):
        assign(["11"], VIEWS, Guided(arm, [], []))


def test_an_existing_file_is_not_written_over(tmp_path, capsys):
    path = tmp_path / "cell.yaml"
    path.write_text("mine")
    assert main(["init-workcell", str(path), "--address", "172.16.0.2"]) == 2
    assert "exists" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert main(["init-workcell", str(tmp_path / "cell"), "--address", "172.16.0.2"]) == 2
    assert ".yaml" in capsys.readouterr().err
