"""Record episodes on the Franka as a LeRobot dataset.

    python examples/record_franka.py --workcell emulated --policy random --max-steps 50 --output DIR
    python examples/record_franka.py --workcell cell.yaml --keyboard --output DIR

The same as ``dzrobot record``; ``--help`` shows every option.
"""

import sys

from dzrobot.cli import guarded

if __name__ == "__main__":
    sys.exit(guarded("record_franka.py", sys.argv[1:], "dzrobot.commands.record"))
