"""Noise tables, solver trajectories and step skipping."""

import torch

from dzrobot.policies.dreamzero.network.diffusion import (
    DynamicPlan,
    TrainingSchedule,
    inference_schedule,
    step_plan,
    velocity,
)
from golden_kinds.registry import Golden, Results, checker, exact, relative_l2

TOLERANCE = 1e-6
# The reference rounds the sample to bf16 after every step; we keep float32.
BF16_TOLERANCE = 2e-2


@checker("schedulers")
def schedulers(golden: Golden) -> Results:
    results = _training(golden) | _skipping(golden.manifest)
    solvers = [name.removesuffix(".in.sample") for name in golden.tensors if "in.sample" in name]
    assert solvers, "no trajectories"
    for name in solvers:
        results |= _trajectory(golden, name)
    return results


def _training(golden: Golden) -> Results:
    schedule = TrainingSchedule.on("cpu")
    clean, noise = golden["train.in.latents"], golden["train.in.noise"]
    index = golden["train.in.timestep_id"]
    # The manifest's layout is (B, F, C, h, w), ours (B, C, F, h, w).
    noisy = schedule.add_noise(clean.transpose(1, 2), noise.transpose(1, 2), index, axis=2)
    pairs = {
        "train.sigmas": schedule.sigmas,
        "train.timesteps": schedule.timesteps,
        "train.weights": schedule.weights,
        "train.out.noisy": noisy.transpose(1, 2),
        "train.out.target": velocity(clean, noise),
        "train.out.weight": schedule.weights[index],
    }
    return {name: (relative_l2(got, golden[name]), TOLERANCE) for name, got in pairs.items()}


def _trajectory(golden: Golden, name: str) -> Results:
    sigmas, timesteps = golden[f"{name}.sigmas"], golden[f"{name}.timesteps"]
    # The last noise level is where the solution stops; the manifest has no other word for it.
    schedule = inference_schedule(len(timesteps), final_noise=round(sigmas[-1].item(), 6))
    stored = golden.tensors[f"{name}.in.sample"]
    trajectory = schedule.start(stored)
    samples = [trajectory.step(v) for v in golden.tensors[f"{name}.in.model_outputs"]]
    expected = golden[f"{name}.out.samples"]
    tolerance = BF16_TOLERANCE if stored.dtype == torch.bfloat16 else TOLERANCE
    return {
        f"{name}.sigmas": (relative_l2(torch.tensor(schedule.sigmas), sigmas), TOLERANCE),
        f"{name}.timesteps": exact(list(schedule.timesteps), timesteps.tolist()),
        f"{name}.samples": (relative_l2(torch.stack(samples), expected), tolerance),
    }


def _skipping(manifest: dict) -> Results:
    results: Results = {}
    for evaluations, mask in manifest["dit_skip_static_masks"].items():
        plan = step_plan(evaluations, len(mask))
        results[f"static {evaluations}"] = exact([plan.due(i) for i in range(len(mask))], mask)
    for number, case in enumerate(manifest["dit_skip_dynamic_cases"]):
        plan, executed = DynamicPlan(), []
        cosines = iter(case["cosine_between_consecutive_executed_predictions"])
        for step in range(len(case["executed"])):
            executed.append(plan.due(step))
            if executed[-1] and sum(executed) > 1:
                plan.compare(next(cosines))
        results[f"dynamic {number}"] = exact(executed, case["executed"])
    return results
