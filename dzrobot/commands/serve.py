"""``dzrobot serve``: one policy of this machine for robots and simulators elsewhere."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dzrobot.commands import say_next
from dzrobot.commands.options import flags
from dzrobot.commands.options.policy import declare_policy, read_access, read_policy
from dzrobot.declared import declared
from dzrobot.errors import ConfigError
from dzrobot.policies.serving.endpoint import ServeOptions
from dzrobot.policies.serving.recorder import Recorder
from dzrobot.policies.serving.server import PolicyServer
from dzrobot.policies.serving.sessions import MOST_SESSIONS
from dzrobot.process import end_with_parent, limit_log
from dzrobot.progress import waiting
from dzrobot.rollout.lerobot_server import PARENT_VARIABLE
from dzrobot.rollout.policy_spec import BUILT_IN, ELSEWHERE, PolicySpec, load_policy, resolve_policy
from dzrobot.websocket import ServerAccess

COMMON = (
    "--embodiment", "--device", "--host", "--port", "--array-port", "--api-key-file", "--cert",
    "--key", "--max-sessions", "--max-batch", "--batch-window-ms", "--record",
)  # fmt: skip
"""Flags that ``--help`` shows; ``--help-all`` shows every one."""

_NOT_SERVED = (*ELSEWHERE, "execute")
"""Fields of a policy that clients decide, or that are of no policy here."""

NEXT = "dzrobot eval --server {address} --env ENV"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot serve``."""
    parser.set_defaults(address="ws://HOST:PORT")
    parser.description = (
        "Serve a policy to clients of openpi, RoboArena, DreamZero, Arena, RoboLab, MolmoSpaces "
        "and vLLM-Omni, and to `dzrobot eval --server`. Without a key, to this machine alone."
    )
    _policy(parser.add_argument_group("the policy"))
    door = parser.add_argument_group("who may use it")
    door.add_argument("--no-array-port", action="store_true", help="serve maps alone")
    at_the_door = {*(one.field for one in declared(ServerAccess)), "array_port"}
    flags.declare(door, ServeOptions, only=at_the_door)
    flags.declare(parser.add_argument_group("how much"), ServeOptions, without=at_the_door)


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped; return 0, or 1 after the policy has failed."""
    level = logging.INFO
    if PARENT_VARIABLE in os.environ:
        # One client, which counts its plans itself: a line for each would bury what it says.
        level = logging.WARNING
        end_with_parent(int(os.environ[PARENT_VARIABLE]))
        # The program that started it has the address, and a next command of its own.
        arguments.next_is_said = True
    given = read_access(arguments, ServeOptions)
    options = ServeOptions(**given | ({"array_port": None} if arguments.no_array_port else {}))
    with waiting("looking at the policy"):
        found = resolve_policy(_policy_spec(arguments), None)
    if found.where:
        print(found.where, flush=True)
    with waiting("loading the policy"):
        policy = load_policy(found)
    if policy is None:
        raise ConfigError(
            f"the policy {found.spec.name} lives beside its environment: give another"
        )
    robot = policy.embodiment or found.robot
    logging.getLogger("dzrobot.policies.serving").setLevel(level)
    limit_log()
    with contextlib.ExitStack() as stack:
        recorder = None
        if arguments.record is not None:
            recorder = stack.enter_context(contextlib.closing(Recorder(arguments.record, robot)))
        server = PolicyServer(policy, options, card=found.card(policy), recorder=recorder)

        def ready() -> None:
            _print_addresses(server, robot.tag)
            arguments.address = server.options.url(server.ports[0])
            say_next(NEXT, arguments)

        return asyncio.run(_until_stopped(server, ready))


async def _until_stopped(server: PolicyServer, announce: Callable[[], None]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with contextlib.ExitStack() as busy:
        busy.enter_context(waiting("making a first plan, to know how long one takes"))

        def ready() -> None:
            busy.close()
            announce()

        return await server.run(stop, ready=ready)


def _print_addresses(server: PolicyServer, tag: str) -> None:
    options = server.options
    print(f"serving {tag}: {server.capacity}")
    for port, what in zip(
        server.ports,
        ("maps, for openpi, RoboArena and dzrobot", "bare arrays, for DreamZero's own clients"),
        strict=False,
    ):
        print(f"  {options.url(port)}  {what}")
    if len(server.ports) > 1:
        print("  Some clients of DreamZero's expect port 6000: --array-port 6000.")
    if options.api_key is None and options.insecure:
        print("  WARNING: whoever reaches these ports can use the policy (--insecure).")
    print("Ctrl-C stops it.", flush=True)


def _policy(group: Any) -> None:
    group.add_argument(
        "checkpoint", nargs="?", type=flags.text,
        help="folder, Hugging Face id, or module:factory (default: the bundled tiny policy)",
    )  # fmt: skip
    declare_policy(
        group,
        without=_NOT_SERVED,
        history={"choices": ["off", "recent"], "help": "frames remembered (default: the robot's)"},
        cfg_scale={"type": flags.number(1)},
        noise={"choices": ["fixed", "keyed"], "help": "of plans: always the same, or by episode"},
    )
    group.add_argument(
        "--record", type=flags.output, metavar="DIR",
        help="keep what clients sent and got: a LeRobot dataset and requests.jsonl",
    )  # fmt: skip


def _policy_spec(arguments: argparse.Namespace) -> PolicySpec:
    if arguments.checkpoint in BUILT_IN:
        raise ConfigError(
            f"{arguments.checkpoint!r} plans no chunks: give a checkpoint, or module:factory"
        )
    name = arguments.checkpoint
    if name is None:
        from dzrobot.policies.dreamzero.bundled import default_checkpoint

        name = str(default_checkpoint())
    # The server counts; the policy's own limit lies above, with room for the warm-up.
    room = 1 + (arguments.max_sessions or MOST_SESSIONS)
    return replace(read_policy(arguments, name, without=_NOT_SERVED), max_sessions=room)
