"""From nothing to a policy that succeeds: demonstrations, autoencoder, fine-tuning, evaluation.

    python examples/train_tiny.py                       # Lift, about 80 minutes on two cores
    python examples/train_tiny.py --suite libero_object --task 0
    python examples/train_tiny.py --curve 20            # success against training step, as well

Every stage is a public command, printed before it runs. A finished stage is not run again, and
an unfinished one resumes where it was, so the same command can be interrupted at any time.
"""

import argparse
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

EMBODIMENT = "libero_mini"
RESOLUTION = 128
SAVES = 12
"""Checkpoints that the run leaves; every second one is a point of the curve."""
HELD_IN = "20-49"
"""Stored initial states of LIBERO to learn from; evaluations begin at state 0."""


@dataclass(frozen=True)
class Stage:
    """One command and what shows that it is done."""

    name: str
    command: tuple[str, ...]
    result: Path | None


def main() -> int:
    """Run the stages that are left."""
    options = _arguments()
    for stage in stages(options):
        if stage.result is not None and stage.result.exists():
            print(f"{stage.name}: done ({stage.result})", flush=True)
            continue
        print(f"{stage.name}: {shlex.join(stage.command)}", flush=True)
        code = subprocess.run(stage.command, check=False).returncode
        if code != 0:
            print(f"{stage.name} ended with code {code}; the same command resumes from here")
            return code
        if stage.name == "collect":
            _stamp(options).touch()
    return 0


def stages(options: argparse.Namespace) -> list[Stage]:
    """Return the stages in order."""
    root: Path = options.output
    data, metadata, start = root / "demonstrations", root / "metadata.json", root / "start"
    run = root / "run"
    final = run / "export" / f"step_{options.steps:08d}"
    every = max(1, options.steps // SAVES)
    environment = ["--env-arg", f"resolution={RESOLUTION}"]
    if options.suite == "lift":
        environment += ["--env", "dzrobot/lift-v0"]
        judge = [sys.executable, str(Path(__file__).with_name("score_tiny.py"))]
        score = [*_dzrobot("eval"), "--env", "dzrobot/lift-v0", "--protocol", "lift-100"]
    else:
        environment += ["--env", f"dzrobot/{options.suite}-v0"]
        score = [*_dzrobot("eval"), "--suite", options.suite, "--tasks", str(options.task)]
        judge = [*score, "--env-arg", f"resolution={RESOLUTION}", "--embodiment", EMBODIMENT]
        environment += ["--env-arg", f"task_id={options.task}", "--starts", HELD_IN]
    listed = [
        Stage("collect", (*_dzrobot("collect"), *environment, *_collection(options), "--output",
                          str(data)), _stamp(options)),
        Stage("stats", (*_dzrobot("stats"), EMBODIMENT, "--dataset", str(data), "--output",
                        str(metadata)), metadata),
        Stage("init", (*_dzrobot("init"), str(start), "--embodiment", EMBODIMENT, "--dataset",
                       str(data), "--metadata", str(metadata), "--steps",
                       str(options.autoencoder_steps)), start),
        Stage("train", (*_torchrun(options.processes), "mini_lift_cpu", f"model.model_path={start}",
                        f"model.metadata_json_path={metadata}", f"data.train_data_paths={data}",
                        f"runner.output_dir={run}", f"runner.max_steps={options.steps}",
                        f"checkpoint.save_interval={every}", f"checkpoint.keep_last_k={SAVES}",
                        "runner.resume_dir=auto"), final),
        Stage("evaluate", (*judge, "--checkpoint", str(final), "--episodes", str(options.evaluate),
                           "--workers", str(options.workers), "--output", str(root / "results")),
              None),
    ]  # fmt: skip
    if options.curve:
        points = ",".join(str(step) for step in range(2 * every, options.steps + 1, 2 * every))
        shown = ["--embodiment", EMBODIMENT, "--env-arg", f"resolution={RESOLUTION}"]
        shown += ["--workers", str(options.workers), "--videos", "none", "--steps", points]
        shown += ["--episodes", str(options.curve), "--output", str(run / "evaluations" / "curve")]
        listed += [
            Stage("curve", (*score, "--checkpoint", str(run), *shown), None),
            Stage("plot", (*_dzrobot("plot"), str(run)), None),
        ]
    return listed


def _stamp(options: argparse.Namespace) -> Path:
    stamp: Path = options.output / "collected"
    return stamp


def _collection(options: argparse.Namespace) -> list[str]:
    return [
        "--embodiment", EMBODIMENT, "--episodes", str(options.episodes), "--noise", "0.2",
        "--hold-steps", "8", "--workers", str(options.workers), "--max-steps",
        "150" if options.suite == "lift" else "280",
    ]  # fmt: skip


def _dzrobot(command: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "dzrobot.cli", command)


def _torchrun(processes: int) -> tuple[str, ...]:
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    return (*launch, str(processes), "-m", "dzrobot.cli", "train")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--suite", default="lift", help="lift, libero_object or libero_spatial")
    parser.add_argument("--task", type=int, default=0, help="task of the LIBERO suite")
    parser.add_argument("--episodes", type=int, default=150, help="demonstrations")
    parser.add_argument("--autoencoder-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps")
    parser.add_argument("--evaluate", type=int, default=100, help="episodes of the final score")
    parser.add_argument(
        "--curve", type=int, default=0, metavar="N",
        help="episodes for each of six checkpoints: success against training step, with its plot",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=2, help="simulators at the same time")
    parser.add_argument("--processes", type=int, default=2, help="training processes")
    parser.add_argument("--output", type=Path, default=Path("runs") / "tiny")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
