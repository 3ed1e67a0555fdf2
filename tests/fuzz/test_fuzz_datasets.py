"""Corrupted LeRobot folders and statistics: one message or a result, never a traceback."""

import json
import re
import resource
import shutil
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_worlds import ROBOT, record
from harness import HEAVY, LIGHT, assert_held, assert_refused, corrupted, mutations, refuses
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dzrobot.recording import EpisodeWriter, consolidate
from dzrobot.training.data import DatasetReader, ReaderOptions, SourceSpec, TrainingData
from dzrobot.training.data.normalization import measure, merge
from dzrobot.training.data.provenance import check_provenance

run = HEAVY.run
MEMORY = 500 * 2**20

INFO, EPISODES, TASKS = "meta/info.json", "meta/episodes.jsonl", "meta/tasks.jsonl"
MODALITY, STATS = "meta/modality.json", "meta/episodes_stats.jsonl"
FACTS = "meta/recording_facts.jsonl"
DOCUMENTS = (INFO, EPISODES, TASKS, MODALITY)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return a small dataset of v2.1 and its statistics; tests restore what they corrupt."""
    folder = tmp_path_factory.mktemp("world")
    record(folder / "set", lengths=(20, 19), version="v2.1")
    record(folder / "three", lengths=(20, 19), version="v3.0")
    record(folder / "films", lengths=(3, 3), version="v3.0", video=True)
    reader = DatasetReader(folder / "set", ROBOT, ReaderOptions(cache=folder / "cache"))
    (folder / "metadata.json").write_text(json.dumps({ROBOT.tag: measure([reader], ROBOT)}))
    return folder


def open_all(world, name="set"):
    options = ReaderOptions(cache=world / "cache", images=False)
    shutil.rmtree(world / "cache", ignore_errors=True)
    reader = DatasetReader(world / name, ROBOT, options)
    reader.vectors(0)
    return reader


def grown(action):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = action()
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert more * 1024 < MEMORY, f"{more / 1024:.0f} MiB more"
    return result


def parts(path: Path):
    """Return the document of the first line, and what follows it in the file."""
    text = path.read_bytes()
    if path.suffix == ".json":
        return json.loads(text), b""
    first, _, rest = text.partition(b"\n")
    return json.loads(first), b"\n" + rest


def spoil_each(path, read, only=None, every=1):
    """Return how many files in place of ``path`` were tried and refused; of many, some."""
    good = path.read_bytes()
    document, tail = parts(path)
    counts = {"tried": 0, "refused": 0}
    try:
        for _, content in islice(mutations(document, tail=tail, only=only), 0, None, every):
            path.write_bytes(content)
            counts["tried"] += 1
            counts["refused"] += grown(lambda: refuses(read)) is not None
    finally:
        path.write_bytes(good)
    return counts


@pytest.mark.sampled
@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_field_corrupted(world, name):
    places = None
    if name == INFO:
        document, _ = parts(world / "set" / INFO)
        inner = ("observation.state",)
        places = [(key,) for key in document]
        places += [("features", column, part) for column in inner for part in ("dtype", "shape")]
        places += [("features", inner[0], "shape", 0), ("features", inner[0], "names")]
    if name == MODALITY:
        first = ("state", "state")
        places = [("state",), ("video",), first, *((*first, part) for part in ("start", "end"))]
        places.append((*first, "original_key"))
    counts = spoil_each(
        world / "set" / name, lambda: open_all(world), places, 3 if name == INFO else 2
    )
    assert counts["tried"] > 40
    assert counts["refused"] > counts["tried"] / 3


def test_every_field_of_the_provenance_corrupted(world):
    first = (ROBOT.tag, "provenance")
    names = ("datasets", "sampling", "anchor_stride")
    places = [(ROBOT.tag,), first, *((*first, name) for name in names), (*first, "datasets", 0)]
    path = world / "metadata.json"
    counts = spoil_each(path, lambda: check_provenance(path, ROBOT, ["another"]), places, 2)
    assert counts["refused"] > counts["tried"] / 3


def test_every_field_of_the_statistics_corrupted(world):
    """As training reads them, nested deeper than Python's parser can follow among others."""
    table = (ROBOT.tag, "statistics", "state", ROBOT.state[0].name)
    places = [table[:2], table[:3], table, (*table, "q01"), (*table, "q99", 0)]
    places += [(ROBOT.tag, "relative_action_keys"), (ROBOT.tag, "action_horizon")]
    path = world / "metadata.json"
    options = ReaderOptions(cache=world / "cache", images=False)
    source = SourceSpec(paths=(world / "set",), embodiment=ROBOT, metadata=path)
    opened = lambda: TrainingData.open([source], seed=0, options=options)  # noqa: E731
    counts = spoil_each(path, opened, places, every=2)
    assert counts["tried"] > 100
    assert counts["refused"] > counts["tried"] / 2


def test_statistics_are_not_merged_with_corrupted_ones(world):
    entry = json.loads((world / "metadata.json").read_text())[ROBOT.tag]
    part = ("sketch", "state.state")
    places = [
        ("provenance",), ("sketch",), part, (*part, "count"), (*part, "bins"), (*part, "bins", 0),
        *((*part, "bins", 0, name) for name in ("exponent", "first", "counts")),
        ("statistics", "state", "state", "mean"), ("statistics", "state", "state", "min", 0),
        ("action_horizon",), ("relative_action_keys",),
    ]  # fmt: skip
    added = json.loads(json.dumps(entry))
    added["provenance"]["datasets"] = ["another"]
    for _, content in mutations(entry, only=places):
        try:
            known = json.loads(content)
        except (ValueError, RecursionError):
            continue  # The reader of documents is tested above.
        if isinstance(known, dict):
            grown(lambda known=known: refuses(lambda: merge(known, added)))


@settings(
    max_examples=12, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(data=st.data())
@pytest.mark.parametrize("name", DOCUMENTS)
def test_anything_in_any_field(world, name, data):
    path = world / "set" / name
    good = path.read_bytes()
    document, tail = parts(path)
    try:
        path.write_bytes(data.draw(corrupted(document)) + tail)
        grown(lambda: refuses(lambda: open_all(world)))
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("name", [INFO, "meta/recording.json", EPISODES, STATS, TASKS])
def test_a_recording_with_corrupted_lists_is_not_continued(world, tmp_path, name):
    document, _ = parts(world / "set" / name)
    places = [(key,) for key in document]
    for kind, content in islice(mutations(document, only=places), 0, None, 9):
        path = tmp_path / "set"
        shutil.copytree(world / "set", path)
        (path / name).write_bytes(content)
        refuses(lambda: EpisodeWriter(path, ROBOT, fps=ROBOT.timing.control_hz).close())  # noqa: B023
        left = list((path / "data").rglob("*.parquet"))
        assert name == INFO or len(left) == 2, kind
        shutil.rmtree(path)


def edited(world, tmp_path, **changes):
    """Return a copy of the dataset with other values in ``info.json``."""
    path = tmp_path / "set"
    shutil.copytree(world / "set", path)
    info = json.loads((path / INFO).read_text())
    (path / INFO).write_text(json.dumps({**info, **changes}))
    return path


FEATURE = {"dtype": "float32", "shape": [10**12], "names": None}
HOSTILE = {
    "positional": {"data_path": "data/{}.parquet"},
    "number": {"data_path": "data/{0}.parquet"},
    "attribute": {"data_path": "data/{episode_index.__class__}.parquet"},
    "item": {"data_path": "data/{video_key[0]}.parquet"},
    "unknown": {"data_path": "data/{secret}.parquet"},
    "width": {"data_path": "data/{episode_index:01000000000d}.parquet"},
    "nested width": {"data_path": "data/{episode_index:{episode_index}}.parquet"},
    "conversion": {"data_path": "data/{episode_index!r}.parquet"},
    "open brace": {"data_path": "data/{episode_index"},
    "upward": {"data_path": "../{episode_index:06d}.parquet"},
    "absolute": {"data_path": "/etc/{episode_index:06d}.parquet"},
    "chunks of 0": {"chunks_size": 0},
    "wide": {"features": {"observation.state": FEATURE}},
    "without type": {"features": {"observation.state": {**FEATURE, "dtype": None, "shape": [8]}}},
    "video key upward": {"features": {"../..": {**FEATURE, "shape": [8]}}},
    "rate": {"fps": 0},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_values_are_refused(world, tmp_path, kind):
    path = edited(world, tmp_path, **HOSTILE[kind])
    message = grown(lambda: refuses(lambda: DatasetReader(path, ROBOT)))
    assert message is not None
    assert "info.json" in message


@pytest.mark.parametrize("length", [10**12, 10**18, 10**20, 10**7, -1, "20", None])
def test_lengths_are_not_believed(world, tmp_path, length):
    path = edited(world, tmp_path)
    lines = (path / EPISODES).read_text().splitlines()
    first = {**json.loads(lines[0]), "length": length}
    (path / EPISODES).write_text("\n".join([json.dumps(first), *lines[1:]]))
    options = ReaderOptions(cache=tmp_path / "cache", images=False)
    assert grown(lambda: refuses(lambda: DatasetReader(path, ROBOT, options)))


def test_lists_of_parquet_are_checked(world, tmp_path):
    name = "meta/episodes/chunk-000/file-000.parquet"
    good = pq.read_table(world / "three" / name)
    tried = 0
    for column in ("episode_index", "length", "data/chunk_index", "data/file_index"):
        at = good.column_names.index(column)
        for values in (["a", "b"], [None, 1], [-1, 1], [10**15, 1], [0.5, 1.0], [[1], [2]]):
            path = tmp_path / "set"
            shutil.copytree(world / "three", path)
            pq.write_table(good.set_column(at, column, pa.array(values)), path / name)
            options = ReaderOptions(cache=tmp_path / "cache", images=False)
            assert grown(lambda: refuses(lambda: DatasetReader(path, ROBOT, options))), values  # noqa: B023
            refuses(lambda: consolidate(path))  # noqa: B023
            shutil.rmtree(path)
            tried += 1
    assert tried == 24


def spoil_links(path):
    (path / "data" / "loop").symlink_to(path / "data")
    (path / "data" / "self").symlink_to(path / "data" / "self")
    (path / "data" / "dangling.parquet").symlink_to(path / "nowhere")
    return path


def test_links_that_lead_nowhere_are_passed_by(world, tmp_path):
    path = spoil_links(edited(world, tmp_path))
    options = ReaderOptions(cache=tmp_path / "cache", images=False)
    assert len(DatasetReader(path, ROBOT, options)) > 0
    data = next((path / "data").rglob("episode_000000.parquet"))
    data.unlink()
    data.symlink_to(data)
    message = refuses(lambda: DatasetReader(path, ROBOT, options))
    assert "episode 0" in message
    assert "missing" in message


def test_commands_end_with_one_message(world, tmp_path, monkeypatch):
    """The two commands that read datasets, in children: exit code, output, memory and time."""
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path / "cache"))
    robot = ("--embodiment", "data_worlds:ROBOT")
    seen = run(["inspect-data", world / "set", "--quick", *robot])
    measured = run(
        ["stats", "data_worlds:ROBOT", "--dataset", world / "set", "--output", tmp_path / "good"]
    )
    assert seen.code == measured.code == 0, seen.output + measured.output
    corrupters = {
        "null": lambda path: (path / INFO).write_text("null"),
        "deep": lambda path: (path / MODALITY).write_text("[" * 100_000),
        "modality null": lambda path: (path / MODALITY).write_text("null"),
        "latin-1": lambda path: (path / TASKS).write_bytes(b'{"task_index": 0, "task": "\xe9"}'),
        "folder": lambda path: ((path / EPISODES).unlink(), (path / EPISODES).mkdir()),
    }
    for number, corrupt in enumerate(corrupters.values()):
        path = tmp_path / str(number) / "set"
        shutil.copytree(world / "set", path)
        corrupt(path)
        # What can be read is reported, with its faults.
        assert_held(run(["inspect-data", path, "--quick", *robot]), seen, codes=(1, 2))
        output = tmp_path / f"{number}.json"
        words = ["stats", "data_worlds:ROBOT", "--dataset", path, "--output", output]
        assert_refused(run(words), measured)
        assert not output.exists()
    for output in (tmp_path / ("x" * 300), Path("/proc/x/y"), world / "metadata.json" / "x"):
        words = ["stats", "data_worlds:ROBOT", "--dataset", world / "set", "--output", output]
        assert_held(run(words), measured, codes=(2,))


def spoiled_recordings(world):
    """Yield what was damaged, and a change to make to a folder, of lists, columns and videos."""
    deep = json.dumps({"episode_index": None})
    yield "v2.1", "facts null", lambda path: (path / FACTS).write_text(deep + "\n")
    yield "v2.1", "facts fraction", lambda path: (path / FACTS).write_text('{"episode_index": 0.5}')
    for value in ("null", "1e999", "-1"):
        for field, name in (("length", EPISODES), ("tasks", EPISODES), ("mean", STATS)):
            yield "v2.1", f"{field} {value}", edited_line(name, field, value)
    yield "v3.0", "no task", rewritten("meta/tasks.parquet", lambda t: t.drop_columns(["task"]))
    yield "v3.0", "task null", rewritten("meta/tasks.parquet", set_all("task", None))
    lists = "meta/episodes/chunk-000/file-000.parquet"
    for column in ("length", "tasks", "data/file_index", "stats/action/mean", "stats/action/count"):
        yield "v3.0", f"no {column}", rewritten(lists, lambda t, c=column: t.drop_columns([c]))
        for value in (None, "a"):
            yield "v3.0", f"{column} {value}", rewritten(lists, set_all(column, value))
    data = "data/chunk-000/file-001.parquet"
    more = lambda table: table.append_column("\x1b[31mred", table.column("index"))  # noqa: E731
    yield "v3.0", "unlike schemas", rewritten(data, more)
    yield "v3.0", "no episode", rewritten(data, lambda t: t.drop_columns(["episode_index"]))
    for content in (b"", b"no video" * 100):
        video = lambda path, c=content: next(iter(path.rglob("file-001.mp4"))).write_bytes(c)  # noqa: E731
        yield "films", f"video {content[:4]}", video


FOLDERS = {"v2.1": "set", "v3.0": "three", "films": "films"}
CHANGES = (["relabel", "--episode=1", "--success"], ["relabel", "--episode=0", "--drop"],
           ["consolidate"])  # fmt: skip


def edited_line(name, field, value):
    def change(path):
        text = (path / name).read_text()
        (path / name).write_text(
            re.sub(rf'("{field}": )(\d+|\[[^\]]*\])', rf"\g<1>{value}", text, count=1)
        )

    return change


def set_all(column, value):
    return lambda table: table.set_column(
        table.column_names.index(column), column, pa.array([value] * len(table))
    )


def rewritten(name, change):
    def apply(path):
        table = change(pq.read_table(path / name))
        pq.write_table(table, path / name)

    return apply


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.long)])
def test_commands_that_change_a_recording_refuse_damaged_ones_whole(world, tmp_path, every):
    """One message, exit 2, and no file beside the old ones; or a result, where nothing is used."""
    good = {}
    for words in CHANGES:
        path = shutil.copytree(world / "three", tmp_path / "r")
        good[words[0]] = LIGHT.run([words[0], path, *words[1:]])
        assert good[words[0]].code == 0, good[words[0]].output
        shutil.rmtree(path)
    refused = 0
    damages = list(spoiled_recordings(world))[::-every]
    for version, kind, damage in damages:
        for words in CHANGES:
            path = shutil.copytree(world / FOLDERS[version], tmp_path / "r")
            damage(path)
            before = {one.relative_to(path) for one in path.rglob("*") if one.is_file()}
            result = LIGHT.run([words[0], path, *words[1:]])
            assert_held(result, good[words[0]])
            assert "\x1b" not in result.output, kind
            assert max(map(len, result.output.split("\n"))) < 2000, kind
            after = {one.relative_to(path) for one in path.rglob("*") if one.is_file()}
            assert result.code == 0 or after == before, kind
            refused += result.code == 2
            shutil.rmtree(path)
    assert refused > 2 * len(damages)
