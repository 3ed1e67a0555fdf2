"""The emulated arm over robosuite's table with its cube: contact, grasping, images and success."""

import math
from contextlib import nullcontext
from importlib import metadata

import numpy as np
import pytest
from emulated import need_scene

from dzrobot.envs.emulators.arm import EmulatedArm, Target
from dzrobot.envs.emulators.dynamics import GRIPPER_WIDTH_M, Faults, PlainDynamics, dynamics_of
from dzrobot.envs.emulators.fci_protocol import Generator
from dzrobot.envs.emulators.launcher import EmulatorLauncher, LauncherAddress
from dzrobot.envs.emulators.scenes import LIFT, SCENES, SERIALS, check_scene, views_of
from dzrobot.envs.franka.arm_episode import rule_for
from dzrobot.envs.franka.emulated import EmulatedWorkcell
from dzrobot.envs.franka.franka_config import FrankaConfig, RewardConfig
from dzrobot.envs.franka.make import load_workcell, located, make_franka
from dzrobot.envs.franka.operator.operator import OperatorVerdict
from dzrobot.envs.franka.workcells import SceneObject
from dzrobot.envs.mujoco.lift_scene import EMPTY_SCENE
from dzrobot.errors import ConfigError, MissingDependencyError

ZEROS = np.zeros(7)
PREPARED_MS = 300


@pytest.fixture(scope="module")
def physics():
    need_scene()
    return dynamics_of(LIFT, Faults())


@pytest.fixture
def arm(physics):
    """An arm in the scene of start 3, at rest where Lift begins, its hand open."""
    from dzrobot.envs.mujoco.lift_scene import READY

    physics.fingers.move(GRIPPER_WIDTH_M, 0.3, 20.0)
    physics.prepare(3)
    physics.put(READY)
    arm = EmulatedArm(Faults(noise=0.0, wrench_bias=(0.0,) * 6), physics)
    wait(arm, PREPARED_MS)
    return arm


def wait(arm, milliseconds):
    for _ in range(milliseconds):
        arm.step(None)


def torques(torque=ZEROS):
    return Target(Generator.NONE, ZEROS, ZEROS, np.eye(4), np.zeros(6), torque)


def go(arm, place, milliseconds):
    """Move the hand to a place (3,) by planned joint positions; stop where a reflex stops it."""
    goal = arm.description.reaching(arm.q, place, arm.settings.flange_to_ee)
    start = arm.reference_q.copy()
    arm.begin(Generator.JOINT_POSITION, 0)
    for share in np.linspace(0.0, 1.0, milliseconds):
        way = share**3 * (10 - 15 * share + 6 * share**2)
        joints = start + way * (goal - start)
        arm.step(Target(Generator.JOINT_POSITION, joints, ZEROS, np.eye(4), np.zeros(6), ZEROS))
        if arm.errors:
            return
    arm.halt(arm.mode.IDLE)


def grasp(arm, force_n=40.0):
    """Close the fingers and return when they are still."""
    arm.dynamics.fingers.move(0.0, 0.1, force_n)
    for _ in range(3000):
        arm.step(None)
        if arm.dynamics.fingers.advance(1e-3):
            return
    raise AssertionError("the fingers neither arrive nor stop")


def test_a_start_decides_where_the_cube_lies_within_what_lift_draws():
    need_scene()
    from dzrobot.envs.emulators.scenes import table_object_of

    cube = table_object_of(LIFT)
    starts = [cube.start(number) for number in range(200)]
    places = np.array([start.position for start in starts])
    np.testing.assert_array_equal(places[7], cube.start(7).position)
    assert len(np.unique(places[:, 0])) == 200
    middle = places[:, :2]
    assert np.abs(middle).max() <= 0.03
    assert np.abs(middle).max(axis=0).min() > 0.028
    halves = np.array([start.half for start in starts])
    assert (halves >= 0.020).all()
    assert (halves <= 0.022).all()
    turns = np.array([start.yaw for start in starts])
    assert turns.min() < 0.2
    assert turns.max() > 2 * math.pi - 0.2


def test_the_scene_is_robosuites_lift(physics):
    from dzrobot.envs.emulators.scenes import table_object_of
    from dzrobot.envs.libero.lift import LiftEnv
    from dzrobot.envs.mujoco.lift_scene import BASE, READY, TABLE_TOP_M, load_model

    env = LiftEnv(cameras=False, settle_steps=0)
    env.reset(seed=0)
    theirs, ours = env.simulation.env.sim, load_model(table_object_of(LIFT), drawn=True)
    model = theirs.model._model
    np.testing.assert_allclose(model.body("robot0_link0").pos + model.body("robot0_base").pos, BASE)
    table = model.geom("table_collision")
    top = model.body("table").pos[2] + table.size[2] - BASE[2]
    assert top == pytest.approx(TABLE_TOP_M)
    np.testing.assert_allclose(ours.geom("table_collision").size, table.size)
    for name, same in (("agentview", "agentview"), ("eye_in_hand", "robot0_eye_in_hand")):
        camera = model.camera(same)
        assert ours.camera(name).fovy == camera.fovy
        np.testing.assert_allclose(ours.camera(name).quat, camera.quat, atol=1e-6)
    np.testing.assert_allclose(ours.camera("agentview").pos + BASE, model.camera("agentview").pos)
    np.testing.assert_allclose(READY, env.simulation.env.robots[0].robot_model.init_qpos)
    env.close()


@pytest.mark.parametrize("drawn", [False, True])
def test_a_scene_reserves_little_memory(physics, drawn):
    from dzrobot.envs.mujoco.lift_scene import load_model

    # A process with twenty of robosuite's could not be forked on a machine of 24 GiB.
    assert load_model(drawn=drawn).narena <= 64 << 20


def test_gravity_is_held_and_the_cube_rests_on_the_table(arm):
    before = arm.q.copy()
    arm.begin(Generator.NONE, 2)
    for _ in range(500):
        arm.step(torques())
    assert not arm.errors
    np.testing.assert_allclose(arm.q, before, atol=1e-4)
    assert not arm.dynamics.goal_holds
    assert np.abs(arm.measured_wrench).max() < 0.1


def test_a_reference_is_followed_within_a_milliradian(arm):
    go(arm, (0.5, 0.1, 0.05), 1000)
    assert not arm.errors
    np.testing.assert_allclose(arm.q, arm.reference_q, atol=1e-3)
    np.testing.assert_allclose(arm.pose[:3, 3], (0.5, 0.1, 0.05), atol=1e-3)


def test_torques_move_it_about_as_they_move_the_arm_without_a_scene(arm):
    plain = EmulatedArm(Faults(noise=0.0))
    plain.dynamics.put(arm.q)
    plain.refresh()
    moved = []
    for one in (arm, plain):
        before = one.q.copy()
        one.begin(Generator.NONE, 2)
        for step in range(200):
            one.step(torques(min(step / 100, 1.0) * np.array([3.0, 0, 0, 3.0, 0, 1.0, 0])))
        assert not one.errors
        moved.append(one.q - before)
    # The hand weighs here; the wrist, which carries nothing else, shows it most.
    here, there = np.array(moved)
    np.testing.assert_allclose(here[:5], there[:5], atol=0.3 * np.abs(there[:5]).max())
    assert 0.3 * there[5] < here[5] < there[5]


def test_what_is_pressed_upon_the_table_is_felt_and_stops_it(arm):
    from dzrobot.envs.mujoco.lift_scene import TABLE_TOP_M

    go(arm, (0.5, 0.2, TABLE_TOP_M + 0.05), 1000)
    assert not arm.errors
    go(arm, (0.5, 0.2, TABLE_TOP_M - 0.05), 3000)
    assert arm.errors <= {"cartesian_reflex", "joint_reflex"}
    assert arm.errors
    height = arm.pose[2, 3]
    assert abs(height - TABLE_TOP_M) < 0.02
    wait(arm, 500)
    # It came to rest on the table, and the table's push is what it feels: base axes, upward.
    assert abs(arm.pose[2, 3] - height) < 0.005
    assert (arm.pose[:3, :3] @ arm.measured_wrench[:3])[2] > 5.0


def test_fingers_hold_the_cube_by_force_and_lifting_it_is_the_goal(arm):
    from dzrobot.envs.emulators.scenes import table_object_of
    from dzrobot.envs.mujoco.lift_scene import BASE, TABLE

    cube = table_object_of(LIFT).start(3)
    x, y, height = cube.position + np.subtract(TABLE, BASE) - (0.0, 0.0, 0.01)
    # The hand's fingers close along its y axis, which the cube's sides are turned to.
    at = arm.pose
    yaw = (cube.yaw - math.atan2(at[1, 0], at[0, 0]) + math.pi / 4) % (math.pi / 2) - math.pi / 4
    turned = arm.q + yaw * np.eye(7)[6] * -1.0
    arm.guide(turned)
    go(arm, (x, y, height + 0.08), 1000)
    go(arm, (x, y, height - 0.005), 1500)
    assert not arm.errors
    grasp(arm)
    assert arm.dynamics.fingers.width_m == pytest.approx(2 * cube.half.min(), abs=0.006)
    assert not arm.dynamics.goal_holds
    go(arm, (x, y, height + 0.08), 1500)
    assert not arm.errors
    assert arm.dynamics.goal_holds
    # It weighs.
    assert -1.5 < (arm.pose[:3, :3] @ arm.measured_wrench[:3])[2] < -0.3
    arm.dynamics.fingers.move(GRIPPER_WIDTH_M, 0.1, 20.0)
    wait(arm, 600)
    assert not arm.dynamics.goal_holds


def test_fingers_on_air_close_and_are_no_success(arm):
    grasp(arm)
    assert arm.dynamics.fingers.width_m < 0.002
    assert not arm.dynamics.goal_holds


def test_an_empty_scene_is_the_arm_without_a_simulator():
    assert isinstance(dynamics_of(EMPTY_SCENE, Faults()), PlainDynamics)
    assert SCENES == (EMPTY_SCENE, LIFT)


def test_cameras_see_where_the_cube_is(arm):
    exterior, wrist = views_of(LIFT, SERIALS)
    size = (320, 240)
    seen = arm.dynamics.visible(arm.posture)
    here = [view.image(size, seen) for view in (exterior, wrist)]
    np.testing.assert_array_equal(here[0], exterior.image(size, seen))
    assert [image.shape for image in here] == [(240, 320, 2)] * 2
    arm.dynamics.prepare(4)
    moved = arm.dynamics.visible(arm.posture)
    assert not np.array_equal(here[0], exterior.image(size, moved))
    # A square from the middle of the image has the angle of LIBERO's view.
    assert exterior.focal_px(size) == pytest.approx(120 / math.tan(math.radians(22.5)))
    assert wrist.focal_px(size) == pytest.approx(120 / math.tan(math.radians(37.5)))


@pytest.mark.long
def test_what_no_camera_sees_is_left_out_of_no_image(arm, monkeypatch):
    from dzrobot.envs.emulators import scenes as rendered

    drawing, drawn = rendered.SceneDrawing(LIFT), []
    count = drawing._shapes
    for turn in (0.0, 0.4, -0.4):
        scene = arm.dynamics.visible(arm.posture)
        scene[drawing.model.jnt_qposadr[0]] += turn
        for camera in range(drawing.model.ncam):
            image = drawing.draw(camera, (160, 120), scene)
            shapes = count.ngeom
            with monkeypatch.context() as patch:
                patch.setattr(rendered, "culled_scene", lambda *_: nullcontext())
                np.testing.assert_array_equal(drawing.draw(camera, (160, 120), scene), image)
            drawn.append(shapes / count.ngeom)
    assert min(drawn) < 0.6


def test_a_missing_simulator_is_named_with_its_extra_and_the_way_around(monkeypatch):
    def version(name):
        if name == "mujoco":
            raise metadata.PackageNotFoundError(name)
        return "1.4.0"

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(MissingDependencyError, match=r"mujoco.*\[libero\].*emulated:empty"):
        EmulatorLauncher(LauncherAddress.for_process(5), scene=LIFT).start()
    check_scene(EMPTY_SCENE)
    with pytest.raises(ConfigError, match=r"'lifft'.*mean 'lift'"):
        check_scene("lifft")


def test_an_object_of_libero_is_a_scene_where_its_assets_are(libero_assets, monkeypatch, tmp_path):
    cell = load_workcell("emulated:milk")
    assert (cell.task, cell.reward.rule) == ("lift the milk", "scene")
    with pytest.raises(ConfigError, match=r"'mlik'.*mean 'milk'"):
        load_workcell("emulated:mlik")
    monkeypatch.setenv("DZROBOT_LIBERO_ASSETS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"'milk'.*Known: empty, lift.*no LIBERO assets in"):
        load_workcell("emulated:milk")


def test_starts_of_demonstrations_are_no_starts_of_an_evaluation():
    env, drawn = make_franka(workcell="fake"), []
    for seed in (0, 49, 50, 1_000_000):
        drawn.append(env.reset(seed=seed)[1]["init_state_id"])
    env.close()
    assert drawn == [0, 49, 50, 1_000_000]


def test_a_mistyped_scene_in_a_file_is_no_address_of_a_robot():
    cell = load_workcell("emulated").model_copy(update={"address": "emulated:lifft"})
    workcell, _ = located(None, cell)
    with pytest.raises(ConfigError, match=r"'lifft'.*mean 'lift'"):
        workcell.open()


def test_an_object_of_libero_stands_on_the_table_and_looks_like_itself(libero_assets):
    need_scene()
    from dzrobot.envs.emulators.scenes import CLEAR_M, object_in
    from dzrobot.envs.mujoco.lift_scene import TABLE_TOP_M

    # A can, 62 mm wide and 76 mm high by its file; LIBERO stands it on its end.
    physics = dynamics_of("alphabet_soup", Faults())
    arm = EmulatedArm(Faults(noise=0.0, wrench_bias=(0.0,) * 6), physics)
    physics.prepare(3)
    before = SceneObject(*object_in(physics.visible(arm.posture)))
    wait(arm, 400)
    can = SceneObject(*object_in(physics.visible(arm.posture)))
    np.testing.assert_allclose(2 * can.half, (0.062, 0.062, 0.076), atol=1e-3)
    assert can.pose[2, 3] == pytest.approx(TABLE_TOP_M + can.half[2], abs=2e-3)
    np.testing.assert_allclose(can.pose[:3, :3], before.pose[:3, :3], atol=0.02)
    np.testing.assert_allclose(can.pose[:2, 3], before.pose[:2, 3], atol=3e-3)
    assert not physics.goal_holds
    seen = physics.visible(arm.posture)
    images = [
        views_of(scene, SERIALS[:1])[0].image((320, 240), seen) for scene in ("alphabet_soup", LIFT)
    ]
    differs = images[0] != images[1]
    assert 100 < differs.any(axis=2).sum() < 5000
    physics.prepare(4)
    place = physics._data.qpos
    place[11] = TABLE_TOP_M + can.half[2] + CLEAR_M + 0.001
    assert physics.goal_holds
    place[11] -= 0.002
    assert not physics.goal_holds


class Told:
    def __init__(self):
        self.holds = False

    def prepare(self, start):
        self.start = start

    def goal_holds(self):
        return self.holds


def test_the_scene_says_when_an_episode_has_succeeded():
    scene = Told()
    rule = rule_for(RewardConfig(rule="scene", hold_steps=2), scene)
    assert rule.judge({}, None) is OperatorVerdict.OPEN
    scene.holds = True
    assert rule.judge({}, None) is OperatorVerdict.OPEN
    assert rule.judge({}, None) is OperatorVerdict.SUCCESS


@pytest.mark.parametrize("workcell", ["fake", "emulated:empty"])
def test_a_workcell_without_objects_cannot_say_it(workcell):
    with pytest.raises(ConfigError, match=r"rule='scene'.*workcell='emulated'"):
        make_franka(workcell=workcell, reward={"rule": "scene"})


def test_the_emulated_workcell_has_lifts_scene_unless_asked_for_an_empty_one():
    for workcell, config, has_scene in (
        ("emulated", load_workcell("emulated"), True),
        ("emulated:empty", load_workcell("emulated:empty"), False),
        (None, FrankaConfig(address="emulated"), True),
        (None, FrankaConfig(address="emulated:empty"), False),
    ):
        cell, found = located(workcell, config)
        assert isinstance(cell, EmulatedWorkcell)
        assert (cell.scene is not None) == has_scene
        assert found.address is None
    assert load_workcell("emulated").reward.rule == "scene"
