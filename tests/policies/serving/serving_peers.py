"""A policy that can be served without a network, and the messages of existing clients."""

import hashlib
import threading
from contextlib import contextmanager

import msgpack
import numpy as np
from websockets.sync.client import connect

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ModalityError, SessionError
from dzrobot.modality.window import read_observation
from dzrobot.policies.base import Footprint, Plan, Policy, check_leftovers
from dzrobot.policies.serving.endpoint import ServeOptions
from dzrobot.policies.serving.server import PolicyServer, in_background

DROID = load_embodiment("oxe_droid")
MINI = load_embodiment("libero_mini")
ARENA = {
    "image_resolution": [180, 320],
    "needs_wrist_camera": True,
    "n_external_cameras": 2,
    "needs_stereo_camera": False,
    "needs_session_id": True,
    "action_space": "joint_position",
}
"""The greeting of RoboArena's clients for :data:`DROID`."""


UNKNOWN = "a task that the policy refuses"


class Remembering(Policy):
    """Plans numbers that depend on everything its session has seen, and on nothing else."""

    history = "recent"

    def __init__(self, embodiment=DROID):
        self.embodiment = embodiment
        self.open = {}
        self.episodes = []
        self.batches = []
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Semaphore(0)
        self.fails = False

    def reset(self, session="default", *, episode=None):
        self.open[session] = [hashlib.sha256(str(episode or 0).encode()), 0]
        self.episodes.append(episode)

    def evict(self, session):
        if session not in self.open:
            raise SessionError(f"{session} is not open")
        del self.open[session]

    def stage(self, session):
        return self.open[session][1]

    def footprint(self, session):
        return Footprint(session=1000, free=1_000_000)

    def plan(self, asks):
        check_leftovers(self, [ask.leftover for ask in asks])
        seen = [read_observation(ask.observation, self.embodiment) for ask in asks]
        if any(frames[0][self.embodiment.language] == UNKNOWN for frames in seen):
            raise ModalityError(f"no such task: {UNKNOWN}")
        self.began.release()
        assert self.gate.wait(60)
        if self.fails:
            raise RuntimeError("the device is gone")
        self.batches.append(len(asks))
        return [self._plan(frames, ask.session) for frames, ask in zip(seen, asks, strict=True)]

    def _plan(self, frames, name):
        digest = self.open[name][0]
        for frame in frames:
            for key, value in sorted(frame.items()):
                digest.update(key.encode())
                digest.update(value.encode() if isinstance(value, str) else value.tobytes())
        self.open[name][1] += 1
        draws = np.random.default_rng(list(digest.digest()))
        shape = (self.embodiment.timing.action_horizon, self.embodiment.action_dim)
        rows = draws.uniform(-1, 1, shape).astype(np.float32)
        return Plan(actions=rows, targets=rows, normalized=rows, timing={"total_ms": 1.0})


@contextmanager
def serving(policy, **options):
    given = {"port": 0, "array_port": 0, "drain_s": 5.0, **options}
    with in_background(PolicyServer(policy, ServeOptions(**given), card={"who": "test"})) as server:
        yield server


@contextmanager
def talking(server, *, array=False, path="/", **options):
    """Yield a raw connection that has read its greeting."""
    port = server.ports[1 if array else 0]
    with connect(
        f"ws://127.0.0.1:{port}{path}", compression=None, max_size=None, proxy=None, **options
    ) as socket:
        socket.hello = read(socket.recv(timeout=60))
        yield socket


def ask(socket, message):
    socket.send(frame(message))
    return read(socket.recv(timeout=60))


def frame(message):
    """Return a message as msgpack writes it, its arrays as the facts say; none of our code."""
    return msgpack.packb(_plain(message))


def read(answer):
    """Return an answer: a text, or what msgpack reads, arrays made from their maps."""
    return answer if isinstance(answer, str) else _arrays(msgpack.unpackb(answer))


def _plain(value):
    match value:
        case np.ndarray():
            shape = list(value.shape)
            data = {b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": shape}
            return {b"__ndarray__": True, **data}
        case dict():
            return {key: _plain(item) for key, item in value.items()}
    return value


def _arrays(value):
    match value:
        case {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}:
            return np.frombuffer(data, dtype).reshape(shape)
        case dict():
            return {key: _arrays(item) for key, item in value.items()}
    return value


def image(seed, *stack):
    draws = np.random.default_rng(seed)
    return draws.integers(0, 256, (*stack, 180, 320, 3), dtype=np.uint8)


def droid_request(seed, *stack, state=np.float64, **more):
    """Return what DROID clients send."""
    draws = np.random.default_rng(seed)
    return {
        "observation/exterior_image_0_left": image(seed, *stack),
        "observation/exterior_image_1_left": image(seed + 1, *stack),
        "observation/wrist_image_left": image(seed + 2, *stack),
        "observation/joint_position": draws.normal(size=7).astype(state),
        "observation/gripper_position": draws.uniform(size=1).astype(state),
        "prompt": "put the cup on the plate",
        **more,
    }


def droid_seen(request):
    """Return the observation that a request stands for."""
    return {
        "video.exterior_image_1_left": request["observation/exterior_image_0_left"],
        "video.exterior_image_2_left": request["observation/exterior_image_1_left"],
        "video.wrist_image_left": request["observation/wrist_image_left"],
        "state.joint_position": request["observation/joint_position"].astype(np.float32),
        "state.gripper_position": request["observation/gripper_position"].astype(np.float32),
        "annotation.task": request["prompt"],
    }


def alone(requests):
    """Return the plans of a policy that serves one episode of ``requests`` and nobody else."""
    policy = Remembering()
    policy.reset("only")
    return [policy.infer_batch([droid_seen(r)], ["only"])[0]["actions"] for r in requests]
