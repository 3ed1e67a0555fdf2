"""What training showed the network, in small: kept in the passport, compared at the first action.

A policy that acts on turned images, or on a state in other units, raises no error and succeeds
never. What it is given first is compared with what its training data begin with; nothing is
compared for checkpoints whose passport does not have this.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from dzrobot.documents import shorten
from dzrobot.embodiments.spec import Embodiment
from dzrobot.modality.window import Observation

SIDE = 32
"""Pixels of a mean image's sides."""

MOST_INSTRUCTIONS = 64
"""Instructions that are kept; where there are more, none is called unknown."""

LONGEST_INSTRUCTION = 300
"""Characters that are kept of one."""

QUANTILES = (0.0, 0.01, 0.5, 0.99, 1.0)
"""Which quantiles of a state number are kept, over all rows that were looked at."""

_SPREAD = 1.5
_LEAST = 2.0
_OTHER_SCENE = 3.0
_BEYOND = 0.5
_FEW = 0.05
_ZERO = 1e-9

Floats = NDArray[np.float64]

_MOST_NUMBERS = 1024
_EXACT: ConfigDict = ConfigDict(extra="forbid")
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# JSON has lists where these values are tuples.
_Row = Annotated[tuple[_Number, ...], Field(strict=False, max_length=_MOST_NUMBERS)]
_Rows = Annotated[tuple[_Row, ...], Field(strict=False)]
_Text = Annotated[str, Field(max_length=LONGEST_INSTRUCTION)]
_Side = Annotated[int, Field(strict=True, ge=1, le=10**5)]
_Size = Annotated[tuple[_Side, _Side], Field(strict=False)]
_Texts = Annotated[tuple[_Text, ...], Field(strict=False, max_length=MOST_INSTRUCTIONS)]


@dataclass(frozen=True, kw_only=True)
class FirstImages:
    """One view at the beginning of episodes."""

    __pydantic_config__: ClassVar[ConfigDict] = _EXACT

    mean: Annotated[str, Field(max_length=2 * SIDE * SIDE * 3)]
    """Mean image, ``SIDE`` x ``SIDE`` x RGB bytes in base64."""

    spread: Annotated[float, Field(strict=True, ge=0, le=255)]
    """Largest difference, of 255, of an episode's image from the mean of the others."""

    def __post_init__(self) -> None:
        try:
            size = len(base64.b64decode(self.mean, validate=True))
        except binascii.Error as error:
            raise ValueError(f"a mean image is base64: {error}") from error
        if size != SIDE * SIDE * 3:
            raise ValueError(f"a mean image has {SIDE * SIDE * 3} bytes, and this has {size}")

    @classmethod
    def of(cls, images: NDArray[np.uint8]) -> "FirstImages":
        """Return the summary of first images (N, ``SIDE``, ``SIDE``, 3), see :func:`in_small`."""
        small = images.astype(np.float64)
        mean = small.mean(0)
        # Against the others: with few episodes, a mean that holds the image itself lies near it.
        share = len(small) / max(len(small) - 1, 1)
        away = share * np.abs(small - mean).mean((1, 2, 3))
        text = base64.b64encode(mean.round().astype(np.uint8).tobytes()).decode("ascii")
        return cls(mean=text, spread=min(float(away.max()), 255.0))

    @property
    def image(self) -> NDArray[np.uint8]:
        """Return the mean image (``SIDE``, ``SIDE``, 3)."""
        flat = np.frombuffer(base64.b64decode(self.mean), np.uint8)
        return flat.reshape(SIDE, SIDE, 3)


@dataclass(frozen=True, kw_only=True)
class StateRange:
    """The numbers of one state part."""

    __pydantic_config__: ClassVar[ConfigDict] = _EXACT

    quantiles: _Rows
    """(5, D): :data:`QUANTILES` over all rows that were looked at."""

    first: _Rows
    """(3, D): least, median and largest number in first rows."""

    def __post_init__(self) -> None:
        widths = {len(row) for row in (*self.quantiles, *self.first)}
        if (len(self.quantiles), len(self.first), len(widths)) != (len(QUANTILES), 3, 1):
            raise ValueError(f"a state's range has {len(QUANTILES)} and 3 rows of one width")

    @classmethod
    def of(cls, rows: NDArray[np.floating], first: NDArray[np.floating]) -> "StateRange":
        """Return the summary of all rows (N, D) and of first rows (M, D)."""
        every, starts = (
            np.quantile(np.asarray(values, np.float64), at, axis=0)
            for values, at in ((rows, QUANTILES), (first, (0.0, 0.5, 1.0)))
        )
        return cls(quantiles=_plain(every), first=_plain(starts))

    @property
    def width(self) -> int:
        """Return how many numbers there are."""
        return len(self.first[0])


@dataclass(frozen=True, kw_only=True)
class TrainedInputs:
    """What training showed the network of one robot."""

    __pydantic_config__: ClassVar[ConfigDict] = _EXACT

    instructions: _Texts
    """The first :data:`MOST_INSTRUCTIONS` of them, sorted."""

    tasks: Annotated[int, Field(strict=True, ge=0, lt=2**31)]
    """How many there were."""

    fps: Annotated[float, Field(strict=True, gt=0, le=1e5)]
    """Rows per second, as the data say."""

    images: Mapping[str, FirstImages]
    """By view."""

    states: Mapping[str, StateRange]
    """By key."""

    settle_steps: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None
    """Steps that the environment waited before an episode, where the data say it."""

    execute: Annotated[int, Field(strict=True, ge=1, lt=2**20)] | None = None
    """Rows of a plan that the robot executes unless it is told otherwise."""

    resized_from: Mapping[str, _Size] = field(default_factory=dict)
    """Size (height, width) that was recorded, by view whose pictures were small copies of it."""

    def unlike(self, observation: Observation, robot: Embodiment) -> list[str]:
        """Return what is unlike the beginning of the training data, one phrase for each key.

        Args:
            observation: The first of an episode, one image a view.
            robot: Who acts.
        """
        return [
            *self._images(observation),
            *self._states(observation, robot),
            *self._instruction(str(observation[robot.language])),
        ]

    def _images(self, observation: Observation) -> Iterator[str]:
        from dzrobot.modality import input_variants as variants

        seen = {key: observation[key] for key in self.images if key in observation}
        live = {key: in_small(np.asarray(image, np.uint8)) for key, image in seen.items()}
        recorded = {key: self.images[key].image for key in live}
        for key, image in live.items():
            spread = self.images[key].spread
            away = np.abs(recorded[key].astype(np.float64) - image).mean()
            if away <= max(_LEAST, _SPREAD * spread):
                continue
            fit = variants.fit_images(key, [recorded], [live])
            other = max(2 * variants.OTHER_IMAGE, _OTHER_SCENE * spread)
            if fit.is_variant or fit.as_is > other:
                yield f"{key} is {fit.words or 'something else, however it is changed'}"

    def _states(self, observation: Observation, robot: Embodiment) -> Iterator[str]:
        keys = [key for key in robot.state_keys if key in self.states]
        fits = [self.states[key].width == np.size(observation[key]) for key in keys]
        if not keys or not all(fits):
            return
        ranges = [self.states[key] for key in keys]
        quantiles = np.concatenate([np.array(one.quantiles) for one in ranges], axis=1)
        first = np.concatenate([np.array(one.first) for one in ranges], axis=1)
        live = np.concatenate([np.ravel(observation[key]).astype(np.float64) for key in keys])
        room = np.maximum(_BEYOND * (quantiles[-1] - quantiles[0]), _FEW)
        wrong = np.flatnonzero((live < first[0] - room) | (live > first[2] + room))
        if not len(wrong):
            return
        scale = room + first[2] - first[0]
        yield f"{' and '.join(keys)}: {_explained(first[1], live, scale, wrong)}"

    def _instruction(self, text: str) -> Iterator[str]:
        known = {_bare(one) for one in self.instructions}
        given = _bare(text[:LONGEST_INSTRUCTION])
        if self.tasks > len(self.instructions) or not known or given in known:
            return
        if self.tasks == 1:
            trained = f"not the one that it was trained on, {shorten(self.instructions[0])}"
        else:
            trained = f"none of the {self.tasks} that it was trained on"
        yield f"the instruction {shorten(text)} is {trained}"


def _explained(median: Floats, live: Floats, scale: Floats, wrong: NDArray[np.intp]) -> str:
    """Return what the numbers ``wrong`` of a live state (S,) are of the median first one (S,)."""
    from dzrobot.modality import input_variants as variants

    def off(factor: float) -> float:
        unit = max(abs(factor), 1.0) * scale[wrong]
        changed = np.abs((factor - 1) * median[wrong]) / unit
        # What is about zero is about the same in all units, and says nothing.
        told = changed.max() > _BEYOND
        away = np.abs(live - factor * median)[wrong] / (abs(factor) * scale[wrong])
        return float(away.max()) if told else float("inf")

    if np.abs(live[wrong]).max() < _ZERO:
        return variants.said_of(wrong, "are 0 throughout")
    # Together first: near zero, a single number fits many factors.
    words, factor = min(variants.FACTORS.items(), key=lambda one: off(one[1]))
    if off(factor) < 1:
        return variants.said_of(wrong, f"hold {words} what was recorded")
    return variants.explain_numbers(median[None], live[None], scale, wrong)


def in_small(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return an image (H, W, 3) at ``SIDE`` x ``SIDE``."""
    from dzrobot.modality.input_variants import shrunk

    return shrunk(image, SIDE)


def _plain(rows: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(f"{value:.6g}") for value in row) for row in rows)


def _bare(text: str) -> str:
    """Return an instruction as two spellings of it share it."""
    return " ".join(text.casefold().split()).strip(" .!")
