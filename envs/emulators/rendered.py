"""Cameras in the MuJoCo scene, at the poses of LIBERO's views: exterior and in the wrist.

Images are rendered at the size of the stream, when one is due and a client has the stream open.
Shadows and reflections are left out: they double the time of an image and none of Lift's lights
casts any. What no camera's ray meets is left out too, which changes no image.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.emulators.table_objects import thing_of
from dzrobot.envs.emulators.views import SECOND_EXTERIOR, SERIALS, CameraView, Image, Size, to_yuyv
from dzrobot.envs.mujoco.culling import culled_scene
from dzrobot.envs.mujoco.lift_scene import CAMERAS, load_model, load_mujoco
from dzrobot.envs.mujoco.rendering import choose_backend
from dzrobot.errors import SimulatorError

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
        self._thing = thing_of(scene)
        self.model = model = load_model(self._thing, drawn=True)
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
            self._thing.fit(model, scene[model.nq : model.nq + 3])
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
