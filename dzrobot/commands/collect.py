"""``dzrobot collect``: demonstrations from a simulator as a LeRobot dataset."""

import argparse

from dzrobot.cluster import cluster_or
from dzrobot.commands.options import flags
from dzrobot.commands.options.policy import add_ray, read_cluster
from dzrobot.errors import counted
from dzrobot.progress import progress_bar
from dzrobot.rollout.demonstrations.collection import (
    SIMULATOR,
    CollectionPlan,
    collect,
)
from dzrobot.rollout.demonstrations.tally import Tally

SUMMARY = "record demonstrations of the scripted expert as a LeRobot dataset"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot collect``."""
    parser.add_argument(
        "--env", type=flags.text, required=True, help="Gymnasium id, such as dzrobot/lift-v0"
    )
    parser.add_argument(
        "--env-arg", action="append", default=[], metavar="KEY=VALUE",
        help="keyword argument of the environment, such as resolution=128",
    )  # fmt: skip
    parser.add_argument(
        "--embodiment", type=flags.text, help="robot (default: what the environment says)"
    )
    parser.add_argument(
        "--policy", type=flags.text, default="expert", help="expert, or module:factory"
    )
    parser.add_argument("--episodes", type=flags.whole(1), default=10, help="successes to keep")
    parser.add_argument(
        "--noise", type=flags.number(0, 1), default=0.0, help="std of noise on executed actions"
    )
    parser.add_argument(
        "--hold-steps", type=flags.whole(0), default=0, help="steps to record after success"
    )
    parser.add_argument("--max-steps", type=flags.whole(1), default=150, help="longest attempt")
    parser.add_argument(
        "--seed", "--first-seed", type=flags.seed, default=CollectionPlan.first_seed,
        help="of the first attempt; each takes the next",
    )  # fmt: skip
    parser.add_argument(
        "--starts",
        type=flags.numbers,
        help="stored initial states to begin from in turn, such as 20-49 (default: seed's)",
    )
    flags.add_dataset_format(parser)
    parser.add_argument(
        "--workers", type=flags.whole(1, 1024), default=1,
        help="simulators at the same time, without --ray",
    )  # fmt: skip
    add_ray(parser)
    parser.add_argument("--output", type=flags.path, required=True, help="folder of the dataset")


def run(arguments: argparse.Namespace) -> int:
    """Collect, or resume collecting."""
    plan = CollectionPlan(
        env=arguments.env,
        env_arguments=flags.keywords(arguments.env_arg, {"max_episode_steps": "--max-steps"}),
        embodiment=arguments.embodiment,
        policy=arguments.policy,
        episodes=arguments.episodes,
        noise=arguments.noise,
        hold_steps=arguments.hold_steps,
        max_steps=arguments.max_steps,
        first_seed=arguments.seed,
        starts=arguments.starts or (),
    )
    with progress_bar("episodes") as advance:

        def show(tally: Tally) -> None:
            text = f"episodes ({counted(tally.attempts, 'attempt')})"
            advance(tally.kept, plan.episodes, text)

        with cluster_or(arguments.workers, read_cluster(arguments.ray), SIMULATOR) as workers:
            done = collect(
                plan, arguments.output, format=(arguments.version, arguments.video),
                workers=workers, report=show,
            )  # fmt: skip
    print(
        f"{counted(done.kept, 'episode')} in {arguments.output} "
        f"({counted(done.attempts, 'attempt')}, "
        f"{done.kept / max(1, done.attempts):.0%} succeeded)"
    )
    return 0
