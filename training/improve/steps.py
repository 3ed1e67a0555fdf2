"""The steps of an improvement, each a command of its own, and what is left of them.

What has been done is what lies in the folder: a step is done when its result is there. Every
command resumes by itself, so that a step that was killed is given once more.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dzrobot.documents import read_json
from dzrobot.errors import ConfigError
from dzrobot.files import write_json
from dzrobot.recording.catalog import episode_facts
from dzrobot.recording.formats import FACTS
from dzrobot.registration import SUITES
from dzrobot.rollout.demonstrations.tally import Tally
from dzrobot.rollout.evaluation.comparison import compare, read_results
from dzrobot.rollout.evaluation.report import STEPS_FILE, StepScore
from dzrobot.rollout.evaluation.studies.series import UNPERTURBED
from dzrobot.rollout.perturbation import Perturbation
from dzrobot.training.improve.improve_settings import SEEDS_OF_A_ROUND, ImproveSettings
from dzrobot.training.improve.rounds import Paired, Recorded, Round, decided, why_over
from dzrobot.training.recipes.read import read_recipe
from dzrobot.training.sft_config import SFTConfig

ROUND_FILE = "round.json"
CANDIDATE = "candidate"
START = "start"

DECIDE = "decide"
"""Name of the step that runs no command."""


@dataclass(frozen=True, kw_only=True)
class ImproveStep:
    """One command and the file that says that it is done."""

    name: str
    about: str
    """What it does, for people."""

    round: int
    """0: before the first one."""

    result: Path
    words: tuple[str, ...] = ()
    """The command; empty of what is decided here."""

    made: bool = False
    """Whether the command makes ``result`` itself, last of all; otherwise it is written afterwards.
    """

    recording: Path | None = None
    """Folder of episodes that are waited for, where a person gives the command."""

    def finish(self, seconds: float) -> None:
        """Note that the command has succeeded.

        Args:
            seconds: That it took, this time.
        """
        if not self.made:
            self.result.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.result, {"words": self.words, "seconds": round(seconds, 1)})


@dataclass(frozen=True)
class Improvement:
    """The folder of an improvement."""

    folder: Path
    settings: ImproveSettings

    @cached_property
    def rounds(self) -> dict[int, Round]:
        """Rounds that are decided, by number."""
        found = {}
        for number in range(1, self.settings.rounds + 1):
            path = self.place(number) / ROUND_FILE
            if not path.is_file():
                break
            found[number] = read_json(path, Round, ConfigError)
        return found

    @cached_property
    def _config(self) -> SFTConfig:
        """The recipe of every round, without its runs."""
        demos = f"data.train_data_paths={json.dumps(self.settings.demos)}"
        return read_recipe(self.settings.recipe, [*self.settings.overrides, demos])[1]

    @property
    def why_over(self) -> str:
        """Return why there are no more rounds; empty: there is another."""
        return why_over(self.rounds, self.settings)

    def place(self, number: int) -> Path:
        """Return the folder of a round; 0: of the checkpoint to begin with."""
        return self.folder / (START if number == 0 else f"round-{number:02d}")

    def kept(self, before: int) -> int:
        """Return the round whose policy is the kept one before a round; 0: the first checkpoint."""
        return max((n for n, one in self.rounds.items() if one.kept and n < before), default=0)

    def checkpoint(self, number: int) -> Path:
        """Return the checkpoint of a round; 0: the first one."""
        if number == 0:
            return Path(self.settings.checkpoint)
        return self.place(number) / CANDIDATE

    def next_step(self) -> ImproveStep | None:
        """Return the first step whose result is not there; None: there are no more.

        Raises:
            DzrobotError: what earlier steps left cannot be read.
        """
        return next((step for step in self._steps() if not step.result.exists()), None)

    def names(self, number: int) -> list[str]:
        """Return the names of all steps of a round; 0: of those before the first one."""
        settings = self.settings
        others = ["perturb"] * bool(settings.perturb) + [_folder(name) for name in settings.also]
        if number == 0:
            return ["test", *others]
        return ["record", "credit", "train", "choose", "export", "test", *others, DECIDE]

    def commands(self) -> list[tuple[str, ...]]:
        """Return a command of every kind that a round gives, to be checked beforehand."""
        found = [self._test(0), *(step.words for step in self._others(0)), self._record(1, 0).words]
        return [*found, self._choose(1)]

    def _steps(self) -> Iterator[ImproveStep]:
        """Yield all steps in order; each is made when those before it are done."""
        yield self._evaluated(0, "test", "evaluate the start on the test starts", self._test(0))
        yield from self._others(0)
        for number in range(1, self.settings.rounds + 1):
            if number > len(self.rounds) and self.why_over:
                return
            yield from self._of_round(number)

    def _of_round(self, number: int) -> Iterator[ImproveStep]:
        place, kept = self.place(number), self.kept(number)
        if (place / ROUND_FILE).exists():
            return
        yield self._record(number, kept)
        yield ImproveStep(
            name="credit", about="see what is learned from each row", round=number,
            words=self._credit(number), result=place / "credit.json", made=True,
        )  # fmt: skip
        yield ImproveStep(
            name="train", about=f"train from {self._called(kept)}", round=number,
            words=self._train(number, kept), result=done_file(place, "train"),
        )  # fmt: skip
        about = "evaluate the steps on the development starts"
        yield self._evaluated(number, "choose", about, self._choose(number))
        step = chosen_step(place)
        yield ImproveStep(
            name="export", about=f"write step {step}, the best of them, as a checkpoint",
            round=number, result=place / CANDIDATE, made=True,
            words=("export", str(place / "run"), f"--step={step}",
                   f"--output={place / CANDIDATE}"),
        )  # fmt: skip
        about = f"compare it with {self._called(kept)} on the test starts"
        yield self._evaluated(number, "test", about, self._test(number, kept))
        yield from self._others(number)
        yield ImproveStep(
            name=DECIDE, about="keep it, or refuse it", round=number, result=place / ROUND_FILE,
        )  # fmt: skip

    def _called(self, number: int) -> str:
        return "the checkpoint of the start" if number == 0 else f"that of round {number}"

    def _evaluated(self, number: int, name: str, about: str, words: tuple[str, ...]) -> ImproveStep:
        mark = done_file(self.place(number), name)
        return ImproveStep(name=name, about=about, round=number, words=words, result=mark)

    def _others(self, number: int) -> Iterator[ImproveStep]:
        """Yield the evaluations of what may be forgotten."""
        place, settings = self.place(number), self.settings
        if settings.perturb:
            # The unperturbed episodes are those of the test, which are there.
            axes = [word for axis in settings.perturb for word in ("--perturb", axis)]
            words = (*self._evaluate(number, settings.env, place), *axes)
            yield self._evaluated(number, "perturb", "see what is forgotten: perturbed", words)
        for name in settings.also:
            words = self._evaluate(number, name, place / _folder(name))
            yield self._evaluated(number, _folder(name), f"see what is forgotten: {name}", words)

    def _evaluate(self, number: int, env: str, output: Path) -> tuple[str, ...]:
        settings = self.settings
        return (
            "eval", "--suite" if env in SUITES else "--env", env,
            "--checkpoint", str(self.checkpoint(number)), "--episodes", str(settings.episodes),
            "--seed", str(settings.seed), "--output", str(output),
            *settings.words("flags"), *settings.words("eval_flags"),
        )  # fmt: skip

    def _test(self, number: int, kept: int | None = None) -> tuple[str, ...]:
        output = self.place(number) / UNPERTURBED
        against = () if kept is None else ("--against", str(self.place(kept) / UNPERTURBED))
        return (*self._evaluate(number, self.settings.env, output), *against)

    def _choose(self, number: int) -> tuple[str, ...]:
        settings, place = self.settings, self.place(number)
        return (
            "eval", "--env", settings.env, "--checkpoint", str(place / "run"), "--steps", "all",
            "--episodes", str(settings.dev_episodes), "--first-episode", str(settings.episodes),
            "--seed", str(settings.seed), "--output", str(place / "steps"),
            *settings.words("flags"), *settings.words("eval_flags"),
        )  # fmt: skip

    def _record(self, number: int, kept: int) -> ImproveStep:
        settings, place = self.settings, self.place(number)
        words = (
            "record", "--env", settings.env, "--policy", str(self.checkpoint(kept)),
            "--attempts", str(settings.attempts), "--keep-failures", "--round", str(number),
            "--seed", str(settings.seed + number * SEEDS_OF_A_ROUND),
            "--output", str(place / "recording"),
            *settings.words("flags"), *settings.words("record_flags"),
        )  # fmt: skip
        about = f"record {settings.attempts} episodes of {self._called(kept)}"
        return ImproveStep(
            name="record", about=about, round=number, words=words,
            result=done_file(place, "record"),
            recording=place / "recording" if settings.by_person else None,
        )  # fmt: skip

    def _credit(self, number: int) -> tuple[str, ...]:
        place, tag = self.place(number), self._config.model.embodiment_tag
        return (
            "credit", str(place / "recording"), "--embodiment", tag,
            "--recipe", self.settings.recipe, "--statistics", str(self.settings.statistics),
            "--json", str(place / "credit.json"),
        )  # fmt: skip

    def _train(self, number: int, kept: int) -> tuple[str, ...]:
        settings = self.settings
        several = () if settings.processes == 1 else ("--processes", str(settings.processes))
        words = self.recipe_words(number, kept)
        return ("train", settings.recipe, *words, "runner.resume_dir=auto", *several)

    def recipe_words(self, number: int, kept: int) -> tuple[str, ...]:
        """Return the overrides of the recipe in a round.

        Args:
            number: Of the round; the runs of this and all earlier ones are learned from. 0: none.
            kept: Round whose policy it begins from; 0: the first checkpoint.
        """
        settings, config = self.settings, self._config
        common = {
            "embodiment_tag": config.model.embodiment_tag,
            "metadata_json_path": str(settings.statistics), "distribute_weights": True,
        }  # fmt: skip
        runs = [str(self.place(n) / "recording") for n in range(1, number + 1)]
        sources = [{"dataset_path": settings.demos, "weight": settings.demos_weight, **common}]
        if runs:
            weight = settings.runs_weight
            sources += [{"dataset_path": runs, "weight": weight, "credit": {}, **common}]
        steps = -(-config.runner.max_steps // config.checkpoint.save_interval)
        return (
            *settings.overrides,
            f"model.model_path={self.checkpoint(kept)}",
            f"data.train_data_paths={json.dumps(sources)}",
            f"runner.output_dir={self.place(number) / 'run'}",
            # Every step is a candidate.
            f"checkpoint.keep_last_k={max(2, steps)}",
            "checkpoint.export=false",
        )

    def decide(self, step: ImproveStep) -> Round:
        """Return what came of a round whose evaluations are done, and write it down.

        Raises:
            DzrobotError: a result of it cannot be read.
        """
        number, place = step.round, self.place(step.round)
        before = self.place(self.kept(number))

        def paired(name: str) -> Paired:
            runs = [read_results(one / name) for one in (before, place)]
            (found,) = compare(runs)
            return Paired.of("test" if name == UNPERTURBED else name, found)

        others = [Perturbation.read(one).text.replace(":", "-") for one in self.settings.perturb]
        others += [_folder(name) for name in self.settings.also]
        recorded = Recorded.of(place / "recording")
        found = decided(
            number, chosen_step(place), recorded, [*map(paired, [UNPERTURBED, *others])],
            self.settings,
        )  # fmt: skip
        write_json(step.result, found.model_dump())
        return found


def has_waited(step: ImproveStep, attempts: int) -> bool:
    """Return whether the episodes of a round that a person records are all there."""
    root = step.recording
    if root is None or not (root / FACTS).is_file():
        return False
    return Tally.of(root, len(episode_facts(root))).attempts >= attempts


def chosen_step(place: Path) -> int:
    """Return the training step that did best on the development starts; of equals the first.

    Args:
        place: Folder of the round.

    Raises:
        ConfigError: the scores cannot be read.
    """
    scores = read_json(place / "steps" / STEPS_FILE, list[StepScore], ConfigError)
    return max(scores, key=lambda one: one.successes).step


def done_file(place: Path, name: str) -> Path:
    """Return the file that says that a step of a round is done.

    Args:
        place: Folder of the round.
        name: Of the step.
    """
    return place / "done" / f"{name}.json"


def _folder(name: str) -> str:
    return re.sub(r"[/:]", "-", name)
