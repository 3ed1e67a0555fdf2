"""What is read of a dataset is read once: per file, per node, whatever the number of episodes."""

import logging
import threading

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_worlds import ROBOT, record

from dzrobot.recording import consolidate
from dzrobot.training.data import DatasetReader, ReaderOptions, claims, films
from dzrobot.training.data.columns import _Builder
from dzrobot.training.data.films import FrameTable
from dzrobot.training.data.video_decoding import PyAvDecoder


def test_the_rows_of_a_file_are_looked_through_once(tmp_path, monkeypatch):
    path = record(tmp_path / "set", lengths=(20,) * 6, version="v3.0")
    consolidate(path)
    (file,) = path.glob("data/*/*.parquet")
    # With a fault in it, its episodes are copied one by one.
    table = pq.read_table(file)
    tasks = np.append(table["task_index"].to_numpy()[:-1], 9)
    at = table.column_names.index("task_index")
    pq.write_table(table.set_column(at, "task_index", pa.array(tasks)), file)
    looked, plain = [], np.flatnonzero

    def counted(values):
        looked.append(len(values))
        return plain(values)

    monkeypatch.setattr("dzrobot.training.data.columns.np.flatnonzero", counted)
    options = ReaderOptions(cache=tmp_path / "cache", damaged="count")
    reader = DatasetReader(path, ROBOT, options)
    monkeypatch.undo()
    assert list(reader.columns.faults) == [5]
    assert reader.columns.first_row.tolist()[:5] == [20 * episode for episode in range(5)]
    rows = [count for count in looked if count >= 119]
    assert rows == [119]


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_small_files_are_copied_together_as_they_are_one_by_one(version, tmp_path, monkeypatch):
    path = record(tmp_path / "set", lengths=(20, 31, 17, 25), version=version)
    read = []
    for name, rows in (("together", 10**6), ("apart", 0)):
        monkeypatch.setattr("dzrobot.training.data.columns._TOGETHER", rows)
        options = ReaderOptions(cache=tmp_path / name)
        columns = DatasetReader(path, ROBOT, options).columns
        assert not columns.faults
        tables = {name: columns.vector(name) for name in columns.widths}
        tables |= {name: columns.codes(name) for name in columns.texts}
        read.append(tables | {"first_row": columns.first_row})
    together, apart = read
    assert together.keys() == apart.keys()
    for name, table in apart.items():
        np.testing.assert_array_equal(together[name], table)
        assert np.ptp(table) > 0 or name == "first_row"


def test_one_process_of_a_node_copies_and_the_others_take_what_it_made(tmp_path, monkeypatch):
    """Locks are held by open files, so threads stand for processes."""
    path = record(tmp_path / "set", lengths=(20, 20))
    others, waiting, built = 3, threading.Semaphore(0), []
    original = _Builder.build

    class Waiters(logging.Handler):
        def emit(self, message):
            if "waiting for it" in message.getMessage():
                waiting.release()

    def build(self, progress):
        built.append(1)
        for _ in range(others):
            assert waiting.acquire(timeout=60), "each of the others waits"
        original(self, progress)

    monkeypatch.setattr(_Builder, "build", build)
    handler = Waiters()
    logging.getLogger("dzrobot.files").addHandler(handler)
    readers = []
    threads = [
        threading.Thread(
            target=lambda: readers.append(
                DatasetReader(path, ROBOT, ReaderOptions(cache=tmp_path / "cache"))
            )
        )
        for _ in range(1 + others)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logging.getLogger("dzrobot.files").removeHandler(handler)
    assert len(built) == 1
    assert len({len(reader) for reader in readers}) == 1
    assert len(readers) == 1 + others
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.suffix == ".lock"]
    assert not left


def test_the_frame_table_of_a_shared_video_is_read_once_for_each_camera(tmp_path, monkeypatch):
    path = record(tmp_path / "set", lengths=(20,) * 4, version="v3.0", video=True)
    consolidate(path)
    read, plain = [], films.read_film

    def counted(file, folder):
        read.append(file)
        return plain(file, folder)

    for module in (films, claims):
        monkeypatch.setattr(module, "read_film", counted)
    for _ in range(2):
        assert DatasetReader(path, ROBOT, ReaderOptions(cache=tmp_path / "cache")).faults() == []
    assert len(read) == len(set(read)) == len(ROBOT.views)


class CountingContainer:
    """An open video that counts what is decoded."""

    def __init__(self, container):
        self._container, self.packets = container, 0

    def __getattr__(self, name):
        return getattr(self._container, name)

    def decode(self, stream):
        for packet in self._container.demux(stream):
            self.packets += 1
            yield from packet.decode()


def encoded(path, codec, gop, options, frames=80):
    with av.open(str(path), "w") as output:
        stream = output.add_stream(codec, rate=30, options=options)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 96, 64, "yuv420p", gop
        y, x = np.mgrid[0:64, 0:96]
        for number in range(frames):
            waves = [127 + 90 * np.sin(x / 9 + number / 3 + c) * np.cos(y / 7) for c in range(3)]
            image = np.stack(waves, -1).astype(np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(image, "rgb24")))
        output.mux(stream.encode())
    return path


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("codec", "gop", "options", "share"),
    [
        ("libx264", 2, {}, 1.0),
        ("libx264", 2, {"bf": "0"}, 0.55),
        ("libx264", 10, {}, 1.0),
        ("libx264", 10, {"bf": "0"}, 0.95),
        ("libx264", 250, {}, 1.0),
        ("libx264", 250, {"bf": "0"}, 1.0),
        ("libx265", 2, {"x265-params": "log-level=none"}, 1.0),
        ("libx265", 10, {"x265-params": "log-level=none"}, 1.0),
        ("libsvtav1", 2, {"preset": "12"}, 0.55),
        ("libsvtav1", 10, {"preset": "12"}, 0.95),
    ],
)
def test_no_more_is_decoded_than_straight_on(tmp_path, codec, gop, options, share):
    """Every third frame: seeks are made where the file's key frames make them pay."""
    path = encoded(tmp_path / "video.mp4", codec, gop, options)
    wanted = list(range(1, 76, 3))
    with av.open(str(path)) as container:
        straight, images = CountingContainer(container), {}
        table = FrameTable.of(path)
        for frame in straight.decode(container.streams.video[0]):
            images[int(np.searchsorted(table.pts, frame.pts))] = frame.to_ndarray(format="rgb24")
            if wanted[-1] in images:
                break
    decoder = PyAvDecoder(path, table)
    decoder._container = ours = CountingContainer(decoder._container)
    got = decoder.frames(wanted)
    np.testing.assert_array_equal(got, [images[number] for number in wanted])
    assert ours.packets <= share * straight.packets
    # And back: a seek lands on the key frame before the frame, not on an earlier one.
    before = ours.packets
    decoder.frames([wanted[-2]])
    key = table.key_frames[table.key_before(wanted[-2])]
    assert ours.packets - before <= wanted[-2] - key + 1 + 2 * table.seek_cost
    decoder.close()
