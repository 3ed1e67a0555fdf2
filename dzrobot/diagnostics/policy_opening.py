"""Opens a policy, its data and its environment to be examined together."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dzrobot.diagnostics.motion import Bench, RecordedStart
from dzrobot.diagnostics.own_rows import Recording
from dzrobot.diagnostics.policy_checkup import EXPECTED, ROWS, PolicyCheckup
from dzrobot.diagnostics.recorded import noise_of, read_episodes
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError, ProtocolError
from dzrobot.progress import Show
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.recording.formats import EpisodeChoice
from dzrobot.rollout.environment import (
    EnvironmentFacts,
    check_fits,
    environment_arguments,
    look_at,
    looking_at,
    step_limit,
)
from dzrobot.rollout.policy_spec import REMOTE, PolicySpec, refuse_local, resolve_policy
from dzrobot.rollout.protocol import PROTOCOLS
from dzrobot.training.data.dataset import DatasetReader, ReaderOptions


@dataclass(frozen=True, kw_only=True)
class Around:
    """What a policy is examined with; what is missing is left out of the examination."""

    dataset: Path | None = None
    """Folder of what it was trained on."""

    env: str | None = None
    """Where it acts."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""

    recording: Path | None = None
    """Folder of what was recorded where it acts: then the environment is asked what it says of
    itself, and nothing is driven."""

    episodes: int = 4
    """How many are looked at."""

    max_steps: int | None = None
    """Steps per episode where it failed; None: the environment's own limit."""


@contextmanager
def opened_checkup(spec: PolicySpec, around: Around, show: Show) -> Iterator[PolicyCheckup]:
    """Yield the examination of a policy; nothing is measured yet.

    Args:
        spec: Which policy, and how it acts.
        around: Its data and where it acts.
        show: Takes the progress, in plans and replays.

    Raises:
        DzrobotError: one of them cannot be read or made, or the environment drives an arm.
    """
    if spec.name == REMOTE:
        refuse_local(spec)
    env, given = around.env, around.arguments
    facts = EnvironmentFacts() if env is None else look_at(env, None, given)
    driven = env if around.recording is None else None
    if facts.moves_an_arm and driven is not None:
        raise ConfigError(
            f"{env} drives an arm, and nothing is to move here: give --recording FOLDER, what "
            "`dzrobot eval` or `dzrobot record` recorded of it, which is compared instead"
        )
    found = resolve_policy(spec, facts.robot)
    recording = _read(around.dataset, found.robot, facts.task, around.episodes)
    # It is of a policy that fails: its episodes may all be marked so.
    acted = _read(around.recording, found.robot, facts.task, around.episodes, chosen="all")
    starts, noise = list[RecordedStart](), 0.0
    if recording is not None:
        catalog, noise = recording.reader.catalog, noise_of(recording.reader.catalog)
        starts = list(read_episodes(catalog, found.robot, recording.ordinals, images=False))
    done, expected = 0, ROWS + EXPECTED * (driven is not None)

    def counted() -> None:
        nonlocal done
        done += 1
        show(done, max(done, expected), "plans and replays")

    misfit, bench, limit = "", None, around.max_steps or given.get("max_episode_steps")
    with ExitStack() as held:
        if driven is not None:
            made = environment_arguments(driven, PROTOCOLS["custom"], found.robot, given)
            limit = limit or step_limit(driven)
            misfit = _misfit(driven, made, found.robot)
            bench = held.enter_context(Bench(driven, made, found.robot, lambda *_: counted()))
        yield PolicyCheckup(
            found=found, recording=recording, facts=facts, bench=bench, episodes=starts,
            noise=noise, misfit=misfit, most_steps=limit, acted=acted, count=counted,
        )  # fmt: skip


def _read(
    folder: Path | None, robot: Embodiment, task: str | None, episodes: int,
    chosen: EpisodeChoice = "successes",
) -> Recording | None:  # fmt: skip
    if folder is None:
        return None
    options = ReaderOptions(empty="count", episodes=chosen)
    reader = DatasetReader(DatasetCatalog.open(folder), robot, options)
    return Recording(reader, task, episodes)


def _misfit(env: str, given: Mapping[str, Any], robot: Embodiment) -> str:
    """Return why a policy of ``robot`` cannot act in an environment; empty: it can."""
    with looking_at(env, None, given) as made:
        try:
            check_fits(env, made, robot, needed=robot.observation_keys)
        except (ProtocolError, ConfigError) as error:
            return str(error)
    return ""
