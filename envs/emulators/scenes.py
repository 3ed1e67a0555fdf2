"""Scenes around the emulated arm, by name, and what its cameras see of them.

Without a scene, images are painted; else MuJoCo renders them.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.libero.assets import assets_folder, import_libero
from dzrobot.envs.libero.goal_progress import LIFTED_M
from dzrobot.envs.mujoco.culling import culled_scene
from dzrobot.envs.mujoco.lift_scene import (
    CAMERAS,
    EMPTY_SCENE,
    LIFT_SCENE,
    OBJECT,
    ObjectStart,
    TableObject,
    load_model,
    load_mujoco,
    robosuite_asset,
)
from dzrobot.envs.mujoco.simulator import check_versions, choose_backend
from dzrobot.envs.panda.poses import Array
from dzrobot.errors import ConfigError, MissingDependencyError, SimulatorError, suggest
from dzrobot.rng import numpy_generator

EMPTY = EMPTY_SCENE
"""The arm alone, without physics: it follows exactly, and cameras see where the hand is."""

LIFT = LIFT_SCENE
SCENES = (EMPTY, LIFT)
"""Besides, the name of any object of LIBERO whose assets are there: it lies in the cube's place."""


def check_scene(scene: str) -> None:
    """Raise unless ``scene`` is known, and what it needs is installed; imports nothing.

    Raises:
        ConfigError: there is no such scene.
        MissingDependencyError: it needs a simulator that is not installed.
        SimulatorError: the simulator has the wrong version, or LIBERO's assets are not there.
    """
    check_name(scene)
    if scene == EMPTY:
        return
    try:
        check_versions()
    except (MissingDependencyError, SimulatorError) as error:
        raise type(error)(
            f"the emulated arm's scene {scene!r} is simulated: {error} Without it there is the "
            f"arm alone: workcell='emulated:{EMPTY}', or `dzrobot emulate --scene {EMPTY}`."
        ) from error


def check_name(scene: str) -> None:
    """Raise unless there is a scene, or an object of LIBERO, of this name; imports nothing.

    Raises:
        ConfigError: there is none.
    """
    if scene in SCENES:
        return
    known, without = list(SCENES), ""
    try:
        known += sorted(libero_objects())
    except SimulatorError as error:
        without = f" Objects of LIBERO need its assets: {error}"
    if scene not in known:
        raise ConfigError(
            f"unknown scene {scene!r}.{suggest(scene, known)} Known: {', '.join(known)}.{without}"
        )


FAMILIES = ("stable_hope_objects", "stable_scanned_objects", "turbosquid_objects")
"""Folders of LIBERO's assets with objects that can be carried."""

CLEAR_M = 0.02
"""The same of another object: what is then below it, about as much as below the cube."""

_DROP_M = 0.01
_SPREAD_M = 0.03
_HALF_M = (0.020, 0.022)
_TURN_RAD = 0.4
_ALIKE_M = 1e-3
_DENSITY = 1000.0
_COLLISION_GROUP = 0
_OBJECT_JOINT, _HALF_EXTENT = slice(9, 16), slice(16, 19)


class Cube:
    """The red cube of robosuite's Lift, drawn as there.

    Args:
        texture: File of its wood.
    """

    task = "lift the red cube"

    def __init__(self, texture: Path) -> None:
        self._texture = texture

    def add(self, mujoco: Any, spec: Any, stiff: tuple[float, float]) -> None:
        """Add shape and wood."""
        spec.add_texture(
            name="redwood", type=mujoco.mjtTexture.mjTEXTURE_CUBE, file=str(self._texture)
        )
        wood = spec.add_material(name="redwood", specular=0.4, shininess=0.1)
        wood.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "redwood"
        cube = spec.worldbody.add_body(name=OBJECT)
        cube.add_freejoint(name=OBJECT)
        box = {"type": mujoco.mjtGeom.mjGEOM_BOX, "size": self.start(0).half}
        cube.add_geom(name="cube_collision", density=_DENSITY, solref=stiff, group=0, **box)
        cube.add_geom(
            name="cube_visual", density=0.0, group=1, contype=0, conaffinity=0, material="redwood",
            **box,
        )  # fmt: skip

    def start(self, number: int) -> ObjectStart:
        """Return what robosuite's Lift could have drawn."""
        draw = numpy_generator("emulated scene", number)
        x, y = draw.uniform(-_SPREAD_M, _SPREAD_M, 2)
        yaw = float(draw.uniform(0.0, 2.0 * np.pi))
        half = draw.uniform(*_HALF_M, 3)
        return ObjectStart(np.array([x, y, half[2] + _DROP_M]), yaw, half)

    def fit(self, model: Any, half: Array) -> None:
        """Set shape, and mass and inertia of its density."""
        body = model.body(OBJECT).id
        mass = _DENSITY * 8.0 * float(np.prod(half))
        x, y, z = (2.0 * half) ** 2
        model.body_mass[body] = mass
        model.body_inertia[body] = mass / 12.0 * np.array([y + z, x + z, x + y])
        for geom in np.flatnonzero(model.geom_bodyid == body):
            model.geom_size[geom] = half
            model.geom_aabb[geom, 3:] = half
            model.geom_rbound[geom] = np.linalg.norm(half)

    def lifted_m(self, half: Array) -> float:
        """Return robosuite's height, which asks for no size."""
        return LIFTED_M


class LiberoObject:
    """An object of LIBERO, standing as it does there, its narrower side where the fingers close.

    Args:
        name: LIBERO's, such as ``alphabet_soup``.

    Raises:
        ConfigError: LIBERO's code has no such object.
        MissingDependencyError: LIBERO is not installed.
        SimulatorError: there are no assets.
    """

    def __init__(self, name: str) -> None:
        self.task = task_of(name)
        self._file = libero_objects()[name]
        import_libero()
        import mujoco
        from libero.libero.envs.base_object import OBJECTS_DICT

        if name not in OBJECTS_DICT:
            raise ConfigError(f"LIBERO's assets have {name!r}, and its code does not")
        self._upright = _standing(mujoco, OBJECTS_DICT[name]())
        self._middle, self._half = self._extents(mujoco)
        self._turned = float(np.pi / 2 if self._half[1] > self._half[0] + _ALIKE_M else 0.0)

    def add(self, mujoco: Any, spec: Any, stiff: tuple[float, float]) -> None:
        """Add its shapes; contacts are as LIBERO's files have them."""
        body = spec.worldbody.add_body(name=OBJECT)
        body.add_freejoint(name=OBJECT)
        frame = body.add_frame(pos=-self._middle, quat=self._upright)
        spec.attach(self._part(mujoco), frame=frame, prefix="libero_")

    def start(self, number: int) -> ObjectStart:
        """Return a place as far from the middle as Lift's cube has, and a small turn."""
        draw = numpy_generator("emulated scene", number)
        x, y = draw.uniform(-_SPREAD_M, _SPREAD_M, 2)
        yaw = self._turned + float(draw.uniform(-_TURN_RAD, _TURN_RAD))
        return ObjectStart(np.array([x, y, self._half[2] + _DROP_M]), yaw, self._half)

    def fit(self, model: Any, half: Array) -> None:
        """Do nothing: it has one size."""

    def lifted_m(self, half: Array) -> float:
        """Return half of its height, and what is to be below it."""
        return float(half[2]) + CLEAR_M

    def _part(self, mujoco: Any) -> Any:
        part = mujoco.MjSpec.from_file(str(self._file))
        for geom in part.geoms:
            if geom.group != _COLLISION_GROUP:
                # What is only seen weighs nothing: arm and cameras have one body.
                geom.density = 0.0
        return part

    def _extents(self, mujoco: Any) -> tuple[Array, Array]:
        """Return middle and half extents (3,) of its solid shapes, once it stands."""
        spec = mujoco.MjSpec()
        frame = spec.worldbody.add_frame(quat=self._upright)
        spec.attach(self._part(mujoco), frame=frame, prefix="")
        model = spec.compile()
        data = mujoco.MjData(model)
        mujoco.mj_kinematics(model, data)
        solid = np.flatnonzero(model.geom_group == _COLLISION_GROUP)
        turns = data.geom_xmat[solid].reshape(-1, 3, 3)
        boxes = model.geom_aabb[solid]
        centers = data.geom_xpos[solid] + np.einsum("gij,gj->gi", turns, boxes[:, :3])
        halves = np.einsum("gij,gj->gi", np.abs(turns), boxes[:, 3:])
        low, high = (centers - halves).min(axis=0), (centers + halves).max(axis=0)
        return (low + high) / 2, (high - low) / 2


def table_object_of(scene: str) -> TableObject:
    """Return what lies on the table of a scene: of Lift a cube, else an object of LIBERO.

    Raises:
        ConfigError: LIBERO has no such object.
        MissingDependencyError: LIBERO is not installed.
        SimulatorError: its assets are not there.
    """
    return (
        Cube(robosuite_asset("textures/red-wood.png"))
        if scene == LIFT_SCENE
        else LiberoObject(scene)
    )


def libero_objects() -> Mapping[str, Path]:
    """Return the files of all objects whose assets are there, by name.

    Raises:
        SimulatorError: there are no assets.
    """
    folder = assets_folder()
    files = (file for family in FAMILIES for file in sorted((folder / family).glob("*/*.xml")))
    return {file.stem: file for file in files if file.stem == file.parent.name}


def task_of(name: str) -> str:
    """Return what is to be done with an object of LIBERO, in words."""
    return f"lift the {name.replace('_', ' ')}"


def object_in(visible: Array) -> tuple[Array, Array]:
    """Return the object's pose (4, 4) and half of its edges (3,), of `ScenePhysics.visible`."""
    x, y, z, w, i, j, k = visible[_OBJECT_JOINT]
    pose = np.eye(4)
    pose[:3, :3] = (
        (1 - 2 * (j * j + k * k), 2 * (i * j - k * w), 2 * (i * k + j * w)),
        (2 * (i * j + k * w), 1 - 2 * (i * i + k * k), 2 * (j * k - i * w)),
        (2 * (i * k - j * w), 2 * (j * k + i * w), 1 - 2 * (i * i + j * j)),
    )
    pose[:3, 3] = (x, y, z)
    return pose, visible[_HALF_EXTENT].copy()


def _standing(mujoco: Any, listed: Any) -> Array:
    """Return the rotation (w, x, y, z) with which LIBERO puts an object down."""
    turns = listed.rotation
    if not isinstance(turns, Mapping):
        turns = {listed.rotation_axis: turns}
    whole, one = np.array([1.0, 0.0, 0.0, 0.0]), np.zeros(4)
    for axis, angles in turns.items():
        mujoco.mju_axisAngle2Quat(one, np.eye(3)["xyz".index(axis)], float(np.mean(angles)))
        mujoco.mju_mulQuat(whole, one, whole.copy())
    # LIBERO's samplers write (x, y, z, w) where MuJoCo reads (w, x, y, z), and its list of objects
    # is such that they stand when it is read so.
    return np.roll(whole, -1)


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
