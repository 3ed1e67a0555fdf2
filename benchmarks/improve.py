"""Does credit make a better policy? Arms of training from one start, tested from the same starts.

    python benchmarks/improve.py --output study                # about five hours of two cores
    python benchmarks/improve.py --output study --until base   # up to a stage

Every stage is a command, printed before it runs; a finished one is not run again, an unfinished one
resumes. ``OUTPUT/records.jsonl`` has a line for every stage that is done: its words, its seconds,
and what came of it.

The start is weak on purpose: ``--start-steps`` updates on 30 demonstrations. Its level is fixed
before anything else is run. Arms, each from the start, with equal steps, batch and schedule:

==  ==========================================================================================
K   demonstrations only: does more training do it?
X   and as many rows of new demonstrations as were taken over: is it only more of the expert?
U   and the policy's runs, every row imitated: do marks matter at all?
S   and its successes, whole episodes imitated
G   and its runs by credit
N   as G, but rows that are not to be imitated are seen with noise: is "given" needed?
==  ==========================================================================================

K, X, U and G are trained with two seeds and tested from ``--episodes`` starts; S and N with one
seed, from half of them.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dzrobot.files import append_json_line
from dzrobot.recording.catalog import DatasetCatalog, episode_facts
from dzrobot.rollout.evaluation.comparison import compare, read_results
from dzrobot.training.data import credit

ARMS = {"K": (0, 1), "X": (0, 1), "U": (0, 1), "G": (0, 1), "S": (0,), "N": (0,)}
"""Arm -> training seeds."""

FULL = "KXUG"
"""Arms that are tested from all starts; the others from half of them."""

RECORDS = "records.jsonl"
NOISY = "--noisy-train"
RUNS_SEED, EXTRA_SEED = 1_000_000, 2_000_000
"""Seeds of recorded starts; those that are tested begin at 0."""


@dataclass(frozen=True)
class Stage:
    """One command of the study."""

    name: str
    words: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """Return the command as it is run."""
        program = [__file__] if self.words[0] == NOISY else ["-m", "dzrobot.cli"]
        return [sys.executable, *program, *self.words]


class Study:
    """The folder of a study, and what its stages are.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.root = options.output.absolute()
        self.acting = shlex.split(options.flags)

    def stages(self) -> Iterator[Stage]:
        """Yield the stages in order; each is made when those before it are done."""
        o, root = self.options, self.root
        demonstrate = (
            "collect",
            "--env",
            o.env,
            "--policy",
            o.teacher,
            *shlex.split(o.collect_flags),
        )
        yield Stage("demos", (*demonstrate, f"--episodes={o.demos}", f"--output={root / 'demos'}"))
        yield Stage("start", (
            "train", o.recipe, f"data.train_data_paths=[{root / 'demos'}]",
            f"runner.max_steps={o.start_steps}", f"runner.output_dir={root / 'start-run'}",
            "runner.resume_dir=auto", *o.overrides,
        ))  # fmt: skip
        yield self._test("base", self._exported("start-run"), o.episodes)
        yield Stage("runs", (
            "record", "--env", o.env, "--policy", str(self._exported("start-run")),
            f"--attempts={o.attempts}", "--keep-failures", f"--seed={RUNS_SEED}",
            f"--output={root / 'runs'}", *self.acting, *shlex.split(o.record_flags),
        ))  # fmt: skip
        # So many episodes as have the rows that were taken over, rounded up.
        rows = sum(facts.interventions for facts in episode_facts(root / "runs").values())
        length = float(np.mean(DatasetCatalog.open(root / "demos").episodes.length))
        yield Stage("extra", (
            *demonstrate, f"--episodes={max(1, -(-rows // round(length)))}",
            f"--seed={EXTRA_SEED}", f"--output={root / 'extra'}",
        ))  # fmt: skip
        for arm, seeds in ARMS.items():
            for seed in seeds:
                name = f"{arm}{seed}"
                yield Stage(f"train-{name}", self._train(arm, seed))
                episodes = o.episodes if arm in FULL else max(1, o.episodes // 2)
                yield self._test(name, self._exported(f"run-{name}"), episodes)

    def _exported(self, run: str) -> Path:
        return max((self.root / run / "export").glob("step_*[0-9]"), default=self.root / run)

    def _test(self, name: str, checkpoint: Path, episodes: int) -> Stage:
        o = self.options
        return Stage(f"test-{name}", (
            "eval", "--env", o.env, "--checkpoint", str(checkpoint), f"--episodes={episodes}",
            f"--output={self.root / f'test-{name}'}", *self.acting, *shlex.split(o.eval_flags),
        ))  # fmt: skip

    def _train(self, arm: str, seed: int) -> tuple[str, ...]:
        o, root = self.options, self.root
        start = self._exported("start-run")
        common = {
            "embodiment_tag": o.embodiment,
            "metadata_json_path": str(start / "experiment_cfg" / "metadata.json"),
        }
        sources: list[dict[str, Any]] = [{"dataset_path": str(root / "demos"), "weight": 8}]
        if arm == "X":
            sources += [{"dataset_path": str(root / "extra"), "weight": 2}]
        elif arm != "K":
            by_row = {"credit": {}} if arm in "GN" else {}
            sources += [{"dataset_path": str(root / "runs"), "weight": 2, **by_row}]
        sources = [{**source, **common} for source in sources]
        return (
            *((NOISY,) if arm == "N" else ("train",)), o.recipe, f"model.model_path={start}",
            f"data.train_data_paths={json.dumps(sources)}", f"runner.max_steps={o.steps}",
            f"runner.seed={seed}", f"runner.output_dir={root / f'run-{arm}{seed}'}",
            "runner.resume_dir=auto", *(["data.episodes=all"] if arm == "U" else []),
            *(["data.num_workers=0"] if arm == "N" else []), *o.overrides,
        )  # fmt: skip

    def came_of(self, stage: Stage) -> dict[str, Any]:
        """Return what a stage found: of a test its success, and the pairs with the start."""
        if not stage.name.startswith("test-"):
            return {}
        own = read_results(self.root / stage.name)
        found = {
            "successes": sum(bool(one.success) for one in own.finished.values()),
            "episodes": len(own.finished),
        }
        for base in ("test-base", f"test-K{stage.name[-1]}"):
            if base != stage.name and (self.root / base / "summary.json").is_file():
                # Half as many starts are the first ones of the base.
                (pairs,) = compare([_first(read_results(self.root / base), own), own])
                found[base] = pairs.numbers()
        return found


def _first(base: Any, own: Any) -> Any:
    """Return the results of ``base`` on the starts of ``own``, which has its first ones."""
    from dataclasses import replace

    return replace(base, cases=own.cases, card=own.card)


def noisy_train(words: Sequence[str]) -> int:
    """Train with credit whose rows are seen with noise where they would be given (arm N)."""
    from dzrobot.training.run.launch import end_process, main

    by_credit = credit.Credits.of

    def noisy(self: credit.Credits, *of: Any) -> credit.RowCredit:
        asked = by_credit(self, *of)
        return asked._replace(given=np.zeros_like(asked.given))

    credit.Credits.of = noisy  # type: ignore[method-assign]  # this process trains nothing else
    code = main(words)
    end_process(code)
    return code


def main() -> int:
    """Run the stages that are left."""
    if sys.argv[1:2] == [NOISY]:
        return noisy_train(sys.argv[2:])
    options = _arguments()
    study = Study(options)
    study.root.mkdir(parents=True, exist_ok=True)
    records = study.root / RECORDS
    lines = records.read_text(encoding="utf-8").splitlines() if records.is_file() else []
    done = {json.loads(line)["stage"] for line in lines}
    for stage in study.stages():
        if stage.name not in done:
            print(f"{stage.name}: dzrobot {shlex.join(stage.words)}", flush=True)
            began = time.monotonic()
            code = subprocess.run(stage.command, check=False, env=os.environ).returncode
            if code:
                print(f"{stage.name} ended with {code}; the same command resumes from here")
                return code
            seconds = round(time.monotonic() - began, 1)
            found = study.came_of(stage)
            append_json_line(
                records, {"stage": stage.name, "words": stage.words, "seconds": seconds, **found}
            )
        if stage.name == options.until:
            break
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the study")
    parser.add_argument("--env", default="dzrobot/lift-v0")
    parser.add_argument("--embodiment", default="libero_mini")
    parser.add_argument("--teacher", default="expert", help="policy that demonstrates")
    parser.add_argument("--recipe", default="mini_lift_cpu")
    parser.add_argument("--flags", default="--env-arg resolution=128", help="of eval and record")
    parser.add_argument("--collect-flags", default="--env-arg resolution=128")
    parser.add_argument("--eval-flags", default="--videos none")
    parser.add_argument(
        "--record-flags", default="--takeover expert:stuck=2,noise=0.1", help="who takes over"
    )
    for name, count in (
        ("demos", 30), ("start-steps", 1000), ("steps", 300), ("attempts", 40), ("episodes", 200),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--until", help="last stage to run")
    parser.add_argument("overrides", nargs="*", help="section.field=value of every training")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
