"""The largest messages: others are served meanwhile, and memory stays bounded."""

import os
import re
import struct
import subprocess
import sys
import threading
from contextlib import suppress

import msgpack
import numpy as np
import psutil
import pytest
from serving_peers import ARENA, DROID, droid_request, frame, read
from test_serving_processes import HERE
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from dzrobot.policies.serving.dialects import largest_request

READ = largest_request(DROID)
"""Bytes of the largest message that this server reads."""

HELD_S = 0.05
"""Processor seconds that one step of the server's loop may take: what /healthz waits for."""

MORE = 200 * 2**20
"""Bytes that a message may cost the server beyond what it has idle."""

TIMED = """
import asyncio, time
from pathlib import Path
from serving_peers import Remembering

longest, run, log = 0.0, asyncio.Handle._run, Path("longest")


def timed(handle):
    # Processor time of this thread: what else the machine does is not counted.
    global longest
    began = time.thread_time()
    run(handle)
    spent = time.thread_time() - began
    if not log.exists():
        longest = 0.0
    if spent > longest:
        longest = spent
        # In one step, as the test may read at the same moment.
        whole = log.with_suffix(".new")
        whole.write_text(str(spent))
        whole.replace(log)


asyncio.Handle._run = timed
"""


def filled(piece):
    """Return a message of the largest size: a list of as many pieces as fit."""
    count = (READ - 8) // len(piece)
    return b"\xdd" + struct.pack(">I", count) + piece * count


def nested():
    """Return lists of lists of 4000 empty maps, none of them long."""
    inner = b"\xdc" + struct.pack(">H", 4000) + b"\x80" * 4000
    return filled(b"\xdc" + struct.pack(">H", 100) + inner * 100)


MESSAGES = {
    "empty maps": lambda: filled(b"\x80"),
    "lists of lists of empty maps": nested,
    "numbers": lambda: filled(b"\xcb" + b"\0" * 8),
    "one text": lambda: msgpack.packb("x" * (READ - 8)),
    "texts with a rare letter": lambda: filled(msgpack.packb("\U0001f600" + "x" * 1000)),
    "deep": lambda: b"\x91" * (READ - 8) + b"\xc0",
    "small arrays": lambda: filled(frame(np.zeros(1, np.float32))),
    "one array of another size": lambda: frame(
        droid_request(0) | {"observation/wrist_image_left": np.zeros(READ - 400_000, np.uint8)}
    ),
    "a state in double precision": lambda: frame(
        droid_request(0) | {"observation/joint_position": np.zeros(READ // 8 - 70_000)}
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Return a server in a process of its own: its folder, process and port."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "timed_peer.py").write_text(TIMED)
    paths = os.pathsep.join([str(folder), str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "dzrobot", "serve", "timed_peer:Remembering"]
    with subprocess.Popen(
        [*command, "--embodiment=oxe_droid", "--port=0", "--array-port=0"], cwd=folder,
        env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        said = "".join(iter(process.stdout.readline, "Ctrl-C stops it.\n"))
        yield folder, process.pid, int(re.search(r"ws://127.0.0.1:(\d+)", said)[1])
        process.terminate()


def assert_bounded(server, send):
    """Assert that ``send`` costs the server little memory, and holds its loop for a short time.

    Of three times the shortest counts: what else the machine does makes some longer.
    """
    folder, pid, _ = server
    memory, stop = psutil.Process(pid).memory_info, threading.Event()
    sizes, held = [memory().rss], []

    def sample():
        while not stop.wait(0.002):
            sizes.append(memory().rss)

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        for _ in range(3):
            (folder / "longest").unlink(missing_ok=True)
            send()
            held.append(float((folder / "longest").read_text()))
    finally:
        stop.set()
        sampling.join()
    assert max(sizes) - sizes[0] < MORE
    assert min(held) < HELD_S


def send_plain(port, message):
    """Send ``message`` masked with zeros, which costs this process nothing; return the answer."""
    with connect(f"ws://127.0.0.1:{port}", compression=None, proxy=None, max_size=None) as peer:
        assert read(peer.recv(timeout=60)) == ARENA
        head = b"\x82\xff" + struct.pack(">Q", len(message)) + b"\0\0\0\0"
        # The server may hang up before it has read all.
        with suppress(OSError):
            peer.socket.sendall(head)
            peer.socket.sendall(message)
        return peer.recv(timeout=60)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", MESSAGES)
def test_the_largest_message_holds_nobody_up_and_costs_bounded_memory(server, kind):
    message = MESSAGES[kind]()
    assert READ - 2**20 < len(message) <= READ

    def send():
        assert isinstance(send_plain(server[-1], message), str), "it was refused"

    assert_bounded(server, send)


def test_a_message_beyond_what_the_robot_sends_is_refused_unread(server):
    def send():
        with pytest.raises(ConnectionClosed) as closed:
            send_plain(server[-1], bytes(64 * 2**20))
        assert closed.value.rcvd.code == 1009

    assert_bounded(server, send)
