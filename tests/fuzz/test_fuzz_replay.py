"""Recordings somebody else has had a hand in, replayed: checked before anything moves."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness import LIGHT, assert_held, assert_refused, mutations, refuses, whole_mutations

from dzrobot.diagnostics.recorded import load_recording
from dzrobot.embodiments.registry import load_embodiment

run = LIGHT.run
POINT = ("--env=dzrobot/point-v0", "--env-arg=resolution=32")
ROBOT = load_embodiment("libero_sim")
DATA = "data/chunk-000/episode_000000.parquet"
DOCUMENTS = ("meta/info.json", "meta/episodes.jsonl", "meta/tasks.jsonl", "meta/modality.json")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a recording of two episodes, and what it costs to replay it."""
    folder = tmp_path_factory.mktemp("recorded") / "set"
    words = ["record", *POINT, "--policy=random", "--attempts=2", "--keep-failures"]
    words += ["--max-steps=6"]
    made = run([*words, f"--output={folder}"])
    assert made.code == 0, made.output
    good = run(["replay", folder, *POINT])
    assert good.code == 0, good.output
    return folder, good


@pytest.fixture
def copy(recorded, tmp_path):
    return shutil.copytree(recorded[0], tmp_path / "set")


def with_column(name, make):
    """Return a damage that replaces a column by what ``make`` returns for its values."""

    def corrupt(table):
        at = table.column_names.index(name)
        return table.set_column(at, name, make(table[name].to_pylist()))

    return corrupt


def rows(choose):
    return lambda table: table.take(pa.array(choose(len(table)), pa.int64()))


def number(value, kind=None):
    """Return a damage of the first value, alone or in its list."""

    def make(values):
        first = [value, *values[0][1:]] if isinstance(values[0], list) else value
        return pa.array([first, *values[1:]], kind)

    return make


COLUMNS = ("action", "observation.state", "frame_index", "episode_index", "init_state_id")
KINDS = {
    "null": lambda values: pa.nulls(len(values)),
    "text": lambda values: pa.array(["a"] * len(values)),
    "texts": lambda values: pa.array([["a"] * 7] * len(values)),
    "empty lists": lambda values: pa.array([[]] * len(values), pa.list_(pa.float32())),
    "longer": lambda values: pa.array([[0.0] * 99] * len(values)),
    "ragged": lambda values: pa.array([[0.0] * (i + 1) for i in range(len(values))]),
    "nested": lambda values: pa.array([[[0.0] * 7]] * len(values)),
    "mappings": lambda values: pa.array([{"a": 1}] * len(values)),
    "dates": lambda values: pa.array([0] * len(values), pa.date32()),
    "times": lambda values: pa.array([0] * len(values), pa.timestamp("ns")),
    "binary": lambda values: pa.array([b"\xff"] * len(values)),
    "decimals": lambda values: pa.array([1] * len(values), pa.decimal128(5, 2)),
    "booleans": lambda values: pa.array([True] * len(values)),
    "fractions": lambda values: pa.array([0.5] * len(values)),
    "negative": lambda values: pa.array([-7] * len(values)),
    "huge": lambda values: pa.array([2**62] * len(values)),
    "first NaN": number(float("nan")),
    "first infinite": number(float("inf")),
    "first beyond float32": number(1e300),
    "first null": number(None),
}
TABLES = {
    "no rows": rows(lambda count: []),
    "half": rows(lambda count: range(count // 2)),
    "one row more": rows(lambda count: [*range(count), count - 1]),
    "twice": rows(lambda count: [*range(count)] * 2),
    "backwards": rows(lambda count: range(count)[::-1]),
    "two exchanged": rows(lambda count: [1, 0, *range(2, count)]),
    "of another episode": with_column(
        "episode_index", lambda values: pa.array([5] * len(values), pa.int64())
    ),
    "of two episodes": with_column(
        "episode_index", lambda values: pa.array([i % 2 for i in range(len(values))])
    ),
    "two starts": with_column("init_state_id", lambda values: pa.array([*range(len(values))])),
    **{
        f"{name} {kind}": with_column(name, make)
        for name in COLUMNS
        for kind, make in KINDS.items()
    },
    **{f"without {name}": (lambda table, name=name: table.drop(name)) for name in COLUMNS},
    **{
        f"{name} twice": (lambda table, name=name: table.append_column(name, table[name]))
        for name in COLUMNS
    },
}
HARMLESS = {"init_state_id booleans", "frame_index first beyond float32"}
"""A start that is numbered 1 all along; a number that the column cannot hold is not written."""


def written(table, damage, path):
    """Write ``table`` damaged to ``path``; return whether it can be written."""
    try:
        pq.write_table(damage(table), path)
    except (pa.ArrowException, OverflowError):
        return False
    return True


def test_every_column_corrupted(recorded, copy):
    table = pq.read_table(recorded[0] / DATA)
    tried = 0
    for name, damage in TABLES.items():
        if not written(table, damage, copy / DATA):
            continue
        tried += 1
        message = refuses(lambda: load_recording(copy, 0, ROBOT))
        assert message or name in HARMLESS, f"{name} was taken"
        assert message is None or "episode 0" in message or "parquet" in message, message
    assert tried > 90


def test_every_byte_of_nonsense(recorded, copy):
    for kind, content in whole_mutations((recorded[0] / DATA).read_bytes()):
        (copy / DATA).write_bytes(content)
        message = refuses(lambda: load_recording(copy, 0, ROBOT))
        # Parquet is read from its end, so that what precedes it may be anything.
        assert message or kind in ("twice", "latin-1 before", "byte order mark"), kind


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_field_of_its_documents_corrupted(recorded, copy, name):
    original = (recorded[0] / name).read_bytes()
    first, _, rest = original.partition(b"\n")
    lines = name.endswith(".jsonl")
    document, tail = json.loads(first if lines else original), b"\n" + rest if lines else b""
    places = None
    if name == "meta/info.json":
        places = [(key,) for key in document]
        places += [("features", name, part) for name in COLUMNS for part in ("dtype", "shape")]
    whole = load_recording(recorded[0], 0, ROBOT)
    for number_, (kind, content) in enumerate(mutations(document, tail=tail, only=places)):
        # Every kind of change meets every field of some document.
        if number_ % 3 and not kind.startswith("only"):
            continue
        (copy / name).write_bytes(content)
        found = []
        message = refuses(lambda: found.append(load_recording(copy, 0, ROBOT)))  # noqa: B023
        if message is None:
            np.testing.assert_array_equal(found[0].actions, whole.actions, err_msg=kind)
            np.testing.assert_array_equal(found[0].states, whole.states, err_msg=kind)


CORRUPTED = {
    "nan": lambda path: corrupt(path, with_column("action", KINDS["first NaN"])),
    "ragged": lambda path: corrupt(path, with_column("action", KINDS["ragged"])),
    "backwards": lambda path: corrupt(path, TABLES["backwards"]),
    "torn": lambda path: (path / DATA).write_bytes((path / DATA).read_bytes()[:-9]),
    "folder": lambda path: ((path / DATA).unlink(), (path / DATA).mkdir()),
    "device": lambda path: ((path / DATA).unlink(), (path / DATA).symlink_to("/dev/zero")),
    "loop": lambda path: ((path / DATA).unlink(), (path / DATA).symlink_to(path / DATA)),
    "no data": lambda path: shutil.rmtree(path / "data"),
    "no lists": lambda path: shutil.rmtree(path / "meta"),
}


def corrupt(path, damage):
    pq.write_table(damage(pq.read_table(path / DATA)), path / DATA)


@pytest.mark.sampled
@pytest.mark.parametrize("what", CORRUPTED)
def test_nothing_moves_by_a_corrupted_recording(recorded, copy, what):
    CORRUPTED[what](copy)
    assert_refused(run(["replay", copy, *POINT]), recorded[1])
    words = ["record", *POINT, f"--replay={copy}#0", f"--output={copy / 'again'}"]
    assert_refused(run(words), recorded[1])
    assert not (copy / "again").exists()


def test_a_start_that_there_is_none_of(recorded, copy):
    corrupt(copy, with_column("init_state_id", lambda values: pa.array([10**6] * len(values))))
    assert_refused(run(["replay", copy, *POINT]), recorded[1])


def test_actions_beyond_all_bounds(recorded, copy):
    """Taken, and cut by the environment's own limits as those of a policy are."""

    def far(values):
        return pa.array([[1e30] * len(value) for value in values])

    corrupt(copy, with_column("action", far))
    assert_held(run(["replay", copy, *POINT]), recorded[1])


def test_actions_of_another_robot(recorded):
    words = ["--env=dzrobot/Franka-PnP-fake-v0", "--unattended"]
    assert_refused(run(["replay", recorded[0], *words]), recorded[1])
