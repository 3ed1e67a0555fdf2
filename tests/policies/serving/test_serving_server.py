"""The server: nobody reads another's episode, nobody stops it, and it says how it is."""

import gc
import http.client
import json
import logging
import os
import re
import socket as sockets
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
from serving_peers import (
    MINI,
    UNKNOWN,
    Remembering,
    alone,
    ask,
    droid_request,
    frame,
    read,
    serving,
    talking,
)
from test_serving_wire import HOSTILE
from websockets.exceptions import ConnectionClosed, InvalidStatus

from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.policies.serving.endpoint import ServeOptions
from dzrobot.policies.serving.recorder import Recorder
from dzrobot.policies.serving.server import PolicyServer, in_background
from dzrobot.policies.serving.sessions import ClientConnection, SessionCapacity, SessionTable
from dzrobot.websocket import VANISHED_S


def get(server, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.ports[0], timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def until(true):
    """Wait for what another thread is about to do."""
    for _ in range(6000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never came about")


def gauge(server, name):
    """Return what the server shows at ``/metrics``."""
    return server.metrics.registry.get_sample_value(f"dzrobot_{name}")


def episodes(count, turns=3):
    return [
        [
            droid_request(100 * i + 3 * turn, *((4,) if turn else ()), session_id=f"s{i % 2}")
            for turn in range(turns)
        ]
        for i in range(count)
    ]


@pytest.mark.parametrize("max_batch", [1, 4])
def test_interleaved_clients_get_the_bits_they_get_alone(max_batch):
    """Four connections, two of them with the same ids, in turns and at the same time."""
    of = episodes(4)
    with serving(Remembering(), max_batch=max_batch) as server, ExitStack() as stack:
        sockets_ = [stack.enter_context(talking(server, array=True)) for _ in of]
        answers = [[] for _ in of]
        for turn in range(3):
            for socket, requests in zip(sockets_, of, strict=True):
                socket.send(frame(requests[turn]))
            for socket, kept in zip(sockets_, answers, strict=True):
                kept.append(read(socket.recv(timeout=60)))
    for requests, kept in zip(of, answers, strict=True):
        for answer, expected in zip(kept, alone(requests), strict=True):
            assert np.array_equal(answer, expected)


def test_waiting_sessions_of_one_stage_share_a_call_and_others_do_not():
    policy = Remembering()
    with serving(policy, max_batch=8) as server, ExitStack() as stack:
        peers = [stack.enter_context(talking(server)) for _ in range(4)]
        ask(peers[3], droid_request(0))
        policy.gate.clear()
        policy.batches.clear()
        peers[0].send(frame(droid_request(0)))
        until(lambda: gauge(server, "requests_running") == 1)
        for peer in peers[1:]:
            peer.send(frame(droid_request(9)))
        until(lambda: gauge(server, "requests_waiting") == 3)
        policy.gate.set()
        for peer in peers:
            assert read(peer.recv(timeout=60))["actions"].shape == (24, 8)
        assert sorted(policy.batches) == [1, 1, 2]


def test_who_is_due_first_is_served_first():
    policy = Remembering()
    order = []
    with serving(policy) as server, ExitStack() as stack:
        peers = [stack.enter_context(talking(server)) for _ in range(3)]
        policy.gate.clear()
        peers[0].send(frame(droid_request(0)))
        until(lambda: gauge(server, "requests_running") == 1)
        for peer, due in zip(peers[1:], (60_000.0, 10.0), strict=True):
            before = gauge(server, "requests_waiting")
            peer.send(frame(droid_request(0, deadline_ms=due)))
            until(lambda before=before: gauge(server, "requests_waiting") > before)
        genuine = policy.plan
        policy.plan = lambda asks: order.extend(ask.session for ask in asks) or genuine(asks)
        policy.gate.set()
        for peer in peers:
            peer.recv(timeout=60)
    # Seats are handed out in the order of arrival; the second one was due last.
    assert [int(name.rpartition("-")[2]) for name in order] == [2, 1]


def test_one_bad_observation_costs_its_batch_nothing():
    policy = Remembering()
    with serving(policy, max_batch=4) as server, ExitStack() as stack:
        *peers, stranger = [stack.enter_context(talking(server)) for _ in range(4)]
        stack.callback(policy.gate.set)
        policy.gate.clear()
        peers[0].send(frame(droid_request(0)))
        until(lambda: gauge(server, "requests_running") == 1)
        # What does not fit is refused at the door; what the policy itself refuses has waited.
        bad = droid_request(0) | {"observation/gripper_position": np.array([np.nan])}
        assert "finite" in ask(stranger, bad)
        peers[1].send(frame(droid_request(0, prompt=UNKNOWN)))
        peers[2].send(frame(droid_request(7)))
        until(lambda: gauge(server, "requests_waiting") == 2)
        policy.gate.set()
        assert UNKNOWN in read(peers[1].recv(timeout=60))
        answer = read(peers[2].recv(timeout=60))
        assert np.array_equal(answer["actions"], alone([droid_request(7)])[0])


def test_the_bundled_policy_gives_interleaved_clients_the_bits_they_get_alone():
    policy = DreamZeroPolicy.from_pretrained(default_checkpoint(), embodiment=MINI)
    draws = np.random.default_rng(3)

    def request(name, turn):
        shape = (4, 128, 128, 3) if turn else (128, 128, 3)
        return {
            "observation/image": draws.integers(0, 256, shape, dtype=np.uint8),
            "observation/wrist_image": draws.integers(0, 256, shape, dtype=np.uint8),
            "observation/state": draws.normal(size=8),
            "prompt": "pick up the cube",
            "session_id": name,
        }

    of = {name: [request(name, turn) for turn in range(2)] for name in ("a", "b")}
    with serving(policy) as server, talking(server) as socket:
        mixed = [ask(socket, of[name][turn])["actions"] for turn in range(2) for name in of]
        assert ask(socket, {"endpoint": "reset"}) == "reset successful"
        single = {name: [ask(socket, one)["actions"] for one in of[name]] for name in of}
    expected = [single[name][turn] for turn in range(2) for name in of]
    assert all(np.array_equal(one, other) for one, other in zip(mixed, expected, strict=True))


def test_probes_answer_while_the_policy_is_at_work():
    policy = Remembering()
    with serving(policy) as server, talking(server) as socket:
        assert get(server, "/readyz") == (200, "OK\n")
        policy.gate.clear()
        socket.send(frame(droid_request(0)))
        until(lambda: gauge(server, "requests_running") == 1)
        for _ in range(20):
            assert get(server, "/healthz") == (200, "OK\n")
        assert gauge(server, "requests_running") == 1
        policy.gate.set()
        assert read(socket.recv(timeout=60))["actions"].shape == (24, 8)
        counts = get(server, "/metrics")[1]
        assert (
            'dzrobot_requests_total{dialect="openpi",endpoint="infer",outcome="ok"} 1.0' in counts
        )
        assert "dzrobot_sessions 1.0" in counts
        assert get(server, "/elsewhere")[0] == 404


def test_it_is_not_ready_before_the_warm_up_is_done():
    policy = Remembering()
    policy.gate.clear()
    server = PolicyServer(policy, ServeOptions(port=0, array_port=0))
    running = threading.Event()

    def live():
        with in_background(server):
            running.set()

    thread = threading.Thread(target=live)
    thread.start()
    assert policy.began.acquire(timeout=60)
    until(lambda: len(server.ports) == 2)
    assert get(server, "/healthz")[0] == 200
    assert get(server, "/readyz") == (503, "warming up\n")
    with pytest.raises(InvalidStatus, match="503"), talking(server):
        pass
    assert not running.is_set()
    policy.gate.set()
    thread.join(60)
    assert running.is_set()


def test_a_key_is_wanted_of_everybody_but_probes():
    with serving(Remembering(), api_key="right") as server:
        assert get(server, "/healthz")[0] == 200
        assert get(server, "/metrics")[0] == 401
        assert get(server, "/metrics", Authorization="Bearer right")[0] == 200
        for wrong in ("right", "Basic right", "Api-Key wrong", "Api-Key", "Api-Key r\xe4ght"):
            assert get(server, "/metrics", Authorization=wrong)[0] == 401


def test_web_pages_are_kept_out():
    with (
        serving(Remembering()) as server,
        pytest.raises(InvalidStatus, match="403"),
        talking(server, origin="http://page.example"),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"host": "0.0.0.0"}, "give an API key, or add --insecure"),
        ({"host": "0.0.0.0", "api_key": " "}, "the API key is empty"),
        ({"certificate": "cert.pem"}, "both a certificate and its private key"),
        ({"port": 5000}, "both listeners would use port 5000"),
        ({"max_sessions": 0}, "max_sessions=0"),
        ({"idle_s": 0}, "idle_s=0"),
        ({"window_s": 2}, "window_s=2"),
    ],
)
def test_what_cannot_be_served_is_said(given, said):
    with pytest.raises(ConfigError, match=said):
        ServeOptions(**given)


def test_memory_is_told_in_units_that_show_it():
    told = SessionCapacity(sessions=256, session_bytes=11_000, free_bytes=24 * 2**30)
    assert told.text == "room for 256 sessions of 10.7 KiB; 24 GiB of memory are free"
    told = SessionCapacity(sessions=1, session_bytes=0, free_bytes=2**20)
    assert told.text == "room for 1 session; 1 MiB of memory are free"


def test_a_policy_that_does_not_fit_into_memory_is_not_served():
    with (
        pytest.raises(ConfigError, match="which is room for 800"),
        serving(Remembering(), max_sessions=801),
    ):
        pass


def test_full_is_said_at_the_door_and_nobody_is_put_out():
    with serving(Remembering(), max_sessions=1, room_s=0.2) as server:
        request = droid_request(0, session_id="a")
        with talking(server, path="/v1/realtime/robot/openpi") as second, talking(server) as first:
            answers = [ask(first, request)["actions"]]
            with pytest.raises(InvalidStatus) as refused, talking(server):
                pass
            assert refused.value.response.status_code == 503
            assert refused.value.response.headers["Retry-After"] == "5"
            assert get(server, "/readyz")[0] == 503
            told = ask(second, droid_request(0, session_id="b"))
            assert "no room for session 'b' within 0.2 s" in told["message"]
            answers.append(ask(first, request)["actions"])
            assert ask(first, {"endpoint": "reset"}) == "reset successful"
            assert ask(second, droid_request(0, session_id="b")).shape == (24, 8)
        for answer, expected in zip(answers, alone([request, request]), strict=True):
            assert np.array_equal(answer, expected)


def test_a_session_is_forgotten_only_when_its_client_has_left_it():
    now = [0.0]
    seats = SessionTable(2, forget_s=100, clock=lambda: now[0])
    client = ClientConnection(1)
    old, new = seats.take(client, "old"), seats.take(client, "new")
    for session in (old, new):
        session.fresh = False
    client.newest = "new"
    now[0] = 99
    assert not list(seats.abandoned(client))
    now[0] = 100
    assert list(seats.abandoned(client)) == [old]
    client.busy = old
    assert not list(seats.abandoned(client))
    client.busy = None
    # One that plans every ten seconds is given twenty times as long.
    old.used(100)
    assert not list(seats.abandoned(client))
    now[0] = 100 + 20 * 100
    assert list(seats.abandoned(client)) == [old]


def test_a_forgotten_session_is_an_error_or_starts_over():
    for restart, said in ((False, "newer ones were used"), (True, None)):
        with (
            serving(Remembering(), forget_s=0.05, restart_lost=restart) as server,
            talking(server) as socket,
        ):
            first = droid_request(0, session_id="old")
            ask(socket, first)
            ask(socket, droid_request(0, session_id="new"))
            until(lambda server=server: gauge(server, "sessions") == 1)
            answer = ask(socket, first)
            if said:
                assert said in answer
            else:
                assert np.array_equal(answer["actions"], alone([first])[0])


def test_keyed_noise_counts_on_from_episode_to_episode_of_a_session():
    policy = Remembering()
    with serving(policy) as server, talking(server) as socket:
        policy.episodes.clear()
        for _ in range(2):
            ask(socket, droid_request(0, session_id="a"))
            ask(socket, {"endpoint": "reset", "session_ids": ["a"]})
        ask(socket, {"endpoint": "reset", "session_id": "a", "episode": 7})
        ask(socket, droid_request(0, session_id="a"))
        ask(socket, droid_request(0, session_id="b"))
    assert policy.episodes == [None, 1, 7, None]


def test_hostile_messages_end_their_connection_and_nothing_else():
    with serving(Remembering(), max_message=2**20) as server, talking(server) as kept:
        request = droid_request(0, session_id="kept")
        answers = [ask(kept, request)["actions"]]
        for message in [*HOSTILE.values(), "a text", frame([1]), frame({"endpoint": "kill"})]:
            with talking(server, array=True) as socket:
                socket.send(message)
                assert isinstance(socket.recv(timeout=60), str)
                with pytest.raises(ConnectionClosed):
                    socket.recv(timeout=60)
        with talking(server) as socket:
            socket.send(b"x" * (2**20 + 1))
            with pytest.raises(ConnectionClosed):
                socket.recv(timeout=60)
            assert socket.close_code == 1009
        answers.append(ask(kept, request)["actions"])
    for answer, expected in zip(answers, alone([request, request]), strict=True):
        assert np.array_equal(answer, expected)


def raw(server):
    return sockets.create_connection(("127.0.0.1", server.ports[0]), timeout=60)


def test_a_frame_that_announces_a_gigabyte_is_refused_unread():
    with serving(Remembering()) as server, raw(server) as peer:
        peer.sendall(
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert b"101" in peer.recv(65536)
        peer.sendall(b"\x82\xff" + (2**30).to_bytes(8, "big") + b"\0\0\0\0")
        ended = b""
        while part := peer.recv(65536):
            ended += part
        assert (1009).to_bytes(2, "big") in ended
        assert get(server, "/healthz")[0] == 200


def test_slow_clients_are_let_go_and_many_dropped_ones_leave_nothing_behind():
    policy = Remembering()
    process = psutil.Process()
    with serving(policy, handshake_s=0.3, idle_s=0.3, max_connections=64) as server:
        with raw(server) as slow, raw(server) as slower:
            slow.sendall(b"GET / HTTP/1.1\r\nX: ")
            while slow.recv(65536):
                pass
            while slower.recv(65536):
                pass
        with talking(server) as silent, pytest.raises(ConnectionClosed):
            silent.recv(timeout=60)
        for count in (50, 450):
            if count == 450:
                gc.collect()
                before, files = process.memory_info().rss, process.num_fds()
            for _ in range(count):
                raw(server).close()
        until(lambda: gauge(server, "connections") == 0)
        gc.collect()
        until(lambda: process.num_fds() <= files + 4)
        grown = process.memory_info().rss - before
        assert grown < 32 * 2**20, f"{grown} bytes after 450 connections"
        assert get(server, "/readyz")[0] == 200
        with talking(server) as socket:
            assert ask(socket, droid_request(0))["actions"].shape == (24, 8)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/net/tcp is Linux's")
def test_the_system_looks_whether_a_silent_client_is_still_there():
    """A machine that vanishes closes nothing; only the system's own probes find that out."""
    with serving(Remembering()) as server, talking(server) as socket:
        ask(socket, droid_request(0))
        end = f":{server.ports[0]:04X}"

        def timers():
            # Local address, remote one, state 01 (established), queues, timer and its end.
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            return [row[5].split(":") for row in rows if row[1].endswith(end) and row[3] == "01"]

        # 01 while the answer is on its way; then 02, the time of the next probe.
        until(lambda: [kind for kind, _ in timers()] == ["02"])
        ((_, left),) = timers()
        assert int(left, 16) / os.sysconf("SC_CLK_TCK") <= VANISHED_S < ServeOptions().room_s


def test_sessions_of_dropped_clients_are_freed():
    policy = Remembering()
    with serving(policy) as server:
        for _ in range(20):
            with talking(server) as socket:
                ask(socket, droid_request(0, session_id="x"))
        until(lambda: gauge(server, "sessions") == 0)
        assert not policy.open


def test_a_client_that_leaves_is_not_planned_for():
    policy = Remembering()
    with serving(policy) as server, talking(server) as first:
        policy.gate.clear()
        policy.batches.clear()
        first.send(frame(droid_request(0)))
        until(lambda: gauge(server, "requests_running") == 1)
        with talking(server) as second:
            second.send(frame(droid_request(0)))
            until(lambda: gauge(server, "requests_waiting") == 1)
        until(lambda: gauge(server, "requests_waiting") == 0)
        policy.gate.set()
        assert read(first.recv(timeout=60))["actions"].shape == (24, 8)
        assert policy.batches == [1]


def test_a_policy_that_fails_ends_the_server_and_says_so():
    policy = Remembering()
    with serving(policy) as server, talking(server) as socket:
        policy.fails = True
        assert "the policy has failed" in ask(socket, droid_request(0))
        assert isinstance(server._scheduler.fault, RuntimeError)


def test_what_has_begun_is_finished_when_it_is_stopped():
    policy = Remembering()
    server = PolicyServer(policy, ServeOptions(port=0, array_port=0, drain_s=60))
    inside, leave = threading.Event(), threading.Event()

    def live():
        with in_background(server):
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=live)
    thread.start()
    assert inside.wait(60)
    with talking(server) as socket:
        policy.gate.clear()
        socket.send(frame(droid_request(0)))
        until(lambda: gauge(server, "requests_running") == 1)
        leave.set()
        until(lambda: get(server, "/readyz") == (503, "shutting down\n"))
        policy.gate.set()
        assert read(socket.recv(timeout=60))["actions"].shape == (24, 8)
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=60)
        assert socket.close_code == 1001
    thread.join(60)


def test_the_log_grows_slowly_and_has_no_frames(caplog):
    caplog.set_level(logging.INFO, "dzrobot.policies.serving")
    with serving(Remembering()) as server, talking(server) as socket:
        for turn in range(20):
            ask(socket, droid_request(turn, session_id="a\nb"))
    lines = [record.getMessage() for record in caplog.records]
    plans = [line for line in lines if ": plan " in line]
    assert [re.search(r"plan (\d+)", line)[1] for line in plans] == ["1", "2", "4", "8", "16"]
    assert all("\n" not in line and len(line) < 300 for line in lines)
    assert len([line for line in lines if "stacks of the last 4" in line]) == 1


def test_what_clients_sent_and_got_is_kept(tmp_path):
    policy = Remembering(MINI)
    requests = [
        {
            "observation/image": np.full((128, 128, 3), turn, np.uint8),
            "observation/wrist_image": np.full((128, 128, 3), 9, np.uint8),
            "observation/state": np.full(8, turn, np.float64),
            "prompt": "pick up the cube",
            "session_id": name,
        }
        for turn in range(3) for name in ("a", "b")
    ]  # fmt: skip
    recorder = Recorder(tmp_path / "kept", MINI)
    server = PolicyServer(policy, ServeOptions(port=0, array_port=0), recorder=recorder)
    with in_background(server), talking(server) as socket:
        answers = [ask(socket, request)["actions"] for request in requests]
        ask(socket, {"endpoint": "reset", "session_ids": ["a"]})
    recorder.close()
    lines = [
        json.loads(line) for line in (tmp_path / "kept/requests.jsonl").read_text().splitlines()
    ]
    assert [line["session"] for line in lines] == ["a", "b"] * 3
    for line, answer in zip(lines, answers, strict=True):
        assert np.array_equal(np.array(line["actions"], np.float32), answer)
    info = json.loads((tmp_path / "kept/dataset/meta/info.json").read_text())
    assert (info["total_episodes"], info["total_frames"]) == (2, 6)
    assert not list((tmp_path / "kept/open").iterdir())
