"""Flags of the commands that evaluate policies, and what they ask for as one typed value."""

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from dzrobot.commands.options import flags
from dzrobot.commands.options.arm import add_attention, read_operator
from dzrobot.commands.options.policy import (
    add_cluster,
    add_render_device,
    add_speed,
    add_steps,
    add_weights,
    asks_to_compile,
    read_cluster,
    read_weights,
    render_variables,
)
from dzrobot.embodiments.spec import History
from dzrobot.errors import ConfigError, UnknownNameError, suggest
from dzrobot.policies.dreamzero.options import Noise, PolicyOptions
from dzrobot.rollout.asynchronous.execution import (
    DECAY,
    WAYS,
    Execution,
    ExecutionOptions,
    parse_latency,
)
from dzrobot.rollout.evaluation.evaluate import PREDICTED_EPISODES, RunOptions
from dzrobot.rollout.evaluation.planning import EvaluationRequest
from dzrobot.rollout.evaluation.runner import EvaluationSession, Log, Logger, unlogged
from dzrobot.rollout.policy_spec import (
    BUILT_IN,
    BUNDLED,
    LOCAL,
    REMOTE,
    PolicySpec,
    local_message,
)
from dzrobot.rollout.protocol import DEFAULT, MOST_EPISODES, PROTOCOLS, EvalSpec

WORKERS = min(2, os.cpu_count() or 1)
"""Simulators, unless the user chooses a number."""

_RESERVED = {
    "render_mode": "--videos",
    "max_episode_steps": "--max-steps",
    "task_id": "--tasks",
    "disable_env_checker": "the evaluation",
}
"""Keywords of ``gym.make`` that have a flag of their own."""

_HISTORY: dict[str, History] = {"on": "recent", "off": "off", "recent": "recent", "grid": "grid"}


def add_what(group: Any) -> None:
    """Declare which episodes are run, by which rules."""
    group.add_argument(
        "--suite", type=flags.names, help="LIBERO suites, such as libero_object; several: a,b"
    )
    group.add_argument(
        "--env", type=flags.text, help="or a Gymnasium id, such as dzrobot/lift-v0 or module:id"
    )
    group.add_argument(
        "--env-arg", action="append", default=[], metavar="KEY=VALUE",
        help="keyword argument of the environment, such as resolution=128",
    )  # fmt: skip
    group.add_argument("--protocol", choices=sorted(PROTOCOLS), help="rules of a published score")
    group.add_argument(
        "--tasks", type=flags.numbers, help="numbers of tasks, such as 0,1,5-7 (default: all)"
    )
    group.add_argument("--episodes", type=flags.whole(1), help="episodes per task")
    group.add_argument(
        "--first-episode", type=flags.whole(0, MOST_EPISODES), metavar="N",
        help="number of each task's first episode; those before it are left out (default: 0)",
    )  # fmt: skip
    group.add_argument("--max-steps", type=flags.whole(1), help="steps per episode")
    group.add_argument("--seed", type=flags.seed, default=0, help="of environments and keyed noise")
    group.add_argument(
        "--ablate-images", choices=["none", "shuffle", "other-start"], default="none",
        help="corrupt what the policy sees: tiles of 8 x 8 pixels change places, or the first "
        "images of another initial state are shown throughout",
    )  # fmt: skip


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


def add_acting(group: Any) -> None:
    """Declare how a policy acts, and where its weights come from."""
    group.add_argument(
        "--embodiment", type=flags.text, help="robot: a built-in tag, or module:NAME"
    )
    add_steps(group)
    group.add_argument(
        "--history",
        choices=sorted(_HISTORY),
        help="frames remembered (default: the protocol's, else the robot's)",
    )
    group.add_argument(
        "--execute", type=flags.whole(1), metavar="K",
        help="actions executed of each plan, or steps from one request to the next",
    )  # fmt: skip
    group.add_argument(
        "--cfg-scale", type=flags.number(0, 1000), help="guidance of the predicted video"
    )
    group.add_argument(
        "--noise", choices=get_args(Noise),
        help="of plans: by episode, always the same, or by slot (default: the protocol's)",
    )  # fmt: skip
    group.add_argument("--policy-seed", type=flags.seed, help="of the policy's noise")
    add_speed(group)
    add_weights(group)
    group.add_argument(
        "--batch", action="store_true",
        help="act for waiting episodes in one call: faster on a GPU, last bits vary",
    )  # fmt: skip


def add_execution(group: Any) -> None:
    """Declare the flags."""
    group.add_argument(
        "--execution", choices=get_args(Execution),
        help="sync: hold still until the next plan is there; naive: go over to it when it is; rtc: "
        "have it continue the running one; trained: likewise, by a network trained for it; "
        "ensemble: average all plans of a step",
    )  # fmt: skip
    group.add_argument(
        "--latency", type=flags.text, metavar="TIME",
        help=f"of a plan, in simulators, on a clock that follows their steps: {WAYS}; presets in "
        "use: 0.2 and 0.6",
    )  # fmt: skip
    group.add_argument(
        "--first-plan", choices=["charged", "free"], default="charged",
        help="whether the first plan of an episode takes time as well",
    )  # fmt: skip
    group.add_argument(
        "--rtc-strength", type=flags.number(0, 1000), metavar="BETA",
        help="most that rtc multiplies its guidance by (default: the number of solver steps)",
    )  # fmt: skip
    group.add_argument(
        "--rtc-weights", choices=["linear", "exp"], default="linear",
        help="how the overlap with the running plan fades",
    )  # fmt: skip
    group.add_argument(
        "--ensemble-decay", type=flags.number(-100, 100), metavar="M",
        help=f"the i-th oldest plan of an ensemble weighs exp(-M i) (default: {DECAY})",
    )  # fmt: skip


def add_how(group: Any) -> None:
    """Declare what changes no result."""
    group.add_argument("--output", type=flags.path, help="results folder (default: below results/)")
    add_other_code(group)
    group.add_argument(
        "--workers", type=flags.whole(0, 1024),
        help=f"simulators (default: {WORKERS}); an arm takes one process",
    )  # fmt: skip
    add_render_device(group)
    add_cluster(group)
    group.add_argument(
        "--batch-window-ms", type=flags.number(0, 60_000), metavar="MS",
        help="with --batch: longest time that an episode whose plan is due waits for others; it "
        "waits no longer once all do (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--videos",
        choices=["all", "failures", "none"],
        default="all",
        help="episodes to film; without films, images that nothing reads are not drawn",
    )
    group.add_argument(
        "--predictions", choices=["on", "off"],
        help="keep what the policy predicts, for `dzrobot report` (default: on for up to "
        f"{PREDICTED_EPISODES} episodes of a policy that predicts)",
    )  # fmt: skip
    group.add_argument(
        "--shard", type=flags.shard, default="0/1", metavar="I/N", help="part I (from 0) of N parts"
    )
    group.add_argument(
        "--max-errors", type=flags.whole(1), default=10, help="exceptions before giving up"
    )
    group.add_argument(
        "--wandb", type=flags.text, metavar="PROJECT",
        help="also log the results and the card to this Weights & Biases project",
    )  # fmt: skip
    group.add_argument(
        "--trackio", type=flags.text, metavar="PROJECT",
        help="also log them to this project of Trackio, on this machine",
    )  # fmt: skip
    add_attention(group)


def add_other_code(group: Any) -> None:
    """Declare that results of other code may be gone on with."""
    group.add_argument(
        "--allow-other-code", action="store_true",
        help="put results of different code into one table; the card then lists each code",
    )  # fmt: skip


def read_request(arguments: argparse.Namespace) -> EvaluationRequest:
    """Return what is evaluated, as the flags say.

    Raises:
        ConfigError: flags that do not go together.
        UnknownNameError: a name that does not exist.
    """
    said = {
        "tasks": arguments.tasks,
        "episodes": arguments.episodes,
        "first_episode": arguments.first_episode,
        "max_steps": arguments.max_steps,
        "seed": arguments.seed,
        "arguments": flags.keywords(arguments.env_arg, _RESERVED),
    }
    if is_default(arguments):
        spec = replace(DEFAULT, **{k: v for k, v in said.items() if v is not None})
    else:
        spec = EvalSpec.named(arguments.protocol, arguments.suite or (), arguments.env, **said)
    return EvaluationRequest(
        spec=spec,
        policy=_policy(arguments),
        ablation=arguments.ablate_images,
        batched=arguments.batch,
        execution=_execution(arguments),
        full_speed=arguments.full_speed,
    )


def is_default(arguments: argparse.Namespace) -> bool:
    """Return whether neither suite, environment nor protocol is named."""
    return not (arguments.suite or arguments.env or arguments.protocol)


def read_session(arguments: argparse.Namespace) -> EvaluationSession:
    """Return how evaluations are run, as the flags of :func:`add_how` say."""
    drawing = render_variables(arguments.render_device)
    # Environments of this process as well.
    os.environ.update(drawing[0] if drawing else {})
    window = arguments.batch_window_ms
    options = RunOptions(
        workers=WORKERS if arguments.workers is None else arguments.workers,
        videos=arguments.videos,
        predictions=None if arguments.predictions is None else arguments.predictions == "on",
        shard=arguments.shard,
        batch_window_s=0.0 if window is None else float(window) / 1000,
        max_errors=arguments.max_errors,
        variables=drawing,
        allow_other_code=arguments.allow_other_code,
    )
    return EvaluationSession(
        console=Console(width=None if Console().is_terminal else 110, highlight=False),
        options=options,
        workers_given=arguments.workers is not None,
        output=arguments.output,
        operator=read_operator(arguments),
        ray=read_cluster(arguments.ray, arguments.actors),
        project=arguments.wandb or arguments.trackio,
        logger=logger_of(arguments),
    )


def _policy(arguments: argparse.Namespace) -> PolicySpec:
    """Return who acts.

    Raises:
        UnknownNameError: ``--policy`` names nothing that is known.
    """
    named = arguments.policy
    if named and PolicySpec(name=named).is_checkpoint:
        raise UnknownNameError(
            f"unknown policy {named!r}.{suggest(named, BUILT_IN)} Known: "
            f"{', '.join(BUILT_IN)}, module:factory; a checkpoint is given with --checkpoint."
        )
    return PolicySpec(
        name=arguments.checkpoint or named or (REMOTE if arguments.server else BUNDLED),
        server=arguments.server,
        api_key_file=arguments.api_key_file,
        privileged=arguments.privileged,
        embodiment=arguments.embodiment,
        server_actions=arguments.server_actions,
        server_images=arguments.server_images or "raw",
        lerobot_python=arguments.lerobot_python,
        options=PolicyOptions(
            dit_steps=arguments.dit_steps,
            video=arguments.video or "full",
            solver_steps=arguments.solver_steps,
            execute=arguments.execute,
            history=_HISTORY[arguments.history] if arguments.history else None,
            cfg_scale=arguments.cfg_scale,
            noise=arguments.noise,
            seed=arguments.policy_seed,
            compile=asks_to_compile(arguments),
            graphs=bool(arguments.graphs),
        ),
        **read_weights(arguments),
    )


def _execution(arguments: argparse.Namespace) -> ExecutionOptions | None:
    """Return how plans are executed; None where time stands still.

    Raises:
        ConfigError: an unknown latency, or guidance of an execution that has none.
    """
    chosen = arguments.execution is not None or arguments.latency is not None
    guided = arguments.rtc_strength is not None or arguments.rtc_weights != "linear"
    guided = guided or arguments.ensemble_decay is not None
    if not (chosen or guided):
        return None
    options = ExecutionOptions(
        execution=arguments.execution or "sync",
        latency=None if arguments.latency is None else parse_latency(arguments.latency),
        first_plan=arguments.first_plan,
        strength=arguments.rtc_strength,
        weights=arguments.rtc_weights,
        decay=arguments.ensemble_decay,
    )
    return options if chosen else None


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
    *(Excluded(("server", name), local_message(name)) for name in LOCAL),
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

_UNSAID: tuple[object, ...] = (None, False, [], (0, 1))
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
