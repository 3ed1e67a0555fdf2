"""``dzrobot eval``: success rates of a policy, safe against being interrupted."""

import argparse
import os
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from dzrobot.commands import flags
from dzrobot.commands.against import Against, add_against, read_against
from dzrobot.commands.arm import add_attention, looked_after
from dzrobot.commands.execution import add_execution, read_execution
from dzrobot.commands.keys import add_key, read_key
from dzrobot.commands.perturb import add_perturbation, evaluate_perturbed
from dzrobot.commands.results import conclude, folder_name, say_what_it_is, title
from dzrobot.commands.signals import terminable
from dzrobot.commands.steps import evaluate_steps
from dzrobot.commands.tracking import add_tracking, check_tracking, numbers_of, tracked
from dzrobot.commands.weights import add_weights
from dzrobot.embodiments.spec import History
from dzrobot.errors import ConfigError, UnknownNameError, find, suggest
from dzrobot.policies.dreamzero.options import Noise, PolicyOptions
from dzrobot.policies.serving.client import RemotePolicy
from dzrobot.progress import progress_bar
from dzrobot.rollout.arms import slowed
from dzrobot.rollout.environment import look_at, make_environment
from dzrobot.rollout.evaluation.card import card_digest
from dzrobot.rollout.evaluation.comparison import read_results
from dzrobot.rollout.evaluation.evaluate import (
    PREDICTED_EPISODES,
    EvalProgress,
    Evaluation,
    PreparedEvaluation,
    RunOptions,
    evaluate,
    prepare,
)
from dzrobot.rollout.evaluation.protocol import PROTOCOLS, EvalSpec
from dzrobot.rollout.evaluation.report import Summary
from dzrobot.rollout.policy_spec import BUILT_IN, REMOTE, PolicySpec

SUMMARY = "evaluate a policy in an environment"
DEFAULT_ENV = "dzrobot/lift-v0"
DEFAULT_EPISODES = 10
EXAMPLE = (
    "python examples/eval_libero.py --suite libero_spatial --protocol standard-10x50 "
    "--checkpoint PATH_OR_HUB_ID --device cuda --workers 8"
)

_WORKERS = min(2, os.cpu_count() or 1)

_RESERVED = {
    "render_mode": "--videos",
    "max_episode_steps": "--max-steps",
    "task_id": "--tasks",
    "disable_env_checker": "the evaluation",
}
"""Keywords of ``gym.make`` that have a flag of their own."""

_HISTORY: dict[str, History] = {"on": "recent", "off": "off", "recent": "recent", "grid": "grid"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot eval``."""
    parser.description = (
        "Evaluate a policy. Every finished episode is one line of OUTPUT/records.jsonl; the same "
        "command again runs what is missing. With no argument: the embedded default."
    )
    _what(parser.add_argument_group("what is run"))
    _policy(parser.add_argument_group("the policy"))
    add_execution(
        parser.add_argument_group("time that passes while the policy thinks (default: none)")
    )
    _how(parser.add_argument_group("how it is run; none of this changes a result"))


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, print the table, and return 0 if every episode has a result, else 1."""
    check_tracking(arguments)
    console = Console(width=None if Console().is_terminal else 110, highlight=False)
    if sum(map(bool, (arguments.steps, arguments.perturb, arguments.against))) > 1:
        raise ConfigError("--steps, --perturb and --against each compare runs; give one of them")
    if arguments.steps is not None:
        return evaluate_steps(console, arguments, lambda own: _evaluated(console, own)[0])
    if arguments.perturb:
        return evaluate_perturbed(console, arguments, lambda own: _evaluated(console, own))
    against = read_against(arguments)
    summary, output, heading = _evaluated(console, arguments, against)
    if against is None:
        return conclude(console, summary, output, heading)
    own = read_results(output)
    code = conclude(console, summary, output, heading, enough=against.decided(own))
    against.conclude(console, own)
    return code


def _evaluated(
    console: Console, arguments: argparse.Namespace, against: Against | None = None
) -> tuple[Summary, Path, str]:
    """Run one evaluation; return what it found, its folder and the title of its table."""
    setup = _setup(arguments)
    for line in setup.greeting:
        console.print(line, soft_wrap=True, markup=False)
    prepared = prepare(setup.evaluation)
    output = arguments.output or Path("results") / (
        f"{setup.label}-{setup.evaluation.policy.label}-{card_digest(prepared.card)}"
    )
    arm = prepared.moves_an_arm
    workers = (0 if arm else _WORKERS) if arguments.workers is None else arguments.workers
    options = RunOptions(
        workers=workers,
        videos=arguments.videos,
        predictions=None if arguments.predictions is None else arguments.predictions == "on",
        shard=arguments.shard,
        max_errors=arguments.max_errors,
    )
    if against is not None:
        options = against.options(options, prepared.card)
    say_what_it_is(console, prepared.card, output)
    run = _on_an_arm if arm else _in_simulation
    with tracked(arguments.wandb, output, prepared.card) as tell:
        summary = run(arguments, prepared, output, options)
        tell(summary.total.episodes, numbers_of(summary))
    if isinstance(prepared.ready.policy, RemotePolicy) and prepared.ready.policy.timing:
        console.print(prepared.ready.policy.timing.text, soft_wrap=True, markup=False)
    return summary, output, title(prepared.card)


def _in_simulation(
    _: argparse.Namespace, prepared: PreparedEvaluation, output: Path, options: RunOptions
) -> Summary:
    with progress_bar("episodes") as advance, terminable():
        return evaluate(
            prepared, output, options, lambda far: advance(far.done, far.total, _how_far(far))
        )


def _on_an_arm(
    arguments: argparse.Namespace, prepared: PreparedEvaluation, output: Path, options: RunOptions
) -> Summary:
    with looked_after(arguments, "dzrobot eval", output / "operator.jsonl") as people:
        first = prepared.cases[0]
        with closing(make_environment(first, prepared.arguments[first.env], render=False)) as env:
            people.check(env)

        def show(far: EvalProgress) -> None:
            people.progress(f"{far.done} of {far.total} episodes; {_how_far(far)}")

        return evaluate(prepared, output, replace(options, opened=people.opened), show)


def _how_far(progress: EvalProgress) -> str:
    failed = f", {progress.errors} errors" if progress.errors else ""
    return f"{progress.successes} of {progress.done} succeeded{failed}"


@dataclass(frozen=True)
class _Setup:
    evaluation: Evaluation
    label: str
    greeting: tuple[str, ...]


def _what(group: Any) -> None:
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
    add_perturbation(group)
    add_against(group)
    group.add_argument(
        "--ablate-images", choices=["none", "shuffle", "other-start"], default="none",
        help="corrupt what the policy sees: tiles of 8 x 8 pixels change places, or the first "
        "images of another initial state are shown throughout",
    )  # fmt: skip


def _policy(group: Any) -> None:
    group.add_argument(
        "--checkpoint", type=flags.text, help="folder or Hugging Face id of a DreamZero checkpoint"
    )
    group.add_argument(
        "--steps", type=flags.text, metavar="all|N,N",
        help="of the training run that --checkpoint names: success at each of its checkpoints",
    )  # fmt: skip
    group.add_argument(
        "--policy", type=flags.text, help="instead: random, hold, expert, remote, or module:factory"
    )
    group.add_argument(
        "--server", type=flags.text, metavar="URL",
        help="of the policy 'remote', such as ws://gpu-machine:8000; see `dzrobot serve`",
    )  # fmt: skip
    add_key(group)
    group.add_argument(
        "--privileged", action="store_true",
        help="module:factory takes the environment and acts beside it, once per episode",
    )  # fmt: skip
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
    add_weights(group)


def _how(group: Any) -> None:
    group.add_argument("--output", type=flags.path, help="results folder (default: below results/)")
    group.add_argument(
        "--workers", type=flags.whole(0, 1024),
        help=f"simulators (default: {_WORKERS}); an arm takes one process",
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


def _setup(arguments: argparse.Namespace) -> _Setup:
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
    return _Setup(evaluation, label, tuple(greeting))


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
        ),
        device=arguments.device,
        dtype=arguments.dtype,
        revision=arguments.revision,
        server=arguments.server,
        api_key=read_key(arguments) if name == REMOTE else None,
        base=arguments.base,
        config_from=arguments.config_from,
    )


def _refuse_elsewhere(arguments: argparse.Namespace) -> None:
    """Refuse what the server decides."""
    names = ("dit_steps", "cfg_scale", "policy_seed", "dtype", "revision")
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
