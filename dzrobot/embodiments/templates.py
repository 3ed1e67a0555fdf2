"""Prompt templates and tilings of the published checkpoints.

Templates are byte for byte: they are an interface, not prose. ``{task}`` stands for the
instruction, already lower-cased (docs/model.md, section 5).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a template says of one tile."""

    what: str
    """The template's words."""

    on_hand: bool | None = None
    """Whether that camera moves with a hand; None: the template does not say."""

    side: Literal["left", "right"] | None = None
    """Which of two cameras of a kind it is."""

    names: tuple[str, ...] = ()
    """Names of the view that published robots show there."""


_EXTERIOR = Shown(what="the exterior camera", on_hand=False, names=("image", "exterior_image"))
_WRIST = Shown(what="the wrist camera", on_hand=True, names=("wrist_image", "wrist_image_left"))
_LEFT = Shown(
    what="the left exterior camera", on_hand=False, side="left", names=("exterior_image_1_left",)
)
_RIGHT = Shown(
    what="the right exterior camera", on_hand=False, side="right", names=("exterior_image_2_left",)
)
_HEAD = Shown(what="the robot's head", on_hand=False)
_LEFT_HAND = Shown(what="the left hand", on_hand=True, side="left")
_RIGHT_HAND = Shown(what="the right hand", on_hand=True, side="right")
_TOP = Shown(what="the top camera", on_hand=False)
_LEFT_CAMERA = Shown(what="the left camera", side="left")
_RIGHT_CAMERA = Shown(what="the right camera", side="right")

PROMPT_TILES: Mapping[str, tuple[tuple[Shown | None, ...], ...]] = {
    TWO_VIEWS: ((_EXTERIOR, _WRIST),),
    THREE_VIEWS: ((_WRIST,), (_LEFT, _RIGHT)),
    HEAD_AND_HANDS: ((_HEAD, _RIGHT_HAND), (_LEFT_HAND, None)),
    TOP_AND_SIDES: ((_TOP, _RIGHT_CAMERA), (_LEFT_CAMERA, None)),
    HUMAN: ((Shown(what="one camera"),),),
}
"""Template -> the tiles that it describes, rows from the top; None: black."""

_ON_HAND = {"wrist", "hand", "gripper"}
_OFF_HAND = {
    "exterior", "external", "scene", "front", "agentview", "third", "static", "base", "head", "top",
    "overhead", "ego", "high",
}  # fmt: skip
_SIDES = {"left", "right"}


def told_faults(prompt: str, tiles: Sequence[Sequence[str | None]]) -> Iterator[str]:
    """Yield where a published template tells the network of other tiles than it is shown.

    A view is known by its name: that of a published robot, or words such as ``wrist`` and ``left``.
    Names that say nothing are taken as they are, as are prompts of one's own.

    Args:
        prompt: The template.
        tiles: Rows of view keys from the top; None is a black tile.
    """
    described = PROMPT_TILES.get(prompt)
    if described is None:
        return
    if _form(described) != _form(tiles):
        yield (
            f"the prompt describes the tiles {_rows(described)}, and tiles are {_rows(tiles)} "
            "(rows from the top): tile the views as it says, or write a prompt for these"
        )
        return
    pairs = [
        (tile, key.partition(".")[2])
        for row, keys in zip(described, tiles, strict=True)
        for tile, key in zip(row, keys, strict=True)
        if tile is not None and key is not None
    ]
    # In DROID "left" is a lens, in all names: a side says something where both sides are named.
    sided = {side for _, name in pairs for side in _words(name) & _SIDES} == _SIDES
    shown = [tile for tile, _ in pairs]
    for tile, name in pairs:
        published = [other for other in shown if name in other.names]
        if tile in published:
            continue
        if published or _contradicts(tile, name, shown if sided else ()):
            yield (
                f"the prompt says that a tile shows {tile.what}, and that tile is the view "
                f"{name!r}: put the views where the prompt says they are, or write a prompt for "
                "these"
            )


def _contradicts(tile: Shown, name: str, sided: Sequence[Shown]) -> bool:
    """Return whether the words of a view's name speak against the tile that it is in.

    Args:
        tile: What the prompt says of it.
        name: The view's.
        sided: All tiles, where sides tell the views apart; else none.
    """
    words = _words(name)
    on, off = bool(words & _ON_HAND), bool(words & _OFF_HAND)
    # A name that says both ("top_hand"), or neither, is not known to be either.
    known = None if on == off else on
    if None not in (tile.on_hand, known) and known != tile.on_hand:
        return True
    sides = words & _SIDES
    fitting = [other for other in sided if known is None or other.on_hand in (None, known)]
    return len(sides) == 1 and tile.side not in sides and any(o.side in sides for o in fitting)


def _words(name: str) -> set[str]:
    return set(re.findall("[a-z]+", name.lower()))


def _form(tiles: Sequence[Sequence[object]]) -> list[list[bool]]:
    return [[tile is not None for tile in row] for row in tiles]


def _rows(tiles: Sequence[Sequence[object]]) -> str:
    return " / ".join(" ".join("view" if tile else "black" for tile in row) for row in _form(tiles))


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


def layout_of(
    names: Sequence[str],
) -> tuple[Tiles, str, str | None, list[str]]:
    """Return tiles, prompt, the prompt's published name, and questions about the cameras."""
    words = {name: _words(name) for name in names}
    on = [
        name for name in names if words[name] & _ON_HAND and not words[name] & (_OFF_HAND - {"top"})
    ]
    off = [name for name in names if words[name] & _OFF_HAND and name not in on]
    left = [name for name in names if "left" in words[name]]
    right = [name for name in names if "right" in words[name]]
    unsaid = [name for name in names if name not in on and name not in off]
    asked = [
        f"what does the camera {name!r} show? Its name does not say; the prompt calls it so"
        for name in unsaid
        if len(names) > 1
    ]
    if len(names) == 1:
        prompt = "A single view video shows that a robot {task}"
        return ((names[0],),), prompt, None, asked
    if len(names) == 2 and len(on) == 1:
        (wrist,) = on
        (other,) = [name for name in names if name != wrist]
        return ((other, wrist),), "", "TWO_VIEWS", [] if other in off else asked
    if len(names) == 3 and len(on) == 2 and len(off) == 1:
        hands = [[n for n in on if n in side] for side in (left, right)]
        if all(len(hand) == 1 for hand in hands) and words[off[0]] & {"head", "high", "top", "ego"}:
            return ((off[0], hands[1][0]), (hands[0][0], None)), "", "HEAD_AND_HANDS", asked
    if len(names) == 3 and len(on) == 1 and len(off) == 2:
        sides = [[n for n in off if n in side] for side in (left, right)]
        if all(len(side) == 1 for side in sides):
            return ((on[0],), (sides[0][0], sides[1][0])), "", "THREE_VIEWS", asked
    return *_plain_tiles(names), None, asked


def _plain_tiles(names: Sequence[str]) -> tuple[Tiles, str]:
    """Return views in the dataset's order, and a sentence of one's own that says where each is."""
    if len(names) == 2:
        rows: Tiles = (tuple(names),)
        places = ["left", "right"]
    else:
        padded: list[str | None] = [*names, *[None] * (len(names) % 2)]
        rows = tuple((padded[i], padded[i + 1]) for i in range(0, len(padded), 2))
        places = [
            f"row {i // 2 + 1} {'left' if i % 2 == 0 else 'right'}" for i in range(len(names))
        ]
    told = ", ".join(
        f"the {place} view shows the camera {name.replace('_', ' ')}"
        for place, name in zip(places, names, strict=True)
    )
    prompt = (
        "A multi-view video shows that a robot {task} The video is split into "
        f"{len(names)} views: {told}. The robot {{task}}"
    )
    return rows, prompt
