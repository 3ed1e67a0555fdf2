"""The policy of an evaluation: from the name a user writes to something that acts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dzrobot.declared import Flag, declared
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
from dzrobot.policies.dreamzero.options import (
    ActingOptions,
    PolicyOptions,
    ServerDecides,
    WeightOptions,
    check_device,
    chosen_device,
    device_name,
)
from dzrobot.policies.wrapping import adapted
from dzrobot.rng import numpy_generator
from dzrobot.rollout.episode import Actor, PolicyActor

if TYPE_CHECKING:
    from dzrobot.policies.dreamzero.checkpoints.directory import Checkpoint
    from dzrobot.policies.dreamzero.imagined import VideoCoder
    from dzrobot.policies.serving.connection import ConnectOptions

REMOTE = "remote"
LEROBOT = "lerobot:"
"""Prefix of names of LeRobot's policies."""

_ACTING = ("execute", "dit_steps", "solver_steps", "solver", "cfg_scale", "video", "seed")
"""What a checkpoint's actions depend on beyond history and noise, which protocols name."""

BUNDLED = ""
"""Name of the policy that comes with the package."""


@dataclass(frozen=True)
class Elsewhere:
    """A field of a policy that acts elsewhere: in another process, or beside its environment."""


BUILT_IN = ("random", "hold", "expert", REMOTE)
EXPERT = "dzrobot.envs.expert:expert_for"


@dataclass(frozen=True, kw_only=True)
class PolicySpec(PolicyOptions, WeightOptions):
    """Which policy is evaluated, how it acts and where its network runs.

    ``seed`` is also that of ``random``.
    """

    name: str = BUNDLED
    """Checkpoint folder or hub id, ``random``, ``hold``, ``expert``, ``remote``, or
    ``module:factory``, or LeRobot's as ``lerobot:ID_OR_FOLDER``; ``BUNDLED`` stands for the
    checkpoint that comes with the package, which an evaluation finds by its environments."""

    lerobot_python: Annotated[Path | None, Elsewhere(), Flag(
        "Python of an environment that has LeRobot, which serves lerobot:ID from there",
        metavar="FILE",
    )] = None  # fmt: skip
    """None: this one has it."""

    server: Annotated[str | None, Elsewhere(), Flag(
        "of the policy 'remote', such as ws://gpu-machine:8000, or zmq://... for GR00T's; see "
        "`dzrobot serve`", metavar="URL",
    )] = None  # fmt: skip
    """Address of the server of ``remote``."""

    server_actions: Annotated[str | None, Elsewhere(), Flag(
        "what the actions of a server mean that does not say so, such as joint_position",
        metavar="NAME",
    )] = None  # fmt: skip

    server_images: Annotated[Literal["raw", "jpeg", "zstd"], Elsewhere(), Flag(
        "how images are sent to a server of dzrobot's: zstd changes nothing, jpeg changes pixels "
        "and is on the card",
    )] = "raw"  # fmt: skip

    api_key_file: Annotated[Path | None, Elsewhere(), Flag(
        "whose first line is the server's key (default: the variable DZROBOT_API_KEY)",
        metavar="FILE",
    )] = None  # fmt: skip

    privileged: Annotated[bool, Elsewhere(), Flag(
        "module:factory takes the environment and acts beside it, once per episode",
    )] = False  # fmt: skip
    """Otherwise ``module:factory`` is called once, with the embodiment."""

    embodiment: Annotated[str | None, Flag("robot: a built-in tag, or module:NAME")] = None
    """None: what the environment or the checkpoint says."""

    device: Annotated[str, ServerDecides(), Flag(
        "cpu, cuda, cuda:1, or auto: a GPU where there is one", kind="device",
    )] = "auto"  # fmt: skip

    dtype: Annotated[Literal["float32", "bfloat16"] | None, ServerDecides(), Flag(
        "what the network computes in (default: float32 on a CPU, else bfloat16)",
    )] = None  # fmt: skip

    revision: Annotated[str | None, ServerDecides(), Flag(
        "branch, tag or commit of a Hugging Face checkpoint",
    )] = None  # fmt: skip

    def __post_init__(self) -> None:
        PolicyOptions.__post_init__(self)
        WeightOptions.__post_init__(self)

    @property
    def in_worker(self) -> str | None:
        """Return ``module:factory`` of a policy that lives beside its environment, else None."""
        if self.name == "expert":
            return EXPERT
        return self.name if self.privileged else None

    @property
    def computes(self) -> bool:
        """Return whether a network of it runs here, or in the actors of a cluster."""
        return self.name.startswith(LEROBOT) or self.is_checkpoint

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

    def opened(self) -> "Checkpoint":
        """Return the checkpoint that the name stands for; no weight is read.

        Raises:
            CheckpointError: there is none, or it is not whole.
        """
        from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint

        return open_checkpoint(
            self.name, revision=self.revision, config_from=self.config_from, base=self.base
        )


ELSEWHERE = tuple(one.field for one in declared(PolicySpec, Elsewhere))
"""Fields of a policy that a command does not have which takes checkpoints alone."""


def decided_by_server(option: str) -> str:
    """Return what is said of a flag that a policy server decides."""
    return f"{option}: the server decides; give it to `dzrobot serve`"


def refuse_local(spec: PolicySpec) -> None:
    """Raise ConfigError where ``remote`` is given what its server decides."""
    plain = PolicySpec()
    for one in declared(PolicySpec, ServerDecides):
        if vars(spec)[one.field] != vars(plain)[one.field]:
            raise ConfigError(decided_by_server(one.option))


@dataclass(frozen=True, kw_only=True)
class ResolvedPolicy:
    """A policy that was found, and the robot that it acts as; its weights are not yet read."""

    spec: PolicySpec
    robot: Embodiment
    checkpoint: "Checkpoint | None" = None

    @property
    def where(self) -> str:
        """On which device the network runs, as a line for the user; empty: none is chosen here."""
        if self.checkpoint is None or self.spec.cfg_device is not None:
            return ""
        return f"The policy runs on {device_name(self.spec.device)}."

    @cached_property
    def acting(self) -> ActingOptions:
        """How a checkpoint's policy acts, with nothing left open."""
        distilled = None if self.checkpoint is None else self.checkpoint.passport.distilled_steps
        return self.spec.for_robot(self.robot, distilled)

    def departures(self, *, timed: bool) -> Iterator[str]:
        """Yield how a checkpoint acts otherwise than it does where nothing is said.

        Args:
            timed: Whether something else decides how many rows of a plan are executed.
        """
        spec = self.spec
        if self.checkpoint is None:
            return
        from dzrobot.policies.dreamzero import bundled

        own, plain = bundled.scored_with(spec.name), PolicySpec()
        unsaid = {name: own.get(name, vars(plain)[name]) for name in _ACTING}
        if any(vars(spec)[name] != value for name, value in unsaid.items()):
            # Filled in only here: an option that is said may be what it would have been anyway.
            acting = vars(self.acting)
            usual = vars(replace(self, spec=replace(spec, **unsaid)).acting)
            for name in _ACTING:
                if acting[name] != usual[name] and not (name == "execute" and timed):
                    yield f"{name.replace('_', ' ')} {acting[name]}, not {usual[name]}"
        dtype = "float32" if spec.device == "cpu" else "bfloat16"
        if spec.dtype not in (None, dtype):
            yield f"dtype {spec.dtype}, not {dtype}"
        if spec.quantize is not None:
            yield f"quantize {spec.quantize}"

    def unlike_training(
        self, env: str, control_hz: float | None, arguments: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield what an environment says of itself that the training data say otherwise.

        Args:
            env: Its name.
            control_hz: Actions that it takes per second. None: it does not say.
            arguments: What it is made with.
        """
        own = {} if self.checkpoint is None else self.checkpoint.passport.embodiments
        trained = own[self.robot.tag].inputs if self.robot.tag in own else None
        if trained is None:
            return
        from dzrobot.recording.catalog import RATE_TOLERANCE

        settles = arguments.get("settle_steps")
        if None not in (settles, trained.settle_steps) and settles != trained.settle_steps:
            yield (
                f"WARNING: {env} settles for {settles} steps before an episode; in the training "
                f"data it was {trained.settle_steps}."
            )
        # Published LIBERO sets say half their rate: one that agrees is enough.
        hz, rates = control_hz, (trained.fps, self.robot.timing.control_hz)
        if hz is not None and all(abs(hz - one) > RATE_TOLERANCE * one for one in rates):
            yield (
                f"WARNING: {env} takes {hz:g} actions per second; the training data have "
                f"{trained.fps:g} rows per second."
            )

    def card(self, policy: Any) -> dict[str, Any]:
        """Return what its actions depend on.

        Args:
            policy: What :func:`load_policy` returned.
        """
        spec, checkpoint = self.spec, self.checkpoint
        if checkpoint is not None:
            return {**policy.card, **_card_of_weights(spec, checkpoint)}
        if spec.in_worker is not None:
            return {"policy": spec.name, "privileged": True}
        if spec.name == "random":
            return {"policy": spec.name, "seed": spec.seed or 0}
        own = spec.name == REMOTE or spec.name.startswith(LEROBOT)
        return dict(policy.card) if own else {"policy": spec.name}

    def named(self) -> dict[str, str]:
        """Return what recordings say of the policy: its name, and the hash of its weights."""
        if self.checkpoint is None:
            return {"policy": self.spec.name}
        from dzrobot.policies.dreamzero.checkpoints.checksums import weights_hash

        name = Path(self.spec.name).name
        return {"policy": name, "weights": weights_hash(self.checkpoint.weights)}

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
    _check_devices(spec)
    checkpoint, robot = None, of_environment
    if spec.is_checkpoint:
        from dzrobot.policies.dreamzero.checkpoints.hub import local_path

        # Known before torch is loaded, which what follows needs.
        local_path(spec.name, spec.revision)
        spec = replace(spec, device=chosen_device(spec.device))

        from dzrobot.policies.dreamzero.parts import as_trained, embodiment_of

        checkpoint = spec.opened()
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
    elif robot is None and spec.server is not None:
        from dzrobot.policies.serving.remote_policy import served_robot

        robot = served_robot(spec.server, _connect_options(spec))
    if robot is None:
        raise ConfigError("nothing says which robot this environment is: give --embodiment")
    if checkpoint is not None:
        robot = as_trained(checkpoint, robot)
    elif of_environment is not None:
        robot = replace(robot, action_anchor=of_environment.action_anchor)
    return ResolvedPolicy(spec=spec, robot=robot, checkpoint=checkpoint)


def _check_devices(spec: PolicySpec) -> None:
    for device in (spec.device, spec.cfg_device):
        if device not in (None, "auto"):
            check_device(device)


def load_policy(found: ResolvedPolicy) -> Policy | None:
    """Load the policy; None: it lives beside its environment.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        UnknownNameError: no such policy.
    """
    spec, robot = found.spec, found.robot
    if spec.in_worker is not None:
        load_factory(spec.in_worker)
        return None
    if found.checkpoint is not None:
        return _open_checkpoint(found, found.checkpoint)
    if spec.name == REMOTE:
        return _open_remote(spec, robot)
    if spec.name.startswith(LEROBOT):
        return _open_lerobot(spec, robot)
    if spec.name == "random":
        return RandomPolicy(robot.action_dim, spec.seed or 0)
    return HoldPolicy(robot) if spec.name == "hold" else _made(spec.name, robot)


def open_coder(spec: PolicySpec, card: Mapping[str, Any]) -> "VideoCoder":
    """Return what decodes the predictions of a checkpoint's policy; no other weights are read.

    Args:
        spec: The policy of an evaluation.
        card: What its card says of the policy.

    Raises:
        CheckpointError: the checkpoint is no longer there, or has other weights than those of the
            evaluation.
        ConfigError: it names a device that is not there.
    """
    import torch

    from dzrobot.policies.dreamzero.checkpoints.checksums import weights_hash
    from dzrobot.policies.dreamzero.checkpoints.load import load_autoencoder
    from dzrobot.policies.dreamzero.imagined import VideoCoder

    checkpoint = spec.opened()
    if weights_hash(checkpoint.weights) != card.get("weights"):
        raise CheckpointError(
            f"{spec.name} has other weights than when it was evaluated: put those back to see what "
            "it predicted"
        )
    device = torch.device(chosen_device(spec.device))
    check_device(device)
    dtype = torch.bfloat16 if card.get("dtype") == "bfloat16" else torch.float32
    return VideoCoder(load_autoencoder(checkpoint, device, dtype, spec.base))


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
    return (ExpertPolicy if factory == EXPERT else adapted)(load_factory(factory)(env))


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


class ExpertPolicy(Policy):
    """The scripted expert, which looks into its environment and never at an observation.

    Args:
        expert: Made beside the environment; has ``act`` and ``reset``.
    """

    def __init__(self, expert: Any) -> None:
        self._expert = expert

    def act(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> NDArray[np.float32]:
        """Return the expert's next action, (A,)."""
        return np.asarray(self._expert.act(obs))

    def reads_frames(self, *, session: str = DEFAULT_SESSION, when: When = "acting") -> bool:
        """Return False."""
        return False

    def reset(self, session: str = DEFAULT_SESSION, *, episode: int | None = None) -> None:
        """Start a new episode."""
        self._expert.reset()


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


def _open_checkpoint(found: ResolvedPolicy, checkpoint: "Checkpoint") -> Policy:
    import torch

    from dzrobot.policies.dreamzero.policy import DreamZeroPolicy

    spec = found.spec
    dtypes = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if spec.dtype not in dtypes:
        raise ConfigError(f"dtype {spec.dtype!r}: choose float32 or bfloat16")
    found.check()
    return DreamZeroPolicy.from_pretrained(
        checkpoint,
        embodiment=found.robot,
        device=spec.device,
        dtype=dtypes[spec.dtype],
        options=found.acting,
        weights=spec,
    )


def _card_of_weights(spec: PolicySpec, checkpoint: "Checkpoint") -> dict[str, Any]:
    from dzrobot.policies.dreamzero.checkpoints.checksums import weights_hash
    from dzrobot.policies.dreamzero.checkpoints.hub import commit_of
    from dzrobot.policies.dreamzero.checkpoints.load import open_base

    card: dict[str, Any] = {
        "checkpoint": Path(spec.name).name,
        "weights": weights_hash(checkpoint.weights),
    }
    if commit := commit_of(checkpoint.path):
        card["commit"] = commit
    if spec.base is not None:
        card["base"] = weights_hash(open_base(spec.base, checkpoint.config))
    if resized := checkpoint.passport.resized_from:
        card["trained_on_small_films_of"] = resized
    return card


def _open_lerobot(spec: PolicySpec, robot: Embodiment) -> Policy:
    """Return a policy of LeRobot: in this process, or served by the Python that has LeRobot."""
    seed = spec.seed or 0
    if spec.lerobot_python is not None:
        from dzrobot.rollout.lerobot_server import start_server

        tag = spec.embodiment or robot.tag
        command = [spec.name, "--embodiment", tag, "--device", spec.device]
        command += ["--policy-seed", str(seed)]
        command += [] if spec.revision is None else ["--revision", spec.revision]
        address = start_server(spec.lerobot_python, command)
        return _open_remote(replace(spec, server=address), robot)
    from dzrobot.policies.lerobot_policy import LeRobotPolicy, check_installed

    check_installed(spec.name, robot)
    return LeRobotPolicy(
        spec.name.removeprefix(LEROBOT), robot,
        device=chosen_device(spec.device), seed=seed, revision=spec.revision,
    )  # fmt: skip


def _connect_options(spec: PolicySpec) -> "ConnectOptions":
    from dzrobot.policies.serving.connection import ConnectOptions
    from dzrobot.websocket import read_key

    return ConnectOptions(api_key=read_key(spec.api_key_file), images=spec.server_images)


def _open_remote(spec: PolicySpec, robot: Embodiment) -> Policy:
    from dzrobot.policies.serving.remote_policy import RemotePolicy

    if spec.server is None:
        raise ConfigError("the policy 'remote' needs the address of its server: --server ws://...")
    policy = RemotePolicy(
        spec.server,
        robot,
        execute=spec.execute,
        actions=spec.server_actions,
        options=_connect_options(spec),
    )
    served = policy.card["server"]
    for name, wanted in (("history", spec.history), ("noise", spec.noise)):
        if wanted is not None and served.get(name, wanted) != wanted:
            raise ConfigError(
                f"this evaluation wants {name} {wanted!r}, and {spec.server} serves "
                f"{served[name]!r}: serve with --{name} {wanted}, or evaluate with --{name} "
                f"{served[name]}"
            )
    return policy
