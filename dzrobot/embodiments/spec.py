"""An embodiment: what a robot sees and does, as one frozen value.

Environment spaces, dataset reading, statistics, the policy and the server follow from it.
"""

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.templates import NEGATIVE, told_faults
from dzrobot.embodiments.timing import Timing
from dzrobot.errors import ConfigError, preview, suggest

ActionSpace = Literal[
    "joint_position", "joint_velocity", "cartesian_position", "cartesian_velocity"
]


@dataclass(frozen=True, kw_only=True)
class RoboArena:
    """What a RoboArena server tells its clients about itself, beyond the images' size."""

    n_external_cameras: int
    needs_wrist_camera: bool = True
    needs_stereo_camera: bool = False
    needs_session_id: bool = True
    action_space: ActionSpace = "joint_position"


@dataclass(frozen=True, kw_only=True)
class Groot:
    """What GR00T's servers call the parts of a robot's state and actions: pairs of name and width.

    They are in the robot's order. Views are called as their keys are.
    """

    state: tuple[tuple[str, int], ...]
    action: tuple[tuple[str, int], ...]
    opening: str | None = None
    """Part of the action that is there 1 to open and 0 to close, and here -1 and 1."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Names behind ``observation/`` in the messages of openpi's family of clients."""

    names: tuple[tuple[str, str], ...] = ()
    """Pairs of modality key and name, where it is not the key without its kind."""

    unused: tuple[str, ...] = ()
    """Further names that existing clients send and the robot's policies do not look at."""

    openpi: tuple[tuple[str, str], ...] = ()
    """Pairs of modality key and name: all that openpi's own policies of this robot read, where they
    read other names than RoboArena's, or fewer. Source: openpi, ``policies/droid_policy.py``."""

    arena: RoboArena | None = None
    """None: the robot is none that RoboArena's clients know."""

    # Features and resumed runs are keyed by the robot's repr, and do not depend on this.
    groot: Groot | None = field(default=None, repr=False)
    """None: it is not known what GR00T's servers call the robot's parts."""


MAX_STATE_DIM = 64
"""Width every state is padded to."""

MAX_ACTION_DIM = 32
"""Width every action is padded to."""

HOLD_ZERO = "zero"
"""Value of :attr:`Part.hold`."""

Normalization = Literal["q99", "min_max"]

ActionFrame = Literal["ee", "base", "ee_adjoint"]
"""Axes of an arm's Cartesian action and of the velocity in its state: the hand's, the robot base's,
or the hand's with the lever term of the pose's adjoint (rotation += position x translation)."""

ActionAnchor = Literal["target", "measured"]
"""What an arm's Cartesian step starts from. ``target``: the target before, so that a zero action
holds the pose and a steady error (a load, friction) never becomes motion. ``measured``: the pose
the arm is at, as the published recordings were made. Equal numbers are other motions: 20 steps of
12 mm move the emulated arm by 231 mm from targets, and by 129 mm from measured poses."""

History = Literal["off", "recent", "grid"]
"""Frames that a policy is shown of what happened: the newest alone, the four last sent, or all that
training takes from one block."""


Recorded = Literal["actions", "state", "images"]
"""What recordings hold beside images and instructions: state and actions, the state alone, or
neither. Those without actions train the video alone."""


@dataclass(frozen=True, kw_only=True)
class View:
    """One camera."""

    key: str
    """Modality key, ``video.<name>``."""

    feature: str
    """Column of a LeRobot dataset."""

    aliases: tuple[str, ...] = ()
    """Other column names in use; exactly one of them may occur in a dataset."""

    size: tuple[int, int] = (256, 256)
    """``(height, width)`` in pixels after crop and resize."""

    resolution: tuple[int, int] = (256, 256)
    """``(height, width)`` in pixels that the camera, simulator or dataset delivers."""

    def __post_init__(self) -> None:
        faults = [*_key_faults(self.key, "video"), *_column_faults(self.feature, self.aliases)]
        for name, value in (("size", self.size), ("resolution", self.resolution)):
            if len(value) != 2 or not all(isinstance(n, int) and n > 0 for n in value):
                faults.append(f"{name}={value!r} must be (height, width) in whole pixels above 0")
        _refuse(f"View {self.key!r}", faults)

    @property
    def name(self) -> str:
        """The key without its kind, as ``metadata.json`` writes it."""
        return self.key.partition(".")[2]


@dataclass(frozen=True, kw_only=True)
class Gripper:
    """Turns one predicted number into one of two commands."""

    index: int = -1
    """Position in its part."""

    threshold: float = 0.0
    """Above it the command is ``high``, otherwise ``low``."""

    low: float = -1.0
    """Command of a closed or an open hand, as the robot has it."""

    high: float = 1.0
    """The other one."""

    def command(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the numbers of a part with the gripper's made a command.

        Args:
            values: ``(..., dim)``. Above ``threshold`` the command is ``high``, else ``low``; which
                of the two closes is the robot's.
        """
        result = values.copy()
        above = values[..., self.index] > self.threshold
        result[..., self.index] = np.where(above, self.high, self.low)
        return result


@dataclass(frozen=True, kw_only=True)
class Part:
    """One piece of the state or of the action."""

    key: str
    """Modality key, ``state.<name>`` or ``action.<name>``."""

    feature: str
    """Column of a LeRobot dataset."""

    aliases: tuple[str, ...] = ()
    """Other column names in use; exactly one of them may occur in a dataset."""

    dim: int
    """Numbers in the part."""

    start: int | None = None
    """First number within the column. None: the column is exactly this part."""

    reference: str | None = None
    """State key, at its block's start, that a relative action is measured from. None: absolute."""

    normalization: Normalization = "q99"
    """Statistics that map to [-1, 1]: the 1 % and 99 % quantiles, or the extremes."""

    gripper: Gripper | None = None
    """How a predicted gripper number becomes a command. None: the part holds no two-way gripper."""

    hold: str | None = None
    """What commands the robot to stay as it is. ``zero``: zeros, as of differences from step to
    step; a two-way gripper keeps its last command. A state key: the last command, and before the
    first the value of that key. None: nothing is known to, and the robot cannot wait for a plan."""

    quantities: tuple[str, ...] = ()
    """What an arm measures or is commanded in these numbers, in their order: names of
    ``dzrobot.envs.panda.quantities``. Empty: the part's own name is one, where an arm is meant."""

    # Features and resumed runs are keyed by the robot's repr; other encoders have other weights.
    encoder: str | None = field(default=None, repr=False)
    """A modality of its own: what makes a condition of these state numbers, written
    ``module:Name``; see :mod:`dzrobot.policies.dreamzero.network.dit`. None: the numbers
    belong to the state vector."""

    def __post_init__(self) -> None:
        kind = "action" if self.key.startswith("action") else "state"
        faults = [*_key_faults(self.key, kind), *_column_faults(self.feature, self.aliases)]
        if self.dim < 1:
            faults.append(f"dim={self.dim} must be at least 1")
        if self.start is not None and self.start < 0:
            faults.append(f"start={self.start} must be 0 or more, or None for the whole column")
        if self.normalization not in ("q99", "min_max"):
            faults.append(f"normalization={self.normalization!r} must be 'q99' or 'min_max'")
        if not isinstance(self.quantities, tuple):
            faults.append(f"quantities={self.quantities!r} must be a tuple of names")
        own = (self.reference, self.gripper, self.hold)
        if kind == "state" and any(value is not None for value in own):
            faults.append("reference, gripper and hold belong to action parts")
        if self.encoder is not None:
            faults += _encoder_faults(kind, self.name, self.encoder)
        if self.gripper is not None and not -self.dim <= self.gripper.index < self.dim:
            faults.append(
                f"gripper.index={self.gripper.index} lies outside the {self.dim} numbers of the "
                "part"
            )
        _refuse(f"Part {self.key!r}", faults)

    @property
    def name(self) -> str:
        """The key without its kind, as ``metadata.json`` writes it."""
        return self.key.partition(".")[2]


@dataclass(frozen=True, kw_only=True)
class Embodiment:
    """What a robot sees and does."""

    tag: str
    """Name in ``metadata.json``, recipes and on the command line."""

    views: tuple[View, ...]
    """Cameras, in the order datasets and policies list them."""

    state: tuple[Part, ...]
    """State parts in the order they are concatenated; those with an ``encoder`` come last."""

    action: tuple[Part, ...]
    """Action parts in the order they are concatenated. Empty, as the state may then be: recordings
    without them; see :meth:`holding`."""

    tiles: tuple[tuple[str | None, ...], ...]
    """Rows of view keys that form the image; None is a black tile.

    A row with fewer tiles than the widest is stretched by repeating pixels.
    """

    prompt: str
    """Template with ``{task}``; those of the published checkpoints are in ``prompts.PROMPTS``."""

    timing: Timing
    """Rate, horizon and which frames a window holds."""

    negative_prompt: str = NEGATIVE
    """What the guided video is steered away from."""

    language: str = "annotation.task"
    """Modality key of the instruction."""

    action_frame: ActionFrame | None = None
    """Axes that a Cartesian action is written in. None: the environment alone knows."""

    action_anchor: ActionAnchor | None = None
    """What a Cartesian step is measured from. None: the environment alone knows."""

    language_features: tuple[str, ...] = ()
    """Dataset columns that hold the instruction: one is drawn per sample. Empty: the task table."""

    crop_scale: float = 0.95
    """Share of height and width that the crop keeps."""

    execute: int | None = None
    """Actions of each plan that are executed before the next one is made, unless the policy's
    options say otherwise. None: all."""

    cfg_scale: float = 5.0
    """Guidance of the predicted video unless the policy's options say otherwise: how far it is
    moved away from ``negative_prompt``. 1: none."""

    history: History = "recent"
    """Frames that the policy is shown of what happened unless its options or a protocol say
    otherwise."""

    wire: Wire = field(default_factory=Wire)
    """What clients of a policy server call the parts of an observation."""

    def __post_init__(self) -> None:
        faults = [*self._shape_faults()]
        if not faults:
            faults = [
                *self._naming_faults(),
                *self._tile_faults(),
                *self._reference_faults(),
                *self._width_faults(),
                *_prompt_faults(self.prompt),
                *told_faults(self.prompt, self.tiles),
            ]
        _refuse(f"Embodiment {self.tag!r}", faults)

    @property
    def motion(self) -> str | None:
        """What moves the robot, as ``joint_position``; None: its action has no name of that kind.

        Actions of another kind may have the same shape.
        """
        if not self.action:
            return None
        first = self.action[0]
        if first.quantities:
            return first.quantities[0]
        return first.name if first.name in get_args(ActionSpace) else None

    @property
    def video_keys(self) -> tuple[str, ...]:
        """Keys of all views."""
        return tuple(view.key for view in self.views)

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Keys of all state parts, in concatenation order."""
        return tuple(part.key for part in self.state)

    @property
    def action_keys(self) -> tuple[str, ...]:
        """Keys of all action parts, in concatenation order."""
        return tuple(part.key for part in self.action)

    @property
    def observation_keys(self) -> tuple[str, ...]:
        """Every key of one observation: views, state parts, instruction."""
        return (*self.video_keys, *self.state_keys, self.language)

    @property
    def state_vector(self) -> tuple[Part, ...]:
        """State parts that are concatenated to the vector that published networks read."""
        return tuple(part for part in self.state if part.encoder is None)

    @property
    def conditions(self) -> tuple[Part, ...]:
        """State parts with an encoder of their own."""
        return tuple(part for part in self.state if part.encoder is not None)

    @property
    def state_dim(self) -> int:
        """Numbers in the state vector."""
        return sum(part.dim for part in self.state_vector)

    @property
    def action_dim(self) -> int:
        """Numbers in the whole action."""
        return sum(part.dim for part in self.action)

    @property
    def relative_keys(self) -> tuple[str, ...]:
        """Keys of the action parts that are measured from the state."""
        return tuple(part.key for part in self.action if part.reference is not None)

    @property
    def image_size(self) -> tuple[int, int]:
        """``(height, width)`` in pixels of the tiled image."""
        height, width = self.views[0].size
        return height * len(self.tiles), width * max(len(row) for row in self.tiles)

    def commands(self, targets: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return predicted actions as commands: grippers made two-way.

        Args:
            targets: ``(..., action_dim)``, in the order of ``action``.
        """
        parts = []
        start = 0
        for part in self.action:
            values = targets[..., start : start + part.dim]
            parts.append(values if part.gripper is None else part.gripper.command(values))
            start += part.dim
        return np.concatenate(parts, axis=-1)

    def view(self, key: str) -> View:
        """Return the view ``key``, which must exist."""
        return next(view for view in self.views if view.key == key)

    def at_resolution(self, height: int, width: int) -> Self:
        """Return the same robot with cameras that deliver ``height`` x ``width`` pixels.

        What the network sees keeps its size: images are cropped and resized to ``View.size``.

        Raises:
            ConfigError: no image has that size.
        """
        views = tuple(replace(view, resolution=(height, width)) for view in self.views)
        return replace(self, views=views)

    def holding(self, recorded: Recorded) -> Self:
        """Return what recordings of this robot are read as that hold no more than ``recorded``."""
        if recorded == "actions":
            return self
        state = self.state if recorded == "state" else ()
        return replace(self, state=state, action=(), action_frame=None, action_anchor=None)

    def _shape_faults(self) -> Iterable[str]:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.\-]*", self.tag):
            yield f"tag={self.tag!r} must be letters, digits, '_', '-' or '.'"
        for name, items, kind in (
            ("views", self.views, View),
            ("state", self.state, Part),
            ("action", self.action, Part),
            ("tiles", self.tiles, tuple),
        ):
            # Recordings without actions are described by a robot without: Embodiment.holding.
            optional = name == "action" or (name == "state" and self.action == ())
            if (
                not isinstance(items, tuple)
                or not (items or optional)
                or not all(isinstance(item, kind) for item in items)
            ):
                yield (
                    f"{name}={items!r} must be a tuple of at least one {kind.__name__}; one alone "
                    "is written with a comma, as in (x,)"
                )
        if not 0 < self.crop_scale <= 1:
            yield f"crop_scale={self.crop_scale} must lie above 0 and up to 1"
        horizon = self.timing.action_horizon
        if self.execute is not None and not 1 <= self.execute <= horizon:
            yield f"execute={self.execute} must lie between 1 and action_horizon={horizon}, or None"
        if self.history not in get_args(History):
            yield f"history={self.history!r} must be one of {', '.join(get_args(History))}"

    def _naming_faults(self) -> Iterable[str]:
        for kind, parts in (("state", self.state), ("action", self.action)):
            for part in parts:
                if not part.key.startswith(f"{kind}."):
                    yield f"{kind} holds the part {part.key!r}, whose key must begin with '{kind}.'"
        if self.state != (*self.state_vector, *self.conditions):
            yield (
                f"state parts with an encoder come last: {preview(p.key for p in self.conditions)}"
            )
        keys = [*self.observation_keys, *self.action_keys]
        if twice := {key for key in keys if keys.count(key) > 1}:
            yield f"keys occur more than once: {preview(twice)}"
        if not re.fullmatch(r"annotation\.\S+", self.language):
            yield f"language={self.language!r} must be 'annotation.<name>'"

    def _tile_faults(self) -> Iterable[str]:
        used = [key for row in self.tiles for key in row if key is not None]
        for key in sorted(set(used) - set(self.video_keys)):
            yield f"tiles name {key!r}, which is not a view.{suggest(key, self.video_keys)}"
        if unseen := set(self.video_keys) - set(used):
            yield f"views in no tile: {preview(unseen)}; give each a tile, or drop the view"
        widest = max(len(row) for row in self.tiles)
        if any(not row or widest % len(row) for row in self.tiles):
            yield f"a row of tiles must divide the widest row of {widest} evenly: {self.tiles}"
        if len({view.size for view in self.views}) > 1:
            sizes = ", ".join(f"{view.key} {view.size}" for view in self.views)
            yield f"all views need the same size to be tiled: {sizes}"

    def _reference_faults(self) -> Iterable[str]:
        dims = {part.key: part.dim for part in self.state}
        for part in self.action:
            if part.hold not in (None, HOLD_ZERO) and dims.get(part.hold) != part.dim:
                yield (
                    f"{part.key} has hold={part.hold!r}: write {HOLD_ZERO!r}, or a state part of "
                    f"{part.dim} numbers.{suggest(part.hold, dims)} Known: {', '.join(dims)}"
                )
            if part.reference is None:
                continue
            if part.reference not in dims:
                yield (
                    f"{part.key} is relative to {part.reference!r}, which is not a state part."
                    f"{suggest(part.reference, dims)} Known: {', '.join(dims)}"
                )
            elif dims[part.reference] != part.dim:
                yield (
                    f"{part.key} has {part.dim} numbers, its reference {part.reference} has "
                    f"{dims[part.reference]}"
                )

    def _width_faults(self) -> Iterable[str]:
        for kind, dim, limit in (
            ("state", self.state_dim, MAX_STATE_DIM),
            ("action", self.action_dim, MAX_ACTION_DIM),
        ):
            if dim > limit:
                yield f"{kind} parts add up to {dim} numbers, the network takes {limit}"


def undecided(question: str) -> Any:
    """Stand for a value of a drafted robot that its data do not decide: raise when it is loaded.

    Raises:
        ConfigError: Always; it asks the question.
    """
    raise ConfigError(
        f"this robot is not described to its end - {question}. Write the value in its file, in "
        "place of undecided(...)"
    )


def _prompt_faults(prompt: str) -> Iterable[str]:
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None}
    except ValueError as error:
        yield f"prompt {prompt!r} is not a template: {error}"
        return
    if fields != {"task"}:
        yield f"prompt must hold {{task}} and no other field, got {preview(fields)}"


def starts_of(widths: Mapping[str, int]) -> dict[str, int]:
    """Return where each part begins in a column that holds them one after the other."""
    return dict(zip(widths, accumulate(widths.values(), initial=0), strict=False))


def _key_faults(key: str, kind: str) -> Iterable[str]:
    if not re.fullmatch(rf"{kind}\.[^\s]+", key):
        yield f"key={key!r} must be '{kind}.<name>'"


def _encoder_faults(kind: str, name: str, encoder: str) -> Iterable[str]:
    module, _, attribute = encoder.partition(":")
    if kind != "state":
        yield "encoder belongs to state parts"
    if not all(word.isidentifier() for word in (*module.split("."), attribute)):
        yield f"encoder={encoder!r} must be written 'module:Name'"
    if "." in name:
        yield f"a part with an encoder has a name without dots, not {name!r}: weights are called so"


def _column_faults(feature: str, aliases: Sequence[str]) -> Iterable[str]:
    if isinstance(aliases, str):
        yield f"aliases={aliases!r} must be a tuple of names, as in ({aliases!r},)"
    elif feature in aliases or len(set(aliases)) != len(aliases):
        yield f"aliases={aliases} repeat a column name"
    if not feature:
        yield "feature must name a dataset column"


def _refuse(what: str, faults: Sequence[str]) -> None:
    if faults:
        raise ConfigError(f"{what} cannot be used: " + "; ".join(faults) + ".")
