"""Plans that continue a running one: exact beginnings, soft overlaps, and nothing else changed."""

import itertools

import pytest
import torch

from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.network.config import GenerateOptions
from dzrobot.policies.dreamzero.network.continuation import (
    Continuation,
    Continuations,
    overlap_weights,
)
from dzrobot.policies.dreamzero.network.diffusion import inference_schedule
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.session import SessionCache

ROWS, WIDTH = 24, 1
DELAY, END = 4, 12
FEW = GenerateOptions(dit_steps=5)


def continuing(rows, *, delay, end=None, mask=None, **changes):
    mask = torch.ones(rows.shape[1], dtype=torch.bool) if mask is None else mask
    end = len(rows) if end is None else end
    return Continuation(action_AM=rows, mask_M=mask, delay=delay, end=end, **changes)


# The closed form: plans are draws of a Gaussian process, or of two; the denoiser is known.
COVARIANCE = 0.25 * torch.exp(
    -0.5 * ((torch.arange(ROWS)[:, None] - torch.arange(ROWS)) / 5.0) ** 2
) + 1e-4 * torch.eye(ROWS)
MEAN_STEP = 0.080
RAMP = ((torch.arange(ROWS) + 1) / 8).clamp(0, 1)


def draws(count, covariance, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, ROWS, generator=generator) @ torch.linalg.cholesky(covariance).T


def clean_of(x, sigma, covariance, means):
    """Return the expected plan given a noisy one, (B, A)."""
    both = (1 - sigma) ** 2 * covariance + sigma**2 * torch.eye(ROWS)
    gain = (1 - sigma) * covariance @ torch.linalg.inv(both)
    off = torch.stack([x - (1 - sigma) * mean for mean in means])
    # How well each mode explains what is seen.
    score = -0.5 * torch.einsum("kbi,ij,kbj->kb", off, torch.linalg.inv(both), off)
    guesses = torch.stack([m + o @ gain.T for m, o in zip(means, off, strict=True)])
    return (torch.softmax(score, 0)[..., None] * guesses).sum(0)


def sampled(known, *, covariance=COVARIANCE, means=(0 * RAMP,), guided=True, seed=1):
    """Return plans (B, A) of the closed form that continue ``known``."""
    x = torch.randn(known.shape, generator=torch.Generator().manual_seed(seed))[..., None]
    parts = [continuing(row[:, None], delay=DELAY, end=END) for row in known]
    joint = Continuations.of(parts, x, 16)
    sigmas = inference_schedule(16).sigmas
    for sigma, after in itertools.pairwise(sigmas):
        clean = clean_of(x[..., 0], sigma, covariance, means)[..., None]
        flow = (x - clean) / sigma
        x = x + (after - sigma) * (joint.guided(flow, x, sigma) if guided else flow)
    return (joint.closed(x) if guided else x)[..., 0]


def test_weights_are_the_published_ones():
    linear = overlap_weights(8, 2, 4)
    torch.testing.assert_close(linear, torch.tensor([1, 1, 2 / 3, 1 / 3, 0, 0, 0, 0]))
    bent = overlap_weights(8, 2, 4, "exp")
    assert torch.equal(bent == 0, linear == 0)
    assert torch.equal(bent == 1, linear == 1)
    assert (bent[2:4] < linear[2:4]).all()


def test_a_gaussian_plan_is_continued_without_a_jump():
    known = draws(200, COVARIANCE, 0)
    known[:, END:] = 0
    plans = sampled(known)
    assert torch.equal(plans[:, :DELAY], known[:, :DELAY])
    jump = (plans[:, DELAY] - plans[:, DELAY - 1]).abs().mean()
    naive = (sampled(known, guided=False)[:, DELAY] - known[:, DELAY - 1]).abs().mean()
    assert jump <= 1.5 * MEAN_STEP < 0.5 * naive


def test_a_decision_is_kept():
    """Two ways to go, of which the running plan has taken one."""
    narrow, means = 0.08 * COVARIANCE, (RAMP, -RAMP)
    known = RAMP + draws(200, narrow, 0)
    known[:, END:] = 0
    kept, naive = (
        (sampled(known, covariance=narrow, means=means, guided=guided)[:, -1] > 0).float().mean()
        for guided in (True, False)
    )
    assert kept >= 0.95
    assert naive <= 0.6


def test_what_is_known_already_stays():
    """A network that predicts exactly the running plan is not moved from it."""
    known = draws(3, COVARIANCE, 0)
    x = torch.randn(3, ROWS, 1)
    joint = Continuations.of([continuing(row[:, None], delay=DELAY) for row in known], x, 16)
    flow = (x - known[..., None]) / 0.5
    torch.testing.assert_close(joint.guided(flow, x, 0.5), flow, rtol=0, atol=1e-5)


def test_no_guidance_changes_no_bit_after_the_prefix(network, ask):
    plain = predict(network, [SessionCache()], [ask(1, 3)], FEW)
    rows = torch.zeros_like(plain.action_BAM[0])
    part = continuing(rows, delay=1, strength=0.0)
    given = predict(network, [SessionCache()], [ask(1, 3, continuation=part)], FEW)
    assert torch.equal(given.action_BAM[:, 1:], plain.action_BAM[:, 1:])
    assert torch.equal(given.videos[0], plain.videos[0])


@pytest.mark.parametrize("method", ["guided", "trained"])
def test_the_first_rows_are_exact_and_the_rest_answers_to_them(network, ask, method):
    plain = predict(network, [SessionCache()], [ask(1, 3)], FEW).action_BAM[0]
    rows = 0.9 * torch.ones_like(plain)
    part = continuing(rows, delay=2, method=method)
    given = predict(network, [SessionCache()], [ask(1, 3, continuation=part)], FEW).action_BAM[0]
    assert torch.equal(given[:2], rows[:2])
    assert (given[2:] - plain[2:]).abs().max() > 1e-4


@pytest.mark.parametrize("method", ["guided", "trained"])
def test_sessions_with_and_without_share_a_call(network, ask, method):
    rows = 0.5 * torch.ones(network.config.head.action_horizon, network.config.dit.action_dim)
    asked = [
        ask(1, 3),
        ask(1, 4, continuation=continuing(rows, delay=2, end=3, method=method)),
    ]
    alone = [predict(network, [SessionCache()], [one], FEW).action_BAM[0] for one in asked]
    both = predict(network, [SessionCache(), SessionCache()], asked, FEW).action_BAM
    for one, other in zip(both, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("delay", "end"), [(0, 3), (4, 3), (1, 9)])
def test_impossible_ones_are_refused(delay, end):
    with pytest.raises(ConfigError, match="continues 1 to"):
        continuing(torch.zeros(8, 7), delay=delay, end=end)
