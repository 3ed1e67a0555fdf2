"""Evaluation during training: action errors on held-out and own windows, success in simulation.

Open loop, windows of held-out episodes are denoised from pure noise; every block is given the
recorded past, as in training. That needs nothing but the training forward pass, so it runs sharded
and batched.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dzrobot.documents import shorten
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError, DzrobotError
from dzrobot.policies.dreamzero.network.diffusion import inference_schedule
from dzrobot.policies.dreamzero.network.dit import Controls, TrainInputs
from dzrobot.policies.dreamzero.network.world_action import PreparedBatch
from dzrobot.rng import numpy_generator
from dzrobot.rollout.evaluation.evaluate import evaluate, merge
from dzrobot.rollout.evaluation.planning import EvaluationRequest, RunOptions, prepare
from dzrobot.rollout.evaluation.report import Summary
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec
from dzrobot.training.data import (
    CollatedBatch,
    LoaderOptions,
    LoaderPlan,
    SampleKey,
    TrainingData,
    build_loader,
    read_batches,
)
from dzrobot.training.data.plan_errors import DOES_ITS_DATA, OwnRows
from dzrobot.training.run.build import TrainingComponents
from dzrobot.training.run.checkpoint import step_folder
from dzrobot.training.run.inputs import sample_noise
from dzrobot.training.run.loggers import SUCCESS
from dzrobot.training.run.parallel import DistributedEnvironment
from dzrobot.training.sft_config import SFTConfig

TRAINING_DATA = "training data"


class RolloutTimeoutError(DzrobotError):
    """A process took much longer than another one for its share of the rollouts."""


@torch.no_grad()
def evaluate_open_loop(components: TrainingComponents) -> dict[str, float]:
    """Return the mean absolute action error over held-out windows; collective.

    Names are ``open_loop/<part>/<dimension>`` (mean over the horizon) and
    ``open_loop/<part>/step_<i>`` (mean over dimensions), both in physical units.
    """
    data = components.datasets.held_out
    if data is None:
        raise ConfigError("no episodes are held out to compare with: set data.holdout_episodes")
    inputs = components.inputs.held_out(data)
    sums: dict[str, NDArray[np.float64]] = {}
    counts: dict[str, int] = {}
    for batch in _batches(components, data):
        prepared = inputs.prepare(batch)
        predicted = predict_actions(components, prepared, batch)
        for key, error in action_errors(data, batch, predicted):
            sums[key] = sums.get(key, np.zeros(error.shape)) + error
            counts[key] = counts.get(key, 0) + 1
    gathered = components.world.gathered((sums, counts))
    components.model.model.reshard()  # type: ignore[operator]
    return dict(_named(gathered))


def _batches(components: TrainingComponents, data: TrainingData) -> Iterator[CollatedBatch]:
    runner, world = components.config.runner, components.world
    whole = runner.micro_batch_size * world.size
    steps = -(-runner.eval_windows // whole)
    plan = LoaderPlan(
        global_batch=whole, micro_batch=runner.micro_batch_size, rank=world.rank,
        world_size=world.size, stop_step=steps,
    )  # fmt: skip
    return iter(build_loader(data, plan))


def predict_actions(
    components: TrainingComponents, prepared: PreparedBatch, batch: CollatedBatch
) -> Tensor:
    """Return denoised actions (B, A, 32) in [-1, 1] for every block of a micro-batch."""
    noise = sample_noise(
        components.network, prepared, components.config.runner.seed, -1, batch["slot"].tolist()
    )
    distilled = components.config.distill.to_steps
    schedule = (
        inference_schedule() if distilled is None else inference_schedule(distilled, solver="euler")
    )
    video, action = schedule.start(noise.video_BCFYX), schedule.start(noise.action_BAM)
    frames, actions = noise.frame_index_BF.shape, noise.action_index_BA.shape
    for timestep in schedule.timesteps:
        inputs = TrainInputs(
            noisy_BCFYX=video.sample,
            clean_BCFYX=prepared.latents_BCFYX,
            timestep_BF=torch.full(frames, float(timestep), device=video.sample.device),
            controls=Controls(
                action_BAM=action.sample,
                timestep_BA=torch.full(actions, float(timestep), device=video.sample.device),
                state_BSM=prepared.state_BSM,
                conditions=prepared.conditions,
            ),
            prompting=prepared.prompting,
            first_frame_BCFYX=prepared.first_frame_BCFYX,
        )
        velocity_video, velocity_action = components.model.model(inputs)
        rows, columns = velocity_video.shape[-2:]
        full = torch.zeros_like(video.sample)
        full[..., :rows, :columns] = velocity_video
        video.step(full)
        action.step(velocity_action.float())
    return action.sample.clamp(-1, 1)


def action_errors(
    data: TrainingData, batch: CollatedBatch, predicted: Tensor
) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield (``tag/action key``, absolute error) of every block of every sample.

    Args:
        data: What the batch was read from.
        batch: From the loader.
        predicted: Actions (B, A, 32) in [-1, 1], as ``batch["action"]``.

    Yields:
        The error is (horizon, dim) in the robot's own units, against what was recorded.
    """
    for i, number in enumerate(batch["sample_id"].tolist()):
        index, reader, window = data.locate(number)
        source = data.sources[index]
        robot, raw = source.spec.embodiment, reader.vectors(window)
        own = robot.timing.action_horizon
        # In a mixture, blocks are filled up to the longest horizon.
        blocks = predicted[i].reshape(robot.timing.blocks, -1, predicted.shape[-1])[:, :own].cpu()
        for block in range(robot.timing.blocks):
            state = {key: raw[key][block] for key in robot.state_keys}
            decoded = source.pipeline.decode(blocks[block], state)
            for key, values in decoded.items():
                recorded = raw[key][block * own : (block + 1) * own]
                yield f"{robot.tag}/{key}", np.abs(values.astype(np.float64) - recorded)


def _named(
    gathered: list[tuple[dict[str, NDArray[np.float64]], dict[str, int]]],
) -> Iterator[tuple[str, float]]:
    keys = sorted({key for sums, _ in gathered for key in sums})
    for key in keys:
        total = sum(counts.get(key, 0) for _, counts in gathered)
        mean = np.sum([sums[key] for sums, _ in gathered if key in sums], axis=0) / total
        yield f"open_loop/{key}/mean", float(mean.mean())
        for step, value in enumerate(mean.mean(axis=1)):
            yield f"open_loop/{key}/step_{step:02d}", float(value)
        for dim, value in enumerate(mean.mean(axis=0)):
            yield f"open_loop/{key}/dim_{dim:02d}", float(value)


@dataclass(frozen=True, kw_only=True)
class OwnData:
    """Whether the policy does its data."""

    of: str
    """Which data: ``held-out episodes`` or ``training data``."""

    samples: int
    rows: Mapping[str, OwnRows]
    """By robot: normalized actions, relative parts measured from the state."""

    robots: Mapping[str, Embodiment]

    @property
    def numbers(self) -> dict[str, float]:
        """Return the error over the mean action's, ``own_rows/<robot>/<part>/dim_<i>``.

        ``share`` is the median over the numbers that vary. Of held-out episodes, the names begin
        with ``held_out_rows``.
        """
        name = "own_rows" if self.of == TRAINING_DATA else "held_out_rows"
        found = {}
        for tag, rows in self.rows.items():
            shares = iter(rows.shares)
            for part in self.robots[tag].action:
                for dim in range(part.dim):
                    found[f"{name}/{tag}/{part.key}/dim_{dim:02d}"] = float(next(shares))
            found[f"{name}/{tag}/share"] = rows.share
        return found

    @property
    def does_it(self) -> bool:
        """Return whether it does, as every robot."""
        return all(rows.does_its_data for rows in self.rows.values())

    @property
    def sentence(self) -> str:
        """Return what was found, for a person."""
        found = " and ".join(f"{rows.share:.2f} as {tag}" for tag, rows in self.rows.items())
        words = (
            f"on {self.samples} samples of the {self.of} the first planned action has {found} of "
            f"the error of the mean action (up to {DOES_ITS_DATA}: it does its data)"
        )
        if self.does_it:
            return f"the policy does its data: {words}"
        return (
            f"the policy does not do its data: {words}. Train longer, or look for what differs: "
            "`dzrobot doctor policy`"
        )


@torch.no_grad()
def ask_about_own_data(components: TrainingComponents) -> OwnData | None:
    """Compare first actions with recorded ones and with the mean action; collective.

    The samples are always the same ones, drawn by a generator of their own.

    Args:
        components: The run's.

    Returns:
        None where ``runner.own_rows`` is 0, or no sample has actions.
    """
    held_out, config, world = components.datasets.held_out, components.config, components.world
    data = components.datasets.train if held_out is None else held_out
    inputs = components.inputs.unchanged()
    if held_out is not None:
        inputs = components.inputs.held_out(held_out)
    keys = _fixed_samples(data, config.runner.own_rows)
    if not keys:
        return None
    size = config.runner.micro_batch_size
    whole = size * world.size
    # All processes compute equally often: what is missing at the end is repeated and not counted.
    filled = [
        keys[at % len(keys)]._replace(slot=at) for at in range(-(-len(keys) // whole) * whole)
    ]
    mine = [filled[at + world.rank * size :][:size] for at in range(0, len(filled), whole)]
    planned: dict[str, list[NDArray[np.float32]]] = {}
    recorded: dict[str, list[NDArray[np.float32]]] = {}
    for batch in read_batches(data, mine, LoaderOptions()):
        predicted = predict_actions(components, inputs.prepare(batch), batch)
        for at in np.flatnonzero(batch["slot"].numpy() < len(keys)):
            robot = data.sources[int(batch["source"][at])].spec.embodiment
            timing, dim = robot.timing, robot.action_dim
            for into, values in ((planned, predicted), (recorded, batch["action"])):
                blocks = values[at].reshape(timing.blocks, -1, values.shape[-1])
                own = blocks[:, : timing.action_horizon, :dim].float().cpu().numpy()
                into.setdefault(robot.tag, []).append(own)
    gathered = world.gathered((planned, recorded))
    components.model.model.reshard()  # type: ignore[operator]
    return OwnData(
        of=TRAINING_DATA if held_out is None else "held-out episodes", samples=len(keys),
        rows=_beside(gathered),
        robots={one.spec.embodiment.tag: one.spec.embodiment for one in data.sources},
    )  # fmt: skip


def _fixed_samples(data: TrainingData, count: int) -> list[SampleKey]:
    """Return up to ``count`` samples whose actions are imitated, the same for equal data."""
    imitated = [source.spec.is_imitated for source in data.sources]
    if not any(imitated):
        return []
    draw = numpy_generator("own rows", data.seed)
    drawn = draw.choice(len(data), min(len(data), 4 * count), replace=False).tolist()
    acting = [one for one in drawn if imitated[data.locate(one)[0]]]
    return [SampleKey(-1, slot, number) for slot, number in enumerate(sorted(acting[:count]))]


def _beside(
    gathered: list[
        tuple[dict[str, list[NDArray[np.float32]]], dict[str, list[NDArray[np.float32]]]]
    ],
) -> dict[str, OwnRows]:
    found = {}
    for tag in sorted({tag for planned, _ in gathered for tag in planned}):
        planned, recorded = (
            np.concatenate([one for part in gathered for one in part[which].get(tag, [])])
            for which in (0, 1)
        )
        every = recorded.reshape(-1, recorded.shape[-1]).astype(np.float64)
        found[tag] = OwnRows(
            planned=planned.astype(np.float64), recorded=recorded.astype(np.float64), every=every
        )
    return found


def evaluate_rollouts(
    config: SFTConfig, world: DistributedEnvironment, step: int
) -> Mapping[str, float]:
    """Return success and episodes of the policy saved at ``step``. Collective.

    Every process opens the policy from its checkpoint, as a user would, and runs its share of the
    episodes. On an accelerator the policy takes only memory that training leaves free; the weights
    that do not fit wait on the host.

    Args:
        config: The run's; names the environment and the episodes.
        world: The processes.
        step: A step whose checkpoint is complete.

    Raises:
        RolloutTimeoutError: A process is not done ``runner.rollout_timeout_min`` after another.
        DzrobotError: What a process raised while it evaluated.
    """
    folder = config.runner.output_dir / "rollouts" / f"step_{step:08d}"
    parts = [folder / f"rank_{rank}" for rank in range(world.size)] if world.size > 1 else [folder]
    outcome: Summary | DzrobotError
    try:
        outcome = _run_share(config, world, step, parts[world.rank])
    except DzrobotError as error:
        outcome = error
    _wait_for_all(config, world)
    for found in world.gathered(outcome):
        if isinstance(found, DzrobotError):
            raise found
    if world.size > 1:
        outcome = world.from_main(merge(folder, parts) if world.is_main else outcome)
    if isinstance(outcome, DzrobotError):
        raise outcome
    total = outcome.total
    return {
        SUCCESS: total.successes / max(1, total.episodes),
        "rollout/episodes": total.episodes,
        "rollout/errors": total.errors,
    }


def _run_share(
    config: SFTConfig, world: DistributedEnvironment, step: int, folder: Path
) -> Summary:
    runner = config.runner
    spec = EvalSpec(
        protocol=PROTOCOLS["custom"], env=runner.rollout_env, episodes=runner.rollout_episodes,
        seed=runner.seed,
    )  # fmt: skip
    policy = PolicySpec(
        name=str(step_folder(runner.output_dir, step)), embodiment=config.model.embodiment_tag,
        device=str(world.device), memory=_free_memory(world.device),
    )  # fmt: skip
    prepared = prepare(EvaluationRequest(spec=spec, policy=policy))
    options = RunOptions(workers=0, videos="failures", shard=(world.rank, world.size))
    return evaluate(prepared, folder, options)


def _free_memory(device: torch.device) -> int | None:
    """Return the bytes that training leaves on an accelerator; None on a processor."""
    if device.type != "cuda":
        return None
    # What training's allocator keeps for its next step is free for now.
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _wait_for_all(config: SFTConfig, world: DistributedEnvironment) -> None:
    minutes = config.runner.rollout_timeout_min
    try:
        dist.monitored_barrier(
            world.host_group, timedelta(minutes=minutes), wait_all_ranks=world.is_main
        )
    except RuntimeError as error:
        raise RolloutTimeoutError(
            f"not every process finished its rollouts within {minutes} minutes of the first: "
            f"{shorten(str(error))}. The checkpoint of this step is complete; resume with a larger "
            "runner.rollout_timeout_min, or fewer runner.rollout_episodes."
        ) from error
