"""Flags of the commands that evaluate policies, and what they ask for as one typed value."""

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

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
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.options import Noise, PolicyOptions
from dzrobot.rollout.asynchronous.execution import (
    DECAY,
    WAYS,
    Execution,
    ExecutionOptions,
    parse_latency,
)
from dzrobot.rollout.evaluation.evaluate import PREDICTED_EPISODES, RunOptions
from dzrobot.rollout.evaluation.request import (
    EvaluationRequest,
    Log,
    Logger,
    refuse_local,
    unlogged,
)
from dzrobot.rollout.policy_spec import REMOTE, PolicySettings
from dzrobot.rollout.protocol import PROTOCOLS

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

_LOCAL = (
    "dit_steps", "solver_steps", "video", "cfg_scale", "policy_seed", "compile", "graphs", "device",
    "dtype",
    "memory", "quantize", "cfg_devices", "revision",
)  # fmt: skip
"""Flags that a policy server decides for itself."""


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
        help="episodes to film; without films, images that nobody looks at are not drawn",
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
    """Return what the flags ask for.

    Raises:
        ConfigError: flags that do not go together.
    """
    local = tuple(
        f"--{name.replace('_', '-')}" for name in _LOCAL if vars(arguments)[name] is not None
    )
    if arguments.server is not None or arguments.policy == REMOTE:
        # Before these flags are read: they may not fit this machine.
        refuse_local(local)
    drawing = render_variables(arguments.render_device)
    # Environments of this process as well.
    os.environ.update(drawing[0] if drawing else {})
    options = RunOptions(
        workers=WORKERS if arguments.workers is None else arguments.workers,
        videos=arguments.videos,
        predictions=None if arguments.predictions is None else arguments.predictions == "on",
        shard=arguments.shard,
        batch_window_s=_batch_window(arguments),
        max_errors=arguments.max_errors,
        variables=drawing,
        allow_other_code=arguments.allow_other_code,
    )
    return EvaluationRequest(
        suites=arguments.suite or (),
        env=arguments.env,
        arguments=flags.keywords(arguments.env_arg, _RESERVED),
        protocol=arguments.protocol,
        tasks=arguments.tasks,
        episodes=arguments.episodes,
        max_steps=arguments.max_steps,
        seed=arguments.seed,
        checkpoint=arguments.checkpoint,
        policy=arguments.policy,
        server=arguments.server,
        api_key_file=arguments.api_key_file,
        settings=_policy_settings(arguments),
        local_flags=local,
        ablation=arguments.ablate_images,
        batched=arguments.batch,
        execution=_execution(arguments),
        output=arguments.output,
        options=options,
        ray=read_cluster(arguments.ray, arguments.actors),
        workers_given=arguments.workers is not None,
        project=arguments.wandb or arguments.trackio,
        full_speed=arguments.full_speed,
        operator=read_operator(arguments),
    )


def _policy_settings(arguments: argparse.Namespace) -> PolicySettings:
    return PolicySettings(
        privileged=arguments.privileged,
        embodiment=arguments.embodiment,
        server_actions=arguments.server_actions,
        server_images=_server_images(arguments),
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


def _server_images(arguments: argparse.Namespace) -> Literal["raw", "jpeg", "zstd"]:
    """Return how images are sent.

    Raises:
        ConfigError: nothing is sent.
    """
    chosen: Literal["raw", "jpeg", "zstd"] | None = arguments.server_images
    if chosen is not None and arguments.server is None:
        raise ConfigError(
            f"--server-images {chosen} says how images are sent to a server: give its address "
            "besides, --server ws://HOST:8000, or leave it out"
        )
    return chosen or "raw"


def _batch_window(arguments: argparse.Namespace) -> float:
    """Return the seconds of ``--batch-window-ms``.

    Raises:
        ConfigError: nothing is batched.
    """
    if arguments.batch_window_ms is None:
        return 0.0
    if not arguments.batch:
        raise ConfigError(
            "--batch-window-ms says how long an episode waits to share a call of the policy: give "
            "--batch besides, or leave it out"
        )
    return float(arguments.batch_window_ms) / 1000


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


def check_logger(arguments: argparse.Namespace) -> None:
    """Refuse ``--wandb`` and ``--trackio`` without their packages, before anything is loaded.

    Raises:
        MissingDependencyError: the package is not installed.
        ConfigError: both are asked for.
    """
    if arguments.wandb is not None and arguments.trackio is not None:
        raise ConfigError("--wandb and --trackio: results are logged to one of them; leave one out")
    for package in ("wandb", "trackio"):
        if vars(arguments)[package] is not None:
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
