"""Two emulated RealSense cameras on the RealSense-over-DDS bus of the loopback interface.

``python -m dzrobot.envs.emulators.camera_server --domain 17 SERIAL SERIAL`` serves until its
standard input closes. It runs as a process of its own because the bus library calls back into
Python until the very end of the process.
"""

import argparse
import importlib.util
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.emulators.timebase import Timebase
from dzrobot.errors import MissingDependencyError

SIZES = ((640, 480), (320, 240))
"""Width and height of the images on offer; packing one for the bus takes 30 ns a byte."""

RATES_HZ = (15, 30)
MODEL = "D435"
FIRMWARE = "5.16.0.1"
FLAT_DEPTH_MM = 600
_LOOK_S = 0.002
READY_LINE = "cameras are on the bus"


def bus_settings(domain: int) -> dict[str, Any]:
    """Return the bus settings that keep all traffic on the loopback interface."""
    return {
        "enabled": True,
        "domain": domain,
        "use-builtin-transports": False,
        "udp": {"whitelist": ["127.0.0.1"]},
    }


class CameraScene:
    """What one camera sees: a table, and the hand above it where the arm says it is.

    Args:
        serial: Sets the colors.
        size: Width and height of the images.
    """

    def __init__(self, serial: str, size: tuple[int, int]) -> None:
        self.size = width, height = size
        hue = sum(map(ord, serial)) % 97
        rows, columns = np.mgrid[0:height, 0:width]
        image = np.empty((height, width, 3), np.uint8)
        image[..., 0] = 60 + hue + 40 * rows // height
        image[..., 1] = 90 + 60 * columns // width
        image[..., 2] = 120 - hue // 2
        self._table = to_yuyv(image)
        self._hand = to_yuyv(np.full((2, 2, 3), (210, 40, 40), np.uint8))[0]

    def image(self, pose: NDArray[np.float64]) -> bytes:
        """Return packed YUYV bytes of the scene for position, yaw and width of the hand, (5,)."""
        x, y, z, _, opened = pose
        width, height = self.size
        image = self._table.copy()
        column = int(width * np.clip(0.5 + y, 0.1, 0.9)) // 2 * 2
        row = int(height * np.clip(x, 0.125, 0.875))
        size = int(height * np.clip(0.025 + 0.083 * z, 0.017, 0.104))
        gap = int(width * (0.003 + 0.31 * opened)) // 2 * 2
        finger = width // 40
        for left in (column - gap - finger, column + gap):
            part = image[row - size : row + size, left : left + finger]
            part.reshape(len(part), -1, 2, 2)[:] = self._hand
        return image.tobytes()


def to_yuyv(rgb: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return packed YUYV bytes, (H, W, 2) uint8, of an RGB image (BT.601, studio range)."""
    red, green, blue = (rgb[..., channel].astype(np.float32) for channel in range(3))
    luma = 16 + 0.257 * red + 0.504 * green + 0.098 * blue
    chroma_u = 128 - 0.148 * red - 0.291 * green + 0.439 * blue
    chroma_v = 128 + 0.439 * red - 0.368 * green - 0.071 * blue
    packed = np.empty((*rgb.shape[:2], 2), np.uint8)
    packed[..., 0] = luma
    packed[:, 0::2, 1] = chroma_u[:, 0::2]
    packed[:, 1::2, 1] = chroma_v[:, 0::2]
    return packed


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
    """One color camera on the bus; it streams while a client has its stream open."""

    def __init__(self, bus: Any, participant: Any, serial: str, exposures: Exposures) -> None:
        self._bus = bus
        self._scenes = {size: CameraScene(serial, size) for size in SIZES}
        self._scene = self._scenes[SIZES[0]]
        self._exposures = exposures
        self._again = exposures.page.again
        self._rate_hz = RATES_HZ[0]
        self._color = _stream(bus, bus.color_stream_server("Color", "RGB Camera"), "yuyv")
        # Clients take a camera of this line for one only when it has a depth sensor.
        self._depth = _stream(bus, bus.depth_stream_server("Depth", "Stereo Module"), "z16")
        root = f"realsense/{MODEL}_{serial}"
        self._device = bus.device_server(participant, root)
        self._device.on_control(self._control)
        self._device.init([self._color, self._depth], [], {})
        self._device.broadcast(_device_info(bus, serial, root))
        self._exposed_ms = -1

    def _control(self, _device: Any, name: str, control: Any, _reply: Any) -> bool:
        match name:
            case "open-streams":
                self._open(control)
                return True
            case "close-streams":
                self._stop()
                return True
        return False

    def _open(self, control: Any) -> None:
        self._stop()
        profiles = control.get("stream-profiles", {})
        if "Color" in profiles:
            rate, _, width, height = profiles["Color"]
            self._rate_hz, self._scene = int(rate), self._scenes[int(width), int(height)]
        encodings = self._bus.video_encoding
        self._color.start_streaming(encodings.yuyv, *self._scene.size)
        if "Depth" in profiles:
            self._depth.start_streaming(encodings.z16, *SIZES[0])

    def _stop(self) -> None:
        for stream in (self._color, self._depth):
            if stream.is_streaming():
                stream.stop_streaming()

    def publish_due(self, now_ms: int) -> int:
        """Publish the newest image that is due and return when it was exposed (ms)."""
        number = now_ms * self._rate_hz // 1000
        exposed_ms = -(-number * 1000 // self._rate_hz)
        page = self._exposures.page
        again, self._again = self._again, page.again
        if (exposed_ms, again) == (self._exposed_ms, self._again):
            return exposed_ms
        self._exposed_ms = exposed_ms
        encodings = self._bus.video_encoding
        if self._color.is_streaming():
            scene = self._scene.image(page.pose_at(exposed_ms))
            self._color.publish_image(self._message(encodings.yuyv, self._scene.size, scene))
        if self._depth.is_streaming():
            flat = np.full(SIZES[0], FLAT_DEPTH_MM, "<u2").tobytes()
            self._depth.publish_image(self._message(encodings.z16, SIZES[0], flat))
        return exposed_ms

    def _message(self, encoding: Any, size: tuple[int, int], data: bytes) -> Any:
        image = self._bus.message.image()
        image.width, image.height = size
        image.step = 2 * image.width
        image.encoding = str(encoding)
        image.data = bytearray(data)
        image.timestamp = self._bus.time.from_double(self._exposed_ms / 1000.0)
        return image


def load_bus() -> Any:
    """Return the bus module of the RealSense wheel; its own package hides it, so by file."""
    spec = importlib.util.find_spec("pyrealsense2")
    if spec is None or spec.origin is None:
        raise MissingDependencyError("emulated cameras need `pip install -e '.[franka]'`")
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
    parser.add_argument("serials", nargs="+")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    page = Timebase(arguments.timebase)
    exposures = Exposures(page)
    bus = load_bus()
    participant = bus.participant()
    participant.init(arguments.domain, "emulated-cameras", bus_settings(arguments.domain))
    cameras = [EmulatedCamera(bus, participant, serial, exposures) for serial in arguments.serials]
    sys.stdout.write(f"{READY_LINE}: {len(cameras)}\n")
    sys.stdout.flush()
    page.camera_is_alive = True
    # The parent closes our standard input when it ends; then we end too.
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        now_ms = exposures.now_ms()
        for number, camera in enumerate(cameras):
            page.publish(number, camera.publish_due(now_ms))


def _intrinsics(bus: Any, size: tuple[int, int]) -> Any:
    intrinsics = bus.video_intrinsics()
    intrinsics.width, intrinsics.height = width, height = size
    focal = 0.96 * width
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


def _stream(bus: Any, stream: Any, encoding: str) -> Any:
    kind = getattr(bus.video_encoding, encoding)
    profiles = [bus.video_stream_profile(rate, kind, *size) for size in SIZES for rate in RATES_HZ]
    stream.init_profiles(profiles, 0)
    stream.init_options([])
    stream.set_intrinsics({_intrinsics(bus, size) for size in SIZES})
    stream.on_readers_changed(lambda *_: None)
    return stream


if __name__ == "__main__":
    main()
    # Threads of the bus call Python when a reader leaves. In an interpreter that is ending they are
    # ended in the middle of native code, which aborts: "FATAL: exception not rethrown".
    os._exit(0)
