"""DROID's arm in small images and with a short horizon: what a tiny policy of it sees."""

from dataclasses import replace

from dzrobot.embodiments.robots.oxe_droid import OXE_DROID
from dzrobot.embodiments.small import small

# Its joints follow over four steps, and a plan begins at the angles that are measured: replaced
# every three steps it stalls.
DROID_MINI = replace(small(OXE_DROID, "droid_mini", (48, 64)), execute=8)
