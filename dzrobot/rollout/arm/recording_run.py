"""A recording: what drives, in which environment, until how many episodes are there."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.action_conventions import check_conventions
from dzrobot.embodiments.spec import Embodiment
from dzrobot.embodiments.timing import Timing
from dzrobot.envs.teleop.devices import load_device
from dzrobot.errors import ConfigError, counted
from dzrobot.importing import is_reference, load_reference
from dzrobot.modality.window import Observation
from dzrobot.progress import TimeLeft, waiting
from dzrobot.recording import EpisodeWriter
from dzrobot.recording.checks import too_short
from dzrobot.rollout.arm.attended import Attended, EndedByDriver, attended
from dzrobot.rollout.arm.teleoperation import (
    KEYBOARD_NUMBERS,
    KeyboardActor,
    Teleoperator,
    WatchedPolicy,
    steering,
)
from dzrobot.rollout.demonstrations.record import (
    CallableActor,
    NoisyActions,
    RecordedActions,
    RecordedEnv,
    RecordedEpisode,
    ReplayActor,
)
from dzrobot.rollout.demonstrations.takeover import ExpertHelp, HelpedPolicy, Takeover
from dzrobot.rollout.demonstrations.tally import RecordingGoal, Tally, record_session
from dzrobot.rollout.environment import (
    EnvironmentFacts,
    OperatorOptions,
    accepts_same,
    anchored,
    at_full_speed,
    facts_of,
    look_at,
    made_environment,
    needed_robot,
    sized,
)
from dzrobot.rollout.episode import Actor, PolicyActor
from dzrobot.rollout.policy_spec import (
    EXPERT,
    PolicySpec,
    ResolvedPolicy,
    beside,
    load_policy,
    resolve_policy,
)

SLOW = 0.95
"""Share of the control rate below which a recording is called slow."""


@dataclass(frozen=True, kw_only=True)
class Driving:
    """What drives: one of these, or a policy and the device by which a person takes over."""

    keyboard: bool = False
    replays: Callable[[Embodiment, EnvironmentFacts], RecordedActions] | None = None
    """Reads actions that are repeated, for a robot and its environment."""

    call: str | None = None
    """``MODULE:FUNCTION``, from an observation to an action."""

    policy: PolicySpec | None = None
    device: str | None = None
    """Teleoperation device."""

    settings: Sequence[str] = ()
    """Settings of the device, each as ``KEY=VALUE``."""

    noise: float = 0.0
    """Standard deviation of what is added to the actions that are executed."""

    takeover: Takeover | None = None
    """When an expert takes over from the policy; None: never."""

    def __post_init__(self) -> None:
        """Raise ConfigError where nothing acts, or what does not go together."""
        alone = (self.keyboard, self.replays, self.call)
        if not (any(alone) or self.policy or self.device) or (self.device and any(alone)):
            raise ConfigError(
                "say what acts: one of --keyboard, --teleop, --policy, --replay and --call, or "
                "--policy with --teleop, where a person takes over"
            )
        if self.takeover is not None and (self.policy is None or self.device is not None):
            raise ConfigError(
                "--takeover lets an expert take over from a policy: give --policy, and no --teleop"
            )
        if self.settings and self.device is None:
            raise ConfigError("--teleop-arg is a setting of a device: name the device by --teleop")

    def found(self, facts: EnvironmentFacts) -> ResolvedPolicy | None:
        """Return the policy, not yet loaded; None: there is none."""
        if self.policy is None:
            return None
        return resolve_policy(self.policy, facts.robot, exact=facts.moves_an_arm)

    def check_noise(self, facts: EnvironmentFacts) -> None:
        """Raise ConfigError where noise must not be added."""
        if self.noise and facts.is_real:
            raise ConfigError(
                f"--noise {self.noise:g} moves a real arm in ways that were not asked for: leave "
                "it out; it is for emulated arms and simulators"
            )
        if self.noise and self.policy is None:
            raise ConfigError("--noise is on what a policy does: give --policy, or leave it out")

    def actor(
        self, env: gym.Env[Any, Any], own: Embodiment, facts: EnvironmentFacts,
        found: ResolvedPolicy | None,
    ) -> Actor:  # fmt: skip
        """Return what acts in ``env``, whose robot is ``own``."""
        if self.keyboard:
            return _keyboard(own)
        if self.replays is not None:
            return ReplayActor(self.replays(own, facts).to_repeat.actions, own)
        if self.call is not None:
            if not is_reference(self.call):
                raise ConfigError(f"--call {self.call!r}: write MODULE:FUNCTION")
            return CallableActor(load_reference(self.call, "--call", Callable))
        if found is None:
            return self._person(env)
        person = None if self.device is None else self._person(env)
        factory = found.spec.in_worker
        policy = load_policy(found) if factory is None else beside(factory, env)
        assert policy is not None, "every other policy is loaded"
        acting = PolicyActor(policy=policy)
        if self.takeover is not None:
            return self._helped(self.takeover, acting, own, facts)
        return acting if person is None else WatchedPolicy(acting, person)

    def _helped(
        self, takeover: Takeover, acting: PolicyActor, own: Embodiment, facts: EnvironmentFacts
    ) -> ExpertHelp:
        if facts.moves_an_arm or facts.hand is None:
            raise ConfigError(
                "--takeover needs an environment whose simulator an expert can look into, such as "
                "dzrobot/lift-v0; on an arm a person takes over by --teleop"
            )
        can = acting.policy.can
        if takeover.rule == "prediction" and not (can.predicts and can.encodes):
            raise ConfigError(
                f"--takeover expert:prediction: {type(acting.policy).__name__} predicts no video "
                "in latents; give a checkpoint, or the rule expert:stuck"
            )

        def expert(env: Any) -> Actor:
            return PolicyActor(policy=beside(EXPERT, env))

        position = facts.hand.position

        def hand(seen: Observation) -> NDArray[np.float32]:
            state: NDArray[np.float32] = np.concatenate([seen[part.key] for part in own.state])
            return state[position]

        hz = facts.control_hz or own.timing.control_hz
        return ExpertHelp(acting, expert, takeover, hand, hz)

    def _person(self, env: gym.Env[Any, Any]) -> Teleoperator:
        device = load_device(self.device or "", self.settings, env)
        if self.policy is not None and device.gives == "guidance":
            raise ConfigError(
                f"--policy with --teleop {self.device}: an arm that follows a policy cannot "
                "yield to a hand in between; take over by spacemouse or gamepad"
            )
        return Teleoperator(device, env)

    def episode_facts(self, found: ResolvedPolicy | None) -> dict[str, float | str]:
        """Return how episodes are made, as far as their rows do not show it.

        Args:
            found: The policy that acts. An expert, which knows the simulator's state, demonstrates.
        """
        known: dict[str, float | str] = {
            "teleop": self.device or "", "noise": self.noise,
            "takeover": "" if self.takeover is None else self.takeover.rule,
        }  # fmt: skip
        if found is not None and found.spec.in_worker is None:
            known |= found.named()
        return {name: value for name, value in known.items() if value}


def _keyboard(own: Embodiment) -> KeyboardActor:
    if own.action_dim != KEYBOARD_NUMBERS:
        raise ConfigError(
            f"--keyboard drives arms of {KEYBOARD_NUMBERS} numbers (6 of the hand, 1 of the "
            f"gripper), {own.tag} has {own.action_dim}; give --call MODULE:FUNCTION"
        )
    return KeyboardActor()


@dataclass(frozen=True, kw_only=True)
class RecordingRun:
    """What is recorded, where, and until when."""

    env: str
    arguments: Mapping[str, Any]
    """Keyword arguments of the environment."""

    facts: EnvironmentFacts
    """What was found of it."""

    driver: Driving
    acting: ResolvedPolicy | None
    """Policy that drives, not yet loaded; None: none does."""

    goal: RecordingGoal
    max_steps: int
    """Steps of an episode."""

    sample: Timing
    """Which samples episodes are to be long enough for."""

    whose: str
    """Robot or recipe of these samples, for people."""

    output: Path
    """Folder of the dataset."""

    format: tuple[str, bool]
    """Version of the dataset, and whether images are stored as video."""

    operator: OperatorOptions
    """How the operator of an arm is involved."""

    made: Mapping[str, float | str] = field(default_factory=dict)
    """How every episode is made; what acts is added."""


def record(run: RecordingRun, say: Callable[[str], None]) -> bool:
    """Record until the goal is reached; return whether it is, and no episode was cut short.

    The same call continues where an earlier one ended.

    Args:
        run: What is recorded.
        say: Told what came of every episode.

    Raises:
        DzrobotError: the environment, its arm or what drives cannot be used, or the dataset cannot
            be written.
    """
    driver, facts, found = run.driver, run.facts, run.acting
    given = at_full_speed(run.arguments, facts)
    if found is not None:
        given = {**anchored(run.env, found.robot), **given}
        seen = {**sized(run.env, found.robot), **run.arguments}
        if not accepts_same(run.env, seen, run.arguments):
            # The images have the size that the policy sees.
            given, facts = {**seen, **given}, look_at(run.env, None, seen)
            run = replace(run, facts=facts)
        if found.where:
            say(found.where)
    run = replace(run, made={**run.made, **driver.episode_facts(found)})
    driver.check_noise(facts)
    env = made_environment(run.env, {"max_episode_steps": run.max_steps, **given})
    if found is not None and found.spec.looks:
        check_conventions(needed_robot(run.env, facts_of(env)), found.robot)
    if driver.noise:
        env = NoisyActions(env, driver.noise)
    with waiting("loading what acts"):
        actor = driver.actor(env, needed_robot(run.env, facts), facts, found)
    with (
        attended(run.operator) as people,
        closing(env),
        _ended_by(actor, env) as driven,
    ):
        return _record(run, people, people.opened(driven), actor, say)


def _ended_by(actor: Actor, env: gym.Env[Any, Any]) -> AbstractContextManager[gym.Env[Any, Any]]:
    """Return what yields ``env``, whose episodes end when whoever drives it wants that."""
    if isinstance(actor, Teleoperator | WatchedPolicy):
        return steering(actor if isinstance(actor, Teleoperator) else actor.person, env)
    if isinstance(actor, KeyboardActor):
        return nullcontext(EndedByDriver(env, actor.wants_end))
    return nullcontext(env)


def _record(
    run: RecordingRun, people: Attended, env: gym.Env[Any, Any], actor: Actor,
    say: Callable[[str], None],
) -> bool:  # fmt: skip
    robot, goal = needed_robot(run.env, run.facts), run.goal
    hz = run.facts.control_hz or robot.timing.control_hz
    # A simulator's own clock is never late.
    expected_hz = hz if run.facts.moves_an_arm else 0.0
    left, cut_short = TimeLeft(), 0

    def ready(tally: Tally) -> None:
        people.progress(f"recording: {tally.shown(goal, left)}")

    def report(done: RecordedEpisode, tally: Tally) -> None:
        nonlocal cut_short
        cut_short += bool(done.abort)
        say(_line(done))
        for warning in _warnings(done, expected_hz, run) if done.kept else ():
            people.warn(warning)
            say(f"  WARNING: {warning}")
        say(f"  {tally.shown(goal, left)}")

    version, video = run.format
    with EpisodeWriter(run.output, robot, fps=hz, version=version, video=video) as writer:
        intervened = (lambda: actor.intervened) if isinstance(actor, HelpedPolicy) else None
        recorded = RecordedEnv(env, writer, intervened, run.made)
        tally = record_session(recorded, actor, goal, ready=ready, report=report)
        say(
            f"{counted(writer.episodes, 'episode')} in {run.output}: {tally.kept} kept as "
            f"successes, {counted(tally.failures, 'failure')}, {tally.discarded} discarded"
        )
    return not cut_short and (goal.episodes is None or tally.kept >= goal.episodes)


def _line(done: RecordedEpisode) -> str:
    status = "kept" if done.kept else "not kept"
    text = f"{counted(done.frames, 'frame')}, {done.outcome.ended}, {status}"
    if done.reason not in ("", done.outcome.ended):
        text += f": {done.reason}"
    if done.interventions:
        text += f"; a person acted in {done.interventions} of them"
    return text


def _warnings(done: RecordedEpisode, hz: float, run: RecordingRun) -> Iterator[str]:
    """Yield what training cannot use of an episode."""
    timing = run.sample
    if done.measured_hz < SLOW * hz:
        yield (
            f"{done.measured_hz:.1f} frames per second instead of {hz:g} ("
            f"{counted(done.late_steps, 'late step')}): motion will look faster in the "
            "dataset than it was"
        )
    if too_short(done.frames, timing):
        yield (
            f"too short to train on: {counted(done.frames, 'frame')}, a sample of {run.whose} "
            f"takes {timing.rows_needed} ({timing.blocks} blocks of {timing.action_horizon} "
            "actions)"
        )
    yield from done.warnings
