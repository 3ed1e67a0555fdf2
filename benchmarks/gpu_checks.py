"""Correctness on a device: dtypes, reference numbers, and every form against the plain one.

Networks are small; what is checked does not depend on their size. Errors are relative L2.
"""

import contextlib
import copy
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from from_tests import REFERENCE_NUMBERS, Rehearsal, rehearse
from gpu_parts import Outcome, Request, compute_dtype, judged, limit, relative
from networks import DeviceNetwork, small_network, training_case
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dzrobot.errors import DzrobotError
from dzrobot.policies.dreamzero.network.config import GenerateOptions
from dzrobot.policies.dreamzero.network.dit import TrainForm
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.graphs import PromptBatch, prompt_batches
from dzrobot.policies.dreamzero.network.layers import compile_blocks
from dzrobot.policies.dreamzero.network.recorded_blocks import recordable_devices
from dzrobot.policies.dreamzero.network.session import SessionCache
from dzrobot.policies.dreamzero.network.world_action import (
    LossCounts,
    LossOptions,
    TrainBatch,
    WorldActionModel,
)
from dzrobot.policies.dreamzero.offload import Offloader, offload_plans
from dzrobot.policies.dreamzero.options import Quantization
from dzrobot.policies.dreamzero.quantize import (
    check_quantization,
    quantize_block,
)
from dzrobot.training.bench.document import BenchSettings
from dzrobot.training.bench.learning import asked_recipe
from dzrobot.training.bench.measuring import release, timed
from dzrobot.training.run.build import build as build_run
from dzrobot.training.run.inputs import sample_noise
from dzrobot.training.run.parallel import (
    DistributedEnvironment,
    clean_name,
    init_distributed,
    parallelize,
    reading_outputs,
)
from dzrobot.training.run.trainer import Trainer, backward
from dzrobot.training.sft_config import ParallelConfig, SFTConfig

GOLDEN_KINDS = ("head_train_forward", "head_ar_inference")
"""Those of whole networks: encoders, transformer, losses, gradients, rollouts."""

BF16_OUTPUT, BF16_GRADIENT = 5e-2, 2e-1
"""Against float32 numbers. On a processor the largest errors are 3.0e-2 and 1.4e-1."""

QUANTIZED = 5e-2
"""Bound for random weights, whose actions are as sensitive as any. On a processor int8 is
off by 2e-4."""

_TWO = 2
_BATCH = 2
_STEPS = 4


def devices(request: Request) -> Outcome:
    """Run a training step under the rehearsal's eyes: half precision, one device, no waiting."""
    bench = small_network(request.device, torch.bfloat16)
    model, batch = bench.model, training_case(bench, _BATCH).batch
    # What a process makes once and keeps is made before anything is counted.
    _step(model, batch)
    found = rehearse(lambda _: _step(model, batch), request.device)
    request.record("operators", float(found.calls.total()))
    if wrong := faults(found):
        return Outcome("failed", "; ".join(wrong))
    if request.device.type == "cpu":
        said = "dtypes are right; on a processor there is no host that could wait for a device"
        return Outcome("skipped", said)
    with _no_waiting():
        _step(model, batch)
    return Outcome("passed", "half precision, one device, the host never waits")


def faults(found: Rehearsal) -> list[str]:
    """Return what should not be in a step; where nothing ran on the device, nothing is proven."""
    wrong = [] if found.calls else ["no operator ran on the device"]
    wrong += [f"float32 product, {n} times: {name}" for name, n in found.single_products.items()]
    wrong += [f"mixes devices, {n} times: {place}" for place, n in found.misplaced.items()]
    wrong += [f"the host waits: {upload.place}" for upload in found.uploads if upload.is_blocking]
    return wrong


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """Let torch raise where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _step(model: WorldActionModel, batch: TrainBatch) -> None:
    prepared = model.prepare(batch)
    noise = sample_noise(model.config, prepared, 0, 0, range(_BATCH))
    counts = LossCounts(samples=float(_BATCH), actions=float(_BATCH))
    backward(model, prepared, noise, counts, LossOptions())
    model.zero_grad(set_to_none=True)


def goldens_fp32(request: Request) -> Outcome:
    """Reproduce the reference numbers of whole networks within their own tolerances."""
    return _goldens(request, torch.float32)


def goldens_bf16(request: Request) -> Outcome:
    """Reproduce them in bfloat16: counts and times exactly, the rest as bfloat16 can."""
    return _goldens(request, torch.bfloat16)


def _goldens(request: Request, dtype: torch.dtype) -> Outcome:
    named = request.goldens or os.environ.get("DZROBOT_GOLDENS") or REFERENCE_NUMBERS
    folder = Path(named)
    if not folder.is_dir():
        return Outcome("failed", f"{folder} is not a folder: name one of reference numbers")
    from golden_kinds.registry import Golden, manifests

    # Convolutions would round to 10 bits.
    torch.backends.cudnn.allow_tf32 = False
    count = 0
    beyond: list[str] = []
    for path in [one.path for one in manifests(folder) if one.kind in GOLDEN_KINDS]:
        results = Golden(path, request.device, dtype).check()
        for name, (error, tolerance) in results.items():
            allowed = _allowed(name, tolerance, dtype)
            if not error <= allowed:
                beyond.append(f"{path.stem} {name} {error:.1e} above {allowed:.0e}")
        request.record(path.stem, max(error for error, _ in results.values()))
        count += 1
    if not count:
        return Outcome("failed", f"{folder} has no numbers of {' or '.join(GOLDEN_KINDS)}")
    if beyond:
        return Outcome("failed", "; ".join(beyond[:8]))
    said = "their own tolerances" if dtype == torch.float32 else (
        f"outputs {BF16_OUTPUT:g}, gradients {BF16_GRADIENT:g}"
    )  # fmt: skip
    return Outcome("passed", f"{count} files; {said}")


def _allowed(name: str, tolerance: float, dtype: torch.dtype) -> float:
    # Counts, times and digests are equal or not.
    if dtype == torch.float32 or tolerance == 0:
        return tolerance
    return BF16_GRADIENT if name.startswith("grad") else BF16_OUTPUT


def packed(request: Request) -> Outcome:
    """Compare packed with dense attention, and the savings with going without."""
    for dtype in (torch.float32, torch.bfloat16):
        bench = small_network(request.device, dtype)
        case = training_case(bench, _BATCH)
        expected = case.step(TrainForm("dense", exact_savings=False))
        for name, form in (
            ("packed", TrainForm(exact_savings=False)), ("packed with savings", TrainForm()),
        ):  # fmt: skip
            error = relative(case.step(form), expected)
            request.record(f"{name}, {dtype}", error)
            found = judged({name: error}, limit(dtype), str(dtype))
            if found.status != "passed":
                return found
    return Outcome("passed", "float32 1e-4, bfloat16 5e-2, of a gradient")


def offloaded(request: Request) -> Outcome:
    """Compare weights that wait on the host with weights on the device: not one bit differs."""
    dtype = compute_dtype(request.device)
    bench = small_network(request.device, dtype)
    expected = chunks(bench)
    plan = list(offload_plans(bench.model, dtype))[-1]
    Offloader(request.device).offload(plan.modules(bench.model))
    request.record("bytes on the host", float(plan.host_bytes))
    if request.device.type == "cuda":
        release(request.device)
        request.record("bytes of weights left", float(torch.cuda.memory_allocated(request.device)))
    return _compared(request, {"chunks": relative(chunks(bench), expected)}, 0.0, "offloaded")


def _compared(
    request: Request, errors: Mapping[str, float], allowed: float | None, what: str
) -> Outcome:
    """Keep the errors, in the default dtype, and judge them; None: by the dtype's limit."""
    for name, error in errors.items():
        request.record(name, error)
    dtype = compute_dtype(request.device)
    return judged(errors, limit(dtype) if allowed is None else allowed, f"{what}, {dtype}")


def compiled(request: Request) -> Outcome:
    """Compare compiled blocks with eager ones: a gradient, and the chunks of a window."""
    if request.device.type == "cpu" and shutil.which("g++") is None:
        return Outcome("skipped", "torch compiles for a processor with g++, which is missing")
    dtype = compute_dtype(request.device)
    bench = small_network(request.device, dtype)
    case = training_case(bench, _BATCH)
    eager = {"gradient": case.step(TrainForm()), "chunks": chunks(bench)}
    compile_blocks(bench.model.model.blocks)
    found = {"gradient": case.step(TrainForm()), "chunks": chunks(bench)}
    errors = {name: relative(found[name], eager[name]) for name in eager}
    return _compared(request, errors, None, "compiled against eager")


def chunks(
    bench: DeviceNetwork, count: int = 3, batches: Sequence[PromptBatch] | None = None
) -> Tensor:
    """Return the actions of the first chunks of an episode."""
    session, actions, options = SessionCache(), [], GenerateOptions()
    for call in range(count):
        asked = dataclasses.replace(bench.request(call, 4 if call else 1), prompt=bench.prompt(0))
        actions.append(predict(bench.model, [session], [asked], options, batches).action_BAM)
    return torch.cat(actions)


def quantized(request: Request) -> Outcome:
    """Compare 8-bit weights with the network's own: the products of every block, and the chunks."""
    dtype, device = compute_dtype(request.device), request.device
    errors, left_out = {}, []
    for kind in get_args(Quantization):
        try:
            check_quantization(kind, device, dtype)
        except DzrobotError as error:
            left_out.append(f"{kind}: {error}")
            continue
        bench = small_network(device, dtype)
        expected = chunks(bench)
        for block in bench.model.model.blocks:
            quantize_block(block, kind)
        errors[kind] = relative(chunks(bench), expected)
    if not errors:
        return Outcome("skipped", "; ".join(left_out))
    found = _compared(request, errors, QUANTIZED, "8-bit weights")
    if found.status == "passed" and left_out:
        return Outcome("skipped", f"{', '.join(errors)} is right; {'; '.join(left_out)}")
    return found


def cfg_devices(request: Request) -> Outcome:
    """Compare guidance on two devices with guidance as one batch."""
    second = request.device
    if request.device.type == "cuda":
        if torch.cuda.device_count() < _TWO:
            return Outcome("skipped", "one GPU: there is no second one for the negative prompt")
        second = torch.device("cuda:1")
    dtype = compute_dtype(request.device)
    bench = small_network(request.device, dtype)
    negative = copy.deepcopy(bench.model.model).to(second)
    batches = prompt_batches(bench.model.model, GenerateOptions().prompts, negative)
    error = relative(chunks(bench, batches=batches), chunks(bench))
    found = _compared(request, {"chunks": error}, None, "two devices against one")
    if second.type == "cpu" and found.status == "passed":
        return found._replace(status="skipped", reason="right, on one processor for two devices")
    return found


def graph(request: Request) -> Outcome:
    """Compare recorded steps with steps that are launched operator by operator: chunks of windows.

    The second window runs what the first one recorded.
    """
    dtype, count = compute_dtype(request.device), 9
    bench = small_network(request.device, dtype)
    batches = prompt_batches(bench.model.model, GenerateOptions().prompts, graphs=True)
    forms = {"eager": None, "recorded": batches}
    found = {name: chunks(bench, count, ways) for name, ways in forms.items()}
    error = relative(found["recorded"], found["eager"])
    result = _compared(request, {"chunks": error}, None, "recorded against eager")
    for name, ways in forms.items():
        spent: list[float] = []
        with timed(spent, request.device):
            chunks(bench, count, ways)
        request.record(f"{name}, seconds of {count} chunks", spent[0])
    if request.device.type == "cpu" and result.status == "passed":
        return result._replace(status="skipped", reason="right, and no GPU to record on")
    return result


def fsdp(request: Request) -> Outcome:
    """Compare a network laid out by FSDP2 on one rank with the plain one."""
    world = init_distributed(request.device.type)
    try:
        errors = _fsdp_errors(world, request.device)
    finally:
        dist.destroy_process_group()
    allowed = limit(torch.float32)
    found = _compared(request, errors, allowed, "FSDP2 on one rank against the plain network")
    if request.device.type == "cpu" and found.status == "passed":
        return Outcome("skipped", "no NCCL on a processor; by gloo it is right")
    return found


def recorded_blocks(request: Request) -> Outcome:
    """Compare training blocks that are launched as one with plain ones, under FSDP2."""
    if request.device.type == "cpu":
        recordable_devices.add("cpu")
    world = init_distributed(request.device.type)
    try:
        errors = _fsdp_errors(world, request.device, cuda_graphs="blocks")
    finally:
        dist.destroy_process_group()
    found = _compared(request, errors, limit(torch.float32), "recorded blocks against plain ones")
    if request.device.type == "cpu" and found.status == "passed":
        return Outcome("skipped", "right, and no GPU to record on")
    return found


def _fsdp_errors(
    world: DistributedEnvironment, device: torch.device, **changes: str
) -> dict[str, float]:
    plain = small_network(device, torch.float32)
    laid = small_network(device, torch.float32)
    parallel = ParallelConfig(
        strategy="fsdp", param_dtype="fp32", activation_checkpointing="full", compile=False,
        **changes,
    )  # fmt: skip
    parallelize(laid.model.model, laid.model.model.blocks, parallel, world)
    gradients = []
    for bench in (plain, laid):
        # The second step launches what the first one records.
        for _ in range(2):
            bench.model.model.zero_grad(set_to_none=True)
            with reading_outputs():
                training_case(bench, _BATCH).step(TrainForm())
        gradients.append(_gradients(bench.model.model))
    expected, actual = gradients
    missing = set(expected) ^ set(actual)
    assert not missing, f"gradients of one form alone: {missing}"
    return {
        "all gradients": relative(
            torch.cat([actual[name].flatten() for name in expected]),
            torch.cat([found.flatten() for found in expected.values()]),
        )
    }


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        clean_name(name): _whole(p.grad).float()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def resume(request: Request) -> Outcome:
    """Compare a run that was stopped in the middle and resumed with one that was not."""
    world = init_distributed(request.device.type)
    try:
        with tempfile.TemporaryDirectory(prefix="dzrobot-gpu-") as name:
            config, half = _short_run(Path(name), request.device), _STEPS // 2
            found = {}
            for run, folder, limits in (
                ("straight", "a", {}),
                ("stopped", "b", {"stop": half}),
                ("resumed", "b", {"begin": half}),
            ):
                spent: list[float] = []
                with timed(spent, request.device):
                    found[run] = _trained(config, Path(name) / folder, world, **limits)
                request.record(f"{run}, s", spent[0])
    finally:
        dist.destroy_process_group()
    straight, resumed = found["straight"], found["resumed"]
    unlike = [name for name in straight if not torch.equal(straight[name], resumed[name])]
    request.record("tensors that differ", float(len(unlike)))
    if unlike:
        return Outcome("failed", f"{len(unlike)} of {len(straight)} tensors differ: {unlike[:3]}")
    return Outcome("passed", f"{len(straight)} tensors are equal to the bit after {_STEPS} steps")


def _short_run(folder: Path, device: torch.device) -> SFTConfig:
    """Return a run of the bundled policy on a made-up recording in ``folder``."""
    os.environ["DZROBOT_CACHE"] = str(folder / "cache")
    dtype = "fp32" if device.type == "cpu" else "bf16"
    overrides = (
        "runner.deterministic=true", f"runner.max_steps={_STEPS}", "runner.resume_dir=auto",
        "data.num_workers=0", "checkpoint.save_interval=1000", "checkpoint.export=false",
        "logging.tensorboard=false", f"parallel.param_dtype={dtype}",
        "runner.micro_batch_size=1", "runner.global_batch_size=1",
    )  # fmt: skip
    config, _ = asked_recipe(BenchSettings(overrides=overrides), folder)
    return config


def _trained(
    config: SFTConfig, folder: Path, world: DistributedEnvironment, *, begin: int = 0,
    stop: int | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the weights after the last step, or after a save at step ``stop``.

    Raises:
        RuntimeError: the run does not resume at step ``begin``.
    """
    runner = config.runner.model_copy(update={"output_dir": folder})
    trainer = Trainer(build_run(config.model_copy(update={"runner": runner}), world))
    trainer.resume()
    if trainer.step != begin:
        raise RuntimeError(f"resumed at step {trainer.step}, not {begin}")
    if stop is None:
        trainer.run()
    else:
        batches = trainer.batches(_STEPS)
        while trainer.step < stop:
            trainer.train_step(batches)
            trainer.step += 1
        trainer.save(wait=True)
    parameters = trainer.components.model.model.named_parameters()
    return {name: _whole(p).detach().cpu().clone() for name, p in parameters}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
