"""Optimizer, schedule, clipping and average, on plain parameters."""

import math

import pytest
import torch

from dzrobot.training.run.optimizer import Ema, Optimizer, global_norm, is_decayed, schedule_factor
from dzrobot.training.sft_config import OptimConfig


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (4, 3), "norm.weight": (3,), "a.bias": (4,), "modulation": (1, 6, 4)}
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
    }


def give_gradients(named, scale=1.0):
    for i, parameter in enumerate(named.values()):
        parameter.grad = torch.full_like(parameter, scale * (i + 1))


def test_only_matrices_decay():
    decayed = {name for name, p in parameters().items() if is_decayed(name, p)}
    assert decayed == {"a.weight"}
    assert is_decayed("action_encoder.W1.W", torch.zeros(1, 2, 3))
    assert not is_decayed("action_encoder.W1.b", torch.zeros(1, 3))


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_schedule(kind):
    config = OptimConfig(lr_scheduler=kind, lr_warmup_steps=4, min_lr_ratio=0.1)
    for step in range(0, 24, 3):
        rise = min((step + 1) / 4, 1)
        share = min(max((step - 4) / 16, 0), 1)
        expected = rise * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))
        if kind == "constant":
            expected = rise
        found = schedule_factor(torch.tensor(float(step)), config, 20)
        assert found.item() == pytest.approx(expected, abs=1e-6)


def test_step_equals_the_library():
    config = OptimConfig(lr=1e-2, lr_scheduler="constant", lr_warmup_steps=0, clip_grad=1e9)
    ours, theirs = parameters(), parameters()
    optimizer = Optimizer(ours.items(), config, 10)
    reference = torch.optim.AdamW(
        [
            {"params": [theirs["a.weight"]], "weight_decay": config.weight_decay},
            {"params": [p for n, p in theirs.items() if n != "a.weight"], "weight_decay": 0.0},
        ],
        lr=1e-2, betas=(0.95, 0.999), eps=1e-8,
    )  # fmt: skip
    for scale in (1.0, -0.3, 2.0):
        give_gradients(ours, scale)
        give_gradients(theirs, scale)
        optimizer.step()
        reference.step()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [10.0, 0.01])
def test_a_step_clips_what_it_uses_and_reports_what_it_was_given(dtype, scale):
    """The first moment after one step is (1 - beta1) of the gradient that was used."""
    config = OptimConfig(clip_grad=1.0, lr_warmup_steps=0)
    named = parameters(dtype)
    optimizer = Optimizer(named.items(), config, 10)
    give_gradients(named, scale)
    outcome = optimizer.step()
    whole = sum((scale * (i + 1)) ** 2 * p.numel() for i, p in enumerate(named.values()))
    digits = 1e-5 if dtype == torch.float32 else 1e-2
    assert outcome.grad_norm.item() == pytest.approx(math.sqrt(whole), rel=digits)
    moments = [both["exp_avg"] for both in optimizer.moments().values()]
    used = global_norm(moments).item() / (1 - config.adam_beta1)
    assert used == pytest.approx(min(math.sqrt(whole), 1.0), rel=digits)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    named = parameters()
    optimizer = Optimizer(named.items(), OptimConfig(lr=1e-2, lr_warmup_steps=2), 10)
    give_gradients(named)
    optimizer.step()
    kept = [p.detach().clone() for p in named.values()]
    moments = {n: {k: t.clone() for k, t in m.items()} for n, m in optimizer.moments().items()}
    give_gradients(named)
    named["a.bias"].grad[0] = bad
    outcome = optimizer.step()
    assert outcome.skipped.item() == 1
    assert optimizer.updates.item() == 1
    assert all(torch.equal(p, k) for p, k in zip(named.values(), kept, strict=True))
    for name, both in optimizer.moments().items():
        assert all(torch.equal(both[key], moments[name][key]) for key in both)
    give_gradients(named)
    assert optimizer.step().lr.item() == pytest.approx(1e-2)


def test_torchs_fused_adamw_reads_found_inf():
    """A name that is not public; see `_FusedAdamW.step`."""
    weight = torch.nn.Parameter(torch.ones(3))
    adamw = torch.optim.AdamW([weight], lr=torch.tensor(0.1), fused=True)
    for found_inf, moves in ((1.0, False), (0.0, True)):
        weight.grad = torch.ones(3)
        vars(adamw).update(grad_scale=None, found_inf=torch.tensor(found_inf))
        adamw.step()
        assert bool((weight != 1).any()) == moves


def test_average_is_the_recurrence_and_rests_when_skipped():
    named = parameters()
    average = Ema(named, 0.9)
    first = named["a.weight"].detach().clone()
    named["a.weight"].data.add_(1.0)
    average.update(torch.tensor(1.0))
    assert torch.equal(average.average["a.weight"], first)
    average.update(torch.tensor(0.0))
    expected = 0.9 * first + 0.1 * (first + 1)
    torch.testing.assert_close(average.average["a.weight"], expected, rtol=0, atol=1e-6)
