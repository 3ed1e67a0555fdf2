"""Tilings of the published checkpoints, for use as ``Embodiment.tiles``; None is a black tile."""

from dzrobot.errors import ConfigError

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
