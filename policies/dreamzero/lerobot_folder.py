"""A checkpoint as LeRobot's ``policy.path=`` takes it, for the plug-in of ``plugins/``.

LeRobot and the official layout both want a ``config.json``, so the checkpoint lies in a folder of
its own below LeRobot's files::

    config.json                 LeRobot's: type, features, robot, columns
    policy_preprocessor.json    LeRobot's processors; dzrobot normalizes, so they change no number
    policy_postprocessor.json
    dreamzero/                  the checkpoint in the official layout

Source: lerobot 0.6.1, ``configs/policies.py`` and ``processor/pipeline.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import CheckpointError, ConfigError, preview
from dzrobot.policies.dreamzero.checkpoints.convert import Converted, ConvertOptions, convert
from dzrobot.policies.dreamzero.checkpoints.directory import CONFIG_FILE, open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.shards import write_json, written_whole
from dzrobot.policies.dreamzero.parts import embodiment_of

POLICY_TYPE = "dreamzero"
"""LeRobot's ``policy.type``."""

CHECKPOINT_FOLDER = "dreamzero"
"""Where the checkpoint lies below LeRobot's folder."""

ACTION_FEATURE = "action"
"""LeRobot's one name of an action; ours holds all action parts, in the robot's order."""

Columns = Mapping[str, Sequence[str]]
"""LeRobot's name of an observation -> the view, or the state parts in order, that it holds."""


def columns_of(robot: Embodiment) -> dict[str, list[str]]:
    """Return the columns under the names that ``robot`` itself declares for datasets."""
    found: dict[str, list[str]] = {view.feature: [view.key] for view in robot.views}
    for part in sorted(robot.state, key=lambda part: part.start or 0):
        found.setdefault(part.feature, []).append(part.key)
    return found


def input_features(robot: Embodiment, columns: Columns) -> dict[str, dict[str, Any]]:
    """Return type and shape of every column, in the words of LeRobot's ``config.json``.

    Raises:
        ConfigError: ``columns`` are not exactly the robot's views and state parts.
    """
    named = [key for keys in columns.values() for key in keys]
    wanted = (*robot.video_keys, *robot.state_keys)
    widths = {part.key: part.dim for part in robot.state}
    is_mixed = any(len(keys) != 1 and not widths.keys() >= {*keys} for keys in columns.values())
    if sorted(named) != sorted(wanted) or is_mixed or not all(columns.values()):
        raise ConfigError(
            f"columns={dict(columns)} do not hold each of {preview(wanted, 12)} of {robot.tag} "
            "once, a view alone in its column: declare them all, as in "
            f"{columns_of(robot)} (in LeRobot --policy.columns)"
        )
    features: dict[str, dict[str, Any]] = {}
    for name, keys in columns.items():
        if keys[0] in widths:
            features[name] = {"type": "STATE", "shape": [sum(widths[key] for key in keys)]}
        else:
            features[name] = {"type": "VISUAL", "shape": [3, *robot.view(keys[0]).resolution]}
    return features


def write_lerobot_folder(
    sources: Sequence[str | Path],
    target: Path,
    options: ConvertOptions,
    embodiment: str | None = None,
) -> Converted:
    """Write the checkpoint in ``sources`` to the new folder ``target``, with LeRobot's files.

    Args:
        sources: As :func:`convert` takes them.
        target: Appears complete or not at all.
        options: What changes on the way; the layout is the official one.
        embodiment: Tag of the robot; None: the one that the checkpoint names, if it is one.

    Raises:
        CheckpointError: Something does not fit; nothing is written then.
    """
    with written_whole(target) as folder:
        folder.mkdir()
        inner = folder / CHECKPOINT_FOLDER
        done = convert(sources, inner, replace(options, to="directory", whole=True))
        checkpoint = open_checkpoint(inner)
        robot = embodiment_of(checkpoint, embodiment)
        if embodiment is None and robot.tag not in EMBODIMENTS:
            raise CheckpointError(
                f"{robot.tag!r} is not built in, and LeRobot's side finds a robot by its name: "
                "write --embodiment module:NAME, a module that is importable there too"
            )
        frames = len(robot.timing.frame_offsets)
        columns = columns_of(robot)
        features = input_features(robot, columns)
        action = {ACTION_FEATURE: {"type": "ACTION", "shape": [robot.action_dim]}}
        config = {
            "type": POLICY_TYPE,
            "input_features": features,
            "output_features": action,
            "embodiment": embodiment or robot.tag,
            "columns": columns,
            "blocks": (checkpoint.config.head.num_frames - 1) // frames,
        }
        write_json(folder / CONFIG_FILE, config)
        for name, steps in _processors(features, action).items():
            write_json(folder / f"{name}.json", {"name": name, "steps": steps})
    return replace(done, path=target)


def _processors(
    features: Mapping[str, Any], action: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Return LeRobot's processors by name; ``lerobot-train`` overrides steps of these names."""
    norm = {"eps": 1e-8, "norm_map": dict.fromkeys(("VISUAL", "STATE", "ACTION"), "IDENTITY")}
    return {
        "policy_preprocessor": [
            _step("rename_observations_processor", rename_map={}),
            _step("to_batch_processor"),
            _step("normalizer_processor", features={**features, **action}, **norm),
            _step("device_processor", device="cpu", float_dtype=None),
        ],
        "policy_postprocessor": [
            _step("unnormalizer_processor", features=dict(action), **norm),
            _step("device_processor", device="cpu", float_dtype=None),
        ],
    }


def _step(name: str, **config: Any) -> dict[str, Any]:
    return {"registry_name": name, "config": config}
