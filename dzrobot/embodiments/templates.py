"""Prompt templates and tilings of the published checkpoints.

Templates are byte for byte: they are an interface, not prose. ``{task}`` stands for the
instruction, already lower-cased (docs/model.md, section 5).
"""

from collections.abc import Mapping

from dzrobot.errors import ConfigError

_MULTI_VIEW = "A multi-view video shows that a robot {task} The video is split into "
_AGAIN = " The robot {task}"

TWO_VIEWS = (
    _MULTI_VIEW
    + "two horizontal views: the left view shows the exterior camera and the right view "
    "shows the wrist camera." + _AGAIN
)
"""Exterior camera left, wrist camera right."""

THREE_VIEWS = (
    _MULTI_VIEW
    + "three views: The top view shows the camera view from the robot's wrist, the bottom-left "
    "view shows the camera view from the left exterior camera, and the bottom-right view shows "
    "the camera view from the right exterior camera. During training, one of the two bottom "
    "exterior views may be a "
    "black screen (dropped view)." + _AGAIN
)
"""Wrist camera on top, two exterior cameras below."""

HEAD_AND_HANDS = (
    _MULTI_VIEW
    + "four views: The top-left view shows the camera view from the robot's head, the top-right "
    "view shows the camera view from the right hand, the bottom-left view shows the camera view "
    "from the "
    "left hand, and the bottom-right view is a black screen (inactive view)." + _AGAIN
)
"""Head camera and a camera in each hand."""

TOP_AND_SIDES = (
    _MULTI_VIEW
    + "four views: The top-left view shows the top camera, the top-right view shows the right "
    "camera, the bottom-left view shows the left camera, and the bottom-right view is a black "
    "screen." + _AGAIN
)
"""One camera above and one on each side."""

HUMAN = "A single view video shows that a human {task}"
"""One camera, a person at work."""

_QUADRANTS = ((True, True), (True, False))

PROMPT_TILES: Mapping[str, tuple[tuple[bool, ...], ...]] = {
    TWO_VIEWS: ((True, True),),
    THREE_VIEWS: ((True,), (True, True)),
    HEAD_AND_HANDS: _QUADRANTS,
    TOP_AND_SIDES: _QUADRANTS,
    HUMAN: ((True,),),
}
"""Template -> the tiles that it describes, rows from the top: a view, or (False) black."""

NEGATIVE = (
    "Vibrant colors, overexposed, static, blurry details, text, subtitles, style, artwork, "
    "painting, image, still, grayscale, dull, worst quality, low quality, JPEG artifacts, ugly, "
    "mutilated, extra fingers, bad hands, bad face, deformed, disfigured, mutated limbs, fused "
    "fingers, stagnant image, cluttered background, three legs, many people in the background, "
    "walking backwards."
)
"""What the guided video is steered away from."""

PROMPTS: Mapping[str, str] = {
    "libero_sim": TWO_VIEWS,
    "franka_pnp": TWO_VIEWS,
    "oxe_droid": THREE_VIEWS,
    "agibot": HEAD_AND_HANDS,
    "xdof": HEAD_AND_HANDS,
    "yam": TOP_AND_SIDES,
    "gr1_unified": HUMAN,
    "mecka_hands": HUMAN,
}
"""Template of each embodiment the published checkpoints know, by tag."""


Tiles = tuple[tuple[str | None, ...], ...]


def side_by_side(exterior: str, wrist: str) -> Tiles:
    """Return two views in a row: LIBERO, Franka."""
    return ((exterior, wrist),)


def wrist_on_top(left: str, right: str, wrist: str) -> Tiles:
    """Return the wrist view stretched over two exterior views: DROID."""
    return ((wrist,), (left, right))


def quadrants(*keys: str) -> Tiles:
    """Return views top left, bottom left, top right, the rest black: AgiBot, xDOF, YAM."""
    if not 1 <= len(keys) <= 3:
        raise ConfigError(f"quadrants take one to three views, got {len(keys)}: {', '.join(keys)}")
    top_left, bottom_left, top_right = (*keys, None, None)[:3]
    return ((top_left, top_right), (bottom_left, None))
