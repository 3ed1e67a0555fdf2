"""The real Franka in small images and with a short horizon: what a tiny policy of it sees."""

from dzrobot.embodiments.robots.franka_pnp import FRANKA_PNP
from dzrobot.embodiments.small import small

FRANKA_MINI = small(FRANKA_PNP, "franka_mini", (64, 64))
