"""A full disk under ``dzrobot collect`` and ``dzrobot record``: one message, and then on."""

import errno
import resource

import pytest
from harness import assert_refused, run
from kill_points import contents, operations, spread, stop

import dzrobot.commands.collect
import dzrobot.commands.record
import dzrobot.envs.fakes  # noqa: F401 (loaded here, not in every child)
from dzrobot import cli
from dzrobot.errors import DatasetError
from dzrobot.files import explained
from dzrobot.recording.catalog import DatasetCatalog

POINT = ("--env=dzrobot/point-v0", "--env-arg=resolution=32", "--max-steps=24")
COLLECT = ("collect", *POINT, "--policy=rollout_policies:Seeker", "--episodes=2")
RECORD = ("record", *POINT, "--policy=random", "--attempts=2", "--keep-failures")


def command(words, folder):
    return lambda: cli.main([*words, f"--output={folder}"])


def full_at_points(words, folder, points):
    """Yield the exit code of ``words`` on a disk that is full from one file operation on."""
    steps = operations(command(words, folder / "whole"), folder / "whole")
    for at in spread(len(steps), points):
        ended = stop(command(words, folder / f"{at}"), folder / f"{at}", at, "full")
        if ended.code:
            assert ended.code == 2, ended.output
            said = ended.output.splitlines()[-1]
            assert "No space left on device; make room" in said, (steps[at], ended.output)
            assert "Traceback" not in ended.output
        yield ended.code, folder / f"{at}"


@pytest.mark.long
def test_a_collection_goes_on_when_there_is_room(policies, tmp_path, capsys):
    codes = []
    for code, folder in full_at_points(COLLECT, tmp_path, 3):
        codes.append(code)
        assert command(COLLECT, folder)() == 0
        assert contents(folder) == contents(tmp_path / "whole")
    assert 2 in codes


@pytest.mark.parametrize("points", [4, pytest.param(12, marks=pytest.mark.long)])
def test_a_recording_goes_on_when_there_is_room(points, tmp_path):
    codes = []
    for code, folder in full_at_points(RECORD, tmp_path, points):
        codes.append(code)
        assert command(RECORD, folder)() == 0
        assert contents(folder).keys() == contents(tmp_path / "whole").keys()
        assert len(DatasetCatalog.open(folder).episodes) == 2
    assert 2 in codes


@pytest.mark.sampled
@pytest.mark.parametrize("words", [COLLECT, RECORD], ids=["collect", "record"])
def test_data_may_not_grow(policies, words, tmp_path):
    """A library writes it that has errors of its own."""
    small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))  # noqa: E731
    words = [*words, f"--output={tmp_path / 'set'}"]
    result = run(words, prepare=small)
    assert_refused(result, run([*words[:-1], f"--output={tmp_path / 'good'}"]))
    assert "File too large" in result.output
    assert run(words).code == 0


def test_errors_of_libraries_are_explained_alike():
    """pyarrow puts a text of its own in the place of the system's."""
    raised = OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28]")
    with (
        pytest.raises(DatasetError, match="No space left on device; make room"),
        explained("save", DatasetError),
    ):
        raise raised
    with (
        pytest.raises(DatasetError, match="cannot save: no number"),
        explained("save", DatasetError),
    ):
        raise OSError("no number")
