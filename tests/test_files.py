"""Files are there whole or not at all; one writer at a time."""

import contextlib
import multiprocessing

import pytest

from dzrobot.errors import DatasetError
from dzrobot.files import (
    append_line,
    explained,
    is_inside,
    locked,
    make_folders,
    replacing,
    whole_lines,
    write_json,
)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"a": float("nan")})
    with contextlib.suppress(KeyError), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyError
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_replaced(tmp_path):
    (tmp_path / "a.json.partial").write_text("half")
    write_json(tmp_path / "a.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_an_incomplete_last_line_is_dropped(tmp_path):
    path = tmp_path / "lines"
    append_line(path, "one")
    with path.open("ab") as file:
        file.write(b"tw")
    assert whole_lines(path) == [b"one"]
    append_line(path, "two")
    assert whole_lines(path) == [b"one", b"two"]


def test_links_are_replaced_or_refused_and_never_followed(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "own"
    victim.mkdir()
    (victim / "file").write_text("mine")
    folder.mkdir()
    (folder / "lines").symlink_to(victim / "file")
    with pytest.raises(OSError, match="symbolic links"):
        append_line(folder / "lines", "one")
    (folder / "media").symlink_to(victim)
    made = make_folders(folder, "media/a")
    (made / "file").write_text("new")
    assert not (folder / "media").is_symlink()
    assert [path.name for path in victim.rglob("*")] == ["file"]
    assert (victim / "file").read_text() == "mine"
    assert is_inside(folder, made / "file")
    (made / "other").symlink_to(victim / "file")
    for outside in (made / "other", folder / "../victim/file", victim / "file", folder / "none"):
        assert not is_inside(folder, outside)


def _try(path, answers):
    try:
        with locked(path, DatasetError("taken")):
            answers.put("mine")
    except DatasetError:
        answers.put("taken")


def test_a_lock_keeps_others_out_and_follows_no_link(tmp_path):
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    with locked(tmp_path / "lock", DatasetError("taken")):
        other = fork.Process(target=_try, args=(tmp_path / "lock", answers))
        other.start()
        assert answers.get(timeout=60) == "taken"
        other.join()
    _try(tmp_path / "lock", answers)
    assert answers.get(timeout=60) == "mine"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "link").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"), locked(tmp_path / "link", DatasetError("")):
        pass
    assert victim.read_text() == "precious"


def test_the_system_s_refusals_are_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DatasetError, match="cannot write x: File exists; a file is in"),
        explained("write x", DatasetError),
    ):
        write_json(tmp_path / "file" / "below", {})
