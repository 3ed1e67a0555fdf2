"""One API for DreamZero, LIBERO and the real Franka.

``import dzrobot`` registers the Gymnasium ids; it imports no simulator, no driver and no torch. The
names below are loaded when they are used first.
"""

import os
import sys
from typing import TYPE_CHECKING

if sys.argv[:1] == ["-m"] and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109 (imports nothing more)
    # `python -m` looks in the current folder first: a numpy.py there would be taken for NumPy.
    sys.path.append(sys.path.pop(0))

from dzrobot.importing import lazy_exports
from dzrobot.registration import register_envs

if TYPE_CHECKING:
    from dzrobot.embodiments.registry import load_embodiment
    from dzrobot.embodiments.spec import Embodiment, Gripper, Part, View
    from dzrobot.embodiments.timing import Timing
    from dzrobot.errors import DzrobotError
    from dzrobot.modality.window import Observation
    from dzrobot.policies.base import Policy
    from dzrobot.policies.dreamzero.bundled import default_checkpoint
    from dzrobot.policies.dreamzero.options import PolicyOptions
    from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
    from dzrobot.recording.writer import EpisodeWriter
    from dzrobot.rollout.episode import run_episode
    from dzrobot.rollout.evaluation.evaluate import evaluate
    from dzrobot.training.run.launch import train

__version__ = "0.3.0.dev0"

__all__ = [
    "DreamZeroPolicy",
    "DzrobotError",
    "Embodiment",
    "EpisodeWriter",
    "Gripper",
    "Observation",
    "Part",
    "Policy",
    "PolicyOptions",
    "Timing",
    "View",
    "default_checkpoint",
    "evaluate",
    "load_embodiment",
    "run_episode",
    "train",
]

__getattr__, __dir__ = lazy_exports(__name__)

register_envs()
