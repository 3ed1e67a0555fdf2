"""Recordings in LeRobot's format: v2.0, v2.1 and v3.0, as images or as video.

One episode after the other, each committed whole::

    with EpisodeWriter(folder, robot, fps=10, version="v3.0", video=True) as writer:
        writer.add_frame(observation, action, {"timestamp.camera": seconds})
        writer.save_episode(success=True)
"""

from typing import TYPE_CHECKING

from dzrobot.importing import lazy_exports

if TYPE_CHECKING:
    from dzrobot.recording.media import VideoCodec
    from dzrobot.recording.packing import consolidate
    from dzrobot.recording.writer import EpisodeWriter

__all__ = ["EpisodeWriter", "VideoCodec", "consolidate"]

__getattr__, __dir__ = lazy_exports(__name__)
