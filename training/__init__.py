"""Fine-tuning: recipes, data, the trainer and its checkpoints."""

from typing import TYPE_CHECKING

from dzrobot.importing import lazy_exports

if __name__ != "dzrobot.training":
    raise ImportError(
        f"this package is dzrobot.training, not {__name__}: write `import dzrobot.training`"
    )

if TYPE_CHECKING:
    from dzrobot.policies.dreamzero.tiny import write_tiny_checkpoint
    from dzrobot.training.data.mixture import SamplerInputs
    from dzrobot.training.data.normalization import measure
    from dzrobot.training.data.sampler import Draws, Stream
    from dzrobot.training.recipes.read import load_recipe
    from dzrobot.training.run.launch import train
    from dzrobot.training.run.plugin import Plugin, RunView
    from dzrobot.training.sft_config import SFTConfig

__all__ = [
    "Draws",
    "Plugin",
    "RunView",
    "SFTConfig",
    "SamplerInputs",
    "Stream",
    "load_recipe",
    "measure",
    "train",
    "write_tiny_checkpoint",
]

__getattr__, __dir__ = lazy_exports(__name__)
