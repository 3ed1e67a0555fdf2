"""Statistics: read strictly, with a fingerprint that follows every number that matters."""

import copy
import json
from dataclasses import replace

import pytest

from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.errors import StatisticsError
from dzrobot.modality.stats import Statistics

LIBERO, DROID = EMBODIMENTS["libero_sim"], EMBODIMENTS["oxe_droid"]


def test_reads_a_file_or_its_content(robot, metadata_maker, tmp_path):
    content = metadata_maker(robot)
    path = tmp_path / "metadata.json"
    path.write_text(json.dumps(content))
    read = Statistics.from_metadata(path, robot)
    assert read == Statistics.from_metadata(str(path), robot)
    assert read == Statistics.from_metadata(content, robot)
    assert read.bounds.keys() == {*robot.state_keys, *robot.action_keys}
    for part in (*robot.state, *robot.action):
        entry = content[robot.tag]["statistics"][part.key.split(".")[0]][part.name]
        low, high = ("min", "max") if part.normalization == "min_max" else ("q01", "q99")
        assert read.bounds[part.key].low == tuple(entry[low])
        assert read.bounds[part.key].high == tuple(entry[high])


def test_other_parts_and_tags_are_left_out(metadata_maker):
    content = metadata_maker(LIBERO)
    more = copy.deepcopy(content)
    more["libero_sim"]["statistics"]["state"]["cartesian"] = {"q01": [0], "q99": [1]}
    more["oxe_droid"] = {}
    assert Statistics.from_metadata(more, LIBERO) == Statistics.from_metadata(content, LIBERO)


def changed(content, path, value):
    content = copy.deepcopy(content)
    at = content
    for name in path[:-1]:
        at = at[name]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return content


STATE = ("libero_sim", "statistics", "state", "state")
REFUSED = {
    "no statistics for the embodiment 'libero_sim'. It holds: none": (("libero_sim",), None),
    "has no 'statistics'": (STATE[:2], None),
    "has no 'state', needed for state.state": (STATE[:3], None),
    "has no 'state', needed for state.state. It has: none": (STATE, None),
    "has no 'q99', which the normalization 'q99' of state.state needs": ((*STATE, "q99"), None),
    "q01 has 2 numbers, state.state of the embodiment has 8": ((*STATE, "q01"), [0, 1]),
    "q01 must be a list of numbers": ((*STATE, "q01"), "0"),
    "q01 holds a number that is not finite": ((*STATE, "q01"), [float("nan")] * 8),
    "lower bound 9.0 above upper": ((*STATE, "q01"), [9] * 8),
    "must be a JSON object, got list": (STATE, [1]),
    "made with relative actions for actions, the embodiment 'libero_sim' has none": (
        ("libero_sim", "relative_action_keys"),
        ["actions"],
    ),
}


@pytest.mark.parametrize(("message", "change"), REFUSED.items(), ids=REFUSED)
def test_refuses(metadata_maker, message, change):
    content = changed(metadata_maker(LIBERO), *change)
    with pytest.raises(StatisticsError, match=message):
        Statistics.from_metadata(content, LIBERO)


def test_refuses_files_that_cannot_be_read(tmp_path):
    with pytest.raises(StatisticsError, match=r"no statistics at .*dzrobot stats"):
        Statistics.from_metadata(tmp_path / "metadata.json", LIBERO)
    (tmp_path / "metadata.json").write_text("{")
    with pytest.raises(StatisticsError, match="not JSON"):
        Statistics.from_metadata(tmp_path / "metadata.json", LIBERO)


def test_relative_statistics_must_be_those_of_the_embodiment(metadata_maker):
    content = metadata_maker(DROID)
    recorded = {"relative_action_keys": ["joint_position"], "action_horizon": 24}
    content["oxe_droid"].update(recorded)
    assert Statistics.from_metadata(content, DROID).tag == "oxe_droid"
    with pytest.raises(StatisticsError, match="over 48 steps, 'oxe_droid' has an action horizon"):
        Statistics.from_metadata(changed(content, ("oxe_droid", "action_horizon"), 48), DROID)
    absolute = changed(content, ("oxe_droid", "relative_action_keys"), [])
    with pytest.raises(StatisticsError, match=r"relative actions for none, .* has joint_position"):
        Statistics.from_metadata(absolute, DROID)


def test_bounds_of_every_step_are_for_relative_actions(metadata_maker):
    content = metadata_maker(DROID)
    joints = ("oxe_droid", "statistics", "action", "joint_position")
    whole = Statistics.from_metadata(content, DROID)
    entry = content["oxe_droid"]["statistics"]["action"]["joint_position"]
    horizon = DROID.timing.action_horizon
    steps = {name: [values] * horizon for name, values in entry.items()}
    read = Statistics.from_metadata(changed(content, joints, steps), DROID)
    assert read.per_step
    assert not whole.per_step
    assert read.fingerprint != whole.fingerprint
    assert read.bounds["action.joint_position"].low == (tuple(entry["q01"]),) * horizon
    for wrong, said in (
        ({**steps, "q01": entry["q01"]}, "one bound is given step by step"),
        (
            {**steps, "q01": steps["q01"][:-1]},
            f"{horizon - 1} lists of numbers: .* {horizon} of them",
        ),
        ({**steps, "q99": [entry["q99"]] * (horizon - 1) + [[0.0]]}, "step 23 has 1 numbers"),
        ({**steps, "q99": [entry["q99"]] * (horizon - 1) + [5]}, "step 23 must be a list"),
    ):
        with pytest.raises(StatisticsError, match=said):
            Statistics.from_metadata(changed(content, joints, wrong), DROID)
    absolute = ("oxe_droid", "statistics", "state", "joint_position", "q01")
    with pytest.raises(StatisticsError, match="is absolute"):
        Statistics.from_metadata(changed(content, absolute, [[0.0] * 7] * horizon), DROID)


def test_fingerprint_follows_what_changes_a_number(metadata_maker):
    content = metadata_maker(DROID)
    prints = [Statistics.from_metadata(content, DROID).fingerprint]
    assert len(prints[0]) == 64
    assert int(prints[0], 16)
    path = ("oxe_droid", "statistics", "state", "gripper_position", "q01")
    prints.append(Statistics.from_metadata(changed(content, path, [-9.0]), DROID).fingerprint)
    absolute = replace(DROID, action=tuple(replace(p, reference=None) for p in DROID.action))
    prints.append(Statistics.from_metadata(content, absolute).fingerprint)
    state = tuple(replace(part, normalization="min_max") for part in DROID.state)
    prints.append(Statistics.from_metadata(content, replace(DROID, state=state)).fingerprint)
    assert len(set(prints)) == 4
    # What no number depends on does not count.
    repainted = replace(DROID, prompt="{task}", crop_scale=0.9)
    assert Statistics.from_metadata(content, repainted).fingerprint == prints[0]
