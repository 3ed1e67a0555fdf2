"""Fit a small video autoencoder to recordings, and put its latents on the published scale.

The encoder decides what the transformer can see, so the fit weighs small objects and colors; its
decoder may then be fitted alone to plain squared error, which leaves the latents as they are.

The transformer expects latents of zero mean and unit variance after the published constants of the
Wan autoencoders. A small autoencoder has latents of its own scale, so after training its last
encoder and first decoder layers, both 1x1x1, take that scale on: exactly, because they are linear.

What an interrupted fit resumes from is one file, replaced as a whole.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from dzrobot.documents import validated
from dzrobot.embodiments.spec import Embodiment
from dzrobot.embodiments.timing import Timing
from dzrobot.errors import CheckpointError, StatisticsError
from dzrobot.files import explained, remove, write_bytes
from dzrobot.modality.stats import ACTION_HORIZON
from dzrobot.policies.dreamzero.checkpoints.directory import read_metadata
from dzrobot.policies.dreamzero.checkpoints.unpickling import load_tensors
from dzrobot.policies.dreamzero.network.vae import MEAN, STD, Vae
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.training.data import (
    LoaderOptions,
    LoaderPlan,
    SourceSpec,
    TrainingData,
    build_loader,
    encode_views,
)
from dzrobot.training.data.provenance import PROVENANCE, RecordedProvenance, provenance
from dzrobot.training.run.inputs import keyed_generator
from dzrobot.training.tiny.fit_plan import AutoencoderPlan


class _FitState(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)

    identity: dict[str, str]
    results: dict[str, float]
    part: str = ""
    step: int = Field(default=0, ge=0)
    module: dict[str, Tensor] = Field(default_factory=dict)
    others: list[dict[str, Any]] = Field(default_factory=list)


@dataclass
class FitCheckpoint:
    """The checkpoint of a fit in several parts; without ``path`` nothing is written.

    Args:
        path: The file; :meth:`clear` removes it.
        identity: Options and data of the fit. The file of another fit is refused.
        every: Steps between saves.
    """

    path: Path | None = None
    identity: Mapping[str, str] = field(default_factory=dict)
    every: int = 20

    def __post_init__(self) -> None:
        """Read the file if it exists, else check that it can be written before the fit begins.

        Raises:
            CheckpointError: it is unreadable, of another fit, or cannot be written.
        """
        self._state = _FitState(identity=dict(self.identity), results={})
        if self.path is None:
            return
        with explained(f"write {self.path}", CheckpointError):
            there = self.path.exists()
            if not there:
                probe = self.path.with_name(f"{self.path.name}.aside")
                write_bytes(probe, b"")
                remove(probe)
        if there:
            self._read(self.path)

    def _read(self, path: Path) -> None:
        advice = f"remove {path} to start again"
        try:
            kept = validated(load_tensors(path), _FitState, str(path), CheckpointError)
        except CheckpointError as error:
            raise CheckpointError(f"{path} is unreadable ({error}); {advice}") from error
        identity = kept.identity
        changed = [name for name, value in self.identity.items() if identity.get(name) != value]
        if changed:
            lines = [f"{name}: {identity.get(name)}, now {self.identity[name]}" for name in changed]
            raise CheckpointError(
                f"{path} is of a fit with other options ({'; '.join(lines)}); "
                f"give the same again, or {advice}"
            )
        self._state = kept

    def restore(self, part: str, module: nn.Module, *others: Any) -> int:
        """Restore what :meth:`keep` last saved in ``part``; return its step, 0 without one.

        Raises:
            CheckpointError: the saved state does not fit.
        """
        if self._state.part != part:
            return 0
        self._load(module, *others)
        return self._state.step

    def keep(self, part: str, step: int, module: nn.Module, *others: Any) -> None:
        """Save the state after ``step`` steps, every :attr:`every` steps."""
        if step % self.every == 0:
            states = [other.state_dict() for other in others]
            self._write(part=part, step=step, module=module.state_dict(), others=states)

    def result(self, part: str, module: nn.Module) -> float | None:
        """Return the result of ``part``, its module restored; None if it was not finished.

        Raises:
            CheckpointError: the saved state does not fit.
        """
        if part in self._state.results and self._state.part == f"after {part}":
            self._load(module)
        return self._state.results.get(part)

    def finish(self, part: str, result: float, module: nn.Module) -> float:
        """Save that ``part`` finished with ``result``; return it."""
        self._state.results[part] = result
        self._write(part=f"after {part}", module=module.state_dict())
        return result

    def clear(self) -> None:
        """Remove the file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _load(self, module: nn.Module, *others: Any) -> None:
        try:
            module.load_state_dict(self._state.module)
            for other, state in zip(others, self._state.others, strict=True):
                other.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path} does not fit ({error}); remove it to start again"
            ) from error

    def _write(self, **values: Any) -> None:
        """Replace the saved state by ``values``.

        Raises:
            CheckpointError: the file cannot be written.
        """
        identity, results = self._state.identity, self._state.results
        self._state = _FitState(identity=identity, results=results, **values)
        if self.path is not None:
            content = io.BytesIO()
            torch.save({"identity": identity, "results": results, **values}, content)
            with explained(f"write {self.path}", CheckpointError):
                write_bytes(self.path, content.getvalue())


STILL, CLIP = 5, 9
"""Frames that are read at once for stills, and of a clip: the shortest that has a third latent
frame, from which on every latent frame is encoded beside one of four frames."""

_LATENT_WEIGHT = 1e-3
_LEAST_ERROR = 1e-5
"""Squared error of a frame (50 dB) below which the decoder is no longer rewarded."""
_FEW = 20
"""Updates of which a twentieth is too short to raise the rate in; then it takes two."""
_NARROW = 8
"""Rows or columns of a weight below which orthogonal updates are left to AdamW."""


@dataclass(frozen=True)
class AutoencoderReport:
    """One line of progress."""

    step: int
    error: float
    """Mean absolute error of pixels in [-1, 1]."""


@dataclass(frozen=True, kw_only=True)
class AutoencoderData:
    """The same episodes, cut in two ways; open them with :func:`clip_source`."""

    stills: TrainingData
    """Samples of `STILL` frames."""

    clips: TrainingData
    """Samples of `CLIP` frames."""


def fit_autoencoder(
    vae: Vae,
    data: AutoencoderData,
    plan: AutoencoderPlan,
    report: Callable[[AutoencoderReport], None] = lambda _: None,
    saves: FitCheckpoint | None = None,
) -> float:
    """Train ``vae`` in place, first on single frames, then on clips.

    Args:
        vae: Float32, newly initialized.
        data: Recordings.
        plan: Steps, batches and rates.
        report: Called after every step; steps of clips are counted after those of stills.
        saves: What an interrupted fit resumes from, with bit-identical results.

    Returns:
        The mean absolute error of pixels in [-1, 1] of clips, after the fit.
    """
    saves = saves or FitCheckpoint()
    whole = list(vae.parameters())
    phases = (
        _Phase("stills", plan.still_steps, 0, lambda done: _stills(data.stills, plan, done), whole),
        _Phase(
            "clips", plan.clip_steps, plan.still_steps,
            lambda done: _clips(data.clips, plan.clip_batch, plan, done, plan.clip_steps), whole,
        ),
    )  # fmt: skip
    for phase in phases:
        _run_phase(vae, phase, plan, report, saves)
    last = plan.clip_steps + plan.held_batches
    held = list(_clips(data.clips, plan.clip_batch, plan, plan.clip_steps, last))
    if saves.result("calibration", vae) is None:
        calibrate(vae, held)
        saves.finish("calibration", 0.0, vae)
    fit_decoder(vae, data.clips, plan, report, saves)
    return _error(vae, held)


def fit_decoder(
    vae: Vae,
    clips: TrainingData,
    plan: AutoencoderPlan,
    report: Callable[[AutoencoderReport], None] = lambda _: None,
    saves: FitCheckpoint | None = None,
) -> None:
    """Fit the decoder of ``vae`` in place to whole frames; its latents do not change.

    What is lowered is the logarithm of each frame's mean squared error, so that what rises is
    the mean PSNR. Noise on all latents but the first makes the decoder use what it knows exactly:
    what stood still can be taken from the first.

    Args:
        vae: Float32, fitted.
        clips: Samples of `CLIP` frames.
        plan: Steps, batches and rates; clips are those after the ones of earlier phases.
        report: Called after every step; steps are counted after those of the whole fit.
        saves: What an interrupted fit resumes from.
    """
    start = plan.clip_steps + plan.held_batches
    stop = start + plan.decoder_steps
    coder = vae.coder
    phase = _Phase(
        "decoder", plan.decoder_steps, plan.still_steps + plan.clip_steps,
        lambda done: _clips(clips, plan.clip_batch, plan, start + done, stop),
        [*coder.post_quant_conv.parameters(), *coder.decoder.parameters()],
    )  # fmt: skip
    gentle = replace(plan, lr=plan.lr / 2, other_lr=plan.other_lr / 2)
    _run_phase(vae, phase, gentle, report, saves or FitCheckpoint())


class _Phase(NamedTuple):
    """A part of a fit."""

    name: str
    steps: int
    before: int
    """Steps of earlier phases."""

    batches: Callable[[int], Iterator[Tensor]]
    """Clips (B, 3, T, H, W) of the steps after a number of steps."""

    parameters: list[torch.nn.Parameter]
    """What is fitted."""


def _run_phase(
    vae: Vae,
    phase: _Phase,
    plan: AutoencoderPlan,
    report: Callable[[AutoencoderReport], None],
    saves: FitCheckpoint,
) -> None:
    """Fit what is not fitted yet; leave nothing trainable."""
    if phase.steps == 0 or saves.result(phase.name, vae) is not None:
        vae.eval().requires_grad_(requires_grad=False)
        return
    vae.train().requires_grad_(requires_grad=False)
    for parameter in phase.parameters:
        parameter.requires_grad = True
    updates = _Updates(phase.parameters, plan, phase.steps)
    done = saves.restore(phase.name, vae, *updates.parts)
    for step, clips in enumerate(phase.batches(done), done):
        with torch.autocast("cpu", torch.bfloat16, enabled=plan.dtype == "bfloat16"):
            latents = vae.encode(clips).float()
            generator = keyed_generator(f"latent noise of {phase.name}", plan.seed, step)
            noise = _noise(latents.detach(), plan, generator, predicted=phase.name == "decoder")
            decoded = vae.decode(latents + noise, clamp=False)
        errors = decoded.float() - clips
        if phase.name == "decoder":
            loss = ((errors / 2).square().mean(dim=(1, 3, 4)) + _LEAST_ERROR).log().mean()
        else:
            loss = _weighted(errors, clips, plan) + _LATENT_WEIGHT * latents.square().mean()
        updates.step(loss)
        saves.keep(phase.name, step + 1, vae, *updates.parts)
        report(AutoencoderReport(phase.before + step + 1, errors.abs().mean().item()))
    vae.eval().requires_grad_(requires_grad=False)
    saves.finish(phase.name, 0.0, vae)


def _noise(
    latents: Tensor, plan: AutoencoderPlan, generator: torch.Generator, *, predicted: bool
) -> Tensor:
    """Return noise for latents (B, C, F, h, w).

    ``predicted``: as if a network had predicted all but the first, which is of a frame it has seen.
    """
    noise = torch.randn(latents.shape, generator=generator)
    levels = torch.full((len(latents), 1, latents.shape[2], 1, 1), plan.latent_noise)
    if predicted:
        drawn = torch.rand((len(latents), 1, 1, 1, 1), generator=generator)
        levels[:, :, 1:] = plan.predicted_noise * drawn
    return levels * latents.std() * noise


@torch.no_grad()
def reconstruction_psnr(
    vae: Vae, data: TrainingData, plan: AutoencoderPlan,
    report: Callable[[int, int], None] = lambda *_: None,
) -> float:  # fmt: skip
    """Return the PSNR (dB) of decoded frames, the mean over those of ``plan.held_batches`` batches.

    Args:
        vae: After the fit.
        data: Recordings that nothing was fitted to.
        plan: Size and number of the batches.
        report: Called after every batch with how many are done, and of how many.
    """
    values = []
    for clips in _clips(data, plan.clip_batch, plan, 0, plan.held_batches):
        squares = ((vae.decode(vae.encode(clips)) - clips) / 2).square()
        values.append(-10 * squares.mean(dim=(1, 3, 4)).log10())
        report(len(values), plan.held_batches)
    return float(torch.cat(values).mean())


class _Updates:
    """Muon for weight matrices, AdamW for the rest, with one-cycle learning rates over ``steps``.

    On recordings of LIBERO a fit by Muon was 2 dB better than an equally long one by AdamW.
    """

    def __init__(
        self, parameters: list[torch.nn.Parameter], plan: AutoencoderPlan, steps: int
    ) -> None:
        self._parameters = parameters
        wide = [one for one in parameters if one.ndim > 1 and min(one.flatten(1).shape) >= _NARROW]
        chosen = {id(one) for one in wide}
        others = [one for one in parameters if id(one) not in chosen]
        # PyTorch's Muon takes two dimensions only, so it gets the same memory as matrices.
        self._matrices = [(one, torch.nn.Parameter(one.detach().flatten(1))) for one in wide]
        self._optimizers = (
            torch.optim.Muon([flat for _, flat in self._matrices], plan.lr, weight_decay=0),
            torch.optim.AdamW(others, lr=plan.other_lr, betas=(0.9, 0.99), weight_decay=0),
        )
        rise = 0.05 if steps > _FEW else 2 / steps
        self._schedules = [
            torch.optim.lr_scheduler.OneCycleLR(
                one, lr, total_steps=steps, pct_start=rise, cycle_momentum=False
            )
            for one, lr in zip(self._optimizers, (plan.lr, plan.other_lr), strict=True)
        ]
        self.parts = (*self._optimizers, *self._schedules)

    def step(self, loss: Tensor) -> None:
        for one in self._parameters:
            one.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for one, flat in self._matrices:
            flat.grad = None if one.grad is None else one.grad.flatten(1)
        for optimizer in self._optimizers:
            optimizer.step()  # type: ignore[no-untyped-call]
        for schedule in self._schedules:
            schedule.step()


@torch.no_grad()
def _error(vae: Vae, batches: list[Tensor]) -> float:
    errors = [(vae.decode(vae.encode(clips)) - clips).abs().mean() for clips in batches]
    return float(torch.stack(errors).mean())


def _weighted(errors: Tensor, clips: Tensor, plan: AutoencoderPlan) -> Tensor:
    """Return the mean absolute error of ``clips``, weighted as ``plan`` says."""
    weights = 1 + plan.focus * (clips - clips.mean(dim=(0, 2), keepdim=True)).abs()
    weights = weights / weights.mean()
    red, green, blue = errors.unbind(1)
    colors = torch.stack([red - green, blue - (red + green) / 2], dim=1)
    strongest = weights.amax(dim=1, keepdim=True)
    return (errors.abs() * weights).mean() + plan.color * (colors.abs() * strongest).mean()


@torch.no_grad()
def calibrate(vae: Vae, clips: list[Tensor]) -> None:
    """Make the latents of ``clips`` zero mean and unit variance, and decode as before."""
    latents = torch.cat([vae.encode(clip) for clip in clips])
    shift = latents.mean(dim=(0, 2, 3, 4))
    scale = latents.std(dim=(0, 2, 3, 4)).clamp(min=1e-3)
    z = vae.config.z_dim
    mean = torch.tensor(MEAN[vae.config.version][:z])
    std = torch.tensor(STD[vae.config.version][:z])
    coder: Any = vae.coder
    encoder, decoder = coder.quant_conv, coder.post_quant_conv
    encoder.weight[:z] /= scale[:, None, None, None, None]
    encoder.bias[:z] = (encoder.bias[:z] - mean - std * shift) / scale + mean
    # raw = scale * raw' + offset, folded into the decoder's first layer.
    offset = mean + std * shift - scale * mean
    weight = decoder.weight[:, :, 0, 0, 0].clone()
    decoder.bias += weight @ offset
    decoder.weight *= scale[None, :, None, None, None]


def clip_source(
    paths: Sequence[Path | DatasetCatalog], embodiment: Embodiment, metadata: Path, frames: int
) -> SourceSpec:
    """Return a source of clips of ``frames`` (4 n + 1) consecutive frames."""
    steps = frames - 1
    timing = Timing(
        control_hz=embodiment.timing.control_hz,
        action_horizon=steps,
        frame_offsets=tuple(range(steps)),
        blocks=1,
    )
    robot = replace(embodiment, timing=timing)
    return SourceSpec(paths=paths, embodiment=robot, metadata=images_metadata(metadata, robot))


def images_metadata(file: Path, embodiment: Embodiment) -> dict[str, Any]:
    """Return the statistics in ``file`` as if they were measured with the timing of ``embodiment``.

    An autoencoder sees images alone, so it does not matter over how many steps relative actions
    were measured; which recordings the numbers are of still does.
    """
    content = read_metadata(file)
    entry = content.get(embodiment.tag)
    if entry is None:
        return content
    steps = embodiment.timing.action_horizon
    entry = {
        name: _first_steps(value, steps) if name == "statistics" else value
        for name, value in entry.items()
        if name != ACTION_HORIZON
    }
    note = validated(
        entry, RecordedProvenance, f"{file}, {embodiment.tag}", StatisticsError
    ).provenance
    if note is not None:
        entry[PROVENANCE] = provenance(embodiment, note.datasets)[PROVENANCE]
    return {**content, embodiment.tag: entry}


def _first_steps(value: Any, steps: int) -> Any:
    """Return statistics with ``steps`` lists wherever there is one for each step of a block."""
    if isinstance(value, dict):
        return {name: _first_steps(inner, steps) for name, inner in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], list):
        return (value * steps)[:steps]
    return value


def _stills(data: TrainingData, plan: AutoencoderPlan, start: int) -> Iterator[Tensor]:
    """Yield single frames (B, 3, 1, H, W) in [-1, 1] of the steps from ``start`` on."""
    samples = max(1, min(len(data), plan.still_bytes // data.image_bytes))
    frames = torch.cat([images.flatten(0, 1) for images in _images(data, 1, plan, 0, samples)])
    for step in range(start, plan.still_steps):
        generator = keyed_generator("stills", plan.seed, step)
        chosen = torch.randint(len(frames), (plan.still_batch,), generator=generator)
        yield _in_range(frames[chosen, None])


def _clips(
    data: TrainingData, batch: int, plan: AutoencoderPlan, start: int, stop: int
) -> Iterator[Tensor]:
    """Yield clips (B, 3, T, H, W) in [-1, 1]."""
    for images in _images(data, batch, plan, start, stop):
        yield _in_range(images)


def _in_range(images: Tensor) -> Tensor:
    """Return (B, 3, T, H, W) in [-1, 1] of (B, T, H, W, 3) in [0, 255]."""
    return images.permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def _images(
    data: TrainingData, batch: int, plan: AutoencoderPlan, start: int, stop: int
) -> Iterator[Tensor]:
    """Yield clips (B, T, H, W, 3) uint8, as the network is shown them."""
    loader = build_loader(
        data,
        LoaderPlan(global_batch=batch, micro_batch=batch, start_step=start, stop_step=stop),
        LoaderOptions(num_workers=plan.num_workers),
    )
    for samples in loader:
        yield encode_views(samples, data, augment=None, device="cpu")
