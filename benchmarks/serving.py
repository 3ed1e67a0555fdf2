"""A policy server under load, and what acting through it costs, as ratios in one run.

Every client's actions are compared with those of the policy in this process, bit by bit. Clients
are threads of this process, so on few cores they share them with the server.

    python benchmarks/serving.py                        the bundled tiny policy, on the CPU
    python benchmarks/serving.py --clients 1,4 --plans 8 --max-batch 4
    python benchmarks/serving.py --clients 50 --seconds 120 --size 480x640

With ``--seconds``, clients in two other processes ask without a pause: what each of them got, and
what it costs the server in memory and in its log.
"""

import argparse
import logging
import multiprocessing
import resource
import statistics
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.modality.window import Observation
from dzrobot.policies.base import blank
from dzrobot.policies.dreamzero.bundled import EMBODIMENT, default_checkpoint
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.policies.serving.connection import ConnectOptions
from dzrobot.policies.serving.endpoint import ServeOptions
from dzrobot.policies.serving.remote_policy import RemotePolicy
from dzrobot.policies.serving.server import PolicyServer, in_background
from dzrobot.process import HourlyLimit

ROBOT = load_embodiment(EMBODIMENT)


@dataclass(frozen=True)
class Load:
    """What one number of clients saw."""

    clients: int
    seconds: float
    milliseconds: list[float]
    equal: bool
    batch: float
    wire: list[float]
    """Milliseconds of each client's median round trip that the server did not have the request."""

    def line(self) -> str:
        """Return it as a row."""
        p50, p95, p99 = np.percentile(self.milliseconds, [50, 95, 99])
        return (
            f"{self.clients:>7} {len(self.milliseconds) / self.seconds:>10.2f} {p50:>9.1f} "
            f"{p95:>9.1f} {p99:>9.1f} {self.batch:>6.2f} {'yes' if self.equal else 'NO':>6}"
        )


def seen(seed: int, robot: Embodiment = ROBOT) -> Observation:
    """Return an observation of noise."""
    draws = np.random.default_rng(seed)
    observation = dict(blank(robot, None))
    for view in robot.views:
        observation[view.key] = draws.integers(0, 256, (*view.resolution, 3), dtype=np.uint8)
    return {**observation, robot.language: "pick up the cube"}


def local_plans(policy: DreamZeroPolicy, plans: int) -> tuple[list[np.ndarray], list[float]]:
    """Return the plans of the policy in this process, and the milliseconds of each."""
    execute = ROBOT.execute or ROBOT.timing.action_horizon
    policy.reset("here", episode=0)
    chunks, times = [], []
    for step in range(plans * execute):
        began = time.perf_counter()
        action = policy.act(seen(step), session="here")
        if step % execute == 0:
            times.append(1000 * (time.perf_counter() - began))
        chunks.append(action)
    policy.evict("here")
    return chunks, times


def drive(
    url: str, plans: int, actions: list[np.ndarray], times: list[float], wire: list[float]
) -> None:
    """Act as one client."""
    execute = ROBOT.execute or ROBOT.timing.action_horizon
    # On a loaded machine the last of many waits long; here that is measured, not an error.
    client = RemotePolicy(url, ROBOT, options=ConnectOptions(later_s=600))
    client.reset("there", episode=0)
    for step in range(plans * execute):
        began = time.perf_counter()
        actions.append(client.act(seen(step), session="there"))
        if step % execute == 0:
            times.append(1000 * (time.perf_counter() - began))
    timing = client.timing
    wire.append(timing.round_trip_p50 - timing.server_p50)
    client.close()


def load(server: PolicyServer, clients: int, plans: int, expected: list[np.ndarray]) -> Load:
    """Return what ``clients`` see that ask at the same time."""
    url = f"ws://127.0.0.1:{server.ports[0]}"
    kept: list[tuple[list[np.ndarray], list[float]]] = [([], []) for _ in range(clients)]
    wire: list[float] = []
    before = batches(server)
    began = time.perf_counter()
    threads = [threading.Thread(target=drive, args=(url, plans, *own, wire)) for own in kept]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - began
    after = batches(server)
    equal = all(np.array_equal(actions, expected) for actions, _ in kept)
    times = [one for _, own in kept for one in own]
    sessions = (after[0] - before[0]) / max(1.0, after[1] - before[1])
    return Load(clients, spent, times, equal, sessions, wire)


def asked(url: str, tag: str, clients: int, seconds: float) -> list[list[float]]:
    """Return the milliseconds of the plans that each of ``clients``, threads, got in the time."""
    robot = load_embodiment(tag)
    times: list[list[float]] = [[] for _ in range(clients)]
    observation, ends = seen(0, robot), time.monotonic() + seconds

    def ask(own: list[float]) -> None:
        client = RemotePolicy(url, robot, options=ConnectOptions(later_s=600))
        while time.monotonic() < ends:
            client.reset("there", episode=0)
            began = time.perf_counter()
            client.act(observation, session="there")
            own.append(1000 * (time.perf_counter() - began))
        client.close()

    threads = [threading.Thread(target=ask, args=(own,)) for own in times]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


def resident() -> float:
    """Return the MiB of memory that this process holds."""
    words = Path("/proc/self/statm").read_text().split()
    return int(words[1]) * resource.getpagesize() / 2**20


def sustained(server: PolicyServer, tag: str, clients: int, seconds: float, log: Path) -> None:
    """Print what ``clients`` in two processes get, and what they cost."""
    url = f"ws://127.0.0.1:{server.ports[0]}"
    before, halves = resident(), (clients - clients // 2, clients // 2)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        work = [processes.submit(asked, url, tag, half, seconds) for half in halves]
        times = [own for done in work for own in done.result()]
    counts = sorted(map(len, times))
    p50, p99 = np.percentile([one for own in times for one in own], [50, 99])
    print(
        f"{clients} clients, {seconds:g} s, images of {tag}: {sum(counts)} plans, p50 {p50:.0f} ms,"
        f" p99 {p99:.0f} ms; plans of a client: {counts[0]} to {counts[-1]}, median "
        f"{statistics.median(counts):g}; memory {before:.0f} MiB before, {resident():.0f} after; "
        f"log {log.stat().st_size} bytes"
    )


def batches(server: PolicyServer) -> tuple[float, float]:
    """Return the sum of sessions over all answers, and the number of answers."""
    registry = server.metrics.registry
    names = ("dzrobot_batch_sessions_sum", "dzrobot_batch_sessions_count")
    total, count = (registry.get_sample_value(name) or 0.0 for name in names)
    return total, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", default="1,2,4,8,16")
    parser.add_argument("--plans", type=int, default=3, help="of each client")
    parser.add_argument("--max-batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="of clients that ask without a pause")
    parser.add_argument("--size", default="", metavar="HEIGHTxWIDTH", help="of their images")
    given = parser.parse_args()
    options = ServeOptions(port=0, array_port=None, max_batch=given.max_batch)
    if given.seconds:
        tag = f"{EMBODIMENT}@{given.size}" if given.size else EMBODIMENT
        robot = load_embodiment(tag)
        policy = DreamZeroPolicy.from_pretrained(default_checkpoint(), embodiment=robot)
        log = Path(tempfile.mkstemp(suffix=".log")[1])
        handler = logging.FileHandler(log)
        handler.addFilter(HourlyLimit())
        logging.getLogger("dzrobot.policies.serving").setLevel(logging.INFO)
        logging.getLogger("dzrobot.policies.serving").addHandler(handler)
        with in_background(PolicyServer(policy, options)) as server:
            for count in map(int, given.clients.split(",")):
                sustained(server, tag, count, given.seconds, log)
        return
    policy = DreamZeroPolicy.from_pretrained(default_checkpoint(), embodiment=ROBOT)
    local_plans(policy, 2)
    expected, here = local_plans(policy, given.plans)
    with in_background(PolicyServer(policy, options)) as server:
        print(server.capacity)
        print("clients  plans/s    p50 ms    p95 ms    p99 ms  batch  equal")
        for count in map(int, given.clients.split(",")):
            done = load(server, count, given.plans, expected)
            print(done.line(), flush=True)
            if count == 1:
                ratio = statistics.median(done.milliseconds) / statistics.median(here)
                print(f"        through the server : in this process = {ratio:.3f} (median plan)")
                print(
                    f"        of a round trip, {done.wire[0]:.1f} ms are not the server's (median)"
                )
    print(f"most memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
