"""What clients sent and got, kept: a LeRobot dataset, and one line of JSON for every request.

A row of the dataset is a request: the newest images, the state, and the first action of the plan;
the whole plan is in ``requests.jsonl``. Episodes of several clients run at the same time, so each
is collected in a file of its own and becomes part of the dataset when it ends.
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
from dzrobot.policies.serving.dialects import ClientRequest
from dzrobot.policies.serving.msgpack_arrays import pack, unpack
from dzrobot.policies.serving.scheduler import ScheduledPlan
from dzrobot.policies.serving.sessions import ClientConnection, Session
from dzrobot.recording import EpisodeWriter

_log = logging.getLogger(__name__)

DATASET, REQUESTS, OPEN = "dataset", "requests.jsonl", "open"
_LENGTH_BYTES = 8


@dataclass
class _Kept:
    """One episode as far as it has come."""

    path: Path
    file: IO[bytes]
    rows: int = 0


class Recorder:
    """Writes below ``root`` in a thread of its own; a full disk stops the recording, not the robot.

    Args:
        root: Folder; one that holds an earlier recording of this robot is resumed.
        robot: What the clients drive.

    Raises:
        DatasetError: the folder holds something else, or another server records there.
    """

    def __init__(self, root: Path, robot: Embodiment) -> None:
        self._root, self._robot = root, robot
        self._execute = robot.execute or robot.timing.action_horizon
        self._writer = EpisodeWriter(
            root / DATASET, robot, fps=robot.timing.control_hz / self._execute
        )
        (root / OPEN).mkdir(exist_ok=True)
        self._lines = (root / REQUESTS).open("a", encoding="utf-8")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._open: dict[Session, _Kept] = {}
        self._stopped = False

    def note(
        self,
        client: ClientConnection,
        session: Session,
        request: ClientRequest,
        plan: ScheduledPlan,
    ) -> None:
        """Keep one request and its answer."""
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
        self._do(lambda: self._add(client, session, line, row))

    def end(self, client: ClientConnection, session: Session) -> None:
        """Make what was kept of an episode part of the dataset."""
        self._do(lambda: self._save(client, session))

    def close(self) -> None:
        """Wait until all is written; episodes that still run are saved as far as they came."""
        for session in list(self._open):
            self._do(functools.partial(self._save, None, session))
        self._thread.shutdown(wait=True)
        self._writer.close()
        self._lines.close()

    def _newest(self, request: ClientRequest) -> dict[str, Any]:
        observation: dict[str, Any] = dict(request.observation)
        for view in self._robot.views:
            frames = observation[view.key]
            observation[view.key] = frames[-1] if frames.ndim == 4 else frames
        return observation

    def _do(self, work: Callable[[], None]) -> None:
        self._thread.submit(work).add_done_callback(self._look)

    def _look(self, done: "Future[None]") -> None:
        error = done.exception()
        if error is not None and not self._stopped:
            self._stopped = True
            _log.error("the recording in %s has stopped", self._root, exc_info=error)

    def _add(
        self, client: ClientConnection, session: Session, line: dict[str, Any], row: dict[str, Any]
    ) -> None:
        if self._stopped:
            return
        kept = self._open.get(session)
        if kept is None:
            path = self._root / OPEN / f"{client.number}-{session.seat}.msgpack"
            kept = self._open[session] = _Kept(path, path.open("wb"))
        content = pack(row)
        kept.file.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
        kept.rows += 1
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()

    def _save(self, client: ClientConnection | None, session: Session) -> None:
        kept = self._open.pop(session, None)
        if kept is None or self._stopped:
            return
        kept.file.close()
        try:
            for row in _rows(kept.path):
                self._writer.add_frame(row["observation"], row["action"])
            self._writer.save_episode(
                client=0 if client is None else client.number,
                session=session.id,
                whole=client is not None,
            )
        except DzrobotError:
            self._writer.discard()
            raise
        kept.path.unlink()


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        while length := file.read(_LENGTH_BYTES):
            yield unpack(file.read(int.from_bytes(length, "little")))
