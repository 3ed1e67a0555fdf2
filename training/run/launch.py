"""Starts and ends training processes: a single one, those of torchrun, or several of our own."""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from dzrobot.declared import at_the_door
from dzrobot.errors import ConfigError, DzrobotError
from dzrobot.files import explained, locked
from dzrobot.process import EscapedFormatter, exit_code, is_first_to_report, log_escaped
from dzrobot.progress import waiting
from dzrobot.training.recipes.read import load_recipe
from dzrobot.training.sft_config import SFTConfig

if TYPE_CHECKING:
    from dzrobot.training.run.parallel import DistributedEnvironment
    from dzrobot.training.run.plugin import Plugin

_log = logging.getLogger(__name__)

FAULT = 2
"""Exit code of an error that is the user's to fix."""

STOPPED = (exit_code(signal.SIGTERM), exit_code(signal.SIGINT))
"""Exit codes of a run that was asked to stop, and has saved."""

LOG_FILE = "train.log"
"""In the run's folder: the log of the main process, with the time of each line."""

LOCK_FILE = "train.lock"
"""In the run's folder: held as long as a process trains there."""

_STAMP = "%(asctime)s %(message)s"


def main(arguments: Sequence[str]) -> int:
    """Check the recipe, train, and return the exit code.

    Args:
        arguments: Recipe, then ``section.field=value`` each.
    """
    is_main = os.environ.get("RANK", "0") == "0"
    log_escaped(_STAMP, dates="%H:%M:%S")
    # Under `dzrobot train` the root logger is set up already, for warnings.
    logging.getLogger("dzrobot").setLevel(logging.INFO if is_main else logging.WARNING)
    try:
        config = load_recipe(arguments[0], arguments[1:], int(os.environ.get("WORLD_SIZE", "1")))
        return train(config)
    except DzrobotError as error:
        if is_first_to_report(str(error)):
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
        return FAULT


@at_the_door
def train(
    recipe: SFTConfig | str, overrides: Sequence[str] = (), *, plugins: "Sequence[Plugin]" = ()
) -> int:
    """Run a recipe in this process, to its last step or to a request to stop.

    Args:
        recipe: Built-in recipe, YAML file, or what
            :func:`dzrobot.training.recipes.read.load_recipe` returns. Under torchrun every process
            makes the same call.
        overrides: ``section.field=value`` each, of a recipe that is named.
        plugins: What is added to the run beside the plug-ins that the recipe names.

    Returns:
        The exit code: 0 once the last step is done; 143 or 130 after SIGTERM or Ctrl-C, whose
        checkpoint the same run resumes from with ``runner.resume_dir=auto``. A run that hangs ends
        the process with 75: see :mod:`dzrobot.training.run.heartbeat`.

    Raises:
        ConfigError: The recipe or a plug-in cannot be used.
        UnknownNameError: There is no such recipe or plug-in.
    """
    if isinstance(recipe, str):
        config = load_recipe(recipe, overrides, int(os.environ.get("WORLD_SIZE", "1")))
    elif overrides:
        raise ConfigError("overrides belong to a recipe that is given by name")
    else:
        config = recipe
    config = _absolute(config)
    _log.info("loading libraries, then weights and datasets")
    with _waiting("loading libraries"):
        from dzrobot.training.run.build import build
        from dzrobot.training.run.heartbeat import Heartbeat, Member
        from dzrobot.training.run.parallel import init_distributed
        from dzrobot.training.run.plugin import Plugins
        from dzrobot.training.run.trainer import Trainer

    own = Plugins.of(config.runner.plugins, plugins)
    world = init_distributed()
    minutes = config.runner.hang_minutes
    heartbeat = Heartbeat(
        config.runner.output_dir, Member(world.from_main(uuid.uuid4().hex), world.rank, world.size),
        patience_s=None if minutes is None else 60.0 * minutes,
    )  # fmt: skip
    compiles = config.parallel.compile is True or world.device.type == "cuda"
    with (
        run_folder(config.runner.output_dir, world),
        heartbeat.running(compiles=compiles),
    ):
        with _waiting("loading weights and datasets"):
            trainer = Trainer(build(config, world, own), heartbeat=heartbeat)
        finished = trainer.run()
    return 0 if finished else exit_code(trainer.stopped_by)


def _absolute(config: SFTConfig) -> SFTConfig:
    """Return ``config`` with the place of what is written, whatever folder a plug-in moves to."""
    folder = config.runner.output_dir.absolute()
    runner = config.runner.model_copy(update={"output_dir": folder})
    return config.model_copy(update={"runner": runner})


def _waiting(what: str) -> AbstractContextManager[None]:
    """Say what is waited for; of several processes, the main one does."""
    return waiting(what) if os.environ.get("RANK", "0") == "0" else nullcontext()


@contextmanager
def run_folder(folder: Path, world: "DistributedEnvironment") -> Iterator[None]:
    """Keep other runs out of ``folder``, and write the log to a file in it as well. Collective.

    Args:
        folder: Of the run; made if it is not there.
        world: The processes; the main one writes the folder's files.

    Raises:
        ConfigError: another run trains in it, or it cannot be written to.
    """
    with ExitStack() as held:
        refused = None
        if world.is_main:
            taken = ConfigError(
                f"another process trains in {folder}: wait until it ends, or give this run a "
                "runner.output_dir of its own"
            )
            try:
                with explained(f"write to {folder}", ConfigError):
                    folder.mkdir(parents=True, exist_ok=True)
                    held.enter_context(locked(folder / LOCK_FILE, taken))
            except ConfigError as error:
                refused = str(error)
        if reason := world.from_main(refused):
            raise ConfigError(reason)
        if world.is_main:
            held.enter_context(_logging_to(folder / LOG_FILE))
        yield


@contextmanager
def _logging_to(file: Path) -> Iterator[None]:
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(EscapedFormatter(_STAMP))
    logger = logging.getLogger("dzrobot")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()


def launch(arguments: Sequence[str], processes: int) -> int:
    """Train in several processes of this machine, as torchrun does; return the exit code.

    Args:
        arguments: Those of :func:`main`.
        processes: How many.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Every process has printed its error; torch would add a page about each.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A rank that is asked to stop ends its step and saves; torch would kill it after 30 s.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    plan = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=uuid.uuid4().hex,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
    )  # fmt: skip
    try:
        elastic_launch(plan, sys.executable)("-m", "dzrobot.cli", "train", *arguments)
    except ChildFailedError as error:
        # Processes that the launcher ended have no positive code.
        codes = [failure.exitcode for failure in error.failures.values()]
        return min((code for code in codes if code > 0), default=1)
    except SignalException as stop:
        # The processes have saved and ended.
        return exit_code(stop.sigval)
    return 0


def end_process(code: int) -> None:
    """End the process together with all others, flushed, without the interpreter's own shutdown.

    The gloo library may abort when its worker threads outlive the interpreter.
    """
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            if code == 0 or code in STOPPED:
                # All processes are here.
                dist.barrier()
            dist.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
