"""Environments of other packages under our keys, and ours under keys that other packages take."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import cv2
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs
from numpy.typing import NDArray

from dzrobot.embodiments.spec import Embodiment, Part, View
from dzrobot.envs.episodes import InitialStates, Instruction
from dzrobot.errors import ConfigError, ModalityError, preview, suggest


@dataclass(frozen=True, kw_only=True)
class ImageConversion:
    """What is done to the images (H, W, 3) uint8 of another environment."""

    resize: bool = False
    """Whether they take the robot's size, by the mean of the pixels that one covers; else they must
    have it."""

    flip: Literal["none", "upside_down", "mirrored", "turned"] = "none"
    """``turned``: both, as half a turn."""

    def apply(self, image: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
        """Return ``image`` with ``size`` (height, width)."""
        rows = -1 if self.flip in ("upside_down", "turned") else 1
        columns = -1 if self.flip in ("mirrored", "turned") else 1
        turned = np.ascontiguousarray(image[::rows, ::columns])
        if not self.resize or turned.shape[:2] == size:
            return turned
        height, width = size
        resized = cv2.resize(turned, (width, height), interpolation=cv2.INTER_AREA)
        return np.asarray(resized, np.uint8)


@dataclass(frozen=True, kw_only=True)
class ActionConversion:
    """How an environment's action is made of a robot's: ``scale * robot[source] + offset``."""

    source: Sequence[int | None]
    """For each number of the environment's action, the place of the robot's; None: the offset
    alone."""

    scale: float | Sequence[float] = 1.0
    """Factor of all numbers, or one of each."""

    offset: float | Sequence[float] = 0.0
    """Added to all numbers, or one of each."""

    unused: Sequence[int] = ()
    """Places of the robot's action that go nowhere."""

    def apply(self, action: NDArray[Any]) -> NDArray[Any]:
        """Return the environment's action for the robot's ``action`` (A,)."""
        taken = [0.0 if place is None else action[place] for place in self.source]
        numbers: NDArray[Any] = np.asarray(taken) * self._scale + self._offset
        return numbers

    def space(self, there: spaces.Box, dim: int) -> spaces.Box:
        """Return the robot's space (``dim``,) of what becomes an action in ``there``.

        Raises:
            ConfigError: it does not fit; all faults at once.
        """
        if faults := [*self._faults(there, dim)]:
            raise ConfigError(f"these actions do not fit: {'; '.join(faults)}")
        low, high = np.full(dim, -np.inf, np.float32), np.full(dim, np.inf, np.float32)
        for index, place in enumerate(self.source):
            if place is not None:
                ends = np.ravel([there.low[index], there.high[index]])
                at = np.sort((ends - self._offset[index]) / self._scale[index])
                low[place], high[place] = max(low[place], at[0]), min(high[place], at[1])
        return spaces.Box(low, high, dtype=np.float32)

    @property
    def _scale(self) -> NDArray[np.float64]:
        return np.broadcast_to(np.asarray(self.scale, np.float64), len(self.source))

    @property
    def _offset(self) -> NDArray[np.float64]:
        return np.broadcast_to(np.asarray(self.offset, np.float64), len(self.source))

    def _faults(self, there: spaces.Box, dim: int) -> Iterator[str]:
        count = len(self.source)
        if there.shape != (count,):
            yield f"source names {count} numbers, the environment takes {there.shape}"
        for name, given in (("scale", self.scale), ("offset", self.offset)):
            if np.ndim(given) and np.shape(given) != (count,):
                yield f"{name} has the shape {np.shape(given)}, source names {count} numbers"
            elif name == "scale" and not np.all(given):
                yield "scale is 0; write None in source for a number that is always the same"
        taken = {place for place in self.source if place is not None}
        if wrong := sorted(place for place in {*taken, *self.unused} if place not in range(dim)):
            yield f"the robot's actions are 0 to {dim - 1}, not {wrong}"
        if lost := sorted(set(range(dim)) - taken - set(self.unused)):
            yield f"the robot's {lost} go nowhere; name them in unused if they are to"


@runtime_checkable
class _OnDevice(Protocol):
    """A tensor of torch, which this package does not import."""

    def cpu(self) -> Any: ...


def as_array(value: Any) -> Any:
    """Return a tensor as an array, and anything else as it is."""
    return np.asarray(value.cpu()) if isinstance(value, _OnDevice) else value


def unbatched(value: Any) -> Any:
    """Return what a vector of one environment gave, without its leading axis.

    Args:
        value: Arrays and tensors (1, ...), lists of one, maps of them; anything else stays.
    """
    if isinstance(value, Mapping):
        return {key: unbatched(inner) for key, inner in value.items()}
    value = as_array(value)
    single = isinstance(value, np.ndarray | list | tuple) and len(np.shape(value)) > 0
    return value[0] if single and len(value) == 1 else value


def unbatched_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return ``space`` without the leading axis of a vector of one environment.

    Raises:
        ConfigError: it holds a box that has none.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: unbatched_space(inner) for key, inner in space.items()})
    if not isinstance(space, spaces.Box):
        return space
    if space.shape[:1] != (1,):
        raise ConfigError(f"batched=True: {space} has no leading axis of one")
    return spaces.Box(space.low[0], space.high[0], dtype=space.dtype.type)  # type: ignore[arg-type]


Layout = Mapping[str, str | Sequence[str]]
"""Key of a view, a state part or the instruction -> key of the other environment, or of a state
part several keys, whose numbers follow one another in this order. ``agent_pos[0:3]`` are some of a
vector's numbers, as in ``start`` and ``dim`` of an embodiment's part of a dataset."""

_AS_IT_IS = ImageConversion()

_KEPT = ("init_states", "libraries", "opengl", "remote")
"""Attributes that are passed on; see :class:`~dzrobot.rollout.environment.EnvironmentFacts`."""

_CUT = re.compile(r"(.+)\[(\d*):(\d*)\]", re.ASCII)


class AdaptedEnv(gym.Env[dict[str, Any], Any]):
    """Another package's environment under the keys of a robot.

    Numbers and images stay as they are unless ``images`` or ``actions`` say otherwise.

    Args:
        env: The environment. Its observations are a :class:`gymnasium.spaces.Dict`; a key within a
            key is written ``robot/joints``.
        embodiment: The robot that it is.
        layout: What of an observation is what.
        task: The instruction. None: ``layout`` names the key that holds it.
        success: Key of ``info`` that says after every step whether the goal holds.
        images: How images are turned and resized.
        actions: How an action of ``env`` is made of the robot's. None: it is the robot's.
        batched: Whether ``env`` is a vector of one environment, as those of ManiSkill are: what it
            gives and takes has a leading axis of one, and may be a tensor.
        starts: Number of initial states, where the seed that ``env`` is reset with chooses one of
            them: 0 to ``starts - 1``. None: it has none, or numbers them itself.

    Raises:
        ConfigError: the layout does not fit the robot or the environment; all faults at once.
    """

    def __init__(  # noqa: PLR0913 (one declaration of what differs)
        self,
        env: gym.Env[Any, Any],
        embodiment: Embodiment,
        layout: Layout,
        *,
        task: str | None = None,
        success: str = "is_success",
        images: ImageConversion = _AS_IT_IS,
        actions: ActionConversion | None = None,
        batched: bool = False,
        starts: int | None = None,
    ) -> None:
        self._env, self._task, self._success = env, task, success
        self._images, self._actions, self._batched = images, actions, batched
        self._starts = None if starts is None else InitialStates(starts)
        self._start: int | None = None
        self._layout = {
            key: (named,) if isinstance(named, str) else tuple(named)
            for key, named in layout.items()
        }
        self.embodiment = embodiment
        """The robot."""

        self.control_hz = embodiment.timing.control_hz
        """Steps per second."""

        self.metadata, self.render_mode = env.metadata, env.render_mode
        numbered = {} if starts is None else {"init_states": starts}
        vars(self).update({**_stated(env), **numbered})
        seen, taken = env.observation_space, env.action_space
        if batched:
            seen, taken = unbatched_space(seen), unbatched_space(taken)
        there = dict(_parts(seen, ""))
        there |= dict(self._cuts(there))
        self.action_space = self._robots(taken)
        faults = [*self._faults(there)]
        if faults:
            raise ConfigError(
                f"{env} does not become {embodiment.tag}: {'; '.join(faults)}. Its keys: "
                f"{', '.join(there) or 'none'}"
            )
        self.observation_space = spaces.Dict(
            {
                **{
                    v.key: spaces.Box(0, 255, (*v.resolution, 3), np.uint8)
                    for v in embodiment.views
                },
                **{
                    p.key: _joined([there[n] for n in self._layout[p.key]], p)
                    for p in embodiment.state
                },
                embodiment.language: Instruction(),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode as the environment does with ``seed`` and ``options``.

        Raises:
            ModalityError: there is no such initial state.
        """
        super().reset(seed=seed)
        if self._starts is not None:
            self._start = seed = self._starts.choose(seed, options)
            options = None
        seen, info = self._env.reset(seed=seed, options=options)
        found = self._observation(seen)
        return found, self._told(info, found)

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Do what the environment does with ``action`` (A,).

        Raises:
            ModalityError: ``info`` does not say whether the goal holds.
        """
        if self._actions is not None:
            action = self._actions.apply(np.asarray(action))
        if self._batched:
            action = np.asarray(action)[None]
        seen, *outcome, info = self._env.step(action)
        if self._batched:
            outcome, info = [unbatched(one) for one in outcome], unbatched(info)
        reward, terminated, truncated = outcome
        if self._success not in info:
            raise ModalityError(
                f"info has no {self._success!r}, only {preview(info, 12)}: name the key that says "
                "whether the goal holds with success="
            )
        found = self._observation(seen)
        told = {**self._told(info, found), "is_success": bool(info[self._success])}
        return found, reward, bool(terminated), bool(truncated), told

    def render(self) -> Any:
        """Draw as the environment does."""
        return self._env.render()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _observation(self, seen: Mapping[str, Any]) -> dict[str, Any]:
        robot = self.embodiment
        found: dict[str, Any] = {}
        if self._batched:
            seen = unbatched(seen)
        for view in robot.views:
            image = as_array(_at(seen, self._layout[view.key][0]))
            found[view.key] = self._images.apply(image, view.resolution)
        for part in robot.state:
            pieces = [np.ravel(as_array(_at(seen, name))) for name in self._layout[part.key]]
            found[part.key] = np.concatenate(pieces).astype(np.float32)
        source = self._layout.get(robot.language)
        found[robot.language] = self._task if source is None else _at(seen, source[0])
        return found

    def _told(self, info: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the environment says itself, and what episodes here need beside it."""
        own = {} if self._starts is None else {"init_state_id": self._start}
        task = found[self.embodiment.language]
        return {"init_state_id": None, "reset_reason": "", **info, **own, "task": task}

    def _robots(self, taken: spaces.Space[Any]) -> spaces.Space[Any]:
        """Return the space of the robot's actions, from that of the environment's.

        Raises:
            ConfigError: ``actions`` does not fit.
        """
        if self._actions is None:
            return taken
        if not isinstance(taken, spaces.Box):
            raise ConfigError(f"{self._env} takes {taken}; only actions of a Box can be converted")
        return self._actions.space(taken, self.embodiment.action_dim)

    def _cuts(self, there: Mapping[str, spaces.Space[Any]]) -> Iterator[tuple[str, spaces.Box]]:
        """Yield the space of each part of a vector that the layout names, under its own name."""
        for name in (name for names in self._layout.values() for name in names):
            key, cut = _cut(name)
            whole = there.get(key)
            if cut is not None and name not in there and isinstance(whole, spaces.Box):
                low, high = np.ravel(whole.low)[cut], np.ravel(whole.high)[cut]
                if len(low) and (cut.stop or 0) <= np.prod(whole.shape):
                    yield name, spaces.Box(low, high, dtype=np.float32)

    def _faults(self, there: Mapping[str, spaces.Space[Any]]) -> Iterator[str]:
        robot = self.embodiment
        if (self._task is None) == (robot.language not in self._layout):
            yield f"give either task or layout[{robot.language!r}]"
        for key in self._layout:
            if key not in robot.observation_keys:
                yield f"{robot.tag} has no {key}.{suggest(key, robot.observation_keys)}"
        for key in (*robot.video_keys, *robot.state_keys):
            if key not in self._layout:
                yield f"layout says nothing of {key}"
        for key, names in self._layout.items():
            yield from self._misfits(key, names, there)
        shape = self.action_space.shape
        if shape != (robot.action_dim,):
            yield (
                f"it takes actions {shape}, the robot has ({robot.action_dim},): say with actions= "
                "how they are made"
            )

    def _misfits(
        self, key: str, names: Sequence[str], there: Mapping[str, spaces.Space[Any]]
    ) -> Iterator[str]:
        """Yield what is wrong with the part ``key``."""
        if lost := [name for name in names if name not in there]:
            whole, cut = _cut(lost[0])
            if cut is not None and whole in there:
                yield f"{key}: {lost[0]} is not a part of {whole}, which is {there[whole]}"
            else:
                yield f"{key}: there is no key {whole!r}.{suggest(whole, there)}"
            return
        found = [there[name] for name in names]
        if key in self.embodiment.video_keys:
            yield from _image_faults(self.embodiment.view(key), found, self._images)
        for part in self.embodiment.state:
            dim = sum(int(np.prod(space.shape or ())) for space in found)
            if part.key == key and part.dim != dim:
                yield f"{key}: {', '.join(names)} are {dim} numbers, the robot's {part.dim}"


def _stated(env: gym.Env[Any, Any]) -> dict[str, Any]:
    """Return what ``env`` says of itself that is true of it under other keys too."""
    inner = env.unwrapped
    return {name: inner.get_wrapper_attr(name) for name in _KEPT if inner.has_wrapper_attr(name)}


def _parts(space: spaces.Space[Any], above: str) -> Iterator[tuple[str, spaces.Space[Any]]]:
    """Yield every part of a space of dicts under its key."""
    if isinstance(space, spaces.Dict):
        for key, inner in space.items():
            yield from _parts(inner, f"{above}/{key}" if above else key)
    elif above:
        yield above, space


def _cut(name: str) -> tuple[str, slice | None]:
    """Return the key that ``name`` begins with, and the part of its vector, if it names one."""
    found = _CUT.fullmatch(name)
    if found is None:
        return name, None
    start, stop = (int(number) if number else None for number in found.groups()[1:])
    return found[1], slice(start, stop)


def _at(seen: Mapping[str, Any], name: str) -> Any:
    key, cut = _cut(name)
    found: Any = seen
    for inner in key.split("/"):
        found = found[inner]
    return found if cut is None else np.ravel(found)[cut]


def _image_faults(
    view: View, found: Sequence[spaces.Space[Any]], images: ImageConversion
) -> Iterator[str]:
    wanted = (*view.resolution, 3)
    for space in found:
        shape = space.shape or ()
        fits = len(shape) == 3 and shape[2] == 3 if images.resize else shape == wanted
        if len(found) > 1 or not fits or space.dtype != np.uint8:
            yield (
                f"{view.key}: one image {wanted} uint8 is wanted, {space} is there; write its size "
                "behind the robot's name, as in libero_sim@128x128, or resize it with "
                "images=ImageConversion(resize=True)"
            )
            return


def _joined(found: Sequence[spaces.Space[Any]], part: Part) -> spaces.Box:
    """Return the space of ``part``; its limits are those of the pieces, where these have any."""
    limits = [
        (space.low, space.high) if isinstance(space, spaces.Box)
        else (np.full(space.shape or (), -np.inf), np.full(space.shape or (), np.inf))
        for space in found
    ]  # fmt: skip
    low, high = (
        np.concatenate([np.ravel(piece) for piece in pieces]).astype(np.float32)
        for pieces in zip(*limits, strict=True)
    )
    return spaces.Box(low, high, (part.dim,), np.float32)


class PlainKeys(gym.ObservationWrapper[dict[str, Any], Any, dict[str, Any]], RecordConstructorArgs):
    """Observations without dots in their keys and without texts, for Stable-Baselines3.

    ``video.image`` becomes ``video_image``, and the instruction is left out: Stable-Baselines3
    names torch modules after the keys and has no policy for texts. Its ``MultiInputPolicy`` takes
    what is left. ``info["task"]`` still holds the instruction.

    Args:
        env: An environment whose observations are a :class:`gymnasium.spaces.Dict`.

    Raises:
        ConfigError: the observations are not such a dict, or two keys become the same one.
    """

    def __init__(self, env: gym.Env[dict[str, Any], Any]) -> None:
        RecordConstructorArgs.__init__(self)
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Dict):
            raise ConfigError(
                f"PlainKeys takes observations in a Dict, this environment has {space}"
            )
        kept = [key for key, part in space.items() if not isinstance(part, spaces.Text)]
        self._names = {key: key.replace(".", "_") for key in kept}
        """New name of every key that is kept."""
        if len(set(self._names.values())) < len(kept):
            raise ConfigError(f"two of the keys {', '.join(kept)} are the same without dots")
        self.observation_space = spaces.Dict({self._names[key]: space[key] for key in kept})

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return what is kept of ``observation``, under the new names."""
        return {name: observation[key] for key, name in self._names.items()}
