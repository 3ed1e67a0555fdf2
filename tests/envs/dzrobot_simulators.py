"""The simulators of ``foreign_simulators`` under the keys of robots: 7, 14 and 2 numbers."""

import gymnasium as gym

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment, Part, View
from dzrobot.embodiments.templates import HUMAN
from dzrobot.embodiments.timing import Timing
from dzrobot.envs import AdaptedEnv, ImageConversion


def one_camera(tag, dim, size, hz):
    return Embodiment(
        tag=tag,
        views=(View(key="video.top", feature="observation.images.top", resolution=size),),
        state=(Part(key="state.joints", feature="observation.state", dim=dim),),
        action=(Part(key="action.joints", feature="action", dim=dim),),
        tiles=(("video.top",),),
        prompt=HUMAN,
        timing=Timing(control_hz=hz, action_horizon=16),
    )


ROBOTS = {
    "robosuite": load_embodiment("libero_sim@84x84"),
    "aloha": one_camera("aloha", 14, (240, 320), 50),
    "pusht": one_camera("pusht", 2, (96, 96), 10),
}


def _remote(server):
    return gym.make("dzrobot/remote-v0", server=server, render_mode="rgb_array")


def robosuite(server, render_mode=None):
    layout = {
        "video.image": "front",
        "video.wrist_image": "hand",
        "state.state": ("place", "turn[0:3]", "fingers"),
    }
    robot = ROBOTS["robosuite"]
    return AdaptedEnv(_remote(server), robot, layout, task="lift the cube", success="lifted")


def aloha(server, render_mode=None):
    layout = {"video.top": "pixels/top", "state.joints": "agent_pos"}
    return AdaptedEnv(
        _remote(server), ROBOTS["aloha"], layout, task="hand the cube over",
        success="is_success", images=ImageConversion(resize=True), starts=50,
    )  # fmt: skip


def pusht(server, render_mode=None):
    layout = {"video.top": "pixels", "state.joints": "agent_pos"}
    return AdaptedEnv(
        _remote(server), ROBOTS["pusht"], layout, task="push the T onto its place",
        success="is_success", starts=50,
    )  # fmt: skip
