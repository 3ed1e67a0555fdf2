"""Import MuJoCo and robosuite with checked versions, and manage their OpenGL contexts."""

import importlib.util
import logging
import os
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from dzrobot.errors import MissingDependencyError, SetupError, counted
from dzrobot.files import cache_folder, spare_cache
from dzrobot.importing import install

BACKENDS = ("egl", "osmesa", "glx")
"""What MuJoCo and robosuite can draw with off screen; egl needs no display and no GPU."""

DEVICE_VARIABLE = "MUJOCO_EGL_DEVICE_ID"
"""Environment variable by which both choose a device for egl; read when a context opens."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"
"""robosuite reads device numbers from it too, and fails on what CUDA allows beside numbers."""


def choose_backend() -> str:
    """Return the OpenGL backend, and set ``MUJOCO_GL`` to it where it is not set.

    Must run before mujoco is imported. Without a setting it is egl, which draws with and without a
    display.

    Raises:
        SetupError: ``MUJOCO_GL`` asks for something that cannot draw off screen.
    """
    requested = os.environ.get("MUJOCO_GL", "").strip().lower()
    if requested and requested not in BACKENDS:
        raise SetupError(
            f"MUJOCO_GL={requested!r} cannot draw off screen here. Allowed: {', '.join(BACKENDS)}; "
            "unset it for egl."
        )
    os.environ["MUJOCO_GL"] = requested or "egl"
    return os.environ["MUJOCO_GL"]


def egl_device(environment: Mapping[str, str], count: int) -> int:
    """Return the number of the EGL device to draw with.

    It is the one that ``MUJOCO_EGL_DEVICE_ID`` names, else the first of ``CUDA_VISIBLE_DEVICES``
    if that is the number of one, else the first. Names of GPUs (UUID, MIG) say nothing of EGL's
    numbers.

    Args:
        environment: Environment variables.
        count: Devices that EGL has.

    Raises:
        SetupError: ``MUJOCO_EGL_DEVICE_ID`` names no device.
    """
    named = environment.get(DEVICE_VARIABLE, "").strip()
    if named:
        if named.isascii() and named.isdigit() and int(named) < count:
            return int(named)
        raise SetupError(
            f"{DEVICE_VARIABLE}={named!r} is not the number of an EGL device: this machine has "
            f"{counted(count, 'EGL device')}, allowed are 0 to {count - 1}; unset it, and one is "
            "chosen."
        )
    visible = environment.get(_VISIBLE, "")
    first = visible.partition(",")[0].strip()
    if first.isascii() and first.isdigit() and int(first) < count:
        return int(first)
    if visible and count > 1:
        _log.warning(
            "%s=%r names none of the %d EGL devices: simulators draw with device 0; "
            "set %s for another one",
            _VISIBLE, visible, count, DEVICE_VARIABLE,
        )  # fmt: skip
    return 0


def choose_device() -> None:
    """Set ``MUJOCO_EGL_DEVICE_ID`` to the device to draw with; see :func:`egl_device`.

    Raises:
        SetupError: The one that is set is not there, or EGL has none.
    """
    if choose_backend() != "egl":
        return
    count = len(import_module("mujoco.egl.egl_ext").eglQueryDevicesEXT())
    if not count:
        raise SetupError(
            "EGL has no device to draw with. Install `apt-get install libegl1 libgl1 "
            "libglx-mesa0`, which draw without a GPU, or try MUJOCO_GL=osmesa."
        )
    os.environ[DEVICE_VARIABLE] = str(egl_device(os.environ, count))


@contextmanager
def _hidden(variable: str) -> Iterator[None]:
    value = os.environ.pop(variable, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[variable] = value


_drawn_in: set[int] = set()
"""Process that has opened a context; more than one where it has forked since."""


def check_rendering() -> None:
    """Open and free a small context, once per process; call after robosuite is imported.

    Raises:
        SetupError: The backend cannot open a context, or the process was forked from one that
            has: the threads of the OpenGL library are gone, and drawing would wait for them.
    """
    if os.getpid() in _drawn_in:
        return
    if _drawn_in:
        raise SetupError(
            "this process was forked from one that has opened a simulator, and OpenGL does not "
            "survive that. Start processes anew: gym.make_vec(..., vectorization_mode='async', "
            "vector_kwargs={'context': 'spawn'}), or multiprocessing.get_context('spawn')."
        )
    opengl_error = import_module("OpenGL.error").Error
    context_class = import_module("robosuite.utils.binding_utils").GLContext
    try:
        choose_device()
        context = context_class(max_width=64, max_height=64)
        context.make_current()
        context.free()
    except (
        ImportError, AttributeError, OSError, RuntimeError, ValueError, AssertionError, opengl_error
    ) as error:  # fmt: skip
        backend = os.environ["MUJOCO_GL"]
        other = "osmesa" if backend == "egl" else "egl"
        raise SetupError(
            f"OpenGL through {backend} does not work ({type(error).__name__}: {error}). Install "
            "`apt-get install libegl1 libgl1 libglib2.0-0 libosmesa6`, or try "
            f"MUJOCO_GL={other}."
        ) from error
    _drawn_in.add(os.getpid())


def use_context(sim: Any) -> None:
    """Make the OpenGL context of ``sim`` current, if it has one.

    robosuite draws into, and frees from, whichever context happens to be current; with two
    simulators in a process that may be the other one's.
    """
    if sim is not None and sim._render_context_offscreen is not None:
        sim._render_context_offscreen.gl_ctx.make_current()


def free_context(context: Any) -> None:
    """Free robosuite's drawing context now: at interpreter exit it is too late."""
    context.gl_ctx.make_current()
    context.con.free()
    context.gl_ctx.free()


_UPLOADED = ("mesh_", "tex_", "mat_", "hfield_", "skin_")
_AT_UPLOAD = attrgetter(
    *(f"quality.{name}" for name in ("offsamples", "shadowsize", "numslices", "numstacks",
                                     "numquads")),
    *(f"global_.{name}" for name in ("offwidth", "offheight", "linewidth")),
)  # fmt: skip


def same_drawing(one: Any, other: Any) -> bool:
    """Return whether two models (robosuite's) upload the same to a drawing context."""
    return _uploads_alike(one._model, other._model)


def _uploads_alike(one: Any, other: Any) -> bool:
    arrays = attrgetter(*(name for name in dir(one) if name.startswith(_UPLOADED)))
    return _AT_UPLOAD(one.vis) == _AT_UPLOAD(other.vis) and all(
        map(_same_bits, arrays(one), arrays(other))
    )


_PIECE = 1 << 18
"""Bytes of an array that are compared at a time: their copies stay in the processor's cache."""


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    mine, theirs = one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8)
    return mine.size == theirs.size and all(
        mine[at : at + _PIECE].tobytes() == theirs[at : at + _PIECE].tobytes()
        for at in range(0, mine.size, _PIECE)
    )


def put_back(model: Any, original: Any) -> bool:
    """Write into ``model`` (MuJoCo's) all that differs in ``original``, of which it is a copy.

    Returns:
        Whether both upload the same to a drawing context, as in :func:`same_drawing`.
    """
    alike = _uploads_alike(model, original)
    for name in dir(original):
        if name.startswith("_") or (alike and name.startswith(_UPLOADED)):
            continue
        mine, value = map(attrgetter(name), (model, original))
        if isinstance(value, np.ndarray):
            mine[...] = value
        elif name in _SETTINGS:
            _put_settings_back(mine, value)
    return alike


_SETTINGS = ("opt", "vis", "stat")


def _put_settings_back(settings: Any, original: Any) -> None:
    for name in dir(original):
        if name.startswith("_"):
            continue
        mine, value = map(attrgetter(name), (settings, original))
        if isinstance(value, np.ndarray):
            mine[...] = value
        elif isinstance(value, int | float):
            setattr(settings, name, value)
        elif not callable(value):
            _put_settings_back(mine, value)


def transfer_context(context: Any, sim: Any) -> None:
    """Let ``sim``, which has none, draw with another scene's context; see :func:`same_drawing`.

    What remains is what a new context of ``sim`` would be: meshes and textures are there, all that
    follows from the scene's own size and pose is set again.
    """
    import mujoco

    context.gl_ctx.make_current()
    sim.forward()
    sim.add_render_context(context)
    context.sim, context.model, context.data = sim, sim.model, sim.data
    model, drawn = sim.model._model, context.con
    context.scn = mujoco.MjvScene(model, maxgeom=context.scn.maxgeom)
    context.cam = mujoco.MjvCamera()
    context.cam.fixedcamid, context.cam.type = 0, mujoco.mjtCamera.mjCAMERA_FIXED
    context.vopt, context.pert = mujoco.MjvOption(), mujoco.MjvPerturb()
    context.pert.active, context.pert.select, context.pert.skinselect = 0, 0, -1
    for name, value in scene_settings(model).items():
        setattr(drawn, name, value)
    mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, drawn)


def scene_settings(model: Any) -> dict[str, Any]:
    """Return what MuJoCo writes into a drawing context from the scene's extent and map."""
    extent, scene = model.stat.extent, model.vis.map
    return {
        "shadowClip": extent * scene.shadowclip,
        "shadowScale": scene.shadowscale,
        "fogStart": extent * scene.fogstart,
        "fogEnd": extent * scene.fogend,
        "fogRGBA": model.vis.rgba.fog,
    }


MUJOCO = "3.3.2"
"""The version results are reported with."""

ROBOSUITE = "1.4.0"
_MUJOCO_TOO_OLD = (3, 1, 6)
_MUJOCO_TOO_NEW = (3, 3, 3)
_EXTRA = install("libero")
_log = logging.getLogger(__name__)


def check_versions() -> None:
    """Raise unless the simulator is one that gives LIBERO's physics and colors; imports nothing.

    Raises:
        MissingDependencyError: mujoco or robosuite is not installed.
        SetupError: MuJoCo before 3.1.6 or from 3.3.3 on, or a robosuite other than 1.4.0.
    """
    mujoco, robosuite = installed("mujoco"), installed("robosuite")
    if mujoco is None or robosuite is None:
        missing = "mujoco" if mujoco is None else "robosuite"
        raise MissingDependencyError(f"the simulator needs {missing}: run `{_EXTRA}`.")
    if not _MUJOCO_TOO_OLD <= numbers(mujoco) < _MUJOCO_TOO_NEW:
        raise SetupError(
            f"mujoco {mujoco} is installed; 3.3.3 darkens LIBERO's floors and 3.4 changes its "
            f"physics, so scores would not compare. Allowed: 3.1.6 up to 3.3.2. Run "
            f"`pip install mujoco=={MUJOCO}`."
        )
    if robosuite != ROBOSUITE:
        raise SetupError(
            f"robosuite {robosuite} is installed; LIBERO is written for {ROBOSUITE}. Run "
            f"`pip install robosuite=={ROBOSUITE}`."
        )


def installed(distribution: str) -> str | None:
    """Return the installed version of ``distribution``, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def import_robosuite() -> Any:
    """Import and return robosuite.

    Raises:
        SetupError: a wrong version, or OpenGL libraries are missing.
    """
    check_versions()
    choose_backend()
    if "robosuite" not in sys.modules:
        _quieten_robosuite()
        point_caches_home()
    try:
        with _hidden(_VISIBLE):
            robosuite = import_module("robosuite")
    except (ImportError, AttributeError, OSError) as error:
        # PyOpenGL without its libraries fails with an AttributeError on None.
        raise SetupError(
            f"robosuite does not import ({type(error).__name__}: {error}). If OpenGL is missing: "
            "`apt-get install libegl1 libgl1 libglib2.0-0 libosmesa6`; a Python package: "
            f"`{_EXTRA}`."
        ) from error
    mujoco = import_module("mujoco")
    if mujoco.get_mju_user_warning() is None:
        # By itself it prints, and appends to MUJOCO_LOG.TXT in the working directory.
        mujoco.set_mju_user_warning(_log.warning)
    return robosuite


def _quieten_robosuite() -> None:
    """Give robosuite the private settings it looks for, unless the user has written some.

    Without them it warns on the console and opens ``/tmp/robosuite.log``, which fails when that
    file belongs to somebody else.
    """
    spec = importlib.util.find_spec("robosuite")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / "macros_private.py").is_file():
            return
    settings = types.ModuleType("robosuite.macros_private")
    vars(settings).update(FILE_LOGGING_LEVEL=None, CONSOLE_LOGGING_LEVEL="ERROR")
    sys.modules["robosuite.macros_private"] = settings
    logging.getLogger("robosuite_logs").propagate = False


def point_caches_home() -> None:
    """Keep the compiled functions and font lists of libraries below our own cache.

    Raises:
        SetupError: Neither it nor the temporary folder can be written.
    """
    for variable, name in (("NUMBA_CACHE_DIR", "numba"), ("MPLCONFIGDIR", "matplotlib")):
        if variable not in os.environ:
            os.environ[variable] = str(spare_cache(cache_folder() / name, SetupError))


def numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of ``version``, to compare it by."""
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
