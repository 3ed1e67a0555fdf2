"""Evaluate a DreamZero policy in LIBERO.

    python examples/eval_libero.py
    python examples/eval_libero.py --suite libero_object --tasks 0,1 --episodes 2 --checkpoint PATH

The same as ``dzrobot eval``; ``--help`` shows every option.
"""

import sys

from dzrobot.cli import guarded

if __name__ == "__main__":
    sys.exit(guarded("eval_libero.py", sys.argv[1:], "dzrobot.commands.eval"))
