"""``dzrobot replay``: a recorded episode's actions, sent to the robot again."""

import argparse
from collections.abc import Sequence
from contextlib import closing

import numpy as np

from dzrobot.commands.options import flags
from dzrobot.commands.options.arm import (
    add_workcell,
    check_full_speed,
    workcell_arguments,
)
from dzrobot.diagnostics.recorded import load_recording
from dzrobot.embodiments.spec import Part
from dzrobot.errors import StoppedError
from dzrobot.rollout.arm.attended import attended
from dzrobot.rollout.demonstrations.record import replay
from dzrobot.rollout.environment import (
    OperatorOptions,
    at_full_speed,
    look_at,
    made_environment,
    needed_robot,
)

NEXT = "dzrobot doctor data {dataset}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot replay``."""
    parser.description = (
        "Send the actions of a recorded episode to the environment again, through the same limits, "
        "and say how far the arm ended up from where it was then."
    )
    parser.add_argument("dataset", type=flags.path, help="folder of a LeRobot dataset")
    parser.add_argument("--episode", type=flags.episode_number, default=0, help="which episode")
    add_workcell(parser)
    flags.declare(parser, OperatorOptions)


def run(arguments: argparse.Namespace) -> int:
    """Replay, print the comparison, and return 1 when the episode was cut short."""
    given = workcell_arguments(arguments)
    facts = look_at(arguments.env, None, given)
    robot = needed_robot(arguments.env, facts)
    check_full_speed(arguments, facts)
    recording = load_recording(arguments.dataset, arguments.episode, robot, facts)
    steps = len(recording.actions)
    given = at_full_speed(given, facts)
    env = made_environment(arguments.env, {"max_episode_steps": steps + 1, **given})
    operator = OperatorOptions(**flags.said(arguments, OperatorOptions), title="dzrobot replay")
    with attended(operator) as people, closing(env):
        people.progress(f"replaying episode {arguments.episode} of {arguments.dataset}")
        outcome, states = replay(people.opened(env), recording, robot)
    if outcome.stop:
        raise StoppedError(f"after {outcome.steps} of {steps} recorded steps, {outcome.stop}")
    print(f"{outcome.steps} of {steps} recorded steps carried out, ended by {outcome.ended}")
    count = min(len(states), steps)
    spread = np.abs(states[:count] - recording.states[:count])
    for part, first, last in _slices(robot.state):
        worst = spread[:, first:last].max(initial=0.0)
        print(f"{part.key}: largest difference {worst:.4f}")
    if facts.hand_position is not None:
        moved = states[:count, facts.hand_position] - recording.states[:count, facts.hand_position]
        away = np.linalg.norm(moved, axis=1)
        print(f"hand: {away.mean():.4f} m away on average, {away.max(initial=0.0):.4f} m at most")
    return 0 if outcome.steps == steps or outcome.success else 1


def _slices(parts: Sequence[Part]) -> list[tuple[Part, int, int]]:
    found, start = [], 0
    for part in parts:
        found.append((part, start, start + part.dim))
        start += part.dim
    return found
