"""Score a tiny policy on 100 held-out starts, and check that it uses its images.

    python examples/score_tiny.py                       # the bundled checkpoint
    python examples/score_tiny.py --checkpoint PATH --episodes 20 --ablated 10

Four evaluations, one table: with and without memory of past frames, and twice with images that
carry no information about this start. Each is a public command, printed before it runs. The same
command resumes an interrupted run.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dzrobot.policies.dreamzero.bundled import EMBODIMENT, default_checkpoint

VARIANTS = {
    "history on": ("--history", "recent"),
    "history off": ("--history", "off"),
    "images shuffled": ("--ablate-images", "shuffle"),
    "images of another initial state": ("--ablate-images", "other-start"),
}
RESOLUTION = 128


def main() -> int:
    """Run the missing evaluations and print the table."""
    options = _arguments()
    results = {}
    for name, flags in VARIANTS.items():
        output = options.output / name.replace(" ", "-")
        episodes = options.ablated if "--ablate-images" in flags else options.episodes
        command = [*_evaluation(options), *flags]
        command += ["--episodes", str(episodes), "--output", str(output)]
        print(f"{name}: {shlex.join(command)}", flush=True)
        code = subprocess.run(command, check=False).returncode
        if code != 0:
            print(f"{name} ended with code {code}; the same command resumes from here")
            return code
        results[name] = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    Console().print(_table(results))
    return 0


def _evaluation(options: argparse.Namespace) -> list[str]:
    return [
        sys.executable, "-m", "dzrobot.cli", "eval", "--env", "dzrobot/lift-v0",
        "--protocol", "lift-100", "--env-arg", f"resolution={RESOLUTION}",
        "--checkpoint", str(options.checkpoint or default_checkpoint()), "--embodiment", EMBODIMENT,
        "--workers", str(options.workers),
        "--device", options.device, "--videos", "none",
    ]  # fmt: skip


def _table(results: dict[str, dict[str, object]]) -> Table:
    table = Table("Lift", "success", "rate", "95 % interval (Wilson)", "steps")
    for name, summary in results.items():
        total = summary["results"]["total"][0]  # type: ignore[index]
        table.add_row(
            name,
            f"{total['successes']}/{total['episodes']}",
            f"{total['rate']:.0%}",
            f"{total['low']:.0%} to {total['high']:.0%}",
            "" if total["mean_steps"] is None else f"{total['mean_steps']:.0f}",
        )
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--checkpoint", type=Path, help="folder (default: the bundled one)")
    parser.add_argument("--episodes", type=int, default=100, help="episodes per row, seeds 0 on")
    parser.add_argument(
        "--ablated",
        type=int,
        default=20,
        help="episodes per row with corrupted images: failures are long",
    )
    parser.add_argument("--workers", type=int, default=2, help="simulators at the same time")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--output", type=Path, default=Path("results") / "score_tiny")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
