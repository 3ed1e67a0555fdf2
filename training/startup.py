"""What a run says about itself before its first step."""

from dzrobot.training.parallel import shard_table
from dzrobot.training.parts import Parts


def describe(parts: Parts, step: int) -> str:
    """Return the data, the parallel plan, the shard table and the size of the run, as text."""
    config, world = parts.config, parts.world
    parallel, runner = config.parallel, config.runner
    trained = sum(parameter.numel() for parameter in parts.optimizer.named.values())
    lines = [
        parts.recordings.train.report(),
        f"processes {world.size} on {world.device.type}, strategy {parallel.strategy}, weights "
        f"{parallel.param_dtype}, "
        f"sums {parallel.reduce_dtype}, recompute {parallel.activation_checkpointing}, compile "
        f"{parallel.compile}, "
        f"offload {parallel.cpu_offload}",
        f"global batch {runner.global_batch_size} = {runner.micro_batch_size} x {world.size} "
        "processes x "
        f"{config.accumulation(world.size)} accumulated; steps {step} to {runner.max_steps}",
        f"trained parameters {trained:,}",
        *_table(parts),
    ]
    return "\n".join(lines)


def _table(parts: Parts) -> list[str]:
    rows = shard_table(parts.model.model)
    shown: list[str] = []
    previous: tuple[int, int] | None = None
    for name, whole, local in rows:
        # Equal blocks are said once.
        if (whole, local) == previous:
            continue
        count = sum(row[1:] == (whole, local) for row in rows)
        shown.append(f"  {name:<12} x {count:<3} {whole:>16,} parameters, {local:>16,} here")
        previous = (whole, local)
    return ["sharding units:", *shown]
