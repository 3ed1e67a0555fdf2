"""``dzrobot serve``: one policy of this machine for robots and simulators elsewhere."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
from typing import Any

from dzrobot.commands.options import flags
from dzrobot.commands.options.policy import (
    add_access,
    add_speed,
    add_steps,
    add_weights,
    asks_to_compile,
    read_access,
    read_weights,
)
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.options import PolicyOptions
from dzrobot.policies.serving.endpoint import ServeOptions
from dzrobot.policies.serving.recorder import Recorder
from dzrobot.policies.serving.server import PolicyServer
from dzrobot.policies.serving.sessions import MOST_SESSIONS
from dzrobot.process import end_with_parent
from dzrobot.rollout.lerobot_server import PARENT_VARIABLE
from dzrobot.rollout.policy_spec import BUILT_IN, PolicySpec, load_policy, resolve_policy

COMMON = (
    "--embodiment", "--device", "--host", "--port", "--array-port", "--api-key-file", "--cert",
    "--key", "--max-sessions", "--max-batch", "--batch-window-ms", "--record",
)  # fmt: skip
"""Flags that ``--help`` shows; ``--help-all`` shows every one."""

_DEFAULT = ServeOptions()
_MEBIBYTE = 1024**2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot serve``."""
    parser.description = (
        "Serve a policy to clients of openpi, RoboArena, DreamZero, Arena, RoboLab, MolmoSpaces "
        "and vLLM-Omni, and to `dzrobot eval --server`. Without a key, to this machine alone."
    )
    _policy(parser.add_argument_group("the policy"))
    _door(parser.add_argument_group("who may use it"))
    _limits(parser.add_argument_group("how much"))


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped; return 0, or 1 after the policy has failed."""
    if PARENT_VARIABLE in os.environ:
        end_with_parent(int(os.environ[PARENT_VARIABLE]))
    options = _options(arguments)
    policy = _policy_spec(arguments)
    ready = load_policy(resolve_policy(policy, None))
    if ready.policy is None:
        raise ConfigError(f"the policy {policy.name} lives beside its environment: give another")
    logging.getLogger("dzrobot.policies.serving").setLevel(logging.INFO)
    with contextlib.ExitStack() as stack:
        recorder = None
        if arguments.record is not None:
            recorder = stack.enter_context(
                contextlib.closing(Recorder(arguments.record, ready.robot))
            )
        server = PolicyServer(ready.policy, options, card=ready.card, recorder=recorder)
        return asyncio.run(_until_stopped(server, ready.robot.tag))


async def _until_stopped(server: PolicyServer, tag: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return await server.run(stop, ready=lambda: _print_addresses(server, tag))


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
    group.add_argument(
        "--embodiment", type=flags.text, help="robot: a built-in tag, or module:NAME"
    )
    group.add_argument(
        "--history", choices=["off", "recent"], help="frames remembered (default: the robot's)"
    )
    add_steps(group)
    group.add_argument("--cfg-scale", type=flags.number(1), help="guidance of the predicted video")
    group.add_argument(
        "--noise", choices=["fixed", "keyed"], help="of plans: always the same, or by episode"
    )
    group.add_argument("--policy-seed", type=flags.seed, help="of the policy's noise")
    add_speed(group)
    add_weights(group)
    group.add_argument(
        "--record", type=flags.path, metavar="DIR",
        help="keep what clients sent and got: a LeRobot dataset and requests.jsonl",
    )  # fmt: skip


def _door(group: Any) -> None:
    port = flags.whole(0, 65535)
    group.add_argument("--host", type=flags.text, default=_DEFAULT.host, help="address to bind")
    group.add_argument("--port", type=port, default=_DEFAULT.port, help="of clients of maps")
    group.add_argument(
        "--array-port", type=port, default=_DEFAULT.array_port, help="of clients of bare arrays"
    )
    group.add_argument("--no-array-port", action="store_true", help="serve maps alone")
    add_access(group)


def _limits(group: Any) -> None:
    seconds = flags.number(0.001, 10**6)
    group.add_argument(
        "--max-sessions", type=flags.whole(1, 4096),
        help=f"episodes at a time (default: what memory allows, up to {MOST_SESSIONS})",
    )  # fmt: skip
    group.add_argument(
        "--max-connections", type=flags.whole(1, 65536), default=_DEFAULT.max_connections,
        help="clients at a time",
    )  # fmt: skip
    group.add_argument(
        "--max-message-mib", type=flags.whole(1, 1024), metavar="MIB",
        help="largest message (default: what the robot's largest request takes, 16 to 64)",
    )  # fmt: skip
    group.add_argument(
        "--max-batch", type=flags.whole(1, 256), default=_DEFAULT.max_batch,
        help="sessions that plan in one call: faster on a GPU, last bits vary",
    )  # fmt: skip
    group.add_argument(
        "--batch-window-ms", "--window-ms", type=flags.number(0, 1000), default=0.0, metavar="MS",
        help="longest time that a request waits for others to share its call",
    )  # fmt: skip
    group.add_argument(
        "--idle-s", type=seconds, default=_DEFAULT.idle_s, help="between messages of a connection"
    )
    group.add_argument(
        "--room-s", type=seconds, default=_DEFAULT.room_s, help="that a new session waits for room"
    )
    group.add_argument(
        "--forget-s", type=seconds, default=_DEFAULT.forget_s,
        help="after which a session ends that was left for a newer one without a reset",
    )  # fmt: skip
    group.add_argument(
        "--lost-session", choices=["error", "restart"], default="error",
        help="what using an ended session again is",
    )  # fmt: skip


def _options(arguments: argparse.Namespace) -> ServeOptions:
    return ServeOptions(
        **read_access(arguments),
        array_port=None if arguments.no_array_port else arguments.array_port,
        max_sessions=arguments.max_sessions,
        max_connections=arguments.max_connections,
        max_message=_MEBIBYTE * (arguments.max_message_mib or 0) or None,
        max_batch=arguments.max_batch,
        window_s=arguments.batch_window_ms / 1000,
        idle_s=arguments.idle_s,
        room_s=arguments.room_s,
        forget_s=arguments.forget_s,
        restart_lost=arguments.lost_session == "restart",
    )


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
    return PolicySpec(
        name=name,
        embodiment=arguments.embodiment,
        options=PolicyOptions(
            dit_steps=arguments.dit_steps,
            video=arguments.video or "full",
            solver_steps=arguments.solver_steps,
            history=arguments.history,
            cfg_scale=arguments.cfg_scale,
            noise=arguments.noise,
            seed=arguments.policy_seed,
            compile=asks_to_compile(arguments),
            graphs=bool(arguments.graphs),
            max_sessions=room,
        ),
        **read_weights(arguments),
    )
