"""The wire: openpi's bytes, and nothing else."""

import contextlib

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_peers import ARENA, DROID, MINI, frame

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import DzrobotError, ModalityError, ProtocolError
from dzrobot.messages import pack, unpack
from dzrobot.policies.base import blank
from dzrobot.policies.serving.dialects import arena_greeting, read_request, wire_names

NUMBERS = ["u1", "<i4", "<i8", "<f2", "<f4", "<f8", "|b1"]


def test_an_array_is_these_bytes():
    expected = (
        b"\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x08\x00\x00\x80?\x00\x00\x00@"
        b"\xc4\x05dtype\xa3<f4\xc4\x05shape\x92\x01\x02"
    )
    assert pack(np.array([[1, 2]], np.float32)) == expected
    assert np.array_equal(unpack(expected), [[1, 2]])


def test_a_number_is_these_bytes():
    expected = b"\x83\xc4\x0d__npgeneric__\xc3\xc4\x04data\x03\xc4\x05dtype\xa3<i4"
    assert pack(np.int32(3)) == expected
    assert unpack(expected) == np.int32(3)
    assert unpack(expected).dtype == np.int32


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_arrays_come_back_as_they_were(dtype, shape):
    array = np.arange(24)[: int(np.prod(shape))].reshape(shape).astype(dtype)
    back = unpack(pack({"a": [array], "n": array.flatten()[:1].sum()}))
    assert back["a"][0].dtype == array.dtype
    assert back["a"][0].shape == shape
    assert back["a"][0].tobytes() == array.tobytes()
    assert not back["a"][0].flags.writeable


@pytest.mark.parametrize("value", [
    np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 3), np.uint8), np.array(7, ">i4"),
    np.float32(0.5), np.bool_(True),
])  # fmt: skip
def test_the_library_of_molmospaces_agrees(value):
    genuine = pytest.importorskip("msgpack_numpy", reason="msgpack-numpy is missing")
    forms = set()
    back = unpack(genuine.packb({"a": value}), forms)["a"]
    assert forms == {"nd"}
    assert (back.dtype, back.shape, back.tobytes()) == (value.dtype, value.shape, value.tobytes())
    theirs = genuine.unpackb(pack({"a": value}, "nd"))["a"]
    assert (theirs.dtype, theirs.shape) == (value.dtype, value.shape)
    assert theirs.tobytes() == value.tobytes()


@pytest.mark.parametrize(
    "found",
    [
        {b"nd": True, b"type": "<f4", b"shape": [2], b"data": b"1234"},
        {b"nd": True, b"type": "<f4", b"data": b"1234"},
        {b"nd": True, b"type": "O", b"shape": [1], b"data": b"12345678"},
        {b"nd": True, b"type": [["a", "<f4"]], b"kind": b"V", b"shape": [1], b"data": b"1234"},
        {b"nd": False, b"type": "<f4", b"data": b"12345"},
    ],
)
def test_what_is_no_array_of_that_library_is_refused(found):
    with pytest.raises(ProtocolError):
        unpack(msgpack.packb(found))


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_the_genuine_codec_agrees_to_the_byte(shape):
    genuine = pytest.importorskip("openpi_client.msgpack_numpy", reason="openpi-client is missing")
    message = {
        "a": np.full(shape, 7, np.float32),
        "s": "text",
        "n": np.float64(0.5),
        "l": [1, None],
    }
    assert pack(message) == genuine.packb(message)
    back = genuine.unpackb(pack(message))
    assert back["a"].shape == shape
    assert back["n"] == 0.5


@pytest.mark.parametrize(
    "value",
    [
        np.array(["text"]),
        np.array([object()]),
        np.array([1j]),
        np.zeros(2, "f4,f4"),
        np.array(["2026-01-01"], "M8[s]"),
        object(),
        2**70,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_number_is_not_sent(value):
    with pytest.raises(ProtocolError):
        pack({"a": value})


def array_of(**changes):
    whole = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}
    return msgpack.packb(whole | {key.encode(): value for key, value in changes.items()})


HOSTILE = {
    "an object array": array_of(dtype="|O", data=b"cos\nsystem\n(S'true'\ntR."),
    "a structured array": array_of(dtype="f4,f4"),
    "a wide dtype": array_of(dtype="V1000000000"),
    "a dtype that is a list": array_of(dtype=[["a", "<f4"]]),
    "a negative length": array_of(shape=[-2]),
    "a length that is true": array_of(shape=[True, 2]),
    "a length beyond all memory": array_of(shape=[2**62, 2**62]),
    "too few bytes": array_of(shape=[3]),
    "many axes": array_of(shape=[1] * 60),
    "data that is a text": array_of(data="abcdefgh"),
    "no data": msgpack.packb({b"__ndarray__": True}),
    "a number that is a text": msgpack.packb(
        {b"__npgeneric__": True, b"data": "1", b"dtype": "<f4"}
    ),
    "a number too large": msgpack.packb({b"__npgeneric__": True, b"data": 900, b"dtype": "|u1"}),
    "an announced gigabyte": b"\xc6\x40\x00\x00\x00" + b"x" * 9,
    "an announced list of four billion": b"\xdd\xff\xff\xff\xff",
    "an announced map of four billion": b"\xdf\xff\xff\xff\xff",
    "lists in lists": b"\xdd\x00\x00\x0f\xff" * 500,
    "nesting": b"\x91" * 100_000 + b"\xc0",
    "more behind the end": b"\xc0\xc0",
    "an extension": msgpack.packb(msgpack.ExtType(5, b"x" * 20)),
    "a key that is a number": b"\x81\x01\x02",
    "no UTF-8": b"\xa2\xff\xfe",
    "a reserved byte": b"\xc1",
    "nothing": b"",
}


MANY = msgpack.packb([{}] * 4000)
BOMBS = {
    "lists of empty maps": b"\xdc\x00\xff" + MANY * 255,
    "maps of empty lists": msgpack.packb({str(n): [[]] * 4000 for n in range(200)}),
    "small numbers": msgpack.packb([list(range(4000))] * 20),
    "pairs 17 deep": b"\x91" * 17 + b"\xc0",
    "texts": msgpack.packb(["x" * 2**19] * 3),
    "keys": msgpack.packb({f"{n:0{2**19}}": n for n in range(3)}),
}


@pytest.mark.parametrize("message", BOMBS.values(), ids=BOMBS)
def test_more_than_a_request_holds_is_refused_before_any_of_it_is_built(message, monkeypatch):
    monkeypatch.setattr(msgpack, "unpackb", lambda *_, **__: pytest.fail("it was built"))
    with pytest.raises(ProtocolError, match="more than 20000 items, 16 levels or 1048576 bytes"):
        unpack(message)


def test_every_kind_of_item_is_counted_as_msgpack_reads_it():
    """The reader takes a message exactly up to the limit, whatever items come before the last."""
    numbers = [1, -1, 200, -100, 2**15, -(2**15), 2**31, -(2**31), 2**63, -(2**63), 0.5]
    texts = ["", "x" * 20, "x" * 40, "x" * 300, "x" * 70_000, b"", b"y" * 300, b"y" * 70_000]
    nested = [np.float32(3), [], [1] * 20, {}, {str(n): n for n in range(20)}]
    kinds = [*numbers, None, True, *texts, *nested]
    # Also counted: the outer and the last list, and what lies in the lists, maps and the number.
    items = 1 + len(kinds) + 20 + 2 * 20 + 2 * 3 + 1
    whole = [*kinds, *[[0] * 4000] * 4]
    room = 20_000 - items - 4 * 4001
    assert unpack(pack([*whole, [0] * room]))[-1] == [0] * room
    with pytest.raises(ProtocolError, match="more than 20000 items"):
        unpack(pack([*whole, [0] * (room + 1)]))


@pytest.mark.parametrize("message", HOSTILE.values(), ids=HOSTILE)
def test_hostile_messages_are_refused(message):
    with pytest.raises(ProtocolError):
        unpack(message)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(message):
    with contextlib.suppress(ProtocolError):
        unpack(message)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)  # fmt: skip
KEYS = [*wire_names(MINI).values(), "endpoint", "session_id", "session_ids", "deadline_ms"]


@pytest.mark.parametrize("examples", [100, pytest.param(300, marks=pytest.mark.long)])
def test_any_message_is_a_request_or_refused(examples):
    @settings(max_examples=examples, deadline=None)
    @given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), PLAIN) | PLAIN)
    def reads(message):
        with contextlib.suppress(DzrobotError):
            read_request(unpack(frame(message)), MINI)

    reads()


def _with(key, change):
    return lambda message: {**message, key: change(message[key])}


IMAGE, STATE = "observation/image", "observation/state"
"""Names of openpi's clients of LIBERO."""


@pytest.mark.parametrize(
    "change",
    [
        _with(IMAGE, lambda image: image / np.float32(255)),
        _with(IMAGE, lambda image: image.transpose(2, 0, 1)),
        _with(IMAGE, lambda image: np.concatenate([image, image[..., :1]], axis=-1)),
        _with(IMAGE, lambda image: image[:, :-1]),
        _with(IMAGE, lambda image: np.stack([image, image])),
        _with(IMAGE, lambda image: image.astype(np.int64)),
        _with(STATE, lambda state: state[:-1]),
        _with(STATE, lambda state: np.append(state, 0.0)),
        _with(STATE, lambda state: state[None]),
        _with(STATE, lambda state: np.full_like(state, np.nan)),
        _with(STATE, lambda state: np.full_like(state, np.inf)),
        _with(STATE, lambda state: np.full(state.shape, 1e300)),
        _with(STATE, lambda state: state.astype(np.int32)),
        _with("prompt", lambda text: ""),
        _with("prompt", lambda text: "   "),
        _with("prompt", lambda text: [text]),
        _with("prompt", lambda text: text.encode()),
    ],
)
def test_no_observation_that_does_not_fit_reaches_a_policy(change):
    robot = load_embodiment("libero_sim")
    names = wire_names(robot)
    seen = blank(robot, None)
    message = {name: seen[key] for key, name in names.items()}
    assert {IMAGE, STATE, "prompt"} <= set(message)
    assert read_request(message, robot).frames == 1
    with pytest.raises((ModalityError, ProtocolError)):
        read_request(change(message), robot)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_message_cut_short_is_refused(data):
    whole = pack({"a": np.arange(6, dtype=np.float32), "s": "text", "l": [1, {"k": None}]})
    with pytest.raises(ProtocolError):
        unpack(whole[: data.draw(st.integers(0, len(whole) - 1))])


def test_droid_has_the_names_of_roboarena():
    assert wire_names(DROID) == {
        "video.exterior_image_1_left": "observation/exterior_image_0_left",
        "video.exterior_image_2_left": "observation/exterior_image_1_left",
        "video.wrist_image_left": "observation/wrist_image_left",
        "state.joint_position": "observation/joint_position",
        "state.gripper_position": "observation/gripper_position",
        "annotation.task": "prompt",
    }


def test_libero_has_the_names_of_openpi():
    assert set(wire_names(MINI).values()) == {
        "observation/image", "observation/wrist_image", "observation/state", "prompt",
    }  # fmt: skip


def test_the_greeting_holds_roboarenas_six_keys_and_no_other():
    assert arena_greeting(DROID) == ARENA
