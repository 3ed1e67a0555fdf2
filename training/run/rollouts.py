"""Evaluation in the loop: what the checkpoint of a step does in an environment."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from dzrobot.rollout.evaluation.evaluate import Evaluation, RunOptions, evaluate, prepare
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec
from dzrobot.training.run.checkpoint import step_folder
from dzrobot.training.run.plots import SUCCESS
from dzrobot.training.run.process_groups import DistributedEnvironment
from dzrobot.training.sft_config import SFTConfig


def evaluate_rollouts(
    config: SFTConfig, world: DistributedEnvironment, step: int
) -> Mapping[str, float]:
    """Return success and episodes of the policy saved at ``step``. Collective; the main one acts.

    The policy is opened from its checkpoint, as a user would: what is measured is what was saved.
    A second network lies in the memory of the main process meanwhile.

    Args:
        config: Of the run; names the environment and the episodes.
        world: The processes.
        step: Whose checkpoint is complete.
    """
    found: list[Any] = [None]
    if world.is_main:
        found = [_acted(config, str(world.device), step)]
    dist.broadcast_object_list(found, src=0, group=world.host_group)
    numbers: Mapping[str, float] = found[0]
    return numbers


def _acted(config: SFTConfig, device: str, step: int) -> dict[str, float]:
    runner = config.runner
    spec = EvalSpec(
        protocol=PROTOCOLS["custom"], env=runner.rollout_env, episodes=runner.rollout_episodes,
        seed=runner.seed,
    )  # fmt: skip
    policy = PolicySpec(
        name=str(step_folder(runner.output_dir, step)), embodiment=config.model.embodiment_tag,
        device=device,
    )  # fmt: skip
    prepared = prepare(Evaluation(spec=spec, policy=policy))
    folder = runner.output_dir / "rollouts" / f"step_{step:08d}"
    options = RunOptions(workers=0, videos="failures")
    total = evaluate(prepared, folder, options).total
    return {
        SUCCESS: total.successes / max(1, total.episodes),
        "rollout/episodes": total.episodes,
        "rollout/errors": total.errors,
    }
