"""A results folder somebody else has had a hand in: the same results again, or one message."""

import json
import shutil

import pytest
from harness import (
    LIGHT,
    assert_held,
    assert_refused,
    corrupted,
    mutations,
    refuses,
    whole_mutations,
)
from hypothesis import given, settings

from dzrobot.documents import parse_json
from dzrobot.errors import ProtocolError
from dzrobot.rollout.evaluation.card import read_card, read_cases
from dzrobot.rollout.protocol import EpisodeSpec
from dzrobot.rollout.records import Record, RecordFile

run = LIGHT.run
RUN = (
    "eval", "--env=dzrobot/point-v0", "--env-arg=resolution=32", "--policy=random", "--episodes=3",
    "--max-steps=3", "--workers=0", "--videos=none",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of a run that nothing happened to, and what it cost."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    good = run([*RUN, f"--output={folder}"])
    assert good.code == 0, good.output
    return folder, good


@pytest.fixture
def copy(whole, tmp_path):
    """Return a copy of that folder."""
    return shutil.copytree(whole[0], tmp_path / "run")


def results(folder):
    return {name: record.result() for name, record in RecordFile(folder).records.items()}


def again(folder, good, *, refused):
    """Give the same command again; return its output."""
    result = run([*RUN, f"--output={folder}"])
    assert_refused(result, good) if refused else assert_held(result, good, codes=(0,))
    return result.output


def test_every_field_of_every_document_corrupted(whole, copy):
    """Card, case and record: read, or one message; what is read holds what it held."""
    folder, _ = whole
    held = 0
    for name, read in (
        ("card.json", read_card),
        ("cases.jsonl", read_cases),
        ("records.jsonl", results),
    ):
        original = (folder / name).read_bytes()
        first, _, rest = original.partition(b"\n")
        lines = name.endswith(".jsonl")
        document = json.loads(first if lines else original)
        tail = b"\n" + rest if lines else b""
        for kind, content in mutations(document, tail=tail):
            if "deep" in kind and not kind.startswith("only"):
                continue
            (copy / name).write_bytes(content)
            message = refuses(lambda read=read: read(copy))
            assert message is None or name in message, f"{name} {kind}: {message}"
            held += 1
        (copy / name).write_bytes(original)
    assert held > 1000


@pytest.mark.parametrize("name", ["card.json", "records.jsonl"])
def test_files_in_their_place(whole, copy, some, name):
    """As a command, which resumes the folder or says why not."""
    folder, good = whole
    original = (folder / name).read_bytes()
    for kind, content in some(whole_mutations(original)):
        (copy / name).write_bytes(content)
        result = run([*RUN, f"--output={copy}"])
        assert_held(result, good)
        if result.code == 0:
            assert results(copy) == results(folder), kind
        shutil.copy(folder / "cases.jsonl", copy)
        shutil.copy(folder / "card.json", copy)


HARMLESS = {
    "nothing": lambda lines: lines,
    "the last line partial": lambda lines: [*lines[:-1], lines[-1][:40]],
    "the last line without its break": lambda lines: [*lines[:-1], lines[-1][:-1]],
    "no line": lambda lines: [],
    "the first line alone": lambda lines: lines[:1],
    "reversed": lambda lines: lines[::-1],
    "twice": lambda lines: lines * 2,
    "NUL after a power loss": lambda lines: [*lines[:2], b"\0" * 512],
}
HARMFUL = {
    "a line of garbage": lambda lines: [lines[0], b"garbage\n", *lines[1:]],
    "a blank line": lambda lines: [lines[0], b"\n", *lines[1:]],
    "a null line": lambda lines: [b"null\n", *lines],
    "a case of nothing": lambda lines: [lines[0].replace(b"episode000", b"episode777"), *lines[1:]],
    "another seed": lambda lines: [lines[0].replace(b'"seed": 0', b'"seed": 5'), *lines[1:]],
    "two results": lambda lines: [*lines, lines[0].replace(b'"steps": 3', b'"steps": 2')],
    "a failure without steps": lambda lines: [lines[0].replace(b'"steps": 3', b'"steps": null')],
    "text for success": lambda lines: [lines[0].replace(b'"success": false', b'"success": "no"')],
    "no percentiles": lambda lines: [lines[0].replace(b'"p50"', b'"p51"')],
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("what", HARMLESS)
def test_what_a_crash_leaves_is_gone_on_with(whole, copy, what):
    folder, good = whole
    lines = (folder / "records.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "records.jsonl").write_bytes(b"".join(HARMLESS[what](lines)))
    again(copy, good, refused=False)
    assert results(copy) == results(folder)
    summaries = [json.loads((f / "summary.json").read_text())["results"] for f in (copy, folder)]
    assert summaries[0] == summaries[1]


@pytest.mark.sampled
@pytest.mark.parametrize("what", HARMFUL)
def test_what_no_run_writes_is_refused_by_line(whole, copy, what):
    folder, good = whole
    lines = (folder / "records.jsonl").read_bytes().splitlines(keepends=True)
    damaged = b"".join(HARMFUL[what](lines))
    assert damaged != b"".join(lines)
    (copy / "records.jsonl").write_bytes(damaged)
    assert "records.jsonl:" in again(copy, good, refused=True)
    assert (copy / "records.jsonl").read_bytes() == damaged, "evidence is left alone"


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["card.json", "records.jsonl", "summary.json", ".lock"])
def test_other_things_in_the_place_of_a_file(whole, copy, name):
    _, good = whole
    for kind in ("folder", "dangling", "loop", "device"):
        path = copy / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        match kind:
            case "folder":
                path.mkdir()
            case "dangling":
                path.symlink_to(copy / "nowhere" / "x")
            case "loop":
                path.symlink_to(path)
            case "device":
                path.symlink_to("/dev/zero")
        # A summary replaces a link in its place: nothing is read from there, or written to it.
        replaced = name == "summary.json" and kind != "folder"
        again(copy, good, refused=not replaced)


def test_records_without_a_card_are_of_nothing(whole, copy):
    (copy / "card.json").unlink()
    assert "without a card.json" in again(copy, whole[1], refused=True)


def test_merging_what_cannot_be_merged(whole, copy, some, tmp_path):
    folder, good = whole
    one = ["merge", tmp_path / "merged"]
    for name in ("card.json", "cases.jsonl"):
        original = (copy / name).read_bytes()
        for _, content in some(whole_mutations(original)):
            (copy / name).write_bytes(content)
            assert_held(run([*one, copy, folder]), good)
        (copy / name).unlink()
        assert_refused(run([*one, copy, folder]), good)
        (copy / name).write_bytes(original)
    for place in ("none", "/dev/null", tmp_path):
        assert_refused(run([*one, place]), good)
    assert_refused(run(["merge", copy / "card.json", folder]), good)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert_held(run([*one, folder, copy]), good, codes=(0,))
    assert results(tmp_path / "merged") == results(folder)
    assert {path: path.read_bytes() for path in before} == before


@settings(max_examples=200, deadline=None)
@given(content=corrupted({
    "env": "e", "arguments": {"task_id": 1}, "suite": "s", "task_id": 1, "episode": 2, "seed": 3,
    "init_state_id": None, "max_steps": 5, "noise_key": 6, "repeat_of": None,
}))  # fmt: skip
def test_cases_of_anything(content):
    refuses(lambda: parse_json(content, EpisodeSpec, "cases.jsonl:1", ProtocolError))


@settings(max_examples=200, deadline=None)
@given(content=corrupted({
    "case": "c", "env": "e", "suite": "s", "task_id": 1, "task": "t", "episode": 2,
    "init_state_id": None, "seed": 3, "repeat_of": None, "steps": 4, "success": True,
    "ended": "success", "action_sha256": "a", "policy_ms": {"p50": 1.0, "p95": 2.0},
    "env_ms": {"p50": 1.0, "p95": 2.0, "reset": 3.0}, "wall_s": 1.0, "video": None, "error": None,
}))  # fmt: skip
def test_records_of_anything(content):
    refuses(lambda: parse_json(content, Record, "records.jsonl:1", ProtocolError))
