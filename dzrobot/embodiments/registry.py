"""Find an embodiment by name: a built-in tag, or ``module:NAME`` from the user's own code."""

import re
from collections.abc import Mapping
from pathlib import Path

from dzrobot.embodiments.robots.agibot import AGIBOT
from dzrobot.embodiments.robots.franka_pnp import FRANKA_MINI, FRANKA_PNP
from dzrobot.embodiments.robots.libero_sim import LIBERO_MINI, LIBERO_SIM
from dzrobot.embodiments.robots.oxe_droid import DROID_MINI, OXE_DROID
from dzrobot.embodiments.robots.yam import YAM
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import UnknownNameError, suggest
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
