"""Small networks of both kinds with random weights, training batches and policy requests."""

from dataclasses import replace

import pytest
import torch

from dzrobot.policies.dreamzero.network.config import (
    DiTConfig,
    HeadConfig,
    ImageConfig,
    NetworkConfig,
    TextConfig,
    VaeConfig,
)
from dzrobot.policies.dreamzero.network.session import InferenceRequest, Prompt
from dzrobot.policies.dreamzero.network.world_action import TrainBatch, WorldActionModel

ACTIONS, ACTION_DIM, STATE_DIM, TEXT_LEN = 4, 7, 5, 96


def small_config(kind):
    """Return a network like ``kind`` with 2 x 3 tokens per frame and 4 actions per block."""
    five = kind == "5b"
    latents = 5 if five else 4
    return NetworkConfig(
        dit=DiTConfig(
            model_type="ti2v" if five else "i2v",
            dim=48, ffn_dim=64, num_heads=4, num_layers=3,
            in_dim=latents if five else 2 * latents + 4, out_dim=latents, frame_seqlen=6,
            concat_first_frame_latent=not five, freq_dim=32, text_dim=16, text_len=TEXT_LEN,
            clip_dim=8, action_dim=ACTION_DIM, max_state_dim=STATE_DIM, hidden_size=12,
            num_action_per_block=ACTIONS,
        ),
        text=TextConfig(vocab=40, dim=16, dim_attn=16, dim_ffn=16, num_heads=2, num_layers=1),
        image=ImageConfig(
            vision_dim=8, vision_heads=2, vision_layers=2, embed_dim=4, image_size=28, patch_size=7
        ),
        vae=VaeConfig(version="2.2", dim=4, z_dim=5, dec_dim=4) if five
        else VaeConfig(version="2.1", dim=4, z_dim=4),
        head=HeadConfig(action_horizon=ACTIONS),
    )  # fmt: skip


def build(config):
    """Return a network whose every weight is random, the final layer's too."""
    torch.manual_seed(7)
    model = WorldActionModel(config).eval()
    for module in (model.text_encoder, model.image_encoder, model.vae):
        module.requires_grad_(requires_grad=False)
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


_BUILT = {}


@pytest.fixture(params=["5b", pytest.param("14b", marks=pytest.mark.long)])
def kind(request):
    return request.param


@pytest.fixture
def network(kind):
    """Return the small network of ``kind``; do not change its weights."""
    if kind not in _BUILT:
        _BUILT[kind] = build(small_config(kind))
    _BUILT[kind].zero_grad()
    return _BUILT[kind]


@pytest.fixture
def dit_config():
    """Return the transformer of a small 5B."""
    return small_config("5b").dit


@pytest.fixture
def frames(kind):
    """Return a function from (count, seed) to uint8 frames of the network's size."""
    size = (64, 96) if kind == "5b" else (32, 48)

    def make(count, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (count, *size, 3), generator=generator, dtype=torch.uint8)

    return make


@pytest.fixture
def prompt():
    """Return a function from (length, seed) to a padded prompt."""

    def make(length, seed=0):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.zeros(TEXT_LEN, dtype=torch.int64)
        ids[:length] = torch.randint(2, 40, (length,), generator=generator)
        return Prompt(ids, torch.arange(TEXT_LEN) < length)

    return make


@pytest.fixture
def make_batch(network, frames, prompt):
    """Return a function from sample numbers to a training batch of two blocks."""

    def make(samples):
        rows = []
        for sample in samples:
            generator = torch.Generator().manual_seed(100 + sample)
            mask = torch.zeros(2 * ACTIONS, ACTION_DIM, dtype=torch.bool)
            mask[:, : 3 + sample % 3] = True
            rows.append(
                (
                    frames(17, sample),
                    torch.rand(2, STATE_DIM, generator=generator) * 2 - 1,
                    (torch.rand(2 * ACTIONS, ACTION_DIM, generator=generator) * 2 - 1) * mask,
                    mask,
                    torch.tensor(sample % 4 != 3),
                )
            )
        images, state, action, mask, real = (
            torch.stack(parts) for parts in zip(*rows, strict=True)
        )
        prompts = [prompt(5 + 11 * sample, sample) for sample in samples]
        return TrainBatch(
            images=images,
            state_BSM=state,
            action_BAM=action,
            action_mask_BAM=mask,
            has_real_action_B=real,
            prompt=network.embed_prompts(
                torch.stack([p.ids_N for p in prompts]), torch.stack([p.mask_N for p in prompts])
            ),
        )

    return make


@pytest.fixture
def ask(frames, prompt):
    """Return a function that makes the request of one call."""

    def make(count=1, seed=0, words=7, **more):
        generator = torch.Generator().manual_seed(seed)
        request = InferenceRequest(
            images_THW3=frames(count, seed),
            state_SM=torch.rand(1, STATE_DIM, generator=generator),
            prompt=prompt(words, words),
            negative=prompt(20, 99),
        )
        return replace(request, **more)

    return make
