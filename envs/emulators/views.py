"""Images of the emulated cameras: painted for an arm without a scene, else rendered by MuJoCo."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.emulators.scenes import EMPTY, table_object_of
from dzrobot.envs.mujoco.culling import culled_scene
from dzrobot.envs.mujoco.lift_scene import CAMERAS, load_model, load_mujoco
from dzrobot.envs.mujoco.simulator import choose_backend
from dzrobot.errors import SimulatorError

Image = NDArray[np.uint8]
Size = tuple[int, int]
"""Width and height in pixels."""


SERIALS = ("910000000001", "910000000002")
"""Serial numbers of the two cameras that every emulated workcell has: exterior and wrist."""

SECOND_EXTERIOR = "910000000003"
"""Serial number of a third camera, for embodiments with three views."""

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


LARGEST = (640, 480)
_VISIBLE_GROUP = 1
_MAX_SHAPES = 1000


def rendered_views(scene: str, serials: Sequence[str]) -> list[CameraView]:
    """Return the view of every camera of one scene; one of no known number is an exterior one.

    Raises:
        ConfigError: there is no such scene.
        MissingDependencyError: mujoco or robosuite is not installed.
        SimulatorError: one of them has the wrong version, or OpenGL does not work.
    """
    drawing = SceneDrawing(scene)
    exterior, wrist, side = CAMERAS
    of = {SERIALS[0]: exterior, SERIALS[1]: wrist, SECOND_EXTERIOR: side}
    return [RenderedView(drawing, of.get(serial, exterior)) for serial in serials]


class SceneDrawing:
    """One OpenGL context for all cameras of a scene; used by the thread that made it.

    Args:
        scene: ``lift``, or the name of an object of LIBERO.
    """

    def __init__(self, scene: str) -> None:
        self._mujoco = mujoco = load_mujoco()
        self._table_object = table_object_of(scene)
        self.model = model = load_model(self._table_object, drawn=True)
        self._data = mujoco.MjData(model)
        model.vis.global_.offwidth, model.vis.global_.offheight = LARGEST
        try:
            self._gl = mujoco.GLContext(*LARGEST)
            self._gl.make_current()
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            raise SimulatorError(
                f"the emulated cameras have no OpenGL ({choose_backend()}: {error}). Install "
                "`apt-get install libegl1 libgl1 libglib2.0-0 libosmesa6`, or set MUJOCO_GL"
            ) from error
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._shapes = mujoco.MjvScene(model, maxgeom=_MAX_SHAPES)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._shapes.flags[flag] = 0
        self._shown = mujoco.MjvOption()
        self._shown.geomgroup[:] = 0
        self._shown.geomgroup[_VISIBLE_GROUP] = 1
        self._shown.sitegroup[:] = 0
        self._at: NDArray[np.float64] | None = None

    def draw(self, camera: int, size: Size, scene: NDArray[np.float64]) -> Image:
        """Return an image (H, W, 3) uint8 of joints (nq,) and half of the object's extents (3,)."""
        mujoco, model, data = self._mujoco, self.model, self._data
        if self._at is None or not np.array_equal(self._at, scene):
            self._at = scene
            data.qpos[:] = scene[: model.nq]
            self._table_object.fit(model, scene[model.nq : model.nq + 3])
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)
            mujoco.mj_camlight(model, data)
        eye = mujoco.MjvCamera()
        eye.type, eye.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, camera
        every = mujoco.mjtCatBit.mjCAT_ALL
        width, height = size
        with culled_scene(model, data, self._shown, self._shapes, camera, width / height):
            mujoco.mjv_updateScene(model, data, self._shown, None, eye, every, self._shapes)
        frame = mujoco.MjrRect(0, 0, width, height)
        mujoco.mjr_render(frame, self._shapes, self._context)
        image = np.empty((height, width, 3), np.uint8)
        mujoco.mjr_readPixels(image, None, frame, self._context)
        return image[::-1]


class RenderedView:
    """One camera of the scene.

    Args:
        drawing: What draws it.
        name: Of the camera.
    """

    def __init__(self, drawing: SceneDrawing, name: str) -> None:
        self._drawing = drawing
        camera: Any = drawing.model.camera(name)
        self._number = int(camera.id)
        self._tall = math.radians(float(camera.fovy[0]))

    def focal_px(self, size: Size) -> float:
        """Return the focal length that gives the camera's vertical angle of view."""
        return size[1] / (2.0 * math.tan(self._tall / 2.0))

    def image(self, size: Size, scene: NDArray[np.float64]) -> Image:
        """Render."""
        return to_yuyv(self._drawing.draw(self._number, size, scene))


def views_of(scene: str, serials: Sequence[str]) -> list[CameraView]:
    """Return what each camera sees of a scene.

    Raises:
        MissingDependencyError: the scene needs a simulator that is not installed.
        SimulatorError: it has the wrong version, or there is no OpenGL to draw with.
    """
    if scene == EMPTY:
        return [PaintedView(serial) for serial in serials]
    return rendered_views(scene, serials)
