"""LeRobot's processors of a DreamZero policy: names, batches, devices; no number changes."""

from typing import Any

from lerobot.processor import (
    PolicyProcessorPipeline,
    make_default_policy_processor_steps,
    make_policy_processor_pipelines,
)

from lerobot_policy_dreamzero.configuration_dreamzero import LeRobotDreamZeroConfig

Pipelines = tuple[PolicyProcessorPipeline[Any, Any], PolicyProcessorPipeline[Any, Any]]
"""Before and after the policy."""


def make_dreamzero_pre_post_processors(
    config: LeRobotDreamZeroConfig, dataset_stats: object = None
) -> Pipelines:
    """Return the processors; LeRobot finds them by this name.

    Args:
        config: Of the policy.
        dataset_stats: Not read: dzrobot normalizes with the checkpoint's statistics.
    """
    steps = make_default_policy_processor_steps(config, None)
    before, after = make_policy_processor_pipelines(
        [steps.rename_observations, steps.add_batch_dim, steps.normalize, steps.to_device],
        [steps.unnormalize, steps.to_cpu],
    )
    return before, after
