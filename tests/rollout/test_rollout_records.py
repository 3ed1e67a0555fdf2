"""Records survive whatever kills the process that writes them."""

import json
from dataclasses import asdict, replace

import pytest

from dzrobot.errors import ProtocolError
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec, plan_episodes
from dzrobot.rollout.records import RECORDS_FILE, Record, RecordFile, locked, ordered

CASES = plan_episodes(EvalSpec(protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", episodes=3))


def failed(case, error="boom"):
    return Record.failed(case, error)


def succeeded(case):
    times = {"p50": 1.0, "p95": 2.0}
    return replace(
        failed(case), error=None, task="reach it", success=True, steps=7, ended="success",
        action_sha256="a" * 64, policy_ms=times, env_ms=times, wall_s=3.0,
    )  # fmt: skip


def test_what_is_added_is_read_back(tmp_path):
    first = RecordFile(tmp_path)
    for case in CASES:
        first.add(succeeded(case))
    again = RecordFile(tmp_path)
    assert again.records == first.records == {case.name: succeeded(case) for case in CASES}
    lines = (tmp_path / RECORDS_FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [asdict(succeeded(case)) for case in CASES]


def test_records_of_before_failure_classes_are_read_and_gone_on_with(tmp_path):
    new = replace(succeeded(CASES[0]), success=False, failure_class="dropped")
    old = {k: v for k, v in asdict(new).items() if k != "failure_class"}
    (tmp_path / RECORDS_FILE).write_text(json.dumps(old) + "\n")
    file = RecordFile(tmp_path)
    assert file.records[CASES[0].name].failure_class is None
    assert file.records[CASES[0].name].failed_by == "not stated"
    file.add(new)
    (tmp_path / RECORDS_FILE).write_text(json.dumps({**old, "failure_class": "x" * 101}) + "\n")
    with pytest.raises(ProtocolError, match="failure_class"):
        RecordFile(tmp_path)


@pytest.mark.parametrize("torn", [b'{"case": "x', b'{"case": "\xc3', b"{"])
def test_a_partial_last_line_is_dropped_and_overwritten(tmp_path, torn):
    RecordFile(tmp_path).add(succeeded(CASES[0]))
    path = tmp_path / RECORDS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    again = RecordFile(tmp_path)
    assert again.finished() == {CASES[0].name}
    again.add(succeeded(CASES[1]))
    assert RecordFile(tmp_path).finished() == {CASES[0].name, CASES[1].name}
    assert path.read_bytes().startswith(whole)


def test_errors_are_not_finished_and_are_replaced(tmp_path):
    file = RecordFile(tmp_path)
    file.add(failed(CASES[0]))
    assert file.finished() == set()
    file.add(succeeded(CASES[0]))
    assert RecordFile(tmp_path).records == {CASES[0].name: succeeded(CASES[0])}


def test_a_foreign_file_is_refused_by_line(tmp_path):
    RecordFile(tmp_path).add(succeeded(CASES[0]))
    with (tmp_path / RECORDS_FILE).open("a") as file:
        file.write('{"score": 3}\n')
    with pytest.raises(ProtocolError, match=rf"{RECORDS_FILE}:2"):
        RecordFile(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["task", "steps", "success", "ended", "action_sha256", "policy_ms", "env_ms", "wall_s"],
)
def test_a_finished_episode_says_all_of_its_result(tmp_path, name):
    written = {**asdict(succeeded(CASES[0])), name: None}
    (tmp_path / RECORDS_FILE).write_text(json.dumps(written) + "\n")
    with pytest.raises(ProtocolError, match=rf"{RECORDS_FILE}:1: .*{name} is null"):
        RecordFile(tmp_path)


def test_an_error_has_no_success_beside_it(tmp_path):
    written = {**asdict(failed(CASES[0])), "success": True}
    (tmp_path / RECORDS_FILE).write_text(json.dumps(written) + "\n")
    with pytest.raises(ProtocolError, match=rf"{RECORDS_FILE}:1: .*success, or an error"):
        RecordFile(tmp_path)


def test_order_is_that_of_the_run():
    records = [succeeded(case) for case in reversed(CASES)]
    assert [record.case for record in ordered(records, CASES)] == [case.name for case in CASES]


def test_one_writer_at_a_time(tmp_path):
    with locked(tmp_path), pytest.raises(ProtocolError, match="another run"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
