"""Eight bits, for the optimizer's moments and for products: what they cost, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch
import train_worker
import train_worlds

pytest.importorskip("torchao", reason="eight bits need torchao")

from dzrobot.errors import CheckpointError, ConfigError
from dzrobot.policies.dreamzero.checkpoints.lora import adapted_layers
from dzrobot.policies.dreamzero.network.config import preset
from dzrobot.policies.dreamzero.quantize import NF4_BYTES
from dzrobot.training.cost.memory import (
    GIB,
    Setup,
    count_parameters,
    moment_block,
    moment_bytes,
    plan_memory,
)
from dzrobot.training.cost.plan import RunPlan, check_fits
from dzrobot.training.recipes import check
from dzrobot.training.run.optimizer import Optimizer
from dzrobot.training.sft_config import ModelConfig, OptimConfig, ParallelConfig


def parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "a.weight": (96, 64),
        "wide.weight": (8, 768),
        "norm.weight": (64,),
        "b.weight": (4, 4),
    }
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    }


def config(moments):
    return OptimConfig(
        lr=1e-2, lr_scheduler="constant", lr_warmup_steps=0, clip_grad=1e9, moments=moments
    )


def train(moments, steps=5):
    """Return the parameters and their optimizer after gradients that all runs share."""
    named = parameters()
    optimizer = Optimizer(named.items(), config(moments), steps)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return named, optimizer


def test_updates_are_close_to_those_in_float32():
    first = parameters()
    exact, approximate = train("fp32")[0], train("8bit")[0]
    for name, parameter in exact.items():
        moved = parameter - first[name]
        error = (approximate[name] - parameter).norm() / moved.norm()
        if moment_block(tuple(parameter.shape)) is None:
            assert error < 1e-4
        else:
            # Other numbers, which says that eight bits were used, but the same steps.
            assert 1e-3 < error < 0.05


def test_a_block_lies_within_a_row():
    assert moment_block((5120, 5120)) == 256
    assert moment_block((96, 64)) == 64
    assert moment_block((40, 192)) == 64
    assert moment_block((5120, 16)) is None
    assert moment_block((8, 64)) is None
    assert moment_block((5120,)) is None


def test_a_gradient_that_is_not_finite_changes_nothing():
    named, optimizer = train("8bit")
    kept = [parameter.detach().clone() for parameter in named.values()]
    moments = {n: {k: t.clone() for k, t in m.items()} for n, m in optimizer.moments().items()}
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    named["norm.weight"].grad[0] = math.nan
    assert optimizer.step().skipped.item() == 1
    assert optimizer.updates.item() == 5
    assert all(torch.equal(p, k) for p, k in zip(named.values(), kept, strict=True))
    for name, both in optimizer.moments().items():
        assert all(torch.equal(both[key], moments[name][key]) for key in both)
    assert all(parameter.grad is None for parameter in named.values())


def test_the_plan_counts_what_the_optimizer_holds(train_root, solo):
    run = train_worker.trainer(solo, train_root, optim__moments="8bit")
    held = sum(t.numel() * t.element_size() for m in moments(run) for t in m.values())
    counts = count_parameters(run.components.network, is_lora=False)
    assert held == counts.eight_bit_bytes
    assert counts.eight_bit_bytes < 0.5 * 8 * counts.trained
    assert moment_bytes((5120, 5120)) == pytest.approx(2.03, abs=0.01)


def moments(run):
    return run.components.optimizer.moments().values()


@pytest.fixture(scope="module")
def resumed(launches):
    """Return the launches after two processes have trained, saved and resumed."""
    launches.run(2, "eight_bit")
    return launches


@pytest.mark.long
def test_resume_is_bit_exact_on_any_number_of_processes(resumed, train_root, solo):
    launches = resumed
    found = launches.result("eight_bit", 2)
    assert found["restored"] == found["half"]
    assert found["digest"] == found["straight"] != found["half"]
    alone = train_worker.eight_bit_again(solo, train_root, launches.output)
    assert alone["restored"] == found["half"]


@pytest.mark.long
def test_rows_that_do_not_divide_by_the_processes(resumed):
    launches = resumed
    launches.run(3, "eight_bit_again")
    assert (
        launches.result("eight_bit_again", 3)["restored"] == launches.result("eight_bit", 2)["half"]
    )


def test_moments_of_another_kind_are_refused(train_root, solo, tmp_path):
    run = train_worker.trainer(solo, train_root, runner__output_dir=tmp_path)
    run.step = 2
    run.save(wait=True)
    other = train_worker.trainer(
        solo, train_root, runner__resume_dir=tmp_path, optim__moments="8bit"
    )
    with pytest.raises(CheckpointError, match="moments: checkpoint fp32, run 8bit"):
        other.resume()


def test_a_run_without_torchao_does_not_start(train_root, monkeypatch):
    monkeypatch.setattr(check, "find_spec", lambda _: None)
    (fault,) = check.find_faults(train_worlds.config(train_root, optim__moments="8bit"), 1)
    assert fault.field == "optim.moments"
    assert "pip install -e '.[quantize]'" in fault.message


def test_a_plan_proposes_it_where_it_is_enough():
    counts = count_parameters(preset("14b"), is_lora=False)
    setup = Setup(
        network=preset("14b"), model=ModelConfig(embodiment_tag="oxe_droid"),
        parallel=ParallelConfig(), image_size=(352, 640), micro_batch=1, devices=8, averaged=False,
    )  # fmt: skip
    exact, approximate = (
        plan_memory(replace(setup, eight_bit=chosen), counts) for chosen in (False, True)
    )
    saved = 8 * counts.trained - counts.eight_bit_bytes
    assert saved > 5.9 * counts.trained
    assert exact.peak - approximate.peak == pytest.approx(1.03 * saved / 8)
    between = (exact.peak + approximate.peak) / 2 / GIB
    with pytest.raises(ConfigError, match=r"on 8 devices: optim\.moments=8bit"):
        check_fits(RunPlan(setup, counts, exact), between)


def test_host_memory_needs_no_eight_bits(train_root):
    changes = {"optim__moments": "8bit", "parallel__cpu_offload": True}
    (fault,) = check.find_faults(train_worlds.config(train_root, **changes), 1)
    assert (fault.field, "choose one" in fault.message) == ("optim.moments", True)


def test_products_in_float8_are_close(train_root, solo, tmp_path):
    """Three bits of mantissa: a product is off by a few percent, and so are gradients."""
    exact, rounded = (
        train_worker.gradients(
            train_worker.trainer(
                solo,
                train_root,
                runner__output_dir=tmp_path / str(chosen),
                parallel__float8=chosen,
            )
        )[1]
        for chosen in (False, True)
    )
    assert exact.keys() == rounded.keys()
    off = {
        name: ((rounded[name] - wanted).norm() / wanted.norm()).item()
        for name, wanted in exact.items()
        if wanted.norm() > 0
    }
    in_blocks = [error for name, error in off.items() if name.startswith("blocks.0.ffn")]
    assert len(in_blocks) == 4
    assert all(1e-3 < error < 0.2 for error in in_blocks)


def test_float8_of_adapters_is_refused(train_root):
    changes = {"parallel__float8": True, "model__is_lora": True}
    found = {
        f.field: f.message for f in check.find_faults(train_worlds.config(train_root, **changes), 1)
    }
    assert "leave it out with model.is_lora" in found["parallel.float8"]


def adapted(solo, root, **changes):
    return train_worker.trainer(solo, root, model__is_lora=True, **changes)


def test_adapters_are_trained_against_a_base_in_four_bits(train_root, solo):
    """The frozen weights are rounded as torchao rounds them, in every layer with adapters."""
    exact, rounded = adapted(solo, train_root), adapted(solo, train_root, model__lora_base="nf4")
    pairs = zip(
        adapted_layers(exact.components.model).values(),
        adapted_layers(rounded.components.model).values(),
        strict=True,
    )
    layers = [(one.weight.full_tensor(), other) for one, other in pairs]
    assert len(layers) == 20
    for weight, other in layers:
        assert type(other.weight).__name__ == "NF4Tensor"
        assert not other.weight.requires_grad
        # The widest gap of the format is 0.304 of a block's largest weight.
        off = (other.weight.to(torch.float32) - weight).view(-1, 64).abs().amax(1)
        assert torch.all(off <= 0.16 * weight.view(-1, 64).abs().amax(1))


@pytest.mark.long
def test_gradients_and_steps_with_a_base_in_four_bits(train_root, solo):
    runs = [
        adapted(solo, train_root, **changes)
        for changes in (
            {},
            {"model__lora_base": "nf4"},
            {"model__lora_base": "nf4", "parallel__activation_checkpointing": "full"},
        )
    ]
    (exact, plain), (loss, gradients), (again, recomputed) = (
        train_worker.gradients(run) for run in runs
    )
    # Weights are off by a tenth; they are random, so a loss says little.
    torch.testing.assert_close(loss, exact, rtol=0.1, atol=0)
    assert not torch.equal(loss, exact)
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients)
    off = [(gradients[n] - g).norm() / g.norm() for n, g in plain.items() if g.norm() > 0]
    assert 1e-3 < max(off) < 0.5


def lora_plan(base):
    network = preset("14b")
    setup = Setup(
        network=replace(network, head=replace(network.head, train_architecture="lora")),
        model=ModelConfig(embodiment_tag="libero_sim", is_lora=True, lora_base=base),
        parallel=ParallelConfig(), image_size=(256, 512), micro_batch=1, devices=1,
        averaged=False,
    )  # fmt: skip
    counts = count_parameters(setup.network, is_lora=True)
    return RunPlan(setup, counts, plan_memory(setup, counts))


def test_the_plan_counts_a_base_in_four_bits(train_root, solo):
    plan = lora_plan("nf4")
    # q, k, v, o of two attentions, ffn.0 and ffn.2, in forty blocks.
    assert plan.counts.adapted == 40 * (8 * 5120**2 + 2 * 5120 * 13824)
    check_fits(plan, 32)
    with pytest.raises(ConfigError, match=r"model\.lora_base=nf4"):
        check_fits(lora_plan("full"), 32)

    run = adapted(solo, train_root, model__lora_base="nf4").components
    weights = [layer.weight for layer in adapted_layers(run.model).values()]
    held = sum(
        part.numel() * part.element_size()
        for weight in weights
        for part in (weight.quantized_data, weight.quantized_scalers, weight.quantization_factor)
    )
    counts = count_parameters(run.network, is_lora=True)
    assert sum(weight.numel() for weight in weights) == counts.adapted
    # Scales of the small layers are fewer to one of their own.
    assert held == pytest.approx(NF4_BYTES * counts.adapted, rel=0.01)


def test_a_base_in_four_bits_without_adapters_is_refused(train_root):
    config = train_worlds.config(train_root, model__lora_base="nf4")
    found = {f.field: f.message for f in check.find_faults(config, 1)}
    assert "is_lora is false" in found["model.lora_base"]
