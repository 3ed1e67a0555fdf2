"""LIBERO's robot in small images and with a short horizon: what the tiny policy sees."""

from dzrobot.embodiments.robots.libero_sim import LIBERO_SIM
from dzrobot.embodiments.small import small

LIBERO_MINI = small(LIBERO_SIM.at_resolution(128, 128), "libero_mini", (64, 64))
