"""A web page with the camera images on this machine, one motion JPEG stream per view."""

import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import cv2
import numpy as np

from dzrobot.errors import ConfigError

Images = Callable[[], Mapping[str, np.ndarray]]
"""Returns the newest image (H, W, 3) uint8 RGB of every view."""

HOST = "127.0.0.1"
PERIOD_S = 0.1
_BOUNDARY = "frame"
_PAGE = """<!doctype html><title>dzrobot cameras</title>
<body style="background:#111;color:#ddd;font-family:sans-serif">{views}</body>"""


class Preview:
    """Serves images on the loopback interface until it is closed.

    Args:
        port: Where; 0 picks a free one.
        images: What is served.

    Raises:
        ConfigError: the port cannot be had.
    """

    def __init__(self, port: int, images: Images) -> None:
        self.images = images
        preview = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                preview._answer(self)

            def log_message(self, *_: object) -> None:
                """Say nothing: the screen belongs to the operator."""

        try:
            self._server = ThreadingHTTPServer((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the preview cannot listen on port {port} ({error}); choose a free one, from 1024 "
                "to 65535, or 0 for any"
            ) from error
        self._server.daemon_threads = True
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="preview", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self._server.server_address[1]}/"

    def close(self) -> None:
        """Stop serving."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        name = request.path.strip("/")
        if not name:
            views = "".join(f"<h3>{key}</h3><img src='/{key}'>" for key in self.images())
            self._send(request, "text/html", _PAGE.format(views=views).encode())
        elif name in self.images():
            self._stream(request, name)
        else:
            request.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, request: BaseHTTPRequestHandler, kind: str, content: bytes) -> None:
        request.send_response(HTTPStatus.OK)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    def _stream(self, request: BaseHTTPRequestHandler, name: str) -> None:
        """Send one image after another until the viewer leaves."""
        request.send_response(HTTPStatus.OK)
        request.send_header("Content-Type", f"multipart/x-mixed-replace; boundary={_BOUNDARY}")
        request.end_headers()
        while not self._closing.is_set():
            image = self.images().get(name)
            if image is not None:
                _, coded = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
                content = coded.tobytes()
                head = f"--{_BOUNDARY}\r\nContent-Type: image/jpeg\r\nContent-Length: "
                try:
                    request.wfile.write(f"{head}{len(content)}\r\n\r\n".encode())
                    request.wfile.write(content + b"\r\n")
                except OSError:
                    return
            time.sleep(PERIOD_S)
