"""Measures evaluations on Ray: cases per second, fairness, memory, and what a lost quarter costs.

    python benchmarks/cluster.py --actors 1 2 4 64
    python benchmarks/cluster.py --workers 1 2 4

The policy sleeps as long as a plan would take on a GPU, and the environment is a point on a plane,
so that many GPUs fit on a few cores. With ``--workers``, one actor with so many simulators is
compared with as many of the local pool. Times are of one machine; compare them within one run.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LOG = "DZROBOT_BENCH_LOG"
"""Variable that names the file in which policies note process and time of every episode."""

STEPS = 20


class SimulatedGpu:
    """Holds still, and takes as long for an action as `DZROBOT_BENCH_MS` says."""

    def __init__(self, robot: object) -> None:
        self._pause_s = float(os.environ["DZROBOT_BENCH_MS"]) / 1000

    def reset(self, session: str = "default", *, episode: int | None = None) -> None:
        """Note the episode."""
        with Path(os.environ[LOG]).open("a") as file:
            file.write(f"{os.getpid()} {time.time()}\n")

    def act(self, obs: object, *, session: str = "default") -> np.ndarray:
        """Return zeros (7,), after a while."""
        time.sleep(self._pause_s)
        return np.zeros(7, np.float32)


@dataclass
class Measured:
    """One evaluation."""

    connected_s: float
    all_s: float
    """Until the last actor has begun its first case."""

    rate: float
    """Cases per second from then on, until nine tenths are done."""

    spread: str
    """Fewest and most cases of an actor meanwhile."""

    total_s: float
    """From the first case begun to the end."""

    memory: str


def log_lines() -> list[tuple[int, float]]:
    path = Path(os.environ[LOG])
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), float(at)) for pid, at in map(str.split, lines)]


def kilobytes(pid: int) -> tuple[int, int]:
    """Return resident and proportional memory of a process, in kB."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    found = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    return found["Rss:"], found["Pss:"]


def ray_processes() -> list[int]:
    """Return Ray's own processes: GCS, raylet, agents, idle workers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        own = ("/ray/" in text or text.startswith("ray::")) and "EvaluationActor" not in text
        if own and "benchmarks" not in text:
            found.append(int(path.parent.name))
    return found


def evaluated(
    actors: int | None, workers: int, episodes: int, killed: float
) -> tuple[Measured, dict[str, object]]:
    """Evaluate on ``actors``, or in the local pool, and return figures and results."""
    from dzrobot.cluster import ClusterOptions, Needs, connected
    from dzrobot.rollout.evaluation.actors import ActorGroup
    from dzrobot.rollout.evaluation.evaluate import evaluate
    from dzrobot.rollout.evaluation.planning import EvaluationRequest, RunOptions, prepare
    from dzrobot.rollout.policy_spec import PolicySpec
    from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec
    from dzrobot.rollout.records import RecordFile

    Path(os.environ[LOG]).unlink(missing_ok=True)
    spec = EvalSpec(
        protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", tasks=(0,), episodes=episodes,
        max_steps=STEPS, arguments={"resolution": 32},
    )  # fmt: skip
    evaluation = EvaluationRequest(spec=spec, policy=PolicySpec(name="cluster:SimulatedGpu"))
    began = time.time()
    ends: list[float] = []
    memory: list[str] = []

    def note(far: object) -> None:
        ends.append(time.time())
        pids = {pid for pid, _ in log_lines()}
        if len(ends) == episodes // 2:
            if actors is not None:
                memory.append(memory_of(pids, actors))
            for pid in sorted(pids)[: int(killed * len(pids))]:
                os.kill(pid, signal.SIGKILL)

    with tempfile.TemporaryDirectory() as folder:
        options = RunOptions(workers=workers, videos="none")
        if actors is None:
            connected_s = 0.0
            evaluate(prepare(evaluation), Path(folder), options, note)
        else:
            with connected(ClusterOptions(actors=actors), Needs(max(1, workers))) as cluster:
                connected_s = time.time() - began
                group = ActorGroup(cluster, evaluation, options)
                evaluate(
                    group.opened, Path(folder), RunOptions(videos="none", engine=group.engine),
                    note,
                )  # fmt: skip
        results = {name: one.result() for name, one in RecordFile(Path(folder)).records.items()}
    assert len(results) == episodes, "a case was lost"
    return figures(began, connected_s, ends[1:], memory), results


def memory_of(pids: set[int], actors: int) -> str:
    sizes = [kilobytes(pid) for pid in pids]
    rss, pss = (sum(column) / 1024 / max(1, len(sizes)) for column in zip(*sizes, strict=True))
    ray = sum(kilobytes(pid)[1] for pid in ray_processes()) / 1024
    return f"{rss:.0f} MB ({pss:.0f} MB own and shared part) an actor, Ray itself {ray:.0f} MB"


def figures(began: float, connected_s: float, ends: list[float], memory: list[str]) -> Measured:
    """Return the figures of an evaluation whose cases ended at ``ends``."""
    lines = log_lines()
    first: dict[int, float] = {}
    for pid, at in lines:
        first.setdefault(pid, at)
    full = max(first.values())
    late = sorted(ends)[int(0.9 * len(ends)) - 1]
    done = sum(full < end <= late for end in ends)
    counts = Counter(pid for pid, at in lines if full <= at <= late)
    return Measured(
        connected_s=connected_s,
        all_s=full - began,
        rate=done / (late - full) if late > full else float("nan"),
        spread=f"{min(counts.values(), default=0)} to {max(counts.values(), default=0)}",
        total_s=max(ends) - min(first.values()),
        memory=memory[0] if memory else "",
    )


def report(name: str, measured: Measured) -> None:
    print(
        f"{name:<28} connected {measured.connected_s:6.1f} s, all busy {measured.all_s:6.1f} s, "
        f"{measured.rate:6.2f} cases/s, cases of an actor {measured.spread}, "
        f"{measured.total_s:6.1f} s in all; {measured.memory}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", type=int, nargs="*", default=[])
    parser.add_argument("--workers", type=int, nargs="*", default=[])
    parser.add_argument("--plan-ms", type=float, default=50.0, help="of an action")
    parser.add_argument("--episodes", type=int, default=12, help="an actor")
    parser.add_argument(
        "--killed", type=float, default=0.25, help="share of actors; 0: no such run"
    )
    arguments = parser.parse_args()
    os.environ["DZROBOT_BENCH_MS"] = str(arguments.plan_ms)
    os.environ["OMP_NUM_THREADS"] = "1"
    here = str(Path(__file__).parent)
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, sys.path[1:])])
    with tempfile.TemporaryDirectory() as folder:
        os.environ[LOG] = str(Path(folder) / "log")
        for workers in arguments.workers:
            local, results = evaluated(None, workers, 12 * workers, 0)
            report(f"local pool, {workers} workers", local)
            one, same = evaluated(1, workers, 12 * workers, 0)
            report(f"one actor, {workers} workers", one)
            print(f"  {one.rate / local.rate:.2f} of the local rate; equal: {same == results}")
        for actors in arguments.actors:
            whole, results = evaluated(actors, 0, arguments.episodes * actors, 0)
            report(f"{actors} actors", whole)
            if not arguments.killed or actors < 4:
                continue
            less, same = evaluated(actors, 0, arguments.episodes * actors, arguments.killed)
            report(f"{actors} actors, {arguments.killed:.0%} killed", less)
            print(
                f"  {less.total_s - whole.total_s:.1f} s lost; equal: {same == results}", flush=True
            )


if __name__ == "__main__":
    main()
