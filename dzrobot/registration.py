"""Gymnasium ids and suites, as strings: nothing heavy is imported until an environment is made."""

from dataclasses import dataclass

import gymnasium as gym

_LIBERO = "dzrobot.envs.libero.libero_env:LiberoEnv"
_FRANKA = "dzrobot.envs.franka.make:make_franka"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Tasks of one kind, each with its own initial states."""

    name: str
    env: str
    """Gymnasium id; its environment takes ``task_id``."""

    tasks: int
    init_states: int
    """Starts of each task, numbered from 0."""

    max_steps: int
    """Steps per episode that the environment is registered with."""

    assets: str | None = None
    """``module:function`` that takes the suite's name and returns which of its files are the
    official ones; None: it has no files."""

    describe: str | None = None
    """``module:function`` that takes the suite's name and the tasks that are to be run, and returns
    what a card says of them beyond; it raises where one of them cannot be run. None: nothing."""


def _libero(name: str, tasks: int, max_steps: int, init_states: int = 50) -> Suite:
    return Suite(
        name=f"libero_{name}",
        env=f"dzrobot/libero_{name}-v0",
        tasks=tasks,
        init_states=init_states,
        max_steps=max_steps,
        assets="dzrobot.envs.libero.assets:report",
        describe="dzrobot.envs.libero.listing:describe",
    )


LIBERO_SUITES = (
    _libero("spatial", 10, 220),
    _libero("object", 10, 280),
    _libero("goal", 10, 300),
    _libero("10", 10, 520),
    _libero("90", 90, 400),
)
"""With the step limits of the standard protocol."""

_STEPS = {suite.name.removeprefix("libero_"): suite.max_steps for suite in LIBERO_SUITES}
_WITH_50_STARTS = {
    "mug": ("spatial", "object", "goal", "10"),
    "red_stick": ("spatial", "object", "goal", "10"),
    "yellow_book": ("spatial", "object", "goal"),
    "blue_stick": ("object",),
    "red_box": ("object",),
    "trigger": ("object",),
    "trigger_new": ("object",),
}
_WITH_10_STARTS = {
    "blue_stick": ("spatial", "goal", "10"),
    "diffpos_stick": ("spatial", "object", "goal", "10"),
    "green_mug": ("spatial", "goal"),
    "milk": ("spatial", "goal", "10"),
    "red_box": ("spatial", "goal", "10"),
    "rotated_stick": ("goal",),
}

PRO_SUITES = (
    *(
        _libero(f"{base}_{axis}", 10, _STEPS[base])
        for base in ("spatial", "object", "goal", "10")
        for axis in ("swap", "object", "lan", "task")
    ),
    *(
        _libero(f"{base}_with_{thing}", 10, _STEPS[base], starts)
        for starts, things in ((50, _WITH_50_STARTS), (10, _WITH_10_STARTS))
        for thing, bases in things.items()
        for base in bases
    ),
)
"""Suites of LIBERO-PRO, with the step limits of the suites that they are made from."""

PLUS_SUITES = tuple(
    _libero(f"plus_{base}", tasks, _STEPS[base], 1)
    for base, tasks in (("spatial", 2402), ("object", 2518), ("goal", 2591), ("10", 2519))
)
"""Suites of LIBERO-Plus, whose tasks are run once each."""

SUITES: dict[str, Suite] = {}
"""What ``dzrobot eval --suite`` knows, by name."""


def register_suite(suite: Suite) -> None:
    """Let evaluations name ``suite``; registering twice is harmless."""
    SUITES[suite.name] = suite


def register_envs() -> None:
    """Register every environment of this package; registering twice is harmless."""
    for suite in (*LIBERO_SUITES, *PRO_SUITES, *PLUS_SUITES):
        register_suite(suite)
        _register(suite.env, _LIBERO, suite.max_steps, {"suite": suite.name})
    _register("dzrobot/lift-v0", "dzrobot.envs.libero.lift:LiftEnv", 150, {})
    _register("dzrobot/droid-lift-v0", "dzrobot.envs.libero.lift:DroidLiftEnv", 150, {})
    _register("dzrobot/point-v0", "dzrobot.envs.fakes:PointEnv", 60, {})
    _register("dzrobot/remote-v0", "dzrobot.envs.remote.remote_env:RemoteEnv", None, {})
    # 24 s each.
    _register_arm("Franka-PnP", 240, {})
    _register_arm("Franka-DROID", 360, {"embodiment": "oxe_droid"})


def _register_arm(name: str, steps: int, kwargs: dict[str, str]) -> None:
    """Register an arm for workcells that are given, and for those that are built in."""
    for given in (f"{name}-v0", f"dzrobot/{name}-v0"):
        _register(given, _FRANKA, steps, kwargs, nondeterministic=True)
    for workcell in ("emulated", "fake"):
        there = {**kwargs, "workcell": workcell}
        _register(f"dzrobot/{name}-{workcell}-v0", _FRANKA, steps, there, nondeterministic=True)


def _register(
    name: str,
    entry_point: str,
    steps: int | None,
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
