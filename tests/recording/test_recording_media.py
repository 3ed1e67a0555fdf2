"""Videos: what is written follows from the images alone."""

import os
import subprocess
import sys

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
@pytest.mark.parametrize("policy", ["SCHED_OTHER", "SCHED_BATCH"])
def test_an_encoder_leaves_scheduling_as_it_was(tmp_path, policy):
    # A process of its own: a thread cannot always be given back what it had.
    code = f"""
import os
import subprocess
import sys
from pathlib import Path
import numpy as np
from dzrobot.recording.media import VideoCodec, VideoFile
def policies():
    return {{os.sched_getscheduler(int(task.name)) for task in Path("/proc/self/task").iterdir()}}
for task in Path("/proc/self/task").iterdir():
    os.sched_setscheduler(int(task.name), os.{policy}, os.sched_param(0))
video = VideoFile(Path({str(tmp_path / "video.mp4")!r}), 20, VideoCodec(name="av1"))
seen = set()
for number in range(4):
    video.add(np.full((64, 64, 3), number, np.uint8))
    seen |= policies()
video.close()
print(seen == {{os.{policy}}}, seen)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("True"), done.stdout + done.stderr
