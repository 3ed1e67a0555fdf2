"""What the processes of one torchrun launch do; results go to a file for the tests to judge.

torchrun --nproc-per-node 2 train_worker.py WORLD OUTPUT SCENARIO [SCENARIO ...]
"""

import collections
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import train_worlds
from torch.utils._python_dispatch import TorchDispatchMode

from dzrobot.policies.dreamzero.network import recorded_blocks as recorded
from dzrobot.training.run import evaluation
from dzrobot.training.run.build import build
from dzrobot.training.run.checkpoint import choose_checkpoint, training_state
from dzrobot.training.run.export import TrainedSource, export
from dzrobot.training.run.launch import end_process
from dzrobot.training.run.optimizer import global_norm
from dzrobot.training.run.parallel import init_distributed
from dzrobot.training.run.trainer import Trainer


def trainer(world, root, **changes):
    return Trainer(build(train_worlds.config(root, **changes), world))


def gradients(run, steps=1):
    """Return loss and every whole gradient of the first step, nothing updated."""
    losses, _ = run.accumulate(run.batches(steps))
    dist.all_reduce(losses)
    found = {}
    for name, parameter in run.components.optimizer.named.items():
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return losses, {name: gradient.clone() for name, gradient in found.items()}


def save_gradients(world, output, name, run):
    losses, found = gradients(run)
    if world.is_main:
        torch.save({"losses": losses, "gradients": found}, output / f"{name}.pt")


def digest(run):
    """Return one hash of trained weights, moments and count of updates."""
    state = training_state(run.components.optimizer, run.components.ema)
    parts = [state["updates"]]
    for name in sorted(state["model"]):
        parts += [state["model"][name], *state["optim"][name].values()]
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in parts]
    return hashlib.sha256(b"".join(t.cpu().numpy().tobytes() for t in whole)).hexdigest()


def hybrid_gradients(world, root, output):
    """Gradients of one global batch, sharded over groups of two processes."""
    changes = {"parallel__strategy": "hsdp", "parallel__shard_size": 2}
    save_gradients(world, output, f"w{world.size}-hsdp", trainer(world, root, **changes))
    return {}


def more_gradients(world, root, output):
    """The same sharded over all, replicated, and under what only changes how memory is used."""
    size = f"w{world.size}"
    for name, changes in (
        ("plain", {}),
        ("ddp", {"parallel__strategy": "ddp"}),
        ("selective", {"parallel__activation_checkpointing": "selective"}),
        ("mbs2", {"runner__micro_batch_size": 2}),
        ("full", {"parallel__activation_checkpointing": "full"}),
        ("offload", {"parallel__cpu_offload": True}),
        (
            "graphs",
            {"parallel__activation_checkpointing": "full", "parallel__cuda_graphs": "blocks"},
        ),
    ):
        save_gradients(world, output, f"{size}-{name}", trainer(world, root, **changes))
    return {}


PUT_OFF = {
    "each": {"parallel__enable_gradient_accumulation": False},
    "last": {"parallel__enable_gradient_accumulation": True},
    "last, weights kept": {
        "parallel__enable_gradient_accumulation": True, "parallel__reshard_after_backward": False,
    },
}  # fmt: skip
"""Ways to accumulate the gradients of a step; ``last`` is what a small network does by itself."""


def collectives(world, root, output):
    """What a step of two micro-batches communicates, its loss and gradients; keeps those of one."""
    found, first = {}, None
    for name, changes in PUT_OFF.items():
        run = trainer(world, root, runner__global_batch_size=2 * world.size, **changes)
        with Collectives() as seen:
            losses, _ = run.accumulate(run.batches(1))
        gradients = {n: whole(p.grad) for n, p in run.components.optimizer.named.items()}
        gradient = torch.cat([each.flatten() for each in gradients.values()])
        first = gradient if first is None else first
        error = ((gradient - first).norm() / first.norm()).item()
        found[name] = {"counts": seen.counts, "losses": losses.tolist(), "error": error}
        if name == "last":
            dist.all_reduce(losses)
            kept = {"losses": losses, "gradients": gradients}
            if world.is_main:
                torch.save(kept, output / f"w{world.size}-fsdp.pt")
    return found


def parameters(run):
    return run.components.optimizer.named.values()


def six_steps(world, root, output):
    """Six steps of twelve samples each, however gradients are summed; weights beside the first."""
    hybrid = {"parallel__strategy": "hsdp", "parallel__shard_size": 2}
    layouts = {"fsdp": {}, "hsdp": hybrid, "ddp": {"parallel__strategy": "ddp"}}
    found, start, first = [], None, None
    for layout, put_off in (
        ("fsdp", False), ("fsdp", True), ("fsdp", True), ("hsdp", False), ("hsdp", "replicas"),
        ("hsdp", True), ("ddp", False), ("ddp", True),
    ):  # fmt: skip
        run = trainer(
            world, root, runner__global_batch_size=12, **layouts[layout],
            parallel__enable_gradient_accumulation=put_off,
        )  # fmt: skip
        start = flat(run) if start is None else start
        batches, losses = run.batches(6), []
        for _ in range(6):
            run.train_step(batches)
            run.step += 1
            losses.append(run.components.metrics.record(run.step).loss)
        weights = flat(run)
        first = weights if first is None else first
        error = ((weights - first).norm() / (first - start).norm()).item()
        found.append([layout, put_off, losses, error, digest(run)])
    return {"runs": found}


def flat(run):
    return torch.cat([whole(parameter).flatten() for parameter in parameters(run)])


class Collectives(TorchDispatchMode):
    """Counts what torch asks of a process group, by torch's names."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.name().removeprefix("c10d::").strip("_")] += 1
        return func(*args, **(kwargs or {}))


def clipping(world, root, output):
    """The norm that every rank sees, and what is left after clipping."""
    run = trainer(world, root, optim__clip_grad=0.01)
    gradients(run)
    optimizer = run.components.optimizer
    outcome = optimizer.step()
    # After one step the first moment is (1 - beta1) of the gradient that was used.
    moments = global_norm(both["exp_avg"] for both in optimizer.moments().values())
    used = moments.item() / (1 - run.components.config.optim.adam_beta1)
    norms = [None] * world.size
    dist.all_gather_object(norms, outcome.grad_norm.item())
    return {"norms": norms, "clipped": used}


def precision(world, root, output):
    """Dtypes seen in a block, of masters, gradients and moments."""
    run = trainer(world, root, parallel__param_dtype="bf16")
    block = run.components.model.model.blocks[0]
    seen = {}

    def look(module, args):
        seen["input"] = str(args[0].dtype)
        seen["weight"] = str(module.weight.dtype)

    times = []
    block.ffn[0].register_forward_pre_hook(look)
    action_encoder = run.components.model.model.action_encoder
    action_encoder.register_forward_pre_hook(lambda _, args: times.append(str(args[1].dtype)))
    gradients(run)
    parameter = run.components.optimizer.named["blocks.0.ffn.0.weight"]
    moments = run.components.optimizer.moments()["blocks.0.ffn.0.weight"]
    group = block._get_fsdp_state()._fsdp_param_group
    return {
        **seen, "timestep": times[0], "master": str(parameter.dtype),
        "gradient": str(parameter.grad.dtype), "moment": str(moments["exp_avg"].dtype),
        "reduce": str(group.mp_policy.reduce_dtype),
    }  # fmt: skip


def poisoned(world, root, output):
    """One rank's gradient is not a number in step 2: all skip it, nothing moves."""
    folder = output / f"poisoned-{world.size}"
    run = trainer(world, root, runner__output_dir=folder)
    corrupt(run, lambda: run.step == 1 and world.rank == world.size - 1)
    batches = run.batches(8)
    digests = []
    for _ in range(4):
        run.train_step(batches)
        run.step += 1
        digests.append(digest(run))
    line = run.components.metrics.record(4)
    updates = run.components.optimizer.updates.item()
    return {"digests": digests, "skips": line.skips, "updates": updates, "loss": line.loss}


def corrupt(run, when):
    """Make the latents of every micro-batch not a number while ``when()``."""
    prepare = run.prepare

    def corrupted(batch):
        prepared = prepare(batch)
        if not when():
            return prepared
        return dataclasses.replace(prepared, latents_BCFYX=prepared.latents_BCFYX * float("nan"))

    run.prepare = corrupted


def gives_up(world, root, output):
    """Every gradient is not a number: the run ends and names the samples."""
    changes = {"optim__max_skips": 2, "runner__output_dir": output / f"gives-up-{world.size}"}
    run = trainer(world, root, **changes)
    corrupt(run, lambda: True)
    before = digest(run)
    try:
        run.run()
    except RuntimeError as error:
        return {"error": f"wrong kind: {error}"}
    except Exception as error:  # noqa: BLE001
        return {"error": str(error), "kind": type(error).__name__, "same": before == digest(run)}
    return {"error": None}


STEPS = 2
"""Of the runs that are resumed in the middle, and of the one that is not."""


def straight(world, root, output):
    """All steps without a break."""
    folder = output / f"straight-{world.size}"
    run = trainer(world, root, runner__output_dir=folder, runner__max_steps=STEPS)
    run.run()
    return {"digest": digest(run)}


def first_half(world, root, output):
    """The first half of the steps; the checkpoint is written in the background."""
    folder = output / "halves"
    run = trainer(world, root, runner__output_dir=folder, runner__max_steps=STEPS)
    batches = run.batches(STEPS)
    for _ in range(STEPS // 2):
        run.train_step(batches)
        run.step += 1
    before = digest(run)
    run.save(wait=False)
    # The copy must not see what follows.
    for parameter in run.components.optimizer.named.values():
        parameter.data.mul_(2)
    run._checkpoints.finish()
    return {"digest": before}


def second_half(world, root, output):
    """The second half, by a trainer that knows nothing of the first."""
    folder = output / f"halves-{world.size}"
    if world.is_main:
        shutil.copytree(output / "halves", folder)
    dist.barrier()
    changes = {"runner__output_dir": folder, "runner__resume_dir": "auto"}
    run = trainer(world, root, **changes, runner__max_steps=STEPS)
    run.resume()
    restored = digest(run)
    run.run()
    return {"restored": restored, "digest": digest(run), "step": run.step}


def three(world, root, output):
    """Restore what two processes saved in three."""
    changes = {"runner__resume_dir": output / "halves", "runner__global_batch_size": 3}
    run = trainer(world, root, **changes, runner__max_steps=STEPS)
    run.resume()
    return {"restored": digest(run)}


def eight_bit(world, root, output):
    """Moments in eight bits: one step, saved; the next by the same trainer and by another."""
    folder = output / "eight-bit"
    changes = {"runner__output_dir": folder, "optim__moments": "8bit", "runner__max_steps": STEPS}
    run = trainer(world, root, **changes)
    batches = run.batches(STEPS)
    run.train_step(batches)
    run.step += 1
    run.save(wait=True)
    half = digest(run)
    run.train_step(batches)
    other = trainer(world, root, **changes, runner__resume_dir="auto")
    other.resume()
    restored = digest(other)
    other.train_step(other.batches(STEPS))
    return {"half": half, "restored": restored, "straight": digest(run), "digest": digest(other)}


def eight_bit_again(world, root, output):
    """Restore what other processes saved."""
    changes = {"runner__resume_dir": output / "eight-bit", "runner__global_batch_size": 3 * 4}
    run = trainer(world, root, **changes, optim__moments="8bit")
    run.resume()
    return {"restored": digest(run)}


def adapters(world, root, output):
    """LoRA: gradients; on a base in four bits, what a checkpoint holds and what is exported."""
    folder = output / f"lora-{world.size}"
    for base in ("full", "nf4"):
        changes = {"model__is_lora": True, "model__lora_base": base}
        save_gradients(world, output, f"w{world.size}-lora-{base}", trainer(world, root, **changes))
    run = trainer(world, root, **changes, runner__output_dir=folder, runner__max_steps=4)
    run.run()
    path = export(run.components, 4)
    names = sorted(training_state(run.components.optimizer, run.components.ema)["model"])
    return {"names": names, "export": str(path)}


def averaged(world, root, output):
    """The exported average equals the recurrence over the raw weights."""
    changes = {"optim__ema_decay": 0.75, "runner__output_dir": output / f"ema-{world.size}"}
    run = trainer(world, root, **changes)
    name = "blocks.0.ffn.0.weight"
    expected = whole(run.components.optimizer.named[name])
    batches = run.batches(8)
    for _ in range(3):
        outcome = run.train_step(batches)
        run.step += 1
        run.components.ema.update(outcome.skipped)
        expected = 0.75 * expected + 0.25 * whole(run.components.optimizer.named[name])
    source, error = TrainedSource(run.components), 0.0
    if world.is_main:
        with source.shared():
            found = dict(source.stream([f"action_head.model.{name}"]))
        error = (found[f"action_head.model.{name}"] - expected).abs().max().item()
    else:
        source.share()
    return {"error": error}


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def killed(world, root, output):
    """All steps; the first time, the last rank dies in the last. Restarted by torchrun.

    It dies once the first half is saved, which may still be running in the background.
    """
    folder = output / "killed"
    changes = {"runner__output_dir": folder, "runner__resume_dir": "auto"}
    changes["runner__max_steps"] = STEPS
    run = trainer(world, root, **changes, checkpoint__save_interval=STEPS // 2)
    run.resume()
    first_time = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    step = run.train_step

    def dying(batches):
        if first_time and run.step == STEPS - 1:
            run._checkpoints.finish()
        if first_time and run.step == STEPS - 1 and world.rank == world.size - 1:
            while not (folder / "checkpoints" / f"step_{STEPS // 2:08}").exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return step(batches)

    run.train_step = dying
    started = run.step
    run.run()
    return {"digest": digest(run), "started": started}


def evaluated(world, root, output):
    """Open-loop errors on held-out episodes, named per horizon step."""
    changes = {
        "data__holdout_episodes": 1, "runner__eval_interval": 2, "runner__eval_windows": 4,
        "runner__own_rows": 5, "runner__max_steps": 2,
        "runner__output_dir": output / f"eval-{world.size}",
    }  # fmt: skip
    run = trainer(world, root, **changes)
    held = run.components.datasets.held_out.sources[0].readers[0]
    trained = run.components.datasets.train.sources[0].readers[0]
    run.run()
    return {"held_out": held.windows.usable, "trained": trained.windows.usable}


def damaged(world, root, output):
    """A checkpoint of which one file is damaged, whichever process reads it."""
    run = trainer(world, root, runner__output_dir=output / "damaged", runner__max_steps=2)
    for run.step in (1, 2):
        run.save(wait=True)
    folder = output / "damaged" / "checkpoints"
    newest = max(folder.glob("step_*"))
    found = {}
    for name in sorted(path.name for path in (newest / "state").glob("*.distcp")):
        file = newest / "state" / name
        whole = file.read_bytes()
        dist.barrier(group=world.host_group)
        if world.is_main:
            file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        dist.barrier(group=world.host_group)
        chosen = choose_checkpoint("auto", folder, world)
        found[name] = world.gathered(chosen.step)
        if world.is_main:
            file.write_bytes(whole)
        dist.barrier(group=world.host_group)
    intact = choose_checkpoint("auto", folder, world)
    return {"found": found, "intact": intact.step}


def rolled_out(world, root, output):
    """Three episodes that the processes share."""
    train_worlds.register_small()
    run = trainer(
        world, root, runner__output_dir=output / f"rolled_out-{world.size}", runner__max_steps=1,
        runner__rollout_interval=1, runner__rollout_env="small-v0", runner__rollout_episodes=3,
        optim__lr_warmup_steps=0,
    )  # fmt: skip
    run.run()
    if world.is_main:
        alone = dataclasses.replace(world, size=1)
        evaluation._run_share(run.components.config, alone, 1, output / "alone")
    return {}


def late(world, root, output):
    """The last process does not finish its episodes before the first one has given up."""
    train_worlds.register_small()
    said = output / "given_up"
    config = train_worlds.config(
        root, runner__output_dir=output / "late", runner__rollout_env="small-v0",
        runner__rollout_episodes=1,
    )  # fmt: skip
    # A third of a second; a recipe counts in minutes.
    runner = config.runner.model_copy(update={"rollout_timeout_min": 0.005})
    share = evaluation._run_share

    def slow(*arguments):
        while world.rank and not said.exists():
            time.sleep(0.05)
        return None if world.rank else share(*arguments)

    evaluation._run_share = slow
    run = trainer(world, root, runner__output_dir=output / "late", runner__max_steps=1)
    run.run()
    try:
        evaluation.evaluate_rollouts(config.model_copy(update={"runner": runner}), world, 1)
    except evaluation.RolloutTimeoutError as error:
        said.touch()
        return {"message": str(error)}
    return {}


PLUGGED = {
    "model__embodiment_tag": "lab:HAND", "runner__plugins": ["smooth:Smooth", "grasps:Grasps"],
    "runner__max_steps": 2, "checkpoint__save_interval": 1, "checkpoint__async_save": False,
    "logging__log_interval": 1,
}  # fmt: skip


def plugged_run(world, root, folder, **changes):
    """Train with a sense, a loss term and a sampler of a lab's own."""
    run = trainer(world, root, runner__output_dir=folder, **PLUGGED, **changes)
    run.run()
    keys = run.components.datasets.train.sample_keys
    lines = (folder / "metrics.jsonl").read_text().splitlines() if world.is_main else []
    return {
        "terms": [[row["loss"], row["loss_smooth"]] for row in map(json.loads, lines)],
        "samples": [[key.sample_id for key in keys(step, range(4), 4)] for step in range(2)],
        "digest": digest(run),
    }


def plugged(world, root, output):
    """The same in several processes, without a break and resumed half way."""
    sys.path.insert(0, str(root.parent / "lab"))
    folder = output / f"plugged-{world.size}"
    whole = plugged_run(world, root.parent / "hand", folder)
    half = folder / "checkpoints" / "step_00000001"
    rest = plugged_run(
        world, root.parent / "hand", output / f"replugged-{world.size}", runner__resume_dir=half
    )
    return {**whole, "straight": whole["digest"], "resumed": rest["digest"]}


SCENARIOS = {
    function.__name__: function
    for function in (
        hybrid_gradients, more_gradients, collectives, six_steps, clipping, precision, poisoned,
        gives_up, straight, first_half, second_half, three, eight_bit, eight_bit_again, adapters,
        averaged, killed, evaluated, damaged, rolled_out, late, plugged,
    )
}  # fmt: skip


def main(root, output, names):
    world = init_distributed("cpu")
    recorded.recordable_devices.add("cpu")
    for name in names:
        start = time.monotonic()
        result = SCENARIOS[name](world, root, output)
        result["seconds"] = time.monotonic() - start
        if world.is_main:
            (output / f"{name}-{world.size}.json").write_text(json.dumps(result))
    end_process(0)


def be_a_rank(environment, root, output, names):
    """Do what a process of torchrun does, with what torchrun would have set."""
    os.environ.update(environment)
    main(root, output, names)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
