"""A run that is asked to stop: it saves, and whoever started it learns that it is not done."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import train_worlds

ROOT = Path(__file__).parents[2]
DZROBOT = (sys.executable, "-m", "dzrobot.cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")

ASKED = {
    "command": ((*DZROBOT, "train"), 143),
    "script": ((sys.executable, str(ROOT / "training" / "sft.py")), 143),
    "processes": ((*DZROBOT, "train", "--processes", "2"), 143),
    # torchrun ends with 1 whatever its processes end with.
    "torchrun": ((*TORCHRUN, "--nproc-per-node", "2", str(ROOT / "training" / "sft.py")), 1),
    "slurm": (("bash", str(ROOT / "examples" / "train.sbatch")), 143),
}
"""Ways to start a run -> command, and its exit code when a scheduler has asked it to stop."""

SRUN = """#!{python}
import os, signal, subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith("--kill")]
env = [{{**os.environ, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}} for n in range(2)]
ranks = [subprocess.Popen(words, env=one) for one in env]
signal.signal(signal.SIGTERM, lambda *_: [rank.send_signal(signal.SIGTERM) for rank in ranks])
sys.exit(max(rank.wait() for rank in ranks))
"""
SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> {folder}/requeued; fi
"""


def slurm(folder, environment):
    """Return an environment in which stand-ins answer to Slurm's names, on this machine."""
    programs = {
        "srun": SRUN.format(python=sys.executable), "scontrol": SCONTROL.format(folder=folder),
        "dzrobot": f'#!/bin/sh\nexec {sys.executable} -m dzrobot.cli "$@"\n',
    }  # fmt: skip
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return environment | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "MASTER_PORT": port,
        "SLURM_JOB_ID": f"7{os.getpid()}", "SLURM_JOB_NODELIST": "here", "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("way", ASKED)
def test_a_run_that_was_asked_to_stop_saves_and_does_not_end_with_zero(
    way, train_root, train_environment, tmp_path
):
    recipe = tmp_path / "recipe.yaml"
    values = train_worlds.recipe(train_root, runner__output_dir=tmp_path / "run")
    values["runner"]["max_steps"] = 2000
    values["data"]["num_workers"] = 1
    recipe.write_text(json.dumps(values))
    command, code = ASKED[way]
    environment = train_environment
    if way == "slurm":
        environment = slurm(tmp_path, environment)
    process = subprocess.Popen(
        [*command, str(recipe)], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    wait_for(tmp_path / "run" / "metrics.jsonl", process)
    if way == "slurm":
        # To the processes of srun and not to the script, as without "B:".
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGTERM)
    elif way in ("processes", "torchrun"):
        process.terminate()
    else:
        # The whole group, readers included.
        os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors

    from dzrobot.training.run.checkpoint import complete_checkpoints

    (*_, saved) = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert f"saved at step {saved.step} of 2000" in errors
    short = [f"runner.max_steps={saved.step + 1}", "runner.resume_dir=auto"]
    if way == "slurm":
        asked = (tmp_path / "requeued").read_text()
        assert asked == f"requeue {environment['SLURM_JOB_ID']}\n"
    again = subprocess.run(
        [*command, str(recipe), *short], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert f"resumed {saved.path}" in again.stderr
    if way == "slurm":
        assert (tmp_path / "requeued").read_text().count("\n") == 1


def wait_for(path, process, seconds=600):
    end = time.monotonic() + seconds
    while not (path.exists() and path.read_text().count("\n")):
        assert process.poll() is None, process.stderr.read()[-3000:]
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.2)
