"""``dzrobot doctor data``: every fault that is put into a good dataset is named, and no other."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

from dzrobot.cli import main
from dzrobot.diagnostics.checkup import check_answers, examine
from dzrobot.diagnostics.commanded import check_commands
from dzrobot.diagnostics.motion import Bench, RecordedStart
from dzrobot.diagnostics.recorded import read_episodes
from dzrobot.embodiments.action_conventions import HandMotion
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs import action_space, observation_space
from dzrobot.envs.panda.poses import rotation_about, rotation_of, rotation_vector
from dzrobot.recording import EpisodeWriter
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.rollout.demonstrations.collection import CollectionPlan, collect
from dzrobot.rollout.demonstrations.record import RecordedActions
from dzrobot.rollout.environment import look_at, needed_robot

HAND = HandMotion(
    position=slice(0, 3), rotation=slice(3, 6), rotation_form="rotation vector",
    fingers=slice(6, 8), translation=slice(0, 3), turn=slice(3, 6), gripper=6, closes=1,
    translation_m=0.02, rotation_rad=0.05,
)  # fmt: skip
ROBOT = replace(
    load_embodiment("libero_sim"),
    views=tuple(
        replace(view, resolution=(16, 16), size=(16, 16))
        for view in load_embodiment("libero_sim").views
    ),
)
MOVE, TURN, GRIPPER = HAND.translation, HAND.turn, HAND.gripper


class HandEnv(gym.Env):
    """A hand that follows its commands a little late; once it closes at the mark, it is done."""

    metadata = {"render_modes": []}  # noqa: RUF012
    hand = HAND
    embodiment = ROBOT
    task = "close at the mark"
    init_states = 50

    def __init__(self, **given):
        self.given = given
        self.observation_space = observation_space(ROBOT, {"state.state": (-10.0, 10.0)})
        self.action_space = action_space(ROBOT)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start = (options or {}).get("init_state_id", seed or 0)
        generator = np.random.default_rng(self.start)
        self.at = np.array([0.4, 0.0, 1.0]) + generator.uniform(-0.02, 0.02, 3)
        self.mark = self.at + generator.uniform([0.1, 0.05, -0.3], [0.2, 0.15, -0.2])
        self.axes = rotation_about([2.2, 0.2, -0.4])
        self.pace, self.open, self.done = np.zeros(6), 0.04, False
        return self._seen(), self._info()

    def step(self, action):
        asked = np.clip(action, -1, 1).astype(np.float64)
        self.pace = 0.4 * self.pace + 0.6 * asked[:6]
        self.at = self.at + 0.02 * self.pace[:3]
        self.axes = rotation_about(0.05 * self.pace[3:]) @ self.axes
        was, self.open = self.open, float(np.clip(self.open - 0.008 * np.sign(asked[6]), 0, 0.04))
        near = np.linalg.norm(self.mark - self.at) < 0.03
        self.done = self.done or bool(near and self.open < 0.02 < was)
        return self._seen(), float(self.done), False, False, self._info()

    def _seen(self):
        vector = rotation_vector(self.axes)
        image = np.zeros((16, 16, 3), np.uint8)
        image[:4, :4], image[10:, :2], image[4:6, 12:] = (200, 40, 0), (0, 90, 30), (10, 20, 250)
        wrist = np.full_like(image, 90)
        wrist[2:9, 3:5], wrist[11:13, 6:], wrist[:3, 9:] = (20, 200, 40), (240, 30, 60), (0, 0, 120)
        return {
            "video.image": image,
            "video.wrist_image": wrist,
            "state.state": np.array([*self.at, *vector, self.open, -self.open], np.float32),
            "annotation.task": self.task,
        }

    def _info(self):
        return {
            "is_success": self.done, "task": self.task, "init_state_id": self.start,
            "reset_reason": "",
        }  # fmt: skip


gym.register("Hand-v0", entry_point=HandEnv)
ENV = f"{__name__}:Hand-v0"


def demonstration(start):
    """Return what a hand that knows the mark does: states, actions and first images."""
    env = HandEnv()
    seen, _ = env.reset(options={"init_state_id": start})
    images = {key: seen[key] for key in ROBOT.video_keys}
    states, actions = [], []
    for row in range(60):
        toward = np.clip((env.mark - env.at) / 0.06, -0.9, 0.9)
        arrived = np.linalg.norm(env.mark - env.at) < 0.01
        turn = 0.5 * np.sin(row / 5 + np.array([0.0, 1.0, 3.0]))
        action = np.array([*toward, *turn, 1 if arrived else -1], np.float32)
        states.append(seen["state.state"])
        actions.append(action)
        seen, _, _, _, info = env.step(action)
    assert info["is_success"]
    recording = RecordedActions(np.stack(actions), np.stack(states), start, 0, True)
    return RecordedStart(number=start, recording=recording, images=images)


@pytest.fixture(scope="module")
def good():
    """Return three good episodes."""
    return [demonstration(start) for start in (3, 4, 5)]


def acted(change):
    """Return a fault in actions (T, A), which may look at the states (T, S)."""

    def put(one):
        actions = change(one.recording.actions.copy(), one.recording.states)
        return replace(one, recording=replace(one.recording, actions=actions.astype(np.float32)))

    return put


def seen(change):
    """Return a fault in the states (T, S)."""

    def put(one):
        states = change(one.recording.states.astype(np.float64))
        return replace(one, recording=replace(one.recording, states=states.astype(np.float32)))

    return put


def cut(actions, states):
    """Return a fault in which rows belong together: slices of actions and states."""

    def put(one):
        rows = replace(
            one.recording,
            actions=one.recording.actions[actions],
            states=one.recording.states[states],
        )
        return replace(one, recording=rows)

    return put


def shown(change):
    """Return a fault in the images, by key."""
    return lambda one: replace(one, images=change(one.images))


def times(columns, factor):
    """Return a change of the scale of some columns."""

    def change(rows, _=None):
        rows[:, columns] *= factor
        return rows

    return change


def in_reversed_order(rows, _=None):
    """Write the three numbers of a rotation z, y, x; the same columns in state and action."""
    rows[:, TURN] = rows[:, TURN][:, ::-1]
    return rows


def in_order(*order):
    """Return a change of the order in which a translation is written."""

    def change(rows, _=None):
        rows[:, MOVE] = rows[:, MOVE][:, list(order)]
        return rows

    return change


def other_way(states):
    """Write each rotation vector the other way around."""
    length = np.linalg.norm(states[:, HAND.rotation], axis=1, keepdims=True)
    states[:, HAND.rotation] *= 1 - 2 * np.pi / length
    return states


def poses(hand):
    """Return a change of differences to target poses."""

    def change(actions, states):
        for action, state in zip(actions, states, strict=True):
            turned = rotation_about(hand.rotation_rad * action[TURN].astype(np.float64))
            action[MOVE] = state[hand.position] + hand.translation_m * action[MOVE]
            action[TURN] = rotation_vector(turned @ rotation_about(state[hand.rotation]))
        return actions

    return change


def as_zero_or_one(actions, _):
    """Write the gripper as openness, 0 or 1."""
    actions[:, GRIPPER] = actions[:, GRIPPER] < 0
    return actions


def both(one, other):
    """Return two faults at once."""
    return lambda episode: other(one(episode))


IMAGE_FAULTS = {
    "upside down": (
        shown(lambda images: {k: v[::-1] for k, v in images.items()}),
        {"image: video.image": "upside down", "image: video.wrist_image": "upside down"},
    ),
    "mirrored": (
        shown(lambda images: {k: v[:, ::-1] for k, v in images.items()}),
        {"image: video.image": "mirrored", "image: video.wrist_image": "mirrored"},
    ),
    "views swapped": (
        shown(lambda images: dict(zip(images, reversed(images.values()), strict=True))),
        {"image: video.image": "what the environment's video.wrist_image shows",
         "image: video.wrist_image": "what the environment's video.image shows"},
    ),
    "one view's colors": (
        shown(
            lambda images: {
                key: image[..., ::-1] if key == "video.image" else image
                for key, image in images.items()
            }
        ),
        {"image: video.image": "red and blue exchanged"},
    ),
    "turned": (
        shown(lambda images: {k: np.rot90(v) for k, v in images.items()}),
        {"image: video.image": "turned by 90 degrees to the left",
         "image: video.wrist_image": "turned by 90 degrees to the left"},
    ),
    "dark": (
        shown(lambda images: {k: (v * 0.5).astype(np.uint8) for k, v in images.items()}),
        {"image: video.image": "is 0.5 times as bright",
         "image: video.wrist_image": "is 0.5 times as bright"},
    ),
    "black": (
        shown(lambda images: {k: 0 * v if k == "video.image" else v for k, v in images.items()}),
        {"image: video.image": "is one color throughout"},
    ),
}  # fmt: skip
MOTION_FAULTS = {
    "gripper sign": (acted(times(GRIPPER, -1)), {"gripper sign": "action[6]"}),
    "gripper range": (acted(as_zero_or_one), {"gripper range": "use 1 - 2 g"}),
    "delta scale": (acted(times(MOVE, 0.5)), {"delta scale of the translation": "times as far"}),
    "antipode": (seen(other_way), {"axis-angle antipode": "other way"}),
    "rotation order": (acted(in_reversed_order), {"rotation order": "z, y, x"}),
    "state's order": (seen(in_reversed_order), {"rotation order of the state": "z, y, x"}),
    "slower": (cut(slice(None, None, 2), slice(None, None, 2)), {"frame rate": "2 times slower"}),
    "after": (cut(slice(None, -1), slice(1, None)), {"off by one": "actions 1 up"}),
    "before": (cut(slice(1, None), slice(None, -1)), {"off by one": "actions 1 down"}),
    "two at once": (
        both(acted(times(GRIPPER, -1)), acted(in_reversed_order)),
        {"gripper sign": "action[6]", "rotation order": "z, y, x"},
    ),
}


def faults(episodes, bench, robot, hand):
    found = list(examine(episodes, bench, robot, hand))
    return {line.what: line.found for line in found if line.verdict == "fail"}, found


def check_named(episodes, fault, expected, bench, robot, hand):
    named, found = faults([fault(one) for one in episodes], bench, robot, hand)
    assert named.keys() == expected.keys(), found
    for what, words in expected.items():
        assert words in named[what]


@pytest.fixture(scope="module")
def bench():
    with Bench(ENV, {}, ROBOT) as opened:
        yield opened


def test_a_good_dataset_passes(good, bench):
    named, found = faults(good, bench, ROBOT, HAND)
    assert named == {}
    assert [line.verdict for line in found] == ["ok"] * 5
    assert found[-1].found == "3 of 3 succeed again"


OWN = {
    "absolute": (acted(poses(HAND)), {"absolute instead of delta": "target poses"}),
    "rotation's scale": (acted(times(TURN, 2)), {"delta scale of the rotation": "by 0.5"}),
    "both scales": (
        both(acted(times(MOVE, 0.4)), acted(times(TURN, 0.4))),
        {"delta scale of the translation, delta scale of the rotation": "action[3:6] by 2."},
    ),
    "axes exchanged": (acted(in_order(1, 0, 2)), {"translation axes exchanged": "written y, x, z"}),
    "axes turned": (acted(in_order(1, 2, 0)), {"translation axes exchanged": "written y, z, x"}),
    "axis mirrored": (acted(times(2, -1)), {"translation mirrored": "sign of action[2]"}),
    "inverted turn": (acted(times(TURN, -1)), {"rotation sign": "other way"}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*IMAGE_FAULTS, *MOTION_FAULTS, *OWN])
def test_a_fault_is_named_and_no_other(name, good, bench):
    fault, expected = (IMAGE_FAULTS | MOTION_FAULTS | OWN)[name]
    check_named(good, fault, expected, bench, ROBOT, HAND)


def test_what_mends_a_dataset_makes_it_succeed(good, bench):
    wrong = [acted(times(GRIPPER, -1))(one) for one in good]
    last = list(examine(wrong, bench, ROBOT, HAND))[-1]
    assert (last.what, last.found) == (
        "success", "0 of 3 succeed again, and 3 of 3 once the actions are changed as said",
    )  # fmt: skip


def test_without_initial_states_the_rest_is_judged(good, bench):
    blind = [replace(e, recording=replace(e.recording, start=None, seed=None)) for e in good]
    named, found = faults([acted(times(GRIPPER, -1))(e) for e in blind], bench, ROBOT, HAND)
    assert named.keys() == {"gripper sign"}
    unknown = {line.what for line in found if "cannot be judged" in line.found}
    assert unknown == {"axis-angle", "success"}


def test_motion_that_nothing_explains_is_a_fault_unless_noise_does(good, bench):
    generator = np.random.default_rng(0)

    def noisy(actions, _):
        actions[:, :6] += generator.normal(0, 0.4, actions[:, :6].shape)
        return actions

    wrong = [acted(noisy)(one) for one in good]
    assert "motion" in faults(wrong, bench, ROBOT, HAND)[0]
    found = list(examine(wrong, bench, ROBOT, HAND, noise=0.4))
    assert "noise of 0.4" in next(line for line in found if line.what == "motion").found
    assert "fail" not in {line.verdict for line in found}


def answered(one, change=lambda actions, _: actions):
    """Return an episode in which noise was added to the actions, with these, changed."""
    actions, states = one.recording.actions, one.recording.states
    noise = np.random.default_rng(one.number).normal(0, 0.2, actions.shape).astype(np.float32)
    noise[:, GRIPPER] = 0
    answers = change(actions.copy(), states).astype(np.float32)
    return replace(acted(lambda rows, _: rows + noise)(one), answers=answers)


def ahead(actions, _):
    """Write each action two rows early."""
    return np.concatenate([actions[2:], np.repeat(actions[-1:], 2, 0)])


ANSWERS = {
    "gripper sign": times(GRIPPER, -1),
    "gripper range": as_zero_or_one,
    "rotation order": in_reversed_order,
    "rotation sign": times(TURN, -1),
    "absolute instead of delta": poses(HAND),
    "translation axes exchanged": in_order(1, 0, 2),
    "translation mirrored": times(0, -1),
    "delta scale of the translation": times(MOVE, 0.4),
    "delta scale of the rotation": times(TURN, 2),
    "off by 2": ahead,
}


def test_recorded_actions_are_compared_with_what_was_executed_in_their_rows(good, bench):
    """A policy learns the former: that what was executed leads to success again does not help."""
    assert not list(check_answers(list(map(answered, good)), bench, HAND))
    for what, change in ANSWERS.items():
        wrong = [answered(one, change) for one in good[:1]]
        assert [one.what for one in check_answers(wrong, bench, HAND)] == [what], what
    (one, *_) = good
    wrong = [replace(one, answers=ahead(one.recording.actions, None))]
    named, _ = faults(wrong, bench, ROBOT, HAND)
    assert named.keys() == {"off by 2"}
    assert "executed in the same rows" in named["off by 2"]


def written(root, episodes, task=HandEnv.task):
    """Write ``episodes`` as a dataset whose every row shows the first images."""
    with EpisodeWriter(root, ROBOT, fps=20) as writer:
        for one in episodes:
            for state, action in zip(one.recording.states, one.recording.actions, strict=True):
                rows = {**one.images, "state.state": state, "annotation.task": task}
                writer.add_frame(rows, action)
            writer.save_episode(success=True, seed=0, init_state_id=one.recording.start)
    return root


def test_the_command_says_what_is_wrong_by_its_exit_code(good, tmp_path, capsys):
    root = written(tmp_path / "good", good)
    assert main(["doctor", "data", str(root), "--env", ENV, "--episodes", "2"]) == 0
    assert "2 of 2 succeed again" in capsys.readouterr().out
    swapped, _ = IMAGE_FAULTS["views swapped"]
    wrong = [swapped(acted(times(GRIPPER, -1))(one)) for one in good]
    assert main(["doctor", "data", str(written(tmp_path / "bad", wrong)), "--env", ENV]) == 1
    out = capsys.readouterr().out
    assert "what the environment's video.wrist_image shows" in out
    assert "gripper sign" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{root}", "--env", "nobody/knows-v0"], "unknown environment"),
        (["{root}", "--env", "dzrobot/point-v0"], "has no episode of"),
        (["{root}/nothing", "--env", ENV], "holds no"),
    ],
)
def test_what_cannot_be_looked_at_is_one_message(words, said, good, tmp_path, capsys):
    root = written(tmp_path / "set", good[:1])
    assert main(["doctor", "data", *(word.format(root=root) for word in words)]) == 2
    assert said in capsys.readouterr().err


ARM = replace(HAND, rotation_form="euler", frame="ee", closes=-1)


def arm_recording(frame="ee", scale=1.0):
    """Return what an arm recorded that follows late: actions along the axes of the hand."""
    generator = np.random.default_rng(1)
    at, angles, pace, width = (
        np.array([0.3, 0.1, 0.4]),
        np.array([0.3, 0.2, 0.8]),
        np.zeros(3),
        0.08,
    )
    states, actions = [], []
    for row in range(120):
        if row % 10 == 0:
            move = generator.uniform(-1, 1, 3)
        gripper = -1.0 if 40 <= row < 80 else 1.0
        states.append([*at, *angles, width, width])
        actions.append([*move, 0, 0, 0, gripper])
        wanted = rotation_of(angles) @ move if frame == "ee" else move
        pace = 0.6 * pace + 0.4 * wanted
        at = at + scale * 0.02 * pace
        width = float(np.clip(width + 0.02 * gripper, 0, 0.08))
    return RecordedActions(np.array(actions, np.float32), np.array(states, np.float32), None)


@pytest.mark.parametrize(
    ("recording", "change", "expected"),
    [
        (arm_recording(), lambda a: a, set()),
        (arm_recording(), times(GRIPPER, -1), {"gripper sign"}),
        (arm_recording(), times([0, 1, 2], -1), {"translation axes"}),
        (arm_recording(), times(1, -1), {"translation axes"}),
        (arm_recording(), in_reversed_order, set()),
        (arm_recording("base"), lambda a: a, {"translation axes"}),
        (arm_recording(scale=0.2), lambda a: a, {"delta scale of the translation"}),
        (arm_recording(), lambda a: np.roll(a, 4, axis=0), {"off by one"}),
    ],
)
def test_an_arms_recording_is_judged_by_itself(recording, change, expected):
    changed = replace(recording, actions=change(recording.actions.copy()))
    found = check_commands([changed], ARM)
    assert {line.what for line in found if line.verdict == "fail"} == expected, found


def test_an_arm_that_was_given_poses_is_told():
    one = arm_recording()
    targets = np.concatenate([one.states[:, :3] + 0.01, one.actions[:, 3:]], axis=1)
    found = check_commands([replace(one, actions=targets)], ARM)
    assert "absolute instead of delta" in {line.what for line in found if line.verdict == "fail"}


DRAFT = {"resolution": 48, "quality": "draft"}


@pytest.fixture(scope="module")
def lift(tmp_path_factory):
    """Return three demonstrations of Lift as a dataset, and what looks at them."""
    pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
    root = tmp_path_factory.mktemp("lift") / "set"
    plan = CollectionPlan(env="dzrobot/lift-v0", env_arguments=DRAFT, episodes=3)
    assert collect(plan, root).kept == 3
    return root


@pytest.mark.long
def test_what_is_wrong_with_demonstrations_of_lift_is_named(lift):
    facts = look_at("dzrobot/lift-v0", None, DRAFT)
    robot = needed_robot("dzrobot/lift-v0", facts)
    episodes = list(read_episodes(DatasetCatalog.open(lift), robot, [0, 1, 2], images=True))
    # Of motion, one: a simulator takes its time, and the hand above shows them all.
    tried = {**IMAGE_FAULTS, "gripper sign": MOTION_FAULTS["gripper sign"]}
    with Bench("dzrobot/lift-v0", DRAFT, robot) as opened:
        assert faults(episodes, opened, robot, facts.hand)[0] == {}
        for fault, expected in tried.values():
            check_named(episodes, fault, expected, opened, robot, facts.hand)


@pytest.mark.long
def test_the_command_passes_demonstrations_of_lift(lift, capsys):
    words = ["doctor", "data", str(lift), "--env", "dzrobot/lift-v0", "--episodes", "2"]
    assert main([*words, "--env-arg", "quality=draft"]) == 0
    out = capsys.readouterr().out
    assert "as rendered, 0.0 of 255 apart" in out
    assert "2 of 2 succeed again" in out
