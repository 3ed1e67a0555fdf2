"""Ray: a local instance or a cluster to join; what it raises becomes one message."""

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from dzrobot.errors import ConfigError, DzrobotError, ProtocolError
from dzrobot.importing import required

Alone = TypeVar("Alone")

LOCAL = "local"
"""Address of a Ray of this command alone, on this machine."""

STORE_BYTES = 256 * 1024**2
"""Shared memory of a local Ray: it holds the films of episodes that have just ended."""

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray prints a paragraph on every process that ends or starts, between the lines of a table.
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}
"""Environment variables of Ray, unless the user has set them."""

_ANSWER_S = 10.0
_UNREACHABLE = (OSError, RuntimeError, ValueError)

_PASSED_ON = ("OMP_NUM_THREADS", "PYTHONPATH")
"""Environment variables that all processes of a run have in common."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Where Ray runs, and how many actors at most."""

    address: str = LOCAL
    """`LOCAL`, ``auto`` for the one that runs on this machine, or ``HOST:PORT``."""

    actors: int | None = None
    """None: as many as the cluster has room for when the run begins."""


@dataclass(frozen=True)
class Needs:
    """What one actor occupies."""

    cpus: int
    gpus: int = 0


@dataclass(frozen=True)
class Cluster:
    """A Ray that is connected."""

    ray: Any
    """The module."""

    options: ClusterOptions

    def remote(self, function: Any, needs: Needs, **options: Any) -> Any:
        """Return ``function``, or a class, as Ray takes it; ``options`` are Ray's."""
        variables = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        return self.ray.remote(
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            runtime_env={"env_vars": variables},
            **options,
        )(function)

    def result(self, reference: Any) -> Any:
        """Wait for what a remote function returns; raise what it raised."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def room(self, needs: Needs) -> int:
        """Return how many actors are asked for, or how many the cluster has room for.

        Raises:
            ConfigError: no machine has room for one.
        """
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        fit = [_fit(node, needs) for node in nodes]
        if not any(fit):
            there = "; ".join(
                f"{node.get('CPU', 0):.0f} CPUs, {node.get('GPU', 0):.0f} GPUs" for node in nodes
            )
            raise ConfigError(
                f"an actor needs {needs.cpus} CPUs and {needs.gpus} GPUs on one machine, and the "
                f"machines of the Ray cluster have {there}: lower --workers, choose another "
                "--device, or start Ray with more"
            )
        return self.options.actors or sum(fit)


@contextmanager
def connected(options: ClusterOptions, needs: Needs) -> Iterator[Cluster]:
    """Start Ray or join one; leave it at the end, which ends all that this run started there.

    Args:
        options: Where.
        needs: Of one actor; a local Ray lets as many run as ``options`` name, whatever the cores.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: there is no Ray at that address, or one of another version.
    """
    required("--ray", "cluster", "ray")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    import ray

    own: dict[str, Any] = {}
    if options.address == LOCAL:
        cores = max(os.cpu_count() or 1, needs.cpus * (options.actors or 1))
        own = {
            "num_cpus": cores,
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
        }
    try:
        _check_answers(options.address)
        ray.init(
            address=options.address, log_to_driver=False, logging_level="ERROR",
            namespace="dzrobot", **own,
        )  # fmt: skip
    except Exception as error:
        # Ray raises a bare Exception where an instance of its own does not start in time. Of other
        # kinds, only those of a wrong address are expected.
        if type(error) is not Exception and not isinstance(error, _UNREACHABLE):
            raise
        raise ConfigError(
            f"--ray {options.address}: {str(error).strip().splitlines()[0]}. "
            f"{_advice(options.address, ray.__version__)}"
        ) from error
    try:
        yield Cluster(ray, options)
    finally:
        ray.shutdown()


def cluster_or(
    alone: Alone, options: ClusterOptions | None, needs: Needs
) -> AbstractContextManager[Alone | Cluster]:
    """Return what runs the work: the Ray of ``options``, or ``alone`` where there are none.

    Args:
        alone: How many processes of this machine.
        options: Where Ray runs; None: nowhere.
        needs: Of one actor or task.
    """
    return nullcontext(alone) if options is None else connected(options, needs)


def _advice(address: str, version: str) -> str:
    if address == LOCAL:
        return (
            "Ray did not start on this machine: try again when it is less busy, or leave --ray out "
            "to work without it"
        )
    return (
        "Give the address that `ray start --head` printed, of a Ray of the same version as here "
        f"({version}, Python {sys.version_info.major}.{sys.version_info.minor}), with "
        "RAY_AUTH_MODE=token set here if it is there; or --ray alone for one on this machine"
    )


def _check_answers(address: str) -> None:
    """Raise OSError if nothing listens at ``HOST:PORT``; Ray itself tries for two minutes."""
    host, colon, port = address.rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()


def own_error(error: Any) -> DzrobotError:
    """Return what code of ours raised in another process, as it was raised there.

    Args:
        error: Ray's, around it.
    """
    cause = error.cause
    if isinstance(cause, DzrobotError):
        return cause
    return ProtocolError(
        f"a process on the cluster raised {type(cause).__name__}: {cause}; the same command "
        "continues where it stopped"
    )


def _fit(node: Mapping[str, float], needs: Needs) -> int:
    rooms = [
        int(node.get(name, 0) // wanted)
        for name, wanted in (("CPU", needs.cpus), ("GPU", needs.gpus))
        if wanted
    ]
    return min(rooms)
