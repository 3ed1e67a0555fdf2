"""What one more item costs when there are few, and when there are twenty times as many.

    python benchmarks/growth.py                          # every job
    python benchmarks/growth.py --jobs recorder-v3.0 --sizes 500 10000

Processor time, one thread. A job whose cost per item grows with the number of items is quadratic in
all: the last column says by how much one more costs at the larger size.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.embodiments.timing import Timing
from dzrobot.recording import EpisodeWriter
from dzrobot.rollout.evaluation.card import keep_card
from dzrobot.rollout.evaluation.evaluate import EvalProgress, evaluate
from dzrobot.rollout.evaluation.planning import EvaluationRequest, RunOptions, prepare
from dzrobot.rollout.evaluation.report import summarize
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import (
    PROTOCOLS,
    EpisodeSpec,
    EvalSpec,
    environment_key,
    plan_episodes,
)
from dzrobot.rollout.queue import LocalQueue
from dzrobot.rollout.records import Record, RecordFile

LAST = 100
"""Items at the end of a job whose cost is measured."""


def small_robot() -> Embodiment:
    """Return LIBERO's robot with small images and short samples."""
    known = load_embodiment("libero_sim")
    views = tuple(
        dataclasses.replace(view, size=(32, 48), resolution=(48, 64)) for view in known.views
    )
    timing = Timing(control_hz=known.timing.control_hz, action_horizon=8, blocks=2)
    return dataclasses.replace(known, views=views, timing=timing)


def recorder(version: str, folder: Path, count: int) -> float:
    """Record ``count`` episodes; return the seconds of each of the last `LAST`."""
    robot = small_robot()
    observation = {view.key: np.zeros((48, 64, 3), np.uint8) for view in robot.views}
    observation |= {part.key: np.zeros(part.dim, np.float32) for part in robot.state}
    action = {part.key: np.zeros(part.dim, np.float32) for part in robot.action}
    with EpisodeWriter(folder, robot, fps=20, version=version) as writer:
        for number in range(count):
            if number == count - LAST:
                began = time.process_time()
            for _ in range(3):
                writer.add_frame({**observation, robot.language: "lift it"}, action)
            writer.save_episode(success=True, seed=number)
        return (time.process_time() - began) / LAST


def cases_of(count: int) -> tuple[EvalSpec, tuple[EpisodeSpec, ...]]:
    """Return an evaluation of ``count`` episodes of ten tasks."""
    spec = EvalSpec(
        protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", tasks=tuple(range(10)),
        episodes=count // 10, max_steps=1, arguments={"resolution": 16},
    )  # fmt: skip
    return spec, plan_episodes(spec)


def records_of(cases: tuple[EpisodeSpec, ...]) -> list[Record]:
    """Return a result for every case."""
    known = {"task": "reach", "steps": 1, "success": False, "ended": "time limit"}
    known |= {"action_sha256": "0" * 64, "wall_s": 0.1, "video": None, "error": None}
    times = {"p50": 1.0, "p95": 2.0}
    return [
        Record(
            case=case.name, env=case.env, suite=case.suite, task_id=case.task_id,
            episode=case.episode, init_state_id=case.init_state_id, seed=case.seed,
            repeat_of=case.repeat_of, policy_ms=times, env_ms=times, **known,
        )
        for case in cases
    ]  # fmt: skip


def evaluation(folder: Path, count: int) -> float:
    """Run the last `LAST` of ``count`` episodes; return the seconds of each."""
    spec, cases = cases_of(count)
    prepared = prepare(EvaluationRequest(spec=spec, policy=PolicySpec(name="hold")))
    folder.mkdir()
    keep_card(folder, prepared.card, prepared.plan.cases)
    lines = [json.dumps(dataclasses.asdict(record)) for record in records_of(cases[:-LAST])]
    (folder / "records.jsonl").write_text("".join(f"{line}\n" for line in lines))
    seen: list[float] = []

    def watch(progress: EvalProgress) -> None:
        seen.append(time.process_time())

    evaluate(prepared, folder, RunOptions(workers=0, videos="none"), watch)
    return (seen[-1] - seen[0]) / LAST


def queue(_folder: Path, count: int) -> float:
    """Take every case, ten processes each in a task of its own; return the seconds of each."""
    _, cases = cases_of(count)
    waiting = LocalQueue(cases)
    tasks = [environment_key(case) for case in cases[:: count // 10]]
    began = time.process_time()
    for number in range(count):
        assert waiting.take(tasks[number % 10]) is not None
    return (time.process_time() - began) / count


def reopen(folder: Path, count: int) -> float:
    """Read the records of ``count`` episodes and sum them up; return the seconds of each."""
    _, cases = cases_of(count)
    folder.mkdir()
    lines = [json.dumps(dataclasses.asdict(record)) for record in records_of(cases)]
    (folder / "records.jsonl").write_text("".join(f"{line}\n" for line in lines))
    began = time.process_time()
    summarize(RecordFile(folder, cases).records.values(), cases)
    return (time.process_time() - began) / count


JOBS: dict[str, Callable[[Path, int], float]] = {
    "recorder-v2.1": lambda folder, count: recorder("v2.1", folder, count),
    "recorder-v3.0": lambda folder, count: recorder("v3.0", folder, count),
    "evaluation": evaluation,
    "queue": queue,
    "reopen": reopen,
}
SIZES = {
    "recorder-v2.1": (100, 2000), "recorder-v3.0": (100, 2000),
    "evaluation": (1000, 20_000), "queue": (1000, 20_000), "reopen": (1000, 20_000),
}  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--sizes", nargs=2, type=int, help="items; default: by job")
    given = parser.parse_args()
    print(f"{'job':16} {'items':>14} {'ms per item':>17} {'ratio':>6}")
    for name in given.jobs:
        sizes = given.sizes or SIZES[name]
        with tempfile.TemporaryDirectory() as folder:
            costs = [1000 * JOBS[name](Path(folder) / str(size), size) for size in sizes]
        print(
            f"{name:16} {sizes[0]:>6} {sizes[1]:>7} {costs[0]:>8.3f} {costs[1]:>8.3f} "
            f"{costs[1] / costs[0]:>6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
