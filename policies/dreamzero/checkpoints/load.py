"""From files to a network: checked on headers first, then filled tensor by tensor, in place.

The network is built on the meta device and gets its memory once, on the target device and in the
target dtype. Beside it, host memory holds one tensor and one mapped part of a file.
"""

import logging
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from dzrobot.documents import shorten
from dzrobot.embodiments.spec import Part
from dzrobot.errors import CheckpointError, ConfigError, counted, preview
from dzrobot.files import cache_folder
from dzrobot.policies.dreamzero.checkpoints.checksums import fingerprint, weights_hash
from dzrobot.policies.dreamzero.checkpoints.coldstart import (
    find_components,
    has_components,
    open_components,
)
from dzrobot.policies.dreamzero.checkpoints.directory import Base, Checkpoint, open_weights
from dzrobot.policies.dreamzero.checkpoints.hub import locate
from dzrobot.policies.dreamzero.checkpoints.keymap import PREFIXES, Entry, entries
from dzrobot.policies.dreamzero.checkpoints.lora import (
    AdapterConfig,
    MergedSource,
    check_adapters,
    inject_adapters,
    trained_with_adapters,
)
from dzrobot.policies.dreamzero.checkpoints.names import (
    DIT,
    TEXT,
    VAE,
    canonical,
    conditions_of,
    is_adapter,
)
from dzrobot.policies.dreamzero.checkpoints.passport import recorded_base
from dzrobot.policies.dreamzero.checkpoints.sources import (
    TensorInfo,
    UnionSource,
    WeightSource,
    renamed,
)
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.network.dit import attach
from dzrobot.policies.dreamzero.network.prompt import PromptFiles, TextEncoder
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.policies.dreamzero.offload import Offloader, plan_offload
from dzrobot.policies.dreamzero.options import Adapters, Quantization
from dzrobot.policies.dreamzero.quantize import check_quantization, quantize_block
from dzrobot.untrusted import parsing

_LOG = logging.getLogger(__name__)

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SetWeight = Callable[[Tensor], object]
"""Takes a tensor as the files hold it, on the host."""


@dataclass(frozen=True)
class TensorBinding:
    """Where one published tensor goes."""

    entry: Entry
    targets: tuple[Tensor, ...]
    """The network's own tensors it is made of."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its published shape."""
        return self.entry.shape({name: t.shape for name, t in self.by_name.items()})

    @property
    def by_name(self) -> dict[str, Tensor]:
        """Return the network's own tensors by their names there."""
        return dict(zip(self.entry.library, self.targets, strict=True))


def slots(network: nn.Module) -> dict[str, TensorBinding]:
    """Return canonical name -> slot for every tensor, adapters included.

    Args:
        network: A network, or one component of it: its names are then without prefix.
    """
    state = network.state_dict()
    return {
        canonical(entry.official): TensorBinding(entry, tuple(state[x] for x in entry.library))
        for entry in entries(network, list(state))
    }


def build_network(
    config: NetworkConfig, *, text_encoder: bool = True, conditions: Sequence[Part] = ()
) -> WorldActionModel:
    """Return the network of ``config`` without memory for its weights, on the meta device.

    Args:
        config: Sizes.
        text_encoder: Whether it has its prompt encoder.
        conditions: Modalities of the robot's own; see :mod:`~.network.dit`.

    Raises:
        CheckpointError: No network has such sizes.
        ConfigError: A condition's encoder cannot be used.
        UnknownNameError: A condition's encoder does not exist.
    """
    what = "describes a network that cannot be built"
    remedy = "use the one published with the weights"
    with parsing("config.json", CheckpointError, what, remedy), torch.device("meta"):
        network = WorldActionModel(config, text_encoder=text_encoder)
    with torch.device("meta"):
        attach(network.model, conditions)
    return network


def empty_network(
    config: NetworkConfig, *, is_lora: bool, text_encoder: bool, conditions: Sequence[Part] = ()
) -> WorldActionModel:
    """Return the network on the meta device; only what is trained requires gradients."""
    network = build_network(config, text_encoder=text_encoder, conditions=conditions)
    if is_lora:
        inject_adapters(network.model, AdapterConfig.of_head(config.head))
    network.requires_grad_(requires_grad=False)
    for name, parameter in network.model.named_parameters():
        parameter.requires_grad_(not is_lora or trained_with_adapters(canonical(DIT + name)))
    return network.eval()


def expected_shapes(config: NetworkConfig) -> dict[str, tuple[int, ...]]:
    """Return official name -> shape of every tensor of the network."""
    return {name: slot.shape for name, slot in slots(build_network(config)).items()}


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What a network becomes when loaded."""

    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    adapters: Adapters = "merge"
    """``merge`` LoRA matrices into the weights, or ``keep`` them apart."""

    base: Base | None = None
    """Checkpoint, or Wan component folders, that holds what the checkpoint leaves out."""

    memory: int | None = None
    """Bytes of the device that may be used: as many weights as necessary then wait on the host,
    see :mod:`~dzrobot.policies.dreamzero.offload`. None: all lie on the device."""

    quantize: Quantization | None = None
    """8-bit weights in the transformer's blocks, see :mod:`~dzrobot.policies.dreamzero.quantize`;
    they pass through the host's memory. None: all are as they were trained."""

    conditions: tuple[Part, ...] = ()
    """Modalities of the robot's own, which the checkpoint must hold."""


def load_network(checkpoint: Checkpoint, options: LoadOptions) -> WorldActionModel:
    """Return the network of ``checkpoint``, in evaluation mode, as ``options`` ask.

    Raises:
        CheckpointError: Incomplete, foreign, misshapen or of a wrong dtype; nothing is loaded then.
        ConfigError: Less memory is given than it takes, or weights cannot be quantized so.
        MissingDependencyError: They are to be quantized, and torchao is not installed.
    """
    network, _ = load_deferring_text(checkpoint, options)
    network.require_text_encoder()
    return network


def load_deferring_text(
    checkpoint: Checkpoint, options: LoadOptions
) -> tuple[WorldActionModel, PromptFiles]:
    """Return what :func:`load_network` does, and where embeddings of prompts are kept.

    The prompt encoder is checked like all else, and the memory that is given has room for it, but
    its weights are read when a prompt needs it.

    Raises:
        CheckpointError, ConfigError, MissingDependencyError: As :func:`load_network`.
    """
    device, quantize = torch.device(options.device), options.quantize
    if quantize is not None:
        check_quantization(quantize, device, options.dtype)
        if checkpoint.has_adapters and options.adapters == "keep":
            raise ConfigError(
                f"quantize={quantize!r} and adapters='keep': adapters are added to the weights as "
                "they were trained; choose adapters='merge', or leave quantize out"
            )
    network = build_network(checkpoint.config, conditions=options.conditions)
    source = complete_source(checkpoint, options.base, network)
    if checkpoint.has_adapters and options.adapters == "keep":
        inject_adapters(network.model, checkpoint.adapters)
    elif checkpoint.has_adapters:
        source = MergedSource(source, checkpoint.adapters)
    check_weights(network, source)
    waiting: list[nn.Module] = []
    if options.memory is not None:
        plan = plan_offload(network, options.dtype, options.memory, quantize)
        _LOG.info("%s", plan.describe())
        waiting = plan.modules(network)
    offload = _offload_to(device, waiting)
    text = network.to(options.dtype).require_text_encoder()
    of_text = text_weights(source)

    def load_text() -> TextEncoder:
        _LOG.info("reading the prompt encoder: a prompt is new on this machine")
        loaded = filled_text_encoder(text, of_text, device, on_host=set(waiting))
        offload(loaded)
        return loaded

    on_host = set(waiting)
    network.defer_text_encoder(load_text, _resident_bytes(text, on_host))
    if quantize is not None:
        on_host.update(network.model.blocks.modules())
    _give_memory(network, device, on_host)
    fill_network(network, source)
    if quantize is not None:
        for block in network.model.blocks:
            quantize_block(block.to(device), quantize)
            # Back at once: all blocks together may be more than the device holds.
            offload(block)
    offload(network)
    files = PromptFiles(
        folder=cache_folder() / "prompts", weights=weights_hash(of_text, read=False),
        hash_weights=partial(weights_hash, of_text),
        config=checkpoint.config.text, dtype=options.dtype, device=device,
    )  # fmt: skip
    return network.eval().requires_grad_(requires_grad=False), files


def _offload_to(device: torch.device, waiting: Sequence[nn.Module]) -> Callable[[nn.Module], None]:
    """Return what leaves those of ``waiting`` on the host that lie in a module."""
    if not waiting:
        return lambda _: None
    offloader, left = Offloader(device), set(waiting)

    def offload(root: nn.Module) -> None:
        inside = [part for part in root.modules() if part in left]
        left.difference_update(inside)
        offloader.offload(inside)

    return offload


def _resident_bytes(root: nn.Module, on_host: Container[nn.Module]) -> int:
    """Return the bytes of the weights of ``root`` that stay on the device."""
    return sum(
        weight.nbytes
        for module in root.modules()
        if module not in on_host
        for weight in module.parameters(recurse=False)
    )


def text_weights(source: WeightSource) -> WeightSource:
    """Return the weights of the prompt encoder, under its own names."""
    return renamed(source, lambda name: name[len(TEXT) :] if name.startswith(TEXT) else None)


def filled_text_encoder(
    encoder: TextEncoder, weights: WeightSource, device: torch.device,
    on_host: Container[nn.Module] = (),
) -> TextEncoder:  # fmt: skip
    """Return the prompt encoder with its weights, not to be trained.

    Args:
        encoder: On the meta device, in its dtype.
        weights: From :func:`text_weights`.
        device: Where they go.
        on_host: Modules whose weights go to the host instead.
    """
    _give_memory(encoder, device, on_host)
    fill_network(encoder, weights)
    return encoder.eval().requires_grad_(requires_grad=False)


def load_autoencoder(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, base: Base | None
) -> WorldActionModel:
    """Return the network of ``checkpoint`` of which the autoencoder alone has its weights.

    Args:
        checkpoint: The one that has it; nothing else is read of it.
        device: Where the autoencoder goes.
        dtype: What it computes in.
        base: Holds what the checkpoint leaves out, see :class:`LoadOptions`.

    Raises:
        CheckpointError: It is incomplete or damaged.
    """
    network = build_network(checkpoint.config)
    source = complete_source(checkpoint, base, network)
    of_vae = renamed(source, lambda name: name[len(VAE) :] if name.startswith(VAE) else None)
    vae = network.vae.to(dtype)
    _give_memory(vae, device, ())
    fill_network(vae, of_vae)
    vae.eval().requires_grad_(requires_grad=False)
    return network


def _give_memory(root: nn.Module, device: torch.device, on_host: Container[nn.Module]) -> None:
    """Give all weights memory, those of ``on_host`` on the host; what they hold is left open.

    ``Module.to_empty`` does so by an operator of the meta device that loads sympy.
    """
    host = torch.device("cpu")
    for module in root.modules():
        place = host if module in on_host else device
        module._apply(  # type: ignore[no-untyped-call]
            lambda weight, place=place: torch.empty(weight.shape, dtype=weight.dtype, device=place),
            recurse=False,
        )


def complete_source(
    checkpoint: Checkpoint,
    base: Base | None,
    network: WorldActionModel,
) -> WeightSource:
    """Return the weights of ``checkpoint``, with what it leaves out taken from ``base``.

    Raises:
        CheckpointError: A base is needed and not given, not needed and given, or not the right one.
    """
    weights = checkpoint.weights
    absent = slots(network).keys() - weights.tensors.keys()
    if base is None and absent:
        base = _recorded_base(checkpoint)
    if base is None and not checkpoint.has_adapters:
        return _known_complete(checkpoint, absent)
    if base is None and absent:
        raise CheckpointError(
            f"{checkpoint.path} holds adapters without the weights they "
            f"change{_base_hint(checkpoint)}; say where the base is "
            "(LoadOptions(base=...), on the command line --base)"
        )
    source = weights
    if base is not None:
        if not absent:
            raise CheckpointError(
                f"{checkpoint.path} is complete and needs no base; leave the base out"
            )
        source = UnionSource(sources=(open_base(base, checkpoint.config), weights))
        _check_base(checkpoint, source.sources[0])
    if checkpoint.has_adapters:
        check_adapters(source.tensors, checkpoint.adapters, network.model, weights.origin)
    return source


def _recorded_base(checkpoint: Checkpoint) -> str | None:
    """Return what training started from, if it is still there.

    Its weights are compared with the fingerprint in the passport, like those of one that is given.
    """
    if checkpoint.passport_base is None:
        return None
    path = recorded_base(checkpoint.own_passport)
    return path if path is not None and Path(path).expanduser().exists() else None


def _known_complete(checkpoint: Checkpoint, absent: set[str]) -> WeightSource:
    """Return the weights; a checkpoint that lacks some and names its base needs that base."""
    if absent and checkpoint.passport_base is not None:
        raise CheckpointError(
            f"{checkpoint.path} holds only what was trained{_base_hint(checkpoint)}; say where the "
            "base is (LoadOptions(base=...), on the command line --base)"
        )
    return checkpoint.weights


def _base_hint(checkpoint: Checkpoint) -> str:
    """Return where the base was when training began, and why it is not found there now."""
    recorded = recorded_base(checkpoint.own_passport)
    if recorded is None:
        known = checkpoint.passport_base
        return "" if known is None else f", on a base whose fingerprint begins with {known[:12]}"
    away = "" if Path(recorded).is_absolute() else f" from {Path.cwd()}"
    return f", on the base {shorten(recorded, 200)}, which is not found{away}"


def open_base(base: Base, config: NetworkConfig) -> WeightSource:
    """Return the tensors of a base: a checkpoint of any layout, or Wan component folders."""
    given = [base] if isinstance(base, str | Path) else list(base)
    folders = [locate(path) for path in given]
    if any(has_components(folder) for folder in folders if folder.is_dir()):
        return open_components(find_components(folders, config))
    if len(folders) != 1:
        raise CheckpointError(
            f"the base {', '.join(map(str, given))} is not a set of Wan component folders; give "
            "one checkpoint"
        )
    return open_weights(folders[0])


def base_fingerprint(base: WeightSource, kept: Sequence[str] | set[str]) -> str:
    """Return the hash of the tensors of ``base`` but those named in ``kept``."""
    return fingerprint(base, {name for name in base.tensors if not is_adapter(name)} - set(kept))


def _check_base(checkpoint: Checkpoint, base: WeightSource) -> None:
    named = checkpoint.passport_base
    if named is None:
        _LOG.warning(
            "%s names no base: whether %s is the right one cannot be checked beyond its shapes",
            checkpoint.path,
            base.origin,
        )
        return
    found = base_fingerprint(base, set(checkpoint.weights.tensors))
    if found != named:
        raise CheckpointError(
            f"{base.origin} is not the base of {checkpoint.path}: its weights hash to "
            f"{found[:12]}, the passport names "
            f"{named[:12]}; give the base it was trained on"
        )


def check_weights(network: nn.Module, source: WeightSource) -> None:
    """Check every name, shape and dtype on the files' headers.

    Tensors of an encoder that the network was built without are not asked for.

    Raises:
        CheckpointError: They are not exactly those of ``network``.
    """
    check_conditions(network, source)
    wanted = slots(network)
    left_out = tuple(
        p for child, p in PREFIXES.items() if child not in dict(network.named_children())
    )
    given = {n: info for n, info in source.tensors.items() if not n.startswith(left_out)}
    missing, unexpected = wanted.keys() - given.keys(), given.keys() - wanted.keys()
    if missing or unexpected:
        raise CheckpointError(
            f"{source.origin} does not hold the weights of its config.json or preset: missing "
            f"{preview(missing)}; unexpected "
            f"{preview(unexpected)}; use the config.json published with these weights (or the "
            "preset they were trained from), or download them again"
        )
    misshapen = [
        text for name, info in given.items() if (text := _misfit(name, info, wanted[name].shape))
    ]
    if misshapen:
        raise CheckpointError(
            f"{source.origin} holds {preview(misshapen)}; use the config.json published with these "
            "weights, or the preset they were trained from"
        )
    odd = {
        f"{name} ({info.dtype})" for name, info in given.items() if info.dtype not in _WEIGHT_DTYPES
    }
    if odd:
        raise CheckpointError(
            f"{source.origin} holds {preview(odd)}; weights must be float32, bfloat16 or float16: "
            "convert them first"
        )


def check_conditions(network: nn.Module, source: WeightSource) -> None:
    """Check that a checkpoint was trained with the modalities of the robot, and with no others.

    Raises:
        CheckpointError: It was trained with others.
    """
    wanted, held = conditions_of(slots(network)), conditions_of(source.tensors)
    if wanted == held:
        return
    if lacking := wanted - held:
        raise CheckpointError(
            f"{source.origin} was trained without {preview(lacking)}, for which the robot has an "
            "encoder: train it with this robot first, or choose a robot without that part"
        )
    raise CheckpointError(
        f"{source.origin} was trained with a modality of the robot's own, "
        f"{preview(held - wanted)}, for which the robot that was given has no encoder: give the "
        "robot it was trained with, embodiment='module:NAME' (on the command line --embodiment), "
        "in the folder of that module"
    )


def fits(given: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether a stored shape is the wanted one; training shards scalars as one axis."""
    return given == wanted or (wanted == () and given == (1,))


def _misfit(name: str, info: TensorInfo, shape: tuple[int, ...]) -> str:
    return "" if fits(info.shape, shape) else f"{name} of shape {info.shape} instead of {shape}"


def fill_network(
    network: nn.Module, source: WeightSource, setters: Mapping[str, SetWeight] | None = None
) -> None:
    """Copy the tensors of ``source`` into the network, converting dtype and device on the way.

    Every tensor of the network must be in ``source``: call :func:`check_weights` before giving it
    memory. Sharded parameters get their own part and nothing is communicated: every process reads
    the files.

    Args:
        network: The network, or one component.
        source: Tensors by canonical name.
        setters: What takes a tensor that is kept in another form, by its name in the network.

    Raises:
        CheckpointError: Weights are not finite; all of them are named.
    """
    table, setters = slots(network), setters or {}
    wrong = []
    with torch.no_grad():
        for name, tensor in source.stream(table):
            slot = table[name]
            if not is_finite(tensor):
                wrong.append(name)
            # Reshaped because a scalar may be stored with one axis.
            for own, piece in slot.entry.split(tensor.reshape(slot.shape)):
                if own in setters:
                    setters[own](piece)
                else:
                    _copy(slot.by_name[own], piece)
    if wrong:
        raise CheckpointError(
            f"{source.origin} holds NaN or infinity in {counted(len(wrong), 'tensor')}, "
            f"{preview(wrong)}: the training diverged, or the file is damaged; use an earlier "
            "checkpoint, or compare it with its SHA256SUMS (`dzrobot inspect --verify`)"
        )


def is_finite(tensor: Tensor) -> bool:
    """Return whether no number of ``tensor``, of any shape and dtype, is NaN or infinite."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # torch finds no extremes in eight bits; each of them is a number of float32.
    wide = tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor
    # A NaN is both extremes. One pass without a copy; a sum of large weights would overflow, and
    # one of bfloat16 takes 25 times as long.
    return all(map(math.isfinite, (extreme.item() for extreme in wide.aminmax())))


def load_weights(
    network: nn.Module, source: WeightSource, setters: Mapping[str, SetWeight] | None = None
) -> None:
    """Fill a network, or one component, that has its memory; all of it or nothing.

    Args:
        network: The network, or one component.
        source: Tensors by canonical name.
        setters: See :func:`fill_network`.

    Raises:
        CheckpointError: See :func:`check_weights`.
    """
    check_weights(network, source)
    fill_network(network, source, setters)


def _copy(target: Tensor, piece: Tensor) -> None:
    if type(target) is Tensor:
        # Not sharded: nothing of torch.distributed is needed, which takes half a second to load.
        target.copy_(piece)
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(target, DTensor):
        own = distribute_tensor(
            piece.to(target.device), target.device_mesh, target.placements, src_data_rank=None
        )
        target.to_local().copy_(own.to_local())
    else:
        target.copy_(piece)


def official_state(network: nn.Module) -> Mapping[str, Tensor]:
    """Return canonical name -> tensor of a network in memory, adapters included.

    Tensors are the network's own, except those that several are joined to.
    """
    return {name: slot.entry.join(slot.by_name) for name, slot in slots(network).items()}
