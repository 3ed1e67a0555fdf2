"""Checkers of what happens around the network: images, vectors, prompts, layouts, frame walks."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.embodiments.spec import Embodiment, Part
from dzrobot.embodiments.templates import PROMPTS, quadrants, wrist_on_top
from dzrobot.embodiments.timing import Timing, multi_anchor_window
from dzrobot.modality.pipeline import Pipeline
from dzrobot.modality.stats import Statistics
from dzrobot.modality.video import tile
from dzrobot.modality.window import clean_instruction
from dzrobot.policies.dreamzero.network.prompt import clean
from golden_kinds.registry import Golden, Results, checker, exact, relative_l2

_PATTERN = "uint8 ((3*y + 5*x + 7*t + 11*c + 4*((x*y) % 13) + salt) % 256) over [T,H,W,3]"
_EVAL_STEP, _TRAIN_STEP = 9, 5
_REFERENCE_OFFSETS = tuple(range(0, 24, 3))

_LAYOUTS = {
    "oxe_droid": wrist_on_top,
    "agibot": quadrants,
    "xdof": quadrants,
    "yam": quadrants,
}


@checker("input_transforms")
def input_transforms(golden: Golden) -> Results:
    """Evaluation images and states, training vectors and layout, predicted actions."""
    assert golden.manifest["pattern"].startswith(_PATTERN)
    robot = _recorded_robot(golden)
    return {
        **_evaluation(golden, robot),
        **_training(golden, robot),
        **_unapply(golden, robot),
    }


@checker("multi_anchor_sampler")
def multi_anchor_sampler(golden: Golden) -> Results:
    """Frame, action and state rows of every recorded walk."""
    results: Results = {}
    for index, case in enumerate(golden.manifest):
        params = case["params"]
        timing = Timing(
            control_hz=1,
            action_horizon=params["action_horizon"],
            frame_offsets=tuple(params.get("video_in_chunk_offsets", _REFERENCE_OFFSETS)),
            blocks=params["max_chunk_size"],
            anchor_stride=params["macro_stride"],
            sampling="multi_anchor",
        )
        labels = (np.arange(case["length"]) >= case["lang_change_at"]).astype(np.int64)
        rows = multi_anchor_window(case["first_idx"], labels, timing)
        for name, value in zip(("video", "state", "action"), rows, strict=True):
            results[f"{index}.{case['cfg']}.{name}"] = exact(value.tolist(), case[name])
    return results


@checker("official_prompts")
def official_prompts(golden: Golden) -> Results:
    """Every prompt the reference can make."""
    task = clean_instruction(golden.manifest["input"])
    results: Results = {}
    for name, expected in golden.manifest["prompts"].items():
        if not expected.startswith("ERROR"):
            results[name] = exact(PROMPTS[name.partition("|")[0]].format(task=task), expected)
    return results


@checker("official_view_layouts")
def official_view_layouts(golden: Golden) -> Results:
    """Where each view, painted in its number, ends up."""
    results: Results = {}
    for name, expected in golden.manifest.items():
        tag, _, count = name.partition("|views=")
        keys = [f"video.{i}" for i in range(int(count))]
        tiles = _LAYOUTS[tag](*keys)
        image = torch.tensor(expected, dtype=torch.uint8)
        height, width = _view_size(image.shape, tiles)
        views = {
            key: torch.full((1, height, width, 3), i, dtype=torch.uint8)
            for i, key in enumerate(keys, start=1)
        }
        results[name] = exact(tile(views, tiles)[0, :, :, 0], image)
    return results


def _recorded_robot(golden: Golden) -> Embodiment:
    """Return our robot with the sizes the manifest was recorded at."""
    manifest = golden.manifest
    robot = EMBODIMENTS[manifest["embodiment_tag"]]
    modalities = manifest["metadata"][robot.tag]["modalities"]
    height, width = _view_size(manifest["eval_images_shape"][-3:-1], robot.tiles)
    horizon = len(golden[f"train.in.{robot.action_keys[0]}"]) // len(
        golden[f"train.in.{robot.state_keys[0]}"]
    )
    return replace(
        robot,
        views=tuple(
            replace(view, resolution=tuple(manifest["input_hw"]), size=(height, width))
            for view in robot.views
        ),
        state=tuple(_sized(part, modalities["state"]) for part in robot.state),
        action=tuple(
            replace(
                _sized(part, modalities["action"]),
                reference=part.reference if manifest["relative_action"] else None,
            )
            for part in robot.action
        ),
        timing=replace(robot.timing, action_horizon=horizon, frame_offsets=(), anchor_stride=0),
    )


def _sized(part: Part, modality: dict[str, Any]) -> Part:
    (dim,) = modality[part.name]["shape"]
    gripper = None if part.gripper is None else replace(part.gripper, index=dim - 1)
    return replace(part, dim=dim, gripper=gripper)


def _view_size(image: Any, tiles: Any) -> tuple[int, int]:
    height, width = image
    return height // len(tiles), width // max(len(row) for row in tiles)


def _evaluation(golden: Golden, robot: Embodiment) -> Results:
    """Prompts are recorded as the tokenizer cleaned them: escapes resolved, blanks collapsed."""
    manifest = golden.manifest
    pipeline = Pipeline(robot, Statistics.from_metadata(manifest["metadata"], robot))
    batch, frames = manifest["eval_images_shape"][:2]
    encoded = []
    for b in range(batch):
        window: dict[str, Any] = {
            view.key: _painted((frames, *manifest["input_hw"]), salt + 3 * b)
            for view, salt in zip(robot.views, manifest["salts"], strict=True)
        }
        for key in robot.state_keys:
            window[key] = golden[f"eval.in.{key}"][b].numpy()
        window[robot.language] = manifest["prompt"] + (" now" if b else "")
        encoded.append(pipeline.encode(window))
    images = torch.stack([sample["images"] for sample in encoded])
    state = torch.stack([sample["state"] for sample in encoded])
    seen = images[:, :, ::_EVAL_STEP, ::_EVAL_STEP]
    return {
        "eval.shape": exact(list(images.shape), manifest["eval_images_shape"]),
        "eval.images (levels)": (_levels(seen, golden["eval.out.images_sub"]), 1.0),
        "eval.images mean (levels)": (
            abs(images.double().mean().item() - manifest["eval_images_mean"]),
            0.5,
        ),
        "eval.state": (relative_l2(state, golden["eval.out.state"]), 1e-6),
        "eval.prompts": exact(
            [clean(sample["prompt"]) for sample in encoded], manifest["prompts_out"]["text"]
        ),
        "eval.negative": exact(
            [clean(sample["negative_prompt"]) for sample in encoded], manifest["prompts_out"]["neg"]
        ),
    }


def _training(golden: Golden, robot: Embodiment) -> Results:
    """The recorded training actions are already relative: nothing is taken off again."""
    manifest = golden.manifest
    absolute = replace(robot, action=tuple(replace(part, reference=None) for part in robot.action))
    pipeline = Pipeline(absolute, Statistics.from_metadata(manifest["metadata"], absolute))
    window: dict[str, Any] = {
        key: golden[f"train.in.{key}"].numpy() for key in (*robot.state_keys, *robot.action_keys)
    }
    window[robot.language] = manifest["prompt"]
    encoded = pipeline.encode_vectors(window)
    frames, *image, _ = manifest["train_images_shape"]
    views = {
        view.key: torch.from_numpy(_painted((frames, *_view_size(image, robot.tiles)), salt))
        for view, salt in zip(robot.views, manifest["salts"], strict=True)
    }
    images = tile(views, robot.tiles)
    return {
        "train.state": (relative_l2(encoded["state"], golden["train.out.state"]), 1e-6),
        "train.action": (relative_l2(encoded["action"], golden["train.out.action"]), 1e-6),
        "train.state_mask": exact(encoded["state_mask"], golden["train.out.state_mask"]),
        "train.action_mask": exact(encoded["action_mask"], golden["train.out.action_mask"]),
        "train.has_real_action": exact(
            encoded["has_real_action"].item(), manifest["scalars"]["has_real_action"][0]
        ),
        "train.shape": exact(list(images.shape), manifest["train_images_shape"]),
        "train.images": exact(
            images[:, ::_TRAIN_STEP, ::_TRAIN_STEP], golden["train.out.images_sub"]
        ),
    }


def _unapply(golden: Golden, robot: Embodiment) -> Results:
    pipeline = Pipeline(robot, Statistics.from_metadata(golden.manifest["metadata"], robot))
    state = {key: golden[f"eval.in.{key}"][:, -1].numpy() for key in robot.state_keys}
    actions = pipeline.decode(golden["unapply.in.normalized_action"], state)
    return {
        f"unapply.{key}": (
            relative_l2(torch.from_numpy(value), golden[f"unapply.out.{key}"]),
            1e-6,
        )
        for key, value in actions.items()
    }


def _painted(shape: tuple[int, ...], salt: int) -> np.ndarray:
    frames, height, width = shape
    t, y, x, c = np.ogrid[:frames, :height, :width, :3]
    values = (3 * y + 5 * x + 7 * t + 11 * c + 4 * ((x * y) % 13) + salt) % 256
    return values.astype(np.uint8)


def _levels(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return math.inf
    return (actual.int() - expected.int()).abs().max().item()
