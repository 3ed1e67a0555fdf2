"""What an emulated camera sees: the interface, and a painting for an arm without a scene."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
Size = tuple[int, int]
"""Width and height in pixels."""


SERIALS = ("910000000001", "910000000002")
"""Serial numbers of the two cameras that every emulated workcell has: exterior and wrist."""

SECOND_EXTERIOR = "910000000003"
"""Of a third, for embodiments with three views."""

SIZES = ((640, 480), (320, 240), (640, 360), (320, 180))
"""Width and height of the images on offer, all of one vertical angle of view; packing one for the
bus takes 30 ns a byte."""


class CameraView(Protocol):
    """What one camera sees."""

    def focal_px(self, size: Size) -> float:
        """Return the focal length at an image size, in pixels."""
        ...

    def image(self, size: Size, scene: NDArray[np.float64]) -> Image:
        """Return packed YUYV, (H, W, 2), of a scene as `Dynamics.visible` describes it."""
        ...


class PaintedView:
    """A table, and the hand above it where the arm says it is.

    Args:
        serial: Sets the colors.
    """

    def __init__(self, serial: str) -> None:
        self._hue = sum(map(ord, serial)) % 97
        self._tables: dict[Size, Image] = {}
        self._hand = to_yuyv(np.full((2, 2, 3), (210, 40, 40), np.uint8))[0]

    def focal_px(self, size: Size) -> float:
        """Return that of a D435, about."""
        return 0.96 * size[0]

    def image(self, size: Size, scene: NDArray[np.float64]) -> Image:
        """Return the painting for position, yaw and width of the hand, the first 5 numbers."""
        x, y, z, _, opened = scene[:5]
        width, height = size
        image = self._table(size).copy()
        column = int(width * np.clip(0.5 + y, 0.1, 0.9)) // 2 * 2
        row = int(height * np.clip(x, 0.125, 0.875))
        half = int(height * np.clip(0.025 + 0.083 * z, 0.017, 0.104))
        gap = int(width * (0.003 + 0.31 * opened)) // 2 * 2
        finger = width // 40
        for left in (column - gap - finger, column + gap):
            part = image[row - half : row + half, left : left + finger]
            part.reshape(len(part), -1, 2, 2)[:] = self._hand
        return image

    def _table(self, size: Size) -> Image:
        if size not in self._tables:
            width, height = size
            rows, columns = np.mgrid[0:height, 0:width]
            image = np.empty((height, width, 3), np.uint8)
            image[..., 0] = 60 + self._hue + 40 * rows // height
            image[..., 1] = 90 + 60 * columns // width
            image[..., 2] = 120 - self._hue // 2
            self._tables[size] = to_yuyv(image)
        return self._tables[size]


def to_yuyv(rgb: Image) -> Image:
    """Return packed YUYV, (H, W, 2) uint8, of an RGB image (BT.601, studio range)."""
    red, green, blue = (rgb[..., channel].astype(np.float32) for channel in range(3))
    luma = 16 + 0.257 * red + 0.504 * green + 0.098 * blue
    chroma_u = 128 - 0.148 * red - 0.291 * green + 0.439 * blue
    chroma_v = 128 + 0.439 * red - 0.368 * green - 0.071 * blue
    packed = np.empty((*rgb.shape[:2], 2), np.uint8)
    packed[..., 0] = luma
    packed[:, 0::2, 1] = chroma_u[:, 0::2]
    packed[:, 1::2, 1] = chroma_v[:, 0::2]
    return packed
