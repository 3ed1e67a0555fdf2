"""From what is asked for to a plan: every name becomes a value, once, before a weight is read.

An environment is made and looked at once, and a checkpoint opened once; what they say stays in the
plan. See :mod:`~dzrobot.rollout.evaluation.evaluate` for what is done with it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from dzrobot.code_identity import CODE, code_with
from dzrobot.declared import Flag
from dzrobot.documents import validated
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError, ProtocolError
from dzrobot.policies.base import Policy
from dzrobot.rollout.asynchronous.execution import ZERO, ExecutionOptions, schedule
from dzrobot.rollout.environment import (
    EnvironmentFacts,
    KeptEnvironment,
    accepts_same,
    at_full_speed,
    check_fits,
    environment_arguments,
    facts_of,
    look_at,
    looking_at,
    modules_of,
    protocol_arguments,
)
from dzrobot.rollout.evaluation.card import REQUEST, build_card
from dzrobot.rollout.footage import Wanted
from dzrobot.rollout.perturbation import PERTURBATION, Ablation, Perturbation
from dzrobot.rollout.policy_spec import (
    BUNDLED,
    REMOTE,
    PolicySpec,
    ResolvedPolicy,
    load_policy,
    refuse_local,
    resolve_policy,
)
from dzrobot.rollout.protocol import EpisodeSpec, EvalSpec, plan_episodes
from dzrobot.rollout.queue import EpisodeEngine
from dzrobot.rollout.records import Record

if TYPE_CHECKING:
    from dzrobot.rollout.asynchronous.execution import Schedule


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What is evaluated; with the versions installed, it fixes the results."""

    spec: EvalSpec
    """Which episodes, by which rules."""

    policy: PolicySpec = field(default_factory=PolicySpec)
    """Who acts."""

    ablation: Annotated[Ablation, Flag(
        "corrupt what the policy sees: tiles of 8 x 8 pixels change places, or the first images "
        "of another initial state are shown throughout", name="ablate-images",
    )] = "none"  # fmt: skip
    """What is done to the images that the policy sees, to show that it looks."""

    perturbation: Perturbation | None = None
    """What makes the episodes harder than the protocol's. None: nothing."""

    batched: Annotated[bool, Flag(
        "act for waiting episodes in one call: faster on a GPU, last bits vary", name="batch",
    )] = False  # fmt: skip
    """Whether the policy acts for several episodes in one call; the last bits then vary."""

    execution: ExecutionOptions | None = None
    """How plans are executed that take time to make. None: time stands still meanwhile."""

    full_speed: bool = False
    """Whether a policy may drive a real arm at full speed."""

    def written(self) -> dict[str, Any] | None:
        """Return this as plain values; None where an environment is given what no file can hold."""
        try:
            plain: dict[str, Any] = _of_requests().dump_python(self, mode="json")
        except PydanticSerializationError:
            return None
        return plain

    @classmethod
    def of(cls, card: Mapping[str, Any]) -> Self:
        """Return what was asked for when ``card`` was written.

        Raises:
            ProtocolError: the card does not say it: it is an earlier version's, an arm or a server
                took part, or an environment was given what no file can hold.
        """
        written = card.get(REQUEST)
        if written is None:
            raise ProtocolError(
                "this card does not say how to run the evaluation again: it is of an earlier "
                "version, of an arm or a server, or its environment was given a value that a file "
                "cannot hold"
            )
        return validated(written, cls, f"{REQUEST} on the card", ProtocolError)


@cache
def _of_requests() -> TypeAdapter[EvaluationRequest]:
    """Return what writes requests; made when a card is written, not in every worker."""
    return TypeAdapter(EvaluationRequest)


Variables = Sequence[Mapping[str, str]]
"""Environment variables of simulators, in turn."""

PREDICTED_EPISODES = 100
"""Most episodes of which predictions are kept by default."""

OpenEngine = Callable[[Path], AbstractContextManager[EpisodeEngine]]
"""Opens what runs the episodes of an evaluation; takes the results folder."""


def render_variables(devices: Sequence[int]) -> Variables:
    """Return the environment variables of simulators, in turn.

    Args:
        devices: Numbers of the machine's EGL devices.
    """
    from dzrobot.envs.mujoco.simulator import DEVICE_VARIABLE

    return tuple({DEVICE_VARIABLE: str(device)} for device in devices)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How it is run; none of this changes a result."""

    workers: Annotated[int, Flag("simulators; an arm takes one process", least=0, most=1024)] = 1
    """Processes that step environments; 0: everything in this process."""

    videos: Annotated[Wanted, Flag(
        "episodes to film; of none, predictions are kept only where --predictions on asks for "
        "them, and images that nothing reads are not drawn",
    )] = "all"  # fmt: skip
    """Which episodes a video is kept of."""

    predictions: Annotated[bool | None, Flag(
        "keep what the policy predicts, for `dzrobot report` (default: on for up to "
        f"{PREDICTED_EPISODES} filmed episodes of a policy that predicts)",
        words={"on": True, "off": False},
    )] = None  # fmt: skip
    """Whether what the policy predicts is kept for the report. None: where it predicts, of at most
    `PREDICTED_EPISODES` episodes, and some are filmed."""

    shard: Annotated[tuple[int, int], Flag(
        "part I (from 0) of N parts (default: 0/1)", metavar="I/N", kind="shard",
    )] = (0, 1)  # fmt: skip
    """Which part of the run this is, and of how many."""

    batch_window_s: Annotated[float, Flag(
        "with --batch: longest time that an episode whose plan is due waits for others; it waits "
        "no longer once all do",
        name="batch-window-ms", metavar="MS", least=0, most=60_000, becomes=lambda ms: ms / 1000,
    )] = 0.0  # fmt: skip
    """Where the evaluation is batched: longest time that an episode whose plan is due waits for
    others to share its call."""

    max_errors: Annotated[int, Flag("exceptions before giving up", least=1)] = 10
    """Episodes that may end in an exception before this run gives up."""

    enough: Callable[[Mapping[str, Record]], bool] = lambda _: False
    """Asked with all records by case before the first episode and after each: whether the rest
    need not be run."""

    environment: KeptEnvironment | None = None
    """Opens the environments of this process, and keeps the last one open when the run is over.
    None: it is closed."""

    only: frozenset[str] | None = None
    """Names of the cases that are run now, where not all are."""

    variables: Annotated[Variables, Flag(
        "EGL devices that simulators draw with in turn, such as 1 or 0-3; with --ray, the actors "
        "of a machine share them out (default: the first one)",
        name="render-device", metavar="N,N", kind="numbers",
        becomes=lambda devices: render_variables(devices),
    )] = ()  # fmt: skip
    """Environment variables of the ``workers``, in turn: where each one draws, say."""

    engine: OpenEngine | None = None
    """What runs the episodes. None: ``workers`` of this process."""

    allow_other_code: Annotated[bool, Flag(
        "put results of different code into one table; the card then lists each code",
    )] = False  # fmt: skip
    """Whether a folder may be resumed whose results are of other code; its card lists both."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError(f"workers={self.workers}: give 0 or more")
        if not 0 <= self.batch_window_s < math.inf:
            raise ConfigError(f"batch_window_s={self.batch_window_s}: give 0 or more, in seconds")


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """An evaluation whose names were looked up: everything exists and fits; nothing is loaded."""

    request: EvaluationRequest
    """What was asked for, with the default policy and its arguments filled in."""

    cases: tuple[EpisodeSpec, ...]
    """Every episode, in order."""

    arguments: Mapping[str, Mapping[str, Any]]
    """Keyword arguments beyond the task, by environment."""

    facts: Mapping[str, EnvironmentFacts]
    """What the environments say of themselves, by name."""

    found: ResolvedPolicy
    """The policy, its robot and its checkpoint, opened."""

    schedule: "Schedule | None"
    """How plans are executed, where time passes while they are made."""

    changes: tuple[str, ...]
    """How this differs from the named protocol, one sentence each."""

    notes: tuple[str, ...] = ()
    """Which defaults were taken, for the user."""

    @property
    def moves_an_arm(self) -> bool:
        """Whether an environment drives an arm, real or emulated."""
        return any(facts.moves_an_arm for facts in self.facts.values())

    def card(self, policy: Policy | None) -> dict[str, Any]:
        """Return this plan written down, with what the policy says of itself.

        Args:
            policy: Loaded; None of one that lives beside its environment.
        """
        request, found = self.request, self.found
        behavior = {
            **found.card(policy), "embodiment": found.robot.tag, "ablation": request.ablation,
        }  # fmt: skip
        if request.batched:
            behavior["batched"] = True
        spec = replace(request.spec, policy_changes=self.changes)
        card = build_card(spec, self.cases, behavior, self.arguments, self.facts)
        if request.perturbation is not None:
            card[PERTURBATION] = request.perturbation.card()
        if self.schedule is not None:
            card["execution"] = self.schedule.card()
        card[CODE] = [code_with(self._modules(policy)).plain()]
        # A card does not say where an arm or a server is.
        elsewhere = request.policy.server is not None or any(
            facts.moves_an_arm or facts.remote is not None for facts in self.facts.values()
        )
        if not elsewhere and (written := request.written()) is not None:
            card[REQUEST] = written
        return card

    def _modules(self, policy: Policy | None) -> Iterator[str]:
        """Yield the modules that a user has named: of environments, the robot and the policy."""
        for name in self.facts:
            yield from modules_of(name)
        for reference in (self.request.policy.name, self.request.policy.embodiment or ""):
            yield reference.partition(":")[0]
        yield type(policy).__module__


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An evaluation that is ready to run."""

    plan: EvaluationPlan
    """What is run."""

    policy: Policy | None
    """Loaded; None of one that lives beside its environment, and of :meth:`elsewhere`."""

    card: Mapping[str, Any] = field(repr=False)
    """The plan written down: all that the results depend on."""

    def elsewhere(self) -> Self:
        """Return this for another process: without what only this one can use."""
        found = replace(self.plan.found, checkpoint=None)
        return replace(self, plan=replace(self.plan, found=found), policy=None)


Exclusion = tuple[Callable[..., bool], str]
"""When options do not go together, and the message."""

_ASKED: tuple[Exclusion, ...] = (
    (
        lambda request: (request.policy.name == REMOTE) != (request.policy.server is not None),
        "--policy remote and --server URL go together, without another policy",
    ),
    (
        lambda request: request.batched and request.execution is not None,
        "--batch acts for several episodes in one call, whose plans are then due together: "
        "leave out --batch, or --execution and --latency",
    ),
)

_OF_AN_ARM: tuple[Exclusion, ...] = (
    (
        lambda request: request.execution is not None and request.execution.latency is not None,
        "an arm moves in real time: leave --latency out; it is for simulators",
    ),
)


def refuse_excluded(table: Sequence[Exclusion], *asked: object) -> None:
    """Raise where options do not go together.

    Args:
        table: What is excluded.
        asked: What its conditions take.

    Raises:
        ConfigError: with the message of the first row that applies.
    """
    for applies, message in table:
        if applies(*asked):
            raise ConfigError(message)


def plan(request: EvaluationRequest) -> EvaluationPlan:
    """Return the plan of what is asked for.

    Args:
        request: Which episodes, by which policy.

    Raises:
        DzrobotError: something is unknown, missing, or does not fit together.
    """
    refuse_excluded(_ASKED, request)
    if request.policy.name == REMOTE:
        refuse_local(request.policy)
    request, notes = with_bundled(request)
    spec = request.spec
    cases = plan_episodes(spec)
    firsts = {case.env: case for case in reversed(cases)}
    names = list(dict.fromkeys(case.env for case in cases))
    found, facts, arguments = _looked(request, {name: firsts[name] for name in names})
    first = facts[names[0]]
    if first.is_real and not arguments[names[0]].get("full_speed"):
        notes.append(
            "Every step runs at the workcell's slow_pace, as in a first trial; --full-speed "
            "lets the policy drive as fast as it commands."
        )
    notes += [found.where] if found.where else []
    for name, stated in facts.items():
        notes += found.unlike_training(name, stated.control_hz, arguments[name])
    refuse_excluded(_OF_AN_ARM if first.moves_an_arm else (), request)
    timed = _schedule(request, first, found.robot)
    if request.perturbation is not None:
        for name, own in facts.items():
            request.perturbation.check(name, own.perturbations)
    settled = _settled(found.spec, spec, found.robot, timed)
    planned = EvaluationPlan(
        request=request,
        cases=cases,
        arguments=arguments,
        facts=facts,
        found=replace(found, spec=settled),
        schedule=timed,
        changes=tuple(_changes(request, found, timed)),
        notes=tuple(notes),
    )
    planned.found.check()
    return planned


def _looked(
    request: EvaluationRequest, firsts: Mapping[str, EpisodeSpec]
) -> tuple[ResolvedPolicy, dict[str, EnvironmentFacts], dict[str, dict[str, Any]]]:
    """Return the policy, and facts and arguments of every environment; each is made once.

    Once more is only made what has to be made differently for the robot that the policy acts as.
    Wrong arguments are found here, before anything is loaded.

    Args:
        request: What is evaluated.
        firsts: By environment, its first episode.
    """
    spec, policy = request.spec, request.policy
    name, *_ = firsts
    made = {**protocol_arguments(name, spec.protocol), **spec.arguments}
    with looking_at(name, firsts[name], made) as env:
        seen = facts_of(env)
        _refuse_no_policy(name, seen, policy)
        given = at_full_speed(spec.arguments, seen) if request.full_speed else spec.arguments
        found = resolve_policy(policy, seen.robot, exact=seen.moves_an_arm)

        def fits(env: Any, name: str) -> None:
            # A user's own policy may read images of any size.
            needed, sized = found.robot.observation_keys, policy.is_checkpoint
            check_fits(name, env, found.robot, needed=needed if policy.looks else (), sized=sized)

        arguments = {
            name: environment_arguments(name, spec.protocol, found.robot, given) for name in firsts
        }
        facts = {}
        if accepts_same(name, made, arguments[name]):
            fits(env, name)
            facts[name] = seen
    for name, case in firsts.items():
        if name not in facts:
            facts[name] = look_at(
                name, case, arguments[name], lambda env, name=name: fits(env, name)  # type: ignore[misc]
            )  # fmt: skip
    return found, {name: facts[name] for name in firsts}, arguments


def _refuse_no_policy(name: str, facts: EnvironmentFacts, policy: PolicySpec) -> None:
    if facts.moves_an_arm and policy.name == BUNDLED:
        raise ConfigError(
            f"{name} moves an arm, which has no default policy: give --checkpoint or --policy, "
            "or the address of a policy server with --server"
        )


def with_bundled(request: EvaluationRequest) -> tuple[EvaluationRequest, list[str]]:
    """Return the request with a named policy: the bundled one, as it was scored, for none.

    Raises:
        ConfigError: none was trained for these environments.
    """
    if request.policy.name != BUNDLED:
        return request, []
    from dzrobot.policies.dreamzero import bundled

    spec, policy = request.spec, request.policy
    try:
        task = bundled.bundled_task(*spec.environments)
    except ConfigError:
        # Of an arm, another message helps more.
        for name in spec.environments if spec.env is not None else ():
            _refuse_no_policy(name, look_at(name, None, spec.arguments), policy)
        raise
    checkpoint = str(bundled.default_checkpoint(task))
    arguments = {"resolution": bundled.RESOLUTION, **spec.arguments}
    note = f"No --checkpoint: the bundled tiny policy in {checkpoint}; "
    note += f"--env-arg resolution={arguments['resolution']}"
    unset = {n: value for n, value in bundled.SCORED[task].items() if vars(policy)[n] is None}
    for name, value in unset.items():
        note += f" --{name.replace('_', '-')} {value}"
    policy = replace(policy, name=checkpoint, **unset)
    spec = replace(spec, arguments=arguments)
    return replace(request, spec=spec, policy=policy), [note]


def _settled(
    policy: PolicySpec, spec: EvalSpec, robot: Embodiment, timed: "Schedule | None"
) -> PolicySpec:
    """Return how the policy acts, with what the protocol says of it."""
    protocol = spec.protocol
    return replace(
        policy,
        history=policy.history or protocol.history or robot.history,
        noise=policy.noise or protocol.noise,
        noise_slots=policy.noise_slots or protocol.slots,
        execute=policy.execute if timed is None else timed.execute,
    )


def _schedule(
    request: EvaluationRequest, facts: EnvironmentFacts, robot: Embodiment
) -> "Schedule | None":
    """Return how plans are executed; None where time stands still while they are made."""
    options = request.execution
    if options is None or (facts.moves_an_arm and options.execution == "sync"):
        return None
    if not facts.moves_an_arm and options.latency is None:
        options = replace(options, latency=ZERO)
    return schedule(options, robot, facts.control_hz, request.policy.execute)


def _changes(
    request: EvaluationRequest, found: ResolvedPolicy, timed: "Schedule | None"
) -> Iterator[str]:
    """Yield what departs from the protocol beyond the choice of episodes."""
    protocol, policy, robot = request.spec.protocol, request.policy, found.robot
    history = protocol.history or robot.history
    if policy.history not in (None, history):
        yield f"history {policy.history}, not {history}"
    if policy.noise not in (None, protocol.noise):
        yield f"noise {policy.noise}, not {protocol.noise}"
    yield from found.departures(timed=timed is not None)
    if timed is not None:
        latency = timed.options.latency
        taken = "real time" if latency is None else f"latency {latency.text}"
        yield f"execution {timed.options.execution} every {timed.execute} steps, {taken}"
    if request.perturbation is not None:
        yield f"perturbation {request.perturbation.text}"


def open_plan(planned: EvaluationPlan) -> Opened:
    """Load the policy of a plan.

    Args:
        planned: What :func:`plan` found.

    Raises:
        CheckpointError: the policy cannot be loaded.
        ConfigError: it cannot act as is asked for.
    """
    policy = load_policy(planned.found)
    if planned.schedule is not None:
        from dzrobot.rollout.asynchronous.engine import check_policy

        check_policy(policy, planned.schedule)
    if planned.request.batched and not (policy is not None and policy.can.batches):
        raise ConfigError(
            "--batch gives several episodes to a policy in one call, and "
            f"{planned.found.spec.label} takes one at a time (it has no act_batch): leave --batch "
            "out"
        )
    return Opened(plan=planned, policy=policy, card=planned.card(policy))


def prepare(request: EvaluationRequest) -> Opened:
    """Find, check and load all that is evaluated.

    Args:
        request: What is asked for.

    Raises:
        DzrobotError: something is unknown, missing, or does not fit together.
    """
    return open_plan(plan(request))


Predicting = Literal["off", "at once", "later"]
"""Whether predictions are kept; and whether they are decoded as the run goes on, or as whoever
reads them needs it."""


def predicting(opened: Opened, options: RunOptions) -> Predicting:
    """Return whether predictions are kept, and how.

    Later they are decoded of checkpoints, which are found again by the card; not of compiled ones,
    which an encoder that is not compiled would follow but for the last bits.

    Raises:
        ConfigError: they are asked for, and there are none.
    """
    why = next((text for excludes, text in _UNPREDICTED if excludes(opened)), None)
    if why is not None:
        if options.predictions:
            raise ConfigError(f"--predictions on: {why(opened)}; leave it out")
        return "off"
    few = len(opened.plan.cases) <= PREDICTED_EPISODES and options.videos != "none"
    if not (few if options.predictions is None else options.predictions):
        return "off"
    policy = opened.plan.found.spec
    found_again = policy.is_checkpoint and REQUEST in opened.card
    return "later" if found_again and not policy.compile else "at once"


def _video(opened: Opened) -> str:
    return str(opened.card["policy"].get("video", "full"))


_UNPREDICTED: tuple[tuple[Callable[[Opened], bool], Callable[[Opened], str]], ...] = (
    (
        lambda opened: _video(opened) != "full",
        lambda opened: f"with --video {_video(opened)} the policy predicts no video",
    ),
    (
        lambda opened: opened.policy is None or not opened.policy.can.predicts,
        lambda _: "the policy predicts no video that could be kept",
    ),
    (
        lambda opened: opened.plan.request.batched,
        lambda _: "with --batch no episode is asked for its own plan",
    ),
    (
        lambda opened: opened.plan.moves_an_arm,
        lambda _: "an arm is not to wait until a video is decoded",
    ),
    (
        lambda opened: opened.plan.schedule is not None,
        lambda _: "with --execution or --latency plans overlap",
    ),
)
"""When there are no predictions, and why."""
