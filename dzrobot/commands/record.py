"""``dzrobot record``: episodes on the robot as a LeRobot dataset."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from typing import Any

import gymnasium as gym

from dzrobot.commands.options import flags
from dzrobot.commands.options.arm import (
    add_attention,
    add_teleop_settings,
    add_workcell,
    check_full_speed,
    read_operator,
    workcell_arguments,
)
from dzrobot.diagnostics.recorded import load_recording
from dzrobot.embodiments.action_conventions import check_conventions
from dzrobot.embodiments.spec import Embodiment
from dzrobot.embodiments.timing import Timing
from dzrobot.envs.teleop.devices import DEVICES, load_device
from dzrobot.errors import ConfigError, counted
from dzrobot.importing import is_reference, load_reference
from dzrobot.progress import TimeLeft
from dzrobot.recording import EpisodeWriter
from dzrobot.recording.checks import too_short
from dzrobot.rollout.arm.attended import Attended, EndedByDriver, attended
from dzrobot.rollout.arm.teleoperation import (
    KEYBOARD_HELP,
    KEYBOARD_NUMBERS,
    KeyboardActor,
    Teleoperator,
    WatchedPolicy,
    steering,
)
from dzrobot.rollout.demonstrations.record import (
    CallableActor,
    NoisyActions,
    RecordedEnv,
    RecordedEpisode,
    ReplayActor,
)
from dzrobot.rollout.demonstrations.tally import RecordingGoal, Tally, record_session
from dzrobot.rollout.environment import (
    anchored,
    at_full_speed,
    look_at,
    made_environment,
    needed_robot,
)
from dzrobot.rollout.episode import Actor, PolicyActor
from dzrobot.rollout.facts import EnvironmentFacts, facts_of
from dzrobot.rollout.policy_spec import (
    PolicySpec,
    ResolvedPolicy,
    beside,
    load_policy,
    resolve_policy,
)

INSTEAD = {"--only-success": "failures are left out unless --keep-failures is given"}

COMMON = (
    "--env", "--workcell", "--output", "--keyboard", "--policy", "--teleop", "--episodes",
    "--attempts", "--keep-failures", "--max-steps", "--video", "--preview",
)  # fmt: skip
"""Flags that ``--help`` shows; ``--help-all`` shows every one."""

KEYBOARD = "keyboard"
"""Drives without being a device to hold: what other tools call ``--teleop keyboard``."""

SLOW = 0.95
"""Share of the control rate below which a recording is called slow."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot record``."""
    parser.description = (
        "Record episodes as a LeRobot dataset, until so many have succeeded. The same command "
        "continues where an earlier one ended; a crash costs the episode under way and no other. "
        f"Keyboard: {KEYBOARD_HELP}."
    )
    add_workcell(parser)
    parser.add_argument("--output", type=flags.path, required=True, help="folder of the dataset")
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
        "--device", type=flags.device, default="cpu", help="of the policy, such as cuda"
    )
    parser.add_argument(
        "--episodes", type=flags.whole(1),
        help="successes to keep, those already in the folder among them (default: 1 where no "
        "--attempts are given)",
    )  # fmt: skip
    parser.add_argument(
        "--attempts", type=flags.whole(1),
        help="end after so many, whatever they come to; what is discarded does not count",
    )  # fmt: skip
    parser.add_argument(
        "--keep-failures", action="store_true",
        help="keep failures too, with their reason; training leaves them out by default",
    )  # fmt: skip
    parser.add_argument(
        "--noise", type=flags.number(0, 10), default=0.0, metavar="STD",
        help="on the first six numbers of what a policy does; its own action is recorded, which is "
        "the way back. Not on a real arm",
    )  # fmt: skip
    parser.add_argument("--max-steps", type=flags.whole(1), default=240, help="steps per episode")
    parser.add_argument("--seed", type=flags.seed, default=0, help="of the first episode's start")
    flags.add_dataset_format(parser)
    parser.add_argument(
        "--recipe", type=flags.text,
        help="warn of episodes too short for a sample of this recipe (default: of the robot)",
    )  # fmt: skip
    add_attention(parser)


def run(arguments: argparse.Namespace) -> int:
    """Record; return 1 when an episode was cut short, or successes are missing."""
    given = workcell_arguments(arguments)
    _read_keyboard(arguments)
    _check_source(arguments)
    if arguments.teleop_arg and not arguments.teleop:
        raise ConfigError("--teleop-arg is a setting of a device: name the device by --teleop")
    facts = look_at(arguments.env, None, given)
    needed_robot(arguments.env, facts)
    check_full_speed(arguments, facts, by_person=_is_steered(arguments))
    given = at_full_speed(given, facts)
    found = _found_policy(arguments, facts)
    if found is not None:
        given = {**anchored(arguments.env, found.robot), **given}
    env = made_environment(arguments.env, {"max_episode_steps": arguments.max_steps, **given})
    if found is not None and found.spec.looks:
        check_conventions(needed_robot(arguments.env, facts_of(env)), found.robot)
    if arguments.noise:
        _check_noise(arguments, facts)
        env = NoisyActions(env, arguments.noise)
    actor = _actor(arguments, env, facts, found)
    operator = read_operator(arguments)
    log = operator.log or arguments.output.with_name(f"{arguments.output.name}.operator.jsonl")
    with (
        attended(replace(operator, title="dzrobot record", log=log, asks_reason=True)) as people,
        closing(env),
        _ended_by(actor, env) as driven,
    ):
        return _record(arguments, people.opened(driven), actor, facts, people)


def _ended_by(actor: Actor, env: gym.Env[Any, Any]) -> AbstractContextManager[gym.Env[Any, Any]]:
    """Return what yields ``env``, whose episodes end when whoever drives it wants that."""
    if isinstance(actor, Teleoperator | WatchedPolicy):
        return steering(actor if isinstance(actor, Teleoperator) else actor.person, env)
    if isinstance(actor, KeyboardActor):
        return nullcontext(EndedByDriver(env, actor.wants_end))
    return nullcontext(env)


def _read_keyboard(arguments: argparse.Namespace) -> None:
    """Take ``--teleop keyboard`` for ``--keyboard``."""
    if arguments.teleop != KEYBOARD:
        return
    if arguments.policy:
        raise ConfigError(
            f"--policy with --teleop {KEYBOARD}: a key cannot be held down, so it is not known "
            f"when it takes over; give one of {', '.join(DEVICES)}"
        )
    if arguments.keyboard:
        raise ConfigError(f"--keyboard and --teleop {KEYBOARD} are the same; give one")
    arguments.keyboard, arguments.teleop = True, None


def _check_source(arguments: argparse.Namespace) -> None:
    others = (arguments.keyboard, arguments.replay, arguments.call)
    alone = [bool(one) for one in (*others, arguments.policy, arguments.teleop)]
    if not any(alone) or (arguments.teleop and any(others)):
        raise ConfigError(
            "say what acts: one of --keyboard, --teleop, --policy, --replay and --call, or "
            "--policy with --teleop, where a person takes over"
        )


def _is_steered(arguments: argparse.Namespace) -> bool:
    """Return whether a person alone drives."""
    return not (arguments.policy or arguments.call or arguments.replay)


def _found_policy(arguments: argparse.Namespace, facts: EnvironmentFacts) -> ResolvedPolicy | None:
    """Return the policy that acts, not yet loaded; None: none does."""
    if not arguments.policy:
        return None
    wanted = PolicySpec(name=arguments.policy, device=arguments.device)
    return resolve_policy(wanted, facts.robot, exact=facts.moves_an_arm)


def _check_noise(arguments: argparse.Namespace, facts: EnvironmentFacts) -> None:
    if facts.is_real:
        raise ConfigError(
            f"--noise {arguments.noise:g} moves a real arm in ways that were not asked for: leave "
            "it out; it is for emulated arms and simulators"
        )
    if not arguments.policy:
        raise ConfigError("--noise is on what a policy does: give --policy, or leave it out")


def _record(
    arguments: argparse.Namespace,
    env: gym.Env[Any, Any],
    actor: Actor,
    facts: EnvironmentFacts,
    people: Attended,
) -> int:
    robot = needed_robot(arguments.env, facts)
    hz = facts.control_hz or robot.timing.control_hz
    # A simulator's own clock is never late.
    expected_hz = hz if facts.moves_an_arm else 0.0
    goal = _goal(arguments)
    left, cut_short, sample = TimeLeft(), 0, _sample(arguments, robot)

    def ready(tally: Tally) -> None:
        people.progress(f"recording: {tally.shown(goal, left)}")

    def report(done: RecordedEpisode, tally: Tally) -> None:
        nonlocal cut_short
        cut_short += bool(done.abort)
        print(_line(done))
        for warning in _warnings(done, expected_hz, sample) if done.kept else ():
            people.warn(warning)
            print(f"  WARNING: {warning}")
        print(f"  {tally.shown(goal, left)}")

    with EpisodeWriter(
        arguments.output, robot, fps=hz, version=arguments.version, video=arguments.video
    ) as writer:
        intervened = (lambda: actor.intervened) if isinstance(actor, WatchedPolicy) else None
        recorded = RecordedEnv(env, writer, intervened, _facts(arguments))
        tally = record_session(recorded, actor, goal, ready=ready, report=report)
        print(
            f"{counted(writer.episodes, 'episode')} in {arguments.output}: {tally.kept} kept as "
            f"successes, {counted(tally.failures, 'failure')}, {tally.discarded} discarded"
        )
    missing = goal.episodes is not None and tally.kept < goal.episodes
    return 1 if cut_short or missing else 0


def _facts(arguments: argparse.Namespace) -> dict[str, float | str]:
    """Return how episodes are made, as far as their rows do not show it."""
    facts: dict[str, float | str] = {}
    if arguments.teleop:
        facts["teleop"] = arguments.teleop
    if arguments.noise:
        facts["noise"] = arguments.noise
    return facts


def _goal(arguments: argparse.Namespace) -> RecordingGoal:
    open_ended = arguments.episodes is None and arguments.attempts is None
    return RecordingGoal(
        episodes=1 if open_ended else arguments.episodes,
        attempts=arguments.attempts,
        keep_failures=arguments.keep_failures,
        first_seed=arguments.seed,
    )


def _sample(arguments: argparse.Namespace, robot: Embodiment) -> tuple[Timing, str]:
    """Return which samples episodes are to be long enough for, and whose these are."""
    if arguments.recipe is None:
        return robot.timing, robot.tag
    # Recording needs nothing of training otherwise.
    from dzrobot.training.recipes.read import recipe_sections, robot_of_run

    sections = recipe_sections(arguments.recipe)
    planned, _, _ = robot_of_run(robot.tag, [str(arguments.output)], sections)
    return planned.timing, f"{robot.tag} in the recipe {arguments.recipe}"


def _line(done: RecordedEpisode) -> str:
    status = "kept" if done.kept else "not kept"
    text = f"{counted(done.frames, 'frame')}, {done.outcome.ended}, {status}"
    if done.reason not in ("", done.outcome.ended):
        text += f": {done.reason}"
    if done.interventions:
        text += f"; a person acted in {done.interventions} of them"
    return text


def _warnings(done: RecordedEpisode, hz: float, sample: tuple[Timing, str]) -> Iterator[str]:
    """Yield what training cannot use of an episode."""
    timing, whose = sample
    if done.measured_hz < SLOW * hz:
        yield (
            f"{done.measured_hz:.1f} frames per second instead of {hz:g} ("
            f"{counted(done.late_steps, 'late step')}): motion will look faster in the "
            "dataset than it was"
        )
    if too_short(done.frames, timing):
        yield (
            f"too short to train on: {counted(done.frames, 'frame')}, a sample of {whose} takes "
            f"{timing.rows_needed} ({timing.blocks} blocks of {timing.action_horizon} actions)"
        )
    yield from done.warnings


def _actor(
    arguments: argparse.Namespace,
    env: gym.Env[Any, Any],
    facts: EnvironmentFacts,
    found: ResolvedPolicy | None,
) -> Actor:
    own = needed_robot(arguments.env, facts)
    if arguments.keyboard:
        if own.action_dim != KEYBOARD_NUMBERS:
            raise ConfigError(
                f"--keyboard drives arms of {KEYBOARD_NUMBERS} numbers (6 of the hand, 1 of the "
                f"gripper), {own.tag} has {own.action_dim}; give --call MODULE:FUNCTION"
            )
        return KeyboardActor()
    person = None
    if arguments.teleop:
        device = load_device(arguments.teleop, arguments.teleop_arg, env)
        if arguments.policy and device.gives == "guidance":
            raise ConfigError(
                f"--policy with --teleop {arguments.teleop}: an arm that follows a policy cannot "
                "yield to a hand in between; take over by spacemouse or gamepad"
            )
        person = Teleoperator(device, env)
        if not arguments.policy:
            return person
    if arguments.replay:
        folder, episode = arguments.replay
        return ReplayActor(load_recording(folder, episode, own, facts).actions, own)
    if arguments.call:
        if not is_reference(arguments.call):
            raise ConfigError(f"--call {arguments.call!r}: write MODULE:FUNCTION")
        return CallableActor(load_reference(arguments.call, "--call", Callable))
    assert found is not None, "nothing else acts"
    policy = load_policy(found).policy
    if policy is None:
        assert found.spec.in_worker is not None, "it lives beside its environment"
        policy = beside(found.spec.in_worker, env)
    acting = PolicyActor(policy=policy)
    return acting if person is None else WatchedPolicy(acting, person)
