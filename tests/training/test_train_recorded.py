"""Recorded training blocks: the bits of blocks that are launched operator by operator.

Without a GPU, what was recorded runs operator by operator, from and into the tensors of the
recording. What it left there is overwritten after each turn, as a GPU's memory is by other work.
"""

import pytest
import torch
import train_worker

from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.network import attention
from dzrobot.policies.dreamzero.network import recorded_blocks as recorded
from dzrobot.policies.dreamzero.network.graphs import GraphRecorder
from dzrobot.training.run.evaluation import evaluate_open_loop

RECOMPUTED = {"parallel__activation_checkpointing": "full"}
RECORDED = {**RECOMPUTED, "parallel__cuda_graphs": "blocks"}


class Forgetful(GraphRecorder):
    """Loses all that it has read and written as soon as it has handed its results out."""

    turns: list

    def __init__(self, device):
        super().__init__(device)
        type(self).turns = []

    def run(self, key, work, given):
        before = len(self._recorded)
        outputs = super().run(key, work, given)
        self.turns.append(key[0][0] + "*" * (len(self._recorded) - before))
        for one in self._recorded.values():
            for tensor in (*one.inputs, *recorded.tensors_of(one.outputs)):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
        return outputs


@pytest.fixture
def recording(monkeypatch):
    """Let a processor record."""
    monkeypatch.setattr("dzrobot.training.run.parallel.recordable_devices", {"cpu"})
    monkeypatch.setattr(recorded, "GraphRecorder", Forgetful)
    # A processor attends bfloat16 by other operators where there are gradients.
    monkeypatch.setattr(attention, "plain_devices", set())


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"parallel__param_dtype": "bf16"}, {"runner__micro_batch_size": 2},
        {"model__is_lora": True}, {"parallel__kept_blocks": 1},
        {"parallel__enable_gradient_accumulation": True},
        {"model__action_only_ratio": 0.5},
    ],
    ids=lambda changes: next(iter(changes), "plain"),
)  # fmt: skip
def test_recorded_blocks_give_the_same_bits(recording, train_root, solo, changes):
    wanted, found = (
        train_worker.gradients(train_worker.trainer(solo, train_root, **way, **changes))
        for way in (RECOMPUTED, RECORDED)
    )
    assert torch.equal(found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert torch.equal(found[1][name], gradient), name
    assert Forgetful.turns


def test_each_kind_of_block_is_recorded_once_both_ways(recording, train_root, solo):
    """The last block has fewer queries. Both passes are recorded before the first backward pass."""
    run = train_worker.trainer(solo, train_root, **RECORDED, runner__micro_batch_size=2)
    batches = run.batches(8)
    run.train_step(batches)
    first = "f* b* f* b* b b f f b b"
    assert " ".join(Forgetful.turns) == first
    run.train_step(batches)
    assert " ".join(Forgetful.turns) == f"{first} f f b b f f b b"


def test_evaluations_run_as_they_are(recording, train_root, solo):
    changes = {"data__holdout_episodes": 1, "runner__eval_windows": 1}
    run = train_worker.trainer(solo, train_root, **RECORDED, **changes)
    block = run.components.model.model.blocks[0]
    seen = []
    block.block.register_forward_hook(lambda *_: seen.append(1))
    evaluate_open_loop(run.components)
    assert len(seen) > 1
    assert Forgetful.turns == []


def test_a_processor_has_nothing_to_record(train_root, solo):
    with pytest.raises(ConfigError, match="this run is on cpu; leave it out"):
        train_worker.trainer(solo, train_root, **RECORDED)
