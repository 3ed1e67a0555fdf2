"""Every saving in the transformer gives what the plain form gives."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dzrobot.policies.dreamzero.network import layers
from dzrobot.policies.dreamzero.network.attention import attend
from dzrobot.policies.dreamzero.network.config import preset
from dzrobot.policies.dreamzero.network.dit import (
    CausalDiT,
    Controls,
    Prompting,
    TrainForm,
    TrainInputs,
)
from dzrobot.policies.dreamzero.network.prompt import PromptEmbedding, compact

SAVING = TrainForm()
PLAIN = TrainForm(backend="dense", exact_savings=False)


def inputs_of(config, batch=2, blocks=2, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    frames, actions = 1 + 2 * blocks, blocks * config.num_action_per_block
    return TrainInputs(
        noisy_BCFYX=randn(batch, config.out_dim, frames, 4, 6),
        clean_BCFYX=randn(batch, config.out_dim, frames, 4, 6),
        timestep_BF=torch.rand(batch, frames, generator=generator) * 1000,
        controls=Controls(
            action_BAM=randn(batch, actions, config.action_dim),
            timestep_BA=torch.rand(batch, actions, generator=generator) * 1000,
            state_BSM=randn(batch, blocks, config.max_state_dim),
        ),
        prompting=Prompting(
            text_BNE=randn(batch, config.text_len, config.text_dim),
            image_BPE=randn(batch, 17, config.clip_dim),
        ),
    )


@pytest.fixture
def dit(dit_config):
    torch.manual_seed(3)
    return CausalDiT(dit_config)


def run(dit, inputs, form=SAVING):
    """Return outputs and gradients."""
    dit.zero_grad()
    video, action = dit(inputs, form)
    (video.square().sum() + action.square().sum()).backward()
    return [video.detach(), action.detach(), *(p.grad.clone() for p in dit.parameters())]


def assert_near(actual, expected, tolerance=1e-5):
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("name", ["5b", "14b"])
def test_names_and_shapes_are_the_published_ones(contract, name):
    with torch.device("meta"):
        dit = CausalDiT(preset(name).dit)
    listing = json.loads((contract / f"dreamzero_{name}_state_dict.json").read_text())
    prefix = "action_head.model."
    published = {
        key.removeprefix(prefix): tuple(tensor["shape"])
        for key, tensor in listing["tensors"].items()
        if key.startswith(prefix)
    }
    assert {key: tuple(p.shape) for key, p in dit.state_dict().items()} == published
    assert not list(dit.buffers())


@pytest.mark.parametrize("backend", ["dense", "packed"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_savings_are_exact_forward_and_backward(dit, backend, blocks):
    inputs = inputs_of(dit.config, blocks=blocks)
    plain = run(dit, inputs, PLAIN)
    for savings in (False, True):
        form = TrainForm(backend=backend, exact_savings=savings)
        assert_near(run(dit, inputs, form), plain)


def test_last_clean_block_reaches_nothing(dit):
    inputs = inputs_of(dit.config)
    changed = inputs.clean_BCFYX.clone()
    changed[:, :, -2:] += 1
    before = dit(inputs, PLAIN)
    after = dit(replace(inputs, clean_BCFYX=changed), PLAIN)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_modulation_per_timestep_is_bitwise_that_per_token(dit, dit_config):
    generator = torch.Generator().manual_seed(0)
    runs = ((1, 12), (5, 6), (8, 1), (2, 1))
    timestep = torch.rand(2, sum(count for count, _ in runs), generator=generator) * 1000

    def embed(timestep_BG):
        return dit.time_projection(
            dit.time_embedding(layers.sinusoid(timestep_BG, dit_config.freq_dim))
        )

    per_row = layers.spread(embed(timestep), runs)
    per_token = embed(layers.spread(timestep[..., None], runs)[..., 0])
    x, shift, scale = torch.randn(3, *per_row.shape, generator=generator)
    assert per_row.shape == per_token.shape
    row, token = (layers.modulate(x, e + shift, e + scale, 1e-6) for e in (per_row, per_token))
    assert torch.equal(row, token)


def test_activation_checkpointing_changes_no_bit(dit):
    inputs = inputs_of(dit.config)
    plain = run(dit, inputs)
    for block in dit.blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(
            forward, *args, use_reentrant=False
        )
    for a, b in zip(run(dit, inputs), plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.long
def test_blocks_compile_whole_and_only_once(dit_config):
    dit = CausalDiT(replace(dit_config, num_layers=2))
    inputs = inputs_of(dit.config, blocks=1)
    plain = run(dit, inputs)
    torch.compiler.reset()
    for block in dit.blocks:
        block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    compiled = run(dit, inputs)
    assert_near(compiled, plain, 1e-6)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (1, 2):
            run(dit, inputs_of(dit.config, blocks=1, seed=seed))
    torch.compiler.reset()


def test_a_cast_of_the_timesteps_is_refused_and_the_rest_is_cast_here(dit):
    inputs = inputs_of(dit.config)
    action = inputs.controls.timestep_BA
    for cast in (
        replace(inputs, timestep_BF=inputs.timestep_BF.bfloat16()),
        replace(inputs, controls=replace(inputs.controls, timestep_BA=action.bfloat16())),
        replace(inputs, controls=replace(inputs.controls, timestep_BA=action.half())),
    ):
        with pytest.raises(TypeError, match="cast_forward_inputs=False"):
            dit(cast)
    # 986.3 and 988 are one number in bf16, and two to a network in bf16.
    half = CausalDiT(dit.config).bfloat16()
    near, far = (
        half(replace(inputs, timestep_BF=torch.full_like(inputs.timestep_BF, t)))[0]
        for t in (986.3, 988.0)
    )
    assert not torch.equal(near, far)


def test_half_precision_stays_near(dit):
    inputs = inputs_of(dit.config)
    full = dit(inputs)
    half = dit.bfloat16()(inputs)
    assert_near([x.float() for x in half], full, 0.03)


@pytest.mark.parametrize("mask", ["none", "boolean", "bias"])
def test_attention_in_half_precision_learns_as_in_float32(mask):
    generator = torch.Generator().manual_seed(0)
    sizes = (30, 40, 40, 30)
    *given, back = (torch.randn(2, n, 4, 64, generator=generator).bfloat16() for n in sizes)
    seen = torch.rand(2, 1, 30, 40, generator=generator) < 0.7
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    masks = {"none": None, "boolean": seen, "bias": bias}

    def found(dtype):
        tensors = [tensor.to(dtype, copy=True).requires_grad_() for tensor in given]
        shown = masks[mask].to(dtype) if mask == "bias" else masks[mask]
        out = attend(*tensors, shown)
        assert out.dtype == dtype
        out.backward(back.to(dtype))
        return [out.detach(), *(tensor.grad for tensor in tensors)]

    for rounded, exact in zip(found(torch.bfloat16), found(torch.float32), strict=True):
        assert (rounded.float() - exact).norm() < 0.005 * exact.norm()
        assert not torch.equal(rounded.float(), exact)


@pytest.mark.parametrize("lengths", [(5, 40), (1, 1), (92, 3), (30, 96)])
def test_few_padding_rows_stand_for_all(dit, lengths):
    inputs = inputs_of(dit.config)
    rows = inputs.prompting.text_BNE.clone()
    for row, length in zip(rows, lengths, strict=True):
        row[length:] = 0
    plain = replace(inputs, prompting=replace(inputs.prompting, text_BNE=rows))
    few, bias = compact(PromptEmbedding(rows, lengths), row_step=8)
    short = replace(inputs, prompting=replace(inputs.prompting, text_BNE=few, text_bias_BN=bias))
    width = min(-(-(max(lengths) + 4) // 8) * 8, rows.shape[1])
    assert few.shape[1] == width
    assert (bias is None) == (width == rows.shape[1])
    few_rows, all_rows = run(dit, short), run(dit, plain)
    assert_near(few_rows[:2], all_rows[:2])
    assert_near(few_rows, all_rows, 1e-4)


@pytest.mark.parametrize("longest", [1, 60, 61, 125, 188, 500, 512])
def test_no_masked_call_has_as_many_keys_as_cudnn_fails_at(longest):
    """PyTorch #196678: its backward pass can give NaN where keys % 128 is 64."""
    few, bias = compact(PromptEmbedding(torch.zeros(2, 512, 2), (1, longest)))
    assert bias is None or few.shape[1] % 128 == 0


def test_padding_offsets_are_exact_in_bf16_too():
    embedding = PromptEmbedding(torch.zeros(3, 512, 2), (1, 60, 77))
    _, bias = compact(embedding)
    for length, row in zip(embedding.lengths, bias.bfloat16().double(), strict=True):
        assert row[:length].eq(0).all()
        assert row[length:].exp().sum().item() == pytest.approx(512 - length, rel=2e-5)


def test_uneven_blocks_are_refused(dit):
    inputs = inputs_of(dit.config)
    for wrong in (
        replace(inputs, noisy_BCFYX=inputs.noisy_BCFYX[:, :, :4]),
        replace(inputs, noisy_BCFYX=inputs.noisy_BCFYX[:, :, :1]),
        replace(
            inputs, controls=replace(inputs.controls, state_BSM=inputs.controls.state_BSM[:, :1])
        ),
    ):
        with pytest.raises(ValueError, match="whole blocks"):
            dit(wrong)
