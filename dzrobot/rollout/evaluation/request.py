"""The evaluations of one command: what it asks for, and how they run one after the other.

One frozen value holds what a command line asks for; studies vary it and run each variant.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict
from rich.console import Console

from dzrobot.errors import ConfigError, UnknownNameError, find, suggest
from dzrobot.process import terminable, world_size
from dzrobot.progress import progress_bar
from dzrobot.rollout.environment import OperatorOptions, at_full_speed, look_at, make_environment
from dzrobot.rollout.evaluation.card import card_digest, read_card
from dzrobot.rollout.evaluation.evaluate import (
    EvalProgress,
    Evaluation,
    PreparedEvaluation,
    RunOptions,
    evaluate,
    prepare,
)
from dzrobot.rollout.evaluation.report import (
    Summary,
    folder_name,
    logged_numbers,
    print_card,
    title,
)
from dzrobot.rollout.perturbation import Ablation, Perturbation
from dzrobot.rollout.policy_spec import BUILT_IN, REMOTE, PolicySettings, PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec
from dzrobot.rollout.workers import KeptEnvironment

if TYPE_CHECKING:
    from dzrobot.cluster import Cluster, ClusterOptions
    from dzrobot.rollout.asynchronous.execution import ExecutionOptions

DEFAULT_SUITE = "libero_object"
DEFAULT_TASKS = (0, 3, 7)
DEFAULT_EPISODES = 2
"""What is evaluated where nothing is named: a few episodes of a few tasks."""

EXAMPLE = (
    "python examples/eval_libero.py --suite libero_spatial --protocol standard-10x50 "
    "--checkpoint PATH_OR_HUB_ID --device cuda --workers 8"
)


class Variant(BaseModel):
    """What one evaluation of a study has of its own; None: as requested."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: str | None = None
    policy: str | None = None
    server: str | None = None
    episodes: int | None = None
    first_episode: int = 0
    """Of each task; those before it are left out."""

    output: Path | None = None
    is_tracked: bool = True
    """Whether it gets a run of its own in the experiment logger."""

    perturbation: str | None = None
    """As ``--perturb`` names it; None: nothing is perturbed."""


@dataclass(frozen=True, kw_only=True)
class ResolvedRequest:
    """A request whose names were looked up and whose defaults were filled in."""

    evaluation: Evaluation
    label: str
    """Of the suites or the environment, for the name of a folder."""

    notes: tuple[str, ...]
    """Which defaults were taken, for the user."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """Which episodes, by which policy, run how; the command line as a typed value."""

    suites: tuple[str, ...] = ()
    env: str | None = None
    """Gymnasium id; without suites, None is the bundled default."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""

    protocol: str | None = None
    tasks: tuple[int, ...] | None = None
    episodes: int | None = None
    first_episode: int = 0
    max_steps: int | None = None
    seed: int = 0

    checkpoint: str | None = None
    policy: str | None = None
    server: str | None = None
    api_key_file: Path | None = None
    settings: PolicySettings = field(default_factory=PolicySettings)
    """How the policy acts, whatever its name."""

    local_flags: tuple[str, ...] = ()
    """Flags given that a policy server decides for itself."""

    ablation: Ablation = "none"
    perturbation: Perturbation | None = None
    batched: bool = False
    execution: "ExecutionOptions | None" = None
    """How plans are executed that take time to compute; None: time stands still meanwhile."""

    output: Path | None = None
    options: RunOptions = field(default_factory=RunOptions)
    ray: "ClusterOptions | None" = None
    """Where the episodes run, beyond this process; None: nowhere."""

    workers_given: bool = False
    """Whether the user chose the number of processes."""

    project: str | None = None
    """Of the experiment logger; None: nothing is logged."""

    full_speed: bool = False
    """Whether a policy may drive a real arm at full speed."""

    operator: OperatorOptions = field(default_factory=OperatorOptions)

    def varied(self, variant: Variant) -> Self:
        """Return this request with the values of ``variant``."""
        own = variant.model_dump(
            exclude_none=True, exclude={"first_episode", "perturbation", "is_tracked"}
        )
        text = variant.perturbation
        return replace(
            self,
            **own,
            first_episode=variant.first_episode,
            perturbation=None if text is None else Perturbation.read(text),
            project=self.project if variant.is_tracked else None,
        )

    @property
    def _names_a_policy(self) -> bool:
        return bool(self.checkpoint or self.policy or self.server)

    @property
    def is_default(self) -> bool:
        """Return whether neither suite, environment nor protocol is named."""
        return not (self.suites or self.env or self.protocol)

    def resolved(self) -> ResolvedRequest:
        """Return what is evaluated, with the defaults filled in.

        Raises:
            ConfigError: values that exclude each other.
            UnknownNameError: a name that does not exist.
        """
        if self.is_default:
            return self._by_default()
        notes: list[str] = []
        name = self.protocol or ("standard-10x50" if self.suites else "custom")
        protocol = find(PROTOCOLS, "protocol", name)
        env, arguments = self.env or protocol.suite, dict(self.arguments)
        if not self.suites:
            if env is None:
                raise ConfigError(
                    f"--protocol {name} says how episodes are run, not which: give --suite or --env"
                )
            arguments = self._arm_arguments(env, arguments, notes)
        acting = replace(self, arguments=arguments)
        if not self._names_a_policy:
            ids = [f"dzrobot/{suite}-v0" for suite in self.suites] or [str(env)]
            acting = acting._bundled(ids, notes)
        spec = EvalSpec(
            protocol=protocol,
            suites=self.suites,
            env=env,
            tasks=self.tasks,
            episodes=self.episodes,
            first_episode=self.first_episode,
            max_steps=self.max_steps,
            seed=self.seed,
            arguments=acting.arguments,
        )
        evaluation = Evaluation(
            spec=spec,
            policy=acting._policy_spec(),
            ablation=self.ablation,
            perturbation=self.perturbation,
            batched=self.batched,
            execution=self.execution,
        )
        label = folder_name(self.suites, str(env))
        return ResolvedRequest(evaluation=evaluation, label=label, notes=tuple(notes))

    def _by_default(self) -> ResolvedRequest:
        """Return what is evaluated where nothing is named."""
        tasks = DEFAULT_TASKS if self.tasks is None else self.tasks
        episodes = DEFAULT_EPISODES if self.episodes is None else self.episodes
        chosen = replace(self, suites=(DEFAULT_SUITE,), tasks=tasks, episodes=episodes)
        words = f"--suite {DEFAULT_SUITE} --tasks {','.join(map(str, tasks))} --episodes {episodes}"
        found = chosen.resolved()
        notes = [
            f"By default: {words}",
            *found.notes,
            "Without LIBERO's assets: --env dzrobot/lift-v0",
        ]
        if not self.checkpoint:
            notes.append(f"With your checkpoint: {EXAMPLE}")
        return replace(found, notes=tuple(notes))

    def _arm_arguments(
        self, env: str, arguments: dict[str, Any], notes: list[str]
    ) -> dict[str, Any]:
        """Return the environment's arguments, and say how fast a real arm moves."""
        facts = look_at(env, None, arguments)
        if not facts.moves_an_arm:
            return arguments
        if not self._names_a_policy:
            raise ConfigError(
                f"{env} moves an arm, which has no default policy: give --checkpoint or --policy, "
                "or the address of a policy server with --server"
            )
        if self.full_speed:
            return at_full_speed(arguments, facts)
        if facts.is_real and not arguments.get("full_speed"):
            notes.append(
                "Every step runs at the workcell's slow_pace, as in a first trial; --full-speed "
                "lets the policy drive as fast as it commands."
            )
        return arguments

    def _policy_spec(self) -> PolicySpec:
        if self.checkpoint and self.policy:
            raise ConfigError("give --checkpoint or --policy, not both")
        if self.policy and PolicySpec(name=self.policy).is_checkpoint:
            raise UnknownNameError(
                f"unknown policy {self.policy!r}.{suggest(self.policy, BUILT_IN)} Known: "
                f"{', '.join(BUILT_IN)}, module:factory; a checkpoint is given with --checkpoint."
            )
        name = self.checkpoint or self.policy or REMOTE
        if (name == REMOTE) != (self.server is not None):
            raise ConfigError(
                "--policy remote and --server URL go together, without another policy"
            )
        key = None
        if name == REMOTE:
            from dzrobot.websocket import read_key

            refuse_local(self.local_flags)
            key = read_key(self.api_key_file)
        return PolicySpec.named(name, self.settings, server=self.server, api_key=key)

    def _bundled(self, environments: Sequence[str], notes: list[str]) -> Self:
        """Return this request with the bundled policy for ``environments``, run as it was scored.

        Raises:
            ConfigError: none was trained for them.
        """
        from dzrobot.policies.dreamzero import bundled

        task = bundled.bundled_task(*environments)
        checkpoint = str(bundled.default_checkpoint(task))
        arguments = {"resolution": bundled.RESOLUTION, **self.arguments}
        note = f"No --checkpoint: the bundled tiny policy in {checkpoint}; "
        note += f"--env-arg resolution={arguments['resolution']}"
        acts = self.settings.options
        unset = {n: value for n, value in bundled.SCORED[task].items() if vars(acts)[n] is None}
        for name, value in unset.items():
            note += f" --{name.replace('_', '-')} {value}"
        notes.append(note)
        settings = replace(self.settings, options=replace(acts, **unset))
        return replace(self, checkpoint=checkpoint, arguments=arguments, settings=settings)


def refuse_local(flags: Sequence[str]) -> None:
    """Raise ConfigError where a remote policy is given ``flags`` that its server decides."""
    if flags:
        raise ConfigError(f"{flags[0]}: the server decides; give it to `dzrobot serve`")


Log = Callable[[int, Mapping[str, float | int | None]], None]
"""Takes a step and its numbers."""

Logger = Callable[[str | None, Path, Mapping[str, Any]], AbstractContextManager[Log]]
"""Opens an experiment logger: project (None: nothing is logged), folder of results, settings."""


@contextmanager
def unlogged(project: str | None, folder: Path, settings: Mapping[str, Any]) -> Iterator[Log]:
    """Yield a logger that drops everything."""
    yield lambda _, __: None


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One evaluation that was run."""

    summary: Summary
    folder: Path
    title: str
    """Of its table."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSession:
    """Runs the evaluations of one command, on this machine or on a Ray cluster."""

    request: EvaluationRequest
    console: Console
    cluster: "Cluster | None" = None
    """Where the episodes run; None: in this process and its workers."""

    logger: Logger = unlogged

    def run(
        self,
        variant: Variant | None = None,
        ending: Callable[[RunOptions, Mapping[str, Any]], RunOptions] = lambda options, _: options,
    ) -> Finished:
        """Run one evaluation, and return what it found.

        Args:
            variant: What it has of its own; None: nothing.
            ending: Given how the evaluation is run, and its card, returns how it is run with the
                rule that ends it.
        """
        variant = variant or Variant()
        request = self.request.varied(variant)
        resolved = request.resolved()
        for line in resolved.notes:
            self.console.print(line, soft_wrap=True, markup=False)
        prepared, output, options = _prepared(request, resolved, self.cluster)
        options = ending(options, prepared.card)
        print_card(self.console, prepared.card, output)
        with self.logger(request.project, output, prepared.card) as log:
            if prepared.moves_an_arm:
                summary = _run_on_arm(request, prepared, output, options)
            else:
                summary = _run_in_simulation(prepared, output, options)
            log(summary.total.episodes, logged_numbers(summary))
        if round_trips := prepared.ready.round_trips():
            self.console.print(round_trips, soft_wrap=True, markup=False)
        return Finished(summary=summary, folder=output, title=title(read_card(output)))


def run_session(
    request: EvaluationRequest,
    direct: Callable[[EvaluationSession], int],
    logger: Logger = unlogged,
) -> int:
    """Run the evaluations of one command, and return the exit code.

    Args:
        request: What the command line asks for.
        direct: Runs the evaluations and prints their results.
        logger: Experiment logger.

    Raises:
        ConfigError: torchrun has started several processes.
    """
    if world_size() > 1:
        raise ConfigError(
            f"torchrun has started {world_size()} processes, and Ray runs an evaluation on many "
            "GPUs and machines: dzrobot eval ... --ray (one command; see docs/guides/evaluate.md)"
        )
    console = Console(width=None if Console().is_terminal else 110, highlight=False)
    session = EvaluationSession(request=request, console=console, logger=logger)
    if request.ray is None:
        return direct(session)
    from dzrobot.cluster import connected
    from dzrobot.rollout.evaluation.actors import needs_of

    needs = needs_of(request.settings, request.options.workers)
    with connected(request.ray, needs) as cluster:
        return direct(replace(session, cluster=cluster))


def _prepared(
    request: EvaluationRequest, resolved: ResolvedRequest, cluster: "Cluster | None"
) -> tuple[PreparedEvaluation, Path, RunOptions]:
    """Load all that the evaluation needs; return it, the results folder and how it is run."""
    options = request.options
    if cluster is None:
        prepared = prepare(resolved.evaluation)
    else:
        from dzrobot.rollout.evaluation.actors import ActorGroup

        group = ActorGroup(cluster, resolved.evaluation, options)
        prepared, options = group.prepared, replace(options, engine=group.opened)
    if prepared.moves_an_arm and not request.workers_given:
        options = replace(options, workers=0)
    output = request.output or Path("results") / (
        f"{resolved.label}-{resolved.evaluation.policy.label}-{card_digest(prepared.card)}"
    )
    return prepared, output, options


def _run_in_simulation(prepared: PreparedEvaluation, output: Path, options: RunOptions) -> Summary:
    with progress_bar("episodes") as advance, terminable():
        return evaluate(
            prepared, output, options, lambda far: advance(far.done, far.total, _progress(far))
        )


def _run_on_arm(
    request: EvaluationRequest, prepared: PreparedEvaluation, output: Path, options: RunOptions
) -> Summary:
    from dzrobot.rollout.arm.attended import attended

    operator = replace(
        request.operator,
        title="dzrobot eval",
        log=request.operator.log or output / "operator.jsonl",
    )
    with attended(operator) as people:
        first = prepared.cases[0]
        with closing(make_environment(first, prepared.arguments[first.env], render=False)) as env:
            people.attend(env)

        def show(far: EvalProgress) -> None:
            people.progress(f"{far.done} of {far.total} episodes; {_progress(far)}")

        with closing(KeptEnvironment(people.opened)) as kept:
            return evaluate(prepared, output, replace(options, environment=kept), show)


def _progress(progress: EvalProgress) -> str:
    failed = f", {progress.errors} errors" if progress.errors else ""
    return f"{progress.successes} of {progress.done} succeeded{failed}"
