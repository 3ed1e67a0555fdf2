"""Whatever a policy is shown: taken as what it is, or refused, and then nothing has happened."""

from types import MappingProxyType

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies
from hypothesis.extra import numpy as arrays

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import DzrobotError, ModalityError, SessionError
from dzrobot.modality.pipeline import Pipeline
from dzrobot.modality.stats import Statistics
from dzrobot.modality.window import read_observation, stacked
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy, PolicyOptions
from dzrobot.policies.dreamzero.tiny import TinyOptions, write_tiny_checkpoint

ROBOT = load_embodiment("libero_sim")
EXECUTE = 3
STEPS = 5
"""Two plans: at step 0 and at step 3."""


def observe(step, key=0):
    rng = np.random.default_rng([key, step])
    views = {v.key: rng.integers(0, 256, (*v.resolution, 3), np.uint8) for v in ROBOT.views}
    state = {"state.state": rng.uniform(-1, 1, 8).astype(np.float32)}
    return {**views, **state, "annotation.task": "lift the cube"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "tiny"
    return write_tiny_checkpoint(folder, ROBOT, TinyOptions(dtype=torch.float32))


@pytest.fixture(scope="module")
def policy(checkpoint):
    options = PolicyOptions(dit_steps=5, execute=EXECUTE, cfg_scale=1.0, independent=True)
    return DreamZeroPolicy.from_pretrained(checkpoint, embodiment=ROBOT, options=options)


@pytest.fixture(scope="module")
def undisturbed(policy):
    """Return the actions of two episodes, as bytes."""
    actions = {}
    for key in range(2):
        policy.reset("alone")
        for step in range(STEPS):
            actions[key, step] = policy.act(observe(step, key), session="alone").tobytes()
    policy.end_all()
    return actions


def replaced(key, make):
    return lambda seen: {**seen, key: make(seen[key])}


def image(make):
    return replaced("video.image", make)


def state(make):
    return replaced("state.state", make)


def text(value):
    return replaced("annotation.task", lambda _: value)


def number(value):
    def change(old):
        new = old.copy()
        new[2] = value
        return new

    return state(change)


class Unhashable(str):
    __hash__ = None


STRUCTURED = np.dtype([("r", np.uint8), ("g", np.uint8)])
BAD = {
    "None": lambda _: None,
    "list": lambda seen: [seen],
    "text": lambda _: "an observation",
    "number": lambda _: 3,
    "array": lambda seen: seen["video.image"],
    "empty": lambda _: {},
    "pairs": lambda seen: list(seen.items()),
    "extra key": lambda seen: {**seen, "reward": 1.0},
    "extra key, a number": lambda seen: {**seen, 3: 1.0},
    "extra keys of many kinds": lambda seen: {**seen, 3: 1, None: 2, (1, 2): 3, "x": 4},
    "extra view": lambda seen: {**seen, "video.more": seen["video.image"]},
    "float image 0-1": image(lambda x: (x / 255).astype(np.float32)),
    "float64 image": image(lambda x: x.astype(float)),
    "int64 image": image(lambda x: x.astype(np.int64)),
    "int8 image": image(lambda x: x.view(np.int8)),
    "bool image": image(lambda x: x > 99),
    "object image": image(lambda x: x.astype(object)),
    "structured image": image(lambda x: np.zeros(x.shape, STRUCTURED)),
    "text image": image(lambda x: x.astype("U3")),
    "dates image": image(lambda x: np.zeros(x.shape, "M8[s]")),
    "CHW image": image(lambda x: x.transpose(2, 0, 1)),
    "other size": image(lambda x: x[::2, ::2]),
    "gray image": image(lambda x: x[..., 0]),
    "RGBA image": image(lambda x: np.concatenate([x, x[..., :1]], -1)),
    "0 x 0": image(lambda x: x[:0, :0]),
    "0-d image": image(lambda x: np.uint8(3)),
    "scalar array image": image(lambda x: np.array(3, np.uint8)),
    "image None": image(lambda x: None),
    "image list": image(lambda x: x.tolist()),
    "image tensor": image(torch.from_numpy),
    "image bytes": image(lambda x: x.tobytes()),
    "one view a stack": image(lambda x: x[None]),
    "stack of none": lambda seen: {
        key: value[None][:0] if key.startswith("video") else value for key, value in seen.items()
    },
    "stack of stacks": lambda seen: {
        key: value[None, None] if key.startswith("video") else value for key, value in seen.items()
    },
    "state None": state(lambda x: None),
    "state list": state(lambda x: x.tolist()),
    "state tensor": state(torch.from_numpy),
    "state float64": state(lambda x: x.astype(float)),
    "state float16": state(lambda x: x.astype(np.float16)),
    "state int": state(lambda x: x.astype(int)),
    "state complex": state(lambda x: x.astype(complex)),
    "state object": state(lambda x: x.astype(object)),
    "state structured": state(lambda x: np.zeros(8, STRUCTURED)),
    "state big-endian": state(lambda x: x.astype(">f4")),
    "state short": state(lambda x: x[:7]),
    "state long": state(lambda x: np.append(x, x)),
    "state rows": state(lambda x: x[None]),
    "state empty": state(lambda x: x[:0]),
    "state scalar": state(lambda x: x[0]),
    "state text": state(lambda x: "eight numbers"),
    "NaN": number(np.nan),
    "infinite": number(np.inf),
    "minus infinite": number(-np.inf),
    "prompt None": text(None),
    "prompt number": text(7),
    "prompt bytes": text(b"lift the cube"),
    "prompt list": text(["lift the cube"]),
    "prompt tuple": text(("lift the cube",)),
    "prompt array": text(np.array("lift the cube")),
    "prompt empty": text(""),
    "prompt blanks": text(" \n\t "),
    "prompt empty list": text("[]"),
    "prompt list of numbers": text("[1, 2]"),
    "prompt zeros": text("0" * 256),
    "prompt NULs": text("\0" * 256),
    "prompt one NUL": text("\0"),
    "prompt one letter": text("a" * 64),
    "prompt minus signs": text("[" + "-" * 1_000_000),
    "prompt brackets": text("[" * 1_000_000),
    "prompt 100 MB": text("lift " * 20_000_000),
    "prompt surrogate": text("lift \ud800 the cube"),
}
BAD |= {f"without {key}": lambda seen, key=key: {k: v for k, v in seen.items() if k != key}
        for key in ROBOT.observation_keys}  # fmt: skip
SAME = {
    "itself": lambda seen: seen,
    "read-only": lambda seen: {key: frozen(value) for key, value in seen.items()},
    "Fortran order": image(np.asfortranarray),
    "turned twice": image(lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1]),
    "memory of another": image(lambda x: np.frombuffer(x.tobytes(), np.uint8).reshape(x.shape)),
    "masked array": image(np.ma.asarray),
    "text of NumPy": text(np.str_("lift the cube")),
    "other case": text("Lift the Cube"),
    "a written list": text("['lift the cube', 'raise the cube']"),
    "keys in another order": lambda seen: dict(reversed(seen.items())),
    "other mapping": lambda seen: MappingProxyType(seen),
    "stack of one": lambda seen: {
        key: value[None] if key.startswith("video") else value for key, value in seen.items()
    },
}
ODD_TEXT = ("[" + "-" * 9_000, "[(" * 4_500, "\x00lift", "{task} {0} %s", "大走")
BAD_SESSIONS = {
    "None": [None],
    "a number": [3],
    "a list": [["a"]],
    "a dict": [{"a": 1}],
    "unhashable": [Unhashable("a")],
    "bytes": [b"a"],
    "twice": ["a", "a"],
    "none at all": [],
    "a text": "a",
    "no list": 5,
    "nothing": None,
}


def frozen(value):
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.flags.writeable = False
    return value


def test_a_refused_observation_leaves_the_session_as_it_was(policy, undisturbed):
    """At the first step, in mid-plan and where a plan is due; alone, and second in a batch."""
    policy.end_all()
    for step in range(STEPS):
        good = [observe(step, key) for key in range(2)]
        open_before = policy.sessions
        for name, change in BAD.items():
            bad = change(good[1])
            for call in (policy.act, policy.infer):
                with pytest.raises(ModalityError):
                    raise AssertionError(f"{name} was accepted: {call(bad, session='y')}")
            for call in (policy.act_batch, policy.infer_batch):
                with pytest.raises(ModalityError):
                    raise AssertionError(f"{name} was accepted: {call([good[0], bad], ['x', 'y'])}")
        for sessions in BAD_SESSIONS.values():
            for call in (policy.act_batch, policy.infer_batch):
                with pytest.raises(SessionError):
                    call(good, sessions)
        for observations in (None, 3, "ab", good[:1], [], [*good, *good]):
            with pytest.raises(DzrobotError):
                policy.act_batch(observations, ["x", "y"])
        assert policy.sessions == open_before
        for key, action in enumerate(policy.act_batch(good, ["x", "y"])):
            assert action.tobytes() == undisturbed[key, step], (step, key)


@pytest.mark.sampled
@pytest.mark.parametrize("name", SAME)
def test_another_form_of_the_same_is_the_same(policy, undisturbed, name):
    policy.reset("x")
    for step in range(STEPS):
        action = policy.act(SAME[name](observe(step)), session="x")
        assert action.tobytes() == undisturbed[0, step]


@pytest.mark.parametrize("session", [None, 3, ["a"], Unhashable("a")], ids=repr)
def test_a_session_without_a_name_touches_no_other(policy, undisturbed, session):
    policy.end_all()
    policy.act(observe(0), session="x")
    for call in (policy.act, policy.infer):
        with pytest.raises(SessionError, match="give a str"):
            call(observe(1), session=session)
    for call in (policy.imagine, policy.evict, *([policy.reset] if session is not None else [])):
        with pytest.raises(SessionError, match="give a str"):
            call(session)
    assert policy.act(observe(1), session="x").tobytes() == undisturbed[0, 1]


def test_no_session_opens_where_there_is_no_room_for_all(checkpoint, undisturbed):
    options = PolicyOptions(
        dit_steps=5, execute=EXECUTE, cfg_scale=1.0, independent=True, max_sessions=2
    )
    policy = DreamZeroPolicy.from_pretrained(checkpoint, embodiment=ROBOT, options=options)
    policy.act(observe(0), session="x")
    with pytest.raises(SessionError, match="no room for session 'y', 'z': 1 of max_sessions=2"):
        policy.act_batch([observe(1)] * 3, ["x", "y", "z"])
    assert policy.sessions == ("x",)
    assert policy.act(observe(1), session="x").tobytes() == undisturbed[0, 1]


@pytest.mark.parametrize("words", ODD_TEXT, ids=range(len(ODD_TEXT)))
def test_odd_instructions_are_words_like_any_other(policy, words):
    policy.reset("x")
    action = policy.act({**observe(0), "annotation.task": words}, session="x")
    assert action.shape == (7,)
    assert np.isfinite(action).all()


def test_a_vector_environment_is_served_as_it_is(policy, undisturbed):
    policy.end_all()
    space = gym.spaces.Dict(
        {"annotation.task": gym.spaces.Text(64), **{k: gym.spaces.Box(0, 1) for k in "ab"}}
    )
    for step in range(STEPS):
        good = [observe(step, key) for key in range(2)]
        batch = {
            key: tuple(seen[key] for seen in good)
            if isinstance(space.get(key), gym.spaces.Text)
            else np.stack([seen[key] for seen in good])
            for key in good[0]
        }
        for bad in (
            {**batch, "annotation.task": "lift the cube"},
            {**batch, "annotation.task": ("lift the cube",)},
            {**batch, "annotation.task": ("0" * 256,) * 2},
            {**batch, "state.state": batch["state.state"][:1]},
            {**batch, "state.state": batch["state.state"].astype(float)},
            {**batch, 3: 1},
            good[0],
        ):
            with pytest.raises(ModalityError):
                policy.act_batch(bad, ["x", "y"])
        for key, action in enumerate(policy.act_batch(batch, ["x", "y"])):
            assert action.tobytes() == undisturbed[key, step]


def test_zeros_of_shared_memory_name_the_remedy(policy):
    with pytest.raises(ModalityError, match="shared_memory=False"):
        policy.act({**observe(0), "annotation.task": "0" * 256}, session="new")


SCALARS = (
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats()
    | strategies.text(max_size=30)
    | strategies.binary(max_size=8)
)
SHAPES = strategies.sampled_from(
    [(), (0,), (7,), (8,), (1, 8), (256, 256, 3), (3, 256, 256), (1, 256, 256, 3), (256, 256, 1)]
)
DTYPES = strategies.sampled_from(
    ["u1", "i1", "i8", "f2", "f4", ">f4", "f8", "c8", "?", "U4", "S4", "O", "M8[s]", "V3", "u1,f4"]
)
ARRAYS = strategies.builds(np.zeros, SHAPES, DTYPES)
FLOATS = arrays.arrays(np.float32, (8,), elements=strategies.floats(width=32))
VALUES = SCALARS | ARRAYS | FLOATS | strategies.lists(SCALARS, max_size=3)
KEYS = strategies.sampled_from([*ROBOT.observation_keys, "state.more", 3, None])


@pytest.fixture(scope="module")
def pipeline(checkpoint):
    metadata = checkpoint / "experiment_cfg" / "metadata.json"
    return Pipeline(ROBOT, Statistics.from_metadata(metadata, ROBOT))


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=strategies.dictionaries(KEYS, VALUES, max_size=3), dropped=KEYS | SCALARS)
def test_what_the_door_lets_through_can_be_encoded(pipeline, changes, dropped):
    seen = {**observe(0), **changes}
    if isinstance(dropped, str | int | None):
        seen.pop(dropped, None)
    try:
        frames = read_observation(seen, ROBOT)
    except ModalityError:
        return
    encoded = pipeline.encode(stacked(frames, ROBOT))
    assert torch.isfinite(encoded["state"]).all()
    assert encoded["images"].shape == (1, 256, 512, 3)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=strategies.data())
def test_an_episode_with_anything_between_equals_the_undisturbed_one(policy, undisturbed, data):
    policy.end_all()
    for step in range(STEPS):
        for _ in range(2):
            key, value = data.draw(KEYS), data.draw(VALUES)
            seen = {**observe(step), key: value}
            try:
                read_observation(seen, ROBOT)
            except ModalityError:
                with pytest.raises(ModalityError):
                    policy.act(seen, session="x")
        assert policy.act(observe(step), session="x").tobytes() == undisturbed[0, step]
