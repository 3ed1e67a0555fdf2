"""``dzrobot collect``: demonstrations from a simulator as a LeRobot dataset."""

import argparse

from dzrobot.cluster import cluster_or
from dzrobot.commands.options import flags
from dzrobot.commands.options.policy import add_ray, read_cluster
from dzrobot.commands.options.sampling import recorded_robot
from dzrobot.errors import counted
from dzrobot.progress import progress_bar
from dzrobot.rollout.demonstrations.collection import (
    SIMULATOR,
    CollectionPlan,
    collect,
)
from dzrobot.rollout.demonstrations.tally import Tally
from dzrobot.rollout.environment import FIRST_USE

SUMMARY = "record demonstrations of the scripted expert as a LeRobot dataset"

NEXT = "dzrobot inspect-data {output} --embodiment {robot}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot collect``."""
    flags.declare(parser, CollectionPlan, env={"required": True})
    flags.add_keywords(
        parser, "--env-arg", "keyword argument of the environment, such as resolution=128"
    )
    flags.add_dataset_format(parser)
    parser.add_argument(
        "--workers", type=flags.whole(1, 1024), default=1,
        help="simulators at the same time, without --ray",
    )  # fmt: skip
    add_ray(parser)
    parser.add_argument("--output", type=flags.output, required=True, help="folder of the dataset")


def run(arguments: argparse.Namespace) -> int:
    """Collect, or resume collecting."""
    plan = CollectionPlan(
        **flags.said(arguments, CollectionPlan),
        env_arguments=flags.keywords(arguments.env_arg, {"max_episode_steps": "--max-steps"}),
    )
    with progress_bar("episodes", hint=FIRST_USE) as advance:

        def show(tally: Tally) -> None:
            text = f"episodes ({counted(tally.attempts, 'attempt')})"
            advance(tally.kept, plan.episodes, text)

        with cluster_or(arguments.workers, read_cluster(arguments.ray), SIMULATOR) as workers:
            done = collect(
                plan, arguments.output, format=(arguments.version, arguments.video),
                workers=workers, report=show,
            )  # fmt: skip
    arguments.robot = recorded_robot(arguments.output, plan.embodiment)
    print(
        f"{counted(done.kept, 'episode')} in {arguments.output} "
        f"({counted(done.attempts, 'attempt')}, "
        f"{done.kept / max(1, done.attempts):.0%} succeeded)"
    )
    return 0
