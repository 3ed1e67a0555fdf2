"""How a DreamZero policy acts, and where its weights come from."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dzrobot.embodiments.spec import Embodiment, History
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.checkpoints.load import Adapters
from dzrobot.policies.dreamzero.network.prompting import PromptRows
from dzrobot.policies.dreamzero.network.session import GenerateOptions


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """How a policy acts; the defaults are those of the published servers."""

    execute: int | None = None
    """Actions of each plan that are executed before the next one; None for the embodiment's number,
    which is all of them unless it says otherwise."""

    history: History | None = None
    """Frames the network is shown of what happened, see :func:`.episode.frame_offsets`; None for
    the embodiment's."""

    dit_steps: int | Literal["dynamic"] = 8
    """Solver steps, of 16, that run the transformer."""

    cfg_scale: float | None = None
    """Guidance of the predicted video; 1 leaves out the negative prompt and half the work. None for
    the embodiment's."""

    seed: int = 1140
    """Of the noise every plan starts from."""

    noise: Literal["fixed", "keyed", "slot"] = "fixed"
    """``fixed``: the same noise for every plan, as published, drawn on the network's device and in
    its dtype. ``keyed``: a function of seed, episode and plan, the same on every device. ``slot``:
    as published for many environments at once: drawn like ``fixed``, but for ``noise_slots`` of
    them together, and each keeps its row. A session keeps its slot from episode to episode, and a
    new one takes the first that is free; of an episode with a number, it is the remainder."""

    noise_slots: int = 64
    """Rows of ``slot`` noise; on some devices the numbers depend on how many are drawn."""

    prompt_rows: PromptRows = "own"
    """``cut``: prompts of sessions that plan in one call are zero from the length of the shortest
    on, as in the published code; for experiments."""

    max_sessions: int = 64
    """Sessions that may be open at a time; none is ever dropped silently."""

    independent: bool = False
    """Whether batch calls run session by session: the numbers then do not depend, not even in the
    last bits, on which sessions share a call."""

    def __post_init__(self) -> None:
        for name in ("max_sessions", "noise_slots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.execute is not None and self.execute < 1:
            raise ConfigError(
                f"execute={self.execute} must be at least 1, or None for the embodiment's number"
            )

    def for_robot(self, robot: Embodiment) -> "PolicyOptions":
        """Return these options with what they leave to the embodiment filled in.

        Raises:
            ConfigError: More actions are to be executed than are planned.
        """
        horizon = robot.timing.action_horizon
        if self.execute is not None and self.execute > horizon:
            raise ConfigError(
                f"execute={self.execute} but only {horizon} actions are planned at a time; "
                f"choose 1 to {horizon}"
            )
        return replace(
            self,
            execute=self.execute or robot.execute or horizon,
            cfg_scale=robot.cfg_scale if self.cfg_scale is None else self.cfg_scale,
            history=self.history or robot.history,
        )

    @property
    def generate(self) -> GenerateOptions:
        """Return what the network is told of them."""
        options = GenerateOptions(
            dit_steps=self.dit_steps,
            seed=self.seed,
            history=self.history != "off",
            prompt_rows=self.prompt_rows,
        )
        return options if self.cfg_scale is None else replace(options, cfg_scale=self.cfg_scale)


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """Where weights come from beyond the checkpoint itself."""

    config_from: str | Path | None = None
    """Folder with config.json and experiment_cfg, where the checkpoint has none."""

    base: str | Path | tuple[str | Path, ...] | None = None
    """Base checkpoint, or Wan component folders, of a checkpoint of trained tensors alone."""

    adapters: Adapters = "merge"
    """Whether LoRA matrices are merged into the weights."""
