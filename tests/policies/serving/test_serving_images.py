"""Images of a request in fewer bytes: what arrives, what it costs, and what is refused."""

import threading

import numpy as np
import pyarrow as pa
import pytest
from serving_peers import DROID, Remembering, ask, serving, talking
from websockets.sync.server import serve

from dzrobot.cli import main
from dzrobot.errors import ConfigError, ProtocolError
from dzrobot.messages import pack, unpack
from dzrobot.modality.window import read_observation
from dzrobot.policies.serving.connection import ConnectOptions
from dzrobot.policies.serving.dialects import (
    Dialect,
    read_images,
    read_request,
    write_images,
    write_observation,
)
from dzrobot.policies.serving.remote_policy import RemotePolicy

SIZE = DROID.views[0].resolution


def picture(seed, size=SIZE):
    """Return a smooth image, as a camera sees."""
    y, x = np.mgrid[0 : size[0], 0 : size[1]]
    channels = [128 + 90 * np.sin(x / 40 + seed + c) * np.cos(y / 30 - c) for c in range(3)]
    return np.stack(channels, axis=-1).astype(np.uint8)


def seen(seed):
    observation = {view.key: picture(seed + i) for i, view in enumerate(DROID.views)}
    for part in DROID.state:
        observation[part.key] = np.full(part.dim, 0.1 * seed, np.float32)
    return {**observation, DROID.language: "push the button"}


class Keeping(Remembering):
    """Keeps the images that it was asked with."""

    def plan(self, asks):
        self.shown = [frame for ask in asks for frame in read_observation(ask.observation, DROID)]
        return super().plan(asks)


def remote_plans(coding):
    """Return the plans of three observations, the client, and what the server's policy saw last."""
    policy = Keeping()
    options = ConnectOptions(connect_s=5, first_s=60, later_s=60, images=coding)
    with serving(policy) as server:
        remote = RemotePolicy(f"ws://127.0.0.1:{server.ports[0]}", DROID, options=options)
        plans = [remote.infer(seen(seed))["actions"] for seed in range(3)]
        timing, card = remote.timing, remote.card
        remote.close()
    return plans, timing, card, policy.shown


def test_compressed_images_change_no_action():
    raw, sent, card, _ = remote_plans("raw")
    same, less, compressed, _ = remote_plans("zstd")
    assert np.array_equal(raw, same)
    assert less.sent_bytes < sent.sent_bytes
    assert card == compressed


def test_jpegs_are_a_tenth_and_on_the_card():
    _, sent, card, _ = remote_plans("raw")
    _, less, coded, shown = remote_plans("jpeg")
    assert less.sent_bytes < 0.1 * sent.sent_bytes
    assert coded["images"] == "jpeg 95"
    assert "images" not in card
    # The last frame is the newest; channels are in order, and nothing is turned.
    for view in DROID.views:
        error = np.abs(shown[-1][view.key].astype(int) - seen(2)[view.key])
        assert 0 < error.mean() < 1.5


@pytest.mark.parametrize("coding", ["jpeg", "zstd"])
def test_a_foreign_server_is_sent_no_coded_image(coding):
    def talk(socket):
        socket.send(pack({}))

    with serve(talk, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            options = ConnectOptions(connect_s=5, images=coding)
            where = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
            with pytest.raises(ConfigError, match=f"as raw, and {coding}"):
                RemotePolicy(where, DROID, actions="joint_position", options=options)
        finally:
            server.shutdown()
            thread.join(60)


def coded(coding, **changes):
    message = unpack(pack(write_images(np.stack([picture(0), picture(1)]), coding)))
    return {**message, **{key.encode(): value for key, value in changes.items()}}


def test_what_was_written_is_read():
    frames = np.stack([picture(0), picture(1)])
    assert np.array_equal(read_images(coded("zstd"), SIZE, 24), frames)
    assert read_images(coded("jpeg"), SIZE, 24).shape == frames.shape
    one = unpack(pack(write_images(frames[0], "jpeg")))
    assert read_images(one, SIZE, 24).shape == frames[0].shape
    assert read_images(frames, SIZE, 24) is frames


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (coded("zstd", shape=[2, 180, 320]), "shape"),
        (coded("zstd", shape=[2, 4000, 4000, 3]), "shape"),
        (coded("zstd", shape=[2, 180, 320, True]), "shape"),
        (coded("zstd", shape=[40, 180, 320, 3]), "40 frames"),
        (coded("zstd", shape=[0, 180, 320, 3]), "0 frames"),
        (coded("zstd", shape=[1, 180, 320, 3]), "damaged"),
        (coded("zstd", data=[pa.compress(bytes(2**28), codec="zstd", asbytes=True)]), "damaged"),
        (coded("zstd", data=[b"nothing"]), "damaged"),
        (coded("zstd", data=b"bytes"), "frames"),
        (coded("jpeg", data=[1, 2]), "bytes"),
        (coded("jpeg", data=[b"\xff\xd8"] * 2), "does not say"),
        (coded("jpeg", shape=[1, 180, 320, 3]), "2 parts"),
        (coded("jpeg", **{"__images__": "bmp"}), "2 parts"),
    ],
)
def test_no_more_is_decoded_than_was_agreed_on(value, message):
    with pytest.raises(ProtocolError, match=message):
        read_images(value, SIZE, 24)


def test_a_jpeg_of_another_size_is_not_decoded(monkeypatch):
    large = unpack(pack(write_images(picture(0, (1800, 3200)), "jpeg")))
    value = {**large, b"shape": [180, 320, 3]}
    monkeypatch.setattr("cv2.imdecode", None)
    with pytest.raises(ProtocolError, match="does not say it has 180 x 320 pixels"):
        read_images(value, SIZE, 24)
    cut = {**value, b"data": [value[b"data"][0][:300]]}
    with pytest.raises(ProtocolError, match="JPEG of 300 bytes"):
        read_images(cut, SIZE, 24)


def test_a_damaged_image_is_refused_and_the_server_goes_on():
    message = write_observation(seen(0), DROID, Dialect.DREAMZERO, "jpeg")
    request = read_request(unpack(pack(message)), DROID)
    assert request.observation["video.exterior_image_1_left"].shape == (*SIZE, 3)
    broken = {**message, "observation/wrist_image_left": {b"__images__": "jpeg"}}
    with serving(Remembering()) as server:
        with talking(server) as socket:
            assert "shape" in ask(socket, {**broken, "session_id": "a"})
        with talking(server) as socket:
            assert "actions" in ask(socket, {**message, "session_id": "a"})


def test_images_are_only_sent_to_a_server(capsys):
    words = ["eval", "--env", "dzrobot/point-v0", "--policy", "hold", "--server-images", "jpeg"]
    assert main(words) == 2
    assert "--server ws://" in capsys.readouterr().err
