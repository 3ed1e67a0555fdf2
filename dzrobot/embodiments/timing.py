"""When a robot acts and which frames, states and actions belong to one sample.

Pure functions on indices: the training reader and the statistics both walk an episode with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dzrobot.errors import ConfigError, DatasetError, find

FRAMES_PER_BLOCK = 8
"""Video frames per action block: two latent frames of four (docs/model.md, section 5)."""

LATENT_STRIDE = 4
"""Pixel frames per latent frame of both video autoencoders."""

Sampling = Literal["aligned", "multi_anchor"]


def aligned_offsets(action_horizon: int, frames: int = 0) -> tuple[int, ...]:
    """Return ``frames`` steps that cover one block of ``action_horizon`` steps evenly.

    Zero frames: eight, or four for a horizon of 4 to 7, which has no eight steps.

    Uneven horizons round half to even, which keeps the last gap equal to the first:
    ``max(offsets) + offsets[1] == action_horizon`` for every horizon.
    """
    frames = frames or (FRAMES_PER_BLOCK if action_horizon >= FRAMES_PER_BLOCK else LATENT_STRIDE)
    return tuple(round(i * action_horizon / frames) for i in range(frames))


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Control rate, action horizon and frame grid.

    A sample is ``blocks`` action blocks of ``action_horizon`` steps; each starts with a state row
    and carries ``len(frame_offsets)`` frames; one closing frame ends the last block.
    """

    control_hz: float
    """Actions per second."""

    action_horizon: int
    """Actions per block, which is also what the network predicts at once."""

    frame_offsets: tuple[int, ...] = ()
    """Steps from a block's start to its frames. Empty: derived, to cover the block's actions."""

    blocks: int = 4
    """Blocks per training sample (``max_chunk_size`` of the network)."""

    anchor_stride: int = 0
    """Steps between the starts of two blocks. Zero: the action horizon."""

    sampling: Sampling = "aligned"
    """``aligned``: consecutive blocks. ``multi_anchor``: the published walk about a row."""

    pad_tail: bool = False
    """Whether samples may begin near an episode's end and repeat its last row. Without it the last
    ``span`` rows start no sample, and what happens there is only ever seen with a memory."""

    def __post_init__(self) -> None:
        if not self.frame_offsets and self.action_horizon > 0:
            object.__setattr__(self, "frame_offsets", aligned_offsets(self.action_horizon))
        if self.anchor_stride == 0:
            object.__setattr__(self, "anchor_stride", self.action_horizon)
        faults = [*self._range_faults()]
        if not faults:
            aligned = self.sampling == "aligned"
            faults = self._alignment_faults() if aligned else self._walk_faults()
        if faults:
            raise ConfigError("Timing cannot be used: " + "; ".join(faults) + ".")

    @property
    def frames(self) -> int:
        """Video frames per sample, the closing one included."""
        return self.blocks * len(self.frame_offsets) + 1

    @property
    def actions(self) -> int:
        """Action rows per sample."""
        return self.blocks * self.action_horizon

    @property
    def span(self) -> int:
        """Steps from the first to the closing frame of an aligned sample."""
        return self.blocks * self.anchor_stride

    @property
    def rows_needed(self) -> int:
        """Fewest rows of an episode that hold an aligned sample."""
        # A padded sample begins with an action of its own; the rest may be repeated.
        return 1 if self.pad_tail else self.span + 1

    def _range_faults(self) -> list[str]:
        offsets = self.frame_offsets
        faults = []
        if 0 < self.action_horizon < LATENT_STRIDE:
            return [
                f"action_horizon={self.action_horizon}: the video encoder packs {LATENT_STRIDE} "
                f"frames into one, and a block has a frame a step at most: give at least "
                f"{LATENT_STRIDE}"
            ]
        if self.control_hz <= 0:
            faults.append(f"control_hz={self.control_hz} must be above 0")
        if self.action_horizon < 1:
            faults.append(f"action_horizon={self.action_horizon} must be at least 1")
        if self.blocks < 1:
            faults.append(f"blocks={self.blocks} must be at least 1")
        if self.anchor_stride < 0:
            faults.append(f"anchor_stride={self.anchor_stride} must be at least 1 (0: the horizon)")
        if offsets and (offsets[0] != 0 or list(offsets) != sorted(set(offsets))):
            faults.append(f"frame_offsets={offsets} must start at 0 and rise")
        if len(offsets) % LATENT_STRIDE:
            faults.append(
                f"{len(offsets)} frame_offsets, but the video encoder packs {LATENT_STRIDE} frames "
                f"into one: give a multiple of {LATENT_STRIDE}"
            )
        if self.sampling not in ("aligned", "multi_anchor"):
            faults.append(f"sampling={self.sampling!r} must be 'aligned' or 'multi_anchor'")
        elif self.pad_tail and self.sampling != "aligned":
            faults.append("pad_tail=True needs sampling='aligned': the published walk pads nothing")
        return faults

    def _walk_faults(self) -> list[str]:
        # The published walk keeps each row once, and a sample of shared rows is never whole.
        if self.blocks == 1 or self.anchor_stride >= self.action_horizon:
            return []
        return [
            f"anchor_stride={self.anchor_stride} is below action_horizon={self.action_horizon}: "
            "blocks would share actions; give at least the horizon"
        ]

    def _alignment_faults(self) -> list[str]:
        offsets = self.frame_offsets
        faults = []
        if self.anchor_stride != self.action_horizon:
            faults.append(
                f"anchor_stride={self.anchor_stride} differs from "
                f"action_horizon={self.action_horizon}: blocks would overlap or leave gaps"
            )
        if offsets[-1] + offsets[1] != self.action_horizon:
            faults.append(
                f"frame_offsets={offsets} do not cover action_horizon={self.action_horizon} "
                f"evenly: the last offset plus the first gap must be {self.action_horizon}, as in "
                f"frame_offsets={aligned_offsets(self.action_horizon)} (frame_offsets=() derives "
                "them; the uneven grids of published recipes are in FRAME_GRIDS)"
            )
        elif max(gaps := np.diff(offsets)) - min(gaps) > 1:
            faults.append(
                f"frame_offsets={offsets} have gaps between {min(gaps)} and {max(gaps)}; even ones "
                f"are {aligned_offsets(self.action_horizon, len(offsets))}"
            )
        return faults


class Window(NamedTuple):
    """Row indices of one sample within its episode, all int64."""

    video: NDArray[np.int64]
    """Frames, ``(blocks * offsets + 1,)``."""

    state: NDArray[np.int64]
    """One row per block, ``(blocks,)``."""

    action: NDArray[np.int64]
    """Rows of all blocks, ``(blocks * horizon,)``."""

    def is_complete(self, timing: Timing) -> bool:
        """Return whether the walk found all blocks; incomplete samples are not trained on."""
        return (
            len(self.video) == timing.frames
            and len(self.state) == timing.blocks
            and len(self.action) == timing.actions
        )


def valid_anchors(
    length: int, timing: Timing, labels: Sequence[int] | None = None
) -> NDArray[np.int64]:
    """Return every start of a complete sample in an episode of ``length`` rows.

    Args:
        length: Rows of the episode.
        timing: Grid of the sample.
        labels: Instruction index of each row; a sample keeps to one. None: one for all.

    Returns:
        Rising int64 starts for ``aligned``; for ``multi_anchor``, the rows whose walk is complete.
    """
    marks = _labels(labels, length)
    if timing.sampling == "multi_anchor":
        seeds = [
            t for t in range(length) if multi_anchor_window(t, marks, timing).is_complete(timing)
        ]
        return np.asarray(seeds, dtype=np.int64)
    starts = np.arange(_aligned_starts(length, timing), dtype=np.int64)
    # The label may change inside a sample and change back: count the changes up to each row.
    changes = np.concatenate([[0], np.cumsum(marks[1:] != marks[:-1])])
    ends = np.minimum(starts + timing.span, length - 1)
    return starts[changes[starts] == changes[ends]] if len(starts) else starts


def window(t: int, length: int, timing: Timing, labels: Sequence[int] | None = None) -> Window:
    """Return the rows of the sample at ``t``: its start, or the seed of the walk.

    Raises:
        DatasetError: ``t`` starts no complete sample; see :func:`valid_anchors`.
    """
    if timing.sampling == "multi_anchor":
        rows = multi_anchor_window(t, _labels(labels, length), timing)
        if not rows.is_complete(timing):
            raise DatasetError(
                f"the walk around row {t} of {length} finds no {timing.blocks} whole blocks: "
                "take t from valid_anchors"
            )
        return rows
    if not 0 <= t < _aligned_starts(length, timing):
        raise DatasetError(
            f"a sample at row {t} needs rows up to {t + timing.span}, the episode has {length}: "
            f"take t from valid_anchors (0..{_aligned_starts(length, timing) - 1})"
        )
    marks = _labels(labels, length)
    if np.any(marks[t : t + timing.span + 1] != marks[t]):
        raise DatasetError(
            f"the instruction changes inside the sample at row {t}: take t from valid_anchors"
        )
    starts = t + np.arange(timing.blocks, dtype=np.int64) * timing.anchor_stride
    frames = (starts[:, None] + np.asarray(timing.frame_offsets, dtype=np.int64)).ravel()
    action = np.arange(t, t + timing.actions, dtype=np.int64)
    wanted = (np.append(frames, t + timing.span), starts, action)
    # Beyond the end stands the last row; without padding nothing lies there.
    return Window(*(np.minimum(part, length - 1, dtype=np.int64) for part in wanted))


def padded_actions(t: int, length: int, timing: Timing) -> int:
    """Return how many of the last actions of the sample at ``t`` only repeat the episode's last."""
    return max(0, t + timing.actions - length) if timing.pad_tail else 0


def _aligned_starts(length: int, timing: Timing) -> int:
    """Return how many rows can start an aligned sample."""
    return max(0, length - timing.rows_needed + 1)


@dataclass(frozen=True)
class _Walk:
    """Anchors of one seed, nearest first: seed, one stride before, one after, two before, ..."""

    seed: int
    stride: int
    labels: NDArray[np.int64]
    order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        backward, forward = self._reach(-1), self._reach(+1)
        self.order.append(self.seed)
        for i in range(max(len(backward), len(forward))):
            self.order.extend(backward[i : i + 1] + forward[i : i + 1])

    def _reach(self, sign: int) -> list[int]:
        reached = []
        at = self.seed + sign * self.stride
        while 0 <= at < len(self.labels) and self.labels[at] == self.labels[self.seed]:
            reached.append(at)
            at += sign * self.stride
        return reached


def multi_anchor_window(seed: int, labels: NDArray[np.int64], timing: Timing) -> Window:
    """Return the rows that the published trainers draw around ``seed``, maybe short of a sample.

    Anchors lie whole strides from the seed, in both directions, while the instruction at the anchor
    stays the same. Frames, actions and states accept an anchor by three different end conditions
    (docs/model.md, section 8), so near an episode's end their blocks may not coincide.

    Args:
        seed: Row the walk starts from.
        labels: Instruction index of each row, ``(length,)``.
        timing: Grid, usually one of :data:`FRAME_GRIDS`.
    """
    length, anchors = len(labels), _Walk(seed, timing.anchor_stride, labels).order
    video = _video_rows([a for a in anchors if _video_fits(a, length, timing)], length, timing)
    blocks = (len(video) - 1) // len(timing.frame_offsets)
    action = sorted(a for a in [a for a in anchors if a + timing.action_horizon < length][:blocks])
    state = sorted(a for a in [a for a in anchors if a + timing.anchor_stride < length][:blocks])
    rows = [a + i for a in action for i in range(timing.action_horizon)]
    return Window(*(np.asarray(part, dtype=np.int64) for part in (video, state, rows)))


def _video_fits(anchor: int, length: int, timing: Timing) -> bool:
    return anchor + max(timing.frame_offsets[-1], timing.action_horizon - 1) < length


def _video_rows(anchors: list[int], length: int, timing: Timing) -> list[int]:
    offsets = timing.frame_offsets
    rows = sorted({a + offset for a in anchors[: timing.blocks] for offset in offsets})[
        : timing.frames
    ]
    if not rows:
        return []
    closing = rows[-1] + offsets[1]
    if closing < length:
        return [*rows, closing]
    return rows[: len(rows) - len(offsets) + 1]


def _labels(labels: Sequence[int] | None, length: int) -> NDArray[np.int64]:
    marks = np.zeros(length, np.int64) if labels is None else np.asarray(labels, dtype=np.int64)
    if marks.shape != (length,):
        raise DatasetError(
            f"labels of shape {marks.shape} for an episode of {length} rows: give one per row"
        )
    return marks


WALK_OFFSETS = tuple(range(0, 24, 3))
"""Frames of a block of the published walk, where its trainers are told no others."""

FRAME_GRIDS: Mapping[str, Timing] = {
    "official_droid": Timing(control_hz=15, action_horizon=24, sampling="multi_anchor"),
    # Offsets meant for a horizon of 24 under a stride of 16: blocks overlap, gaps vary from 1 to 3.
    "rlinf_libero_5b": Timing(
        control_hz=10,
        action_horizon=16,
        frame_offsets=WALK_OFFSETS,
        sampling="multi_anchor",
    ),
    # Eight contiguous frames of every twelve: the last third of each block is unseen.
    "rlinf_franka": Timing(
        control_hz=10,
        action_horizon=12,
        frame_offsets=tuple(range(8)),
        sampling="multi_anchor",
    ),
}
"""Grids of published recipes, by name: to continue a checkpoint on data like its own."""


def frame_grid(name: str) -> Timing:
    """Return the published grid ``name``; otherwise raise an error that lists the known ones."""
    return find(FRAME_GRIDS, "frame grid", name)


def walk_offsets(action_horizon: int) -> tuple[int, ...]:
    """Return the frames of a block that published runs with this horizon drew by the walk.

    Raises:
        ConfigError: No published run left the frames of such a block to its trainer's default.
    """
    if any(
        grid.action_horizon == action_horizon and grid.frame_offsets == WALK_OFFSETS
        for grid in FRAME_GRIDS.values()
    ):
        return WALK_OFFSETS
    grids = "; ".join(
        f"{name} (a horizon of {grid.action_horizon}, frames {_listed(grid.frame_offsets)})"
        for name, grid in sorted(
            FRAME_GRIDS.items(), key=lambda entry: entry[1].action_horizon != action_horizon
        )
    )
    raise ConfigError(
        f"which frames of a block of {action_horizon} actions does sampling_mode=multi_anchor "
        f"draw? No published run leaves them to its trainer's default ({_listed(WALK_OFFSETS)}) at "
        f"this horizon. Give data.frame_grid: {grids}; or data.video_in_chunk_offsets, such as "
        f"[{', '.join(map(str, aligned_offsets(action_horizon)))}]"
    )


def _listed(offsets: tuple[int, ...]) -> str:
    return f"{offsets[0]}, {offsets[1]} .. {offsets[-1]}"
