"""One more item costs the same however many came before: operations are counted, not timed.

What is counted is the calls of Python functions and built-in ones, and the bytes read and written.
"""

import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from data_worlds import ROBOT, record, step

from dzrobot.recording import EpisodeWriter, consolidate, episode_list
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.recording.episode_list import list_files, read_rows
from dzrobot.recording.relabel import Relabeling, drop, relabel
from dzrobot.rollout.evaluation.comparison import Decision, Results
from dzrobot.rollout.evaluation.evaluate import evaluate
from dzrobot.rollout.evaluation.planning import EvaluationRequest, RunOptions, prepare
from dzrobot.rollout.evaluation.report import summarize
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec, environment_key, plan_episodes
from dzrobot.rollout.queue import LocalQueue
from dzrobot.rollout.records import Record

SPEC = EvalSpec(
    protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", tasks=(0, 1, 2, 3), episodes=10,
    max_steps=1, arguments={"resolution": 16},
)  # fmt: skip


def calls(job):
    """Run ``job``; return how many functions it called."""
    count = 0

    def watch(_frame, event, _argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(watch)
    try:
        job()
    finally:
        sys.setprofile(None)
    return count


def moved_bytes():
    """Return the bytes that this process has read and written so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def plan(episodes):
    return plan_episodes(EvalSpec(**{**vars(SPEC), "episodes": episodes}))


def result(case, *, success=False):
    times = {"p50": 1.0, "p95": 2.0}
    return Record(
        case=case.name, env=case.env, suite=case.suite, task_id=case.task_id, task="reach",
        episode=case.episode, init_state_id=case.init_state_id, seed=case.seed,
        repeat_of=case.repeat_of, steps=1, success=success, ended="time limit",
        action_sha256="0", policy_ms=times, env_ms=times, wall_s=0.1, video=None, error=None,
    )  # fmt: skip


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
def test_a_recorded_episode_costs_the_same_after_many(tmp_path, version, monkeypatch):
    """The third of a file of v3.0's list, in the second such file and in the eighth."""
    monkeypatch.setattr(episode_list, "ROWS_PER_FILE", 5)
    path = tmp_path / "set"
    record(path, lengths=(3,) * 7, version=version)
    few = committed(path, version)
    record(path, lengths=(3,) * 29, version=version)
    many = committed(path, version)
    assert len(DatasetCatalog.open(path).episodes) == 38
    assert many[0] < 1.05 * few[0], "bytes"
    assert many[1] < 1.05 * few[1], "calls"


def committed(path, version):
    """Record one episode more; return the bytes and the calls of its commit, not of the opening."""
    with EpisodeWriter(path, ROBOT, fps=ROBOT.timing.control_hz, version=version) as writer:
        number = writer.episodes
        for row in range(3):
            writer.add_frame(*step(ROBOT, 0, number, row), {"time.arm": row / 7})
        before = moved_bytes()
        counted = calls(lambda: writer.save_episode(success=True))
        return moved_bytes() - before, counted


def test_the_list_of_v3_is_one_table_however_it_was_made(tmp_path, monkeypatch):
    """In one go or reopened, packed, relabeled, and after an episode was taken out of it."""
    monkeypatch.setattr(episode_list, "ROWS_PER_FILE", 3)
    one = record(tmp_path / "one", lengths=(3,) * 7, version="v3.0")
    two = record(tmp_path / "two", lengths=(3,) * 5, version="v3.0")
    record(two, lengths=(3,) * 2, version="v3.0")
    assert [path.name for path in list_files(one)] == [f"file-00{n}.parquet" for n in range(3)]
    assert read_rows(one).equals(read_rows(two))
    stats = (one / "meta/stats.json").read_bytes()
    assert (two / "meta/stats.json").read_bytes() == stats
    numbers = read_rows(one).column("meta/episodes/file_index").to_pylist()
    assert numbers == [0, 0, 0, 1, 1, 1, 2]
    relabel(two, [4], Relabeling(success=False))
    assert (two / "meta/stats.json").read_bytes() == stats
    consolidate(one)
    record(one, lengths=(3,), version="v3.0")
    assert DatasetCatalog.open(one).episodes.data_files[:, 1].tolist() == [7] * 7 + [8]
    drop(two, [0])
    assert len(list_files(two)) == 2
    assert DatasetCatalog.open(two).episodes.index.tolist() == list(range(6))


def test_a_line_that_a_kill_cut_short_is_not_read(tmp_path):
    path = record(tmp_path / "set", lengths=(3, 3))
    for name in ("episodes.jsonl", "tasks.jsonl", "recording_facts.jsonl"):
        with (path / "meta" / name).open("a") as file:
            file.write('{"episode_index": 2, "ta')
    assert len(DatasetCatalog.open(path).episodes) == 2
    record(path, lengths=(3,))
    assert len(DatasetCatalog.open(path).episodes) == 3


def test_a_record_costs_an_evaluation_the_same_among_many(tmp_path):
    """Calls from the last but one report to the last, of 40 cases and of 800."""
    costs = []
    for episodes in (10, 200):
        spec = EvalSpec(**{**vars(SPEC), "episodes": episodes})
        prepared = prepare(EvaluationRequest(spec=spec, policy=PolicySpec(name="hold")))
        seen, count = [], 0

        def watch(_frame, event, _argument):
            nonlocal count
            count += event in ("call", "c_call")

        def note(progress):
            seen.append((count, progress.done))  # noqa: B023

        sys.setprofile(watch)
        try:
            only = frozenset(case.name for case in prepared.plan.cases[:6])
            evaluate(
                prepared, tmp_path / f"{episodes}", RunOptions(workers=0, videos="none", only=only),
                note,
            )  # fmt: skip
        finally:
            sys.setprofile(None)
        assert [done for _, done in seen] == list(range(7))
        costs.append(seen[-1][0] - seen[-2][0])
    assert costs[1] < 1.05 * costs[0]


def test_the_queue_does_not_look_through_what_waits():
    costs = []
    for episodes in (10, 200):
        cases = plan(episodes)
        queue, last = LocalQueue(cases), environment_key(cases[-1])
        costs.append(calls(lambda: [queue.take(last) for _ in range(episodes)]) / episodes)  # noqa: B023
        # What is left is taken in order.
        left = [queue.take(last).name for _ in range(3 * episodes)]
        assert left == [case.name for case in cases[: 3 * episodes]]
        assert queue.take(last) is None
    assert costs[1] < 1.05 * costs[0]


class CountedRecord(Record):
    """Counts how often somebody asks which case a record is of."""

    looks = 0

    def __getattribute__(self, name):
        if name == "case":
            CountedRecord.looks += 1
        return super().__getattribute__(name)


def test_a_summary_costs_per_record_the_same_however_many_tasks():
    costs = []
    for tasks in (4, 80):
        spec = EvalSpec(**{**vars(SPEC), "tasks": tuple(range(tasks))})
        cases = plan_episodes(spec)
        records = [CountedRecord(**vars(result(case))) for case in cases]
        CountedRecord.looks = 0
        summarize(records, cases)
        costs.append(CountedRecord.looks / len(cases))
    assert costs[1] == costs[0]


def test_an_early_stop_looks_at_each_pair_once():
    costs = []
    for episodes in (20, 400):
        cases = plan(episodes)
        base = {case.name: result(case, success=True) for case in cases}
        decision = Decision(Results(folder=Path(), card={}, cases=cases, records=base))
        own = {}

        def run():
            for case in cases:  # noqa: B023
                own[case.name] = base[case.name]  # noqa: B023
                assert decision.after(own) is None  # noqa: B023

        costs.append(calls(run) / len(cases))
    assert costs[1] < 1.05 * costs[0]
    assert asdict(base[cases[0].name])["success"] is True
