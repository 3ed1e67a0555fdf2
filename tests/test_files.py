"""Files are there whole or not at all; one writer at a time."""

import contextlib
import multiprocessing
import tempfile

import pytest

from dzrobot.errors import DatasetError
from dzrobot.files import (
    append_line,
    cached_in,
    diagnosed,
    explained,
    is_inside,
    locked,
    make_folders,
    replacing,
    spare_cache,
    stand_in,
    stand_ins,
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


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 10886082\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LFS, "git lfs pull"),
        (LFS.replace("\n", "\r\n"), "git lfs pull"),
        ("\ufeff" + LFS, "git lfs pull"),
        ("# xet version 0\nfilesize = 1\n", "git lfs pull"),
        ("/annex/objects/SHA256E-s12--4d7a.mp4\n", "git annex get"),
        ("<!DOCTYPE html>\n<html>sign in</html>", "hf auth login"),
        ("<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "hf auth login"),
        ("Entry not found", "hf auth login"),
        ("", "empty"),
        ("\n \n", "empty"),
        ("\0" * 4096, "zeros"),
    ],
)
def test_what_stands_in_a_files_place_is_told_by_content(tmp_path, content, said):
    for name in ("model.safetensors", "config.json", "tokenizer.model", "a.parquet", "a.mp4"):
        path = tmp_path / name
        path.write_text(content)
        assert said in diagnosed(path, "is damaged")
    assert f"5 files in {tmp_path}" in stand_ins(tmp_path.iterdir())[0]
    assert diagnosed(path, "is damaged").startswith(f"5 files in {tmp_path}")


@pytest.mark.parametrize(
    "content",
    [b"{}", b"PAR1\0\0", b"<?xml version='1.0'?><mujoco/>", b"\0\0\0\x18ftypisom", b"\xff"],
)
def test_content_is_not_taken_for_a_stand_in(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    assert stand_in(tmp_path / "file") is None
    assert diagnosed(tmp_path / "file", "is odd") == f"{tmp_path / 'file'} is odd"


def test_unfinished_downloads_are_told_by_their_links_and_parts(tmp_path):
    hub = tmp_path / "models--a--b"
    blobs, snapshot = hub / "blobs", hub / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/1f2e")
    assert "hf download" in diagnosed(snapshot / "model.safetensors", "")
    (snapshot / "raw.mp4").symlink_to("../.git/annex/objects/aa/bb/key")
    assert "git annex get" in diagnosed(snapshot / "raw.mp4", "")
    # Nothing of the second file is there yet.
    assert stand_in(snapshot / "config.json") is None
    (blobs / "1f2e.incomplete").write_bytes(b"half")
    assert "was not finished" in diagnosed(snapshot / "config.json", "")

    own = tmp_path / "own"
    (own / ".cache/huggingface/download/videos").mkdir(parents=True)
    assert stand_in(own / "videos/a.mp4") is None
    (own / ".cache/huggingface/download/videos/x.y.incomplete").write_bytes(b"half")
    assert "was not finished" in diagnosed(own / "videos/a.mp4", "")


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match="DZROBOT_CACHE"):
        cached_in(tmp_path / "file" / "cache", DatasetError).__enter__()
    with (
        pytest.raises(DatasetError, match="DZROBOT_CACHE"),
        cached_in(tmp_path, DatasetError) as at,
    ):
        (at / "gone" / "file").write_text("")


def test_a_cache_that_cannot_be_written_is_replaced_by_a_copy_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert spare_cache(tmp_path / "numba", DatasetError) == tmp_path / "numba"
    (tmp_path / "file").write_text("no folder can be made below it")
    spare = spare_cache(tmp_path / "file" / "numba", DatasetError)
    (spare / "made").write_text("again")
    assert spare.parent.stat().st_mode & 0o077 == 0, "other users must not write there"
    assert spare_cache(tmp_path / "file" / "numba", DatasetError) == spare
