"""Two emulated RealSense cameras on the RealSense-over-DDS bus of the loopback interface.

``python -m dzrobot.envs.emulators.camera_server --domain 17 SERIAL SERIAL`` serves until its
standard input closes. It runs as a process of its own because the bus library calls back into
Python until the very end of the process.
"""

import argparse
import importlib.util
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.errors import MissingDependencyError

WIDTH, HEIGHT = 640, 480
RATES_HZ = (15, 30)
MODEL = "D435"
FIRMWARE = "5.16.0.1"
FLAT_DEPTH_MM = 600
READY_LINE = "cameras are on the bus"


def bus_settings(domain: int) -> dict[str, Any]:
    """Return the bus settings that keep all traffic on the loopback interface."""
    return {
        "enabled": True,
        "domain": domain,
        "use-builtin-transports": False,
        "udp": {"whitelist": ["127.0.0.1"]},
    }


def render(serial: str, seconds: float) -> NDArray[np.uint8]:
    """Return the moving scene at a time, (480, 640, 3) uint8 RGB; the serial sets its colours."""
    hue = sum(map(ord, serial)) % 97
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    image = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    image[..., 0] = 60 + hue + 40 * rows // HEIGHT
    image[..., 1] = 90 + 60 * columns // WIDTH
    image[..., 2] = 120 - hue // 2
    x = int(WIDTH / 2 + 200 * np.sin(seconds))
    y = int(HEIGHT / 2 + 120 * np.cos(0.7 * seconds))
    image[max(0, y - 30) : y + 30, max(0, x - 30) : x + 30] = (210, 40, 40)
    return image


def to_yuyv(rgb: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return packed YUYV bytes, (H, W, 2) uint8, of an RGB picture (BT.601, studio range)."""
    red, green, blue = (rgb[..., channel].astype(np.float32) for channel in range(3))
    luma = 16 + 0.257 * red + 0.504 * green + 0.098 * blue
    chroma_u = 128 - 0.148 * red - 0.291 * green + 0.439 * blue
    chroma_v = 128 + 0.439 * red - 0.368 * green - 0.071 * blue
    packed = np.empty((*rgb.shape[:2], 2), np.uint8)
    packed[..., 0] = luma
    packed[:, 0::2, 1] = chroma_u[:, 0::2]
    packed[:, 1::2, 1] = chroma_v[:, 0::2]
    return packed


class EmulatedCamera:
    """One colour camera on the bus; it streams while a client has its stream open."""

    def __init__(self, bus: Any, participant: Any, serial: str) -> None:
        self._bus = bus
        self._serial = serial
        self._rate_hz = RATES_HZ[0]
        self._color = _stream(bus, bus.color_stream_server("Color", "RGB Camera"), "yuyv")
        # Clients take a camera of this line for one only when it has a depth sensor.
        self._depth = _stream(bus, bus.depth_stream_server("Depth", "Stereo Module"), "z16")
        root = f"realsense/{MODEL}_{serial}"
        self._device = bus.device_server(participant, root)
        self._device.on_control(self._control)
        self._device.init([self._color, self._depth], [], {})
        self._device.broadcast(_device_info(bus, serial, root))
        self._thread = threading.Thread(target=self._publish, daemon=True)
        self._thread.start()

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
            self._rate_hz = int(profiles["Color"][0])
        encodings = self._bus.video_encoding
        self._color.start_streaming(encodings.yuyv, WIDTH, HEIGHT)
        if "Depth" in profiles:
            self._depth.start_streaming(encodings.z16, WIDTH, HEIGHT)

    def _stop(self) -> None:
        for stream in (self._color, self._depth):
            if stream.is_streaming():
                stream.stop_streaming()

    def _publish(self) -> None:
        due = time.monotonic()
        encodings = self._bus.video_encoding
        flat = bytes(np.full((HEIGHT, WIDTH), FLAT_DEPTH_MM, "<u2").tobytes())
        while True:
            due = max(due + 1.0 / self._rate_hz, time.monotonic() - 0.1)
            time.sleep(max(0.0, due - time.monotonic()))
            if self._color.is_streaming():
                scene = to_yuyv(render(self._serial, time.time())).tobytes()
                self._color.publish_image(self._message(encodings.yuyv, scene))
            if self._depth.is_streaming():
                self._depth.publish_image(self._message(encodings.z16, flat))

    def _message(self, encoding: Any, data: bytes) -> Any:
        picture = self._bus.message.image()
        picture.width, picture.height, picture.step = WIDTH, HEIGHT, 2 * WIDTH
        picture.encoding = str(encoding)
        picture.data = bytearray(data)
        picture.timestamp = self._bus.now()
        return picture


def load_bus() -> Any:
    """Return the bus module of the RealSense wheel; its own package hides it, so by file."""
    spec = importlib.util.find_spec("pyrealsense2")
    if spec is None or spec.origin is None:
        raise MissingDependencyError("emulated cameras need `pip install 'dzrobot[franka]'`")
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
    parser.add_argument("serials", nargs="+")
    arguments = parser.parse_args()
    bus = load_bus()
    participant = bus.participant()
    participant.init(arguments.domain, "emulated-cameras", bus_settings(arguments.domain))
    cameras = [EmulatedCamera(bus, participant, serial) for serial in arguments.serials]
    sys.stdout.write(f"{READY_LINE}: {len(cameras)}\n")
    sys.stdout.flush()
    # The parent closes our standard input when it ends; then we end too.
    sys.stdin.read()


def _intrinsics(bus: Any) -> Any:
    intrinsics = bus.video_intrinsics()
    intrinsics.width, intrinsics.height = WIDTH, HEIGHT
    for name, x, y in (("focal_length", 615.0, 615.0), ("principal_point", 320.0, 240.0)):
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
    profiles = [bus.video_stream_profile(rate, kind, WIDTH, HEIGHT) for rate in RATES_HZ]
    stream.init_profiles(profiles, 0)
    stream.init_options([])
    stream.set_intrinsics({_intrinsics(bus)})
    stream.on_readers_changed(lambda *_: None)
    return stream


if __name__ == "__main__":
    main()
