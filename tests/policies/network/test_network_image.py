"""Image embeddings: what counts, what is carried along, and precision."""

import pytest
import torch

from dzrobot.policies.dreamzero.network.config import ImageConfig
from dzrobot.policies.dreamzero.network.image import ImageEncoder

CONFIG = ImageConfig(
    vision_dim=16, vision_heads=2, vision_layers=3, embed_dim=4, image_size=28, patch_size=7
)


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return ImageEncoder(CONFIG).eval().requires_grad_(requires_grad=False)


@pytest.fixture(scope="module")
def frames():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(2, 3, 20, 36, generator=generator) * 2 - 1


def test_tokens_are_those_before_the_last_block(encoder, frames):
    hidden = []
    last = encoder.vision.encoder.layers[-2]
    hook = last.register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
    tokens = encoder(frames)
    hook.remove()

    assert tokens.shape == (2, 1 + (28 // 7) ** 2, 16)
    assert torch.equal(tokens, hidden[0])
    carried = ("head", "log_scale", "vision.post_layernorm", "vision.encoder.layers.2")
    for name, tensor in encoder.state_dict().items():
        if name.startswith(carried):
            tensor.fill_(torch.nan)
    assert torch.equal(encoder(frames), tokens)


def test_each_frame_is_seen_alone(encoder, frames):
    alone = torch.cat([encoder(frame[None]) for frame in frames])
    torch.testing.assert_close(encoder(frames), alone, rtol=1e-5, atol=1e-5)


def test_half_precision_stays_near(encoder, frames):
    full = encoder(frames)
    half = encoder.bfloat16()(frames.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - full).norm() / full.norm() < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_encoder_has_the_bits_of_the_library(frames, dtype):
    """``transformers`` is somebody else's implementation of the same encoder."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    own = ImageEncoder(CONFIG).to(dtype).eval()
    sizes = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16 * CONFIG.vision_mlp_ratio, num_hidden_layers=3,
        num_attention_heads=2, image_size=28, patch_size=7, hidden_act="gelu", layer_norm_eps=1e-5,
    )  # fmt: skip
    library = CLIPVisionModel(sizes).to(dtype).eval()
    library.load_state_dict(own.vision.state_dict())
    with torch.no_grad():
        wanted = library(own.pixels(frames).to(dtype), output_hidden_states=True)
        assert torch.equal(own(frames), wanted.hidden_states[-2])
