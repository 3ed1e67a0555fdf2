"""What commands that evaluate have in common: which flags there are, and what they say."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from dzrobot.commands.options import flags
from dzrobot.commands.options.arm import add_attention
from dzrobot.commands.options.devices import add_render_device
from dzrobot.commands.options.execution import read_execution
from dzrobot.commands.options.keys import read_key
from dzrobot.commands.options.tracking import add_tracking
from dzrobot.commands.options.weights import add_weights, read_weights
from dzrobot.commands.results import folder_name
from dzrobot.embodiments.spec import History
from dzrobot.errors import ConfigError, UnknownNameError, find, suggest
from dzrobot.policies.dreamzero.options import Noise, PolicyOptions
from dzrobot.rollout.environment import look_at, slowed
from dzrobot.rollout.evaluation.evaluate import PREDICTED_EPISODES, Evaluation
from dzrobot.rollout.policy_spec import BUILT_IN, REMOTE, PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec

DEFAULT_ENV = "dzrobot/lift-v0"
DEFAULT_EPISODES = 10
EXAMPLE = (
    "python examples/eval_libero.py --suite libero_spatial --protocol standard-10x50 "
    "--checkpoint PATH_OR_HUB_ID --device cuda --workers 8"
)

WORKERS = min(2, os.cpu_count() or 1)
"""Simulators, unless it is said how many."""

_RESERVED = {
    "render_mode": "--videos",
    "max_episode_steps": "--max-steps",
    "task_id": "--tasks",
    "disable_env_checker": "the evaluation",
}
"""Keywords of ``gym.make`` that have a flag of their own."""

_HISTORY: dict[str, History] = {"on": "recent", "off": "off", "recent": "recent", "grid": "grid"}


@dataclass(frozen=True)
class AskedEvaluation:
    """What the flags say."""

    evaluation: Evaluation
    label: str
    """Of what is run, for the name of a folder."""

    greeting: tuple[str, ...]
    """What is said first: which defaults were taken."""


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


def add_acting(group: Any) -> None:
    """Declare how a policy acts, and where its weights come from."""
    group.add_argument(
        "--embodiment", type=flags.text, help="robot: a built-in tag, or module:NAME"
    )
    group.add_argument(
        "--dit-steps", type=flags.dit_steps, help="network evaluations: 5 to 8, 16, or dynamic"
    )
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


def add_speed(group: Any) -> None:
    """Declare what makes the network faster on a GPU."""
    group.add_argument(
        "--compile", action="store_true", default=None,
        help="compile the network's blocks: faster on a GPU, last bits vary, the first plan takes "
        "minutes",
    )  # fmt: skip
    group.add_argument(
        "--graphs", action="store_true", default=None,
        help="on a GPU: record its work for every place of the memory's window, and launch it as "
        "one; goes together with --compile",
    )  # fmt: skip


def add_how(group: Any) -> None:
    """Declare what changes no result."""
    group.add_argument("--output", type=flags.path, help="results folder (default: below results/)")
    group.add_argument(
        "--workers", type=flags.whole(0, 1024),
        help=f"simulators (default: {WORKERS}); an arm takes one process",
    )  # fmt: skip
    add_render_device(group)
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
    add_tracking(group)
    add_attention(group)


def read_batch_window(arguments: argparse.Namespace) -> float:
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


def read_evaluation(arguments: argparse.Namespace) -> AskedEvaluation:
    """Return what the flags say.

    Raises:
        ConfigError: flags that do not go together.
        UnknownNameError: a name that nothing has.
    """
    greeting: list[str] = []
    suites = arguments.suite or ()
    name = arguments.protocol or ("standard-10x50" if suites else "custom")
    protocol = find(PROTOCOLS, "protocol", name)
    env, episodes = arguments.env, arguments.episodes
    if not suites and env is None:
        env = protocol.suite or DEFAULT_ENV
        if arguments.protocol is None:
            protocol = PROTOCOLS["lift-100"]
            episodes = DEFAULT_EPISODES if episodes is None else episodes
        greeting.append(
            f"Embedded default: {env} (robosuite's Lift in the shape of LIBERO; it is not LIBERO)."
        )
    given = flags.keywords(arguments.env_arg, _RESERVED)
    if not suites:
        given = _checked_for_arms(arguments, str(env), given, greeting)
    policy = _policy_spec(arguments, greeting)
    if not suites and arguments.env is None:
        greeting.append(f"LIBERO with a real checkpoint: {EXAMPLE}")
    spec = EvalSpec(
        protocol=protocol,
        suites=suites,
        env=env,
        tasks=arguments.tasks,
        episodes=episodes,
        first_episode=arguments.first_episode,
        max_steps=arguments.max_steps,
        seed=arguments.seed,
        arguments=given,
    )
    evaluation = Evaluation(
        spec=spec,
        policy=policy,
        ablation=arguments.ablate_images,
        perturbation=arguments.perturbation,
        batched=arguments.batch,
        execution=read_execution(arguments),
    )
    label = folder_name(suites, str(env))
    return AskedEvaluation(evaluation, label, tuple(greeting))


def _checked_for_arms(
    arguments: argparse.Namespace, env: str, given: dict[str, Any], greeting: list[str]
) -> dict[str, Any]:
    """Return the environment's arguments; an arm's as it takes them, and none it would regret."""
    facts = look_at(env, None, given)
    if not facts.moves_an_arm:
        return given
    if not (arguments.checkpoint or arguments.policy or arguments.server):
        raise ConfigError(
            f"{env} moves an arm, which has no default policy: give --checkpoint or --policy, "
            "or a policy elsewhere by --server"
        )
    if arguments.full_speed or "slow_first_steps" in given or not facts.is_real:
        return given
    greeting.append(
        "Every step is carried out at the workcell's slow_pace, as a first trial is; --full-speed "
        "lets the policy drive as fast as it asks."
    )
    return slowed(given)


def _policy_spec(arguments: argparse.Namespace, greeting: list[str]) -> PolicySpec:
    if arguments.checkpoint and arguments.policy:
        raise ConfigError("give --checkpoint or --policy, not both")
    if arguments.policy and PolicySpec(name=arguments.policy).is_checkpoint:
        raise UnknownNameError(
            f"unknown policy {arguments.policy!r}.{suggest(arguments.policy, BUILT_IN)} Known: "
            f"{', '.join(BUILT_IN)}, module:factory; a checkpoint is given with --checkpoint."
        )
    name = arguments.checkpoint or arguments.policy or (REMOTE if arguments.server else None)
    if name is None:
        name = str(_default_checkpoint(greeting))
    if (name == REMOTE) != (arguments.server is not None):
        raise ConfigError("--policy remote and --server URL go together, without another policy")
    if name == REMOTE:
        _refuse_elsewhere(arguments)
    return PolicySpec(
        name=name,
        privileged=arguments.privileged,
        embodiment=arguments.embodiment,
        options=PolicyOptions(
            dit_steps=arguments.dit_steps,
            execute=arguments.execute,
            history=_HISTORY[arguments.history] if arguments.history else None,
            cfg_scale=arguments.cfg_scale,
            noise=arguments.noise,
            seed=arguments.policy_seed,
            compile=bool(arguments.compile),
            graphs=bool(arguments.graphs),
        ),
        server=arguments.server,
        api_key=read_key(arguments) if name == REMOTE else None,
        **read_weights(arguments),
    )


def _refuse_elsewhere(arguments: argparse.Namespace) -> None:
    """Refuse what the server decides."""
    names = (
        "dit_steps", "cfg_scale", "policy_seed", "compile", "graphs", "device", "dtype", "memory",
        "quantize", "cfg_devices", "revision",
    )  # fmt: skip
    if given := [name for name in names if getattr(arguments, name) is not None]:
        flag = f"--{given[0].replace('_', '-')}"
        raise ConfigError(f"{flag}: the server decides; give it to `dzrobot serve`")


def _default_checkpoint(greeting: list[str]) -> Path:
    from dzrobot.policies.dreamzero.bundled import default_checkpoint

    checkpoint = default_checkpoint()
    said = f"No --checkpoint: the bundled tiny policy in {checkpoint}."
    if greeting:
        greeting[0] += f" {said}"
    else:
        greeting.append(said)
    return checkpoint
