"""Records requests and their plans: a LeRobot dataset, and one line of JSON per request.

A row of the dataset is a request: the newest images, the state, and the first action of the plan;
the whole plan is in ``requests.jsonl``. Episodes of several clients overlap in time, so each is
collected in a file of its own and joins the dataset when it ends.
"""

import functools
import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import DzrobotError
from dzrobot.files import open_to_append
from dzrobot.messages import pack, unpack
from dzrobot.policies.serving.dialects import ClientRequest
from dzrobot.policies.serving.scheduler import ScheduledPlan
from dzrobot.policies.serving.sessions import ClientConnection, Session
from dzrobot.recording import EpisodeWriter

_log = logging.getLogger(__name__)

DATASET, REQUESTS, OPEN = "dataset", "requests.jsonl", "open"
_LENGTH_BYTES = 8


@dataclass
class _OpenEpisode:
    """An episode that is still running, on disk."""

    path: Path
    file: IO[bytes]
    rows: int = 0


class Recorder:
    """Writes below ``root`` in its own thread; a full disk stops the recording, not the robot.

    Args:
        root: Folder; an earlier recording of this robot in it is continued.
        robot: The clients' robot.

    Raises:
        DatasetError: the folder holds something else, or another server records to it.
    """

    def __init__(self, root: Path, robot: Embodiment) -> None:
        self._root, self._robot = root, robot
        self._execute = robot.execute or robot.timing.action_horizon
        self._writer = EpisodeWriter(
            root / DATASET, robot, fps=robot.timing.control_hz / self._execute
        )
        (root / OPEN).mkdir(exist_ok=True)
        self._lines = open_to_append(root / REQUESTS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._open: dict[Session, _OpenEpisode] = {}
        self._stopped = False

    def note(
        self,
        client: ClientConnection,
        session: Session,
        request: ClientRequest,
        plan: ScheduledPlan,
    ) -> None:
        """Record one request and its plan."""
        line = {
            "time": time.time(),
            "client": client.number,
            "session": session.id,
            "plan": session.plans,
            "frames": request.frames,
            "timing": plan.timing,
            "actions": np.asarray(plan.actions).tolist(),
        }
        row = {"observation": self._newest(request), "action": np.asarray(plan.actions)[0]}
        self._submit(lambda: self._add(client, session, line, row))

    def end(self, client: ClientConnection, session: Session) -> None:
        """Move an episode that has ended into the dataset."""
        self._submit(lambda: self._save(client, session))

    def close(self) -> None:
        """Wait until everything is written; running episodes are saved as far as they are."""
        for session in list(self._open):
            self._submit(functools.partial(self._save, None, session))
        self._thread.shutdown(wait=True)
        self._writer.close()
        self._lines.close()

    def _newest(self, request: ClientRequest) -> dict[str, Any]:
        observation: dict[str, Any] = dict(request.observation)
        for view in self._robot.views:
            frames = observation[view.key]
            observation[view.key] = frames[-1] if frames.ndim == 4 else frames
        return observation

    def _submit(self, work: Callable[[], None]) -> None:
        self._thread.submit(work).add_done_callback(self._check)

    def _check(self, done: "Future[None]") -> None:
        error = done.exception()
        if error is not None and not self._stopped:
            self._stopped = True
            _log.error("the recording in %s has stopped", self._root, exc_info=error)

    def _add(
        self, client: ClientConnection, session: Session, line: dict[str, Any], row: dict[str, Any]
    ) -> None:
        if self._stopped:
            return
        episode = self._open.get(session)
        if episode is None:
            path = self._root / OPEN / f"{client.number}-{session.seat}.msgpack"
            episode = self._open[session] = _OpenEpisode(path, path.open("wb"))
        content = pack(row)
        episode.file.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
        episode.rows += 1
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()

    def _save(self, client: ClientConnection | None, session: Session) -> None:
        episode = self._open.pop(session, None)
        if episode is None or self._stopped:
            return
        episode.file.close()
        try:
            for row in _rows(episode.path):
                self._writer.add_frame(row["observation"], row["action"])
            self._writer.save_episode(
                client=0 if client is None else client.number,
                session=session.id,
                whole=client is not None,
            )
        except DzrobotError:
            self._writer.discard()
            raise
        episode.path.unlink()


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        while length := file.read(_LENGTH_BYTES):
            yield unpack(file.read(int.from_bytes(length, "little")))
