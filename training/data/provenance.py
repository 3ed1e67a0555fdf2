"""Whether statistics were made from the data they are used with."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dzrobot.documents import read_json, validated
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import StatisticsError, preview
from dzrobot.modality.stats import ACTION_HORIZON, RELATIVE_KEYS

_log = logging.getLogger(__name__)

PROVENANCE = "provenance"
"""Field beside ``statistics``: what the numbers were made from."""


class Provenance(BaseModel):
    """What statistics were made from."""

    datasets: list[str]
    anchor_stride: int
    sampling: str


class RecordedProvenance(BaseModel):
    """An entry of ``metadata.json``, in the part that says where it comes from."""

    provenance: Provenance | None = None


def provenance(embodiment: Embodiment, identities: Sequence[str]) -> dict[str, Any]:
    """Return the fields that tie statistics to datasets, grid and relative parts."""
    timing = embodiment.timing
    relative = [part.name for part in embodiment.action if part.reference is not None]
    return {
        RELATIVE_KEYS: relative,
        ACTION_HORIZON: timing.action_horizon,
        PROVENANCE: {
            "datasets": sorted(identities),
            "anchor_stride": timing.anchor_stride,
            "sampling": timing.sampling,
        },
    }


def check_provenance(
    metadata: str | Path | Mapping[str, Any], embodiment: Embodiment, identities: Sequence[str],
    *, inherited: bool = False,
) -> None:  # fmt: skip
    """Check that statistics were made from the recordings they are used with.

    Statistics without such a note, those of published checkpoints, are taken as they are.

    Args:
        metadata: The statistics.
        embodiment: The robot.
        identities: What the recordings are, as their catalogs say.
        inherited: Whether they are those of the checkpoint that a run starts from, which go on
            being used whatever it is trained on next.

    Raises:
        StatisticsError: ``metadata`` says that it was made from other recordings, or otherwise.
    """
    if isinstance(metadata, Mapping):
        content = validated(
            dict(metadata), dict[str, RecordedProvenance], "metadata", StatisticsError
        )
    else:
        content = read_json(Path(metadata), dict[str, RecordedProvenance], StatisticsError)
    if embodiment.tag not in content:
        raise StatisticsError(
            f"no statistics for {embodiment.tag!r}; there are some for {preview(content)}"
        )
    note = content[embodiment.tag].provenance
    if note is None:
        _log.info("the statistics of %s do not say which data made them", embodiment.tag)
        return
    unknown = sorted(set(identities) - set(note.datasets))
    if unknown and inherited:
        _log.info(
            "%s is normalized by the statistics of the checkpoint, which were made from other "
            "recordings", embodiment.tag,
        )  # fmt: skip
    elif unknown:
        raise StatisticsError(
            f"the statistics of {embodiment.tag!r} were made from {len(note.datasets)} other "
            f"dataset(s); {len(unknown)} of the {len(identities)} given changed since, or were "
            "never measured. Make them again: dzrobot stats "
            f"{embodiment.tag} --dataset PATH... --output metadata.json"
        )
    if not embodiment.relative_keys:
        return
    there = (note.anchor_stride, note.sampling)
    here = (embodiment.timing.anchor_stride, embodiment.timing.sampling)
    if there != here:
        raise StatisticsError(
            f"the relative actions of {embodiment.tag!r} were measured with anchor_stride and "
            f"sampling {there}, this run uses {here}: measure again with `dzrobot stats --recipe "
            "RECIPE`, or with --sampling-mode, --frame-grid and --action-horizon"
        )
