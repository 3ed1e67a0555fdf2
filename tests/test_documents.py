"""Documents from outside are read whole and typed, or refused in one message."""

import json
import tracemalloc

import pytest
from pydantic import BaseModel, ConfigDict

from dzrobot.documents import parse_json, read_json, read_json_lines
from dzrobot.errors import DatasetError, DzrobotError
from dzrobot.untrusted import LARGEST_DOCUMENT


class Info(BaseModel):
    model_config = ConfigDict(strict=True)
    fps: float
    names: dict[str, list[int]] = {}


GOOD = {"fps": 10, "names": {"a": [1, 2]}}

BAD = {
    "empty": b"",
    "half": json.dumps(GOOD).encode()[:10],
    "null": b"null",
    "list": b"[]",
    "deep lists": b"[" * 100_000,
    "deep maps": b'{"a":' * 100_000,
    "latin-1": '{"fps": "é"}'.encode("latin-1"),
    "NUL": b"\0" * 50,
    "NaN": b'{"fps": NaN}',
    "infinity": b'{"fps": -Infinity}',
    "digits": b'{"fps": ' + b"9" * 100_000 + b"}",
    "missing": b"{}",
    "text": b'{"fps": "10"}',
    "boolean": b'{"fps": true}',
    "inner": b'{"fps": 10, "names": {"a": [1, null]}}',
    "huge text": b'{"fps": "' + b"x" * 1_000_000 + b'"}',
}


def test_a_good_document_is_a_value(tmp_path):
    path = tmp_path / "info.json"
    path.write_text("\ufeff" + json.dumps(GOOD))
    assert read_json(path, Info, DatasetError) == Info(fps=10, names={"a": [1, 2]})


def test_brackets_in_texts_are_not_nesting(tmp_path):
    value = {"fps": 1, "note": '[{\\"' * 500}
    assert parse_json(json.dumps(value).encode(), Info, "x", DatasetError).fps == 1


@pytest.mark.parametrize("name", BAD)
def test_a_bad_document_is_one_short_message(name, tmp_path):
    path = tmp_path / "info.json"
    path.write_bytes(BAD[name])
    tracemalloc.start()
    with pytest.raises(DatasetError) as caught:
        read_json(path, Info, DatasetError)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 700
    assert peak < 20_000_000


def test_the_field_is_named():
    with pytest.raises(DatasetError, match=r"names\.a\.1: got None \(null\), allowed: a valid int"):
        parse_json(BAD["inner"], Info, "x", DatasetError)


def test_places_that_are_no_documents_are_refused(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(LARGEST_DOCUMENT + 1)
    places = [tmp_path, tmp_path / "no", tmp_path / "loop", tmp_path / ("x" * 5000), large]
    for place in [*places, tmp_path / "a\0b"]:
        with pytest.raises(DzrobotError):
            read_json(place, Info, DatasetError)


def test_lines_are_counted(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"fps": 1}\n\n{"fps": 2}\n{"fps": "x"}\n')
    assert [row.fps for row in read_json_lines(path, Info, DatasetError, limit=2)] == [1, 2]
    with pytest.raises(DatasetError, match=r"lines\.jsonl:4: fps"):
        list(read_json_lines(path, Info, DatasetError))
