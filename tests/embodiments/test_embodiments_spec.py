"""Embodiments: what is accepted, and what the refusals say."""

import importlib
import json
import pickle
from dataclasses import FrozenInstanceError, replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from dzrobot.embodiments import templates
from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.embodiments.spec import Embodiment, Gripper, Part, View
from dzrobot.embodiments.templates import NEGATIVE, PROMPTS, quadrants
from dzrobot.errors import ConfigError
from dzrobot.modality.video import tile
from dzrobot.modality.window import prompt_of

LIBERO, FRANKA, DROID = (EMBODIMENTS[tag] for tag in ("libero_sim", "franka_pnp", "oxe_droid"))
LIKE = {
    "libero_mini": "libero_sim",
    "franka_mini": "franka_pnp",
    "droid_mini": "oxe_droid",
}
"""Robots of small images, and whose prompts they have."""

EVERY = pytest.mark.parametrize("robot", EMBODIMENTS.values(), ids=EMBODIMENTS)


@EVERY
def test_is_a_value(robot):
    assert hash(robot) == hash(pickle.loads(pickle.dumps(robot)))
    assert pickle.loads(pickle.dumps(robot)) == robot
    with pytest.raises(FrozenInstanceError):
        robot.tag = "other"


@EVERY
def test_a_robot_is_declared_in_the_file_of_its_tag(robot):
    """A small variant stands below the robot that it is made of."""
    home = LIKE.get(robot.tag, robot.tag)
    module = importlib.import_module(f"dzrobot.embodiments.robots.{home}")
    assert vars(module)[robot.tag.upper()] is robot
    assert EMBODIMENTS[robot.tag] is robot


@EVERY
def test_prompt_and_ids_match_the_published_checkpoints(robot):
    assert robot.prompt == PROMPTS[LIKE.get(robot.tag, robot.tag)]
    assert robot.negative_prompt == NEGATIVE
    assert robot.language == "annotation.task"


def test_published_sizes():
    assert (LIBERO.state_dim, LIBERO.action_dim, LIBERO.image_size) == (8, 7, (256, 512))
    assert (FRANKA.state_dim, FRANKA.action_dim, FRANKA.image_size) == (19, 7, (256, 512))
    assert (DROID.state_dim, DROID.action_dim, DROID.image_size) == (8, 8, (352, 640))
    assert [e.timing.action_horizon for e in (LIBERO, FRANKA, DROID)] == [16, 12, 24]
    assert {e.timing.frames for e in (LIBERO, FRANKA, DROID)} == {33}
    assert DROID.relative_keys == ("action.joint_position",)
    assert LIBERO.relative_keys == FRANKA.relative_keys == ()


def test_droid_columns():
    slices = {part.key: (part.start, part.dim) for part in (*DROID.state, *DROID.action)}
    assert slices == {
        "state.joint_position": (7, 7),
        "state.gripper_position": (6, 1),
        "action.joint_position": (14, 7),
        "action.gripper_position": (12, 1),
    }


def test_quadrants_leave_what_is_unused_black():
    assert quadrants("a", "b", "c") == (("a", "c"), ("b", None))
    assert quadrants("a", "b") == (("a", None), ("b", None))
    with pytest.raises(ConfigError, match="one to three views, got 4"):
        quadrants("a", "b", "c", "d")


def part(**fields) -> Part:
    return Part(**{"key": "state.x", "feature": "x", "dim": 3, **fields})


REFUSED_PARTS = {
    "key='joint'": {"key": "joint"},
    "dim=0 must be at least 1": {"dim": 0},
    "start=-1 must be 0 or more": {"start": -1},
    "normalization='q95' must be": {"normalization": "q95"},
    "belong to action parts": {"reference": "state.y"},
    "must be a tuple of names": {"aliases": "state"},
    "repeat a column name": {"aliases": ("x",)},
    "gripper.index=3 lies outside": {"key": "action.x", "gripper": Gripper(index=3)},
    "encoder belongs to state parts": {"key": "action.x", "encoder": "lab:Touch"},
    "encoder='touch' must be written 'module:Name'": {"encoder": "touch"},
    "has a name without dots, not 'x.y'": {"key": "state.x.y", "encoder": "lab:Touch"},
}


@pytest.mark.parametrize(("message", "fields"), REFUSED_PARTS.items(), ids=REFUSED_PARTS)
def test_part_refuses(message, fields):
    with pytest.raises(ConfigError, match=message):
        part(**fields)


def test_view_refuses():
    with pytest.raises(ConfigError, match=r"size=\(0, 4\).*height, width"):
        View(key="video.x", feature="x", size=(0, 4))
    with pytest.raises(ConfigError, match=r"key='image' must be 'video\.<name>'"):
        View(key="image", feature="x")


VIEW = LIBERO.views[0]
WIDE = Part(key="state.wide", feature="wide", dim=65)
RELATIVE = Part(key="action.x", feature="action", dim=7, reference="state.stat")
REFUSED = {
    "tag='my robot'": {"tag": "my robot"},
    r"views=.* must be a tuple of at least one View": {"views": VIEW},
    r"state=\(\) must be a tuple of at least one Part": {"state": ()},
    "one alone is written with a comma": {"tiles": ("video.image",)},
    "action holds the part 'state.state'": {"action": LIBERO.state},
    "keys occur more than once: video.image": {"views": (VIEW, VIEW)},
    "tiles name 'video.wrist'.* Did you mean 'video.wrist_image'": {
        "tiles": (("video.image", "video.wrist"),)
    },
    "views in no tile: video.wrist_image": {"tiles": (("video.image",),)},
    "must divide the widest row of 3": {
        "tiles": (("video.image", "video.wrist_image"), ("video.image", None, None))
    },
    r"the prompt describes the tiles view view, and tiles are view / view \(rows from": {
        "tiles": (("video.image",), ("video.wrist_image",))
    },
    "a tile shows the exterior camera, and that tile is the view 'wrist_image'": {
        "tiles": (("video.wrist_image", "video.image"),)
    },
    "need the same size": {"views": (VIEW, replace(LIBERO.views[1], size=(128, 128)))},
    "not a state part. Did you mean 'state.state'": {"action": (RELATIVE,)},
    "action.x has 7 numbers, its reference state.state has 8": {
        "action": (replace(RELATIVE, reference="state.state"),)
    },
    "state parts with an encoder come last: state.wide": {
        "state": (replace(WIDE, encoder="lab:Touch"), *LIBERO.state)
    },
    "state parts add up to 65 numbers, the network takes 64": {"state": (WIDE,)},
    r"prompt must hold \{task\} and no other field, got name": {"prompt": "do {name}"},
    "prompt .* is not a template": {"prompt": "do {task"},
    r"language='task' must be 'annotation\.<name>'": {"language": "task"},
    "crop_scale=1.5": {"crop_scale": 1.5},
    "execute=0": {"execute": 0},
    "execute=17": {"execute": 17},
    "history='on' must be one of off, recent, grid": {"history": "on"},
}


@pytest.mark.parametrize(("message", "fields"), REFUSED.items(), ids=REFUSED)
def test_embodiment_refuses(message, fields):
    with pytest.raises(ConfigError, match=message):
        replace(LIBERO, **fields)


def named_views(*names):
    return tuple(replace(VIEW, key=f"video.{name}", feature=name, aliases=()) for name in names)


TOLD = {
    "TWO_VIEWS": [("image", "wrist_image"), ("front", "eye_in_hand"), ("agentview", "gripper_cam")],
    "THREE_VIEWS": [
        ("wrist_image_left", "exterior_image_1_left", "exterior_image_2_left"),
        ("wrist", "left", "right"),
        ("wrist_image_left", "exterior_left", "exterior_right"),
    ],
    "HEAD_AND_HANDS": [
        ("top_head", "hand_right", "hand_left"),
        ("head", "right_wrist", "left_wrist"),
    ],
    "TOP_AND_SIDES": [("top_camera", "right_camera", "left_camera")],
}
"""Template -> names of views in the order in which it tells of its tiles."""


@pytest.mark.parametrize(
    ("template", "names"), [(template, names) for template in TOLD for names in TOLD[template]]
)
def test_views_are_where_a_published_prompt_says_they_are(template, names):
    """In every other order, at least one view is said to be elsewhere."""
    described = templates.PROMPT_TILES[vars(templates)[template]]

    def robot(order):
        rest = iter(order)
        tiles = tuple(
            tuple(None if tile is None else f"video.{next(rest)}" for tile in row)
            for row in described
        )
        prompt = vars(templates)[template]
        return replace(LIBERO, tag="mine", views=named_views(*names), tiles=tiles, prompt=prompt)

    robot(names)
    for order in permutations(names):
        if order != names:
            with pytest.raises(ConfigError, match="the prompt says that a tile shows"):
                robot(order)


def test_names_that_say_nothing_are_taken_as_they_are():
    views = named_views("cam0", "cam1")
    for order in (("video.cam0", "video.cam1"), ("video.cam1", "video.cam0")):
        assert replace(LIBERO, tag="mine", views=views, tiles=(order,)).tiles == (order,)
    own = replace(LIBERO, tiles=(LIBERO.tiles[0][::-1],), prompt="hand left, scene right: {task}")
    assert own.tiles[0][0] == "video.wrist_image"


def test_every_published_template_has_its_tiles():
    assert set(templates.PROMPTS.values()) == set(templates.PROMPT_TILES)


def test_a_part_with_an_encoder_is_not_in_the_state_vector():
    sense = replace(WIDE, encoder="lab:Touch")
    robot = replace(LIBERO, state=(*LIBERO.state, sense))
    assert (robot.state_dim, robot.state_vector, robot.conditions) == (8, LIBERO.state, (sense,))
    assert "state.wide" in robot.observation_keys


def test_every_fault_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        replace(LIBERO, prompt="{robot}", tiles=(("video.image",),), state=(WIDE,))
    for fault in ("video.wrist_image", "65 numbers", "{task}"):
        assert fault in str(caught.value)


def test_a_robot_is_described_in_a_few_lines():
    robot = Embodiment(
        tag="arm",
        views=(View(key="video.front", feature="observation.images.front"),),
        state=(Part(key="state.joints", feature="observation.state", dim=6),),
        action=(Part(key="action.joints", feature="action", dim=6),),
        tiles=(("video.front",),),
        prompt="A robot shall {task}",
        timing=LIBERO.timing,
    )
    assert robot.observation_keys == ("video.front", "state.joints", "annotation.task")
    assert robot.image_size == (256, 256)


LAYOUTS = json.loads(Path(__file__).with_name("rlinf_layouts.json").read_text())
"""What RLinf 0.3.0 makes of prompts and views; make_rlinf_layouts.py runs its own code."""


@pytest.mark.parametrize("tag", ["libero_sim", "franka_pnp", "oxe_droid"])
def test_prompt_and_tiles_are_those_of_rlinfs_own_transforms(tag):
    theirs, ours = LAYOUTS[tag], EMBODIMENTS[tag]
    assert sorted(ours.video_keys) == sorted(theirs["views"])
    assert (list(ours.state_keys), list(ours.action_keys)) == (theirs["state"], theirs["action"])
    assert prompt_of(LAYOUTS["task"], ours) == theirs["prompt"]
    # The pictures that the script made: view, row and column can be read off each pixel.
    pixels = np.arange(len(theirs["views"]) * 72, dtype=np.uint8).reshape(-1, 3, 4, 6)
    views = {
        key: torch.from_numpy(view.transpose(1, 2, 0).copy())
        for key, view in zip(theirs["views"], pixels, strict=True)
    }
    assert tile(views, ours.tiles)[..., 0].tolist() == theirs["tiled"]
