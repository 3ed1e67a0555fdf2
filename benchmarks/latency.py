"""What latency costs a policy, and what executing plans without waiting gives back: one table.

One evaluation of the same episodes for every execution and latency; a folder that holds part of one
is resumed, so the same command finishes what was interrupted.

    python benchmarks/latency.py              the bundled policy on Lift, 10 starts
    python benchmarks/latency.py --episodes 100 --rounds 10
                                              100 starts; a table after every tenth of them
    python benchmarks/latency.py --history off --episodes 100
                                              a third of the time: unread images are not drawn
    python benchmarks/latency.py --executions rtc --steps 1 --strength 2 --output results/rtc-2
    python benchmarks/latency.py --checkpoint PATH --executions sync,rtc,trained --device cuda
"""

import argparse
import json
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from dzrobot.commands.options import flags
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.progress import progress_bar
from dzrobot.rollout.asynchronous.execution import Execution, ExecutionOptions, parse_latency
from dzrobot.rollout.evaluation.evaluate import evaluate
from dzrobot.rollout.evaluation.planning import EvaluationRequest, Opened, RunOptions, prepare
from dzrobot.rollout.evaluation.report import Summary, summarize, write_summary
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.policy_use import read_uses
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec
from dzrobot.rollout.records import RecordFile

SHOWN = ("seconds", "idle_ratio", "stale_ratio", "late", "seam_jump", "jerk")


def main() -> None:
    """Run what is missing, and print the table after every round."""
    arguments = _arguments()
    runs: list[tuple[Execution, int]] = [("sync", 0)]
    runs += [(name, steps) for steps in arguments.steps for name in arguments.executions]
    prepared = {run: prepare(_evaluation(arguments, *run)) for run in runs}
    for part in range(arguments.rounds):
        with progress_bar(f"round {part + 1} of {arguments.rounds}") as advance:
            for count, run in enumerate(runs):
                advance(count, len(runs), f"{run[0]}, {run[1]} steps")
                evaluate(
                    prepared[run],
                    _folder(arguments.output, run),
                    RunOptions(
                        workers=arguments.workers, videos="none", shard=(part, arguments.rounds)
                    ),
                )
            advance(len(runs), len(runs), "")
        found = {run: _until_now(prepared[run], _folder(arguments.output, run)) for run in runs}
        Console(width=150, highlight=False).print(_table(found))
        plain = {f"{name}-{steps}": all_of.results() for (name, steps), all_of in found.items()}
        (arguments.output / "table.json").write_text(json.dumps(plain, indent=1) + "\n")


def _folder(output: Path, run: tuple[Execution, int]) -> Path:
    return output / f"{run[0]}-{run[1]}"


def _until_now(prepared: Opened, folder: Path) -> Summary:
    """Return the summary of all rounds that are done."""
    records = RecordFile(folder, prepared.plan.cases, writable=False).records.values()
    summary = summarize(records, prepared.plan.cases, read_uses(folder))
    write_summary(folder, summary, prepared.card)
    return summary


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--checkpoint", default=str(default_checkpoint()))
    parser.add_argument("--device", type=flags.device, default="auto")
    parser.add_argument("--episodes", type=flags.whole(1), default=10)
    parser.add_argument(
        "--rounds", type=flags.whole(1), default=1, help="every cell gets one part, then the next"
    )
    parser.add_argument("--steps", type=flags.numbers, default="1,2,3", help="latencies")
    parser.add_argument("--executions", type=_executions, default="sync,naive,rtc")
    parser.add_argument("--execute", type=flags.whole(1), help="default: the robot's number")
    parser.add_argument("--strength", type=float, help="of rtc; default: the solver's steps")
    parser.add_argument("--weights", choices=["linear", "exp"], default="linear", help="of rtc")
    parser.add_argument(
        "--history", choices=["recent", "grid", "off"],
        help="frames remembered (default: the robot's); with off, few images are drawn",
    )  # fmt: skip
    parser.add_argument("--noise", choices=["keyed", "fixed"], default="keyed")
    parser.add_argument("--workers", type=flags.whole(0), default=0)
    parser.add_argument("--output", type=Path, default=Path("results/latency"))
    return parser.parse_args()


def _executions(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(get_args(Execution)):
        raise argparse.ArgumentTypeError(f"{unknown}: choose of {', '.join(get_args(Execution))}")
    return names


def _evaluation(
    arguments: argparse.Namespace, execution: Execution, steps: int
) -> EvaluationRequest:
    guidance: dict[str, Any] = {}
    if execution == "rtc":
        guidance = {"strength": arguments.strength, "weights": arguments.weights}
    return EvaluationRequest(
        spec=EvalSpec(
            protocol=PROTOCOLS["lift-100"], env="dzrobot/lift-v0", episodes=arguments.episodes
        ),
        policy=PolicySpec(
            name=arguments.checkpoint,
            device=arguments.device,
            execute=arguments.execute,
            history=arguments.history,
            noise=arguments.noise,
        ),
        execution=ExecutionOptions(
            execution=execution, latency=parse_latency(f"steps:{steps}"), **guidance
        ),
    )


def _table(found: dict[tuple[Execution, int], Summary]) -> Table:
    table = Table(title="mean ± half width of the 95 % interval", title_justify="left")
    for name in ("execution", "latency", "success", "95 %", "steps", *SHOWN):
        table.add_column(name, justify="right", no_wrap=True)
    for (execution, steps), summary in found.items():
        total = summary.total
        cells = []
        for name in SHOWN:
            one = summary.measures.get(name)
            spread = "" if one is None or one.half_width is None else f" ± {one.half_width:.2g}"
            cells.append("-" if one is None else f"{one.mean:.3g}{spread}")
        table.add_row(
            execution,
            f"{steps} steps",
            f"{total.successes}/{total.episodes}",
            f"{100 * total.low:.0f} to {100 * total.high:.0f}",
            "-" if total.mean_steps is None else f"{total.mean_steps:.0f}",
            *cells,
        )
    return table


if __name__ == "__main__":
    main()
