"""Making the environment of a case, with what its robot and its protocol ask for."""

import inspect
import typing
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator
from pydantic import Strict

import dzrobot  # noqa: F401 (registers the ids)
from dzrobot.documents import shorten, validated
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.envs.libero.rendering import choose_backend
from dzrobot.errors import ConfigError, UnknownNameError, suggest
from dzrobot.rollout.protocol import Case, Protocol

ROBOTS = {
    "libero": "libero_sim",
    "lift": "libero_sim",
    "point": "libero_sim",
    "Franka": "franka_pnp",
}
"""Beginning of an environment's name -> embodiment whose keys it delivers."""


def environment_robot(env: str) -> Embodiment | None:
    """Return the embodiment of an environment of this package, None for any other.

    Raises:
        UnknownNameError: no such environment.
    """
    accepted(env)
    name = env.rpartition("/")[2]
    tags = [tag for prefix, tag in ROBOTS.items() if name.startswith(prefix)]
    ours = env in gym.registry and tags
    return load_embodiment(tags[0]) if ours else None


def environment_arguments(
    env: str, protocol: Protocol, robot: Embodiment, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments of ``env`` beyond the task.

    The protocol's, the robot's picture size where ``env`` can choose one, and ``given``, which
    win.

    Raises:
        UnknownNameError: no such environment, or it takes no such argument.
        ConfigError: the protocol asks for what the environment cannot do.
    """
    known, open_ended = accepted(env)
    for name, value in given.items():
        if name not in known and not open_ended:
            raise UnknownNameError(
                f"{env} takes no argument {name!r}.{suggest(name, known)} Known: "
                f"{', '.join(known) or 'none'}."
            )
        if known.get(name) is not None:
            validated(value, known[name], f"{env}: {name}", ConfigError)
    arguments: dict[str, Any] = {}
    sizes = {view.resolution for view in robot.views}
    if "resolution" in known and len(sizes) == 1:
        height, width = sizes.pop()
        if height == width:
            arguments["resolution"] = height
    if protocol.settle_steps is not None:
        _require("settle_steps", known, env, protocol)
        arguments["settle_steps"] = protocol.settle_steps
    if not protocol.stop_at_success:
        _require("stop_on_success", known, env, protocol)
        arguments["stop_on_success"] = False
    return {**arguments, **given}


@cache
def accepted(env: str) -> tuple[Mapping[str, Any], bool]:
    """Return the keyword arguments of ``env`` with their types, and whether it takes others too.

    A type is None where the environment does not say it.

    Raises:
        UnknownNameError: no such environment.
    """
    try:
        creator = load_env_creator(gym.spec(env).entry_point)  # type: ignore[arg-type]
    except (gym.error.Error, ModuleNotFoundError, ValueError) as error:
        ours = [name for name in gym.registry if name.startswith("dzrobot/")]
        raise UnknownNameError(
            f"unknown environment {shorten(env)}.{suggest(env, gym.registry)} Of this package: "
            f"{', '.join(ours)}; another package's is named 'module:id'."
        ) from error
    parameters = inspect.signature(creator).parameters.values()
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {
        parameter.name: _strict(parameter.annotation)
        for parameter in parameters
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    return named, open_ended


def _strict(annotation: Any) -> Any:
    """Return the type for a check, None for one that is left to the environment."""
    plain = (bool, int, float, str)
    kinds = typing.get_args(annotation) or (annotation,)
    if typing.get_origin(annotation) is Literal:
        return annotation
    # A text that stands for a type, or a class of the environment's own, cannot be checked here.
    if not all(kind in (*plain, type(None)) for kind in kinds):
        return None
    return Annotated[annotation, Strict()]


def make_environment(case: Case, arguments: Mapping[str, Any], *, render: bool) -> Any:
    """Return the environment of ``case``; ``render``: it can be asked for pictures for people."""
    limits: dict[str, Any] = {} if case.max_steps is None else {"max_episode_steps": case.max_steps}
    mode: dict[str, Any] = {"render_mode": "rgb_array"} if render else {}
    # The passive checker does not survive a step that raises, and costs a look at every space.
    return gym.make(
        case.env, disable_env_checker=True, **limits, **mode, **case.arguments, **arguments
    )


def step_limit(env: str) -> int | None:
    """Return the steps per episode that ``env`` is registered with, None for no limit."""
    return gym.spec(env).max_episode_steps


def simulator(env: str) -> str | None:
    """Return the OpenGL backend of an environment that draws with one of our simulators."""
    entry = gym.spec(env).entry_point
    if not (isinstance(entry, str) and entry.startswith("dzrobot.envs.libero")):
        return None
    return choose_backend()


def _require(name: str, known: Mapping[str, Any], env: str, protocol: Protocol) -> None:
    if name not in known:
        raise ConfigError(
            f"protocol {protocol.name} sets {name}, which {env} does not have; "
            "use --protocol custom"
        )
