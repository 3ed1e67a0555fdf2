"""What is evaluated: named protocols, and the exact list of episodes that follows from one."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field

from dzrobot.declared import Flag
from dzrobot.embodiments.spec import History
from dzrobot.errors import ConfigError, ProtocolError, counted, find
from dzrobot.policies.dreamzero.options import Noise
from dzrobot.registration import LIBERO_SUITES, SUITES, Suite
from dzrobot.rng import keyed_seed

Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""A whole number as a file holds it: no text, no boolean, no fraction."""

MOST_EPISODES = 1_000_000
"""Most episodes of one run; every one of them is a value in memory before the first is run."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Rules that a score depends on."""

    name: str
    """As ``--protocol`` names it."""

    suite: str | None = None
    """Suite or environment it is made for; None: any."""

    max_steps: int | Mapping[str, int] | None
    """Steps per episode, for all suites or by suite; None: as the environment is registered."""

    settle_steps: int | None
    """Steps in which objects come to rest before the episode; None: the environment's own."""

    episodes: int
    """Episodes per task."""

    slots: int | None = None
    """Environments that run side by side. With ``rounds``, they decide which episodes are run, and
    with ``slot`` noise, in which of them each is run. None: every episode on its own."""

    rounds: int | None = None
    """Episodes of each slot: the list of a suite is gone through in whole rounds of ``slots``; what
    fills no round is left out, and after the last one it starts over. None: every episode once."""

    history: History | None = None
    """Frames the policy is shown; None: the embodiment's."""

    noise: Noise = "keyed"
    """``keyed``: by seed, suite, task and episode. ``fixed``: the same for every plan. ``slot``: a
    row of its own, the same for every plan, for each of ``slots``."""

    stop_at_success: bool = True
    """Whether an episode ends with its first success. An episode counts as a success if the goal
    held at any of its steps, so this changes the time taken, not the score."""


PROTOCOLS: Mapping[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            name="standard-10x50",
            max_steps={suite.name: suite.max_steps for suite in LIBERO_SUITES},
            settle_steps=10,
            episodes=50,
        ),
        # What RLinf's code runs since 2026-06-18. How many environments ran side by side there
        # depends on the machine, so the noise is that of the first.
        Protocol(
            name="rlinf-500",
            max_steps=480,
            settle_steps=15,
            episodes=50,
            history="off",
            noise="fixed",
        ),
        # What its code made of 512 trajectories on 2026-05-25, with one worker: 500 starts are
        # seven whole rounds of 64, and the eighth is the first again.
        Protocol(
            name="rlinf-may",
            max_steps=480,
            settle_steps=15,
            episodes=50,
            slots=64,
            rounds=8,
            history="off",
            noise="slot",
        ),
        Protocol(
            name="lift-100",
            suite="dzrobot/lift-v0",
            max_steps=150,
            settle_steps=10,
            episodes=100,
        ),
        Protocol(name="custom", max_steps=None, settle_steps=None, episodes=10),
    )
}
"""The protocols that can be asked for by name."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRules:
    """Where an episode begins and when it is over."""

    seed: int | None = None
    """Seed of the environment's reset; None: it draws its own."""

    init_state_id: int | None = None
    """Stored initial state it begins from; None: the seed decides."""

    max_steps: int | None = None
    """Steps after which it is over; None: the environment ends it, as its time limit says."""


@dataclass(frozen=True, kw_only=True)
class EpisodeSpec(EpisodeRules):
    """One episode to be run; everything about it is decided beforehand.

    Kept in a file of lines, and checked when it is read back: hence the types that say more.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    env: str
    """Gymnasium id."""

    arguments: Mapping[str, Any]
    """Keyword arguments of ``gym.make`` that belong to the task."""

    suite: str
    task_id: Count
    episode: Count
    """Counts from 0 within its task."""

    seed: Count
    init_state_id: Count | None
    max_steps: Count | None
    noise_key: Count
    """Number that a policy's noise depends on: all of it if keyed, its remainder by the slots if
    each slot has its own."""

    repeat_of: Count | None = None
    """Episode of the same task that had the same initial state before."""

    @property
    def name(self) -> str:
        """Return a name that is unique in a run and fit for a file."""
        suite = self.suite.replace("/", "_").replace(":", "_")
        return f"{suite}-task{self.task_id:02d}-episode{self.episode:03d}"


EnvironmentKey = tuple[object, ...]
"""What two cases must have in common to run in one environment."""


def environment_key(case: EpisodeSpec) -> EnvironmentKey:
    """Return what two cases must have in common to run in one environment."""
    return case.env, tuple(sorted(case.arguments.items())), case.max_steps


@dataclass(frozen=True, kw_only=True)
class EvalSpec:
    """What of a protocol is to be run, and what is done otherwise."""

    protocol: Annotated[Protocol, Flag("rules of a published score", words=PROTOCOLS)]
    """Its rules; ``PROTOCOLS`` has the known ones."""

    suites: Annotated[tuple[str, ...], Flag(
        "LIBERO suites, such as libero_object; several: a,b", name="suite", kind="names",
    )] = ()  # fmt: skip
    """LIBERO suites; or one environment in ``env``."""

    env: Annotated[str | None, Flag(
        "or a Gymnasium id, such as dzrobot/lift-v0 or module:id",
    )] = None  # fmt: skip
    """Gymnasium id of one environment, instead of suites."""

    tasks: Annotated[tuple[int, ...] | None, Flag(
        "numbers of tasks, such as 0,1,5-7 (default: all)", kind="numbers",
    )] = None  # fmt: skip
    """None: every task of a suite, the only one of an environment."""

    episodes: Annotated[int | None, Flag("episodes per task", least=1)] = None
    """Per task. None: the protocol's number."""

    first_episode: Annotated[int, Flag(
        "number of each task's first episode; those before it are left out",
        metavar="N", least=0, most=MOST_EPISODES,
    )] = 0  # fmt: skip
    """First episode of each task; those before it are left out, as where they were used to select a
    policy."""

    max_steps: Annotated[int | None, Flag("steps per episode", least=1)] = None
    """Most steps of an episode. None: the protocol's limit."""

    seed: Annotated[int, Flag("of environments and keyed noise", least=0, most=2**32 - 1)] = 0
    """Seed of the environments, and part of every noise key."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of every environment; they win over the protocol's."""

    policy_changes: tuple[str, ...] = ()
    """What the policy does other than the protocol says, one sentence each."""

    @classmethod
    def named(
        cls,
        protocol: Protocol | None = None,
        suites: Sequence[str] = (),
        env: str | None = None,
        **said: Any,
    ) -> Self:
        """Return what was said, laid over what a protocol says.

        Args:
            protocol: As `PROTOCOLS` has it; None: ``standard-10x50`` of suites, else ``custom``.
            suites: LIBERO suites.
            env: Gymnasium id, where no suite is named. None: the protocol's.
            said: Further fields by name.

        Raises:
            ConfigError: nothing says which episodes.
        """
        rules = protocol or PROTOCOLS["standard-10x50" if suites else "custom"]
        env = env or rules.suite
        if not suites and env is None:
            raise ConfigError(
                f"--protocol {rules.name} says how episodes are run, not which: give --suite or "
                "--env"
            )
        return cls(protocol=rules, suites=tuple(suites), env=env, **said)

    @property
    def environments(self) -> tuple[str, ...]:
        """Return the Gymnasium ids; those of suites as they are called."""
        return tuple(f"dzrobot/{suite}-v0" for suite in self.suites) or (str(self.env),)

    @property
    def label(self) -> str:
        """Return what a folder of its results is called after."""
        return "-".join(self.suites) or re.split("[/:]", str(self.env))[-1]

    @property
    def changes(self) -> tuple[str, ...]:
        """Return how this differs from the named protocol, one sentence each."""
        found = []
        if self.tasks is not None:
            found.append(f"tasks {', '.join(map(str, self.tasks))} only")
        if self.episodes not in (None, self.protocol.episodes):
            found.append(
                f"{counted(self.episodes, 'episode')} per task, not {self.protocol.episodes}"
            )
        if self.first_episode:
            found.append(f"episodes from {self.first_episode} on")
        if self.max_steps is not None and self.max_steps != self.protocol.max_steps:
            found.append(f"at most {self.max_steps} steps")
        found += [f"{name}={value!r}" for name, value in sorted(self.arguments.items())]
        found += self.policy_changes
        return tuple(found) if self.protocol.name != "custom" else ()


DEFAULT = EvalSpec(
    protocol=PROTOCOLS["standard-10x50"], suites=("libero_object",), tasks=(0, 3, 7), episodes=2
)
"""What is evaluated where nothing is named: a few episodes of a few tasks."""


def plan_episodes(spec: EvalSpec) -> tuple[EpisodeSpec, ...]:
    """Return every episode of ``spec``: by suite, task and episode; repeats after the rest.

    Raises:
        ConfigError: neither or both of suites and environment, or no episode at all.
        ProtocolError: the protocol is made for something else, or asks for more initial states
            than there are.
        UnknownNameError: no such suite.
    """
    if bool(spec.suites) == (spec.env is not None):
        raise ConfigError("name either LIBERO suites or one environment")
    wanted = spec.protocol.suite
    if wanted is not None and spec.env != wanted:
        given = spec.env or ", ".join(spec.suites)
        raise ProtocolError(
            f"protocol {spec.protocol.name} is made for {wanted}, not for {given}; "
            "leave --protocol out, or use --protocol custom"
        )
    names = spec.suites or (str(spec.env),)
    per_task = spec.protocol.episodes if spec.episodes is None else spec.episodes
    if per_task * len(spec.tasks or (0,)) * len(names) > MOST_EPISODES:
        raise ConfigError(
            f"{per_task} episodes per task are too many; a run has at most {MOST_EPISODES}"
        )
    episodes_of = _of_suite if spec.protocol.rounds is None else _in_rounds
    cases = [case for name in names for case in episodes_of(spec, name)]
    if not cases:
        raise ConfigError(
            f"no episode is selected that {spec.protocol.name} has: give --episodes 1 or "
            "more, or other --tasks"
        )
    return tuple(cases)


def shard_of(cases: Sequence[EpisodeSpec], index: int, count: int) -> tuple[EpisodeSpec, ...]:
    """Return part ``index`` (from 0) of ``count`` of a run; tasks are spread over the parts."""
    if not 0 <= index < count:
        raise ConfigError(f"shard {index}/{count} does not exist; write 0/{count} to {count - 1}/N")
    return tuple(cases[index::count])


def _of_suite(spec: EvalSpec, name: str) -> Iterator[EpisodeSpec]:
    suite = _suite(spec, name)
    tasks = spec.tasks if spec.tasks is not None else range(suite.tasks if suite else 1)
    episodes = spec.episodes
    if episodes is None:
        episodes = spec.protocol.episodes
    first = spec.first_episode
    if suite is not None and first + episodes > suite.init_states:
        after = f" after the first {first}" if first else ""
        raise ProtocolError(
            f"{episodes} episodes per task{after}, but a task of {name} has {suite.init_states} "
            f"initial states; ask for at most {max(0, suite.init_states - first)}"
        )
    for task in tasks:
        if suite is not None and task not in range(suite.tasks):
            raise ConfigError(f"{name} has no task {task}; it has 0 to {suite.tasks - 1}")
        for episode in range(first, first + episodes):
            yield _case(spec, name, task, episode)


def _suite(spec: EvalSpec, name: str) -> Suite | None:
    """Return the suite that ``name`` is, None where it is an environment."""
    return find(SUITES, "suite", name) if spec.env is None else None


def _in_rounds(spec: EvalSpec, name: str) -> Iterator[EpisodeSpec]:
    """Yield what is asked for of a protocol in rounds: a part has the episodes of the whole."""
    protocol = spec.protocol
    wanted_cases = {case.name for case in _of_suite(spec, name)}
    starts = list(_of_suite(replace(spec, tasks=None, episodes=None, first_episode=0), name))
    slots, rounds = protocol.slots or 1, protocol.rounds or 1
    whole = starts[: len(starts) // slots * slots]
    if not whole:
        raise ProtocolError(
            f"protocol {protocol.name} runs {slots} episodes side by side, but {name} has "
            f"{len(starts)}: name a LIBERO suite, or use --protocol custom"
        )
    for position in range(slots * rounds):
        lap, place = divmod(position, len(whole))
        case = whole[place]
        if case.name not in wanted_cases:
            continue
        if lap:
            again = _case(spec, name, case.task_id, case.episode + lap * protocol.episodes)
            case = replace(again, init_state_id=case.init_state_id, repeat_of=case.episode)
        # The key keeps its size and tells the slot as well.
        yield replace(case, noise_key=case.noise_key // slots * slots + position % slots)


def _case(spec: EvalSpec, name: str, task: int, episode: int) -> EpisodeSpec:
    suite = _suite(spec, name)
    tasked = suite is not None or spec.tasks is not None
    return EpisodeSpec(
        env=name if suite is None else suite.env,
        arguments={"task_id": task} if tasked else {},
        suite=name,
        task_id=task,
        episode=episode,
        # Where the seed chooses the start, counting up visits each start once.
        seed=keyed_seed("env", spec.seed, name, task, episode) if suite else spec.seed + episode,
        init_state_id=episode if suite else None,
        max_steps=_steps(spec, name),
        noise_key=keyed_seed("noise", spec.seed, name, task, episode),
    )


def _steps(spec: EvalSpec, name: str) -> int | None:
    if spec.max_steps is not None:
        return spec.max_steps
    steps = spec.protocol.max_steps
    if isinstance(steps, Mapping):
        # The environment of another suite brings its own limit.
        return steps.get(name)
    return steps
