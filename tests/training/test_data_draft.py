"""A robot drafted from data: right or open, never wrong, over seeded sets of every kind."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError, DatasetError
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.training.data.column_mapping import group_of, number_names
from dzrobot.training.data.draft import draft_robot
from dzrobot.training.data.draft_file import robot_file

GROUPS = ["left_arm", "left_gripper", "right_arm", "right_gripper"]
NAMES = [
    f"{side}_{name}"
    for side in ("left", "right")
    for name in (*(f"joint_{i}" for i in range(6)), "gripper")
]
HZ = 20


def walk(rng, rows, width):
    """Return smooth positions (rows, width), as of an arm that is led to places in turn."""
    corners = rng.uniform(-1, 1, (rows // 25 + 3, width))
    at = np.linspace(0, len(corners) - 1.001, rows)
    low = at.astype(int)
    share = (1 - np.cos(np.pi * (at - low)))[:, None] / 2
    return corners[low] * (1 - share) + corners[low + 1] * share


def world(kind, gripper, seed, rows=160):
    """Return states and actions (rows, 14) of one episode."""
    rng = np.random.default_rng([seed, rows])
    state = walk(rng, rows + 4, 14)
    hands = [6, 13]
    closed = (np.arange(rows + 4) // 23 % 2)[:, None] * np.ones(2)
    state[:, hands] = closed if gripper == "binary" else walk(rng, rows + 4, 2)
    now = state[:rows]
    noise = rng.normal(0, 0.01, (rows, 14))
    action = {
        "absolute": state[3 : rows + 3] + noise,
        "difference": state[1 : rows + 1] - now + noise / 50,
        "command": (state[1 : rows + 1] - now) * 12 + noise / 5,
        "unrelated": rng.normal(size=(rows, 14)),
    }[kind]
    if gripper == "binary":
        action[:, hands] = closed[:rows]
    elif kind == "unrelated":
        action[:, hands] = rng.uniform(-1, 1, (rows, 2))
    return now, action


def written(root, episodes, names, *, fps=HZ, gap_s=1 / HZ, features=None):
    """Write a LeRobot v2.1 folder of numbers alone; cameras are only named."""
    (root / "data/chunk-000").mkdir(parents=True)
    (root / "meta").mkdir()
    lengths = [len(state) for state, _ in episodes]
    for number, (state, action) in enumerate(episodes):
        rows = len(state)
        table = {
            "observation.state": pa.array(list(np.float32(state))),
            "action": pa.array(list(np.float32(action))),
            "timestamp": np.arange(rows, dtype=np.float32) * np.float32(gap_s),
            "episode_index": np.full(rows, number),
            "task_index": np.zeros(rows, np.int64),
        }
        pq.write_table(pa.table(table), root / f"data/chunk-000/episode_{number:06d}.parquet")
    width = episodes[0][0].shape[1]
    camera = {"dtype": "video", "shape": [48, 64, 3], "names": ["height", "width", "channels"]}
    info = {
        "codebase_version": "v2.1", "fps": fps, "total_episodes": len(episodes),
        "total_frames": sum(lengths), "total_tasks": 1, "chunks_size": 1000,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/{video_key}/episode_{episode_index:06d}.mp4",
        "features": {
            "observation.state": {"dtype": "float32", "shape": [width], "names": names},
            "action": {"dtype": "float32", "shape": [width], "names": names},
            **(features or {"observation.images.front": camera}),
            **{
                name: {"dtype": "int64", "shape": [1], "names": None}
                for name in ("timestamp", "episode_index", "task_index")
            },
        },
    }  # fmt: skip
    (root / "meta/info.json").write_text(json.dumps(info))
    lists = [{"episode_index": i, "tasks": ["go"], "length": n} for i, n in enumerate(lengths)]
    (root / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, lists)) + "\n")
    (root / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "go"}) + "\n")
    return DatasetCatalog.open(root)


def loaded(catalog, folder, monkeypatch, **how):
    """Return the robot of the drafted file, as a user's module."""
    monkeypatch.chdir(folder)
    name = f"robot_{abs(hash(folder))}"
    (folder / f"{name}.py").write_text(robot_file(draft_robot(catalog, **how), "ours"))
    return load_embodiment(f"{name}:ROBOT")


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("gripper", ["binary", "continuous"])
@pytest.mark.parametrize("kind", ["absolute", "difference", "command", "unrelated"])
def test_kinds_and_grippers_are_right_or_open(kind, gripper, seed, tmp_path, monkeypatch):
    order = np.random.default_rng(seed).permutation(14) if seed else np.arange(14)
    episodes = [world(kind, gripper, 10 * seed + n) for n in range(3)]
    episodes = [(state[:, order], action[:, order]) for state, action in episodes]
    names = [NAMES[i] for i in order]
    robot = loaded(written(tmp_path / "set", episodes, names), tmp_path, monkeypatch)
    assert robot.timing.control_hz == HZ
    assert sum(part.dim for part in robot.action) == 14
    found = set()
    for part in robot.action:
        numbers = names[part.start or 0 :][: part.dim]
        arm = [i for i, name in enumerate(numbers) if "joint" in name]
        if part.gripper is not None:
            assert gripper == "binary"
            assert "gripper" in numbers[part.gripper.index]
            assert (part.gripper.low, part.gripper.high) == (0.0, 1.0)
            found.add(numbers[part.gripper.index])
        if arm:
            relative = part.reference is not None
            assert relative <= (kind == "absolute")
            assert (part.hold == "zero") <= (kind in ("difference", "command"))
            assert (part.hold is None) <= (kind == "unrelated")
        if part.reference is not None:
            state = next(one for one in robot.state if one.key == part.reference)
            assert names[state.start or 0 :][: state.dim] == numbers
    if not seed:
        # Whole groups, so that nothing needs to stay open.
        assert [part.name for part in robot.action] == GROUPS
        assert found == ({"left_gripper", "right_gripper"} if gripper == "binary" else set())


def test_what_needs_an_answer_is_refused_by_name_when_it_is_used(tmp_path, monkeypatch):
    catalog = written(tmp_path / "set", [world("absolute", "binary", 1)], NAMES, fps=10)
    with pytest.raises(ConfigError, match=r"control_hz: info\.json says 10; .*0\.05 s apart"):
        loaded(catalog, tmp_path, monkeypatch)


def test_more_numbers_than_a_network_takes(tmp_path, monkeypatch):
    wide = [np.concatenate([part] * 3, axis=1) for part in world("absolute", "continuous", 3)]
    names = [f"{limb}_{name}" for limb in ("a", "b_leg", "c_base") for name in NAMES]
    catalog = written(tmp_path / "set", [tuple(wide)], names)
    with pytest.raises(ConfigError, match="42 numbers, the network takes 32"):
        loaded(catalog, tmp_path, monkeypatch)
    still = [part.copy() for part in wide]
    still[1][:, 28:] = 0.0
    # What never moves makes room, and is named.
    draft = draft_robot(written(tmp_path / "still", [tuple(still)], names))
    assert sum(len(one.part.numbers) for one in draft.action) == 28
    assert {one.kind for one in draft.left_out} == {"still"}
    assert "is left out: its" in robot_file(draft, "ours")
    with pytest.raises(DatasetError, match="there is no part 'left_wing'"):
        draft_robot(catalog, without=["left_wing"])


def test_names_of_a_dataset_stay_names(tmp_path, monkeypatch):
    """A file of Python is written from texts of a stranger: none of them may become code."""
    names = [f"{name}\nraise SystemExit('x')\n'''\"\"\"" for name in NAMES]
    camera = {"dtype": "video", "shape": [48, 64, 3], "names": ["height", "width", "channels"]}
    features = {"observation.images.a'\nraise SystemExit(1)#": camera}
    catalog = written(tmp_path / "set", [world("absolute", "binary", 1)], names, features=features)
    robot = loaded(catalog, tmp_path, monkeypatch)
    assert robot.views[0].feature == next(iter(features))


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("kLeftShoulderPitch", "left_arm"), ("kRightHandThumbBend", "right_hand"),
        ("left.joint_1.pos", "left_arm"), ("gripper.pos", "gripper"), ("base_x", "base"),
        ("shoulder_lift.pos", "arm"), ("waistYaw", "torso"), ("head_pan", "head"),
    ],
)  # fmt: skip
def test_names_say_what_they_belong_to(name, group):
    assert group_of(name) == group


@pytest.mark.parametrize(
    "names", [["a", "b"], [["a", "b"]], {"motors": ["a", "b"]}, {"a": 0, "b": 1}]
)
def test_names_are_read_whichever_way_they_are_nested(names):
    assert number_names(names, 2) == ["a", "b"]
    assert number_names(names, 3) is None


def test_the_command_writes_once_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "set", [world("absolute", "binary", n) for n in range(2)], NAMES)
    assert main(["init-robot", "set", "--output", "our_robot.py"]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 episodes lack a file" in said
    assert "no contact sheet" in said
    assert main(["init-robot", "set", "--output", "our_robot.py"]) == 2
    assert "exists" in capsys.readouterr().err
