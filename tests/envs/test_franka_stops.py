"""Stops hold: in the episode, in the run, in the next program; and what a reset leaves behind."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from fake_operator import FakeOperator

from dzrobot.cli import STOPPED, main
from dzrobot.envs.franka.arm_episode import workcell_digest
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.fake_devices import HOME, FakeArm, FakeCamera, FakeClock
from dzrobot.envs.franka.franka_config import FrankaConfig, LimitsConfig
from dzrobot.envs.franka.operator.operator import ArmPhase, OperatorVerdict
from dzrobot.envs.franka.safeguards.limits import (
    HARDWARE_FAULTS,
    RECOVERS_ALONE,
    SAFETY_STOPS,
    Abort,
    CommandTimeout,
    MotionGuard,
)
from dzrobot.envs.franka.safeguards.lock_and_stop import (
    FOLDER_VARIABLE,
    ArmLock,
    StopLatch,
    lock_folder,
    private_folder,
)
from dzrobot.envs.franka.safeguards.stop_file import write_stop
from dzrobot.envs.panda.poses import distance_between
from dzrobot.errors import ArmBusyError, ConfigError, RobotError, StoppedError
from dzrobot.policies.base import DEFAULT_SESSION
from dzrobot.rollout.arm.attended import AFTER_STOP, Judged

ADDRESS = "172.16.0.2"
STILL = np.zeros(7, np.float32)
FORWARD = np.array([1, 0, 0, 0, 0, 0, 0], np.float32)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))


def make(operator=None, arm=None, **values):
    arm = arm or FakeArm()
    cameras = [FakeCamera(key, arm) for key in ("video.image", "video.wrist_image")]
    config = FrankaConfig.model_validate({"reward": {"rule": "none"}} | values)
    env = FrankaEnv(
        arm, cameras, config, clock=arm.clock, operator=operator, render_mode="rgb_array"
    )
    return env, arm, cameras


def displaced():
    """Return an arm that has some way to go to its start."""
    pose = HOME.copy()
    pose[0, 3] += 0.2
    return FakeArm(pose)


def test_every_abort_is_a_result_or_a_fault_and_no_safety_stop_recovers_alone():
    assert not SAFETY_STOPS & RECOVERS_ALONE
    assert set(Abort) - SAFETY_STOPS - HARDWARE_FAULTS == {
        Abort.NONE, Abort.INVALID_ACTION, Abort.POLICY_ERROR
    }  # fmt: skip


def test_the_last_image_is_shown_after_an_abort():
    env, arm, _ = make()
    env.reset()
    before = env.render()
    arm.trip("joint_reflex")
    assert env.step(STILL)[3]
    np.testing.assert_array_equal(env.render(), before)


def test_a_stop_stands_for_the_next_program_until_it_is_acknowledged():
    env, arm, _ = make(address=ADDRESS)
    env.attend(None, unattended=True)
    env.reset()
    arm.trip("joint_reflex")
    *_, info = env.step(STILL)
    assert info["abort"] == "collision"
    assert f"dzrobot acknowledge {ADDRESS}" in info["stop"]
    env.close()
    script = (
        "import gymnasium as gym, dzrobot\n"
        f"env = gym.make('Franka-PnP-v0', workcell='fake', address={ADDRESS!r},"
        " unattended=True)\n"
        "env.reset()"
    )
    again = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert again.returncode != 0
    assert "StoppedError: the arm was stopped (collision" in again.stderr
    other, arm, _ = make(address=ADDRESS)
    other.attend(None, unattended=True)
    with pytest.raises(StoppedError, match="collision"):
        other.reset()
    assert arm.moves == []
    other.acknowledge()
    other.reset()
    assert not other.step(STILL)[3]
    other.close()


def test_every_spelling_of_an_address_is_the_same_arm():
    StopLatch("localhost").set(Abort.FORCE, "45 N")
    for spelling in ("127.0.0.1", "127.0.0.01", "127.1", "LocalHost"):
        assert "45 N" in str(StopLatch(spelling).active()), spelling
    lock = ArmLock("localhost", None)
    lock.acquire()
    with pytest.raises(ArmBusyError):
        ArmLock("127.0.0.01", None).acquire()
    lock.release()
    assert StopLatch("127.0.0.2").active() is None
    with pytest.raises(RobotError, match="cannot be resolved"):
        ArmLock("no such arm", None).acquire()


def test_a_stop_that_another_program_sets_ends_the_episode():
    env, arm, _ = make(address=ADDRESS)
    env.attend(None, unattended=True)
    env.reset()
    assert not env.step(FORWARD)[3]
    StopLatch(ADDRESS).set(Abort.OPERATOR_STOP, "somebody at another terminal")
    moves = len(arm.moves)
    *_, truncated, info = env.step(FORWARD)
    assert (truncated, info["abort"]) == (True, "operator_stop")
    assert "another terminal" in info["abort_message"]
    assert all(distance_between(move, arm.state().pose) < 1e-9 for move in arm.moves[moves:])
    env.close()


class Connecting(FakeArm):
    """Something happens while it connects."""

    happens = None

    def connect(self):
        super().connect()
        if self.happens is not None:
            self.happens()


def test_a_stop_while_devices_connect_ends_the_run_before_anybody_is_asked():
    operator, arm = FakeOperator(), Connecting(HOME)
    env, *_ = make(operator, arm=arm, address=ADDRESS)
    arm.happens = env.operator_stop
    arm.gripper.request(opened=False)
    with pytest.raises(StoppedError, match="acknowledge"):
        env.reset()
    assert operator.shown == []
    assert (arm.moves, arm.gripper.state().is_open) == ([], False)
    env.close()


@pytest.mark.parametrize("phase", [ArmPhase.STAND_CLEAR, ArmPhase.SCENE])
def test_a_stop_that_came_before_the_answer_to_a_question_counts(phase):
    class Late(FakeOperator):
        def confirm(self, asked, question):
            super().confirm(asked, question)
            if asked is phase:
                StopLatch(ADDRESS).set(Abort.OPERATOR_STOP, "space")

    operator = Late()
    env, arm, _ = make(operator, arm=displaced(), address=ADDRESS)
    arm.gripper.request(opened=False)
    with pytest.raises(StoppedError, match="space"):
        env.reset()
    assert operator.shown[-1] is phase
    assert phase is ArmPhase.SCENE or not arm.gripper.state().is_open
    assert not arm.state().controlled
    env.close()


def test_the_arm_is_told_that_the_program_runs_and_where_its_stop_lies():
    class Told(FakeArm):
        alive, watched = threading.Event(), None

        def watch_stop(self, path):
            self.watched = path

        def keep_alive(self):
            self.alive.set()

    arm = Told()
    env, *_ = make(arm=arm, address=ADDRESS)
    env.attend(None, unattended=True)
    env.reset()
    assert arm.alive.wait(60)
    env.operator_stop()
    assert arm.watched.exists()
    env.acknowledge()
    assert not arm.watched.exists()
    env.close()


def test_the_driver_holds_when_the_program_is_silent_and_gives_up_later(tmp_path):
    limits = LimitsConfig()
    guard = MotionGuard(limits, tmp_path / "stop")
    guard.begin(100.0)
    assert guard.due(100.0 + limits.deadman_s - 0.01) is CommandTimeout.NONE
    assert guard.due(100.0 + limits.deadman_s) is CommandTimeout.HOLD
    assert guard.due(100.1 + limits.deadman_s) is CommandTimeout.NONE
    guard.hear(102.0)
    assert guard.due(102.0 + limits.deadman_s) is CommandTimeout.HOLD
    assert guard.due(102.0 + limits.stop_after_s) is CommandTimeout.STOP
    assert guard.due(103.0 + limits.stop_after_s) is CommandTimeout.NONE


def test_a_stop_lasts_for_the_driver_until_the_next_motion_begins(tmp_path):
    stop = tmp_path / "stop"
    guard = MotionGuard(LimitsConfig(), stop)
    guard.begin(0.0)
    guard.check()
    write_stop(stop, "operator_stop", "space")
    assert guard.due(0.1) is CommandTimeout.HOLD
    # Somebody acknowledges it before the program has seen it.
    stop.unlink()
    guard.hear(0.2)
    with pytest.raises(StoppedError):
        guard.check()
    assert guard.due(0.3) is CommandTimeout.NONE
    guard.begin(0.4)
    guard.check()
    write_stop(stop, "operator_stop", "space")
    with pytest.raises(StoppedError):
        guard.begin(0.5)


def test_an_arm_without_an_address_keeps_its_stop_to_itself():
    env, arm, _ = make()
    env.reset()
    arm.trip("joint_reflex")
    env.step(STILL)
    with pytest.raises(StoppedError):
        env.reset()
    make()[0].reset()


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b'{"abort": 1}', b"\xff\xfe"])
def test_a_stop_that_cannot_be_read_is_a_stop(content, tmp_path):
    stops = StopLatch(ADDRESS, str(tmp_path))
    stops.set(Abort.FORCE, "45 N")
    (path,) = tmp_path.glob("*.stop")
    path.write_bytes(content)
    assert str(path) in str(stops.active())
    stops.acknowledge()
    assert stops.active() is None


def test_a_planted_link_is_a_stop_and_is_not_followed(tmp_path):
    folder, victim = tmp_path / "locks", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("precious")
    (folder / f"dzrobot-franka-{ADDRESS}.stop").symlink_to(victim)
    stops = StopLatch(ADDRESS, str(folder))
    assert stops.active() is not None
    stops.set(Abort.FORCE, "45 N")
    stops.acknowledge()
    assert stops.active() is None
    assert victim.read_text() == "precious"


def test_the_first_stop_is_the_one_that_is_kept(tmp_path):
    stops = StopLatch(ADDRESS, str(tmp_path))
    stops.set(Abort.COLLISION, "first")
    stops.set(Abort.OPERATOR_STOP, "second")
    assert "first" in str(stops.acknowledge())
    assert stops.acknowledge() is None


def test_a_lock_that_is_a_link_is_refused_and_the_target_left_alone(tmp_path):
    folder, victim = tmp_path / "locks", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("precious")
    (folder / f"dzrobot-franka-{ADDRESS}.lock").symlink_to(victim)
    with pytest.raises(RobotError, match="is a link, which is not followed"):
        ArmLock(ADDRESS, str(folder)).acquire()
    assert victim.read_text() == "precious"


SHARED = "dzrobot.envs.franka.safeguards.lock_and_stop._SHARED"


def test_locks_and_stops_lie_where_every_user_sees_them_or_a_warning_says_so(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.delenv(FOLDER_VARIABLE)
    assert lock_folder(None) == Path("/var/tmp")
    assert lock_folder(str(tmp_path)) == tmp_path
    assert not caplog.records
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path / "cache"))
    # A folder of this user's, whoever may write to it, is one that this user can replace.
    (tmp_path / "open").mkdir(mode=0o755)
    monkeypatch.setattr(SHARED, str(tmp_path / "open"))
    own = lock_folder(None)
    assert own == tmp_path / "cache/locks"
    assert own.stat().st_mode & 0o777 == 0o700
    assert "other users do not see them" in caplog.text
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "linked").symlink_to(elsewhere)
    with pytest.raises(RobotError, match="is a link"):
        private_folder(tmp_path / "linked")


@as_root
def test_the_lock_of_another_user_is_named_and_never_locks_others_out(tmp_path, request):
    # The folders of pytest are this user's alone.
    shared = Path(tempfile.mkdtemp())
    request.addfinalizer(lambda: shutil.rmtree(shared))
    shared.chmod(0o1777)
    lock = ArmLock(ADDRESS, str(shared))
    lock.acquire()
    script = (
        f"import encodings.utf_8_sig, os, sys; sys.path[:] = {sys.path}\n"
        "from dzrobot.envs.franka.safeguards.lock_and_stop import ArmLock, StopLatch\n"
        # What is imported late is read now: the other user may not read this checkout.
        f"StopLatch({ADDRESS!r}, {str(shared)!r}).active()\n"
        f"os.setuid(65534); lock = ArmLock({ADDRESS!r}, {str(shared)!r})\n"
        f"stops = StopLatch({ADDRESS!r}, {str(shared)!r})\n"
    )

    def try_it(what="lock.acquire()"):
        words = [sys.executable, "-c", script + what]
        return subprocess.run(words, capture_output=True, text=True)

    refused = try_it()
    assert f"in use by process {os.getpid()} of user root" in refused.stderr
    lock.release()
    assert try_it().returncode == 0
    StopLatch(ADDRESS, str(shared)).set(Abort.FORCE, "45 N")
    assert "45 N" in try_it("print(stops.active())").stdout
    assert "belongs to user root" in try_it("stops.acknowledge()").stderr
    assert StopLatch(ADDRESS, str(shared)).active() is not None
    os.chown(private_folder(tmp_path / "theirs"), 65534, 65534)
    with pytest.raises(RobotError, match="belongs to"):
        private_folder(tmp_path / "theirs")


class Hindered(FakeClock):
    """Lets something happen at one of its sleeps."""

    def __init__(self, happens, at=3):
        super().__init__()
        self._happens, self._at = happens, at

    def happens_at(self, sleep):
        self._at = sleep

    def sleep_until(self, deadline_s):
        super().sleep_until(deadline_s)
        self._at -= 1
        if self._at == 0:
            self._happens()


def hindered(happens):
    """Return an environment whose arm is on its way when ``happens(env, arm)`` is called."""
    pose = HOME.copy()
    pose[0, 3] += 0.2
    arm = FakeArm(pose, Hindered(lambda: happens(env, arm)))
    env, _, _ = make(arm=arm)
    return env, arm


def interrupted(env, arm):
    raise KeyboardInterrupt


def disconnected(env, arm):
    raise RobotError("the hand caught fire")


@pytest.mark.parametrize(
    ("happens", "raised"),
    [
        (interrupted, KeyboardInterrupt),
        (disconnected, StoppedError),
        (lambda env, arm: env.operator_stop(), StoppedError),
        (lambda env, arm: arm.force_n.__setitem__(0, 50.0), StoppedError),
    ],
    ids=["ctrl-c", "error", "operator", "contact"],
)
def test_a_reset_that_fails_leaves_the_arm_holding_where_it_is(happens, raised):
    env, arm = hindered(happens)
    with pytest.raises(raised):
        env.reset()
    assert distance_between(arm.moves[-1], arm.state().pose) < 1e-9
    assert distance_between(arm.state().pose, HOME) > 0.05
    arm.force_n[:] = 0
    if raised is StoppedError:
        with pytest.raises(StoppedError, match="acknowledge"):
            env.reset()
        env.acknowledge()
    env.reset()
    np.testing.assert_allclose(arm.state().pose, HOME, atol=1e-9)


def test_what_stops_a_reset_says_what_ends_the_stop():
    operator = FakeOperator()
    env, arm, _ = make(operator, arm=displaced(), address=ADDRESS)
    operator.refuses = ArmPhase.STAND_CLEAR
    with pytest.raises(StoppedError, match=f"dzrobot acknowledge {ADDRESS}"):
        env.reset()
    env.acknowledge()
    operator.refuses = None
    arm.connect()
    arm.press_user_stop()
    with pytest.raises(StoppedError, match=rf"release it\)\. .*dzrobot acknowledge {ADDRESS}"):
        env.reset()
    env.close()


def test_a_stop_while_an_episode_is_judged_stands():
    class Leaving(FakeOperator):
        def judge(self):
            raise StoppedError("the operator stopped the arm")

    env, arm, _ = make(Leaving(), reward={"rule": "operator"})
    judged = Judged(gym.wrappers.TimeLimit(env, 1), Leaving(), asks=True)
    judged.reset()
    with pytest.raises(StoppedError, match="acknowledge"):
        judged.step(STILL)
    assert not arm.state().controlled
    env.attend(FakeOperator(), unattended=True)
    with pytest.raises(StoppedError, match="operator_stop"):
        env.reset()
    env.close()


@pytest.mark.parametrize(
    ("answer", "success", "fault"),
    [
        (OperatorVerdict.FAILURE, False, ""),
        (OperatorVerdict.SUCCESS, True, ""),
        (OperatorVerdict.DISCARDED, False, "discarded by the operator"),
        # They stopped again, or left: nothing was decided, so the trial is run again.
        (None, False, "discarded by the operator"),
    ],
)
def test_what_a_stopped_trial_counts_as_is_asked(answer, success, fault):
    asked = []

    class Asked(FakeOperator):
        def judge(self, question=""):
            asked.append(question)
            if answer is None:
                raise StoppedError("the operator stopped the arm")
            return answer

    env, _, _ = make(Asked())
    judged = Judged(env, Asked(), asks=True, asks_after_stop=True)
    judged.reset()
    env.operator_stop()
    *_, truncated, info = judged.step(STILL)
    assert (truncated, info["abort"], asked) == (True, "operator_stop", [AFTER_STOP])
    assert (info["is_success"], info["fault"]) == (success, fault)
    # Whatever it counts as, no other trial follows before the arm has been looked at.
    assert info["stop"]
    env.close()


def test_the_watchdog_looks_after_the_way_to_the_start():
    def sleepy(env, arm):
        arm.clock.sleep_until(arm.clock.now() + 1.0)
        env._control.check_silence()
        assert distance_between(arm.moves[-1], arm.state().pose) < 1e-9
        arm.clock.sleep_until(arm.clock.now() + 100.0)
        env._control.check_silence()
        assert not arm.state().controlled

    env, _ = hindered(sleepy)
    with pytest.raises((RobotError, StoppedError), match=r"stopped on its way|no action"):
        env.reset()


class Dying(FakeArm):
    """Its controller dies again right after a recovery."""

    dying = False

    def start(self, *space):
        super().start(*space)
        if self.dying:
            self._controlled = False


@pytest.mark.parametrize("when", ["before the step", "during the step"])
def test_a_reflex_during_a_recovery_is_an_abort(when):
    clock = Hindered(lambda: arm.trip("communication_constraints_violation"), at=0)
    arm = Dying(clock=clock)
    env, _, _ = make(arm=arm)
    env.reset()
    arm.dying = True
    clock.happens_at(1)
    if when == "before the step":
        clock.sleep_until(clock.now())
    *_, truncated, info = env.step(STILL)
    assert truncated
    assert info["abort"] == "reflex"
    with pytest.raises(StoppedError):
        env.reset()


def test_people_are_asked_before_anything_moves_and_before_the_episode():
    operator = FakeOperator()
    env, arm, _ = make(operator, arm=displaced())
    operator.refuses = ArmPhase.STAND_CLEAR
    with pytest.raises(StoppedError):
        env.reset()
    assert arm.moves == []
    operator.refuses = ArmPhase.STOPPED
    with pytest.raises(StoppedError):
        env.reset()
    assert arm.moves == []
    operator.refuses = None
    operator.shown.clear()
    env.reset()
    assert operator.shown == [
        ArmPhase.STOPPED, ArmPhase.STAND_CLEAR, ArmPhase.MOVING, ArmPhase.SCENE, ArmPhase.RUNNING
    ]  # fmt: skip
    env.close()


def test_the_arm_is_not_controlled_while_the_scene_is_set():
    class Looking(FakeOperator):
        def confirm(self, phase, question):
            super().confirm(phase, question)
            controlled[phase] = arm.state().controlled

    controlled = {}
    env, arm, _ = make(Looking(), arm=displaced())
    env.reset()
    assert controlled == {ArmPhase.STAND_CLEAR: False, ArmPhase.SCENE: False}
    assert arm.state().controlled
    env.close()


def test_a_pause_rests_the_arm_and_shows_what_is_new():
    operator = FakeOperator()
    env, _, _ = make(operator)
    env.reset()
    operator.shown.clear()
    operator.pauses = True
    *_, truncated, info = env.step(STILL)
    assert not truncated
    assert operator.shown == [ArmPhase.PAUSED, ArmPhase.RUNNING]
    operator.pauses, operator.refuses = True, ArmPhase.PAUSED
    *_, truncated, info = env.step(STILL)
    assert (truncated, info["abort"]) == (True, "operator_stop")
    env.close()


@pytest.mark.parametrize("rule", ["none", "operator"])
@pytest.mark.parametrize(
    "said", [OperatorVerdict.SUCCESS, OperatorVerdict.FAILURE, OperatorVerdict.DISCARDED]
)
def test_a_persons_word_counts_whatever_the_rule(rule, said):
    operator = FakeOperator()
    env, _, _ = make(operator, reward={"rule": rule})
    env.reset()
    operator.said = said
    _, reward, terminated, truncated, info = env.step(STILL)
    assert reward == float(said is OperatorVerdict.SUCCESS)
    assert (terminated, truncated) == (
        said is not OperatorVerdict.DISCARDED,
        said is OperatorVerdict.DISCARDED,
    )
    assert info["reset_reason"] == said.value
    assert bool(info["fault"]) == (said is OperatorVerdict.DISCARDED)
    env.close()


def test_a_rule_that_needs_a_person_says_so():
    env, arm, _ = make(reward={"rule": "operator"})
    with pytest.raises(ConfigError, match="needs a person"):
        env.reset()
    assert arm.moves == []


def test_unattended_goes_on_after_a_lost_frame_and_not_after_contact():
    env, arm, cameras = make()
    env.attend(None, unattended=True)
    env.reset()
    cameras[0].frozen = True
    arm.clock.sleep_until(arm.clock.now() + 1.0)
    *_, info = env.step(STILL)
    assert (info["abort"], info["stop"]) == ("stale_frame", "")
    assert info["fault"].startswith("stale_frame")
    env.reset()
    arm.trip("joint_reflex")
    *_, info = env.step(STILL)
    assert (info["abort"], info["fault"]) == ("collision", "")
    assert info["stop"]
    with pytest.raises(StoppedError):
        env.reset()


class Troubled:
    """Drives forward; in the first episode of a process something happens at the fifth step."""

    happens = None

    def __init__(self, env):
        self.env, self.steps = env.unwrapped, 0

    def reset(self, session=None, *, episode=None):
        self.steps = 0

    def act(self, obs, *, session=DEFAULT_SESSION):
        self.steps += 1
        if self.steps == 5 and Troubled.happens:
            happens, Troubled.happens = Troubled.happens, None
            happens(self.env)
        return FORWARD * 0.1


def touch(env):
    env.arm.trip("cartesian_reflex")


def freeze(env):
    env._sensors._cameras[0].frozen = True
    env._clock.sleep_until(env._clock.now() + 1.0)


@pytest.fixture
def evaluate(tmp_path):
    def run(*words, happens=None, episodes=3, address=ADDRESS):
        Troubled.happens = happens
        where = ["--env-arg", f"address={address}"] if address else []
        return main(
            ["eval", "--env", "dzrobot/Franka-PnP-fake-v0", *where, "--policy",
             f"{__name__}:Troubled", "--privileged", "--episodes", str(episodes),
             "--max-steps", "8", "--output", str(tmp_path / "results"), *words]
        )  # fmt: skip

    return run


def records(tmp_path):
    lines = (tmp_path / "results/records.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_an_evaluation_with_videos_ends_at_a_stop_and_goes_on_once_acknowledged(
    evaluate, tmp_path, capsys
):
    assert evaluate("--unattended", happens=touch) == STOPPED
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "collision" in said
    assert f"dzrobot acknowledge {ADDRESS}" in said
    (record,) = records(tmp_path)
    assert (record["success"], record["ended"], record["error"]) == (False, "collision", None)
    assert (tmp_path / "results" / record["video"]).stat().st_size > 0
    assert evaluate("--unattended") == STOPPED
    assert len(records(tmp_path)) == 1
    assert "collision" in capsys.readouterr().err
    assert main(["acknowledge", ADDRESS]) == 2
    assert "--yes" in capsys.readouterr().err
    assert main(["acknowledge", ADDRESS, "--yes"]) == 0
    assert "collision" in capsys.readouterr().out
    assert evaluate("--unattended") == 0
    # The crash stays a result: it is not rolled again.
    assert records(tmp_path)[0]["ended"] == "collision"
    assert len(records(tmp_path)) == 3
    assert main(["acknowledge", ADDRESS]) == 0
    assert "no stop is in force" in capsys.readouterr().out


def test_a_lost_frame_is_an_error_and_an_unattended_run_goes_on(evaluate, tmp_path, capsys):
    assert evaluate("--unattended", happens=freeze) == 1
    first, *others = records(tmp_path)
    assert first["error"].startswith("stale_frame")
    assert first["success"] is None
    assert [record["error"] for record in others] == [None, None]
    capsys.readouterr()
    assert evaluate("--unattended") == 0
    assert records(tmp_path)[-1]["case"] == first["case"]


def test_a_record_keeps_what_the_arm_said(evaluate, tmp_path, capsys):
    assert evaluate("--unattended", "--env-arg", "firmware=5.8.0", happens=freeze, episodes=2) == 1
    said = capsys.readouterr().out
    assert "without a result: 1 stale_frame" in said
    lost, whole = (record["robot"] for record in records(tmp_path))
    assert (lost["abort"], whole["abort"]) == ("stale_frame", "")
    assert lost["abort_message"].startswith("a camera frame is")
    assert lost["limited"] == {"refused": 1}
    assert whole["limited"] == {}
    card = json.loads((tmp_path / "results/card.json").read_text())
    (suite,) = card["suites"].values()
    assert whole["workcell"] == workcell_digest(suite["workcell"])
    assert (whole["firmware"], suite["workcell"]["firmware"]) == ("5.8.0", "5.8.0")
    assert whole["drivers"].items() <= card["versions"].items()
    assert ADDRESS not in (tmp_path / "results/records.jsonl").read_text()
    summary = json.loads((tmp_path / "results/summary.json").read_text())
    assert summary["causes"] == {"stale_frame": 1}


def test_without_a_person_a_lost_frame_ends_the_run(evaluate, tmp_path):
    assert evaluate(happens=freeze, address=None) == STOPPED
    (record,) = records(tmp_path)
    assert record["error"].startswith("stale_frame")


def test_nobody_to_ask_is_said_before_anything_moves(evaluate, tmp_path, capsys):
    assert evaluate() == 2
    assert "--unattended" in capsys.readouterr().err
    assert not (tmp_path / "results/records.jsonl").exists()


def test_an_arm_that_another_program_drives_ends_the_run_at_once(evaluate, tmp_path, capsys):
    lock = ArmLock(ADDRESS, None)
    lock.acquire()
    assert evaluate("--unattended") == 2
    assert f"in use by process {os.getpid()}" in capsys.readouterr().err
    lock.release()
    assert not (tmp_path / "results/records.jsonl").exists() or records(tmp_path) == []
    assert evaluate("--unattended") == 0


def test_one_arm_takes_one_process(evaluate, capsys):
    assert evaluate("--unattended", "--workers", "2") == 2
    assert "one arm takes one process" in capsys.readouterr().err
    assert evaluate("--unattended", "--workers", "1", "--videos", "none", episodes=1) == 0


def test_an_environment_that_raised_lets_go_of_the_arm(evaluate, tmp_path):
    def burn(env):
        env.arm.gripper.state = None

    assert evaluate("--unattended", happens=burn) == 1
    assert [record["error"] for record in records(tmp_path)][1:] == [None, None]


def test_record_and_replay_end_at_a_stop_too(tmp_path, capsys):
    words = ["--workcell", "fake", "--env-arg", f"address={ADDRESS}", "--unattended"]
    words += ["--full-speed"]
    record = ["record", *words, "--output", str(tmp_path / "set"), "--max-steps", "8"]
    record += ["--policy", "hold", "--keep-failures"]
    assert main([*record, "--attempts", "1"]) == 0
    StopLatch(ADDRESS).set(Abort.FORCE, "45 N")
    assert main([*record, "--attempts", "2"]) == STOPPED
    assert main(["replay", str(tmp_path / "set"), *words]) == STOPPED
    assert "45 N" in capsys.readouterr().err
    StopLatch(ADDRESS).acknowledge()
    assert main(["replay", str(tmp_path / "set"), *words]) == 0


def test_an_arm_is_not_driven_by_the_collector_of_simulators(tmp_path, capsys):
    words = ["--env", "dzrobot/Franka-PnP-fake-v0", "--output", str(tmp_path / "set")]
    assert main(["collect", *words]) == 2
    assert "dzrobot record" in capsys.readouterr().err


def test_what_fails_in_closing_leaves_nothing_open():
    operator = FakeOperator()
    env, arm, _ = make(operator, address=ADDRESS)
    env.reset()
    arm.stop = arm.close = None
    with pytest.raises(TypeError):
        env.close()
    ArmLock(ADDRESS, None).acquire()
