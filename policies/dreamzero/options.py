"""How a DreamZero policy acts, where its weights come from, and what weights without files are."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from dzrobot.declared import Flag, check_fields
from dzrobot.documents import read_json
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment, History
from dzrobot.errors import CheckpointError, ConfigError, preview
from dzrobot.policies.dreamzero.network.config import (
    GenerateOptions,
    NetworkConfig,
    PromptRows,
    Solver,
    Video,
    preset,
)

Quantization = Literal["int8", "fp8"]
"""``int8``: weights in 8-bit integers with a scale for each output; matrix products in the
network's dtype. ``fp8``: weights and activations in 8-bit floats (e4m3), scaled by row; matrix
products in 8 bits as well."""

Noise = Literal["fixed", "keyed", "slot"]
Adapters = Literal["merge", "keep"]

DIT_STEPS, SOLVER_STEPS, SEED, NOISE_SLOTS = 8, 16, 1140, 64
"""What published servers use: network evaluations of a plan, steps of the solver, seed of the
noise, and rows of ``slot`` noise."""

NOISE: Noise = "fixed"
"""Noise of published servers."""


@dataclass(frozen=True)
class ServerDecides:
    """A field that a policy server decides: its clients are refused to say it."""


@dataclass(frozen=True, kw_only=True)
class _Everywhere:
    """Options whose default is the same for every robot and checkpoint."""

    video: Annotated[Video, ServerDecides(), Flag(
        "video that the network denoises beside the actions: all of it; none after its first "
        "evaluation of a plan; none at all (faster, other actions, no prediction)",
    )] = "full"  # fmt: skip
    """What is computed of the video: ``full``, as published; ``once``: its tokens pass the network
    in the first evaluation of a plan alone; ``skip``: it has none. Other actions for less work, and
    no predicted video; see
    :data:`~dzrobot.policies.dreamzero.network.config.Video`."""

    prompt_rows: PromptRows = "own"
    """``cut``: prompts of sessions that plan in one call are zero from the length of the shortest
    on, as in the published code; for experiments."""

    max_sessions: int = 64
    """Sessions that may be open at a time; none is ever dropped silently."""

    independent: bool = False
    """Whether batch calls run session by session: the numbers then do not depend, not even in the
    last bits, on which sessions share a call."""

    batch_size: Annotated[int | None, ServerDecides(), Flag(
        "with --batch and --history off: plans that every call of the network makes, filled up "
        "with copies; results then do not depend on which episodes share a call",
        metavar="N", least=2, most=64,
    )] = None  # fmt: skip
    """Plans that every call of the network makes. A call for fewer is filled up with copies of its
    first plan, so that on a CPU the numbers do not depend, not even in the last bits, on which
    sessions share it. Other sizes give other last bits. None: as many as are due."""

    compile: Annotated[bool, ServerDecides(), Flag(
        "compile the network's blocks: faster on a GPU, last bits vary, the first plan takes "
        "minutes",
    )] = False  # fmt: skip
    """Whether the transformer's blocks, and all of the image encoders but convolutions, are
    compiled: faster on a GPU, other last bits, and a first call that takes minutes. Batch calls
    then run session by session, as every batch size would be compiled."""

    graphs: Annotated[bool, ServerDecides(), Flag(
        "on a GPU: record its work for every place of the memory's window, and launch it as one; "
        "goes together with --compile",
    )] = False  # fmt: skip
    """Whether a GPU's work of one plan is recorded once for every place of the memory's window, and
    launched as one from then on; with ``dit_steps="dynamic"`` or a second device for the negative
    prompt, each evaluation of the network by itself. Plans of batch calls are made one by one."""


@dataclass(frozen=True, kw_only=True)
class ActingOptions(_Everywhere, GenerateOptions):
    """How a policy acts, with nothing left open: see :class:`PolicyOptions` for each field.

    The network is given this itself.
    """

    execute: int
    noise: Noise
    noise_slots: int


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(_Everywhere):
    """How a policy is asked to act; :meth:`for_robot` fills in what is None.

    An option that is None is as the protocol says, else as the embodiment or the checkpoint does,
    else as published servers have it.
    """

    execute: Annotated[int | None, Flag(
        "actions executed of each plan, or steps from one request to the next",
        metavar="K", least=1,
    )] = None  # fmt: skip
    """Actions of each plan that are executed before the next one; None for the embodiment's number,
    which is all of them unless it says otherwise."""

    history: Annotated[History | None, Flag(
        "frames remembered (default: the protocol's, else the robot's)", words={"on": "recent"},
    )] = None  # fmt: skip
    """Frames the network is shown of what happened, see
    :func:`~dzrobot.policies.base.frame_offsets`; None for the embodiment's."""

    dit_steps: Annotated[int | Literal["dynamic"] | None, ServerDecides(), Flag(
        "network evaluations: 5 to 8, 16, or dynamic", least=1, most=1000,
    )] = None  # fmt: skip
    """Solver steps that run the transformer; published: 8 of 16, else all."""

    solver_steps: Annotated[int | None, ServerDecides(), Flag(
        "steps of the solver, of which all run the network unless there are 16 (default: a "
        "distilled checkpoint's own, else 16)", metavar="N", least=1, most=1000,
    )] = None  # fmt: skip
    """Steps of the solver; a distilled checkpoint has its own number, all others 16."""

    solver: Solver | None = None
    """Which solver; ``euler`` of a distilled checkpoint, else ``unipc``."""

    cfg_scale: Annotated[float | None, ServerDecides(), Flag(
        "guidance of the predicted video", least=0, most=1000,
    )] = None  # fmt: skip
    """Guidance of the predicted video; 1 leaves out the negative prompt and half the work. None for
    the embodiment's, or 1 where no video is predicted."""

    seed: Annotated[int | None, ServerDecides(), Flag(
        "of the policy's noise", name="policy-seed", least=0, most=2**32 - 1,
    )] = None  # fmt: skip
    """Seed of the noise that every plan starts from; published: 1140."""

    noise: Annotated[Noise | None, Flag(
        "of plans: by episode, always the same, or by slot (default: the protocol's)",
    )] = None  # fmt: skip
    """``fixed``, as published: the same noise for every plan, drawn on the network's device and in
    its dtype. ``keyed``: a function of seed, episode and plan, the same on every device. ``slot``:
    as published for many environments at once: drawn like ``fixed``, but for ``noise_slots`` of
    them together, and each keeps its row. A session keeps its slot from episode to episode, and a
    new one takes the first that is free; of an episode with a number, it is the remainder."""

    noise_slots: int | None = None
    """Rows of ``slot`` noise, 64 unless a protocol says otherwise; on some devices the numbers
    depend on how many are drawn."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in (
            ("max_sessions", self.max_sessions),
            ("solver_steps", self.solver_steps),
            ("noise_slots", self.noise_slots),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if self.batch_size is not None:
            self._check_batch_size(self.batch_size)
        if self.video != "full" and self.cfg_scale not in (None, 1):
            raise ConfigError(
                f"cfg_scale={self.cfg_scale:g} guides the predicted video, and "
                f"video={self.video!r} predicts none: leave one of them out"
            )
        if self.execute is not None and self.execute < 1:
            raise ConfigError(
                f"execute={self.execute} must be at least 1, or None for the embodiment's number"
            )

    def _check_batch_size(self, size: int) -> None:
        """Raise ConfigError where calls of the network cannot have ``size`` plans."""
        if size < 2:
            raise ConfigError(f"batch_size={size}: give 2 or more, or leave it out")
        alone = [n for n in ("independent", "compile", "graphs") if vars(self)[n]]
        alone += ["dit_steps='dynamic'"] if self.dit_steps == "dynamic" else []
        if alone:
            raise ConfigError(
                f"batch_size={size} and {alone[0]}, which makes plans one by one: leave one of "
                "them out"
            )

    def for_robot(self, robot: Embodiment, distilled: int | None = None) -> ActingOptions:
        """Return how a policy of ``robot`` acts: all that is None filled in.

        Args:
            robot: Whose they are.
            distilled: Solver steps that the checkpoint was distilled for; None: it was not.

        Raises:
            ConfigError: More actions are to be executed than are planned, or a distilled checkpoint
                is to take other steps than its own.
        """
        if distilled is not None:
            return self._distilled(distilled).for_robot(robot)
        if self.batch_size is not None and (self.history or robot.history) != "off":
            raise ConfigError(
                f"batch_size={self.batch_size} fills calls up with copies of a plan, and a plan "
                "that remembers has no copy: choose history='off', or leave batch_size out"
            )
        horizon = robot.timing.action_horizon
        if self.execute is not None and self.execute > horizon:
            raise ConfigError(
                f"execute={self.execute} but only {horizon} actions are planned at a time; "
                f"choose 1 to {horizon}"
            )
        usual = robot.cfg_scale if self.video == "full" else 1.0
        steps = self.solver_steps or SOLVER_STEPS
        filled = {
            "execute": self.execute or robot.execute or horizon,
            "cfg_scale": usual if self.cfg_scale is None else self.cfg_scale,
            "history": self.history or robot.history,
            "dit_steps": self.dit_steps or (DIT_STEPS if steps == SOLVER_STEPS else steps),
            "solver_steps": steps,
            "solver": self.solver or "unipc",
            "seed": SEED if self.seed is None else self.seed,
            "noise": self.noise or NOISE,
            "noise_slots": self.noise_slots or NOISE_SLOTS,
        }
        shared = {one.name: vars(self)[one.name] for one in fields(_Everywhere)}
        return ActingOptions(**{**shared, **filled})

    def _distilled(self, steps: int) -> "PolicyOptions":
        """Return these options with the solver of a checkpoint that was distilled for ``steps``."""
        own = {"solver_steps": steps, "dit_steps": steps, "solver": "euler"}
        wrong = [
            f"{name}={given}"
            for name, wanted in own.items()
            if (given := vars(self)[name]) not in (None, wanted)
        ]
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)}: this checkpoint was distilled for {steps} solver steps of "
                "Euler's method, and was not trained for others: leave it out, or use the "
                "checkpoint that it was distilled from"
            )
        return replace(self, solver_steps=steps, dit_steps=steps, solver="euler")


_SUFFIX = ".json"

LOOSE = (
    "for weights of one of the published sizes give the preset, the statistics and the robot "
    "(--preset 5b --metadata FILE --embodiment TAG); for others a folder that has config.json and "
    "experiment_cfg/metadata.json (--config-from DIR)"
)
"""End of the message about weights that nothing describes."""


@dataclass(frozen=True, kw_only=True)
class LooseWeights:
    """What loose weights are. All None: the files beside them say it."""

    folder: Annotated[str | Path | None, Flag(
        "folder with config.json and experiment_cfg, where the checkpoint has none",
        name="config-from", metavar="DIR",
    )] = None  # fmt: skip
    """Folder with config.json and experiment_cfg."""

    network: Annotated[str | Path | NetworkConfig | None, Flag(
        "instead: the network by its published size, or a config.json; horizon, frames and frame "
        "size are then those of --embodiment", name="preset", metavar="5b|14b|FILE",
    )] = None  # fmt: skip
    """Instead of a folder: ``5b``, ``14b`` or the path of a config.json, whose horizon, sample
    length and frame size then become the robot's; or a network, taken as it is."""

    metadata: Annotated[str | Path | None, Flag(
        "statistics (metadata.json) where the checkpoint has none", metavar="FILE", kind="path",
    )] = None  # fmt: skip
    """metadata.json with the statistics, where none lies beside the weights."""

    embodiment: Embodiment | str | None = None
    """Robot that the network acts as. None: the one that the statistics are of, if it is one."""

    def __post_init__(self) -> None:
        if self.folder is not None and self.network is not None:
            raise ConfigError(
                f"a folder ({self.folder}) and a network ({self.network}) both say what the "
                "weights are: leave one of them out (--config-from, --preset)"
            )
        if self.metadata is not None and not Path(self.metadata).expanduser().is_file():
            raise CheckpointError(
                f"no statistics at {self.metadata}: give the metadata.json that the weights were "
                "trained with; `dzrobot stats` makes one from the training data"
            )

    def config(self, statistics: Mapping[str, Any] | None) -> NetworkConfig:
        """Return the network that is described by ``network``.

        Args:
            statistics: Content of metadata.json, by tag; None: there is none.

        Raises:
            CheckpointError: Nothing says which robot it acts as, or the file describes no network.
            UnknownNameError: There is no such preset or robot.
        """
        if isinstance(self.network, NetworkConfig):
            return self.network
        name = str(self.network)
        if name.endswith(_SUFFIX):
            read = read_json(Path(name).expanduser(), dict[str, Any], CheckpointError)
            base = NetworkConfig.from_dict(read)
        else:
            base = preset(name)
        return base.for_robot(self._robot(statistics))

    def _robot(self, statistics: Mapping[str, Any] | None) -> Embodiment:
        if isinstance(self.embodiment, Embodiment):
            return self.embodiment
        if self.embodiment is not None:
            return load_embodiment(self.embodiment)
        tags = sorted(statistics or ())
        if len(tags) != 1:
            known = f" (statistics are of {preview(tags)})" if tags else ""
            raise CheckpointError(
                f"horizon and frames of the network {self.network} are those of its robot, and "
                f"nothing says which that is{known}: give --embodiment TAG"
            )
        return load_embodiment(tags[0])


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """Where weights come from beyond the checkpoint itself."""

    config_from: Annotated[str | Path | LooseWeights | None, ServerDecides()] = None
    """What the weights are, where no config.json or no statistics lie beside them; a folder is
    short for ``LooseWeights(folder=...)``."""

    base: Annotated[str | Path | tuple[str | Path, ...] | None, ServerDecides(), Flag(
        "what the checkpoint was trained on, where it holds only what was trained", metavar="PATH",
    )] = None  # fmt: skip
    """Base checkpoint, or Wan component folders, of a checkpoint of trained tensors alone."""

    adapters: Adapters = "merge"
    """Whether LoRA matrices are merged into the weights."""

    memory: Annotated[int | None, ServerDecides(), Flag(
        "GPU memory to use, such as 24 or 24GiB: as many weights as necessary stay in the host's "
        "memory and come when they are used; slower, the same numbers (default: all on the GPU)",
        metavar="GIB", kind="GiB",
    )] = None  # fmt: skip
    """Bytes of the device that may be used: as many weights as necessary then wait in the host's
    memory, and come to the device while they are used. The numbers stay the same, to the last bit;
    see :mod:`~dzrobot.policies.dreamzero.offload`. None: all lie on the device."""

    cfg_device: Annotated[str | None, ServerDecides(), Flag(
        "two devices instead of one, such as cuda:0,cuda:1: the prompt runs on the first, the "
        "negative prompt of guidance on the second, each with a copy of the transformer",
        name="cfg-devices", metavar="A,B", kind="devices",
    )] = None  # fmt: skip
    """Second device, with a copy of the transformer that runs the negative prompt at the same time
    as the first device runs the other: other last bits. None: both run as one batch."""

    quantize: Annotated[Quantization | None, ServerDecides(), Flag(
        "8-bit weights in the transformer: half the memory, other actions; fp8, on Ada, Hopper "
        "and newer, multiplies in 8 bits too (default: weights as they were trained)",
    )] = None  # fmt: skip
    """8-bit weights in the transformer's blocks: half the memory, and other actions; see
    :mod:`~dzrobot.policies.dreamzero.quantize`. None: all are as they were trained."""

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory < 1:
            raise ConfigError(f"memory={self.memory} must be a number of bytes, or None")


def chosen_device(device: str) -> str:
    """Return ``device``; of ``auto``, a GPU where torch sees one, else the processor."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(device: Any) -> str:
    """Return the name of an accelerator and its memory; ``cpu`` for the processor.

    Args:
        device: A ``torch.device``, or its name.
    """
    import torch

    found = torch.device(device)
    if found.type != "cuda":
        return found.type
    total = torch.cuda.get_device_properties(found).total_memory / 2**30
    return f"{torch.cuda.get_device_name(found)} ({total:.0f} GiB)"


def check_device(device: object) -> None:
    """Raise ConfigError, naming those that there are, where torch sees no such device.

    Args:
        device: A ``torch.device``, or its name.
    """
    name = str(device)
    if name == "cpu":
        return
    import torch

    there = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    there += ["mps"] if torch.backends.mps.is_available() else []
    # Without a number it is the first one.
    if name in there or f"{name}:0" in there:
        return
    raise ConfigError(f"device {name!r}: {_why_absent(name, there)}")


def _why_absent(name: str, there: Sequence[str]) -> str:
    """Return why torch sees no such device, and what to do about that."""
    import torch

    give = f"give {' or '.join(['cpu', *there])}"
    if there or not re.fullmatch(r"cuda(:[0-9]+)?", name):
        return f"torch sees no such device; {give}"
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"the installed torch ({torch.__version__}) is built without CUDA; install one that is "
            f"built with it (https://pytorch.org/get-started/locally), or {give}"
        )
    return (
        f"torch ({torch.__version__}) is built for GPUs and finds none; see that nvidia-smi lists "
        f"one and that its driver is recent enough, or {give}"
    )
