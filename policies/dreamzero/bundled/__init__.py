"""The small checkpoint that comes with the package, so that everything runs without a download."""

import logging
from pathlib import Path

from dzrobot import __version__
from dzrobot.folders import cache_folder

EMBODIMENT = "libero_mini"
"""Robot of the bundled checkpoint."""

_FOLDER = Path(__file__).parent
_log = logging.getLogger(__name__)


def default_checkpoint() -> Path:
    """Return the folder of the bundled checkpoint.

    A copy of the source without the weights gets a random one of the same shape, in the cache
    folder; see :func:`is_trained`.
    """
    if is_trained():
        return _FOLDER
    random = cache_folder() / f"random-{EMBODIMENT}-{__version__}"
    if not (random / "config.json").is_file():
        from dzrobot.embodiments.registry import load_embodiment
        from dzrobot.policies.dreamzero.tiny import write_tiny_checkpoint

        random.parent.mkdir(parents=True, exist_ok=True)
        write_tiny_checkpoint(random, load_embodiment(EMBODIMENT))
    _log.info("no trained weights in %s; using random ones in %s", _FOLDER, random)
    return random


def is_trained() -> bool:
    """Return whether trained weights are there."""
    return (_FOLDER / "model.safetensors").is_file()
