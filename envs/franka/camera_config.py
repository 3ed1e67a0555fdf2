"""What one camera of a workcell is: which device, its stream, its exposure, what is kept of it."""

from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from dzrobot.config import FrozenConfig

FIXED = ("exposure_ms", "gain", "white_balance_k")
"""Fields of :class:`CameraConfig` that a camera otherwise chooses by itself."""


class CameraConfig(FrozenConfig):
    """One camera."""

    key: str
    """Which view of the embodiment it delivers, such as ``video.image``."""

    serial: str
    """Serial number, as ``dzrobot doctor franka`` lists it."""

    width: Annotated[int, Field(ge=16)] = 640
    """Columns of the color stream (pixels)."""

    height: Annotated[int, Field(ge=16)] = 480
    """Rows of the color stream (pixels)."""

    fps: Annotated[int, Field(gt=0)] = 15
    """Frames per second of the color stream."""

    crop: tuple[int, int, int, int] | None = None
    """Top, left, bottom, right (pixels) of what is kept. None: the largest in the middle that has
    the shape of the view."""

    lock_exposure: bool = False
    """Whether exposure, gain and white balance stay as they are ``settle_s`` after the stream
    began. Excludes the three fixed values below, which hold from the beginning."""

    settle_s: Annotated[float, Field(ge=0)] = 1.0
    """How long the camera adapts itself before they are locked."""

    exposure_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """How long each frame is exposed, with ``gain``. None: the camera chooses both."""

    gain: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Amplification, in the numbers of the camera, with ``exposure_ms``."""

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

    @model_validator(mode="after")
    def _exposure_has_one_source(self) -> Self:
        if self.fixed and self.lock_exposure:
            raise ValueError(
                f"lock_exposure keeps what the camera has chosen, and {', '.join(self.fixed)} "
                "says what it is to be: leave one of them out"
            )
        if (self.exposure_ms is None) != (self.gain is None):
            raise ValueError(
                "exposure_ms and gain go together: a camera chooses both or none; `dzrobot doctor "
                "franka` lists what it offers"
            )
        return self

    @property
    def fixed(self) -> dict[str, float]:
        """The values of the camera that are fixed, by field."""
        values = {name: getattr(self, name) for name in FIXED}
        return {name: value for name, value in values.items() if value is not None}

    def box(self, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """Return top, left, bottom, right (pixels) of what is kept for a view of ``size``."""
        if self.crop is not None:
            return self.crop
        tall, wide = size
        scale = min(self.height / tall, self.width / wide)
        height, width = round(scale * tall), round(scale * wide)
        top, left = (self.height - height) // 2, (self.width - width) // 2
        return top, left, top + height, left + width
