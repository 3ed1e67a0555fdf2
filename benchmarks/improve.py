"""Does credit make a better policy? Arms of training from one start, tested from the same starts.

    python benchmarks/improve.py --output study            # about five hours of two cores
    python benchmarks/improve.py --output study --minutes 100
    python benchmarks/improve.py --output study --table    # what is known so far

Every stage is a command, printed before it runs; an unfinished one resumes. What a stage found is
a line of ``--records``, which lies in the repository: a test with a line there is not run again, on
any machine. Data and weights are not kept there, so a stage that a later one needs is repeated
where ``OUTPUT`` lacks what it made, and must make the same again.

The start is weak on purpose: the bundled network of Lift, its transformer drawn anew and trained
on ``--demos`` demonstrations alone for ``--start-steps`` updates. Arms, each from the start, with
equal steps, batch and schedule:

==  ==========================================================================================
K   demonstrations only: does more training do it?
X   and as many rows of new demonstrations as were taken over: is it only more of the expert?
U   and the policy's runs, every row imitated: do marks matter at all?
S   and its successes, whole episodes imitated
G   and its runs by credit, samples of the video alone among them
N   as G, but rows that are not to be imitated are seen with noise: is "given" needed?
H   as G, without samples of the video alone: what `credit: {}` is since G was known
==  ==========================================================================================

K, X, U and G are trained with two seeds and tested from ``--episodes`` starts; S, N and H with one
seed, from half of them.

Another start was tried first, and given up: the bundled policy with cameras that have become bad
(noise, blur or fog), which succeeded from 144 of 200 starts. Thirty demonstrations with those
cameras alone mended it (arm K: 200 of 200), which leaves nothing to find out
(``improve_first_start.jsonl``). So a start must have learned already what the demonstrations teach.
"""

import argparse
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dzrobot.files import append_json_line
from dzrobot.policies.dreamzero.checkpoints.names import DIT
from dzrobot.policies.dreamzero.tiny import TinyWeightsSource
from dzrobot.recording.catalog import DatasetCatalog, episode_facts
from dzrobot.rollout.evaluation.comparison import read_results
from dzrobot.rollout.evaluation.significance import adjusted_interval, count_pairs, mcnemar_p
from dzrobot.training.data import credit

ARMS = ("K0", "G0", "U0", "X0", "K1", "G1", "U1", "X1", "S0", "N0", "H0")
"""Arm and training seed, in the order of the tests."""

FULL = "KXUG"
"""Arms that are tested from all starts; the others from half of them."""

BUNDLED = Path(__file__).parents[1] / "policies/dreamzero/bundled"
DRAFT = "--env-arg resolution=128 --env-arg quality=draft"
RECORDS = Path(__file__).with_suffix(".jsonl")
DONE = "done.jsonl"
NOISY, BLANK = OWN = ("--noisy-train", "--blank")
"""Stages that are programs of this file."""

RUNS_SEED, EXTRA_SEED = 1_000_000, 2_000_000
"""Seeds of recorded starts; those that are tested begin at 0."""


@dataclass(frozen=True)
class Stage:
    """One command of the study, and which stages must have been run in its folder before."""

    name: str
    words: tuple[str, ...]
    needs: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """Return the command as it is run."""
        program = [__file__] if self.words[0] in OWN else ["-m", "dzrobot.cli"]
        return [sys.executable, *program, *self.words]


class Study:
    """The folder of a study, its stages, and what is known of them.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.root = options.output.absolute()
        self.root.mkdir(parents=True, exist_ok=True)
        self.known = {line["stage"]: line for line in _lines(options.records)}
        self.here = {line["stage"] for line in _lines(self.root / DONE)}
        self.ends = time.monotonic() + 60 * options.minutes

    def run(self, name: str) -> None:
        """Run a stage, and before it those that it needs and this folder lacks.

        Raises:
            SystemExit: the command failed, the time is over, or it made something else than before.
        """
        if name in self.here or (name.startswith("test-") and name in self.known):
            return
        for needed in STAGES[name.partition("-")[0]](self, name).needs:
            self.run(needed)
        stage = STAGES[name.partition("-")[0]](self, name)
        if time.monotonic() > self.ends:
            sys.exit(f"the time is over before {name}; the same command resumes from here")
        print(f"{name}: dzrobot {shlex.join(stage.words)}", flush=True)
        began = time.monotonic()
        code = subprocess.run(stage.command, check=False).returncode
        if code:
            sys.exit(f"{name} ended with {code}; the same command resumes from here")
        self._keep(name, {**self.found(name), "seconds": round(time.monotonic() - began, 1)})

    def _keep(self, name: str, found: Mapping[str, Any]) -> None:
        before = self.known.get(name)
        unlike = [
            f"{key} {before[key]}, now {found[key]}"
            for key in found
            if before and key != "seconds" and before[key] != found[key]
        ]
        if unlike:
            sys.exit(
                f"{name} made something else than in {self.options.records}: {'; '.join(unlike)}. "
                "Results of the two do not belong together: name other --records, and begin anew."
            )
        if not before:
            self.known[name] = {"stage": name, **found}
            append_json_line(self.options.records, self.known[name])
        append_json_line(self.root / DONE, {"stage": name})
        self.here.add(name)

    def found(self, name: str) -> dict[str, Any]:
        """Return what a stage made: a test its successes, data their size, training its weights."""
        folder = self.root / name
        if name.startswith("test-"):
            ends = read_results(folder).finished.values()
            return {"succeeded": "".join(str(int(bool(one.success))) for one in ends)}
        if (folder / "meta" / "info.json").is_file():
            facts = episode_facts(folder).values()
            lengths = DatasetCatalog.open(folder).episodes.length
            return {
                "episodes": len(lengths),
                "rows": int(sum(lengths)),
                "successes": sum(bool(one.success) for one in facts),
                "taken_over": sum(one.interventions for one in facts),
            }
        with (self.exported(name) / "model.safetensors").open("rb") as weights:
            return {"weights": hashlib.file_digest(weights, "sha256").hexdigest()[:16]}

    def exported(self, run: str) -> Path:
        """Return the last checkpoint that a training run exported."""
        return max((self.root / run / "export").glob("step_*[0-9]"), default=self.root / run)

    def common(self, run: str, steps: int) -> tuple[str, ...]:
        """Return the words that every training has."""
        return (
            f"runner.max_steps={steps}", f"runner.output_dir={self.root / run}",
            "runner.resume_dir=auto", *self.options.overrides,
        )  # fmt: skip


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines()]


def demonstrations(study: Study, name: str) -> Stage:
    """Return the stage that collects demonstrations: the first ones, or as many new rows."""
    o = study.options
    needs: tuple[str, ...] = ()
    count = [f"--episodes={o.demos}"]
    if name == "extra":
        needs = ("demos", "runs")
        made = [study.known.get(one, {}) for one in needs]
        if all(made):
            # So many episodes as have the rows that were taken over, rounded up.
            length = round(made[0]["rows"] / made[0]["episodes"])
            count = [f"--episodes={max(1, -(-made[1]['taken_over'] // length))}"]
        count += [f"--seed={EXTRA_SEED}"]
    words = ("collect", "--env", o.env, "--policy", o.teacher, *shlex.split(o.collect_flags))
    return Stage(name, (*words, *count, f"--output={study.root / name}"), needs)


def blank(study: Study, name: str) -> Stage:
    """Return the stage that draws a network without knowledge."""
    return Stage(name, (BLANK, str(study.root / name)))


def start(study: Study, name: str) -> Stage:
    """Return the stage that trains the start."""
    o, network = study.options, study.root / "blank"
    words = (
        "train", o.recipe, f"model.model_path={network}",
        f"model.metadata_json_path={network / 'experiment_cfg' / 'metadata.json'}",
        f"data.train_data_paths=[{study.root / 'demos'}]", *study.common(name, o.start_steps),
    )  # fmt: skip
    return Stage(name, words, ("demos", "blank"))


def runs(study: Study, name: str) -> Stage:
    """Return the stage that records the start's runs, with takeovers."""
    o = study.options
    words = (
        "record", "--env", o.env, "--policy", str(study.exported("start")),
        f"--attempts={o.attempts}", "--keep-failures", f"--seed={RUNS_SEED}",
        f"--output={study.root / name}", *shlex.split(o.flags), *shlex.split(o.record_flags),
    )  # fmt: skip
    return Stage(name, words, ("start",))


def train(study: Study, name: str) -> Stage:
    """Return the stage that trains an arm, such as ``train-K0``."""
    o, arm, seed = study.options, name[-2], name[-1]
    begin = study.exported("start")
    beside = {"K": (), "X": ("extra",)}.get(arm, ("runs",))
    sources: list[dict[str, Any]] = [{"dataset_path": str(study.root / "demos"), "weight": 8}]
    by_row = {"credit": {"share": 0 if arm == "H" else None}} if arm in "GNH" else {}
    sources += [{"dataset_path": str(study.root / one), "weight": 2, **by_row} for one in beside]
    common = {
        "embodiment_tag": o.embodiment,
        "metadata_json_path": str(begin / "experiment_cfg" / "metadata.json"),
    }
    words = (
        NOISY if arm == "N" else "train", o.recipe, f"model.model_path={begin}",
        f"data.train_data_paths={json.dumps([{**source, **common} for source in sources])}",
        f"runner.seed={seed}", *study.common(name, o.steps),
        *(["data.episodes=all"] if arm == "U" else []),
        *(["data.num_workers=0"] if arm == "N" else []),
    )  # fmt: skip
    return Stage(name, words, ("demos", "start", *beside))


def test(study: Study, name: str) -> Stage:
    """Return the stage that evaluates an arm, such as ``test-K0``, or the start, ``test-start``."""
    o, arm = study.options, name.partition("-")[2]
    trained = "start" if arm == "start" else f"train-{arm}"
    episodes = o.episodes if arm == "start" or arm[0] in FULL else max(1, o.episodes // 2)
    words = (
        "eval", "--env", o.env, "--checkpoint", str(study.exported(trained)),
        f"--episodes={episodes}", f"--output={study.root / name}", *shlex.split(o.flags),
        *shlex.split(o.eval_flags),
    )  # fmt: skip
    return Stage(name, words, (trained,))


STAGES = {
    "demos": demonstrations, "extra": demonstrations, "blank": blank, "start": start, "runs": runs,
    "train": train, "test": test,
}  # fmt: skip


def table(known: Mapping[str, Mapping[str, Any]]) -> str:
    """Return every test beside the start's and beside K's of the same seed, as Markdown."""
    rows = ["| arm | success | against | won / lost | difference, 95 % | p |", "|---" * 6 + "|"]
    for name in (f"test-{arm}" for arm in ("start", *ARMS)):
        if name not in known:
            continue
        own = [one == "1" for one in known[name]["succeeded"]]
        bases = [b for b in ("test-start", f"test-K{name[-1]}") if b in known and b != name]
        for base in bases or [""]:
            cells = f"| {name[5:]} | {sum(own)}/{len(own)} |"
            if base:
                # Half as many starts are the first ones of the base.
                first = [one == "1" for one in known[base]["succeeded"][: len(own)]]
                pairs = count_pairs(first, own)
                low, high = (100 * end for end in adjusted_interval(pairs))
                p = mcnemar_p(pairs.first_only, pairs.second_only)
                cells += f" {base[5:]} | {pairs.second_only} / {pairs.first_only} |"
                shown = f"{p:.3f}" if p >= 0.001 else "< 0.001"
                cells += f" {100 * pairs.difference:+.1f} ({low:+.1f} to {high:+.1f}) | {shown} |"
            else:
                cells += " | | | |"
            rows.append(cells)
    return "\n".join(rows)


def draw_network(folder: Path) -> int:
    """Write the bundled checkpoint with a transformer that knows nothing, drawn by seed 0."""
    left = shutil.ignore_patterns("libero_object", "__*", "*.md", "*passport*")
    shutil.copytree(BUNDLED, folder, ignore=left, dirs_exist_ok=True)
    tensors = load_file(BUNDLED / "model.safetensors")
    drawn = {name: tuple(one.shape) for name, one in tensors.items() if name.startswith(DIT)}
    source = TinyWeightsSource(drawn, 0, torch.float32)
    tensors |= {name: one.to(tensors[name].dtype) for name, one in source.stream(drawn)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return 0


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
    if sys.argv[1:2] == [BLANK]:
        return draw_network(Path(sys.argv[2]))
    options = _arguments()
    study = Study(options)
    if not options.table:
        for name in options.only.split(",") if options.only else ("start", *ARMS):
            study.run(f"test-{name}")
    print(table(study.known))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the study")
    parser.add_argument("--records", type=Path, default=RECORDS, help="what is known so far")
    parser.add_argument("--table", action="store_true", help="print what is known, and end")
    parser.add_argument("--only", help="arms to test, such as start,K0,G0")
    parser.add_argument("--minutes", type=float, default=np.inf, help="begin no stage after these")
    parser.add_argument("--env", default="dzrobot/lift-v0")
    parser.add_argument("--embodiment", default="libero_mini")
    parser.add_argument("--teacher", default="expert", help="policy that demonstrates")
    parser.add_argument("--recipe", default="mini_lift_cpu")
    parser.add_argument("--flags", default=DRAFT, help="of eval and record")
    parser.add_argument("--collect-flags", default=f"{DRAFT} --embodiment libero_mini")
    parser.add_argument("--eval-flags", default="--videos none")
    parser.add_argument(
        "--record-flags", default="--takeover expert:random=0.2,noise=0.1", help="who takes over"
    )
    for name, count in (
        ("demos", 30), ("start-steps", 1000), ("steps", 300), ("attempts", 40), ("episodes", 200),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("overrides", nargs="*", help="section.field=value of every training")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
