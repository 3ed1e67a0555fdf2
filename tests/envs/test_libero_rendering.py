"""What is saved in drawing does not show: contexts handed on, and what no camera sees."""

import copy
import os
import subprocess
import sys

import numpy as np
import pytest

from dzrobot.envs.mujoco.culling import culled
from dzrobot.envs.mujoco.simulator import (
    choose_backend,
    egl_device,
    free_context,
    put_back,
    same_drawing,
    scene_settings,
    transfer_context,
)
from dzrobot.errors import SetupError

# What Slurm, Kubernetes, MIG and people set; the number of the device out of 1 and out of 4.
VISIBLE = {
    "": (0, 0), "-1": (0, 0), "NoDevFiles": (0, 0), "0": (0, 0), "1": (0, 1), "3,5": (0, 3),
    "0, 1": (0, 0), "7": (0, 0), "GPU-8c1f2d3a-1b2c": (0, 0), "MIG-8c1f2d3a-1b2c": (0, 0),
    "MIG-GPU-8c1f/1/0": (0, 0), "\u00b2": (0, 0),
}  # fmt: skip


@pytest.mark.parametrize("visible", VISIBLE)
def test_a_device_of_egl_is_chosen_whatever_cuda_sees(visible):
    environment = {"CUDA_VISIBLE_DEVICES": visible}
    assert tuple(egl_device(environment, count) for count in (1, 4)) == VISIBLE[visible]
    for named in ("0", " 2 "):
        own = {**environment, "MUJOCO_EGL_DEVICE_ID": named}
        assert egl_device(own, 4) == int(named)
    assert egl_device({**environment, "MUJOCO_EGL_DEVICE_ID": ""}, 1) == 0
    for named in ("1", "-1", "abc", "0,1", "GPU-8c1f"):
        with pytest.raises(SetupError, match=f"MUJOCO_EGL_DEVICE_ID='{named}'.*0 to 0"):
            egl_device({**environment, "MUJOCO_EGL_DEVICE_ID": named}, 1)


OPENING = """
import os, sys
from dzrobot.envs.mujoco import simulator
simulator.import_robosuite()
for value in sys.argv[1:]:
    os.environ["CUDA_VISIBLE_DEVICES"] = value
    os.environ.pop("MUJOCO_EGL_DEVICE_ID", None)
    simulator._drawn_in.clear()
    simulator.check_rendering()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == value
    print("drawn")
"""


def test_contexts_open_whatever_cuda_sees():
    """Imported with one of the values, robosuite opens a context with each of them."""
    pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
    environment = {**os.environ, "MUJOCO_GL": "egl", "CUDA_VISIBLE_DEVICES": "GPU-8c1f2d3a"}
    run = subprocess.run(
        [sys.executable, "-c", OPENING, *VISIBLE],
        env={**environment, "MUJOCO_EGL_DEVICE_ID": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.stdout.split() == ["drawn"] * len(VISIBLE), run.stderr


SCENE = """
<mujoco>
  <visual><map fogstart="1.5" fogend="4" shadowclip="0.7" shadowscale="0.4"/></visual>
  <asset>
    <texture name="checks" type="2d" builtin="checker" width="32" height="32"
             rgb1="0.9 0.2 0.1" rgb2="0.1 0.3 0.8"/>
    <material name="checks" texture="checks" texrepeat="6 6"/>
    <mesh name="wedge" vertex="0 0 0  0.3 0 0  0 0.3 0  0 0 0.3"/>
  </asset>
  <worldbody>
    <light pos="0.4 0.2 2" dir="-0.2 -0.1 -1" castshadow="true"/>
    <camera name="front" pos="0 -1.6 1.2" xyaxes="1 0 0 0 0.6 0.8"/>
    <geom type="plane" size="2 2 0.1" material="checks"/>
    <geom type="mesh" mesh="wedge" pos="0.2 0 0.1" rgba="0.2 0.8 0.3 1"/>
    <body name="box" pos="-0.3 0 0.2"><geom type="box" size="0.1 0.1 0.1"/></body>
  </worldbody>
</mujoco>
"""


@pytest.fixture
def sim_of():
    """Simulations (robosuite's) of the scene above after a change to its model."""
    pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
    choose_backend()
    import mujoco
    from robosuite.utils.binding_utils import MjSim

    scene = mujoco.MjModel.from_xml_string(SCENE)

    def sim_of(change=None):
        model = copy.deepcopy(scene)
        if change is not None:
            change(model)
        return MjSim(model)

    return sim_of


def change_a_texture(model):
    model.tex_data[5] += 1


def change_a_material(model):
    model.mat_rgba[0, 1] -= 0.01


def change_a_mesh(model):
    model.mesh_vert[0, 2] += 0.001


def change_the_shadow(model):
    model.vis.quality.shadowsize //= 2


def change_the_samples(model):
    model.vis.quality.offsamples = 0


def change_the_buffer(model):
    model.vis.global_.offwidth += 1


def widen(model):
    """Another pose and extent: nothing that is uploaded, all that an image follows."""
    model.body_pos[1] = 0.1, 0.5, 0.3
    model.stat.extent *= 1.7
    model.stat.center[0] += 0.2
    model.vis.map.shadowscale = 0.8
    model.vis.map.fogend = 2.5
    model.vis.rgba.fog[:] = 0.1, 0.2, 0.3, 1


UPLOADED = [
    change_a_texture,
    change_a_material,
    change_a_mesh,
    change_the_shadow,
    change_the_samples,
    change_the_buffer,
]


@pytest.mark.parametrize("change", UPLOADED)
def test_what_is_uploaded_keeps_a_context_from_being_handed_on(sim_of, change):
    assert same_drawing(sim_of().model, sim_of().model)
    assert not same_drawing(sim_of().model, sim_of(change).model)
    assert not same_drawing(sim_of(change).model, sim_of().model)


def test_a_scene_that_only_moved_may_take_the_context(sim_of):
    assert same_drawing(sim_of().model, sim_of(widen).model)


def change_everything_else(model):
    widen(model)
    model.opt.timestep, model.opt.gravity[:] = 0.003, (1, 2, 3)
    model.vis.headlight.ambient[:] = 0.7
    for name in dir(model):
        value = getattr(model, name)
        if isinstance(value, np.ndarray) and not name.startswith(("_", "mesh_", "tex_", "mat_")):
            value += 1


@pytest.mark.parametrize("change", [*UPLOADED, change_everything_else])
def test_a_model_is_put_back_to_the_bit(change):
    mujoco = pytest.importorskip("mujoco", reason="no simulator: pip install -e '.[libero]'")

    def saved(model):
        whole = np.empty(mujoco.mj_sizeModel(model), np.uint8)
        mujoco.mj_saveModel(model, None, whole)
        return whole.tobytes()

    original = mujoco.MjModel.from_xml_string(SCENE)
    model = copy.copy(original)
    change(model)
    assert saved(model) != saved(original)
    assert put_back(model, original) == (change is change_everything_else)
    assert saved(model) == saved(original)


AT_CREATION = (
    *("shadowClip", "shadowScale", "fogStart", "fogEnd", "fogRGBA", "lineWidth"),
    *("shadowSize", "offWidth", "offHeight", "offSamples", "fontScale"),
)


def drawn_by(context, sim):
    """Image and depth from the scene's camera, with the settings they were drawn with."""
    context.gl_ctx.make_current()
    context.vopt.geomgroup[:] = 1
    rgb, depth = sim.render(64, 48, camera_name="front", depth=True)
    assert rgb.std() > 10
    return [rgb, depth, *(np.array(getattr(context.con, name)) for name in AT_CREATION)]


def test_a_context_handed_over_draws_and_is_set_as_a_new_one(sim_of):
    import mujoco
    from robosuite.utils.binding_utils import MjRenderContextOffscreen

    def context_of(sim):
        return MjRenderContextOffscreen(sim, device_id=-1, max_width=64, max_height=48)

    first = sim_of()
    kept = context_of(first)
    before = drawn_by(kept, first)
    # What a user set on the old scene's drawing is not the new scene's.
    kept.scn.flags[mujoco.mjtRndFlag.mjRND_WIREFRAME] = 1
    kept.vopt.flags[mujoco.mjtVisFlag.mjVIS_TEXTURE] = 0
    kept.cam.type = mujoco.mjtCamera.mjCAMERA_FREE
    first._render_context_offscreen = None

    taking = sim_of(widen)
    transfer_context(kept, taking)
    other = sim_of(widen)
    new = context_of(other)
    handed, expected = drawn_by(kept, taking), drawn_by(new, other)
    free_context(kept)
    free_context(new)
    for one, two in zip(handed, expected, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(before[0], handed[0])
    for name, old, now in zip(AT_CREATION, before[2:], handed[2:], strict=True):
        if name in scene_settings(taking.model._model):
            assert np.any(old != now), f"{name} does not change in this test"


MIRRORED = """
<mujoco>
  <visual><headlight ambient="0.3 0.3 0.3"/></visual>
  <asset>
    <material name="mirror" reflectance="0.6" rgba="0.4 0.5 0.4 1"/>
    <mesh name="wedge" vertex="0 0 0  0.3 0 0  0 0.3 0  0 0 0.3"/>
  </asset>
  <worldbody>
    <light pos="0.4 0.2 3" dir="-0.2 -0.1 -1" castshadow="false"/>
    <geom name="floor" type="plane" size="3 3 0.1" group="1" rgba="0.4 0.5 0.4 1"/>
    <geom name="table" type="box" size="0.5 0.5 0.02" pos="0 0 0.6" group="1" rgba="0.8 0.7 0.5 1"/>
    <body name="seen"><camera name="moving"/></body>
    <body name="a" pos="0.1 0 0.8">
      <geom type="mesh" mesh="wedge" group="1" rgba="1 0 0 1"/>
    </body>
    <body name="b" pos="0.9 0 0.3">
      <geom type="capsule" size="0.1 0.3" group="1" rgba="0 1 0 1"/>
    </body>
    <body name="c" pos="-0.9 0.3 0.3">
      <geom name="block" type="box" size="0.1 0.3 0.2" group="1" rgba="0 0 1 1"/>
    </body>
    <body name="d" pos="0 -0.9 0.9">
      <geom type="sphere" size="0.1" group="1" rgba="0 1 1 0.5"/>
    </body>
  </worldbody>
</mujoco>
"""


def look(model, rng):
    """Put the camera anywhere above the floor, mostly facing down, with any opening."""
    model.body_pos[1] = rng.uniform((-0.6, -0.6, 0.1), (0.6, 0.6, 1.6))
    turn = rng.normal(0, (0.5, 0.5, 2))
    half = np.linalg.norm(turn) / 2
    model.body_quat[1] = np.cos(half), *(np.sin(half) * turn / (2 * half))
    model.cam_fovy[0] = rng.uniform(20, 90)


@pytest.mark.sampled
@pytest.mark.parametrize("mirror", ["floor", "block"])
def test_an_image_without_what_its_camera_cannot_see_is_the_same_image(sim_of, mirror):
    import mujoco
    from robosuite.utils.binding_utils import MjRenderContextOffscreen, MjSim

    rng = np.random.default_rng(0)
    model = mujoco.MjModel.from_xml_string(MIRRORED)
    model.geom_matid[model.geom(mirror).id] = 0
    sim = MjSim(model)
    context = MjRenderContextOffscreen(sim, device_id=-1, max_width=64, max_height=48)
    context.gl_ctx.make_current()
    scene, mirrored = context.scn, mujoco.mjtRndFlag.mjRND_REFLECTION
    kinds = set()
    for _ in range(150):
        look(sim.model, rng)
        sim.forward()
        expected = sim.render(64, 48, camera_name="moving")
        everything = scene.ngeom
        with culled(sim, 0, 64 / 48):
            image = sim.render(64, 48, camera_name="moving")
            kinds.add((scene.ngeom < everything, bool(scene.flags[mirrored])))
        np.testing.assert_array_equal(image, expected)
        np.testing.assert_array_equal(sim.render(64, 48, camera_name="moving"), expected)
    # Less is drawn with and without the mirror, and where everything shows, everything.
    assert kinds >= {(True, True), (True, False), (False, True)}
    free_context(context)


def test_nothing_is_left_out_where_something_casts_a_shadow(sim_of):
    from robosuite.utils.binding_utils import MjRenderContextOffscreen

    sim = sim_of()
    context = MjRenderContextOffscreen(sim, device_id=-1, max_width=64, max_height=48)
    sim.forward()
    groups = sim.model.geom_group.copy()
    with culled(sim, 0, 64 / 48):
        np.testing.assert_array_equal(sim.model.geom_group, groups)
    free_context(context)
