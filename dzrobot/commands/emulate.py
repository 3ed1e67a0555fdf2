"""``dzrobot emulate franka``: an arm, a gripper and two cameras that need no hardware."""

import argparse
import json
import signal
import threading
import time

from dzrobot.commands import say_next
from dzrobot.commands.options import flags
from dzrobot.envs.emulators.kinematics import ARMS
from dzrobot.envs.emulators.launcher import LARGEST_DOMAIN, EmulatorLauncher, LauncherAddress
from dzrobot.envs.emulators.scenes import EMPTY, LIFT, SERIALS

SUMMARY = "start an emulated robot and cameras on the loopback interface"
_LOOK_S = 0.2

NEXT = "dzrobot init-workcell practice.yaml --address {host}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot emulate``."""
    parser.add_argument("robot", choices=["franka"], help="what to emulate")
    parser.add_argument(
        "--host", type=flags.text, default="127.0.0.1", help="loopback address of the arm"
    )
    parser.add_argument(
        "--domain", type=flags.whole(0, LARGEST_DOMAIN), default=42, help="domain of the camera bus"
    )
    parser.add_argument("--no-cameras", action="store_true", help="start the arm alone")
    parser.add_argument(
        "--scene",
        type=flags.text,
        default=EMPTY,
        help=f"what surrounds the arm: nothing ({EMPTY}), a table with a cube ({LIFT}), or with "
        "an object of LIBERO, such as alphabet_soup",
    )
    parser.add_argument(
        "--arm", choices=sorted(ARMS), default="fr3", help="kind of arm (default: fr3)"
    )
    parser.add_argument(
        "--rate", type=flags.number(0.001, 1000), default=1.0, help="robot seconds per wall second"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted."""
    serials = () if arguments.no_cameras else SERIALS
    address = LauncherAddress(host=arguments.host, domain=arguments.domain)
    stopped = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stopped.set())
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    launcher = EmulatorLauncher(
        address, serials, arguments.rate, scene=arguments.scene, arm=arguments.arm
    )
    with launcher as emulators:
        print(f"robot and gripper at {address.host} (robot server 10, gripper server 3)")
        if serials:
            print(f"cameras {', '.join(serials)} on the loopback camera bus; context settings:")
            print(f"  {json.dumps(emulators.camera_settings())}")
        print("Ctrl-C stops them.", flush=True)
        say_next(NEXT, arguments)
        # A signal that comes just before an endless wait begins would not end it.
        while not stopped.is_set():
            time.sleep(_LOOK_S)
    return 0
