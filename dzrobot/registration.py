"""Gymnasium ids, as strings: nothing heavy is imported until an environment is made."""

import gymnasium as gym

_LIBERO = "dzrobot.envs.libero.env:LiberoEnv"
_FRANKA = "dzrobot.envs.franka.make:make_franka"

LIBERO_STEPS = {"spatial": 220, "object": 280, "goal": 300, "10": 520, "90": 400}
"""Steps per episode of the standard protocol, by suite."""


def register_envs() -> None:
    """Register every environment of this package; registering twice is harmless."""
    for suite, steps in LIBERO_STEPS.items():
        _register(f"dzrobot/libero_{suite}-v0", _LIBERO, steps, {"suite": f"libero_{suite}"})
    _register("dzrobot/lift-v0", "dzrobot.envs.libero.lift:LiftEnv", 150, {})
    _register("dzrobot/point-v0", "dzrobot.envs.fakes:PointEnv", 60, {})
    for name in ("Franka-PnP-v0", "dzrobot/Franka-PnP-v0"):
        _register(name, _FRANKA, 240, {}, nondeterministic=True)
    for cell in ("emulated", "fake"):
        name = f"dzrobot/Franka-PnP-{cell}-v0"
        _register(name, _FRANKA, 240, {"workcell": cell}, nondeterministic=True)


def _register(
    name: str,
    entry_point: str,
    steps: int,
    kwargs: dict[str, str],
    *,
    nondeterministic: bool = False,
) -> None:
    if name not in gym.registry:
        gym.register(
            id=name,
            entry_point=entry_point,
            max_episode_steps=steps,
            nondeterministic=nondeterministic,
            kwargs=kwargs,
        )
