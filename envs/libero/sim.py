"""One robosuite arm whose steps, images and release are reproducible to the bit."""

import atexit
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Literal

import numpy as np

from dzrobot.envs.mujoco.culling import culled
from dzrobot.envs.mujoco.simulator import (
    check_rendering,
    free_context,
    put_back,
    same_drawing,
    transfer_context,
    use_context,
)
from dzrobot.errors import SimulatorError

Raw = Mapping[str, Any]
"""robosuite's own observation: raw names, images bottom row first."""

_ATTEMPTS = 50
_open: "weakref.WeakSet[Simulation]" = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True)
class CameraOptions:
    """How the cameras draw."""

    size: tuple[int, int] = (256, 256)
    """Height and width in pixels."""

    cameras: bool = True
    """Draw all cameras at every step. A step without them takes a tenth of the time."""

    on_demand: bool = False
    """Keep a drawing context although no camera draws at every step."""

    quality: Literal["full", "draft"] = "full"
    """``draft`` leaves out anti-aliasing, shadows and reflections: for tests, not for scores."""


@dataclass(frozen=True, kw_only=True)
class ArmSetup:
    """How the arm is controlled, and from where it is seen."""

    controller: str = "OSC_POSE"
    """robosuite's name."""

    controller_values: Mapping[str, Any] = field(default_factory=dict)
    """What differs from robosuite's own settings of it."""

    cameras: tuple[str, ...] = ("agentview", "robot0_eye_in_hand")
    """robosuite's names; people are shown the first."""

    control_hz: int = 20
    """Actions per second; each lasts whole physics steps of 2 ms."""


class Simulation:
    """A robosuite environment behind four verbs: reset, restore, step, close.

    Args:
        environment_class: Lift, or the class LIBERO maps a problem to.
        arguments: For its constructor, beyond the robot, controller and cameras.
        image: How the cameras draw.
        seed: For what the constructor samples.
        setup: Controller and cameras.

    Raises:
        SimulatorError: there is no OpenGL to draw with.
    """

    def __init__(
        self,
        environment_class: type,
        arguments: Mapping[str, Any],
        image: CameraOptions,
        seed: int,
        setup: ArmSetup,
    ) -> None:
        if image.cameras or image.on_demand:
            check_rendering()
        self._image = image
        self._setup = setup
        with _numpy_seeded(seed):
            self._env = _sparing(environment_class)(
                **arguments, **_common_arguments(image, self._setup), image=image
            )
        _open.add(self)
        _close_all_at_exit()

    @property
    def env(self) -> Any:
        """The robosuite environment, for those with privileges."""
        return self._env

    @property
    def success(self) -> bool:
        """Whether the task's goal holds now."""
        return bool(self._env._check_success())

    @property
    def joints(self) -> np.ndarray:
        """Angles (7,) of the arm's joints now, in rad."""
        return np.array(self._env.robots[0]._joint_positions)

    @property
    def fingers_m(self) -> float:
        """Distance between the fingers now, in m."""
        found = self._env.robots[0]._ref_gripper_joint_pos_indexes
        return float(np.abs(self._env.sim.data.qpos[found]).sum())

    def draw(self, *, wanted: bool) -> None:
        """Let the cameras draw from the next step on, or return black images at no cost.

        robosuite samples each camera once in every step, so none is left from the step before.
        """
        self._env.drawing = wanted and self._image.cameras

    def reset(self, seed: int) -> Raw:
        """Build the scene again; what is sampled follows from ``seed`` alone.

        Raises:
            SimulatorError: the objects could not be placed without touching.
        """
        crowded = import_module("robosuite.utils.errors").RandomizationError
        with _numpy_seeded(seed):
            for _ in range(_ATTEMPTS):
                # The old scene's context is freed in here, and has to be the current one.
                use_context(self._env.sim)
                try:
                    raw: Raw = self._env.reset()
                except crowded:
                    continue
                return raw
        raise SimulatorError(
            f"the objects could not be placed apart in {_ATTEMPTS} attempts with seed {seed}; "
            "take another seed."
        )

    def restore(self, state: np.ndarray) -> Raw:
        """Put time, joint positions and velocities to ``state`` (1 + nq + nv,); after a reset.

        Raises:
            SimulatorError: the state belongs to another scene.
        """
        model = self._env.sim.model
        expected = 1 + model.nq + model.nv
        if state.shape != (expected,):
            raise SimulatorError(
                f"the initial state has {state.size} numbers, this scene takes {expected}: tasks "
                "and states come from different releases of LIBERO; run `dzrobot libero setup`."
            )
        use_context(self._env.sim)
        self._env.sim.set_state_from_flattened(state)
        self._env.sim.forward()
        self._env._check_success()
        self._env._post_process()
        return self._observed()

    def refresh(self) -> Raw:
        """Return what is seen after cameras, lights or colors were changed from outside.

        The physics are left as they are, to the bit.
        """
        import mujoco

        use_context(self._env.sim)
        mujoco.mj_camlight(self._env.sim.model._model, self._env.sim.data._data)
        return self._observed()

    def step(self, action: np.ndarray) -> Raw:
        """Apply ``action``, robosuite's own numbers, for one control period.

        Raises:
            SimulatorError: the physics diverged.
        """
        use_context(self._env.sim)
        with _stages_once(self._env.sim):
            raw: Raw = self._env.step(action)[0]
        self._check_physics()
        return raw

    def photograph(self) -> np.ndarray:
        """Return a new image of the exterior camera, ``(H, W, 3)`` uint8, bottom row first."""
        use_context(self._env.sim)
        height, width = self._image.size
        camera = self._setup.cameras[0]
        image: np.ndarray = self._env.sim.render(camera_name=camera, width=width, height=height)
        return image

    def close(self) -> None:
        """Free the scene and its drawing context; closing twice is harmless."""
        _open.discard(self)
        self._env.close()

    def _observed(self) -> Raw:
        self._env._update_observables(force=True)
        raw: Raw = self._env._get_observations()
        return raw

    def _check_physics(self) -> None:
        # MuJoCo resets a diverged scene to its rest state by itself, and only writes a log line.
        import mujoco

        warnings = self._env.sim.data.warning
        kinds = mujoco.mjtWarning
        for kind in (kinds.mjWARN_BADQPOS, kinds.mjWARN_BADQVEL, kinds.mjWARN_BADQACC):
            if warnings[kind].number:
                raise SimulatorError(
                    f"the physics diverged ({kind.name}); reset the environment. If it happens "
                    "again from the same start, the action sequence drives the arm into the scene."
                )


@contextmanager
def _stages_once(sim: Any) -> Iterator[None]:
    """Compute positions and velocities once per physics step while the block runs, not three times.

    robosuite derives everything before its controller runs, again inside it, and MuJoCo does so in
    the step itself. What follows from the state alone comes out the same each time. The solver does
    not: it starts from what it found last, so it runs as often as before, and every state is the
    same to the bit.

    Args:
        sim: robosuite's. Its model must not change meanwhile.
    """
    import mujoco

    model, data = sim.model._model, sim.data._data
    splits = model.opt.integrator != mujoco.mjtIntegrator.mjINT_RK4
    known = b""

    def state() -> bytes:
        parts = (data.qpos, data.qvel, data.act, data.mocap_pos, data.mocap_quat)
        return b"".join(part.tobytes() for part in parts)

    def forward() -> None:
        nonlocal known
        now = state()
        if now == known:
            mujoco.mj_forwardSkip(model, data, int(mujoco.mjtStage.mjSTAGE_VEL), 0)
        else:
            mujoco.mj_forward(model, data)
            known = now

    def step(with_udd: bool = True) -> None:
        if splits and state() == known:
            mujoco.mj_step2(model, data)
        else:
            mujoco.mj_step(model, data)

    sim.forward, sim.step = forward, step
    try:
        yield
    finally:
        del sim.forward, sim.step


@dataclass(frozen=True, kw_only=True)
class _Compiled:
    """What the scene was compiled from, and the model as it was then.

    A scene of LIBERO has the same text at every reset; compiling it was a third of one. Lift draws
    the size of its cube into the text.
    """

    text: str

    original: Any
    """MuJoCo's. None where the text before was another one: it will hardly come again."""


class _SparingCameras:
    """Mixed into a robosuite environment: its cameras draw only while ``drawing`` is True.

    Only the work is left out. Each camera is still sampled when it would have been, so that the
    images that are drawn are the ones the original environment returns; what a camera cannot see
    is not drawn for it. A new scene takes over
    the drawing context of the one before if both draw the same meshes and textures: to upload them
    is most of a reset.
    """

    drawing = False
    sim: Any
    """robosuite's; None while there is no scene."""
    model: Any
    """robosuite's description of the scene, of which the simulator is compiled."""
    control_freq: int
    initialize_time: Callable[[int], None]

    def __init__(self, *, image: CameraOptions, **arguments: Any) -> None:
        self.image = image
        self._kept: Any = None
        self._compiled: _Compiled | None = None
        self._spare: Any = None
        self._joint_samplers: int | None = None
        super().__init__(**arguments)

    def _load_model(self) -> None:
        # LIBERO adds its samplers of drawers and knobs whenever it loads a scene and takes none
        # away: places that are drawn after them would depend on how often the scene was reset
        # before. Every reset draws what LIBERO's first one does, with the samplers of two loads:
        # those of the opening are kept. Lift has no such list.
        samplers = vars(self).get("object_property_initializers", [])
        del samplers[self._joint_samplers :]
        super()._load_model()  # type: ignore[misc]
        if self._joint_samplers is None:
            self._joint_samplers = len(samplers)

    def close(self) -> None:
        """Free the scene, its drawing context and what was kept for the next; again is harmless."""
        self._compiled = None
        super().close()  # type: ignore[misc]
        self._drop_spare()
        self._drop_context()

    def _drop_context(self) -> None:
        if self._kept is not None:
            free_context(self._kept)
            self._kept = None

    def _drop_spare(self) -> None:
        """Free the simulator of the scene before, and with it more than 1 GB of address space."""
        if self._spare is not None:
            self._spare.free()
            self._spare = None

    def _destroy_sim(self) -> None:
        if self.sim is None:
            return
        self._kept, self.sim._render_context_offscreen = self.sim._render_context_offscreen, None
        if self._compiled is not None and self._compiled.original is not None:
            self._spare, self.sim = self.sim, None
        super()._destroy_sim()  # type: ignore[misc]

    def _create_camera_sensors(
        self, cam_name: str, *arguments: Any, **keywords: Any
    ) -> tuple[list[Any], list[str]]:
        sensors, names = super()._create_camera_sensors(cam_name, *arguments, **keywords)  # type: ignore[misc]
        return [self._sparing(cam_name, sensor) for sensor in sensors], names

    def _sparing(self, camera: str, sensor: Callable[[dict[str, Any]], np.ndarray]) -> Any:
        height, width = self.image.size
        black = np.zeros((height, width, 3), np.uint8)

        def draw(seen: dict[str, Any]) -> np.ndarray:
            if not self.drawing:
                return black.copy()
            with culled(self.sim, self.sim.model.camera_name2id(camera), width / height):
                return sensor(seen)

        return import_module("robosuite.utils.observables").sensor(modality="image")(draw)

    def _initialize_sim(self, xml_string: str | None = None) -> None:
        text = xml_string or self.model.get_xml()
        before = self._compiled
        if before is not None and before.text == text and self._spare is not None:
            self._begin_again(before.original)
            return
        self._compiled = None
        self._drop_spare()
        super()._initialize_sim(text)  # type: ignore[misc]
        # Both are read when the drawing context is made, right after this. The whole buffer is
        # cleared for every image; robosuite makes it larger where somebody asks for more.
        visual = self.sim.model.vis
        visual.global_.offheight, visual.global_.offwidth = self.image.size
        if self.image.quality == "draft":
            visual.quality.offsamples = 0
        repeats = before is None or before.text == text
        original = copy(self.sim.model._model) if repeats else None
        self._compiled = _Compiled(text=text, original=original)

    def _begin_again(self, original: Any) -> None:
        """Make of the simulator of the scene before what a new one of the same text would be."""
        self.sim, self._spare = self._spare, None
        if not put_back(self.sim.model._model, original):
            self._drop_context()
        self.sim.reset()
        self.sim.forward()
        self.initialize_time(self.control_freq)

    def _reset_internal(self) -> None:
        kept = self._kept
        if kept and (kept.model is self.sim.model or same_drawing(kept.model, self.sim.model)):
            transfer_context(kept, self.sim)
            self._kept = None
        self._drop_context()
        super()._reset_internal()  # type: ignore[misc]
        context = self.sim._render_context_offscreen
        if self.image.quality == "draft" and context is not None:
            import mujoco

            context.scn.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
            context.scn.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0


@cache
def _sparing(environment_class: type) -> type:
    # The name is kept: LIBERO compares it with the problem's.
    return type(environment_class.__name__, (_SparingCameras, environment_class), {})


def _common_arguments(image: CameraOptions, setup: ArmSetup) -> dict[str, Any]:
    load = import_module("robosuite").load_controller_config
    return {
        "robots": ["Panda"],
        "controller_configs": load(default_controller=setup.controller) | setup.controller_values,
        "use_camera_obs": image.cameras,
        "has_offscreen_renderer": image.cameras or image.on_demand,
        "camera_names": list(setup.cameras),
        "camera_heights": image.size[0],
        "camera_widths": image.size[1],
        "control_freq": setup.control_hz,
        # Time limits are Gymnasium's; robosuite would end in an exception.
        "ignore_done": True,
    }


@contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    """Seed NumPy's global generator, the only one robosuite and LIBERO know, and put it back."""
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002


@cache
def _close_all_at_exit() -> None:
    # Registered after the first context, so that it runs before OpenGL itself is shut down.
    atexit.register(_close_all)


def _close_all() -> None:
    for simulation in list(_open):
        simulation.close()
