"""Find an embodiment by name: a built-in tag, or ``module:NAME`` from the user's own code.

Or make one from its description as data, which a checkpoint of one's own robot carries.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dzrobot.documents import validated
from dzrobot.embodiments.robots.agibot import AGIBOT
from dzrobot.embodiments.robots.franka_pnp import FRANKA_MINI, FRANKA_PNP
from dzrobot.embodiments.robots.libero_sim import LIBERO_MINI, LIBERO_SIM
from dzrobot.embodiments.robots.oxe_droid import DROID_MINI, OXE_DROID
from dzrobot.embodiments.robots.yam import YAM
from dzrobot.embodiments.spec import Embodiment, Gripper, Part, View
from dzrobot.embodiments.timing import Timing
from dzrobot.errors import ConfigError, DzrobotError, UnknownNameError, preview, suggest
from dzrobot.importing import is_module_name, is_reference, load_reference, module_exists

EMBODIMENTS: Mapping[str, Embodiment] = {
    embodiment.tag: embodiment
    for embodiment in (
        LIBERO_SIM,
        LIBERO_MINI,
        FRANKA_PNP,
        FRANKA_MINI,
        OXE_DROID,
        DROID_MINI,
        AGIBOT,
        YAM,
    )
}
"""The built-in robots, by tag."""

DEFAULT_ATTRIBUTE = "EMBODIMENT"
"""What a module is asked for when only its name is given."""


_AT_RESOLUTION = re.compile(r"(.+)@(\d{1,5})x(\d{1,5})")


def load_embodiment(name: str) -> Embodiment:
    """Return the embodiment ``name``.

    Args:
        name: A built-in tag (``libero_sim``), ``module:NAME`` (``my_robot:UR5``), or a module that
            holds ``EMBODIMENT``. The import path is searched, then the current folder. With
            ``@HEIGHTxWIDTH`` behind it (``libero_sim@128x128``) its cameras deliver such images.

    Raises:
        UnknownNameError: no such tag, module or attribute, or the attribute is not an Embodiment.
        ConfigError: no image has that size.
    """
    if sized := _AT_RESOLUTION.fullmatch(name):
        return load_embodiment(sized[1]).at_resolution(int(sized[2]), int(sized[3]))
    if name in EMBODIMENTS:
        return EMBODIMENTS[name]
    reference = name if is_reference(name) else f"{name}:{DEFAULT_ATTRIBUTE}"
    if not is_reference(name) and not (is_module_name(name) and module_exists(name)):
        raise UnknownNameError(
            f"unknown embodiment {name!r}.{suggest(name, EMBODIMENTS)} Known: "
            f"{', '.join(EMBODIMENTS)}. Your own robot is written 'module:NAME'; the module "
            f"must be on the import path or in {Path.cwd()}."
        )
    found: Embodiment = load_reference(reference, "embodiment", Embodiment)
    if not found.action:
        raise UnknownNameError(
            f"{reference} has no action parts, so it is not a robot: give it those of the robot "
            "that learns from it, and say in the recipe what its recordings hold (recorded: images)"
        )
    return found


def description_of(robot: Embodiment) -> dict[str, Any] | None:
    """Return ``robot`` as plain values of JSON, every field with its value.

    None: data cannot express it. It has an encoder of its own, or is of a class of its own, and
    code is never stored beside weights.
    """
    parts = (*robot.state, *robot.action)
    pieces = (*robot.views, *parts, *(part.gripper for part in parts if part.gripper is not None))
    plain = {Embodiment, View, Part, Gripper, Timing}
    if robot.conditions or not {type(piece) for piece in (robot, robot.timing, *pieces)} <= plain:
        return None
    # Tuples become lists, as they are when it is read back.
    values: dict[str, Any] = json.loads(json.dumps(asdict(robot)))
    return values


def described_embodiment(
    description: Mapping[str, Any], where: str, error_class: type[DzrobotError]
) -> Embodiment:
    """Return the robot of :func:`description_of`; no code is looked for or run.

    Args:
        description: Its fields.
        where: What holds them, for messages.
        error_class: What to raise.

    Raises:
        DzrobotError: of class ``error_class``: a field is missing, unknown to this version, of
            another kind, or names code.
    """
    try:
        robot = validated(dict(description), Embodiment, where, error_class)
    except ConfigError as error:
        raise error_class(f"{where}: {error}") from error
    # Fields that are unknown here would say something else of the robot than what was trained.
    if odd := sorted(_differences(description, description_of(robot), "")):
        raise error_class(
            f"{where}: this version of dzrobot does not read {preview(odd)} of the robot; install "
            "the version that wrote it, or give the robot itself (embodiment='module:NAME')"
        )
    return robot


def _differences(given: Any, read: Any, place: str) -> Iterator[str]:
    """Yield where a description says something else than what was made of it."""
    if isinstance(given, Mapping) and isinstance(read, dict):
        for name, value in given.items():
            yield from _differences(value, read.get(name), f"{place}.{name}".lstrip("."))
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for number, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from _differences(one, other, f"{place}.{number}")
    elif given != read:
        yield place
