"""``dzrobot serve-env``: an environment of this machine for evaluations elsewhere."""

import argparse
import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

from dzrobot.code_identity import CODE, code_with
from dzrobot.commands import say_next
from dzrobot.commands.options import flags
from dzrobot.commands.options.policy import read_access
from dzrobot.envs.remote.env_server import EnvServer, EnvServerOptions, Hosted, look
from dzrobot.envs.remote.exchange import Facts, Made, write_hand
from dzrobot.errors import ConfigError, preview
from dzrobot.process import limit_log, terminable
from dzrobot.rollout.environment import (
    check_arguments,
    facts_of,
    made_environment,
    modules_of,
    omitter,
)
from dzrobot.rollout.evaluation.card import library_versions

NEXT = "dzrobot eval --env dzrobot/remote-v0 --env-arg server={address}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot serve-env``."""
    parser.set_defaults(address="ws://HOST:PORT")
    parser.description = (
        "Serve an environment to `dzrobot eval --env dzrobot/remote-v0 --env-arg "
        "server=ws://HOST:PORT` elsewhere: in another Python environment, or on another machine. "
        "Without a key, to this machine alone."
    )
    parser.add_argument(
        "env", type=flags.text, help="Gymnasium id, module:id, or module:function that makes one"
    )
    flags.add_keywords(
        parser, "--env-arg", "keyword argument of the environment that clients cannot change"
    )
    flags.declare(parser, EnvServerOptions)
    parser.add_argument(
        "--max-envs", type=flags.whole(1, 4096), default=max(2, os.cpu_count() or 1), metavar="N",
        help="environments at a time: as many as the client has workers (default: %(default)s)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped; return 0."""
    options = EnvServerOptions(**read_access(arguments, EnvServerOptions), most=arguments.max_envs)
    fixed = flags.keywords(arguments.env_arg)
    logging.getLogger("dzrobot.envs.remote").setLevel(logging.INFO)
    limit_log()
    maker = functools.partial(make_hosted, arguments.env, fixed)
    made = look(maker)
    server = EnvServer(maker, options)
    try:
        with terminable():
            arguments.address = options.url(server.port)
            _print_what(arguments.env, made, arguments.address)
            say_next(NEXT, arguments)
            server.run()
    except KeyboardInterrupt:
        return 0
    finally:
        server.stop()
    return 0


def make_hosted(
    env: str, fixed: Mapping[str, Any], arguments: Mapping[str, Any], draws: bool
) -> Hosted:
    """Return the environment ``env`` for a client.

    Args:
        env: As a user names it.
        fixed: Keyword arguments that the server's user gave.
        arguments: Those of the client.
        draws: Whether the client asks for images for people.

    Raises:
        ConfigError: the client gives an argument that is fixed, or it drives an arm.
        UnknownNameError: no such environment, or it takes no such argument.
    """
    if both := [name for name in fixed if name in arguments]:
        raise ConfigError(f"the server's user has set {preview(both)}; leave it to the server")
    given = {**fixed, **arguments}
    check_arguments(env, given)
    made = made_environment(env, given)
    facts = facts_of(made)
    if draws and facts.draws:
        made.close()
        made = made_environment(env, given, render=True)
    if facts.moves_an_arm:
        made.close()
        raise ConfigError(
            f"{env} drives an arm, which is driven by the machine beside it: evaluate there, with "
            "the policy from `dzrobot serve`"
        )
    kept = {k: v for k, v in vars(facts).items() if k in Facts.model_fields and k != "hand"}
    return Hosted(
        env=made,
        omit=omitter(made, facts),
        facts=Facts(**kept, hand=write_hand(facts.hand)),
        about={
            "env": env,
            "arguments": given,
            "versions": library_versions([facts]),
            CODE: [code_with(modules_of(env)).plain()],
        },
    )


def _print_what(env: str, made: Made, url: str) -> None:
    robot = made.facts.embodiment
    who = "keys of its own" if robot is None else f"the keys of {robot.tag}"
    print(f"serving {env}, with {who}")
    print(f"  dzrobot eval --env dzrobot/remote-v0 --env-arg server={url}")
    print("Ctrl-C stops it.", flush=True)
