"""What the weights are: sizes and options of a DreamZero network, from a checkpoint's config.json.

Field names are those of the published config files. Sizes that those files leave to the published
code's defaults (docs/model.md, section 1.1) are fields here too, so that a network of any width
can be written and read back.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, get_args, get_origin

from dzrobot.documents import shorten
from dzrobot.embodiments.spec import Embodiment, History
from dzrobot.errors import CheckpointError, ConfigError, UnknownNameError, find, preview

Config = TypeVar("Config")

LIMITS = "limits"
"""In the metadata of a field: the least and the most that a file may ask for."""

_COMMON = (0, 2**20)
_LONGEST = 16
"""Items of a list."""

Solver = Literal["unipc", "euler"]
"""``euler`` is that of distilled networks, whose velocities cover whole steps."""

Video = Literal["full", "once", "skip"]
"""What of the coming block's video is computed beside its actions. ``full``: it is denoised with
them, as published. ``once``: its tokens are pure noise, and pass the transformer in the first
evaluation alone; the later ones attend the keys and values that they left. ``skip``: it has no
tokens. Without ``full`` no video is predicted, and no negative prompt is needed: it guides the
video alone."""

PromptRows = Literal["own", "cut"]
"""Which rows of a batch's prompts are not zero: each its own, or as many as the shortest has."""


def section(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping ``data[key]``; raise :class:`ConfigError` where there is none."""
    found = data.get(key)
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"no section {key!r} (found: {preview(data)}); "
            "is this the config.json of a DreamZero checkpoint?"
        )
    return found


def fill(cls: type[Config], data: Mapping[str, Any], where: str) -> Config:
    """Return ``cls`` from the entries of ``data`` that it has a field for; others are ignored.

    A null entry of a required field counts as missing.

    Raises:
        ConfigError: A required field is missing, or an entry has the wrong type or size.
    """
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    required = {
        name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING
    }
    given = {name: data[name] for name in known if name in data}
    given = {
        name: value for name, value in given.items() if value is not None or name not in required
    }
    if missing := required - given.keys():
        raise ConfigError(f"{where} lacks {preview(missing)}")
    typed = {
        name: _typed(value, known[name].type, f"{where}.{name}") for name, value in given.items()
    }
    for name, value in typed.items():
        least, most = known[name].metadata.get(LIMITS, _COMMON)
        for number in value if isinstance(value, tuple) else (value,):
            if type(number) in (int, float) and not least <= number <= most:
                raise ConfigError(
                    f"{where}.{name} is {shorten(value)}, allowed: {least:g} to {most:g}"
                )
    return cls(**typed)


def values(config: Any) -> dict[str, Any]:
    """Return the fields of ``config`` as a dict, one level deep."""
    return {f.name: vars(config)[f.name] for f in fields(config)}


def changed(config: Any, base: Any) -> dict[str, Any]:
    """Return the fields in which ``config`` differs from ``base``, ready for JSON."""
    return {
        key: plain(value) for key, value in values(config).items() if value != values(base)[key]
    }


def plain(value: Any) -> Any:
    """Return ``value`` with a tuple as the list that JSON knows."""
    return list(value) if isinstance(value, tuple) else value


def _typed(value: Any, wanted: Any, where: str) -> Any:
    """Return ``value`` as its field's type: lists as tuples, integers as floats where asked."""
    if get_origin(wanted) is Literal:
        if isinstance(value, str) and value in get_args(wanted):
            return value
        allowed = ", ".join(map(repr, get_args(wanted)))
        raise ConfigError(f"{where} is {shorten(value)}, expected one of {allowed}")
    if get_origin(wanted) is tuple and isinstance(value, list | tuple):
        if len(value) > _LONGEST:
            raise ConfigError(f"{where} has {len(value)} items, at most {_LONGEST} are allowed")
        return tuple(_typed(item, get_args(wanted)[0], where) for item in value)
    if get_origin(wanted) is tuple:
        raise ConfigError(f"{where} is {shorten(value)}, expected a list")
    if wanted is float and type(value) is int:
        return float(value)
    allowed_types = get_args(wanted) or (wanted,)
    if type(value) not in allowed_types:
        names = " or ".join(kind.__name__ for kind in allowed_types)
        raise ConfigError(f"{where} is {shorten(value)}, expected {names}")
    return value


_TARGET_ROOT = "groot.vla.model.dreamzero"
_ACTION_HEAD = f"{_TARGET_ROOT}.action_head.wan_flow_matching_action_tf"
PATCH = 2
"""Latent pixels along one side of a video token; the transformer halves height and width once."""

_MASK_CHANNELS = 4
_OLD_5B_FRAME_TOKENS = (50, 55)
_OLD_5B_SIZE = (176, 320)


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """The causal video, action and state transformer (docs/model.md, section 2)."""

    model_type: Literal["i2v", "ti2v"]
    """``i2v``: 14B, first frame concatenated to the latents; ``ti2v``: 5B, latents only."""

    dim: int
    """Width of the residual stream."""

    ffn_dim: int
    """Hidden width of the feed-forward layers."""

    in_dim: int
    """Channels entering the patch embedding."""

    out_dim: int
    """Latent channels predicted; equals the VAE's."""

    num_heads: int = field(metadata={LIMITS: (1, 1024)})
    """Attention heads; divides ``dim``."""

    num_layers: int = field(metadata={LIMITS: (1, 1024)})
    """Transformer blocks."""

    frame_seqlen: int = field(metadata={LIMITS: (1, 65536)})
    """Tokens of one latent frame."""

    concat_first_frame_latent: bool = True
    """Whether mask and first-frame latent are concatenated to the noisy latents."""

    freq_dim: int = 256
    """Width of the timestep sinusoid."""

    text_dim: int = 4096
    """Width of the prompt embedding."""

    text_len: int = field(default=512, metadata={LIMITS: (1, 4096)})
    """Rows of the prompt embedding, padding included."""

    clip_dim: int = 1280
    """Width of the image embedding."""

    eps: float = 1e-6
    """Added to variances inside the normalizations."""

    max_chunk_size: int = field(default=4, metadata={LIMITS: (-1, 1024)})
    """Blocks of history before the context is dropped; -1 for token-level causal clean frames."""

    num_frame_per_block: int = field(default=2, metadata={LIMITS: (1, 256)})
    """Latent frames denoised together."""

    num_action_per_block: int = field(default=24, metadata={LIMITS: (1, 4096)})
    """Action tokens of one block."""

    num_state_per_block: int = field(default=1, metadata={LIMITS: (1, 256)})
    """State tokens of one block."""

    action_dim: int = 32
    """Padded width of one action."""

    max_state_dim: int = 64
    """Padded width of one state."""

    hidden_size: int = 1024
    """Hidden width of the action decoder and the state encoder."""

    def __post_init__(self) -> None:
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ConfigError(
                f"dim={self.dim} does not split into num_heads={self.num_heads} heads of even "
                "width; choose a dim that is a multiple of 2 * num_heads"
            )
        extra = self.out_dim + _MASK_CHANNELS if self.concat_first_frame_latent else 0
        if self.in_dim != self.out_dim + extra:
            raise ConfigError(
                f"in_dim={self.in_dim} but out_dim={self.out_dim} with concat_first_frame_latent="
                f"{self.concat_first_frame_latent} needs in_dim={self.out_dim + extra}"
            )

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return self.dim // self.num_heads


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The umT5 prompt encoder (docs/model.md, section 6.2)."""

    vocab: int = 256384
    """Rows of the token embedding."""

    dim: int = 4096
    """Width of the encoder; equals the transformer's ``text_dim``."""

    dim_attn: int = 4096
    """Width of all attention heads together."""

    dim_ffn: int = 10240
    """Hidden width of the gated feed-forward layers."""

    num_heads: int = field(default=64, metadata={LIMITS: (1, 1024)})
    """Attention heads; divides ``dim_attn``."""

    num_layers: int = field(default=24, metadata={LIMITS: (1, 1024)})
    """Encoder blocks."""

    num_buckets: int = field(default=32, metadata={LIMITS: (1, 4096)})
    """Buckets of the relative position bias, one table per block."""


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """The CLIP ViT-H/14 image encoder (docs/model.md, section 6.2)."""

    vision_dim: int = 1280
    """Width of the encoder; equals the transformer's ``clip_dim``."""

    vision_heads: int = field(default=16, metadata={LIMITS: (1, 1024)})
    """Attention heads."""

    vision_layers: int = field(default=32, metadata={LIMITS: (1, 1024)})
    """Blocks in the checkpoint; the last one is stored but never run."""

    vision_mlp_ratio: int = 4
    """Hidden width of the feed-forward layers over ``vision_dim``."""

    embed_dim: int = 1024
    """Width of the unused projection stored in the checkpoint."""

    image_size: int = field(default=224, metadata={LIMITS: (1, 4096)})
    """Height and width in pixels the frame is resized to."""

    patch_size: int = field(default=14, metadata={LIMITS: (1, 4096)})
    """Pixels along one side of an image token."""


@dataclass(frozen=True, kw_only=True)
class VaeConfig:
    """The causal video autoencoder, Wan 2.1 or Wan 2.2 (DreamZero model, appendix A)."""

    version: Literal["2.1", "2.2"]
    """Architecture: 2.1 for the 14B, 2.2 (residual shortcuts, folded pixels) for the 5B."""

    dim: int
    """Base width of the encoder."""

    z_dim: int
    """Latent channels."""

    dec_dim: int | None = None
    """Base width of the decoder; None for the encoder's."""

    dim_mult: tuple[int, ...] = field(default=(1, 2, 4, 4), metadata={LIMITS: (1, 64)})
    """Width of each stage over the base width."""

    num_res_blocks: int = field(default=2, metadata={LIMITS: (1, 64)})
    """Residual blocks of one encoder stage; the decoder has one more."""

    temporal_downsample: tuple[bool, ...] = (False, True, True)
    """Which of the downsampling stages also halve time."""

    @property
    def patch_size(self) -> int:
        """Return the pixels folded into channels along each side before the first convolution."""
        return 2 if self.version == "2.2" else 1

    @property
    def spatial_stride(self) -> int:
        """Return the pixels along one side of a latent pixel."""
        return self.patch_size << (len(self.dim_mult) - 1)

    @property
    def temporal_stride(self) -> int:
        """Return the frames of one latent frame, all but the first."""
        return 1 << sum(self.temporal_downsample)

    def latent_frames(self, frames: int) -> int:
        """Return the latent frames of a clip of ``frames`` frames."""
        return 1 + (frames - 1) // self.temporal_stride


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What surrounds the transformer: horizons, frame size, noise and LoRA options."""

    action_horizon: int = field(metadata={LIMITS: (1, 4096)})
    """Actions predicted by one call."""

    num_frames: int = field(default=33, metadata={LIMITS: (1, 65536)})
    """Frames of one training clip."""

    target_video_height: int | None = field(default=None, metadata={LIMITS: (1, 4096)})
    """Rows the tiled frame is resized to; None keeps it as it comes."""

    target_video_width: int | None = field(default=None, metadata={LIMITS: (1, 4096)})
    """Columns the tiled frame is resized to."""

    use_high_noise_emphasis: bool = False
    """Draw training noise levels from Beta(``high_noise_beta_alpha``, 1) instead of uniformly."""

    high_noise_beta_alpha: float = 3.0
    """First Beta parameter of the emphasis on high noise."""

    decouple_video_action_noise: bool = False
    """Draw each action's noise level by itself, the video's from a Beta distribution."""

    video_noise_beta_alpha: float = 3.0
    """First Beta parameter of decoupled video noise."""

    video_noise_beta_beta: float = 1.0
    """Second Beta parameter of decoupled video noise."""

    decouple_inference_noise: bool = False
    """Stop the video's inference noise at ``video_inference_final_noise`` instead of zero."""

    video_inference_final_noise: float = 0.8
    """Lowest video noise level of decoupled inference."""

    train_architecture: Literal["full", "lora"] = "full"
    """Whether the checkpoint holds full transformer weights or adapters."""

    lora_rank: int = field(default=4, metadata={LIMITS: (1, 4096)})
    """Rank of the adapters."""

    lora_alpha: float = 4.0
    """Scale of the adapters times their rank."""

    lora_target_modules: tuple[str, ...] = ("q", "k", "v", "o", "ffn.0", "ffn.2")
    """Name endings of the adapted layers."""

    init_lora_weights: str | bool = "kaiming"
    """How a new adapter is initialized."""

    def __post_init__(self) -> None:
        if (self.target_video_height is None) != (self.target_video_width is None):
            raise ConfigError(
                f"target_video_height={self.target_video_height} and "
                f"target_video_width={self.target_video_width}: give both or neither"
            )


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """A whole DreamZero network; see :meth:`from_dict` and :func:`preset`."""

    dit: DiTConfig
    """The transformer."""

    vae: VaeConfig
    """The video autoencoder."""

    head: HeadConfig
    """Horizons, frame size, noise and LoRA options."""

    text: TextConfig = field(default_factory=TextConfig)
    """The prompt encoder."""

    image: ImageConfig = field(default_factory=ImageConfig)
    """The image encoder."""

    def __post_init__(self) -> None:
        pairs = (
            ("dit.text_dim", self.dit.text_dim, "text.dim", self.text.dim),
            ("dit.clip_dim", self.dit.clip_dim, "image.vision_dim", self.image.vision_dim),
            ("dit.out_dim", self.dit.out_dim, "vae.z_dim", self.vae.z_dim),
        )
        wrong = [f"{a}={x} but {b}={y}" for a, x, b, y in pairs if x != y]
        if wrong:
            raise ConfigError(f"{'; '.join(wrong)}: these widths must be equal")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "NetworkConfig":
        """Return the config that a checkpoint's config.json describes; unknown keys are ignored.

        Raises:
            CheckpointError: A needed entry is missing, of the wrong type, or contradicts another.
        """
        try:
            return _read(cls, data)
        except (ConfigError, UnknownNameError) as error:
            raise CheckpointError(f"config.json describes no network: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return a config.json of the published shape that :meth:`from_dict` reads back equal."""
        return _written(self)

    def for_robot(self, robot: Embodiment) -> "NetworkConfig":
        """Return this network with the horizon, sample length and frame size of ``robot``.

        None of these changes the shape of a weight.
        """
        timing = robot.timing
        head = replace(
            self.head, action_horizon=timing.action_horizon, num_frames=timing.frames
        )  # fmt: skip
        rows, columns = self.target_size or robot.image_size
        step = self.size_multiple
        dit = replace(
            self.dit,
            num_action_per_block=timing.action_horizon,
            frame_seqlen=(rows // step) * (columns // step),
        )
        return replace(self, head=head, dit=dit)

    @property
    def target_size(self) -> tuple[int, int] | None:
        """Return (height, width) that tiled frames are resized to, None to keep them.

        Early 5B configs leave the size out and mean 176 x 320 (docs/model.md, section 3.1).
        """
        if self.head.target_video_height is not None and self.head.target_video_width is not None:
            return self.head.target_video_height, self.head.target_video_width
        return _OLD_5B_SIZE if self.dit.frame_seqlen in _OLD_5B_FRAME_TOKENS else None

    @property
    def size_multiple(self) -> int:
        """Return what height and width in pixels must be a multiple of."""
        return self.vae.spatial_stride * PATCH

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Return (rows, columns) of the latent of a frame of ``height`` x ``width`` pixels."""
        return height // self.vae.spatial_stride, width // self.vae.spatial_stride

    def check_size(self, height: int, width: int) -> None:
        """Raise :class:`ConfigError` unless frames of this size in pixels can be generated.

        Training crops an odd last latent row or column, inference cannot (docs/model.md, section
        7, row 10).
        """
        step = self.size_multiple
        if height % step or width % step or not (height and width):
            near = [max(step, (side + step // 2 - 1) // step * step) for side in (height, width)]
            raise ConfigError(
                f"frames of {height} x {width} pixels do not fit this network: both sides must be "
                f"multiples of {step}; the nearest size is {near[0]} x {near[1]}. Set it as "
                "target_video_height and target_video_width in the checkpoint's config.json, or "
                "as the size of the embodiment's views."
            )
        rows, columns = (side // PATCH for side in self.latent_size(height, width))
        if rows * columns != self.dit.frame_seqlen:
            raise ConfigError(
                f"frames of {height} x {width} pixels make {rows * columns} tokens, the network "
                f"expects frame_seqlen={self.dit.frame_seqlen}; resize the frames to the size it "
                "was trained on"
            )


_PRESETS: dict[str, NetworkConfig] = {
    "5b": NetworkConfig(
        dit=DiTConfig(
            model_type="ti2v", dim=3072, ffn_dim=14336, in_dim=48, out_dim=48, num_heads=24,
            num_layers=30, frame_seqlen=50, concat_first_frame_latent=False,
        ),
        vae=VaeConfig(version="2.2", dim=160, z_dim=48, dec_dim=256),
        head=HeadConfig(action_horizon=24, target_video_height=160, target_video_width=320),
    ),
    "14b": NetworkConfig(
        dit=DiTConfig(
            model_type="i2v", dim=5120, ffn_dim=13824, in_dim=36, out_dim=16, num_heads=40,
            num_layers=40, frame_seqlen=880,
        ),
        vae=VaeConfig(version="2.1", dim=96, z_dim=16),
        head=HeadConfig(action_horizon=24, target_video_height=352, target_video_width=640),
    ),
}  # fmt: skip


def preset(name: str) -> NetworkConfig:
    """Return the published ``5b`` or ``14b`` network."""
    return find(_PRESETS, "network", name)


_VAE_CLASSES: dict[str, VaeConfig] = {
    "WanVideoVAE": _PRESETS["14b"].vae,
    "WanVideoVAE38": _PRESETS["5b"].vae,
}


_WRITTEN_DIT_FIELDS = {
    "model_type", "dim", "ffn_dim", "in_dim", "out_dim", "num_heads", "num_layers", "frame_seqlen",
    "freq_dim", "eps", "max_chunk_size", "num_frame_per_block", "num_action_per_block",
    "num_state_per_block", "concat_first_frame_latent",
}  # fmt: skip


def _read(cls: type[NetworkConfig], data: Mapping[str, Any]) -> NetworkConfig:
    """Return the parsed config.json."""
    head = section(section(data, "action_head_cfg"), "config")
    dit = section(head, "diffusion_model_cfg")
    vae = section(head, "vae_cfg")
    vae_class = str(vae.get("_target_", "")).rpartition(".")[2]
    default_vae = find(_VAE_CLASSES, "autoencoder class in vae_cfg._target_", vae_class)
    # Older files leave the flag out; the channel counts say it.
    concat = {"concat_first_frame_latent": dit.get("in_dim") != dit.get("out_dim")}
    modules = head.get("lora_target_modules", HeadConfig.lora_target_modules)
    if isinstance(modules, str):
        modules = [name.strip() for name in modules.split(",") if name.strip()]
    return cls(
        dit=fill(DiTConfig, {**concat, **dit}, "diffusion_model_cfg"),
        text=fill(TextConfig, section(head, "text_encoder_cfg"), "text_encoder_cfg"),
        image=fill(ImageConfig, section(head, "image_encoder_cfg"), "image_encoder_cfg"),
        vae=fill(VaeConfig, {**values(default_vae), **vae}, "vae_cfg"),
        head=fill(HeadConfig, {**head, "lora_target_modules": modules}, "config"),
    )


def _written(config: NetworkConfig) -> dict[str, Any]:
    """Return ``config`` in the published shape; sizes at their published default are left out."""
    dit, head = config.dit, config.head
    sizes = {
        "action_dim": dit.action_dim,
        "action_horizon": head.action_horizon,
        "max_action_dim": dit.action_dim,
        "max_state_dim": dit.max_state_dim,
    }
    inner: dict[str, Any] = {
        "_target_": f"{_ACTION_HEAD}.WANPolicyHeadConfig",
        **sizes,
        **{key: plain(value) for key, value in values(head).items()},
        "lora_target_modules": ",".join(head.lora_target_modules),
        "num_frame_per_block": dit.num_frame_per_block,
        "skip_component_loading": True,
        "defer_lora_injection": False,
        "tiled": False,
        **_written_components(config),
    }
    return {
        "architectures": ["VLA"],
        "model_type": "vla",
        **sizes,
        "hidden_size": 0,
        "backbone_cfg": {"_target_": f"{_TARGET_ROOT}.backbone.identity.IdentityBackbone"},
        "action_head_cfg": {
            "_target_": f"{_ACTION_HEAD}.WANPolicyHead",
            "_convert_": "object",
            "config": inner,
        },
    }


def _written_components(config: NetworkConfig) -> dict[str, Any]:
    """Return the four sub-sections of the published head config."""
    vae_class = next(k for k, vae in _VAE_CLASSES.items() if vae.version == config.vae.version)
    # An impossible base width, so that both sizes are always written.
    vae_base = replace(_VAE_CLASSES[vae_class], dim=0, z_dim=0)
    dit_base = _PRESETS["14b" if config.vae.version == "2.1" else "5b"].dit
    dit = {k: v for k, v in values(config.dit).items() if k in _WRITTEN_DIT_FIELDS}
    sections = {
        "diffusion_model": (
            "wan_video_dit_action_casual_chunk.CausalWanModel",
            {**changed(config.dit, dit_base), **dit},
        ),
        "text_encoder": (
            "wan_video_text_encoder.WanTextEncoder",
            changed(config.text, TextConfig()),
        ),
        "image_encoder": (
            "wan_video_image_encoder.WanImageEncoder",
            changed(config.image, ImageConfig()),
        ),
        "vae": (f"wan_video_vae.{vae_class}", changed(config.vae, vae_base)),
    }
    return {
        f"{kind}_cfg": {
            "_convert_": "object",
            "_target_": f"{_TARGET_ROOT}.modules.{name}",
            f"{kind}_pretrained_path": None,
            **entries,
        }
        for kind, (name, entries) in sections.items()
    }


_PROMPTS = 2
"""Cached rows per session: with and without guidance."""


def session_bytes(config: NetworkConfig, itemsize: int) -> int:
    """Return the bytes of keys and values of one session's history, ``itemsize`` a number."""
    dit = config.dit
    frames = 1 + max(dit.max_chunk_size, 1) * dit.num_frame_per_block
    tokens = frames * dit.frame_seqlen + dit.num_action_per_block + dit.num_state_per_block
    return itemsize * _PROMPTS * 2 * dit.num_layers * tokens * dit.dim


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How actions are generated; the defaults are the published ones."""

    dit_steps: int | Literal["dynamic"] = 8
    """How many of the solver steps run the transformer; ``dynamic``: as results change."""

    solver_steps: int = 16
    """Steps of the solver."""

    solver: Solver = "unipc"
    """Which solver; ``euler`` for distilled networks."""

    cfg_scale: float = 5.0
    """Guidance of the video; 1 leaves out the negative prompt and half the work."""

    seed: int = 1140
    """Seed of the noise that every call starts from."""

    history: History = "recent"
    """``off``: only the newest frame is used; else earlier frames of the episode are remembered."""

    video: Video = "full"
    """What is computed of the video."""

    prompt_rows: PromptRows = "own"
    """``cut``: of sessions that run as one batch, prompts are zero from the length of the shortest
    on, as in the published code; for experiments."""

    def __post_init__(self) -> None:
        if self.dit_steps == "dynamic" and self.video != "full":
            raise ConfigError(
                f"dit_steps='dynamic' goes by how the predicted video changes from step to step, "
                f"and video={self.video!r} predicts none: give a number of steps, such as 5 or 8"
            )

    @property
    def remembers(self) -> bool:
        """Return whether earlier frames of the episode are remembered."""
        return self.history != "off"

    @property
    def prompts(self) -> int:
        """Return how many prompts condition a call."""
        return 1 if self.cfg_scale == 1 or self.video != "full" else 2

    def window(self, config: DiTConfig) -> int:
        """Return the latent frames after which history is dropped."""
        return config.max_chunk_size * config.num_frame_per_block + 1

    def cached_frames(self, config: DiTConfig) -> int:
        """Return the most latent frames that one call attends, the generated ones included."""
        block = config.num_frame_per_block
        blocks = max(0, self.window(config) - 2) // block if self.remembers else 0
        return 1 + (blocks + 1) * block
