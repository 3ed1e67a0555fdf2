"""DROID's arm in small images and with a short horizon: what a tiny policy of it sees."""

from dzrobot.embodiments.robots.oxe_droid import OXE_DROID
from dzrobot.embodiments.small import small

DROID_MINI = small(OXE_DROID, "droid_mini", (64, 80))
