"""A checkpoint is compared with what it is asked to do."""

import json
from dataclasses import asdict, replace

import cv2
import numpy as np
import pytest
import torch
import yaml

from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.embodiments.spec import Part
from dzrobot.embodiments.timing import Timing
from dzrobot.errors import CheckpointError, DzrobotError, StatisticsError
from dzrobot.modality.stats import Statistics
from dzrobot.policies.base import walk_window
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.passport import (
    PASSPORT_FILE,
    check_compatible,
    check_passport,
    differences,
    passport_for,
    read_passport,
    write_passport,
)
from dzrobot.policies.dreamzero.checkpoints.trained_inputs import (
    FirstImages,
    StateRange,
    TrainedInputs,
    in_small,
)
from dzrobot.policies.dreamzero.network.config import preset
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.policies.dreamzero.tiny import (
    TinyOptions,
    tiny_config,
    tiny_metadata,
    write_tiny_checkpoint,
)


@pytest.fixture(params=sorted(EMBODIMENTS))
def embodiment(request):
    return EMBODIMENTS[request.param]


@pytest.fixture
def passport(embodiment):
    statistics = Statistics.from_metadata(tiny_metadata(embodiment), embodiment)
    config = tiny_config("5b", embodiment)
    return passport_for(embodiment, statistics, config, base="ab" * 32, recipe={"lr": 1e-5})


@pytest.fixture(params=[True, False], ids=["passport", "published"])
def droid(request, tmp_path):
    """Return a checkpoint of the robot with relative actions, and whether it has a passport."""
    options = TinyOptions(with_passport=request.param)
    return write_tiny_checkpoint(
        tmp_path / "droid", EMBODIMENTS["oxe_droid"], options
    ), request.param


def load(folder, embodiment):
    return DreamZeroPolicy.from_pretrained(folder, embodiment=embodiment)


def test_another_action_frame_than_trained_with_is_refused(tmp_path):
    trained = EMBODIMENTS["franka_pnp"]
    folder = write_tiny_checkpoint(tmp_path / "franka", trained, TinyOptions(with_passport=True))
    load(folder, trained)
    with pytest.raises(CheckpointError, match="action frame: checkpoint ee_adjoint, wanted base"):
        load(folder, replace(trained, action_frame="base"))


def test_passport_is_read_back_equal(passport, tmp_path):
    write_passport(tmp_path, passport)
    assert read_passport(tmp_path) == passport
    assert list(differences(passport, passport)) == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(format=99),
        lambda data: data.update(surprise=1),
        lambda data: data.pop("embodiments"),
        lambda data: data.update(embodiments=[]),
        lambda data: data.update(embodiments={"x": {"color": 1}}),
        lambda data: data.update(embodiments={"x": 3}),
    ],
)
def test_damaged_passport(passport, tmp_path, change):
    write_passport(tmp_path, passport)
    data = json.loads((tmp_path / PASSPORT_FILE).read_text())
    change(data)
    (tmp_path / PASSPORT_FILE).write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=PASSPORT_FILE):
        read_passport(tmp_path)


def test_every_difference_is_listed(passport, embodiment):
    tag, trained = next(iter(passport.embodiments.items()))
    other = replace(trained, state_dim=3, action_dim=4, relative=("x",), statistics="cd" * 32)
    asked = replace(
        passport, embodiments={tag: other}, action_horizon=99, frame_size=(1, 2),
        base="ef" * 32, transforms=7,
    )  # fmt: skip
    found = [name for name, *_ in differences(passport, asked)]
    assert found == [
        "frame size", "base weights", "transform version", f"{tag} action horizon",
        f"{tag} state numbers", f"{tag} action numbers", f"{tag} relative actions",
        f"{tag} statistics",
    ]  # fmt: skip
    with pytest.raises(CheckpointError) as error:
        check_passport(passport, asked, "here")
    lines = str(error.value).splitlines()
    assert len(lines) == 2 + len(found)
    assert lines[1] == "  frame size: checkpoint 32 x 64, wanted 1 x 2"
    assert lines[4] == f"  {tag} action horizon: checkpoint {passport.action_horizon}, wanted 99"


def test_what_is_not_recorded_is_not_compared(passport):
    tag = next(iter(passport.embodiments))
    blank = replace(passport.embodiments[tag], statistics=None, relative=None, state_dim=None)
    published = replace(passport, embodiments={tag: blank}, transforms=None, base=None)
    assert list(differences(published, passport)) == []


def test_right_robot(droid):
    load(droid[0], EMBODIMENTS["oxe_droid"])


def test_unknown_tag(droid):
    other = replace(EMBODIMENTS["oxe_droid"], tag="my_droid")
    with pytest.raises(StatisticsError, match=r"no statistics for the embodiment 'my_droid'"):
        load(droid[0], other)


def test_tag_of_other_statistics(droid):
    """Statistics added to metadata.json do not make the weights know the robot."""
    folder, has_passport = droid
    other = replace(EMBODIMENTS["oxe_droid"], tag="my_droid")
    file = folder / "experiment_cfg/metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **tiny_metadata(other)}))
    if has_passport:
        with pytest.raises(
            CheckpointError, match="embodiment: checkpoint oxe_droid, wanted my_droid"
        ):
            load(folder, other)
    else:
        load(folder, other)


def test_horizon(droid):
    other = replace(EMBODIMENTS["oxe_droid"], timing=Timing(control_hz=15, action_horizon=16))
    with pytest.raises(CheckpointError, match="a horizon of 16 actions, the network has"):
        load(droid[0], other)


def test_relative_actions(droid):
    robot = EMBODIMENTS["oxe_droid"]
    absolute = tuple(replace(part, reference=None) for part in robot.action)
    with pytest.raises(
        CheckpointError, match="relative actions: checkpoint joint_position, wanted none"
    ):
        load(droid[0], replace(robot, action=absolute))


def test_absolute_actions(tmp_path):
    robot = EMBODIMENTS["oxe_droid"]
    absolute = replace(robot, action=tuple(replace(part, reference=None) for part in robot.action))
    folder = write_tiny_checkpoint(tmp_path / "absolute", absolute)
    with pytest.raises(
        CheckpointError, match="relative actions: checkpoint none, wanted joint_position"
    ):
        load(folder, robot)


def test_training_config_without_a_word_on_relative_actions(droid):
    folder, has_passport = droid
    file = folder / "experiment_cfg/conf.yaml"
    training = yaml.safe_load(file.read_text())
    del training["relative_action"]
    file.write_text(yaml.safe_dump(training))
    load(folder, EMBODIMENTS["oxe_droid"])
    file.write_text("a: [")
    if not has_passport:
        with pytest.raises(CheckpointError, match=r"conf\.yaml cannot be read.* is not YAML"):
            load(folder, EMBODIMENTS["oxe_droid"])


def test_other_statistics(droid):
    """Only a passport can tell that metadata.json was exchanged."""
    folder, has_passport = droid
    other = tiny_metadata(EMBODIMENTS["oxe_droid"], seed=3)
    (folder / "experiment_cfg/metadata.json").write_text(json.dumps(other))
    if has_passport:
        with pytest.raises(CheckpointError, match=r"oxe_droid statistics: checkpoint .*, wanted"):
            load(folder, EMBODIMENTS["oxe_droid"])
    else:
        load(folder, EMBODIMENTS["oxe_droid"])


def test_part_of_another_size(droid):
    robot = EMBODIMENTS["oxe_droid"]
    state = (*robot.state[:-1], replace(robot.state[-1], dim=2))
    with pytest.raises(DzrobotError, match="gripper_position"):
        load(droid[0], replace(robot, state=state))


def test_frame_size(droid):
    """The same weights told to take another size: the tokens of a frame no longer agree."""
    folder, _ = droid
    config = json.loads((folder / "config.json").read_text())
    config["action_head_cfg"]["config"] |= {"target_video_height": 64, "target_video_width": 64}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="frames of 64 x 64 pixels make 4 tokens"):
        load(folder, EMBODIMENTS["oxe_droid"])


def test_swapped_frame_size(droid):
    folder, has_passport = droid
    config = json.loads((folder / "config.json").read_text())
    config["action_head_cfg"]["config"] |= {"target_video_height": 64, "target_video_width": 32}
    (folder / "config.json").write_text(json.dumps(config))
    if has_passport:
        with pytest.raises(CheckpointError, match="frame size: checkpoint 32 x 64, wanted 64 x 32"):
            load(folder, EMBODIMENTS["oxe_droid"])


class TestCompatible:
    def test_every_embodiment_with_its_own_network(self, embodiment):
        for variant in ("5b", "14b"):
            check_compatible(embodiment, tiny_config(variant, embodiment))

    def test_droid_on_the_published_14b(self):
        """It has no target size: frames come as the robot tiles them."""
        config = preset("14b")
        head = replace(config.head, target_video_height=None, target_video_width=None)
        check_compatible(EMBODIMENTS["oxe_droid"], replace(config, head=head))

    def test_all_reasons_at_once(self):
        robot = EMBODIMENTS["libero_sim"]
        config = tiny_config("5b", robot)
        dit = replace(
            config.dit, max_state_dim=4, action_dim=6, num_action_per_block=12,
            num_frame_per_block=1,
        )  # fmt: skip
        with pytest.raises(CheckpointError) as error:
            check_compatible(robot, replace(config, dit=dit))
        for reason in (
            "a state of 8 numbers, the network takes 4",
            "an action of 7 numbers, the network makes 6",
            "num_action_per_block=12",
            "8 frames per block, the network takes 4",
        ):
            assert reason in str(error.value)


def test_passport_travels_with_the_checkpoint(droid, tmp_path):
    from dzrobot.policies.dreamzero.checkpoints.convert import ConvertOptions, convert

    folder, has_passport = droid
    done = convert([folder], tmp_path / "copy", ConvertOptions(dtype=torch.float32))
    assert open_checkpoint(done.path).own_passport == open_checkpoint(folder).own_passport
    assert (done.path / PASSPORT_FILE).exists() == has_passport
    load(done.path, EMBODIMENTS["oxe_droid"])


def test_an_embodiment_of_ones_own(tmp_path, libero):
    """A robot that is described nowhere in the library: one value is enough."""
    robot = replace(
        libero, tag="ur5_tabletop", timing=Timing(control_hz=10, action_horizon=8),
        state=(Part(key="state.joints", feature="observation.state", dim=6),),
        action=(Part(key="action.joints", feature="action", dim=6, reference="state.joints"),),
    )  # fmt: skip
    folder = write_tiny_checkpoint(tmp_path / "ur5", robot, TinyOptions(with_passport=True))
    assert load(folder, robot).embodiment == robot
    # The checkpoint describes it: no module is needed.
    assert load(folder, None).embodiment == robot
    passport = json.loads((folder / PASSPORT_FILE).read_text())
    del passport["embodiments"]["ur5_tabletop"]["description"]
    (folder / PASSPORT_FILE).write_text(json.dumps(passport))
    with pytest.raises(CheckpointError, match=r"does not describe it.*embodiment='module:NAME'"):
        load(folder, None)


LIBERO = EMBODIMENTS["libero_sim"]
TASK = "put the red cup on the plate"
TURNED = {
    "upside down": lambda image: image[::-1],
    "mirrored": lambda image: image[:, ::-1],
    "turned by 180 degrees": lambda image: image[::-1, ::-1],
    "turned by 90 degrees to the left": np.rot90,
    "with red and blue exchanged": lambda image: image[..., ::-1],
    "one color throughout": np.zeros_like,
    "cropped": lambda image: cv2.resize(image[26:230, 26:230], (256, 256)),
    "letterboxed": lambda image: cv2.copyMakeBorder(
        cv2.resize(image, (256, 192)), 32, 32, 0, 0, cv2.BORDER_CONSTANT
    ),
}
UNITS = {
    "1000 times": lambda state: state * np.float32(1000),
    "in degrees, not radians": lambda state: state * np.float32(180 / np.pi),
    "recorded 5": lambda state: state[[0, 1, 2, 5, 4, 3, 6, 7]],
    "0 throughout": np.zeros_like,
}


def scene(number):
    """Return what a robot sees first: the same room, things and hand at other places."""
    room = np.random.default_rng(1).integers(40, 216, (8, 8, 3)).astype(np.uint8)
    rng = np.random.default_rng([2, number])
    seen = {LIBERO.language: TASK}
    for key, turn in zip(LIBERO.video_keys, (0, 2), strict=True):
        image = np.kron(np.roll(room, turn, 1), np.ones((32, 32, 1), np.uint8))
        row, column = rng.integers(0, 220, 2)
        image[row : row + 30, column : column + 30] = (200, 30, 30)
        seen[key] = image
    pose = [-0.1, 0.02, 1.2, 3.1, -0.3, 1.4, 0.04, -0.04]
    seen["state.state"] = (pose + rng.normal(0, 0.02, 8)).astype(np.float32)
    return seen


def inputs(episodes, **changes):
    """Return what a passport holds of so many recordings of the scene."""
    first = [scene(number) for number in range(episodes)]
    state = np.stack([one["state.state"] for one in first])
    moved = np.concatenate([state + delta for delta in (-0.1, 0, 0.1)])
    given = {
        "instructions": (TASK,), "tasks": 1, "fps": 20.0,
        "images": {
            key: FirstImages.of(np.stack([in_small(one[key]) for one in first]))
            for key in LIBERO.video_keys
        },
        "states": {"state.state": StateRange.of(moved, state)},
    }  # fmt: skip
    return TrainedInputs(**given | changes)


@pytest.mark.parametrize("episodes", [2, 5, 20])
def test_a_scene_like_the_trained_ones_is_not_unlike_them(episodes):
    trained = inputs(episodes)
    found = [trained.unlike(scene(100 + number), LIBERO) for number in range(30)]
    assert not [one for one in found if one]


@pytest.mark.parametrize("name", TURNED)
def test_a_first_image_says_how_it_was_turned(name):
    view, other = LIBERO.video_keys
    seen = scene(100)
    changed = {**seen, view: np.ascontiguousarray(TURNED[name](seen[view]))}
    [found] = inputs(5).unlike(changed, LIBERO)
    assert found.startswith(f"{view} is ")
    assert name in found
    exchanged = {**seen, view: seen[other], other: seen[view]}
    assert len(inputs(5).unlike(exchanged, LIBERO)) == 2
    assert f"what was recorded as {other}" in inputs(5).unlike(exchanged, LIBERO)[0]


@pytest.mark.parametrize("name", UNITS)
def test_a_first_state_says_what_it_is(name):
    seen = scene(100)
    [found] = inputs(5).unlike({**seen, "state.state": UNITS[name](seen["state.state"])}, LIBERO)
    assert found.startswith("state.state: ")
    assert name in found


def test_a_state_elsewhere_is_not_called_another_unit():
    seen = scene(100)
    seen["state.state"][1] = 0.6
    [found] = inputs(5).unlike(seen, LIBERO)
    assert found == "state.state: number 1 differs, and nothing that was tried explains it"


def test_an_instruction_that_was_not_trained_is_told():
    seen = {**scene(100), LIBERO.language: "close the drawer"}
    [found] = inputs(5).unlike(seen, LIBERO)
    assert found == (
        f"the instruction 'close the drawer' is not the one that it was trained on, {TASK!r}"
    )
    [found] = inputs(5, instructions=(TASK, "b"), tasks=2).unlike(seen, LIBERO)
    assert found.endswith("none of the 2 that it was trained on")
    # Spelled otherwise, or where not all are kept, nothing is known to be wrong.
    spelled = {**seen, LIBERO.language: f"{TASK.upper()}."}
    assert inputs(5).unlike(spelled, LIBERO) == []
    assert inputs(5, tasks=65).unlike(seen, LIBERO) == []


def test_a_policy_says_once_what_its_first_observation_has_that_training_had_not(tmp_path, caplog):
    folder = write_tiny_checkpoint(tmp_path / "c", LIBERO, TinyOptions(with_passport=True))
    seen = scene(100)
    turned = {**seen, **{key: seen[key][::-1].copy() for key in LIBERO.video_keys}}

    def first(observation):
        policy = load(folder, LIBERO)
        caplog.clear()
        for _ in walk_window(policy, "warm-up"):
            pass
        for session in "ab":
            policy.reset(session)
            policy.act(observation, session=session)
        return [one.message for one in caplog.records if "unlike" in one.message]

    # Checkpoints of before say nothing.
    assert first(turned) == []
    passport = read_passport(folder)
    trained = replace(passport.embodiments[LIBERO.tag], inputs=inputs(5))
    write_passport(folder, replace(passport, embodiments={LIBERO.tag: trained}))
    assert read_passport(folder).embodiments[LIBERO.tag].inputs == inputs(5)
    assert first(seen) == []
    [said] = first(turned)
    assert all(f"{key} is upside down" in said for key in LIBERO.video_keys)


@pytest.mark.parametrize("text", ["AAAA", "not base64!"])
def test_a_damaged_mean_image_is_refused(tmp_path, text):
    folder = write_tiny_checkpoint(tmp_path / "c", LIBERO, TinyOptions(with_passport=True))
    passport = json.loads((folder / PASSPORT_FILE).read_text())
    kept = json.loads(json.dumps(asdict(inputs(2))))
    kept["images"][LIBERO.video_keys[0]]["mean"] = text
    passport["embodiments"][LIBERO.tag]["inputs"] = kept
    (folder / PASSPORT_FILE).write_text(json.dumps(passport))
    with pytest.raises(CheckpointError, match="a mean image"):
        read_passport(folder)
