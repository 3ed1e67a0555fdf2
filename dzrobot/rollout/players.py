"""The policy of an evaluation: from the name a user writes to something that acts."""

import hashlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment, History
from dzrobot.errors import CheckpointError, ConfigError, UnknownNameError, preview, suggest
from dzrobot.modality.window import Observation
from dzrobot.policies.base import DEFAULT_SESSION, Policy
from dzrobot.rollout.caught import Caught
from dzrobot.rollout.protocol import Noise

BUILT_IN = ("random", "hold", "expert")
EXPERT = "dzrobot.envs.expert:Expert"


@dataclass(frozen=True, kw_only=True)
class PlayerOptions:
    """How a checkpoint's policy acts; None: as the protocol says, else the policy's own default."""

    dit_steps: int | Literal["dynamic"] | None = None
    execute: int | None = None
    history: History | None = None
    cfg_scale: float | None = None
    noise: Noise | None = None
    noise_slots: int | None = None
    seed: int | None = None
    device: str = "cpu"
    dtype: str | None = None
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class Player:
    """Which policy is evaluated, as the user named it."""

    name: str
    """Checkpoint folder or hub id, ``random``, ``hold``, ``expert``, or ``module:factory``."""

    privileged: bool = False
    """Whether the policy lives beside its environment: then ``module:factory`` is called with the
    environment for every episode, else once with the embodiment."""

    embodiment: str | None = None
    """Robot; None: what the environment or the checkpoint says."""

    options: PlayerOptions = field(default_factory=PlayerOptions)

    @property
    def in_worker(self) -> str | None:
        """Return ``module:factory`` of a policy that lives beside its environment, else None."""
        if self.name == "expert":
            return EXPERT
        return self.name if self.privileged else None

    @property
    def looks(self) -> bool:
        """Return whether the policy may read observations; the built-in ones do not."""
        return self.name not in BUILT_IN

    @property
    def is_checkpoint(self) -> bool:
        """Return whether the name is a folder or hub id of weights."""
        # A path may hold a colon (C:\...); a factory may not hold a separator.
        module, colon, _ = self.name.partition(":")
        return self.name not in BUILT_IN and not (colon and module.replace(".", "_").isidentifier())

    @property
    def label(self) -> str:
        """Return a short name that is fit for a folder."""
        last = Path(self.name).name if self.is_checkpoint else self.name
        return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in last)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A policy that can act, and what its actions depend on."""

    policy: Policy | None
    """None for one that lives beside its environment."""

    robot: Embodiment
    card: Mapping[str, Any]


def choose_robot(
    player: Player, of_environment: Embodiment | None, *, exact: bool = False
) -> Embodiment:
    """Return the robot that ``player`` acts as.

    Args:
        player: Who acts.
        of_environment: The environment's robot. None: it does not say.
        exact: Whether a checkpoint of another robot is refused, as an arm does, rather than taken
            at its own word.

    Raises:
        CheckpointError: the checkpoint knows several robots, or none, and the environment decides
            nothing.
        ConfigError: nothing says which robot it is.
    """
    if player.embodiment is not None:
        return load_embodiment(player.embodiment)
    if player.is_checkpoint:
        return _robot_of_checkpoint(player, of_environment, exact=exact)
    if of_environment is None:
        raise ConfigError("nothing says which robot this environment is: give --embodiment")
    return of_environment


def open_player(player: Player, robot: Embodiment) -> Ready:
    """Load the policy.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        UnknownNameError: no such policy.
    """
    if player.in_worker is not None:
        load_factory(player.in_worker)
        return Ready(policy=None, robot=robot, card={"policy": player.name, "privileged": True})
    if player.is_checkpoint:
        return _open_checkpoint(player, robot)
    seed = player.options.seed or 0
    if player.name == "random":
        card = {"policy": "random", "seed": seed}
        return Ready(policy=RandomPolicy(robot.action_dim, seed), robot=robot, card=card)
    if player.name == "hold":
        return Ready(policy=HoldPolicy(robot.action_dim), robot=robot, card={"policy": "hold"})
    return Ready(policy=_made(player.name, robot), robot=robot, card={"policy": player.name})


def load_factory(name: str) -> Callable[[Any], Policy]:
    """Return what ``module:factory`` names.

    Raises:
        UnknownNameError: no such module or attribute.
    """
    module, colon, attribute = name.partition(":")
    if not colon or not all(part.isidentifier() for part in module.split(".")):
        raise UnknownNameError(
            f"unknown policy {name!r}.{suggest(name, BUILT_IN)} Known: {', '.join(BUILT_IN)}, "
            "module:factory, or a checkpoint"
        )
    try:
        names = vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        # What the user's module lacks itself is for the user to read.
        if error.name != module.partition(".")[0] and error.name != module:
            raise
        raise UnknownNameError(f"policy {name!r}: there is no module {module!r}") from error
    if attribute not in names:
        raise UnknownNameError(
            f"policy {name!r}: {module} has no {attribute!r}.{suggest(attribute, names)}"
        )
    factory: Callable[[Any], Policy] = names[attribute]
    if not callable(factory):
        raise UnknownNameError(
            f"policy {name!r} is a {type(factory).__name__}; a factory is called and gives a policy"
        )
    return factory


def _made(name: str, robot: Embodiment) -> Policy:
    factory = load_factory(name)
    with Caught() as caught:
        policy = factory(robot)
    if caught.failure is not None:
        raise ConfigError(
            f"policy {name!r} could not be made for {robot.tag}: {caught.failure.error}"
        )
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"policy {name!r} gave a {type(policy).__name__}; a policy has act and reset"
        )
    return policy


class HoldPolicy:
    """Does nothing: zeros."""

    def __init__(self, action_dim: int) -> None:
        self._action_dim = action_dim

    def act(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> NDArray[np.float32]:
        """Return zeros (A,)."""
        return np.zeros(self._action_dim, np.float32)

    def reset(self, session: str | None = None, *, episode: int | None = None) -> None:
        """Start a new episode, which is like any other."""


class RandomPolicy:
    """Uniform numbers in [-1, 1], a function of seed and episode."""

    def __init__(self, action_dim: int, seed: int) -> None:
        self._action_dim = action_dim
        self._seed = seed
        self._draws: dict[str, np.random.Generator] = {}

    def act(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> NDArray[np.float32]:
        """Return the next numbers (A,) of the session."""
        if session not in self._draws:
            self.reset(session, episode=0)
        return self._draws[session].uniform(-1, 1, self._action_dim).astype(np.float32)

    def reset(self, session: str | None = None, *, episode: int | None = None) -> None:
        """Start the numbers of ``episode``; without a session, forget all."""
        if session is None:
            self._draws.clear()
            return
        text = f"random policy/{self._seed}/{episode or 0}"
        key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        self._draws[session] = np.random.default_rng(key)


def _robot_of_checkpoint(
    player: Player, of_environment: Embodiment | None, *, exact: bool
) -> Embodiment:
    from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
    from dzrobot.policies.dreamzero.policy import embodiment_of

    checkpoint = open_checkpoint(player.name, revision=player.options.revision)
    if of_environment is not None and of_environment.tag in checkpoint.metadata:
        return of_environment
    if exact and of_environment is not None:
        raise CheckpointError(
            f"{player.name} was trained for {preview(checkpoint.metadata)}, and the environment's "
            f"robot is {of_environment.tag}: choose a checkpoint of that robot, or say with "
            "--embodiment which robot it acts as"
        )
    return embodiment_of(checkpoint)


def _check_device(name: str) -> None:
    """Raise ConfigError where there is no such device."""
    import torch

    kind, _, index = name.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if int(index or 0) >= count:
        seen = f"{count} GPUs are" if count else "no GPU is"
        raise ConfigError(f"device {name!r}: {seen} visible to torch; give cpu, or another device")


def _open_checkpoint(player: Player, robot: Embodiment) -> Ready:
    import torch

    from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
    from dzrobot.policies.dreamzero.checkpoints.fingerprint import fingerprint
    from dzrobot.policies.dreamzero.network.skipping import step_plan
    from dzrobot.policies.dreamzero.policy import DreamZeroPolicy, PolicyOptions

    options = player.options
    acting = {
        "dit_steps": options.dit_steps,
        "execute": options.execute,
        "history": options.history,
        "cfg_scale": options.cfg_scale,
        "seed": options.seed,
        "noise": options.noise,
        "noise_slots": options.noise_slots,
    }
    given = {name: value for name, value in acting.items() if value is not None}
    dtypes = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if options.dtype not in dtypes:
        raise ConfigError(f"dtype {options.dtype!r}: choose float32 or bfloat16")
    _check_device(options.device)
    acts = PolicyOptions(**given)  # type: ignore[arg-type]
    # Wrong now, rather than in every episode.
    step_plan(acts.dit_steps, acts.generate.solver_steps)
    policy = DreamZeroPolicy.from_pretrained(
        player.name,
        embodiment=robot,
        device=options.device,
        dtype=dtypes[options.dtype],
        revision=options.revision,
        options=acts,
    )
    weights = open_checkpoint(player.name, revision=options.revision).weights
    card = {
        **policy.card,
        "checkpoint": Path(player.name).name,
        "weights": fingerprint(weights, weights.tensors),
    }
    return Ready(policy=policy, robot=robot, card=card)
