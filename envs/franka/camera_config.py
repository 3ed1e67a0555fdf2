"""Configuration of one camera: device, stream, exposure and crop."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dzrobot.configuration import FrozenConfig

FIXED = ("exposure_ms", "gain", "white_balance_k")
"""Fields of :class:`CameraConfig` that a camera otherwise chooses by itself."""

_UVC = ("device", "stereo", "pixels")


class CameraConfig(FrozenConfig):
    """One camera."""

    key: str
    """Which view of the embodiment it delivers, such as ``video.image``."""

    kind: Literal["realsense", "uvc"] = "realsense"
    """``realsense``: by Intel's library. ``uvc``: a webcam, a ZED or another USB video camera, by
    OpenCV."""

    serial: str = ""
    """Serial number of a RealSense, as ``dzrobot doctor franka`` lists it."""

    device: str | int | None = None
    """Device of a ``uvc`` camera: a path such as ``/dev/v4l/by-id/...`` (it stays the same), or the
    number n of ``/dev/videon``. A video file is played again and again, for trials without
    a camera."""

    stereo: Literal["left", "right"] | None = None
    """Which half is taken of images side by side, as a ZED delivers them. None: it has one image.
    """

    pixels: Literal["MJPG", "YUYV"] | None = None
    """How a ``uvc`` camera is to send its images; many need ``MJPG`` for large ones. None: the
    camera's choice."""

    width: Annotated[int, Field(ge=16)] = 640
    """Columns of the color stream (pixels); of one half, where there are two side by side."""

    height: Annotated[int, Field(ge=16)] = 480
    """Rows of the color stream (pixels)."""

    fps: Annotated[int, Field(gt=0)] = 15
    """Frames per second of the color stream. Left out in a workcell with an embodiment: the
    smallest of 15, 30 and 60 that is one and a half times the rate of control."""

    crop: tuple[int, int, int, int] | None = None
    """Top, left, bottom, right (pixels) of what is kept. None: the largest in the middle that has
    the shape of the view."""

    lock_exposure: bool = False
    """Whether exposure, gain and white balance stay as they are ``settle_s`` after the stream
    began. Excludes the three fixed values below, which hold from the beginning."""

    settle_s: Annotated[float, Field(ge=0)] = 1.0
    """How long the camera adapts itself before they are locked."""

    exposure_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """How long each frame is exposed; of a RealSense with ``gain``. None: the camera chooses."""

    gain: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Amplification, in the numbers of the camera; of a RealSense with ``exposure_ms``."""

    white_balance_k: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Color temperature (K) that is shown as white. None: the camera chooses it."""

    @field_validator("serial", mode="before")
    @classmethod
    def _serial_is_text(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValueError(f'got the number {value}; put it in quotes: serial: "{value}"')
        return value

    @model_validator(mode="after")
    def _crop_lies_within(self) -> Self:
        if self.crop is None:
            return self
        top, left, bottom, right = self.crop
        if not (0 <= top < bottom <= self.height and 0 <= left < right <= self.width):
            raise ValueError(
                f"crop={self.crop} must be top < bottom <= {self.height}, left < right <= "
                f"{self.width}"
            )
        return self

    @field_validator("device", mode="before")
    @classmethod
    def _device_is_a_place(cls, value: Any) -> Any:
        number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if value is None or number or (isinstance(value, str) and value):
            return value
        raise ValueError(f"got {value!r}; give a path such as /dev/video0, or a number from 0")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.kind == "uvc":
            if self.device is None or self.serial:
                raise ValueError("kind: uvc takes `device`, and no `serial`")
            if self.lock_exposure:
                raise ValueError(
                    "lock_exposure is for RealSense cameras; fix exposure_ms of a uvc camera"
                )
            return self
        if not self.serial:
            raise ValueError(
                "a RealSense camera takes `serial`, which `dzrobot doctor franka` lists; "
                "other cameras take kind: uvc and `device`"
            )
        if given := self.model_dump(include=set(_UVC), exclude_none=True):
            raise ValueError(f"{', '.join(given)}: only cameras of kind: uvc take it")
        return self

    @model_validator(mode="after")
    def _exposure_has_one_source(self) -> Self:
        if self.fixed and self.lock_exposure:
            raise ValueError(
                f"lock_exposure keeps what the camera has chosen, and {', '.join(self.fixed)} "
                "says what it is to be: leave one of them out"
            )
        half = (self.exposure_ms is None) != (self.gain is None)
        if half and self.kind == "realsense":
            raise ValueError(
                "exposure_ms and gain go together: a camera chooses both or none; `dzrobot doctor "
                "franka` lists what it offers"
            )
        return self

    @property
    def place(self) -> str:
        """Which device it is."""
        if self.kind == "realsense":
            return self.serial
        return f"/dev/video{self.device}" if isinstance(self.device, int) else str(self.device)

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"camera {self.place} ({self.key})"

    @property
    def fixed(self) -> dict[str, float]:
        """The values of the camera that are fixed, by field."""
        return self.model_dump(include=set(FIXED), exclude_none=True)

    def box(self, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """Return top, left, bottom, right (pixels) of what is kept for a view of ``size``."""
        if self.crop is not None:
            return self.crop
        tall, wide = size
        scale = min(self.height / tall, self.width / wide)
        height, width = round(scale * tall), round(scale * wide)
        top, left = (self.height - height) // 2, (self.width - width) // 2
        return top, left, top + height, left + width
