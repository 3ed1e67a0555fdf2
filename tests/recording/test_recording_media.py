"""Videos: what is written follows from the images alone."""

from data_worlds import ROBOT, images

from dzrobot.recording import VideoCodec
from dzrobot.recording.media import VideoFile

TIMES = 150
"""With the encoder's default settings, one video in some hundred differs from the others."""


def encoded(path, frames):
    video = VideoFile(path, 20, VideoCodec())
    for frame in frames:
        video.add(frame)
    video.close()
    return path.read_bytes()


def test_the_same_images_give_the_same_bytes(tmp_path):
    key = ROBOT.views[0].key
    frames = [images(ROBOT, 0, 2, number)[key] for number in range(4)]
    made = {encoded(tmp_path / "video.mp4", frames) for _ in range(TIMES)}
    assert len(made) == 1
    # The encoder writes its settings into every file.
    assert b" threads=1 " in (settings := made.pop())
    assert b" mbtree=0 " in settings
