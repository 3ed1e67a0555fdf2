"""Run a policy on the Franka, with the same episodes and results as a LIBERO evaluation.

    python examples/run_franka.py --env-arg workcell=emulated --policy random --episodes 2
    python examples/run_franka.py --env-arg workcell=cell.yaml --checkpoint PATH --device cuda

The same as ``dzrobot eval --env dzrobot/Franka-PnP-v0``. ``--help`` shows every option.
"""

import sys

from dzrobot.cli import guarded

ROBOT = ["--env", "dzrobot/Franka-PnP-v0"]

if __name__ == "__main__":
    sys.exit(guarded("run_franka.py", [*ROBOT, *sys.argv[1:]], "dzrobot.commands.eval"))
