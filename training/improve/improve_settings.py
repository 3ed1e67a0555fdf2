"""What an improvement is asked to do: written into its folder once, and the same ever after."""

import shlex
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from dzrobot.declared import Flag, check_fields, declared
from dzrobot.documents import read_json
from dzrobot.errors import ConfigError, suggest
from dzrobot.files import explained, write_json
from dzrobot.registration import SUITES
from dzrobot.rollout.perturbation import Perturbation
from dzrobot.training.recipes.architecture import METADATA_FILE

SETTINGS_FILE = "improve.json"

SEEDS_OF_A_ROUND = 1_000_000
"""Seeds between the starts of one round's recording and the next; those below are evaluated."""

OWN_FIELDS = (
    "model.model_path", "model.metadata_json_path", "data.train_data_paths", "runner.output_dir",
    "runner.resume_dir", "checkpoint.keep_last_k", "checkpoint.export",
)  # fmt: skip
"""Fields of a recipe that follow from the folder."""

_EVALUATED = (
    "--output", "--checkpoint", "--policy", "--server", "--episodes", "--first-episode", "--seed",
    "--against", "--stop-early", "--steps", "--perturb", "--blind", "--shard", "--suite", "--env",
)  # fmt: skip
_RECORDED = (
    "--output", "--policy", "--keyboard", "--replay", "--call", "--episodes", "--attempts",
    "--keep-failures", "--seed", "--round", "--env",
)  # fmt: skip
_FREE = {
    "flags": tuple(dict.fromkeys(_EVALUATED + _RECORDED)),
    "eval_flags": _EVALUATED,
    "record_flags": _RECORDED,
}
"""Fields of the settings that hold words of other commands -> flags that may not be among them."""


@dataclass(frozen=True, kw_only=True)
class ImproveSettings:
    """Where an improvement begins, and what every round of it does."""

    checkpoint: Annotated[str, Flag("folder of the checkpoint to begin with", metavar="DIR")]
    """Gives the weights of the first round, and the statistics of all."""

    demos: Annotated[tuple[str, ...], Flag(
        "recordings that it was trained on: a,b", kind="names", metavar="DATASET,...",
    )]  # fmt: skip
    """Demonstrations; they train every round beside the runs of the policy."""

    recipe: Annotated[str, Flag("recipe that every round trains by: built-in, or a YAML file")]
    """As ``dzrobot train`` takes it."""

    env: Annotated[str, Flag("Gymnasium id that is recorded and evaluated in")]
    """Such as ``dzrobot/lift-v0``."""

    overrides: tuple[str, ...] = ()
    """``section.field=value`` each, over the recipe."""

    flags: Annotated[str, Flag(
        'flags of both `dzrobot eval` and `dzrobot record`, such as "--env-arg resolution=128"',
        metavar="WORDS",
    )] = ""  # fmt: skip
    """Words that evaluations and recordings are given alike."""

    eval_flags: Annotated[str, Flag(
        "flags of `dzrobot eval` alone, such as --eval-flags='--workers 4'", metavar="WORDS",
    )] = ""  # fmt: skip
    """Words that evaluations are given."""

    record_flags: Annotated[str, Flag(
        "flags of `dzrobot record` alone, such as --record-flags='--teleop spacemouse' or, in "
        "simulation, '--takeover expert:stuck=2'", metavar="WORDS",
    )] = ""  # fmt: skip
    """Words that recordings are given: who takes over, above all."""

    by_person: Annotated[bool, Flag(
        "a person gives the command that records, elsewhere or later: wait for their episodes",
    )] = False  # fmt: skip
    """Whether a round's episodes are waited for, not recorded."""

    episodes: Annotated[int, Flag("test starts, never recorded from", least=1, most=100_000)] = 200
    """Starts of the paired test."""

    dev_episodes: Annotated[int, Flag(
        "development starts, which choose the training step", least=1, most=100_000,
    )] = 50  # fmt: skip
    """They follow the test starts."""

    attempts: Annotated[int, Flag("episodes recorded in a round", least=1, most=100_000)] = 40
    """Whatever they come to."""

    rounds: Annotated[int, Flag(
        "most rounds; the p value of each is corrected for so many", least=1, most=50,
    )] = 3  # fmt: skip
    """Most rounds; they share the 5 % level."""

    perturb: Annotated[tuple[str, ...], Flag(
        "axes, as of `dzrobot eval --perturb`: what may be forgotten, of the test starts",
        kind="names", metavar="AXIS[:LEVEL],...",
    )] = ()  # fmt: skip
    """Perturbations under which a round may not be worse."""

    also: Annotated[tuple[str, ...], Flag(
        "LIBERO suites or Gymnasium ids: what may be forgotten elsewhere", kind="names",
        metavar="NAME,...",
    )] = ()  # fmt: skip
    """Other suites or environments in which a round may not be worse."""

    margin: Annotated[float, Flag(
        "points of success that may be lost there, at the lower end of the interval",
        least=0, most=100,
    )] = 5.0  # fmt: skip
    """Percentage points."""

    demos_weight: Annotated[float, Flag(
        "share of the demonstrations in training, relative to --runs-weight", least=0.001, most=1e6,
    )] = 8.0  # fmt: skip
    """See ``weight`` of a data source."""

    runs_weight: Annotated[float, Flag(
        "share of the policy's own runs, of all rounds together", least=0.001, most=1e6,
    )] = 2.0  # fmt: skip
    """See ``weight`` of a data source; the rounds share it by their size."""

    seed: Annotated[int, Flag(
        "of the first test start; round N records from this + N million", least=0, most=10**9,
    )] = 0  # fmt: skip
    """Seed of evaluations and recordings."""

    processes: Annotated[int, Flag(
        "of training, one a GPU; 1: this one", least=1, most=1024,
    )] = 1  # fmt: skip
    """See ``--processes`` of ``dzrobot train``."""

    def __post_init__(self) -> None:
        """Raise ConfigError where something is said twice, or left to no other command."""
        check_fields(self)
        for text in self.perturb:
            Perturbation.read(text)
        for name in self.also:
            if name not in SUITES and not {"/", ":"} & {*name}:
                raise ConfigError(
                    f"--also {name}: it is neither a suite nor a Gymnasium id."
                    f"{suggest(name, SUITES)} Suites: {', '.join(SUITES)}"
                )
        for field, taken in _FREE.items():
            self._refuse_taken(field, taken)
        for word in self.overrides:
            name = word.partition("=")[0]
            if name in OWN_FIELDS:
                raise ConfigError(
                    f"{name} follows from the folder of the improvement: leave it out"
                )

    def _refuse_taken(self, field: str, taken: tuple[str, ...]) -> None:
        option = f"--{field.replace('_', '-')}"
        try:
            words = self.words(field)
        except ValueError as error:
            raise ConfigError(f"{option}: {error} in {vars(self)[field]!r}") from error
        for word in words:
            if word.partition("=")[0] in taken:
                raise ConfigError(
                    f"{option} holds {word.partition('=')[0]}, which follows from the folder and "
                    "the flags of `dzrobot improve`: leave it out there"
                )

    def words(self, field: str) -> list[str]:
        """Return the words of other commands in a field, as a shell splits them."""
        return shlex.split(vars(self)[field])

    @property
    def statistics(self) -> Path:
        """Return the normalization statistics of every round: those of the first checkpoint."""
        return Path(self.checkpoint) / METADATA_FILE

    @property
    def is_helped(self) -> bool:
        """Return whether anything can take over from the policy while a round is recorded."""
        said = {
            word.partition("=")[0] for word in (*self.words("flags"), *self.words("record_flags"))
        }
        return bool(said & {"--teleop", "--takeover"})


def settle(folder: Path, said: dict[str, Any]) -> ImproveSettings:
    """Return the settings of the improvement in ``folder``: those written down, or those said now.

    Args:
        folder: Of the improvement; nothing is written to it.
        said: What was given now, by field.

    Raises:
        ConfigError: something is missing, or was said otherwise before.
    """
    path = folder / SETTINGS_FILE
    for name in ("checkpoint", "recipe"):
        # The command may be repeated from another folder.
        if name in said and Path(said[name]).expanduser().exists():
            said[name] = str(Path(said[name]).expanduser().absolute())
    if "demos" in said:
        said["demos"] = tuple(str(Path(one).expanduser().absolute()) for one in said["demos"])
    if path.exists():
        known = read_json(path, ImproveSettings, ConfigError)
        for name, value in said.items():
            if value != vars(known)[name]:
                raise ConfigError(
                    f"{path}: {name} is {vars(known)[name]!r} in this improvement, not {value!r}: "
                    "leave it out, or begin another one in another folder"
                )
        return known
    needed = [one.name for one in fields(ImproveSettings) if one.name in _NEEDED]
    if missing := [name for name in needed if name not in said]:
        options = {one.field: one.option for one in declared(ImproveSettings)}
        raise ConfigError(
            f"{folder} holds no improvement yet: say where it begins, by "
            f"{', '.join(options[name] for name in missing)}"
        )
    return ImproveSettings(**said)


_NEEDED = ("checkpoint", "demos", "recipe", "env")


def write_settings(folder: Path, settings: ImproveSettings) -> None:
    """Write down what an improvement is asked to do.

    Raises:
        ConfigError: ``folder`` cannot be written to.
    """
    with explained(f"write to {folder}", ConfigError):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / SETTINGS_FILE).exists():
            write_json(folder / SETTINGS_FILE, asdict(settings))
