"""Starting and ending a training process, under torchrun or alone."""

import logging
import os
import sys
from collections.abc import Sequence

from dzrobot.errors import DzrobotError
from dzrobot.training.config import SFTConfig
from dzrobot.training.recipe import load_recipe

_log = logging.getLogger(__name__)

FAULT = 2
"""Exit code of an error that is the user's to fix."""


def main(arguments: Sequence[str]) -> int:
    """Check the recipe, train, and return the exit code; see ``training/sft.py``."""
    is_main = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    # Under `dzrobot train` the root logger is set up already, for warnings.
    logging.getLogger("dzrobot").setLevel(logging.INFO if is_main else logging.WARNING)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stderr.write("usage: sft.py RECIPE [section.field=value ...]\n")
        return FAULT
    try:
        config = load_recipe(arguments[0], arguments[1:], int(os.environ.get("WORLD_SIZE", "1")))
        return train(config)
    except DzrobotError as error:
        # Every process fails alike; one message is enough.
        if is_main or "RANK" not in os.environ:
            sys.stderr.write(f"{error}\n")
        return FAULT


def train(config: SFTConfig) -> int:
    """Run a checked configuration in this process; a termination request ends it with 0 too."""
    # Fragmentation costs large batches some gigabytes; must be set before the allocator starts.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    from dzrobot.training.build import build
    from dzrobot.training.distributed import init_distributed
    from dzrobot.training.trainer import Trainer

    world = init_distributed()
    Trainer(build(config, world)).run()
    return 0


def leave(code: int) -> None:
    """End the process: all together, flushed, without the interpreter's own shutdown.

    The gloo library may abort when its worker threads meet an interpreter that is going away.
    """
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            if code == 0:
                dist.barrier()
            dist.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
