"""What is known of each episode beyond LeRobot's lists, and of attempts that left none."""

import json
from pathlib import Path

from dzrobot.documents import parse_json, read_json_lines
from dzrobot.errors import DatasetError
from dzrobot.files import append_line, explained, whole_lines
from dzrobot.recording import layout
from dzrobot.recording.formats import EpisodeFacts, LostAttempt


def episode_facts(root: Path) -> dict[int, EpisodeFacts]:
    """Return what the recording in ``root`` says of its episodes, by their number.

    An interrupted recording may say something of an episode that is not there.

    Raises:
        DatasetError: The file of facts cannot be read.
    """
    path = root / layout.FACTS
    rows = read_json_lines(path, EpisodeFacts, DatasetError) if path.exists() else []
    return {row.episode_index: row for row in rows}


def lost_attempts(root: Path) -> list[LostAttempt]:
    """Return the attempts at ``root`` that left no episode, in order.

    Raises:
        DatasetError: A line is no attempt.
    """
    path = root / layout.ATTEMPTS
    with explained(f"record to {root}", DatasetError):
        lines = whole_lines(path)
    return [
        parse_json(line, LostAttempt, f"{path}:{number}", DatasetError)
        for number, line in enumerate(lines, start=1)
    ]


def note_lost(root: Path, attempt: LostAttempt) -> None:
    """Add ``attempt`` to those of ``root`` that left no episode.

    Raises:
        DatasetError: The disk is full.
    """
    with explained(f"record to {root}", DatasetError):
        append_line(root / layout.ATTEMPTS, json.dumps(attempt.model_dump()))
