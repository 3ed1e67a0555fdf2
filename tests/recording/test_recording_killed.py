"""A recording stopped at a file operation loses the open episode; the rest is whole to the bit."""

import shutil
import sys

import pytest
from data_worlds import record
from kill_points import contents, operations, spread, stop

from dzrobot.errors import DatasetError

pytestmark = pytest.mark.kill_points

OLD = [pytest.param("v2.0", video, marks=pytest.mark.long) for video in (False, True)]
FORMATS = [*OLD, *((v, video) for v in ("v2.1", "v3.0") for video in (False, True))]
LENGTHS = (6, 5, 4)
POINTS = 4


def job(path, version, video, lengths=LENGTHS):
    return lambda: record(path, lengths=lengths, version=version, video=video) and 0


def finish(path, version, video):
    """Reopen ``path`` and record what is missing; return how many episodes were there."""
    there = record(path, lengths=(), version=version, video=video)
    assert there == path
    listed = contents(path)
    done = sum(name.startswith("data/") for name in listed)
    record(path, lengths=LENGTHS[done:], version=version, video=video)
    return done, listed


@pytest.mark.sampled
@pytest.mark.parametrize(("version", "video"), FORMATS)
def test_killed_at_a_file_operation(tmp_path, version, video):
    """After reopening: the bytes of an uninterrupted recording of as many episodes, then of all."""
    whole = []
    for count in range(len(LENGTHS) + 1):
        path = tmp_path / f"whole-{count}" / "set"
        record(path, lengths=LENGTHS[:count], version=version, video=video)
        whole.append(contents(path))
    path = tmp_path / "set"
    steps = operations(job(path, version, video), path)
    assert contents(path) == whole[-1]
    failed, tried = [], 0
    # With and without video take turns, so that both together meet twice as many points.
    points = spread(len(steps), POINTS, int(video), 2)
    for mode in ("kill", "torn"):
        for at in points:
            if mode == "torn" and not steps[at].startswith("fsync"):
                continue
            tried += 1
            shutil.rmtree(path)
            ended = stop(job(path, version, video), path, at, mode)
            assert ended.code < 0, ended.output
            if not path.exists():
                path.mkdir()
            done, listed = finish(path, version, video)
            wrong = [n for n in whole[done] | listed if whole[done].get(n) != listed.get(n)]
            now = contents(path)
            wrong += [n for n in whole[-1] | now if whole[-1].get(n) != now.get(n)]
            if wrong:
                failed.append((at, mode, steps[at], wrong))
    sys.stdout.write(f"{tried} points tried, {tried - len(failed)} held\n")
    assert not failed, failed


@pytest.mark.sampled
@pytest.mark.parametrize(("version", "video"), [("v2.1", True), ("v3.0", False)])
def test_a_full_disk_is_one_message(tmp_path, version, video):
    whole, path = tmp_path / "whole", tmp_path / "set"
    record(whole, lengths=LENGTHS, version=version, video=video)

    def command():
        try:
            record(path, lengths=LENGTHS, version=version, video=video)
        except DatasetError as error:
            sys.stdout.write(f"{error}\n")
            return 2
        return 0

    steps = operations(command, path)
    points = spread(len(steps), 6)
    for at in points:
        shutil.rmtree(path, ignore_errors=True)
        ended = stop(command, path, at, "full")
        assert ended.code in (0, 2), ended.output
        if ended.code:
            assert "No space left on device; make room" in ended.output
            assert ended.output.count("\n") == 1
        path.mkdir(exist_ok=True)
        finish(path, version, video)
        assert contents(path) == contents(whole), (at, steps[at])
    sys.stdout.write(f"{len(points)} points tried, all held\n")
