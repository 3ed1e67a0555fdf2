"""Several processes, one evaluation: whoever runs a case and whoever is lost, the result is one."""

import json
import threading
import time
from dataclasses import asdict
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from dzrobot.cli import main
from dzrobot.commands.options.policy import compute_device, render_variables
from dzrobot.errors import ConfigError, ProtocolError
from dzrobot.rollout.evaluation import ranks as distributed
from dzrobot.rollout.evaluation.evaluate import Evaluation, RunOptions, assist, evaluate, prepare
from dzrobot.rollout.evaluation.ranks import PART, Ranks, join
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec, plan_episodes
from dzrobot.rollout.queue import environment_key
from dzrobot.rollout.records import Record, RecordFile

SPEC = EvalSpec(
    protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", tasks=(0, 2), episodes=3,
    max_steps=20, arguments={"resolution": 32},
)  # fmt: skip
CASES = plan_episodes(SPEC)
CARD = {"seed": 0}


class Clock:
    """Time as the test makes it pass."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def passes(self, seconds):
        self.now += seconds


@pytest.fixture
def meeting():
    """Return a function that returns a process of three, on a store of its own, and their clock."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clock = Clock()

    def process(rank, size=3, clock=clock, **options):
        patience = timedelta(seconds=60)
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=patience)
        return Ranks(client, rank, size, clock=clock, **options)

    yield process, clock
    server = None


def begun(meeting, folder, waiting=CASES):
    """Return the queues of three processes."""
    process, _ = meeting
    main = process(0).main_queue(CARD, CASES, waiting, folder)
    helpers = [process(i).helper_queue(CARD, CASES, folder / str(i)) for i in (1, 2)]
    return main, *helpers


def failed(case, error="it broke"):
    return Record.failed(case, error)


def prepared(**changes):
    spec = EvalSpec(**{**vars(SPEC), **changes})
    return prepare(Evaluation(spec=spec, policy=PolicySpec(name="rollout_policies:Steer")))


def results(folder):
    return {name: record.result() for name, record in RecordFile(folder).records.items()}


def test_every_case_is_taken_once(meeting, tmp_path):
    queues = begun(meeting, tmp_path, CASES[1:])
    taken = []
    while any(cases := [queue.take(None) for queue in queues]):
        taken += [case.name for case in cases if case is not None]
    assert sorted(taken) == sorted(case.name for case in CASES[1:])


def test_a_process_keeps_to_its_environment(meeting, tmp_path):
    main, helper, _ = begun(meeting, tmp_path)
    last = environment_key(CASES[-1])
    assert [helper.take(last).task_id for _ in range(4)] == [2, 2, 2, 0]
    assert [main.take(last).task_id for _ in range(2)] == [0, 0]


def test_what_a_lost_process_had_taken_is_given_out_again(meeting, tmp_path):
    _, clock = meeting
    main, first, second = begun(meeting, tmp_path)
    lost = [first.take(None), first.take(None)]
    while second.take(None) is not None:
        pass
    clock.passes(1)
    assert main.take(None) is None, "it may only be slow"
    clock.passes(distributed.LOST_AFTER_S - 2)
    assert main.take(None) is None
    clock.passes(3)
    # The second one gave no sign of life either, but only the main one looks here.
    again = [main.take(None) for _ in CASES if not clock.passes(1)]
    assert [case.name for case in again[:2]] == [case.name for case in lost]
    assert sorted(case.name for case in again) == sorted(case.name for case in CASES)


def test_one_that_lives_loses_nothing_and_one_that_leaves_is_lost_at_once(meeting, tmp_path):
    process, clock = meeting
    main = process(0).main_queue(CARD, CASES, CASES[:1], tmp_path)
    group = process(1)
    with group:
        case = group.helper_queue(CARD, CASES, tmp_path / "1").take(None)
        for beat in range(5):
            # What its thread does every other second.
            group._mail.write("beat/1", f"{beat} of the test")
            clock.passes(distributed.LOST_AFTER_S - 1)
            assert main.take(None) is None
    clock.passes(1)
    assert main.take(None) == case


def test_files_go_where_the_results_are(meeting, tmp_path):
    main, helper, _ = begun(meeting, tmp_path)
    case = helper.take(None)
    contents = {f"errors/{case.name}.txt": b"", "videos/x.mp4": bytes(range(256)) * (PART // 200)}
    for name, content in contents.items():
        path = tmp_path / "1" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    record = Record.failed(case, "it broke", video="videos/x.mp4")
    helper.conclude(record)
    assert not any(path.is_file() for path in (tmp_path / "1").rglob("*")), "sent, not copied"
    assert list(main.arrived()) == [record]
    assert {name: (tmp_path / name).read_bytes() for name in contents} == contents
    keys = main._mail._store.list_keys()
    assert not [key for key in keys if b"parcel" in key.encode()], "the store forgets them"


def test_of_two_results_the_first_is_kept(meeting, tmp_path):
    _, clock = meeting
    main, slow, other = begun(meeting, tmp_path, CASES[:1])
    case = slow.take(None)
    assert other.take(None) is None
    clock.passes(distributed.LOST_AFTER_S + 1)
    assert other.take(None) == case
    other.conclude(failed(case, "first"))
    assert [record.error for record in main.arrived()] == ["first"]
    slow.conclude(failed(case, "second"))
    clock.passes(1)
    assert list(main.arrived()) == []
    assert not main.is_open()


def test_the_others_stop_when_the_main_one_does(meeting, tmp_path):
    main, helper, _ = begun(meeting, tmp_path)
    _, clock = meeting
    assert helper.is_open()
    main.close()
    clock.passes(1)
    assert not helper.is_open()


def test_a_process_that_would_get_other_results_is_refused(meeting, tmp_path):
    process, _ = meeting
    process(0).main_queue(CARD, CASES, CASES, tmp_path)
    with pytest.raises(ProtocolError, match=r"seed: 0 in the main process, 1 in process 1"):
        process(1).helper_queue({"seed": 1}, CASES, tmp_path)


@pytest.mark.parametrize("name", ["../x.mp4", "/x.mp4", "card.json", "videos/../../x"])
def test_no_file_is_written_elsewhere(meeting, tmp_path, name):
    main, helper, _ = begun(meeting, tmp_path)
    sent = {"record": asdict(failed(helper.take(None))), "files": [name]}
    helper._mail.send("parcel/1/0", json.dumps(sent).encode())
    with pytest.raises(ProtocolError, match="no file of an episode"):
        list(main.arrived())


def test_without_the_store_a_process_says_so(tmp_path):
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    group = Ranks(client, 1, 2)
    assert not group.is_lost(0)
    server = None
    with pytest.raises(ProtocolError, match="the same command continues"):
        group.is_lost(0)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR"),
    ],
)
def test_an_environment_that_says_half_is_explained(variables, said, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        join()


def test_results_do_not_depend_on_who_runs_a_case(meeting, tmp_path):
    """Two processes, as two threads: each has its own policy, as two processes have."""
    process, _ = meeting
    options = {"workers": 0, "videos": "failures"}
    whole = evaluate(prepared(), tmp_path / "alone", RunOptions(**options))
    output, played = tmp_path / "both", []

    def help_out():
        with process(1, size=2, clock=time.monotonic) as group:
            assist(prepared(), output, RunOptions(**options, ranks=group))

    helper = threading.Thread(target=help_out)
    with process(0, size=2, clock=time.monotonic) as group:
        helper.start()
        summary = evaluate(
            prepared(), output, RunOptions(**options, ranks=group), lambda far: played.append(far)
        )
    helper.join(60)
    assert not helper.is_alive()
    assert summary.results() == whole.results()
    assert results(output) == results(tmp_path / "alone")
    assert len(played) == 1 + len(CASES)
    films = [sorted(p.name for p in (tmp_path / name / "videos").iterdir()) for name in
             ("alone", "both")]  # fmt: skip
    assert films[0] == films[1]
    assert len(films[0]) == summary.total.episodes - summary.total.successes > 0
    assert not (output / "ranks").exists()


def test_who_comes_after_the_end_has_nothing_to_wait_for(meeting, tmp_path, monkeypatch):
    process, _ = meeting
    monkeypatch.setattr(distributed, "PATIENCE_S", 2.0)
    mail = distributed._Mailbox(process(0)._mail._store, "dzrobot")
    name = distributed._session(mail, 0)
    with pytest.raises(ProtocolError, match="waited 2 s"):
        distributed._session(mail, 1)
    # The main process is alone in its group, so it waits for nobody.
    with Ranks(mail._store, 0, 1, session=name) as main:
        main.main_queue(CARD, CASES, [], tmp_path).close()
    assert distributed._session(mail, 1) == name
    late = Ranks(mail._store, 1, 2, session=name)
    assert not late.helper_queue(CARD, CASES, tmp_path).is_open()
    assert list(late.jobs()) == []


def test_an_earlier_launch_on_the_same_store_is_not_joined(meeting, monkeypatch):
    """As torchrun keeps the store when it starts its processes again."""
    process, _ = meeting
    mail = distributed._Mailbox(process(0)._mail._store, "dzrobot")
    # The main process of an earlier launch, killed.
    old = distributed._session(mail, 0)
    mail.write(f"{old}/beat/0", "7")
    monkeypatch.setattr(distributed, "PATIENCE_S", 1.0)
    with pytest.raises(ProtocolError, match="start all of them together"):
        distributed._session(mail, 1)
    monkeypatch.setattr(distributed, "PATIENCE_S", 60.0)
    monkeypatch.setattr(distributed, "BEAT_S", 0.1)
    new = distributed._session(mail, 0)
    with Ranks(mail._store, 0, 1, session=new):
        assert distributed._session(mail, 1) == new != old


@pytest.mark.parametrize(
    ("rank", "size", "own"),
    [(0, 1, ["0", "1", "2"]), (0, 2, ["0", "2"]), (1, 2, ["1"]), (4, 8, ["1"])],
)
def test_processes_of_a_machine_share_what_draws(rank, size, own, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(size))
    assert [one["MUJOCO_EGL_DEVICE_ID"] for one in render_variables((0, 1, 2))] == own
    assert render_variables(None) == ()
    assert compute_device("cuda") == ("cuda" if size == 1 else f"cuda:{rank}")
    assert (compute_device("cuda:3"), compute_device("cpu")) == ("cuda:3", "cpu")


def test_simulators_draw_where_they_are_told(tmp_path, monkeypatch, policies):
    monkeypatch.setenv("SIGNED", str(tmp_path / "signed"))
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "7")
    words = ["eval", "--env", "dzrobot/point-v0", "--policy", "rollout_policies:Drawn", "--videos",
             "none", "--privileged", "--max-steps", "2", "--episodes", "6"]  # fmt: skip
    told = ["--workers", "2", "--render-device", "1-2", "--output", str(tmp_path / "run")]
    assert main([*words, *told]) == 0
    assert set((tmp_path / "signed").read_text().split()) == {"1", "2"}


class DroppingStore:
    """A store in which parcels vanish right after somebody has seen them."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def check(self, keys):
        there = self._store.check(keys)
        for key in keys:
            if there and key.endswith("parcel/1/0"):
                self._store.delete_key(key)
        return there


def test_a_parcel_that_the_main_process_drops_is_not_waited_for(tmp_path):
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=1))
    main = Ranks(client, 0, 2).main_queue(CARD, CASES, CASES, tmp_path)
    helper = Ranks(DroppingStore(client), 1, 2).helper_queue(CARD, CASES, tmp_path / "1")
    for _ in range(2):
        helper.conclude(failed(helper.take(None)))
    assert main.is_open()
    assert client.check(["dzrobot//evaluation/0/parcel/1/1"])
