"""One API for DreamZero, LIBERO and the real Franka.

``import dzrobot`` registers the Gymnasium ids; it imports no simulator, no driver and no torch.
"""

from dzrobot.registration import register_envs

__version__ = "0.1.0"

register_envs()
