"""The first minutes on a machine with a GPU, in parts of at most nine minutes.

Correctness comes before speed. Each part runs in a process of its own and leaves one line in
OUTPUT; the same command again runs what is neither passed nor measured. Without a GPU, `--device
cpu --size tiny` runs the same code; what a processor cannot show is listed as skipped, with the
reason, and never as passed.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import gpu_checks
import gpu_speed
import torch
from gpu_parts import Outcome, Request

from dzrobot import files
from dzrobot.commands.options import flags
from dzrobot.configuration import FrozenConfig
from dzrobot.documents import parse_json, read_json_lines
from dzrobot.errors import ConfigError, DzrobotError, suggest
from dzrobot.progress import progress_bar
from dzrobot.training.bench.measuring import device_name

PARTS: Mapping[str, Callable[[Request], Outcome]] = {
    "devices": gpu_checks.devices,
    "goldens-fp32": gpu_checks.goldens_fp32,
    "goldens-bf16": gpu_checks.goldens_bf16,
    "packed": gpu_checks.packed,
    "offload": gpu_checks.offloaded,
    "compiled": gpu_checks.compiled,
    "quantized": gpu_checks.quantized,
    "cfg-devices": gpu_checks.cfg_devices,
    "graph": gpu_checks.graph,
    "fsdp": gpu_checks.fsdp,
    "resume": gpu_checks.resume,
    "speed-5b": gpu_speed.speed_5b,
    "speed-14b-lora": gpu_speed.speed_14b_lora,
    "render": gpu_speed.render,
}
"""In the order in which they run."""

LIMIT_S = 540
"""Seconds of one part; one that takes longer is ended, and has failed."""

DONE = ("passed", "measured")
"""Outcomes that are not tried again unasked."""

_TAIL = 1500
"""Characters of what a failed part said that are kept."""


class Line(FrozenConfig):
    """One line of OUTPUT."""

    part: str
    device: str
    """Name of the device."""

    size: Literal["true", "tiny"]
    status: Literal["passed", "measured", "failed", "skipped", "not built"]
    reason: str
    """What was found, or why not."""

    numbers: Mapping[str, float | str | None]
    seconds: float
    torch: str


def main() -> int:
    """Run what is missing, print the table; 1 if a part has failed."""
    options = _arguments()
    if options.child is not None:
        return _child(options)
    try:
        return _run(options)
    except DzrobotError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    _check_device(options.device)
    parts = _known(options.parts) or tuple(PARTS)
    again = _known(options.again)
    name = device_name(torch.device(options.device))
    before = _latest(options.output, name, options.size)
    wanted = [
        part
        for part in parts
        if part in again or part not in before or before[part].status not in DONE
    ]
    if again:
        wanted = [part for part in wanted if part in again]
    with progress_bar("parts", every=0) as show:
        for number, part in enumerate(wanted):
            show(number, len(wanted), part)
            line = _measured(part, options, name)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            files.append_line(options.output, line.model_dump_json())
    found = _latest(options.output, name, options.size)
    _print(name, options.size, found)
    return int(any(line.status == "failed" for line in found.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=flags.device, default="cuda")
    parser.add_argument("--size", choices=["true", "tiny"], default="true")
    parser.add_argument("--parts", type=flags.names, help=f"of {', '.join(PARTS)}")
    parser.add_argument("--again", type=flags.names, help="parts that are done, once more")
    parser.add_argument("--output", type=flags.path, default=Path("results/gpu.jsonl"))
    parser.add_argument(
        "--goldens", type=flags.path, help="folder of reference numbers (else DZROBOT_GOLDENS)"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _check_device(device: str) -> None:
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch sees no GPU; to try the code: --device cpu --size tiny")


def _known(names: tuple[str, ...] | None) -> tuple[str, ...]:
    for name in names or ():
        if name not in PARTS:
            raise ConfigError(
                f"unknown part {name!r}.{suggest(name, PARTS)} Known: {', '.join(PARTS)}"
            )
    return names or ()


def _latest(output: Path, device: str, size: str) -> dict[str, Line]:
    """Return the last line of each part for this device and size."""
    if not output.exists():
        return {}
    # A last line that a crash left partial is dropped.
    files.whole_lines(output)
    lines = read_json_lines(output, Line, ConfigError)
    found = {line.part: line for line in lines if (line.device, line.size) == (device, size)}
    return {part: found[part] for part in PARTS if part in found}


def _measured(part: str, options: argparse.Namespace, device: str) -> Line:
    """Return the line of one part, which a process of its own runs."""
    command = [
        sys.executable, __file__, "--child", part, "--device", options.device, "--size",
        options.size,
    ]  # fmt: skip
    if options.goldens is not None:
        command += ["--goldens", str(options.goldens)]
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        outcome = Outcome("failed", f"not done after {LIMIT_S} s")
    else:
        outcome = _outcome(done)
    return Line(
        part=part, device=device, size=options.size, torch=torch.__version__,
        seconds=round(time.monotonic() - start, 1), **outcome._asdict(),
    )  # fmt: skip


def _outcome(done: subprocess.CompletedProcess[str]) -> Outcome:
    if done.returncode != 0:
        said = done.stderr.strip()[-_TAIL:]
        return Outcome("failed", said or f"ended with code {done.returncode}")
    last = done.stdout.strip().rpartition("\n")[2]
    return Outcome(**parse_json(last.encode(), dict, "what the part said", ConfigError))


def _child(options: argparse.Namespace) -> int:
    outcome = PARTS[options.child](
        Request(torch.device(options.device), options.size, options.goldens)
    )
    print(f"\n{json.dumps(outcome._asdict())}")
    return 0


def _print(device: str, size: str, found: Mapping[str, Line]) -> None:
    print(f"{device}, {size} size, torch {torch.__version__}")
    for part in PARTS:
        if part not in found:
            print(f"{part:<16}not run")
            continue
        line = found[part]
        reason = line.reason.strip().splitlines()[-1] if line.reason.strip() else ""
        print(f"{part:<16}{line.status:<10}{line.seconds:>6.0f} s  {reason[:120]}")
        for name, value in line.numbers.items():
            shown = f"{value:.4g}" if isinstance(value, float) else value
            print(f"{'':<16}{name}: {shown}")


if __name__ == "__main__":
    sys.exit(main())
