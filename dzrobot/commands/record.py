"""``dzrobot record``: episodes on the robot as a LeRobot dataset."""

import argparse
from dataclasses import replace
from functools import partial

from dzrobot.commands.options import flags
from dzrobot.commands.options.arm import (
    add_teleop_settings,
    add_workcell,
    check_full_speed,
    workcell_arguments,
)
from dzrobot.commands.options.policy import declare_policy, read_policy
from dzrobot.commands.options.sampling import recorded_robot
from dzrobot.declared import declared
from dzrobot.diagnostics.recorded import load_recording
from dzrobot.embodiments.spec import Embodiment
from dzrobot.embodiments.timing import Timing
from dzrobot.envs.teleop.devices import DEVICES
from dzrobot.errors import ConfigError
from dzrobot.progress import waiting
from dzrobot.rollout.arm.recording_run import Driving, RecordingRun, record
from dzrobot.rollout.arm.teleoperation import KEYBOARD_HELP
from dzrobot.rollout.demonstrations.takeover import Takeover
from dzrobot.rollout.demonstrations.tally import RecordingGoal
from dzrobot.rollout.environment import OperatorOptions, look_at, needed_robot
from dzrobot.rollout.policy_spec import ELSEWHERE, PolicySpec

INSTEAD = {"--only-success": "failures are left out unless --keep-failures is given"}

COMMON = (
    "--env", "--workcell", "--output", "--keyboard", "--policy", "--teleop", "--episodes",
    "--attempts", "--keep-failures", "--max-steps", "--video", "--preview",
)  # fmt: skip
"""Flags that ``--help`` shows; ``--help-all`` shows every one."""

_NOT_SAID = (*ELSEWHERE, "noise", "video")
"""Fields of a policy that cannot be said here: ``--noise`` and ``--video`` are of the recording."""

KEYBOARD = "keyboard"
"""Drives without being a device to hold: what other tools call ``--teleop keyboard``."""

NEXT = "dzrobot inspect-data {output} --embodiment {robot}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot record``."""
    parser.description = (
        "Record episodes as a LeRobot dataset, until so many have succeeded. The same command "
        "continues where an earlier one ended; a crash costs the episode under way and no other. "
        f"Keyboard: {KEYBOARD_HELP}."
    )
    add_workcell(parser)
    parser.add_argument("--output", type=flags.output, required=True, help="folder of the dataset")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--keyboard", action="store_true", help="drive by keys")
    source.add_argument(
        "--policy",
        type=flags.text,
        metavar="NAME",
        help="checkpoint, random, hold, expert, module:factory",
    )
    source.add_argument(
        "--replay", type=flags.episode, metavar="DATASET#EPISODE", help="repeat recorded actions"
    )
    source.add_argument(
        "--call", type=flags.text, metavar="MODULE:FUNCTION", help="observation -> action"
    )
    parser.add_argument(
        "--teleop", type=flags.text, metavar="DEVICE",
        help=f"steer by {', '.join(DEVICES)}, or module:factory of an own device; with --policy: "
        f"take over from it while a button is held; {KEYBOARD} is --keyboard",
    )  # fmt: skip
    add_teleop_settings(parser)
    parser.add_argument(
        "--takeover", type=flags.text, metavar="expert:RULE",
        help="in a simulator, with --policy: an expert takes over as a person would, where the "
        "hand is stuck (expert:stuck=2, seconds), by chance (expert:random=0.2, in a second) or "
        "where the predicted video is wrong (expert:prediction=ERROR, in latents); behind it "
        ",delay=S ,lasts=S ,noise=STD",
    )  # fmt: skip
    flags.declare(parser, RecordingGoal)
    parser.add_argument(
        "--round", type=flags.whole(0), metavar="N",
        help="round of improvement that the episodes belong to; kept with them",
    )  # fmt: skip
    parser.add_argument(
        "--noise", type=flags.number(0, 10), default=0.0, metavar="STD",
        help="on the first six numbers of what a policy does; its own action is recorded, which is "
        "the way back. Not on a real arm",
    )  # fmt: skip
    parser.add_argument("--max-steps", type=flags.whole(1), default=240, help="steps per episode")
    flags.add_dataset_format(parser)
    parser.add_argument(
        "--recipe", type=flags.text,
        help="warn of episodes too short for a sample of this recipe (default: of the robot, the "
        "policy's where one drives)",
    )  # fmt: skip
    flags.declare(parser, OperatorOptions)
    declare_policy(parser.add_argument_group("with --policy"), without=_NOT_SAID)


def run(arguments: argparse.Namespace) -> int:
    """Record; return 1 when an episode was cut short, or successes are missing."""
    given, driver = workcell_arguments(arguments), _driver(arguments)
    with waiting("looking at the environment"):
        facts = look_at(arguments.env, None, given)
    robot = needed_robot(arguments.env, facts)
    steered = not (driver.policy or driver.call or driver.replays)
    check_full_speed(arguments, facts, by_person=steered)
    with waiting("looking at what acts"):
        acting = driver.found(facts)
    sample, whose = _sample(arguments, robot if acting is None else acting.robot)
    operator = OperatorOptions(**flags.said(arguments, OperatorOptions))
    log = operator.log or arguments.output.with_name(f"{arguments.output.name}.operator.jsonl")
    planned = RecordingRun(
        env=arguments.env, arguments=given, facts=facts, driver=driver, acting=acting,
        goal=_goal(arguments), max_steps=arguments.max_steps, sample=sample, whose=whose,
        output=arguments.output,
        format=(arguments.version, arguments.video),
        made={} if arguments.round is None else {"round": arguments.round},
        operator=replace(operator, title="dzrobot record", log=log, asks_reason=True),
    )  # fmt: skip
    if not record(planned, print):
        return 1
    arguments.robot = recorded_robot(arguments.output, None)
    return 0


def _driver(arguments: argparse.Namespace) -> Driving:
    """Return what drives, as the flags say."""
    by_keys, policy = arguments.teleop == KEYBOARD, None
    if by_keys and arguments.policy:
        raise ConfigError(
            f"--policy with --teleop {KEYBOARD}: a key cannot be held down, so it is not known "
            f"when it takes over; give one of {', '.join(DEVICES)}"
        )
    if by_keys and arguments.keyboard:
        raise ConfigError(f"--keyboard and --teleop {KEYBOARD} are the same; give one")
    if arguments.policy:
        policy = read_policy(arguments, arguments.policy, without=_NOT_SAID)
    for one in declared(PolicySpec):
        of_policy = one.field not in _NOT_SAID and vars(arguments)[one.dest] is not None
        if policy is None and of_policy:
            raise ConfigError(
                f"{one.option} says how a policy acts: give --policy besides, or leave it out"
            )
    replays = None
    if arguments.replay:
        replays = partial(load_recording, *arguments.replay)
    return Driving(
        keyboard=arguments.keyboard or by_keys, replays=replays, call=arguments.call or None,
        policy=policy, device=None if by_keys else arguments.teleop or None,
        settings=arguments.teleop_arg, noise=arguments.noise,
        takeover=None if arguments.takeover is None else Takeover.parsed(arguments.takeover),
    )  # fmt: skip


def _goal(arguments: argparse.Namespace) -> RecordingGoal:
    said = flags.said(arguments, RecordingGoal)
    if not said.keys() & {"episodes", "attempts"}:
        said["episodes"] = 1
    return RecordingGoal(**said)


def _sample(arguments: argparse.Namespace, robot: Embodiment) -> tuple[Timing, str]:
    """Return which samples episodes are to be long enough for, and whose these are."""
    if arguments.recipe is None:
        return robot.timing, robot.tag
    # Recording needs nothing of training otherwise.
    from dzrobot.training.recipes.read import recipe_sections, robot_of_run

    sections = recipe_sections(arguments.recipe)
    planned, _, _ = robot_of_run(robot.tag, [str(arguments.output)], sections)
    return planned.timing, f"{robot.tag} in the recipe {arguments.recipe}"
