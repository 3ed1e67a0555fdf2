"""Train a policy from scratch: demonstrations, autoencoder, fine-tuning, evaluation.

    python examples/train_tiny.py                       # Lift, about 80 minutes on two cores
    python examples/train_tiny.py --suite libero_object --tasks 0,3
    python examples/train_tiny.py --suite libero_spatial --start CHECKPOINT    # go on from weights
    python examples/train_tiny.py --suite arm           # through the drivers of an emulated Franka
    python examples/train_tiny.py --suite droid         # joint positions, three cameras, 15 Hz
    python examples/train_tiny.py --curve 20            # success against training step, as well

Every stage is a public command, printed before it runs. A finished stage is not run again, and
an unfinished one resumes, so the script can be interrupted at any time.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dzrobot.cli import FAULT, INTERRUPTED, STOPPED
from dzrobot.commands.options.flags import numbers

RESOLUTION = 128
HELD_OUT = 4
"""Demonstrations held out from training, for validation losses."""
SAVES = 12
"""Number of checkpoints of the run; every second one is a point of the curve."""
SEED_OF_TASK_0, SEEDS_OF_A_TASK = 50_000, 80_000
"""Seeds of LIBERO's demonstrations. They start from places that the seed draws, so that all stored
initial states are left to evaluations."""

ANY_GOAL = ("libero_object",)
"""Suites in whose scenes demonstrations take any of the objects: with its own object alone, a scene
tells what to do without its instruction."""

STARTS = ("data.start_share=0.5", "data.start_rows=16")
"""Options of runs in LIBERO, which have to read their instruction. The expert heads straight for
its object, so in later rows the arm's pose shows which one that is; without this share, a run
hardly read anything else."""
NO_MEMORY = ("--history", "off")
"""Options of their evaluations. What the network remembers shows where the arm was going, and it
followed that instead of the instruction: in one scene it took a neighbor of its object."""

NOISE = "0.2"
"""Noise on the expert's executed actions, so that demonstrations include recoveries."""
NOISE_RAD = "0.012"
"""The same for joint angles, in radians: more of it pushes the arm against something, and an arm
behind drivers stops there. The same in simulation, so that both teach the same."""
MOST_STOPS = 50
"""How often a stage resumes after a stop of its arm, such as a finger touching the table."""
DATASET, ON_ARM = "demonstrations", "on_the_arm"
"""Folders of the demonstrations from simulation and from the arm."""
TIMES = "times.jsonl"
"""Wall-clock and processor time of each stage."""
FAR_SEED = "1000000"
"""Seed of the first demonstration on the arm; evaluations start at seed 0."""


@dataclass(frozen=True)
class Stage:
    """One command and the file that marks it as done."""

    name: str
    command: tuple[str, ...]
    result: Path | None
    stamps: bool = False
    """Whether ``result`` is made when the command has succeeded, and holds its words: another
    number of demonstrations is another command, which adds what is missing."""

    made_from: tuple[Path, ...] = ()
    """What ``result`` is made from: it is out of date where one of these files is newer."""

    @property
    def words(self) -> str:
        """Return the command without the interpreter."""
        return shlex.join(self.command[1:])

    @property
    def is_done(self) -> bool:
        """Return whether the command has succeeded before."""
        if self.result is None or not self.result.exists():
            return False
        return not self.stamps or self.result.read_text(encoding="utf-8") == self.words

    @property
    def is_outdated(self) -> bool:
        """Return whether what the result was made from has changed since."""
        if self.result is None or not self.result.exists():
            return False
        times = [path.stat().st_mtime for path in self.made_from if path.exists()]
        return max(times, default=0) > self.result.stat().st_mtime


@dataclass(frozen=True)
class Task:
    """What to learn, and how to demonstrate and evaluate it."""

    embodiment: str
    demonstrate: tuple[tuple[str, tuple[str, ...], str], ...]
    """Name of a stage, command that fills ``--output``, and folder of that dataset."""

    score: tuple[str, ...]
    """Command of one evaluation, without checkpoint, episodes and output."""

    judge: tuple[tuple[str, tuple[str, ...]], ...]
    """Name of a stage -> command that evaluates ``--checkpoint`` at the end."""

    held_out: int = HELD_OUT
    """Demonstrations of each dataset that are held out."""

    init: tuple[str, ...] = ()
    """Further flags of ``dzrobot init``."""

    train: tuple[str, ...] = ()
    """Further settings of the run."""


def main() -> int:
    """Run the remaining stages."""
    options = _arguments()
    examples = str(Path(__file__).parent)
    paths = os.pathsep.join(filter(None, (examples, os.environ.get("PYTHONPATH"))))
    for stage in _wanted(stages(options), options.until):
        if stage.is_outdated:
            print(f"{stage.name}: {stage.result} is of fewer or other demonstrations. Remove "
                  f"metadata.json, start and run from {options.output}, or give another --output",
                  file=sys.stderr)  # fmt: skip
            return FAULT
        if stage.is_done:
            print(f"{stage.name}: done ({stage.result})", flush=True)
            continue
        print(f"{stage.name}: {shlex.join(stage.command)}", flush=True)
        began = _clocks()
        code = _run(stage, {**os.environ, "PYTHONPATH": paths})
        _keep_time(options.output / TIMES, stage.name, code, began)
        if code != 0:
            print(f"{stage.name} ended with {code}; the same command resumes from here")
            return code
        if stage.stamps and stage.result is not None:
            stage.result.write_text(stage.words, encoding="utf-8")
    return 0


def _wanted(listed: list[Stage], last: str | None) -> list[Stage]:
    """Return the stages up to ``last``; all where that is None."""
    if last is None:
        return listed
    names = [stage.name for stage in listed]
    if last not in names:
        raise SystemExit(f"--until {last!r}: the stages are {', '.join(names)}")
    return listed[: names.index(last) + 1]


def _clocks() -> tuple[float, float]:
    """Return wall-clock time and the processor time of finished stages, in seconds."""
    used = os.times()
    return time.monotonic(), used.children_user + used.children_system


def _keep_time(path: Path, stage: str, code: int, began: tuple[float, float]) -> None:
    """Append how long a stage ran; of one that was interrupted, every piece has a line."""
    wall, cpu = (round(now - then, 1) for now, then in zip(_clocks(), began, strict=True))
    print(f"{stage}: {wall:.0f} s", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {"stage": stage, "seconds": wall, "cpu_seconds": cpu, "code": code}
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(line)}\n")


def _run(stage: Stage, environment: Mapping[str, str]) -> int:
    """Return the exit code of a stage."""
    code = STOPPED
    for _ in range(MOST_STOPS):
        with subprocess.Popen(stage.command, env=environment) as process:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                # The terminal interrupted the stage, too, which tidies up before it ends.
                process.wait()
                return INTERRUPTED
        if code != STOPPED:
            break
        print(f"{stage.name}: no person has to look at an emulated arm, so it goes on", flush=True)
    return code


def stages(options: argparse.Namespace) -> list[Stage]:
    """Return the stages in order."""
    root: Path = options.output
    metadata, start = root / "metadata.json", options.start or root / "start"
    run = root / "run"
    final = run / "export" / f"step_{options.steps:08d}"
    every = max(1, options.steps // SAVES)
    task = _task(options)
    held_out = max(1, min(task.held_out, options.episodes // 2))
    listed = [
        Stage(name, (*command, "--output", str(root / data)), root / f"{name}ed", stamps=True)
        for name, command, data in task.demonstrate
    ]
    # Each once, in the order of the stages.
    datasets = list(dict.fromkeys(str(root / data) for _, _, data in task.demonstrate))
    listed += [
        Stage("stats", (*_dzrobot("stats"), task.embodiment, "--dataset", *datasets, "--output",
                        str(metadata)), metadata,
              made_from=tuple(stage.result for stage in listed if stage.result is not None)),
    ]  # fmt: skip
    if options.start is None:
        fit = ("--still-steps", str(options.still_steps), "--clip-steps", str(options.clip_steps),
               "--decoder-steps", str(options.decoder_steps),
               "--threads", str(options.processes))  # fmt: skip
        init = (*_dzrobot("init"), str(start), "--embodiment", task.embodiment,
                "--dataset", *datasets, "--metadata", str(metadata))  # fmt: skip
        listed.append(Stage("init", (*init, *fit, *task.init), start, made_from=(metadata,)))
    listed += [
        Stage("train", (*_torchrun(options.processes), "mini_lift_cpu", f"model.model_path={start}",
                        f"model.embodiment_tag={task.embodiment}",
                        f"model.metadata_json_path={metadata}",
                        f"data.train_data_paths=[{','.join(datasets)}]",
                        f"data.holdout_episodes={held_out}",
                        f"runner.output_dir={run}", f"runner.max_steps={options.steps}",
                        f"checkpoint.save_interval={every}", f"checkpoint.keep_last_k={SAVES}",
                        *task.train, "runner.resume_dir=auto"), final, made_from=(metadata,)),
    ]  # fmt: skip
    listed += [
        Stage(name, (*command, "--checkpoint", str(final), "--output", str(root / name)), None)
        for name, command in task.judge
    ]
    listed += [
        Stage(f"{name}-score", (*_dzrobot("compare"), str(root / name), "--predictions"), None)
        for name, command in task.judge
        if "--predictions" in command
    ]
    if options.curve:
        points = ",".join(str(step) for step in range(2 * every, options.steps + 1, 2 * every))
        curve = ["--checkpoint", str(run), "--steps", points, "--episodes", str(options.curve)]
        curve += ["--videos", "none", "--output", str(run / "evaluations" / "curve")]
        listed += [
            Stage("curve", (*task.score, *curve), None),
            Stage("plot", (*_dzrobot("plot"), str(run)), None),
        ]
    return listed


def _task(options: argparse.Namespace) -> Task:
    own = {"lift": _lift, "arm": _arm, "droid": _droid}
    return own.get(options.suite, _libero)(options)


def _lift(options: argparse.Namespace) -> Task:
    """Return the task of lifting a cube in simulation."""
    robot, workers = "libero_mini", ("--workers", str(options.workers))
    given = ("--env-arg", f"resolution={RESOLUTION}", "--embodiment", robot, *workers)
    collect = (
        *_dzrobot("collect"), "--env", "dzrobot/lift-v0", *given,
        "--episodes", str(options.episodes), "--noise", NOISE, "--hold-steps", "8",
        "--max-steps", "150",
    )  # fmt: skip
    score = (*_dzrobot("eval"), "--env", "dzrobot/lift-v0", "--protocol", "lift-100", *given)
    judge = (sys.executable, str(Path(__file__).with_name("score_tiny.py")), *workers,
             "--episodes", str(options.evaluate))  # fmt: skip
    return Task(robot, (("collect", collect, DATASET),), score, (("results", judge),))


def _libero(options: argparse.Namespace) -> Task:
    """Return the tasks of a suite of LIBERO."""
    robot, suite = "libero_mini", options.suite
    given = ("--env-arg", f"resolution={RESOLUTION}", "--embodiment", robot,
             "--workers", str(options.workers))  # fmt: skip
    goal = ("--env-arg", "goal=any") if suite in ANY_GOAL else ()
    collect = (
        *_dzrobot("collect"), "--env", f"dzrobot/{suite}-v0", *given, *goal,
        "--env-arg", "placement=sampled", "--episodes", str(options.episodes),
        "--noise", NOISE, "--hold-steps", "8", "--max-steps", "280",
    )  # fmt: skip
    demonstrate = tuple(
        (
            f"task{task}-collect",
            (*collect, "--env-arg", f"task_id={task}",
             "--seed", str(SEED_OF_TASK_0 + SEEDS_OF_A_TASK * task)),
            f"{DATASET}-{task:02d}",
        )
        for task in options.tasks
    )  # fmt: skip
    # 500 episodes with 16 evaluations of the network a plan take nine hours on two cores.
    score = (
        *_dzrobot("eval"), "--suite", suite, "--tasks", ",".join(map(str, options.tasks)), *given,
        "--solver-steps", "4", *NO_MEMORY,
    )  # fmt: skip
    episodes, few = (("--episodes", str(count)) for count in (options.evaluate, options.blind))
    language = ("--perturb", "goal", "--videos", "none") if suite in ANY_GOAL else ()
    return Task(
        robot,
        demonstrate,
        score,
        (
            ("results", (*score, *episodes, *language)),
            ("blind", (*score, *few, "--ablate-images", "shuffle", "--videos", "none")),
            ("prediction", (*score, *few, "--predictions", "on")),
        ),
        held_out=1,
        # Both are faster in bfloat16 on a processor with products in it (AVX-512 BF16).
        init=("--size", "small", "--holdout-episodes", "1", "--dtype", "bfloat16"),
        train=("parallel.param_dtype=bf16", *STARTS),
    )


def _arm(options: argparse.Namespace) -> Task:
    """Return the task of lifting a cube with an emulated Franka through its real drivers."""
    robot = "franka_mini"
    place = _on_the_arm(robot)
    record = (*_dzrobot("record"), *place, "--max-steps", "150", "--seed", FAR_SEED)
    expert = ("--policy", "expert", "--noise", NOISE, "--episodes", str(options.episodes))
    steered = (
        "--teleop", "scripted_teleop:ScriptedOperator",
        "--episodes", str(options.episodes + options.steered),
    )  # fmt: skip
    score = (*_dzrobot("eval"), *place, "--max-steps", str(options.arm_steps))
    return Task(
        robot,
        (("record", (*record, *expert), DATASET), ("steer", (*record, *steered), DATASET)),
        score,
        (
            ("results", (*score, "--episodes", str(options.evaluate))),
            ("blind", (*score, "--episodes", str(options.blind), "--ablate-images", "shuffle")),
        ),
    )


def _droid(options: argparse.Namespace) -> Task:
    """Return the task of lifting a cube as DROID's arm, in simulation and on the arm."""
    robot, workers = "droid_mini", ("--workers", str(options.workers))
    collect = (
        *_dzrobot("collect"), "--env", "dzrobot/droid-lift-v0", *workers, "--embodiment", robot,
        "--episodes", str(options.episodes), "--noise", NOISE_RAD, "--hold-steps", "8",
        "--max-steps", "120",
    )  # fmt: skip
    record = (
        *_dzrobot("record"), *_on_the_arm(robot), "--max-steps", "120", "--seed", FAR_SEED,
        "--policy", "expert", "--noise", NOISE_RAD, "--episodes", str(options.on_arm),
    )  # fmt: skip
    score = (
        *_dzrobot("eval"), "--env", "dzrobot/droid-lift-v0", "--embodiment", robot, *workers,
        "--max-steps", "120",
    )  # fmt: skip
    arm = (
        *_dzrobot("eval"), *_on_the_arm(robot),
        "--max-steps", str(options.arm_steps), "--episodes", str(options.blind),
    )  # fmt: skip
    return Task(
        robot,
        (("collect", collect, DATASET), ("record", record, ON_ARM)),
        score,
        (
            ("results", (*score, "--episodes", str(options.evaluate))),
            ("arm", arm),
        ),
    )


def _on_the_arm(robot: str) -> tuple[str, ...]:
    return (
        "--env", "Franka-PnP-v0", "--env-arg", "workcell=emulated",
        "--env-arg", f"embodiment={robot}", "--unattended",
    )  # fmt: skip


def _dzrobot(command: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "dzrobot.cli", command)


def _torchrun(processes: int) -> tuple[str, ...]:
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    return (*launch, str(processes), "-m", "dzrobot.cli", "train")


def checkpoint(text: str) -> Path:
    """Return the folder of a checkpoint."""
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text} holds no checkpoint (config.json)")
    return Path(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--suite", default="lift", help="lift, libero_object, ..., arm or droid")
    parser.add_argument("--tasks", type=numbers, default="0-9", help="tasks of the LIBERO suite")
    parser.add_argument(
        "--episodes", type=int, default=150, help="demonstrations; of LIBERO, for each task"
    )
    parser.add_argument(
        "--start", type=checkpoint, metavar="FOLDER",
        help="checkpoint to train further, such as that of another suite (default: random weights)",
    )  # fmt: skip
    parser.add_argument("--still-steps", type=int, default=3000)
    parser.add_argument("--clip-steps", type=int, default=600)
    parser.add_argument("--decoder-steps", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps")
    parser.add_argument(
        "--evaluate", type=int, default=100,
        help="episodes of the final score; of LIBERO, for each task, at most 50",
    )  # fmt: skip
    parser.add_argument(
        "--curve", type=int, default=0, metavar="N",
        help="episodes for each of six checkpoints: success against training step, with its plot",
    )  # fmt: skip
    parser.add_argument(
        "--steered", type=int, default=10,
        help="demonstrations on the arm that a program at a device gives, besides the expert's",
    )  # fmt: skip
    parser.add_argument(
        "--on-arm", type=int, default=75,
        help="demonstrations of droid through the drivers, besides those in simulation",
    )  # fmt: skip
    parser.add_argument(
        "--blind",
        type=int,
        default=20,
        help="episodes on the arm, or of each task of LIBERO, with images that say nothing; of "
        "droid, episodes on the arm",
    )
    parser.add_argument(
        "--arm-steps", type=int, default=150, help="steps of an evaluated episode on the arm"
    )
    parser.add_argument("--workers", type=int, default=2, help="simulators at the same time")
    parser.add_argument(
        "--processes", type=int, default=2, help="processes that train; threads of the first fit"
    )
    parser.add_argument("--until", metavar="STAGE", help="last stage to run, such as init")
    parser.add_argument("--output", type=Path, default=Path("runs") / "tiny")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
