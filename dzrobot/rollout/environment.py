"""What an environment states of itself, found once, and making the environment of an episode."""

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, runtime_checkable

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from numpy.typing import NDArray
from pydantic import Strict

import dzrobot  # noqa: F401 (registers the ids)
from dzrobot.declared import Flag
from dzrobot.documents import shorten, validated
from dzrobot.embodiments.action_conventions import HandMotion, check_conventions
from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import (
    ConfigError,
    ErrorCapture,
    ProtocolError,
    UnknownNameError,
    refuse_unknown,
    suggest,
)
from dzrobot.importing import current_folder_importable, load_module
from dzrobot.registration import PLUS_SUITES, PRO_SUITES
from dzrobot.rollout.protocol import EnvironmentKey, EpisodeSpec, Protocol, environment_key

_BLIND = (gym.wrappers.TimeLimit, gym.wrappers.OrderEnforcing)
"""Wrappers of Gymnasium that hand every observation on without a look at it."""


@runtime_checkable
class FrameSkippingEnv(typing.Protocol):
    """An environment that can leave out the images of an observation, and the time they take."""

    def omit_frames(self) -> None:
        """Leave all ``video.*`` out of the observation of the next step, and of no other."""
        ...


@runtime_checkable
class HoldingEnv(typing.Protocol):
    """An environment whose robot is held when its policy fails."""

    def policy_failed(self, ended: str, reason: str) -> dict[str, Any]:
        """Hold the robot, end the episode, and return the last info.

        Args:
            ended: `INVALID_ACTION` or `POLICY_ERROR`.
            reason: What the policy did.
        """
        ...


@runtime_checkable
class AttendedArm(typing.Protocol):
    """An environment that drives an arm, real or emulated, which people stand beside."""

    is_real: bool
    """Whether it is reached at an address; one that is emulated here is not."""

    judged_by_operator: bool
    """Whether a person says if an episode succeeded."""

    def attend(self, operator: Any, *, unattended: bool = False) -> None:
        """Say who looks after the arm, before the first reset.

        Raises:
            ConfigError: the arm is a real one, and no person does.
        """
        ...

    def rest(self) -> None:
        """Stop the arm at once, from any thread."""
        ...

    def operator_stop(self) -> Exception:
        """Stop the arm for a person, from any thread; nothing moves until one has looked.

        Returns:
            What says so, and what ends it.
        """
        ...

    def images(self) -> Mapping[str, NDArray[np.uint8]]:
        """Return the newest image (H, W, 3) of every camera."""
        ...

    def reported(self, info: dict[str, Any], outcome: Any) -> dict[str, Any]:
        """Return ``info`` with a person's verdict."""
        ...


@dataclass(frozen=True, kw_only=True)
class EnvironmentFacts:
    """What an environment states in attributes of ``env.unwrapped``; all may be absent."""

    embodiment: Embodiment | None = None
    """Robot whose keys, sizes and actions it has."""

    control_hz: float | None = None
    """Steps per second; None: the embodiment's."""

    init_states: int | None = None
    """Initial states of its task, numbered from 0; None: it has no numbers."""

    task: str | None = None
    """Instruction, where it is known before the first reset."""

    hand: HandMotion | None = None
    """Which numbers of state and action move its hand, and what they mean."""

    hand_position: slice | None = None
    """Where in the concatenated state the position of the hand is, in meters."""

    prompt: str | None = None
    """Where its instructions come from, where there is more than one source."""

    opengl: str | None = None
    """Backend that it draws with, where the images may depend on it."""

    moves_an_arm: bool = False
    """Whether it drives an arm, real or emulated."""

    is_real: bool = False
    """Whether metal moves."""

    omits_frames: bool = False
    """Whether it can leave out the images of an observation."""

    holds: bool = False
    """Whether its robot is held when its policy fails."""

    draws: bool = False
    """Whether it draws images for people where it is made for that (``render_mode``)."""

    remote: Mapping[str, Any] | None = None
    """What a result depends on of an environment that a server makes; None: it runs here."""

    workcell: Mapping[str, Any] | None = None
    """What a result depends on of the arm's workcell; None: no arm."""

    perturbations: tuple[str, ...] = ()
    """Axes along which its scene can be made harder."""

    scene_objects: tuple[str, ...] = ()
    """Names of the objects in its scene; empty: it does not say."""

    libraries: tuple[str, ...] = ()
    """Distributions whose versions a result depends on, beyond those of every evaluation."""

    @property
    def robot(self) -> Embodiment | None:
        """Robot that policies for it are made for: the built-in description, if its tag has one.

        A workcell may depart from that, in the axes of its actions for example; see
        :mod:`dzrobot.embodiments.action_conventions`. What its steps are measured from is its own
        choice: a checkpoint says what it was trained with.
        """
        own = self.embodiment
        if own is None:
            return None
        return replace(EMBODIMENTS.get(own.tag, own), action_anchor=own.action_anchor)


def facts_of(env: gym.Env[Any, Any]) -> EnvironmentFacts:
    """Return what ``env`` states; it need not have been reset.

    Raises:
        ConfigError: its embodiment is something else.
    """
    inner = env.unwrapped
    # Attributes of foreign classes, by the names that docs/extend/environment.md promises.
    stated = {
        field.name: value
        for field in fields(EnvironmentFacts)
        if (value := getattr(inner, field.name, None)) is not None
    }
    own, hand = stated.get("embodiment"), stated.get("hand")
    if own is not None and not isinstance(own, Embodiment):
        raise ConfigError(
            f"{type(inner).__name__}.embodiment is a {type(own).__name__}; give an Embodiment, "
            "such as load_embodiment('libero_sim')"
        )
    if own is not None:
        stated.setdefault("control_hz", own.timing.control_hz)
    # `hand` is a common name: environments keep the state of a gripper, for example, under it.
    if isinstance(hand, HandMotion):
        stated["hand_position"] = hand.position
    else:
        stated.pop("hand", None)
    is_arm = isinstance(inner, AttendedArm)
    stated |= {"moves_an_arm": is_arm, "is_real": is_arm and stated.get("is_real", False)}
    stated["omits_frames"] = isinstance(inner, FrameSkippingEnv)
    stated["holds"] = isinstance(inner, HoldingEnv)
    stated["draws"] = draws(env)
    return EnvironmentFacts(**stated)


def draws(env: gym.Env[Any, Any]) -> bool:
    """Return whether ``env`` draws images for people: its ``render_modes`` say so, and it can."""
    modes = (env.metadata or {}).get("render_modes") or ()
    return "rgb_array" in modes and type(env.unwrapped).render is not gym.Env.render


def omitter(env: gym.Env[Any, Any], facts: EnvironmentFacts) -> Callable[[], None] | None:
    """Return what makes ``env`` leave out the images of its next step; None where it cannot.

    A wrapper may need every image, as one does that records or stacks them. So all of them have to
    be known not to: those that ``gym.make`` adds, and those with a true attribute
    ``takes_missing_frames``.

    Args:
        env: The environment, wrapped or not; what it says of itself is on ``env.unwrapped``.
        facts: What it states.
    """
    inner: Any = env.unwrapped
    if not facts.omits_frames:
        return None
    while isinstance(env, gym.Wrapper):
        # Of the class: an instance would answer for what it wraps.
        if not isinstance(env, _BLIND) and not getattr(type(env), "takes_missing_frames", False):
            return None
        env = env.env
    omit: Callable[[], None] = inner.omit_frames
    return omit


FIRST_USE = (
    "simulators start; their first use in an installation compiles their code, about a minute"
)
"""Why the first episode of a run takes long."""

IMAGE_ARGUMENTS = ("resolution",)
"""Arguments of environments that decide their images and nothing else."""


@dataclass(frozen=True, kw_only=True)
class OperatorOptions:
    """How the operator of an arm is involved in a run."""

    title: str = "dzrobot"
    unattended: Annotated[bool, Flag(
        "arm: move without asking a person, and continue after a lost frame or a slow policy; "
        "every other stop ends the run all the same",
    )] = False  # fmt: skip
    """Whether the arm moves without asking first, and a lost frame or a slow policy ends no run."""

    full_speed: Annotated[bool, Flag(
        "arm: let a policy or a replay drive a real arm at full speed; an evaluation without it is "
        "at the workcell's slow_pace",
    )] = False  # fmt: skip

    preview: Annotated[int | None, Flag(
        "arm: show the cameras on a page of this machine; 0 picks a free port",
        metavar="PORT", least=0, most=65535,
    )] = None  # fmt: skip
    """Port of the page with the images; None: no page."""

    log: Annotated[Path | None, Flag(
        "arm: where the operator's log goes (default: beside the output)", metavar="FILE",
    )] = None  # fmt: skip
    """File of events with their times. None: none is written."""

    asks_reason: bool = False
    """Whether the operator is asked why an episode failed."""

    asks_after_stop: bool = False
    """Whether the operator is asked if an episode counts that they stopped."""


def at_full_speed(arguments: Mapping[str, Any], facts: EnvironmentFacts) -> dict[str, Any]:
    """Return ``arguments`` of an environment that may drive a real arm at full speed."""
    return {**arguments, "full_speed": True} if facts.is_real else dict(arguments)


@contextmanager
def looking_at(
    env: str, case: EpisodeSpec | None, arguments: Mapping[str, Any]
) -> Iterator[gym.Env[Any, Any]]:
    """Yield ``env`` to be looked at: it is made and closed, not reset.

    Args:
        env: Its name.
        case: Whose own arguments it is made with, if any.
        arguments: Further arguments; wrong ones are found here.

    Raises:
        UnknownNameError: no such environment, or it takes no such argument.
        ConfigError: it cannot be made.
    """
    check_arguments(env, arguments)
    own = {} if case is None else case.arguments
    with ErrorCapture() as caught:
        made = made_environment(env, {**own, **arguments})
    if caught.failure is not None:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        having = f" with {shorten(given, 200)}" if given else ""
        raise ConfigError(f"{env} could not be made{having}: {caught.failure.error}")
    with closing(made):
        yield made


def look_at(
    env: str,
    case: EpisodeSpec | None,
    arguments: Mapping[str, Any],
    check: Callable[[gym.Env[Any, Any]], None] = lambda _: None,
) -> EnvironmentFacts:
    """Return what ``env`` states; see :func:`looking_at`.

    Args:
        env: Its name.
        case: Whose own arguments it is made with, if any.
        arguments: Further arguments.
        check: Called with the environment.
    """
    with looking_at(env, case, arguments) as made:
        check(made)
        return facts_of(made)


def bounds_of(env: gym.Env[Any, Any]) -> gym.spaces.Box:
    """Return the action space of ``env``.

    Raises:
        ConfigError: its actions are not vectors of numbers.
    """
    if not isinstance(env.action_space, gym.spaces.Box):
        raise ConfigError(f"actions of {env} are {env.action_space}; a robot's are a Box")
    return env.action_space


def needed_robot(env: str, facts: EnvironmentFacts) -> Embodiment:
    """Return the robot of ``env`` as it is there: what recordings of it hold.

    Raises:
        ConfigError: it does not say which.
    """
    if facts.embodiment is None:
        raise ConfigError(
            f"{env} does not say which robot it is: set `self.embodiment` in its class, to an "
            "Embodiment whose keys its observations have"
        )
    return facts.embodiment


def check_fits(
    name: str,
    env: gym.Env[Any, Any],
    robot: Embodiment,
    *,
    needed: Sequence[str],
    sized: bool = True,
) -> None:
    """Check that ``env`` takes what ``robot`` does and shows what is ``needed``.

    Args:
        name: Of the environment, for the message.
        env: The environment.
        robot: Says how many numbers an action has, and in which axes.
        needed: Observation keys that are read.
        sized: Whether images must have the robot's size.

    Raises:
        ProtocolError: keys or actions differ.
        ConfigError: the axes or the rate of the actions do.
    """
    misfits = list(_misfits(env, robot, needed, sized=sized))
    if misfits:
        raise ProtocolError(
            f"{name} does not fit {robot.tag}: {'; '.join(misfits)}. Choose a checkpoint made "
            "for this environment's robot, name the right robot with --embodiment, or map its keys "
            "and sizes with dzrobot.envs.AdaptedEnv (docs/extend/environment.md)."
        )
    if needed:
        stated = facts_of(env).embodiment
        if stated is not None:
            check_conventions(stated, robot)


def _misfits(
    env: gym.Env[Any, Any], robot: Embodiment, needed: Sequence[str], *, sized: bool
) -> Iterator[str]:
    space, states = env.observation_space, {part.key: part.dim for part in robot.state}
    images = {view.key: (*view.resolution, 3) for view in robot.views if sized}
    spaces = space.spaces if isinstance(space, gym.spaces.Dict) else {}
    for key in needed:
        if key not in spaces:
            yield f"it delivers no {key}"
        elif key in states and spaces[key].shape != (states[key],):
            yield f"its {key} has the shape {spaces[key].shape}, the robot's ({states[key]},)"
        elif key in images and spaces[key].shape != images[key]:
            yield f"its {key} has the shape {spaces[key].shape}, the robot's {images[key]}" + (
                _resized(env, *images[key][:2])
            )
    if env.action_space.shape != (robot.action_dim,):
        yield f"it takes actions {env.action_space.shape}, the robot has ({robot.action_dim},)"


def _resized(env: gym.Env[Any, Any], height: int, width: int) -> str:
    """Return what gives ``env`` images of this size, if an argument of it does; else nothing."""
    known = accepted(env.spec.id)[0] if env.spec is not None else {}
    if "resolution" not in known or height != width:
        return ""
    return f": make it with resolution={height} (--env-arg resolution={height})"


def environment_arguments(
    env: str, protocol: Protocol, robot: Embodiment, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments of ``env`` beyond the task.

    The protocol's, the robot's image size and anchor of actions where ``env`` can choose them, and
    ``given``, which win.

    Raises:
        UnknownNameError: no such environment, or it takes no such argument.
        ConfigError: the protocol asks for what the environment cannot do.
    """
    check_arguments(env, given)
    arguments = protocol_arguments(env, protocol)
    return {**arguments, **sized(env, robot), **anchored(env, robot), **given}


def sized(env: str, robot: Embodiment) -> dict[str, Any]:
    """Return the argument that gives ``env`` images of the robot's size; empty where none does."""
    (height, width), *others = {view.resolution for view in robot.views} or {(0, 1)}
    chosen = "resolution" in accepted(env)[0] and not others and height == width
    return {"resolution": height} if chosen else {}


def protocol_arguments(env: str, protocol: Protocol) -> dict[str, Any]:
    """Return the keyword arguments of ``env`` that a protocol fixes.

    Raises:
        UnknownNameError: no such environment.
        ConfigError: the protocol asks for what the environment cannot do.
    """
    wanted: dict[str, Any] = {}
    if protocol.settle_steps is not None:
        wanted["settle_steps"] = protocol.settle_steps
    if not protocol.stop_at_success:
        wanted["stop_on_success"] = False
    for name in wanted:
        if name not in accepted(env)[0]:
            raise ConfigError(
                f"protocol {protocol.name} sets {name}, which {env} does not have; "
                "use --protocol custom"
            )
    return wanted


def accepts_same(env: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether ``env`` is made alike of two sets of arguments, its defaults considered."""
    defaults = {
        parameter.name: parameter.default
        for parameter in inspect.signature(_creator(env)).parameters.values()
    }
    return bool({**defaults, **one} == {**defaults, **other})


def anchored(env: str, robot: Embodiment) -> dict[str, Any]:
    """Return the argument that lets ``env`` measure actions from what ``robot`` was trained with.

    Empty where it cannot choose, and where it is not known.
    """
    chosen = robot.action_anchor is not None and "action_anchor" in accepted(env)[0]
    return {"action_anchor": robot.action_anchor} if chosen else {}


def check_arguments(env: str, given: Mapping[str, Any]) -> None:
    """Check that ``env`` takes the keyword arguments ``given``.

    Raises:
        UnknownNameError: no such environment, or it takes no such argument.
        ConfigError: one has the wrong type.
    """
    known, open_ended = accepted(env)
    if not open_ended:
        refuse_unknown(env, given, known)
    for name, value in given.items():
        if known.get(name) is not None:
            validated(value, known[name], f"{env}: {name}", ConfigError)


@cache
def accepted(env: str) -> tuple[Mapping[str, Any], bool]:
    """Return the keyword arguments of ``env`` with their types, and whether it takes others too.

    A type is None where the environment does not say it.

    Raises:
        UnknownNameError: no such environment.
    """
    parameters = inspect.signature(_creator(env)).parameters.values()
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {
        parameter.name: _strict(parameter.annotation)
        for parameter in parameters
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    return named, open_ended


def environment_spec(env: str) -> EnvSpec:
    """Return how ``env`` is registered; the module of ``module:id`` is imported and registers it.

    Of ``module:function``, the function makes the environment.

    Raises:
        UnknownNameError: no such environment or module.
    """
    module, colon, name = env.rpartition(":")
    if colon:
        loaded = load_module(module, f"environment {shorten(env)}")
        if callable(maker := vars(loaded).get(name)):
            name = f"{module.replace('.', '-')}/{name}"
            if name not in gym.registry:
                gym.register(name, maker)
    try:
        return gym.spec(name)
    except gym.error.Error as error:
        raise _unknown(env) from error


def modules_of(env: str) -> tuple[str, ...]:
    """Return the names of the modules that register and make ``env``."""
    entry = environment_spec(env).entry_point
    maker = entry.partition(":")[0] if isinstance(entry, str) else entry.__module__
    return maker, env.rpartition(":")[0]


def _creator(env: str) -> Callable[..., Any]:
    entry = environment_spec(env).entry_point
    if callable(entry):
        return entry
    try:
        with current_folder_importable():
            return load_env_creator(entry)  # type: ignore[arg-type]
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise _unknown(env) from error


def _unknown(env: str) -> UnknownNameError:
    listed = {suite.env for suite in (*PRO_SUITES, *PLUS_SUITES)}
    ours = [name for name in gym.registry if name.startswith("dzrobot/") and name not in listed]
    return UnknownNameError(
        f"unknown environment {shorten(env)}.{suggest(env, gym.registry)} Of this package: "
        f"{', '.join(ours)}, and the suites that `dzrobot libero list` shows; another package's is "
        "named 'module:id'."
    )


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


def make_environment(case: EpisodeSpec, arguments: Mapping[str, Any], *, render: bool) -> Any:
    """Return the environment of ``case``; ``render``: it draws, and is asked for that."""
    limits: dict[str, Any] = {} if case.max_steps is None else {"max_episode_steps": case.max_steps}
    return made_environment(case.env, {**limits, **case.arguments, **arguments}, render=render)


def made_environment(env: str, arguments: Mapping[str, Any], *, render: bool = False) -> Any:
    """Return the environment ``env``.

    Args:
        env: Its name.
        arguments: Those of ``gym.make``.
        render: Whether it is asked for images for people, which only one may be that
            :func:`draws` them: others refuse to be made so.
    """
    name = environment_spec(env).id
    known, open_ended = accepted(env)
    if render and ("render_mode" in known or open_ended):
        arguments = {"render_mode": "rgb_array", **arguments}
    # The passive checker does not survive a step that raises, and costs a look at every space.
    with current_folder_importable():
        return gym.make(name, disable_env_checker=True, **arguments)


def step_limit(env: str) -> int | None:
    """Return the steps per episode that ``env`` is registered with, None for no limit."""
    return environment_spec(env).max_episode_steps


OnOpen = Callable[[Any], Any]
"""Called with every environment that this process opens; returns what is used in its place."""


def same_environment(env: Any) -> Any:
    """Return ``env``."""
    return env


class KeptEnvironment:
    """The environment of one process: the last one stays open for the next episode.

    Args:
        opened: Called with every environment that is opened, before its first reset.
    """

    def __init__(self, opened: OnOpen = same_environment) -> None:
        self._opened = opened
        self._key: EnvironmentKey | None = None
        self._env: Any = None

    def of(self, case: EpisodeSpec, arguments: Mapping[str, Any], *, render: bool) -> Any:
        """Return the environment of ``case``, opened if need be.

        Args:
            case: The episode.
            arguments: Of the environment, beyond the task.
            render: Whether it draws images for people.
        """
        key = environment_key(case)
        if key != self._key:
            self.close()
            self._env = self._opened(make_environment(case, arguments, render=render))
            self._key = key
        return self._env

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()
        self._env, self._key = None, None
