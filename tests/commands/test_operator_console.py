"""``eval``, ``record`` and ``replay`` as an operator drives them: on a terminal, with videos on."""

import json
import logging
import os
import re
import signal
import urllib.request
from pathlib import Path

import cv2
import numpy as np
import pytest
from operated import Operated, operator_environment

from dzrobot.cli import INTERRUPTED, STOPPED, TERMINATED, main
from dzrobot.envs.franka.operator.console import OperatorConsole
from dzrobot.envs.franka.operator.keyboard import Keyboard
from dzrobot.envs.franka.operator.operator import ArmPhase, OperatorVerdict
from dzrobot.envs.franka.operator.preview import Preview
from dzrobot.envs.franka.safeguards.lock_and_stop import StopLatch
from dzrobot.errors import ConfigError, StoppedError
from dzrobot.rollout.arm.attended import leaving

ADDRESS = "172.16.0.9"
RUN_FRANKA = Path(__file__).parents[2] / "examples/run_franka.py"
pytestmark = pytest.mark.copies
OPERATOR = ["--env-arg", "reward={rule: operator}", "--env-arg", f"address={ADDRESS}"]


@pytest.fixture
def environment(tmp_path):
    return operator_environment(tmp_path)


@pytest.fixture
def evaluation(tmp_path, environment):
    """Return a function that starts the same evaluation on a terminal."""

    def start(*words, env="fake", policy="Slow"):
        return Operated(
            ["eval", "--env", f"dzrobot/Franka-PnP-{env}-v0", "--policy", f"slow_policy:{policy}",
             "--privileged", "--episodes", "4", "--max-steps", "100000",
             "--output", str(tmp_path / "results"), *words],
            tmp_path / "results/operator.jsonl", environment,
        )  # fmt: skip

    return start


def records(tmp_path):
    lines = (tmp_path / "results/records.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def drive(evaluation, tmp_path, *words, **where):
    """Judge, discard, stop; in the next run acknowledge and finish."""
    with evaluation(*OPERATOR, *words, **where) as run:
        run.begin()
        run.press("c")
        run.begin()
        run.press("z")
        run.begin()
        run.press(" ")
        assert run.end() == STOPPED
    assert f"dzrobot acknowledge {ADDRESS}" in run.screen.decode().replace("\r\n", "")
    won, discarded, stopped = records(tmp_path)
    assert (won["success"], won["ended"]) == (True, "success")
    assert discarded["error"] == "discarded by the operator"
    assert (stopped["success"], stopped["ended"], stopped["error"]) == (
        False, "operator_stop", None
    )  # fmt: skip
    assert all((tmp_path / "results" / record["video"]).stat().st_size for record in (won, stopped))
    with evaluation(*OPERATOR, *words, **where) as run:
        run.wait_for("question", "stopped")
        run.press("\n")
        run.begin()
        run.press("b")
        run.begin()
        run.press("c")
        assert run.end() == 0
    again, last = records(tmp_path)[3:]
    assert (again["case"], again["success"]) == (discarded["case"], False)
    assert (last["success"], last["ended"]) == (True, "success")
    summary = json.loads((tmp_path / "results/summary.json").read_text())
    assert summary["complete"]
    (total,) = summary["results"]["total"]
    assert (total["successes"], total["episodes"], total["errors"]) == (2, 4, 0)


def test_an_operator_judges_discards_stops_and_acknowledges_an_evaluation(evaluation, tmp_path):
    drive(evaluation, tmp_path)


@pytest.mark.long
@pytest.mark.robot
def test_the_same_on_the_emulated_arm(evaluation, tmp_path):
    pytest.importorskip("franky", reason="needs franky-control (x86_64 Linux)")
    pytest.importorskip("pyrealsense2", reason="needs pyrealsense2 (x86_64 Linux)")
    # A busy machine starves the emulators now and then.
    patient = "limits={state_age_s: 2.0, frame_age_s: 5.0, hold_after_s: 2.0}"
    drive(evaluation, tmp_path, "--env-arg", patient, env="emulated", policy="Still")


def test_an_operator_records_pauses_notes_discards_and_stops(tmp_path, environment):
    words = [
        "record", "--workcell", "fake", *OPERATOR, "--call", "slow_call:act", "--episodes", "3",
        "--max-steps", "100000", "--full-speed", "--output", str(tmp_path / "set"),
    ]  # fmt: skip
    (tmp_path / "slow_call.py").write_text(
        "import time, numpy as np\n"
        "def act(observation):\n    time.sleep(0.02)\n    return np.zeros(7, np.float32)\n"
    )
    with Operated(words, tmp_path / "set.operator.jsonl", environment) as run:
        run.begin()
        run.press("n")
        run.wait_for("typing", "paused")
        run.press("cup upside down, see photo\n")
        assert run.wait_for("note")["text"] == "cup upside down, see photo"
        run.press("\n")
        run.wait_for("phase", "running")
        run.press("p")
        run.wait_for("question", "paused")
        run.press("\n")
        run.wait_for("phase", "running")
        run.press("z")
        run.begin()
        run.press("b")
        run.wait_for("typing", "judging")
        run.press("the cube rolled off\n")
        assert run.wait_for("reason")["text"] == "the cube rolled off"
        assert "failures 1, discarded 1" in run.wait_for("progress")["text"]
        run.begin()
        run.press("c")
        run.begin()
        run.press(" ")
        assert run.wait_for("stop")["reason"] == "space"
        assert run.end() == STOPPED
    shown = run.screen.decode().replace("\r\n", "\n")
    assert "discarded, not kept" in shown
    assert "failure, not kept: the cube rolled off" in shown
    assert "success, kept" in shown
    info = json.loads((tmp_path / "set/meta/info.json").read_text())
    assert info["total_episodes"] == 1


def fetch(url):
    """Return the page's image of every view, as (H, W, 3) RGB."""
    with urllib.request.urlopen(url, timeout=60) as page:
        names = re.findall(rb"src='/([^']+)'", page.read())
    found = {}
    for name in names:
        with urllib.request.urlopen(f"{url}{name.decode()}", timeout=60) as stream:
            assert stream.headers["Content-Type"].startswith("multipart/x-mixed-replace")
            head = [stream.readline() for _ in range(4)]
            coded = stream.read(int(head[2].split(b":")[1]))
        found[name.decode()] = cv2.imdecode(np.frombuffer(coded, np.uint8), cv2.IMREAD_COLOR)
    return found


def test_every_key_works_in_run_franka_whatever_the_reward_rule(tmp_path, environment):
    words = [
        "--env-arg", "workcell=fake", "--env-arg", f"address={ADDRESS}", "--policy",
        "slow_policy:Slow", "--privileged", "--episodes", "5", "--max-steps", "100000",
        "--preview", "0", "--output", str(tmp_path / "results"),
    ]  # fmt: skip
    log = tmp_path / "results/operator.jsonl"
    with Operated(words, log, environment, RUN_FRANKA) as run:
        url = run.wait_for("images")["url"]
        run.begin()
        assert set(fetch(url)) == {"video.image", "video.wrist_image"}
        run.press("p")
        run.wait_for("question", "paused")
        run.press("\n")
        run.wait_for("phase", "running")
        run.press("n")
        run.wait_for("typing", "paused")
        run.press("the cup slipped\n")
        assert run.wait_for("note")["text"] == "the cup slipped"
        run.press("\n")
        run.wait_for("phase", "running")
        for verdict in "cbz":
            run.press(verdict)
            run.begin()
        run.press(" ")
        assert run.end() == STOPPED
    ended = [(record["ended"], record["success"]) for record in records(tmp_path)]
    assert ended == [
        ("success", True), ("failure", False), ("discarded", None), ("operator_stop", False)
    ]  # fmt: skip
    assert records(tmp_path)[0]["robot"]["abort"] == ""
    assert b"Traceback" not in run.screen


def test_a_replay_is_paused_stopped_acknowledged_and_judged(tmp_path, environment, monkeypatch):
    words = ["--workcell", "fake", "--env-arg", f"address={ADDRESS}", "--full-speed"]
    dataset = str(tmp_path / "set")
    record = ["record", *words, "--unattended", "--policy", "hold", "--max-steps", "5"]
    record += ["--attempts", "1", "--keep-failures"]
    monkeypatch.setenv("DZROBOT_LOCK_FOLDER", environment["DZROBOT_LOCK_FOLDER"])
    assert main([*record, "--output", dataset]) == 0
    log = tmp_path / "replay.jsonl"
    replay = ["replay", dataset, *words, "--log", str(log)]

    def pause(run):
        """Begin, and pause at the first step: an arm without a clock is done in no time."""
        run.wait_for("question", "stand clear")
        run.press("\n")
        run.wait_for("question", "scene ready?")
        run.press("\np")
        run.wait_for("question", "paused")

    with Operated(replay, log, environment) as run:
        pause(run)
        run.press("n")
        run.wait_for("typing", "paused")
        run.press("slipped\n")
        assert run.wait_for("note")["text"] == "slipped"
        run.press(" ")
        assert run.end() == STOPPED
    with Operated(replay, log, environment) as run:
        run.wait_for("question", "stopped")
        run.press("\n")
        pause(run)
        run.press("\nb")
        assert run.wait_for("verdict")["verdict"] == "failure"
        assert run.end() == 1
    assert "ended by failure" in run.screen.decode()


def test_an_episode_without_a_verdict_is_judged(tmp_path, environment):
    words = [
        "record", "--workcell", "fake", *OPERATOR, "--full-speed", "--policy", "hold",
        "--episodes", "1",
        "--max-steps", "3", "--output", str(tmp_path / "set"),
    ]  # fmt: skip
    with Operated(words, tmp_path / "set.operator.jsonl", environment) as run:
        run.begin()
        run.wait_for("question", "judging")
        run.press("c")
        assert run.wait_for("verdict")["verdict"] == "success"
        assert run.end() == 0
    assert "3 frames, success, kept" in run.screen.decode()


def left_alone(tmp_path):
    return json.loads((tmp_path / "left.json").read_text()) == {
        "connected": False, "controlled": False
    }  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_leaving_stops_and_closes_the_arm(how, evaluation, tmp_path):
    with evaluation("--env-arg", f"address={ADDRESS}") as run:
        run.begin()
        run.wait_for_file(tmp_path / "left.json")
        run.signal(getattr(signal, how))
        assert run.end() == (TERMINATED if how == "SIGTERM" else INTERRUPTED)
    assert left_alone(tmp_path)
    assert b"Traceback" not in run.screen
    assert StopLatch(ADDRESS, str(tmp_path)).active() is None
    assert json.loads((tmp_path / "results/summary.json").read_text())["complete"] is False


@pytest.mark.sampled
@pytest.mark.parametrize("phase", ["running", "stand clear", "scene ready?"])
def test_a_closed_terminal_is_a_stop_in_every_phase(phase, evaluation, tmp_path):
    with evaluation("--env-arg", f"address={ADDRESS}") as run:
        run.wait_for("question", "stand clear")
        if phase != "stand clear":
            run.press("\n")
            run.wait_for("question", "scene ready?")
        if phase == "running":
            run.press("\n")
            run.wait_for_file(tmp_path / "left.json")
        run.hang_up()
        assert run.end() == STOPPED
    assert phase != "running" or left_alone(tmp_path)
    assert "operator_stop" in str(StopLatch(ADDRESS, str(tmp_path)).active())


def test_signals_become_one_interrupt_after_the_arm_was_stopped():
    rested = []
    before = signal.getsignal(signal.SIGTERM)

    def leave():
        with leaving(lambda: rested.append(1)):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
            finally:
                # A second one does not disturb what the first began.
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        leave()
    assert rested == [1]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def console(tmp_path):
    keyboard = Keyboard()
    return OperatorConsole(log=tmp_path / "log.jsonl", keyboard=keyboard), keyboard, tmp_path


class Typing(Keyboard):
    """Presses what it is told to once it is asked for keys for the second time."""

    def __init__(self, keys):
        super().__init__()
        self._later, self._asked = keys, 0

    def take(self, which=None):
        self._asked += 1
        if self._asked == 2:
            self.press(self._later)
        return super().take(which)


def test_what_was_typed_before_a_question_is_no_answer():
    keyboard = Typing(" ")
    console = OperatorConsole(keyboard=keyboard)
    keyboard.press("\n")
    with pytest.raises(StoppedError):
        console.confirm(ArmPhase.STAND_CLEAR, "Stand clear?")


def test_who_has_left_has_stopped_the_arm(console):
    console, keyboard, _ = console
    keyboard.gone = True
    with pytest.raises(StoppedError):
        console.confirm(ArmPhase.SCENE, "Ready?")
    assert console._stops == 1


def test_everything_is_logged_with_its_time(console):
    console, keyboard, folder = console
    keyboard.press("b ")
    assert console.verdict() is OperatorVerdict.FAILURE
    assert console.wants_stop()
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["verdict", "stop"]
    assert all({"time", "monotonic_s"} <= set(event) for event in events)


def test_warnings_are_on_the_screen_and_in_the_log(console):
    console, _, folder = console
    logger = logging.getLogger("dzrobot.somewhere")
    console.start(folder / "stop")
    logger.warning("the arm %s", "sags")
    console.close()
    logger.warning("after the run")
    (event,) = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    assert (event["event"], event["text"]) == ("warning", "the arm sags")
    assert logging.getLogger("dzrobot").propagate


def test_the_cameras_are_a_page_of_this_machine():
    image = np.zeros((48, 64, 3), np.uint8)
    image[:] = (200, 30, 30)
    preview = Preview(0, lambda: {"video.image": image})
    with urllib.request.urlopen(preview.url, timeout=60) as page:
        assert b"/video.image" in page.read()
    with urllib.request.urlopen(f"{preview.url}video.image", timeout=60) as stream:
        assert b"--frame" in stream.readline()
        assert b"image/jpeg" in stream.readline()
        size = int(stream.readline().split(b":")[1])
        stream.readline()
        coded = stream.read(size)
    seen = cv2.imdecode(np.frombuffer(coded, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    assert seen.shape == image.shape
    assert np.abs(seen.astype(int) - image).max() < 12
    port = int(preview.url.rstrip("/").rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"port {port}"):
        Preview(port, dict)
    preview.close()
    with pytest.raises(ConfigError, match="70000"):
        Preview(70000, dict)
