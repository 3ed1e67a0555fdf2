"""Videos: what is written follows from the images alone."""

import os
from pathlib import Path

import pytest
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


@pytest.mark.skipif(os.geteuid() != 0, reason="the encoder only asks for it as root")
def test_an_encoder_makes_nobody_real_time(tmp_path):
    frames = [images(ROBOT, 0, 2, number)[ROBOT.views[0].key] for number in range(4)]
    video = VideoFile(tmp_path / "video.mp4", 20, VideoCodec(name="av1"))
    policies = set()
    for frame in frames:
        video.add(frame)
        threads = Path("/proc/self/task").iterdir()
        policies |= {os.sched_getscheduler(int(thread.name)) for thread in threads}
    video.close()
    assert policies == {os.SCHED_OTHER}
