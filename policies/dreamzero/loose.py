"""What weights are that lie without config.json or statistics: a preset, a file, a robot.

A run that started from Wan component files leaves such weights: no folder describes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from dzrobot.declared import Flag
from dzrobot.documents import read_json
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import CheckpointError, ConfigError, preview
from dzrobot.policies.dreamzero.network.config import NetworkConfig, preset

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
