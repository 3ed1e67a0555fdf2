"""Writes ``rlinf_frames.json``: the frames that RLinf's own sampler draws, from its wheel.

    pip download --no-deps rlinf==0.3.0
    python tests/training/make_rlinf_frames.py rlinf-0.3.0-py3-none-any.whl

Needs NumPy and nothing of dzrobot. The sampler is run out of the wheel, whose hash is checked;
none of its text is kept. For every start of episodes of 20 to 200 rows, with one instruction, with
a change, and with a change and back, the file holds what is drawn, as runs of starts that draw the
same rows relative to themselves.
"""

import hashlib
import json
import sys
import types
import zipfile
from pathlib import Path

import numpy as np

WHEEL = "rlinf-0.3.0-py3-none-any.whl"
SHA256 = "bce718baceb029bb7c2baa24688dc97efaf83ca1fa766cdb3cbc83789446303c"
SAMPLER = "rlinf/data/datasets/dreamzero/sampling_strategy.py"

GRIDS = {
    # Those of the five published recipes.
    "libero": {"action_horizon": 16, "macro_stride": 16, "offsets": list(range(0, 24, 3))},
    "droid": {"action_horizon": 24, "macro_stride": 24, "offsets": list(range(0, 24, 3))},
    "franka": {"action_horizon": 12, "macro_stride": 12, "offsets": list(range(8))},
    # Others that a file may ask for.
    "default_at_12": {"action_horizon": 12, "macro_stride": 12, "offsets": list(range(0, 24, 3))},
    "wide": {"action_horizon": 8, "macro_stride": 20, "offsets": list(range(0, 16, 2))},
    "short": {"action_horizon": 8, "macro_stride": 8, "offsets": list(range(8)), "blocks": 2},
    "four": {"action_horizon": 16, "macro_stride": 16, "offsets": [0, 4, 8, 12], "blocks": 3},
    "overlapping": {"action_horizon": 16, "macro_stride": 12, "offsets": list(range(8))},
}
LENGTHS = range(20, 201)


def labels(kind, length):
    """Return the instruction of every row."""
    rows = np.arange(length)
    return {
        "one": np.zeros(length, np.int64),
        "changes": (rows >= length // 2).astype(np.int64),
        "and back": ((rows >= 2 * length // 5) & (rows < 2 * length // 5 + 7)).astype(np.int64),
    }[kind]


def sampler(wheel):
    """Return RLinf's module, run out of the wheel."""
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if wheel.name != WHEEL or found != SHA256:
        sys.exit(f"{wheel} has the sha256 {found}; this file is made from {WHEEL}, {SHA256}")
    module = types.ModuleType("rlinf_sampler")
    sys.modules["rlinf_sampler"] = module
    with zipfile.ZipFile(wheel) as archive:
        exec(compile(archive.read(SAMPLER), SAMPLER, "exec"), module.__dict__)
    return module


def drawn(module, config, start, marks):
    """Return the rows of the sample at ``start``, relative to it; None where there is none."""
    try:
        rows = module.require_multi_anchor_temporal_indices(start, marks, len(marks), config)
    except module.EmptyTemporalSampleError:
        return None
    actions = rows.action.reshape(-1, config.action_horizon)
    assert (actions - actions[:, :1] == np.arange(config.action_horizon)).all()
    return [(part - start).tolist() for part in (rows.video, rows.state, actions[:, 0])]


def runs(module, grid, kind):
    """Return the samples that occur, and for every length the runs of starts that draw each."""
    config = module.MultiAnchorTemporalConfig(
        max_chunk_size=grid.get("blocks", 4),
        macro_stride=grid["macro_stride"],
        action_horizon=grid["action_horizon"],
        video_in_chunk_offsets=tuple(grid["offsets"]),
    )
    samples, by_length = [], {}
    for length in LENGTHS:
        marks, found = labels(kind, length), []
        for start in range(length):
            rows = drawn(module, config, start, marks)
            if rows is None:
                continue
            if rows not in samples:
                samples.append(rows)
            number = samples.index(rows)
            if found and found[-1][1] == start and found[-1][2] == number:
                found[-1][1] += 1
            else:
                found.append([start, start + 1, number])
        if found:
            by_length[length] = found
    return {"samples": samples, "runs": by_length}


def main():
    """Write the file beside this one."""
    module = sampler(Path(sys.argv[1]))
    kinds = ("one", "changes", "and back")
    made = {
        "made_by": "tests/training/make_rlinf_frames.py",
        "wheel": WHEEL,
        "sha256": SHA256,
        "lengths": [LENGTHS.start, LENGTHS.stop],
        "grids": {
            name: {**grid, **{kind: runs(module, grid, kind) for kind in kinds}}
            for name, grid in GRIDS.items()
        },
    }
    target = Path(__file__).with_name("rlinf_frames.json")
    target.write_text(json.dumps(made, separators=(",", ":")) + "\n")
    sys.stdout.write(f"{target}: {target.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
