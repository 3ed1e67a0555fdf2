"""``python -m dzrobot COMMAND ...``: the same as ``dzrobot COMMAND ...``."""

import sys

from dzrobot.cli import main

if __name__ == "__main__":
    sys.exit(main())
