"""Where LeRobot keeps things: file names, templates and standard columns, by version."""

from pathlib import Path
from typing import Any

from dzrobot.errors import find

INFO = Path("meta/info.json")
MODALITY = Path("meta/modality.json")
STATS = Path("meta/stats.json")
TASKS_V2 = Path("meta/tasks.jsonl")
EPISODES_V2 = Path("meta/episodes.jsonl")
EPISODES_STATS_V2 = Path("meta/episodes_stats.jsonl")
TASKS_V3 = Path("meta/tasks.parquet")
EPISODES_V3_FOLDER = Path("meta/episodes")
EPISODES_V3 = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
RECORDING = Path("meta/recording.json")
"""Ours: says which program and embodiment wrote the folder. Other readers ignore it."""

FACTS = Path("meta/recording_facts.jsonl")
"""Ours: what is known of each episode beyond LeRobot's lists (success, operator, ...). A file of
its own, because LeRobot's readers want the same columns in all lists of a dataset.
"""

ATTEMPTS = Path("meta/recording_attempts.jsonl")
"""Ours: attempts that left no episode, because they failed or were discarded."""

COLLECTION = Path("meta/collection.json")
"""Ours: the plan that a collection follows, attempt by attempt."""

ASIDE = Path(".aside")
"""Ours: files of the episode being written; never part of the dataset."""

CHUNK_SIZE = 1000

DATA_PATH = {
    "v2.0": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "v2.1": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "v3.0": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
}
VIDEO_PATH = {
    "v2.0": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    "v2.1": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    "v3.0": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
STANDARD_COLUMNS = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}


def data_template(version: str) -> str:
    """Return the path template of data files; raise for a version that is not written here."""
    return find(DATA_PATH, "LeRobot version", version)


def totals(version: str, episodes: int, frames: int, tasks: int, cameras: int) -> dict[str, Any]:
    """Return what ``info.json`` counts; ``cameras`` are those whose images lie in videos."""
    counts = {
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        "splits": {"train": f"0:{episodes}"},
    }
    if version == "v3.0":
        return counts
    return counts | {
        "total_videos": cameras * episodes,
        "total_chunks": -(-episodes // CHUNK_SIZE),
    }


def place(number: int) -> dict[str, int]:
    """Return every index a template may ask for, for the ``number``-th episode or file."""
    chunk, file = divmod(number, CHUNK_SIZE)
    return {
        "episode_chunk": chunk,
        "episode_index": number,
        "chunk_index": chunk,
        "file_index": file,
    }
