"""The first minutes on a machine with a GPU, in parts of at most nine minutes.

Correctness comes before speed, small before large. Each part runs in a process of its own, prints
every figure and appends it to OUTPUT the moment it exists, so a part that is stopped has lost one
figure. The same command again runs what is neither passed nor measured. Without a GPU, `--device
cpu --size tiny` runs the same code; what a processor cannot show, and what needs a library that is
missing, is listed as skipped, with the reason, and never as passed.
"""

import argparse
import importlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import torch
from gpu_parts import Line, Outcome, Request, Value, append, read_lines

PARTS: Mapping[str, str] = {
    "devices": "gpu_checks:devices",
    "goldens-fp32": "gpu_checks:goldens_fp32",
    "goldens-bf16": "gpu_checks:goldens_bf16",
    "packed": "gpu_checks:packed",
    "offload": "gpu_checks:offloaded",
    "compiled": "gpu_checks:compiled",
    "quantized": "gpu_checks:quantized",
    "cfg-devices": "gpu_checks:cfg_devices",
    "graph": "gpu_checks:graph",
    "fsdp": "gpu_checks:fsdp",
    "recorded-blocks": "gpu_checks:recorded_blocks",
    "resume": "gpu_checks:resume",
    "kernels": "gpu_kernels:kernels",
    "loader": "gpu_speed:loader",
    "chunks-5b": "gpu_speed:chunks_5b",
    "chunks-14b": "gpu_speed:chunks_14b",
    "train-5b": "gpu_speed:train_5b",
    "train-14b-lora": "gpu_speed:train_14b_lora",
    "train-graphs-5b": "gpu_speed:train_graphs_5b",
    "train-graphs-14b": "gpu_speed:train_graphs_14b",
    "render": "gpu_speed:render",
}
"""Part -> function, imported where it runs; in the order in which they run."""

LIBRARIES = (
    "pydantic", "gymnasium", "ftfy", "tokenizers", "cv2", "pyarrow", "peft",
    "av", "mujoco", "robosuite", "OpenGL", "torchao",
)  # fmt: skip
"""What some part needs; those that a machine lacks are said first."""

DONE = ("passed", "measured")
"""Outcomes that are not tried again unasked."""

_TAIL = 1500
"""Characters of what a failed part said that are kept."""

_OWN = ("dzrobot", "golden_kinds", "rehearsal")


def main() -> int:
    """Run what is missing, print the table; 1 if a part has failed, 2 if nothing could be run."""
    options = _arguments()
    try:
        return _child(options) if options.child else _run(options)
    except ValueError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N")
    parser.add_argument("--size", choices=["true", "tiny"], default="true")
    parser.add_argument("--parts", help=f"of {','.join(PARTS)}")
    parser.add_argument("--again", help="parts that are done, once more")
    parser.add_argument("--output", type=Path, default=Path("results/gpu.jsonl"))
    parser.add_argument("--limit", type=float, default=540, help="seconds of one part")
    parser.add_argument("--total", type=float, default=1e9, help="seconds of all parts")
    parser.add_argument(
        "--goldens",
        type=Path,
        help="folder of reference numbers (else DZROBOT_GOLDENS, .gpu, or those of the checkout)",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(options: argparse.Namespace) -> int:
    device = _device(options.device)
    asked, again = _known(options.parts), _known(options.again)
    stamp = _stamp(options, device)
    ends, _ = _latest(options.output, stamp)
    wanted = again or [
        part for part in asked or PARTS if part not in ends or ends[part].status not in DONE
    ]
    print(f"{stamp.device}, {options.size} size, {stamp.versions}; figures: {options.output}")
    if missing := [name for name in LIBRARIES if find_spec(name) is None]:
        print(f"missing here: {', '.join(missing)}; benchmarks/pack_gpu.sh brings packages")
    deadline = time.monotonic() + options.total
    for number, part in enumerate(wanted, start=1):
        seconds = min(options.limit, deadline - time.monotonic())
        if seconds <= 0:
            print(f"not run, out of time: {', '.join(wanted[number - 1 :])}")
            break
        print(f"-- {part} ({number} of {len(wanted)})", flush=True)
        _run_part(part, options, stamp, seconds)
    return _print(options.output, stamp)


def _device(name: str) -> torch.device:
    """Return the device under one name, ``cuda:0`` for ``cuda``."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: give cpu, cuda or cuda:N") from error
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ValueError(
            f"--device {name}: torch sees {count or 'no'} GPU{'s' * (count > 1)}; to try the code: "
            "--device cpu --size tiny"
        )
    return torch.device("cuda", device.index or 0)


def _known(written: str | None) -> list[str]:
    names = [] if written is None else written.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f"unknown part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return names


def _stamp(options: argparse.Namespace, device: torch.device, part: str = "") -> Line:
    """Return a line without a figure: on what it is measured."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    name = device.type
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        versions += f", cuDNN {torch.backends.cudnn.version()}"
    return Line(part, name, options.size, versions, _now())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _latest(output: Path, stamp: Line) -> tuple[dict[str, Line], dict[str, dict[str, Line]]]:
    """Return the last end of each part, and its newest figures, for this device and size."""
    ends: dict[str, Line] = {}
    figures: dict[str, dict[str, Line]] = {}
    for line in read_lines(output):
        if (line.device, line.size) != (stamp.device, stamp.size):
            continue
        if line.name:
            figures.setdefault(line.part, {})[line.name] = line
        else:
            ends[line.part] = line
    return ends, figures


def _run_part(part: str, options: argparse.Namespace, stamp: Line, seconds: float) -> None:
    """Run one part in a process of its own, which leaves its lines itself unless it is stopped."""
    command = [
        sys.executable, __file__, "--child", part, "--device", options.device, "--size",
        options.size, "--output", str(options.output),
    ]  # fmt: skip
    if options.goldens is not None:
        command += ["--goldens", str(options.goldens)]
    log = options.output.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    start, outcome = time.monotonic(), None
    with log.open("a+b") as errors:
        begin = errors.seek(0, os.SEEK_END)
        # A group of its own: what a part has started ends with it.
        child = subprocess.Popen(command, stderr=errors, process_group=0)
        try:
            if code := child.wait(seconds):
                errors.seek(begin)
                said = errors.read().decode(errors="replace").strip()[-_TAIL:]
                outcome = Outcome("failed", f"ended with code {code}: {said}")
        except subprocess.TimeoutExpired:
            outcome = Outcome("failed", f"not done after {seconds:.0f} s")
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if outcome is not None:
        _end(options.output, stamp._replace(part=part), outcome, time.monotonic() - start)


def _end(output: Path, stamp: Line, outcome: Outcome, seconds: float) -> None:
    append(
        output,
        stamp._replace(**outcome._asdict(), seconds=round(seconds, 1), when=_now()),
    )


def _child(options: argparse.Namespace) -> int:
    """Run one part in this process; its figures and its end go to the output as they come."""
    start, device = time.monotonic(), _device(options.device)
    stamp = _stamp(options, device, options.child)

    def record(name: str, value: Value, peak: float | None = None) -> None:
        line = stamp._replace(name=name, value=value, peak=peak, when=_now())
        append(options.output, line)
        print(f"   {_figure(line)}", flush=True)

    module, _, function = PARTS[options.child].partition(":")
    try:
        from dzrobot.training.run.parallel import set_cuda_defaults

        set_cuda_defaults()
        run = getattr(importlib.import_module(module), function)
        outcome = run(Request(device, options.size, options.goldens, record))
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in _OWN or Path(__file__).with_name(f"{missing}.py").exists():
            raise
        outcome = Outcome("skipped", f"a library is missing: {error}")
    _end(options.output, stamp, outcome, time.monotonic() - start)
    print(f"   {outcome.status}: {outcome.reason}", flush=True)
    return 0


def _figure(line: Line) -> str:
    """Return a figure as text, beside the peak of the data sheet where there is one."""
    shown = f"{line.value:.4g}" if isinstance(line.value, float) else str(line.value)
    if line.peak is None or not isinstance(line.value, float):
        return f"{line.name}: {shown}"
    return f"{line.name}: {shown}, {line.value / line.peak:.0%} of the peak of {line.peak:.4g}"


def _print(output: Path, stamp: Line) -> int:
    ends, figures = _latest(output, stamp)
    print(f"\n{stamp.device}, {stamp.size} size, {stamp.versions}")
    for part in PARTS:
        found: Sequence[Line] = list(figures.get(part, {}).values())
        end = ends.get(part)
        if end is None:
            print(f"{part:<16}{'stopped' if found else 'not run'}")
        else:
            reason = end.reason.strip().splitlines()[-1] if end.reason.strip() else ""
            print(f"{part:<16}{end.status:<10}{end.seconds:>6.0f} s  {reason[:160]}")
        for line in found:
            print(f"{'':<16}{_figure(line)}")
    return int(any(line.status == "failed" for line in ends.values()))


if __name__ == "__main__":
    sys.exit(main())
