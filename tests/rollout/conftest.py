"""Policies for the evaluations of these tests, in a module that a command can name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import SEEKER

ROOT = Path(__file__).parents[2]

POLICIES = (
    '''
import os, threading, time
import numpy as np
from dzrobot.errors import SetupError
from dzrobot.policies.base import Plan, Policy

class Steer:
    """Steers to the mark, more or less: noise keyed by the episode, memory by the session."""

    pause = 0.0

    def __init__(self, robot):
        self.sessions = {}

    def reset(self, session=None, *, episode=None):
        self.sessions[session] = np.random.default_rng(episode), []

    def act(self, obs, *, session="default"):
        time.sleep(self.pause)
        generator, steps = self.sessions[session]
        steps.append(1)
        state, action = obs["state.state"], np.zeros(7, np.float32)
        action[:2] = np.clip((state[3:5] - state[:2]) / 0.1, -1, 1) + generator.normal(0, 0.2, 2)
        # Late in an episode it loses interest, so that some episodes fail.
        return np.clip(action, -1, 1) / max(1.0, len(steps) - 11.0)

def dreaming(robot):
    """The bundled policy, by another name than a checkpoint's."""
    from dzrobot.policies.dreamzero.bundled import default_checkpoint
    from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
    return DreamZeroPolicy.from_pretrained(default_checkpoint(), embodiment=robot)

'''
    + SEEKER
    + '''
class Raising(Seeker):
    """Raises at a mark far to the right, as long as there is a file to say so."""

    def act(self, obs, *, session="default"):
        if obs["state.state"][3] > 0.55 and os.path.exists(os.environ["BROKEN"]):
            raise RuntimeError("the expert broke")
        return super().act(obs)

class Deviceless(Steer):
    """Finds that the machine cannot do what every episode needs."""

    def act(self, obs, *, session="default"):
        if os.path.exists(os.environ["BROKEN"]):
            raise SetupError("OpenGL does not work")
        return super().act(obs, session=session)

class Together(Steer):
    batches = []

    @property
    def pause(self):
        # While it thinks about one observation, others come in; on a busy machine, late.
        return 0.01 if self.batches else 0.5

    def act_batch(self, observations, sessions):
        self.batches.append(len(sessions))
        return [self.act(o, session=s) for o, s in zip(observations, sessions)]

class Chunked(Together, Policy):
    """Plans at every fourth step, and notes how many plans share a call."""

    planned = []

    def plans_next(self, *, session="default"):
        return len(self.sessions[session][1]) % 4 == 0

    def act(self, obs, *, session="default"):
        # Alone in a call, this is what is asked.
        self.planned.extend([1] * self.plans_next(session=session))
        return Steer.act(self, obs, session=session)

    def act_batch(self, observations, sessions):
        due = sum(self.plans_next(session=session) for session in sessions)
        self.planned.extend([due] * bool(due))
        return [Steer.act(self, o, session=s) for o, s in zip(observations, sessions)]

class Glancing(Steer):
    """Looks at every third image alone, and keeps which it was shown."""

    shown = []

    def act(self, obs, *, session="default"):
        self.shown.append("video.image" in obs)
        return super().act(obs, session=session)

    def reads_frames(self, *, session="default", asked=None):
        return len(self.sessions[session][1]) % 3 == 0

class Slow(Steer):
    pause = 0.01

class Signed(Slow):
    """Notes which process of torchrun acts."""

    def reset(self, session=None, *, episode=None):
        super().reset(session, episode=episode)
        with open(os.environ["SIGNED"], "a") as file:
            file.write(os.environ.get("RANK", "alone") + " ")

class Drawn(Seeker):
    """Notes with which device the simulator beside it draws."""

    def __init__(self, env):
        with open(os.environ["SIGNED"], "a") as file:
            file.write(os.environ["MUJOCO_EGL_DEVICE_ID"] + " ")

class Broken(Steer):
    """Raises late in an episode, as long as there is a file to say so."""

    def act(self, obs, *, session="default"):
        if len(self.sessions[session][1]) == 14 and os.path.exists(os.environ["BROKEN"]):
            raise RuntimeError("the policy broke")
        return super().act(obs, session=session)

class Nonsense(Steer):
    """Gives six numbers in place of seven."""
    def act(self, obs, *, session="default"):
        return super().act(obs, session=session)[:6]

class Unready(Steer):
    """Raises at once, as long as there is a file to say so."""

    def act(self, obs, *, session="default"):
        if os.path.exists(os.environ["BROKEN"]):
            raise RuntimeError("the policy is not ready")
        return super().act(obs, session=session)

class Leaving(Steer):
    """Ends its process in the way that scripts do."""

    def act(self, obs, *, session="default"):
        raise SystemExit(0)

class Deadly(Steer):
    """Takes its process down, as a simulator does that runs out of memory."""

    def act(self, obs, *, session="default"):
        os._exit(7)

class Asleep(Steer):
    """Lives beside its environment, and looks at no pipe for ten minutes."""

    def act(self, obs, *, session="default"):
        open(os.environ["ASLEEP"], "a").close()
        time.sleep(600)

class Paced:
    """Plans on another thread; the second step after a request waits until the plan is made."""

    def __init__(self, robot):
        self.embodiment, self.made, self.since = robot, threading.Event(), None
        self.threads, self.leftovers = set(), []

    def reset(self, session=None, *, episode=None):
        self.since = None

    def act(self, obs, *, session="default"):
        raise AssertionError("plans are asked for")

    def longest_delay(self, method):
        return self.embodiment.timing.action_horizon

    def observe(self, obs, *, session="default"):
        if self.since is not None:
            self.since += 1
            assert self.since < 2 or self.made.wait(60)

    def request(self, *, session="default", leftover=None):
        self.since = 0
        self.made.clear()
        self.leftovers.append(leftover)

    def result(self, ticket):
        self.threads.add(threading.current_thread().name)
        rows = np.zeros((self.embodiment.timing.action_horizon, 7), np.float32)
        self.made.set()
        Paced.last = self
        return Plan(actions=rows, targets=rows, normalized=rows, timing={})

class Torn(Steer):
    """Its worker dies in the middle of a message to the main process."""

    def act(self, obs, *, session="default"):
        import gc, struct
        from multiprocessing.connection import Connection
        [pipe] = [o for o in gc.get_objects() if isinstance(o, Connection) and not o.closed]
        os.write(pipe.fileno(), struct.pack("!i", 1000) + b"the first few bytes")
        os._exit(9)
'''
)


@pytest.fixture(autouse=True, scope="module")
def policies(tmp_path_factory):
    """Make ``rollout_policies`` importable here and in the processes started from here."""
    folder = tmp_path_factory.mktemp("policies")
    (folder / "rollout_policies.py").write_text(POLICIES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    sys.modules.pop("rollout_policies", None)


@pytest.fixture(scope="module")
def command(heed_ctrl_c):
    """Return a function that starts an evaluation in a process group of its own."""
    started = []

    def start(*words, program=("-m", "dzrobot.cli", "eval")):
        process = subprocess.Popen(
            [sys.executable, *program, *map(str, words)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=ROOT, start_new_session=True, preexec_fn=heed_ctrl_c,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
