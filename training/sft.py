r"""Fine-tune DreamZero on LeRobot data: torchrun's entry, the same as ``dzrobot train``.

Usage::

    torchrun --nproc-per-node 8 training/sft.py libero_sft_dreamzero_5b \
        model.model_path=CHECKPOINT data.train_data_paths=DATASET runner.output_dir=RUN
    python training/sft.py tiny_cpu data.train_data_paths=DATASET ...
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    # A script's own folder comes first on the import path; the package is looked for beside it.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.argv[1:1] = ["train"]
    runpy.run_module("dzrobot.cli", run_name="__main__")
