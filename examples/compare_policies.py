"""Evaluate two policies from Python, on the same episodes, and compare them.

    python examples/compare_policies.py
    python examples/compare_policies.py --env dzrobot/lift-v0 --policies expert hold --episodes 5

Start from here for a sweep over checkpoints. A policy is a checkpoint, ``random``, ``hold``,
``expert`` or ``module:factory``. The same command resumes an interrupted run. `dzrobot eval` and
`dzrobot compare` do the same at the command line, with tables.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from dzrobot import evaluate
from dzrobot.errors import DzrobotError
from dzrobot.rollout import (
    PROTOCOLS,
    EvalProgress,
    EvalSpec,
    EvaluationRequest,
    PolicySpec,
    RunOptions,
    compare,
    prepare,
    read_results,
)


def main(words: list[str] | None = None) -> int:
    """Evaluate both; print their success rates and the difference."""
    arguments = parse(words)
    folders = []
    for name in arguments.policies:
        spec = EvalSpec(
            protocol=PROTOCOLS["custom"], env=arguments.env, episodes=arguments.episodes
        )
        prepared = prepare(EvaluationRequest(spec=spec, policy=PolicySpec(name=name)))
        folder = arguments.output / name.replace("/", "-").replace(":", "-")
        summary = evaluate(
            prepared,
            folder,
            RunOptions(workers=arguments.workers, videos="none"),
            progress(name),
        )
        print(f"{name}: {summary.total.successes} of {summary.total.episodes} succeeded")
        folders.append(folder)
    (found,) = compare([read_results(folder) for folder in folders])
    print(
        f"difference {100 * found.total.difference:+.0f} points, 95 % interval "
        f"{100 * found.low:+.0f} to {100 * found.high:+.0f}, McNemar p = {found.p:.3f}"
    )
    return 0


def progress(name: str) -> Callable[[EvalProgress], None]:
    """Return a function that prints the progress of the evaluation of ``name``."""

    def show(far: EvalProgress) -> None:
        print(f"{name}: {far.done} of {far.total}")

    return show


def parse(words: list[str] | None) -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="dzrobot/point-v0", help="Gymnasium id")
    parser.add_argument(
        "--policies", nargs=2, default=["hold", "add_a_policy:Approach"], help="base, candidate"
    )
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--workers", type=int, default=0, help="simulators at the same time")
    parser.add_argument("--output", type=Path, default=Path("results") / "compare_policies")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DzrobotError as error:
        sys.exit(f"compare_policies.py: {error}")
