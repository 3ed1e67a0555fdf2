"""Demonstrations: a policy with privileges acts, and its successes become a LeRobot dataset.

Attempts are numbered; attempt ``k`` starts from seed ``first_seed + k`` and its noise is keyed by
that seed, so the dataset does not depend on the number of workers or on interruptions.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import DatasetError, ProtocolError
from dzrobot.recording import EpisodeWriter
from dzrobot.rollout.processes import end_with_parent

PLAN_FILE = Path("meta") / "collection.json"
ATTEMPTS_FILE = Path("meta") / "collection_attempts.jsonl"

_NOISE_KEY = 0x6E6F6973


@dataclass(frozen=True, kw_only=True)
class CollectionPlan:
    """What to collect; it fixes the dataset to the bit, and is kept in the dataset's ``meta/``."""

    env: str
    """Gymnasium id."""

    env_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for ``gym.make``."""

    embodiment: str = "libero_sim"
    """Embodiment whose keys the environment delivers; names the dataset's columns."""

    policy: str = "expert"
    """``expert``, or ``module:factory``; the factory takes the environment."""

    episodes: int = 10
    """Successful episodes to keep."""

    noise: float = 0.0
    """Standard deviation of what is added to the first six numbers of each executed action. The
    dataset keeps the policy's own action: what to do from where the noise has led."""

    hold_steps: int = 0
    """Steps recorded after success, so that the end of a task is in the data too."""

    max_steps: int = 150
    """Steps after which an attempt counts as failed."""

    first_seed: int = 1_000_000
    """Seed of attempt 0; far from the seeds of evaluations."""

    starts: tuple[int, ...] = ()
    """Stored initial states that attempts begin from in turn, so that others are left to
    evaluations. Empty: the seed chooses among all."""

    def reset_arguments(self, seed: int) -> dict[str, Any]:
        """Return what the environment is reset with for the attempt of ``seed``."""
        if not self.starts:
            return {"seed": seed}
        start = self.starts[(seed - self.first_seed) % len(self.starts)]
        return {"seed": seed, "options": {"init_state_id": start}}


@dataclass(frozen=True)
class Attempt:
    """One attempt as a worker hands it back."""

    seed: int
    init_state_id: int
    success: bool
    frames: list[tuple[dict[str, Any], np.ndarray]]


@dataclass(frozen=True)
class Progress:
    """How far a collection is."""

    attempts: int
    episodes: int


def collect(
    plan: CollectionPlan,
    root: Path,
    *,
    format: tuple[str, bool] = ("v2.1", False),  # noqa: A002
    workers: int = 1,
    report: Callable[[Progress], None] = lambda _: None,
) -> Progress:
    """Record ``plan.episodes`` successes in ``root``; run again after an interruption to go on.

    Args:
        plan: What to collect.
        root: Folder of the dataset.
        format: Version of the dataset and whether pictures are stored as video.
        workers: Processes that simulate at the same time.
        report: Called after every attempt.

    Raises:
        ProtocolError: ``root`` holds a collection of another plan.
        DatasetError: too few attempts succeed.
    """
    robot = load_embodiment(plan.embodiment)
    version, video = format
    with EpisodeWriter(
        root, robot, fps=robot.timing.control_hz, version=version, video=video
    ) as writer:
        _keep_plan(plan, root)
        done = _done(root)
        logged = sum(done)
        for number, attempt in _attempts(plan, len(done), workers):
            if attempt.success:
                logged += 1
                if logged > writer.episodes:
                    _save(writer, attempt)
            _log_attempt(root, attempt)
            progress = Progress(number + 1, writer.episodes)
            report(progress)
            if writer.episodes >= plan.episodes:
                return progress
            if number >= 20 + 20 * plan.episodes:
                raise DatasetError(
                    f"{progress.attempts} attempts gave {progress.episodes} successes of "
                    f"{plan.episodes} asked for: lower --noise, or raise --max-steps"
                )
        return Progress(len(done), writer.episodes)


def run_attempt(plan: CollectionPlan, seed: int) -> Attempt:
    """Run one attempt from ``seed`` in this process's environment."""
    env = _environment(plan)
    observation, info = env.reset(**plan.reset_arguments(seed))
    start = int(info["init_state_id"])
    policy = _policy(plan, env)
    noise = np.random.default_rng((_NOISE_KEY, seed))
    frames: list[tuple[dict[str, Any], np.ndarray]] = []
    held = 0
    for _ in range(plan.max_steps + plan.hold_steps):
        action = policy.act(observation)
        frames.append((observation, action))
        executed = action.copy()
        executed[:6] += noise.normal(0.0, plan.noise, 6).astype(np.float32)
        observation, _, _, _, info = env.step(np.clip(executed, -1.0, 1.0))
        held = held + 1 if info["is_success"] else 0
        if held > plan.hold_steps:
            return Attempt(seed, start, True, frames)
        if held == 0 and len(frames) >= plan.max_steps:
            break
    return Attempt(seed, start, False, [])


def _attempts(plan: CollectionPlan, first: int, workers: int) -> Iterator[tuple[int, Attempt]]:
    """Yield attempts in order, however many workers run them."""
    context = multiprocessing.get_context("spawn")
    environment = dict(os.environ)
    with ProcessPoolExecutor(workers, context, _adopt, (environment,)) as pool:
        waiting: list[Future[Attempt]] = []
        number = first
        try:
            while True:
                while len(waiting) < 2 * workers:
                    seed = plan.first_seed + number + len(waiting)
                    waiting.append(pool.submit(run_attempt, plan, seed))
                yield number, waiting.pop(0).result()
                number += 1
        finally:
            for future in waiting:
                future.cancel()


def _adopt(environment: Mapping[str, str]) -> None:
    end_with_parent()
    os.environ.update(environment)


_environments: dict[str, Any] = {}


def _environment(plan: CollectionPlan) -> Any:
    """Return this process's environment; it is made once and reset for every attempt."""
    import gymnasium as gym

    import dzrobot  # noqa: F401 (registers the ids)

    key = json.dumps([plan.env, dict(plan.env_arguments)], sort_keys=True)
    if key not in _environments:
        _environments[key] = gym.make(
            plan.env,
            max_episode_steps=plan.max_steps + plan.hold_steps + 1,
            **{"stop_on_success": False, **plan.env_arguments},
        )
    return _environments[key]


def _policy(plan: CollectionPlan, env: Any) -> Any:
    from importlib import import_module

    name = "dzrobot.envs.expert:Expert" if plan.policy == "expert" else plan.policy
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ProtocolError(f"policy {name!r} is neither 'expert' nor 'module:factory'")
    return getattr(import_module(module), attribute)(env)


def _keep_plan(plan: CollectionPlan, root: Path) -> None:
    # More episodes of the same plan may be added later; everything else must stay as it was.
    wanted = asdict(plan) | {"episodes": None, "starts": list(plan.starts)}
    path = root / PLAN_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(wanted, indent=1), encoding="utf-8")
        return
    there = json.loads(path.read_text(encoding="utf-8"))
    different = [
        f"{name}: {there.get(name)!r} there, {wanted[name]!r} given"
        for name in wanted
        if there.get(name) != wanted[name]
    ]
    if different:
        raise ProtocolError(
            f"{root} was collected differently ({'; '.join(different)}): use another folder"
        )


def _done(root: Path) -> list[bool]:
    path = root / ATTEMPTS_FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    # What follows the last line break is a line torn by a crash.
    path.write_text("".join(f"{line}\n" for line in lines[:-1]), encoding="utf-8")
    return [bool(json.loads(line)["success"]) for line in lines[:-1]]


def _log_attempt(root: Path, attempt: Attempt) -> None:
    line = {
        "seed": attempt.seed,
        "init_state_id": attempt.init_state_id,
        "success": attempt.success,
        "steps": len(attempt.frames),
    }
    with (root / ATTEMPTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _save(writer: EpisodeWriter, attempt: Attempt) -> None:
    for observation, action in attempt.frames:
        writer.add_frame(observation, action)
    writer.save_episode(success=True, seed=attempt.seed, init_state_id=attempt.init_state_id)
