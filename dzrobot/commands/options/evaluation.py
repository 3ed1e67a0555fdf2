"""Flags of the commands that evaluate policies, and what they ask for as one typed value."""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console

from dzrobot.commands.options import flags
from dzrobot.commands.options.policy import (
    add_cluster,
    declare_policy,
    read_cluster,
    read_policy,
)
from dzrobot.declared import declared
from dzrobot.errors import ConfigError, UnknownNameError, suggest
from dzrobot.policies.dreamzero.options import LooseWeights, ServerDecides
from dzrobot.rollout.asynchronous.execution import ExecutionOptions
from dzrobot.rollout.environment import OperatorOptions
from dzrobot.rollout.evaluation.evaluate import EvaluationSession, Log, Logger, unlogged
from dzrobot.rollout.evaluation.planning import EvaluationRequest, RunOptions
from dzrobot.rollout.policy_spec import (
    BUILT_IN,
    BUNDLED,
    REMOTE,
    PolicySpec,
    decided_by_server,
)
from dzrobot.rollout.protocol import DEFAULT, EvalSpec

WORKERS = min(2, os.cpu_count() or 1)
"""Simulators, unless the user chooses a number."""

_RESERVED = {
    "render_mode": "--videos",
    "max_episode_steps": "--max-steps",
    "task_id": "--tasks",
    "disable_env_checker": "the evaluation",
}
"""Keywords of ``gym.make`` that have a flag of their own."""


def add_what(group: Any) -> None:
    """Declare which episodes are run, by which rules."""
    flags.declare(group, EvalSpec)
    flags.add_keywords(
        group, "--env-arg", "keyword argument of the environment, such as resolution=128"
    )
    flags.declare(group, EvaluationRequest, only=("ablation",))


def add_studies(group: Any) -> None:
    """Declare the flags that compare several evaluations."""
    group.add_argument(
        "--perturb", action="append", default=[], metavar="AXIS[:LEVEL]",
        help="make the same episodes harder, beside unperturbed ones, and compare the pairs; "
        "axes: camera, light, texture, robot_init, language, noise, layout, and goal, which asks "
        "for another object; levels 1 to 5 (default: 3); may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--against", type=flags.path, metavar="RESULTS",
        help="of the same episodes: compare with them at the end",
    )  # fmt: skip
    group.add_argument(
        "--stop-early", action="store_true",
        help="with --against: end as soon as the difference is decided at the 5 %% level",
    )  # fmt: skip
    group.add_argument(
        "--blind", type=flags.text, nargs="+", metavar="POLICY",
        help="arm: several policies (checkpoints, module:factory, ws:// addresses of servers) from "
        "the same starts, in a drawn order that the operator does not learn before all trials are "
        "done; all are loaded at once",
    )  # fmt: skip


def add_acting(group: Any, *, without: Sequence[str] = ()) -> None:
    """Declare how a policy acts, and where its weights come from.

    Args:
        group: Of the parser.
        without: Fields of `PolicySpec` that cannot be said.
    """
    declare_policy(group, without=without)
    flags.declare(group, EvaluationRequest, only=("batched",))


def add_how(group: Any) -> None:
    """Declare what changes no result."""
    group.add_argument(
        "--output", type=flags.output, help="results folder (default: below results/)"
    )
    usual = f"simulators (default: {WORKERS}); an arm takes one process"
    flags.declare(group, RunOptions, workers={"help": usual})
    add_cluster(group)
    group.add_argument(
        "--wandb", type=flags.text, metavar="PROJECT",
        help="also log the results and the card to this Weights & Biases project",
    )  # fmt: skip
    group.add_argument(
        "--trackio", type=flags.text, metavar="PROJECT",
        help="also log them to this project of Trackio, on this machine",
    )  # fmt: skip
    flags.declare(group, OperatorOptions)


def read_request(arguments: argparse.Namespace) -> EvaluationRequest:
    """Return what is evaluated, as the flags say.

    Raises:
        ConfigError: flags that do not go together.
        UnknownNameError: a name that does not exist.
    """
    said = flags.said(arguments, EvalSpec)
    said["arguments"] = flags.keywords(arguments.env_arg, _RESERVED)
    spec = replace(DEFAULT, **said) if is_default(arguments) else EvalSpec.named(**said)
    return EvaluationRequest(
        **flags.said(arguments, EvaluationRequest),
        spec=spec,
        policy=_policy(arguments),
        execution=_execution(arguments),
        full_speed=bool(arguments.full_speed),
    )


def is_default(arguments: argparse.Namespace) -> bool:
    """Return whether neither suite, environment nor protocol is named."""
    return not (arguments.suite or arguments.env or arguments.protocol)


def read_session(arguments: argparse.Namespace) -> EvaluationSession:
    """Return how evaluations are run, as the flags of :func:`add_how` say."""
    options = RunOptions(**{"workers": WORKERS, **flags.said(arguments, RunOptions)})
    # Environments of this process as well.
    os.environ.update(options.variables[0] if options.variables else {})
    return EvaluationSession(
        console=Console(width=None if Console().is_terminal else 110, highlight=False),
        options=options,
        workers_given=arguments.workers is not None,
        output=arguments.output,
        operator=OperatorOptions(**flags.said(arguments, OperatorOptions)),
        ray=read_cluster(arguments.ray, arguments.actors),
        project=arguments.wandb or arguments.trackio,
        logger=logger_of(arguments),
    )


def _policy(arguments: argparse.Namespace) -> PolicySpec:
    """Return who acts.

    Raises:
        UnknownNameError: ``--policy`` names nothing that is known.
    """
    named = vars(arguments).get("policy")
    if named and PolicySpec(name=named).is_checkpoint:
        raise UnknownNameError(
            f"unknown policy {named!r}.{suggest(named, BUILT_IN)} Known: "
            f"{', '.join(BUILT_IN)}, module:factory; a checkpoint is given with --checkpoint."
        )
    server = vars(arguments).get("server")
    return read_policy(arguments, arguments.checkpoint or named or (REMOTE if server else BUNDLED))


def _execution(arguments: argparse.Namespace) -> ExecutionOptions | None:
    """Return how plans are executed; None where time stands still.

    Raises:
        ConfigError: an unknown latency, or guidance of an execution that has none.
    """
    said = flags.said(arguments, ExecutionOptions)
    # Also where it is not used: what does not go together is an error.
    options = ExecutionOptions(**said) if said else None
    return options if said.keys() & {"execution", "latency"} else None


@dataclass(frozen=True)
class Excluded:
    """Flags that do not go together."""

    given: tuple[str, ...]
    """Said, all of them."""

    message: str
    """Names of flags in braces stand for what was said."""

    unless: str | None = None
    """One that has to be said besides; None: nothing would help."""


_COMPARES = "it compares policies by itself"
_HIDES = "a logger would show the names"
_NOT_BLIND = {
    "checkpoint": "it names the policies itself",
    "policy": "it names the policies itself",
    "server": "it takes the addresses of servers itself: --blind ws://A:8000 ws://B:8000",
    "steps": _COMPARES,
    "perturb": _COMPARES,
    "against": _COMPARES,
    "stop_early": _COMPARES,
    "unattended": "a person judges",
    "workers": "one arm takes one process",
    "wandb": f"{_HIDES}; send the folders there afterwards",
    "trackio": _HIDES,
}
"""Flags that do not go together with ``--blind``, and why."""

_ONE_STUDY = "--steps, --perturb and --against each compare runs; give one of them"

EXCLUDED = (
    Excluded(
        ("wandb", "trackio"),
        "--wandb and --trackio: results are logged to one of them; leave one out",
    ),
    *(Excluded(two, _ONE_STUDY) for two in combinations(("steps", "perturb", "against"), 2)),
    *(
        Excluded(("blind", name), f"--blind without --{name.replace('_', '-')}: {why}")
        for name, why in _NOT_BLIND.items()
    ),
    Excluded(
        ("stop_early",), "--stop-early needs --against RESULTS, to know what to decide", "against"
    ),
    Excluded(
        ("stop_early", "shard"),
        "--stop-early looks at the pairs in their order: leave --shard out",
    ),
    Excluded(
        ("steps",), "--steps needs --checkpoint RUN, the folder of a training run", "checkpoint"
    ),
    Excluded(("checkpoint", "policy"), "give --checkpoint or --policy, not both"),
    # Before these flags are read: they may not fit this machine.
    *(
        Excluded(("server", one.dest), decided_by_server(one.option))
        for one in (*declared(PolicySpec, ServerDecides), *declared(LooseWeights))
    ),
    Excluded(
        ("server_images",),
        "--server-images {server_images} says how images are sent to a server: give its address "
        "besides, --server ws://HOST:8000, or leave it out",
        "server",
    ),
    Excluded(
        ("batch_window_ms",),
        "--batch-window-ms says how long an episode waits to share a call of the policy: give "
        "--batch besides, or leave it out",
        "batch",
    ),
    Excluded(("actors",), "--actors says how many run on a Ray cluster: give --ray besides", "ray"),
)
"""All flags of evaluations that do not go together, whatever is evaluated."""

_UNSAID: tuple[object, ...] = (None, False, [])
"""Values of flags that were left out."""


def check_flags(arguments: argparse.Namespace) -> None:
    """Refuse flags that do not go together, and loggers that are not installed.

    Raises:
        ConfigError: flags that do not go together.
        MissingDependencyError: a logger is asked for whose package is not installed.
    """
    said = {name: value for name, value in vars(arguments).items() if value not in _UNSAID}
    for rule in EXCLUDED:
        if said.keys() >= {*rule.given} and rule.unless not in said:
            raise ConfigError(rule.message.format(**said))
    for package in ("wandb", "trackio"):
        if package in said:
            from dzrobot.training.run.loggers import check_package

            check_package(f"--{package}", package)


def logger_of(arguments: argparse.Namespace) -> Logger:
    """Return how results are logged: to Trackio where it is asked for, else to W&B, if at all."""
    trackio = arguments.trackio is not None

    @contextmanager
    def open_logger(
        project: str | None, folder: Path, settings: Mapping[str, Any]
    ) -> Iterator[Log]:
        if project is None:
            with unlogged(project, folder, settings) as log:
                yield log
            return
        from dzrobot.training.run.loggers import TrackioLogger, WandbLogger

        sink = (TrackioLogger if trackio else WandbLogger)(project, folder, settings)
        try:
            yield sink.write
        finally:
            sink.close()

    return open_logger
