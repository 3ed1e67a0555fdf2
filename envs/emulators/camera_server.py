"""Two emulated RealSense cameras on the RealSense-over-DDS bus of the loopback interface.

``python -m dzrobot.envs.emulators.camera_server --domain 17 SERIAL SERIAL`` serves until its
standard input closes. It runs as a process of its own because the bus library calls back into
Python until the very end of the process.
"""

import argparse
import importlib.util
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.emulators.scenes import EMPTY, SIZES, CameraView, Size, views_of
from dzrobot.envs.emulators.timebase import Timebase
from dzrobot.errors import MissingDependencyError
from dzrobot.importing import install
from dzrobot.process import end_with_parent

RATES_HZ = (15, 30)
MODEL = "D435"
FIRMWARE = "5.16.0.1"
FLAT_DEPTH_MM = 600
COLOR_OPTIONS = (
    ("Exposure", 166.0, (1.0, 10000.0, 1.0), "of the color sensor, in 100 us"),
    ("Gain", 64.0, (0.0, 128.0, 1.0), "of the color sensor"),
    ("White Balance", 4600.0, (2800.0, 6500.0, 10.0), "in K"),
    ("Enable Auto Exposure", 1.0, (0.0, 1.0, 1.0), "exposure and gain"),
    ("Enable Auto White Balance", 1.0, (0.0, 1.0, 1.0), "white balance"),
)
"""Name, default, lowest, highest and step, meaning: those of a D435's color sensor. Where exposure
and gain are not automatic, images are as bright as their product; white balance changes nothing."""

BLACK = 16
"""Luminance of black in YUYV."""

ALIVE_S = 0.4
"""A stream whose images are not read sends the last one again this often (wall)."""

_LOOK_S = 0.002
CameraOption = tuple[str, float, tuple[float, float, float], str]
READY_LINE = "cameras are on the bus"


def bus_settings(domain: int) -> dict[str, Any]:
    """Return the bus settings that keep all traffic on the loopback interface."""
    return {
        "enabled": True,
        "domain": domain,
        "use-builtin-transports": False,
        "udp": {"whitelist": ["127.0.0.1"]},
    }


class Exposures:
    """When images are taken: by the arm's clock, or the wall clock where there is no arm.

    Args:
        page: The shared clock.
    """

    def __init__(self, page: Timebase) -> None:
        self.page = page
        self._last_ms = page.clock_ms
        self._seen_s = time.monotonic()

    def now_ms(self) -> int:
        """Return the time that images are stamped with."""
        if self.page.arm_is_alive:
            self._last_ms, self._seen_s = max(self._last_ms, self.page.clock_ms), time.monotonic()
            return self._last_ms
        alone_ms = self._last_ms + int(1000 * (time.monotonic() - self._seen_s))
        return max(alone_ms, self.page.clock_ms)


class EmulatedCamera:
    """One color camera on the bus; it streams while a client has its stream open.

    Args:
        bus: The bus module, and this process's participant on the bus.
        number: Of the camera on the page.
        serial: Of the camera.
        view: What it sees.
        exposures: When.
    """

    def __init__(
        self, bus: tuple[Any, Any], number: int, serial: str, view: CameraView, exposures: Exposures
    ) -> None:
        self._bus, participant = bus
        self._number = number
        self._view = view
        self._size = SIZES[0]
        self._exposures = exposures
        self._again = exposures.page.again
        self._rate_hz = RATES_HZ[0]
        self._exposed_ms = -1
        self._published_s = 0.0
        self._messages: list[tuple[Any, Any]] = []
        """What was published last of each stream, since they were opened."""

        # Streams are opened and stopped on the bus's threads: an image has the size of its stream.
        self._streams = threading.RLock()
        library = self._bus
        color = library.color_stream_server("Color", "RGB Camera")
        self._color = _stream(library, color, "yuyv", view, COLOR_OPTIONS)
        # Clients take a camera of this line for one only when it has a depth sensor.
        depth = library.depth_stream_server("Depth", "Stereo Module")
        self._depth = _stream(library, depth, "z16", view)
        root = f"realsense/{MODEL}_{serial}"
        self._device = library.device_server(participant, root)
        self._device.on_control(self._control)
        # The library itself keeps what its options are set to; the next image is drawn with them.
        self._device.on_set_option(lambda *_: self._messages.clear())
        self._device.init([self._color, self._depth], [], {})
        self._device.broadcast(_device_info(library, serial, root))

    def _control(self, _device: Any, name: str, control: Any, _reply: Any) -> bool:
        match name:
            case "open-streams":
                self._open(control)
                return True
            case "close-streams":
                self._stop()
                return True
        return False

    @property
    def _brightness(self) -> float:
        """Return the brightness of images, beside that of the automatic exposure."""
        options = {option.get_name(): option for option in self._color.options()}
        if options["Enable Auto Exposure"].get_value():
            return 1.0
        used = [options[name] for name in ("Exposure", "Gain")]
        shares = (option.get_value() / option.get_default_value() for option in used)
        return float(math.prod(shares))

    def _open(self, control: Any) -> None:
        profiles = control.get("stream-profiles", {})
        encodings = self._bus.video_encoding
        with self._streams:
            self._stop()
            if "Color" in profiles:
                rate, _, width, height = profiles["Color"]
                self._rate_hz, self._size = int(rate), (int(width), int(height))
            self._color.start_streaming(encodings.yuyv, *self._size)
            if "Depth" in profiles:
                self._depth.start_streaming(encodings.z16, *SIZES[0])

    def _stop(self) -> None:
        with self._streams:
            self._messages.clear()
            for stream in (self._color, self._depth):
                if stream.is_streaming():
                    stream.stop_streaming()

    def publish_due(self, now_ms: int) -> int:
        """Publish the newest image that is due, if somebody reads it.

        Returns:
            When the image that was published last was exposed (ms).
        """
        exposed_ms = -(-(now_ms * self._rate_hz // 1000) * 1000 // self._rate_hz)
        page = self._exposures.page
        again = page.again
        if (exposed_ms, again) == (self._exposed_ms, self._again):
            return self._exposed_ms
        if exposed_ms == self._exposed_ms and self._messages:
            self._again = again
            self._show_again()
            return self._exposed_ms
        if exposed_ms > page.watched_ms(self._number):
            if time.monotonic() - self._published_s <= ALIVE_S:
                return self._exposed_ms
            if self._messages:
                self._show_again()
                return self._exposed_ms
        self._exposed_ms, self._again, self._published_s = exposed_ms, again, time.monotonic()
        with self._streams:
            self._publish(page.scene_at(exposed_ms))
        return exposed_ms

    def _publish(self, scene: NDArray[np.float64]) -> None:
        encodings = self._bus.video_encoding
        self._messages.clear()
        if self._color.is_streaming():
            image = self._view.image(self._size, scene)
            if (brightness := self._brightness) != 1.0:
                image = brightened(image, brightness)
            message = self._message(encodings.yuyv, self._size, image.tobytes())
            self._messages.append((self._color, message))
        if self._depth.is_streaming():
            flat = np.full(SIZES[0], FLAT_DEPTH_MM, "<u2").tobytes()
            self._messages.append((self._depth, self._message(encodings.z16, SIZES[0], flat)))
        for stream, message in self._messages:
            stream.publish_image(message)

    def _show_again(self) -> None:
        """Publish what was published last, as it was: it was lost, or new ones are not read."""
        self._published_s = time.monotonic()
        with self._streams:
            for stream, message in self._messages:
                if stream.is_streaming():
                    stream.publish_image(message)

    def _message(self, encoding: Any, size: tuple[int, int], data: bytes) -> Any:
        image = self._bus.message.image()
        image.width, image.height = size
        image.step = 2 * image.width
        image.encoding = str(encoding)
        image.data = bytearray(data)
        image.timestamp = self._bus.time.from_double(self._exposed_ms / 1000.0)
        return image


def brightened(image: np.ndarray, times: float) -> np.ndarray:
    """Return packed YUYV (uint8) whose luminance above black is ``times`` as high."""
    flat = image.reshape(-1).copy()
    luminance = BLACK + times * (flat[::2].astype(np.float32) - BLACK)
    flat[::2] = np.clip(luminance, 0, 255).astype(np.uint8)
    return flat


def load_bus() -> Any:
    """Return the bus module of the RealSense wheel; its own package hides it, so by file."""
    spec = importlib.util.find_spec("pyrealsense2")
    if spec is None or spec.origin is None:
        raise MissingDependencyError(f"emulated cameras need `{install('franka')}`")
    found = sorted(Path(spec.origin).parent.glob("pyrealdds*.so"))
    if not found:
        raise MissingDependencyError(
            f"this pyrealsense2 wheel has no RealSense-over-DDS module beside {spec.origin}; "
            "install pyrealsense2>=2.55 from PyPI"
        )
    loader = importlib.util.spec_from_file_location("pyrealdds", found[0])
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


def main() -> None:
    """Serve the cameras named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--domain", type=int, required=True)
    parser.add_argument("--timebase", type=int, required=True, help="of the shared clock")
    parser.add_argument("--parent", type=int, required=True, help="process to end with")
    parser.add_argument("--end-at-once", action="store_true", help="even if it is suspended")
    parser.add_argument("--scene", default=EMPTY)
    parser.add_argument("serials", nargs="+")
    arguments = parser.parse_args()
    if arguments.end_at_once:
        end_with_parent(arguments.parent)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    page = Timebase(arguments.timebase)
    exposures = Exposures(page)
    views = views_of(arguments.scene, arguments.serials)
    bus = load_bus()
    participant = bus.participant()
    participant.init(arguments.domain, "emulated-cameras", bus_settings(arguments.domain))
    cameras = [
        EmulatedCamera((bus, participant), number, serial, view, exposures)
        for number, (serial, view) in enumerate(zip(arguments.serials, views, strict=True))
    ]
    sys.stdout.write(f"{READY_LINE}: {len(cameras)}\n")
    sys.stdout.flush()
    page.camera_is_alive = True
    # Standard input closes when the parent ends, unless a process that it forked has it too.
    while os.getppid() == arguments.parent and not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        now_ms = exposures.now_ms()
        for number, camera in enumerate(cameras):
            page.publish(number, camera.publish_due(now_ms))


def _intrinsics(bus: Any, size: Size, view: CameraView) -> Any:
    intrinsics = bus.video_intrinsics()
    intrinsics.width, intrinsics.height = width, height = size
    focal = view.focal_px(size)
    for name, x, y in (("focal_length", focal, focal), ("principal_point", width / 2, height / 2)):
        point = bus.float2()
        point.x, point.y = x, y
        setattr(intrinsics, name, point)
    return intrinsics


def _device_info(bus: Any, serial: str, root: str) -> Any:
    return bus.message.device_info.from_json(
        {
            "name": f"Intel RealSense {MODEL}",
            "serial": serial,
            "product-line": "D400",
            "fw-version": FIRMWARE,
            "topic-root": root,
        }
    )


def _stream(
    bus: Any, stream: Any, encoding: str, view: CameraView, options: Sequence[CameraOption] = ()
) -> Any:
    kind = getattr(bus.video_encoding, encoding)
    profiles = [bus.video_stream_profile(rate, kind, *size) for size in SIZES for rate in RATES_HZ]
    stream.init_profiles(profiles, 0)
    stream.init_options(
        [
            bus.option.from_json([name, default, *limits, default, meaning])
            for name, default, limits, meaning in options
        ]
    )
    stream.set_intrinsics({_intrinsics(bus, size, view) for size in SIZES})
    # Without `on_readers_changed`: the bus calls it with its lock in hand, and would wait for the
    # interpreter while `device_server.init` has the interpreter and waits for the lock.
    return stream


if __name__ == "__main__":
    main()
    # Threads of the bus call Python when a client asks for something. In an interpreter that is
    # ending they are ended in the middle of native code: "FATAL: exception not rethrown".
    os._exit(0)
