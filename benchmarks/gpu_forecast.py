"""Make the forecasts that stand beside the figures of ``gpu.py``: run it where there is time.

python benchmarks/gpu_forecast.py       a few minutes of a processor; writes gpu_forecasts.json
"""

import json
from dataclasses import replace

import torch
import torch.distributed as dist
from gpu import FORECASTS
from train_setup import Bench, chunk_setup, make_bench, planned_bytes, planned_cases, step_setup

from dzrobot.training.bench.measuring import GIB
from dzrobot.training.cost.accelerators import DEVICES, Accelerator, roofline
from dzrobot.training.forecast.forecast import Form, forecast, step_seconds
from dzrobot.training.forecast.rehearsal import StepRehearsal, rehearse_chunks, rehearse_step
from dzrobot.training.run.parallel import init_distributed

KINDS = ("H100", "H200")
"""Rows of the devices that forecasts are made for."""

FORMS: dict[str, Form] = {"eager": "eager", "compiled": "compiled", "compiled and graphs": "graph"}
"""Form of a chunk as ``gpu.py`` names it -> of a forecast."""

Forecasts = dict[str, dict[str, dict[str, float]]]
"""Kind of device -> part -> figure -> value."""


def main() -> None:
    devices = [device for device in DEVICES if device.name in KINDS]
    found: Forecasts = {device.name: {} for device in devices}
    world = init_distributed("cpu")
    for variant, training in (("5b", "train-5b"), ("14b", "train-14b-lora")):
        bench = replace(make_bench(variant, world, 0), dtype="bf16")
        chunks = chunk_figures(bench, devices)
        steps = step_figures(bench, devices)
        for device in devices:
            found[device.name][f"chunks-{variant}"] = chunks[device.name]
            found[device.name][training] = steps[device.name]
    dist.destroy_process_group()
    FORECASTS.write_text(f"{json.dumps(found, indent=1)}\n", encoding="utf-8")


def chunk_figures(bench: Bench, devices: list[Accelerator]) -> dict[str, dict[str, float]]:
    """Return milliseconds of a chunk at every place of the window, in every form."""
    rehearsed = rehearse_chunks(chunk_setup(bench, torch.bfloat16))
    return {
        device.name: {
            f"{name}, frame {place}, p50 ms": rounded(
                1e3 * forecast(rehearsal, roofline(device), form).total
            )
            for name, form in FORMS.items()
            for place, rehearsal in rehearsed.items()
        }
        for device in devices
    }


def step_figures(bench: Bench, devices: list[Accelerator]) -> dict[str, dict[str, float]]:
    """Return samples per second and memory of the cases that fit each device."""
    steps: dict[object, StepRehearsal] = {}
    found: dict[str, dict[str, float]] = {}
    for device in devices:
        figures = found[device.name] = {}
        for case in planned_cases(bench, 1e9 * device.memory_gb)[0]:
            if case not in steps:
                steps[case] = rehearse_step(step_setup(bench, case))
            seconds = step_seconds(steps[case], roofline(device), "compiled")
            figures[f"{case.name}, samples_s"] = rounded(case.mbs / seconds)
            figures[f"{case.name}, peak_gib"] = rounded(planned_bytes(bench, case) / GIB)
    return found


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
