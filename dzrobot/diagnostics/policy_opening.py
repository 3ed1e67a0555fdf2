"""Opens a policy, its data and its environment to be examined together."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dzrobot.diagnostics.motion import Bench
from dzrobot.diagnostics.own_rows import Recording
from dzrobot.diagnostics.policy_checkup import EXPECTED, LONGEST, ROWS, PolicyCheckup
from dzrobot.diagnostics.recorded import noise_of, read_episodes
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError, ProtocolError
from dzrobot.progress import Show
from dzrobot.recording.catalog import DatasetCatalog
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


@contextmanager
def opened_checkup(  # noqa: PLR0913 - three things that may be missing
    spec: PolicySpec,
    dataset: Path | None,
    env: str | None,
    arguments: Mapping[str, Any],
    episodes: int,
    show: Show,
) -> Iterator[PolicyCheckup]:
    """Yield the examination of a policy; nothing is measured yet.

    Args:
        spec: Which policy, and how it acts.
        dataset: Folder of what it was trained on. None: what needs it is left out.
        env: Where it acts. None: what needs it is left out.
        arguments: Keyword arguments of the environment.
        episodes: How many are looked at.
        show: Takes the progress, in plans and replays.

    Raises:
        DzrobotError: one of them cannot be read or made, or the environment drives an arm.
    """
    if spec.name == REMOTE:
        refuse_local(spec)
    facts = EnvironmentFacts() if env is None else look_at(env, None, arguments)
    if facts.moves_an_arm:
        raise ConfigError(
            f"{env} drives an arm, and this command lets policies and recordings act: leave --env "
            "out, and compare the recording with its arm by `dzrobot doctor data`"
        )
    found = resolve_policy(spec, facts.robot)
    recording, starts, noise = None, [], 0.0
    if dataset is not None:
        catalog = DatasetCatalog.open(dataset)
        reader = DatasetReader(catalog, found.robot, ReaderOptions(empty="count"))
        recording, noise = Recording(reader, facts.task, episodes), noise_of(catalog)
        starts = list(read_episodes(catalog, found.robot, recording.ordinals, images=False))
    done, expected = 0, ROWS + EXPECTED * (env is not None)

    def counted() -> None:
        nonlocal done
        done += 1
        show(done, max(done, expected), "plans and replays")

    misfit, bench, longest = "", None, LONGEST
    with ExitStack() as held:
        if env is not None:
            given = environment_arguments(env, PROTOCOLS["custom"], found.robot, arguments)
            longest = step_limit(env) or LONGEST
            misfit = _misfit(env, given, found.robot)
            bench = held.enter_context(Bench(env, given, found.robot, lambda *_: counted()))
        yield PolicyCheckup(
            found=found, recording=recording, facts=facts, bench=bench, episodes=starts,
            noise=noise, misfit=misfit, longest=longest, count=counted,
        )  # fmt: skip


def _misfit(env: str, given: Mapping[str, Any], robot: Embodiment) -> str:
    """Return why a policy of ``robot`` cannot act in an environment; empty: it can."""
    with looking_at(env, None, given) as made:
        try:
            check_fits(env, made, robot, needed=robot.observation_keys)
        except (ProtocolError, ConfigError) as error:
            return str(error)
    return ""
