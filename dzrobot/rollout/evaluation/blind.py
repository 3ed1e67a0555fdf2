"""Several policies in turns, without the person who judges them knowing whose turn it is.

A number that is drawn once, and kept in the folder, decides which policy goes first from each start
and which folder is whose: an evaluation that was killed goes on with the same order, and the order
of one evaluation says nothing of the next.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from dzrobot import files
from dzrobot.documents import read_json
from dzrobot.errors import ProtocolError
from dzrobot.rng import numpy_generator
from dzrobot.rollout.protocol import EpisodeSpec
from dzrobot.rollout.records import LOCK_FILE, storing

BLIND_FILE = "blind.json"
SCENE_FOLDER = "scenes"
"""Photos of each start, as the first trial from it found it."""

_HIDDEN = "hidden-"
_KEY_BYTES = 16


class Draw(BaseModel):
    """What the order follows from; of names, it says only which policies there are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Drawn when the evaluation began."""

    policies: Annotated[tuple[str, ...], Field(min_length=2, strict=False)]
    """In the order in which they were given."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One policy from one start."""

    policy: int
    """Which one, counted as they were given."""

    case: EpisodeSpec


@dataclass(frozen=True, kw_only=True)
class BlindEvaluation:
    """The folder of an evaluation whose operator does not know which policy acts."""

    folder: Path
    draw: Draw
    labels: tuple[str, ...]
    """Name of each policy's folder, once all trials are done."""

    @classmethod
    def at(cls, folder: Path, policies: Sequence[str], labels: Sequence[str]) -> Self:
        """Return the evaluation in ``folder``, begun if need be. The caller holds its lock.

        Raises:
            ProtocolError: the folder holds something else, or an evaluation of other policies.
        """
        path = folder / BLIND_FILE
        if path.exists():
            draw = read_json(path, Draw, ProtocolError)
            if draw.policies != tuple(policies):
                raise ProtocolError(
                    f"{folder} holds a blind evaluation of {', '.join(draw.policies)}, not of "
                    f"{', '.join(policies)}: name them as before, or use another --output"
                )
        else:
            if others := sorted(p.name for p in folder.iterdir() if p.name != LOCK_FILE):
                raise ProtocolError(
                    f"{folder} holds {others[0]}, and no {BLIND_FILE}: a blind evaluation begins "
                    "in an empty folder; use another --output"
                )
            draw = Draw(key=secrets.token_hex(_KEY_BYTES), policies=tuple(policies))
            with storing(folder):
                files.write_json(path, draw.model_dump())
        return cls(folder=folder, draw=draw, labels=tuple(labels))

    def trials(self, cases: Sequence[EpisodeSpec]) -> Iterator[Trial]:
        """Yield every trial: from each start all policies, in an order drawn for that start."""
        count = len(self.draw.policies)
        for case in cases:
            key = (self.draw.key, case.suite, case.task_id, case.episode)
            for policy in numpy_generator("blind order", *key).permutation(count):
                yield Trial(policy=int(policy), case=case)

    def place(self, policy: int) -> Path:
        """Return the results folder of a policy: under a drawn number until it is revealed."""
        named = self.folder / self.labels[policy]
        if named.exists():
            return named
        numbers = numpy_generator("blind folders", self.draw.key).permutation(len(self.labels))
        return self.folder / f"{_HIDDEN}{int(numbers[policy]) + 1}"

    def reveal(self) -> list[Path]:
        """Give every folder the name of its policy; return them. Killed half way, do it again."""
        for policy, label in enumerate(self.labels):
            place, named = self.place(policy), self.folder / label
            if place != named:
                with storing(self.folder):
                    place.rename(named)
                    files.flush(self.folder)
        return [self.folder / label for label in self.labels]

    def scene(self, case: EpisodeSpec) -> Path:
        """Return where the photo is by which later trials from this start are set up."""
        return self.folder / SCENE_FOLDER / f"{case.name}.png"
