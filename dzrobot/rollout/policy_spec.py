"""The policy of an evaluation: from the name a user writes to something that acts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.action_conventions import check_holds, hold_command
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import (
    CheckpointError,
    ConfigError,
    ErrorCapture,
    UnknownNameError,
    preview,
    suggest,
)
from dzrobot.importing import is_reference, load_reference
from dzrobot.modality.window import Observation
from dzrobot.policies.base import DEFAULT_SESSION, Action, Policy, When
from dzrobot.policies.dreamzero.loose import LooseWeights
from dzrobot.policies.dreamzero.options import (
    ActingOptions,
    PolicyOptions,
    Quantization,
    check_device,
)
from dzrobot.policies.wrapping import adapted
from dzrobot.rng import numpy_generator
from dzrobot.rollout.episode import Actor, PolicyActor

if TYPE_CHECKING:
    from dzrobot.policies.dreamzero.checkpoints.directory import Checkpoint

REMOTE = "remote"
LEROBOT = "lerobot:"
"""Prefix of names of LeRobot's policies."""

BUNDLED = ""
"""Name of the policy that comes with the package."""

BUILT_IN = ("random", "hold", "expert", REMOTE)
EXPERT = "dzrobot.envs.expert:expert_for"


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """Which policy is evaluated, how it acts and where its network runs."""

    name: str = BUNDLED
    """Checkpoint folder or hub id, ``random``, ``hold``, ``expert``, ``remote``, or
    ``module:factory``, or LeRobot's as ``lerobot:ID_OR_FOLDER``; ``BUNDLED`` stands for the
    checkpoint that comes with the package, which an evaluation finds by its environments."""

    server: str | None = None
    """Address of the server of ``remote``."""

    api_key_file: Path | None = None
    """File with the key that the server requires. None: the variable ``DZROBOT_API_KEY``, if it is
    set."""

    privileged: bool = False
    """Whether the policy lives beside its environment: then ``module:factory`` is called with the
    environment for every episode, else once with the embodiment."""

    embodiment: str | None = None
    """Robot; None: what the environment or the checkpoint says."""

    options: PolicyOptions = field(default_factory=PolicyOptions)
    """How a checkpoint's policy acts; the seed is also that of ``random``."""

    device: str = "cpu"
    """Where a checkpoint's network runs: ``cpu``, ``cuda``, ``cuda:1``."""

    cfg_device: str | None = None
    """Where a copy of its transformer runs the negative prompt; None: both run on ``device``."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """None: float32 on a processor, else bfloat16."""

    quantize: Quantization | None = None
    """8-bit weights of a checkpoint's transformer; None: as they were trained."""

    memory: int | None = None
    """Bytes of the device that may be used; None: all weights lie there."""

    revision: str | None = None
    """Branch, tag or commit of a checkpoint on the Hugging Face hub."""

    base: str | None = None
    """What the checkpoint was trained on, where it holds only what was trained."""

    config_from: str | LooseWeights | None = None
    """What a checkpoint's weights are, where no config.json or no statistics lie beside them."""

    lerobot_python: Path | None = None
    """Python of an environment that has LeRobot, for ``lerobot:ID``; None: this one has it."""

    server_actions: str | None = None
    """What the actions of a server mean that does not say so, such as ``joint_position``."""

    server_images: Literal["raw", "jpeg", "zstd"] = "raw"
    """How images are sent to a server of dzrobot's."""

    @property
    def in_worker(self) -> str | None:
        """Return ``module:factory`` of a policy that lives beside its environment, else None."""
        if self.name == "expert":
            return EXPERT
        return self.name if self.privileged else None

    @property
    def looks(self) -> bool:
        """Return whether the policy may read observations; the built-in ones do not."""
        return self.name == REMOTE or self.name not in BUILT_IN

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


LOCAL = {
    "dit_steps": "dit_steps", "solver_steps": "solver_steps", "video": "video",
    "cfg_scale": "cfg_scale", "policy_seed": "seed", "compile": "compile", "graphs": "graphs",
    "device": "device", "dtype": "dtype", "memory": "memory", "quantize": "quantize",
    "cfg_devices": "cfg_device", "revision": "revision",
}  # fmt: skip
"""Flags that a policy server decides for itself -> fields of the options or the spec."""


def local_message(flag: str) -> str:
    """Return what is said of a flag of :data:`LOCAL` where a server acts."""
    return f"--{flag.replace('_', '-')}: the server decides; give it to `dzrobot serve`"


def refuse_local(spec: PolicySpec) -> None:
    """Raise ConfigError where ``remote`` is given what its server decides."""
    plain = PolicySpec()
    given = vars(spec) | vars(spec.options)
    usual = vars(plain) | vars(plain.options)
    for flag, name in LOCAL.items():
        if given[name] != usual[name]:
            raise ConfigError(local_message(flag))


@dataclass(frozen=True, kw_only=True)
class LoadedPolicy:
    """A policy that can act, and what its actions depend on."""

    policy: Policy | None
    """None for one that lives beside its environment."""

    robot: Embodiment
    card: Mapping[str, Any]
    round_trips: Callable[[], str] = str
    """Returns the latency of a remote policy's answers so far as text; empty without any."""


@dataclass(frozen=True, kw_only=True)
class ResolvedPolicy:
    """A policy that was found, and the robot that it acts as; its weights are not yet read."""

    spec: PolicySpec
    robot: Embodiment
    checkpoint: "Checkpoint | None" = None

    @cached_property
    def acting(self) -> ActingOptions:
        """How a checkpoint's policy acts, with nothing left open."""
        distilled = None if self.checkpoint is None else self.checkpoint.passport.distilled_steps
        return self.spec.options.for_robot(self.robot, distilled)

    def check(self) -> None:
        """Check what would else be wrong in every episode.

        Raises:
            ConfigError: a checkpoint cannot act so.
        """
        if self.checkpoint is None:
            return
        from dzrobot.policies.dreamzero.network.diffusion import step_plan

        step_plan(self.acting.dit_steps, self.acting.solver_steps)


def resolve_policy(
    spec: PolicySpec, of_environment: Embodiment | None, *, exact: bool = False
) -> ResolvedPolicy:
    """Return the robot that ``spec`` acts as, and its checkpoint, opened.

    Args:
        spec: Who acts.
        of_environment: The environment's robot. None: it does not say.
        exact: Whether a checkpoint of another robot is refused, as an arm does, rather than taken
            at its own word.

    Raises:
        CheckpointError: the checkpoint cannot be used, or knows several robots, or none, and the
            environment decides nothing.
        ConfigError: nothing says which robot it is, or there is no such device.
    """
    # For every policy: who names a device means one that is there.
    check_device(spec.device)
    if spec.cfg_device is not None:
        check_device(spec.cfg_device)
    checkpoint, robot = None, of_environment
    if spec.is_checkpoint:
        from dzrobot.policies.dreamzero.checkpoints.hub import local_path

        # Known before torch is loaded, which what follows needs.
        local_path(spec.name, spec.revision)

        from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
        from dzrobot.policies.dreamzero.parts import as_trained, embodiment_of

        checkpoint = open_checkpoint(
            spec.name,
            revision=spec.revision,
            config_from=spec.config_from,
            base=spec.base,
        )
        if robot is None or robot.tag not in checkpoint.metadata:
            if exact and robot is not None and spec.embodiment is None:
                raise CheckpointError(
                    f"{spec.name} was trained for {preview(checkpoint.metadata)}, and the "
                    f"environment's robot is {robot.tag}: choose a checkpoint of that robot, or "
                    "say with --embodiment which robot it acts as"
                )
            robot = embodiment_of(checkpoint, spec.embodiment)
    if spec.embodiment is not None:
        robot = load_embodiment(spec.embodiment)
    if robot is None:
        raise ConfigError("nothing says which robot this environment is: give --embodiment")
    if checkpoint is not None:
        robot = as_trained(checkpoint, robot)
    elif of_environment is not None:
        robot = replace(robot, action_anchor=of_environment.action_anchor)
    return ResolvedPolicy(spec=spec, robot=robot, checkpoint=checkpoint)


def load_policy(found: ResolvedPolicy) -> LoadedPolicy:
    """Load the policy.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        UnknownNameError: no such policy.
    """
    spec, robot = found.spec, found.robot
    if spec.in_worker is not None:
        load_factory(spec.in_worker)
        return LoadedPolicy(
            policy=None, robot=robot, card={"policy": spec.name, "privileged": True}
        )
    if found.checkpoint is not None:
        return _open_checkpoint(found, found.checkpoint)
    if spec.name == REMOTE:
        return _open_remote(spec, robot)
    if spec.name.startswith(LEROBOT):
        return _open_lerobot(spec, robot)
    seed = spec.options.seed or 0
    if spec.name == "random":
        card = {"policy": "random", "seed": seed}
        return LoadedPolicy(policy=RandomPolicy(robot.action_dim, seed), robot=robot, card=card)
    if spec.name == "hold":
        return LoadedPolicy(policy=HoldPolicy(robot), robot=robot, card={"policy": "hold"})
    return LoadedPolicy(policy=_made(spec.name, robot), robot=robot, card={"policy": spec.name})


def load_factory(name: str) -> Callable[[Any], Any]:
    """Return what ``module:factory`` names.

    Raises:
        UnknownNameError: no such module or attribute.
    """
    if not is_reference(name):
        raise UnknownNameError(
            f"unknown policy {name!r}.{suggest(name, BUILT_IN)} Known: {', '.join(BUILT_IN)}, "
            "module:factory, or a checkpoint"
        )
    factory: Callable[[Any], Any] = load_reference(name, "policy", Callable)
    return factory


def _made(name: str, robot: Embodiment) -> Policy:
    factory = load_factory(name)
    with ErrorCapture() as caught:
        policy = factory(robot)
    if caught.failure is not None:
        raise ConfigError(
            f"policy {name!r} could not be made for {robot.tag}: {caught.failure.error}"
        )
    return adapted(policy)


def beside(factory: str, env: Any) -> Policy:
    """Return the policy that ``module:factory`` makes for an environment of this process."""
    return adapted(load_factory(factory)(env))


@dataclass
class PrivilegedActor(Actor):
    """A policy that looks into its environment; made beside it, a new one for every episode."""

    factory: str
    """``module:factory``; takes the environment."""

    noise_key: int
    inner: Actor = field(default_factory=Actor)
    """The actor of the episode that has begun."""

    def begin(self, env: Any) -> None:
        """Make the policy and start its episode."""
        policy = beside(self.factory, env)
        self.inner = PolicyActor(policy=policy, noise_key=self.noise_key)
        self.inner.begin(env)

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return the policy's action and its time."""
        return self.inner.act(observation)

    def reads_frames(self) -> bool:
        """Return whether the policy looks at the images of the next observation."""
        return self.inner.reads_frames()


class HoldPolicy(Policy):
    """Leaves a robot as it is.

    Args:
        robot: Every part of its action says how; see ``Part.hold``.

    Raises:
        ConfigError: a part does not.
    """

    def __init__(self, robot: Embodiment) -> None:
        check_holds(robot, "by the policy 'hold'")
        self._robot = robot
        self._held: dict[str, NDArray[np.float32]] = {}

    def act(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> NDArray[np.float32]:
        """Return zeros, or where an absolute part was at first, (A,)."""
        held = hold_command(self._robot, obs, self._held.get(session))
        self._held[session] = held
        return held.copy()

    def reads_frames(self, *, session: str = DEFAULT_SESSION, when: When = "acting") -> bool:
        """Return False."""
        return False

    def reset(self, session: str = DEFAULT_SESSION, *, episode: int | None = None) -> None:
        """Start a new episode, which is held where it begins."""
        self._held.pop(session, None)

    def end_all(self) -> None:
        """Forget where all sessions are held."""
        self._held.clear()


class RandomPolicy(Policy):
    """Uniform numbers in [-1, 1], a function of seed and episode."""

    def __init__(self, action_dim: int, seed: int) -> None:
        self._action_dim = action_dim
        self._seed = seed
        self._draws: dict[str, np.random.Generator] = {}
        self._numbers: dict[str, int] = {}

    def act(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> NDArray[np.float32]:
        """Return the next numbers (A,) of the session."""
        if session not in self._draws:
            self.reset(session)
        return self._draws[session].uniform(-1, 1, self._action_dim).astype(np.float32)

    def reads_frames(self, *, session: str = DEFAULT_SESSION, when: When = "acting") -> bool:
        """Return False."""
        return False

    def end_all(self) -> None:
        """Forget the numbers of all sessions."""
        self._draws.clear()
        self._numbers.clear()

    def reset(self, session: str = DEFAULT_SESSION, *, episode: int | None = None) -> None:
        """Start the numbers of ``episode``; None: of the one after the last, from 0 on."""
        number = self._numbers.get(session, -1) + 1 if episode is None else episode
        self._numbers[session] = number
        self._draws[session] = numpy_generator("random policy", self._seed, number)


def _open_checkpoint(found: ResolvedPolicy, checkpoint: "Checkpoint") -> LoadedPolicy:
    import torch

    from dzrobot.policies.dreamzero.checkpoints.checksums import weights_hash
    from dzrobot.policies.dreamzero.checkpoints.hub import commit_of
    from dzrobot.policies.dreamzero.checkpoints.load import open_base
    from dzrobot.policies.dreamzero.options import WeightOptions
    from dzrobot.policies.dreamzero.policy import DreamZeroPolicy

    spec, robot = found.spec, found.robot
    dtypes = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if spec.dtype not in dtypes:
        raise ConfigError(f"dtype {spec.dtype!r}: choose float32 or bfloat16")
    found.check()
    policy = DreamZeroPolicy.from_pretrained(
        checkpoint,
        embodiment=robot,
        device=spec.device,
        dtype=dtypes[spec.dtype],
        options=found.acting,
        weights=WeightOptions(
            base=spec.base,
            memory=spec.memory,
            quantize=spec.quantize,
            cfg_device=spec.cfg_device,
        ),
    )
    card = {
        **policy.card,
        "checkpoint": Path(spec.name).name,
        "weights": weights_hash(checkpoint.weights),
    }
    if commit := commit_of(checkpoint.path):
        card["commit"] = commit
    if spec.base is not None:
        base = open_base(spec.base, checkpoint.config)
        card["base"] = weights_hash(base)
    return LoadedPolicy(policy=policy, robot=robot, card=card)


def _open_lerobot(spec: PolicySpec, robot: Embodiment) -> LoadedPolicy:
    """Return a policy of LeRobot: in this process, or served by the Python that has LeRobot."""
    seed = spec.options.seed or 0
    if spec.lerobot_python is not None:
        from dzrobot.rollout.lerobot_server import start_server

        tag = spec.embodiment or robot.tag
        command = [spec.name, "--embodiment", tag, "--device", spec.device]
        command += ["--policy-seed", str(seed)]
        command += [] if spec.revision is None else ["--revision", spec.revision]
        address = start_server(spec.lerobot_python, command)
        return _open_remote(replace(spec, server=address), robot)
    try:
        version("lerobot")
    except PackageNotFoundError:
        raise ConfigError(
            f"{spec.name} needs LeRobot, which pins other versions of torch than this package. "
            "Either name the Python of an environment that has it: --lerobot-python "
            f"/path/to/bin/python; or serve it there: dzrobot serve {spec.name} --embodiment "
            f"{robot.tag}, and evaluate with --server"
        ) from None
    from dzrobot.policies.lerobot_policy import LeRobotPolicy

    policy = LeRobotPolicy(
        spec.name.removeprefix(LEROBOT), robot,
        device=spec.device, seed=seed, revision=spec.revision,
    )  # fmt: skip
    return LoadedPolicy(policy=policy, robot=policy.embodiment, card=policy.card)


def _open_remote(spec: PolicySpec, robot: Embodiment) -> LoadedPolicy:
    from dzrobot.policies.serving.connection import ConnectOptions
    from dzrobot.policies.serving.remote_policy import RemotePolicy
    from dzrobot.websocket import read_key

    options = spec.options
    if spec.server is None:
        raise ConfigError("the policy 'remote' needs the address of its server: --server ws://...")
    policy = RemotePolicy(
        spec.server,
        robot,
        execute=options.execute,
        actions=spec.server_actions,
        options=ConnectOptions(api_key=read_key(spec.api_key_file), images=spec.server_images),
    )
    served = policy.card["server"]
    for name, wanted in (("history", options.history), ("noise", options.noise)):
        if wanted is not None and served.get(name, wanted) != wanted:
            raise ConfigError(
                f"this evaluation wants {name} {wanted!r}, and {spec.server} serves "
                f"{served[name]!r}: serve with --{name} {wanted}, or evaluate with --{name} "
                f"{served[name]}"
            )
    return LoadedPolicy(
        policy=policy,
        robot=robot,
        card=policy.card,
        round_trips=lambda: "" if policy.timing is None else policy.timing.text,
    )
