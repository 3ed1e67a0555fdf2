"""What is read of a dataset is read once: per file, per node, whatever the number of episodes."""

import logging
import threading

import numpy as np
from data_worlds import ROBOT, record

from dzrobot.recording import consolidate
from dzrobot.training.data import DatasetReader, ReaderOptions
from dzrobot.training.data.columns import _Builder
from dzrobot.training.data.verify import video_faults
from dzrobot.training.data.video_decoding import FrameTable


def test_the_rows_of_a_file_are_looked_through_once(tmp_path, monkeypatch):
    path = record(tmp_path / "set", lengths=(20,) * 6, version="v3.0")
    consolidate(path)
    assert len(list(path.glob("data/*/*.parquet"))) == 1
    looked, plain = [], np.flatnonzero

    def counted(values):
        looked.append(len(values))
        return plain(values)

    monkeypatch.setattr("dzrobot.training.data.columns.np.flatnonzero", counted)
    reader = DatasetReader(path, ROBOT, ReaderOptions(cache=tmp_path / "cache"))
    monkeypatch.undo()
    assert reader.columns.first_row.tolist() == [20 * episode for episode in range(6)]
    rows = [count for count in looked if count >= 119]
    assert rows == [119]


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
    reader = DatasetReader(path, ROBOT, ReaderOptions(cache=tmp_path / "cache"))
    read, plain = [], FrameTable.cached

    def counted(file, folder):
        read.append(file)
        return plain(file, folder)

    monkeypatch.setattr(FrameTable, "cached", counted)
    assert list(video_faults(reader)) == []
    assert len(read) == len(set(read)) == len(ROBOT.views)
