"""``dzrobot bench``: how fast training and acting are, or are expected to be."""

import argparse

from dzrobot.errors import ConfigError

SUMMARY = "forecast the speed of training and acting"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``dzrobot bench``."""
    parser.description = (
        "Forecast how fast the published networks train and act on accelerators: both run through "
        "at full size without weights, on this machine's processor, in about a minute."
    )
    parser.add_argument(
        "--forecast", action="store_true",
        help="rehearse and compute: the only kind of result so far",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the tables."""
    if not args.forecast:
        raise ConfigError(
            "nothing to do: `dzrobot bench` computes forecasts and measures nothing yet; give "
            "--forecast"
        )
    from dzrobot.training.planning.published import forecast_tables

    for line in forecast_tables():
        print(line)
    return 0
