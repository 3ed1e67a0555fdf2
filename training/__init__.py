"""Fine-tuning: recipes, data, the trainer and its checkpoints."""

from typing import TYPE_CHECKING

from dzrobot.importing import lazy_exports

if __name__ != "dzrobot.training":
    raise ImportError(
        f"this package is dzrobot.training, not {__name__}: write `import dzrobot.training`"
    )

if TYPE_CHECKING:
    from dzrobot.policies.dreamzero.tiny import write_tiny_checkpoint
    from dzrobot.training.config import SFTConfig
    from dzrobot.training.data.statistics import measure
    from dzrobot.training.launch import train
    from dzrobot.training.recipe import load_recipe

__all__ = [
    "SFTConfig",
    "load_recipe",
    "measure",
    "train",
    "write_tiny_checkpoint",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "SFTConfig": "dzrobot.training.config",
        "load_recipe": "dzrobot.training.recipe",
        "measure": "dzrobot.training.data.statistics",
        "train": "dzrobot.training.launch",
        "write_tiny_checkpoint": "dzrobot.policies.dreamzero.tiny",
    },
)
