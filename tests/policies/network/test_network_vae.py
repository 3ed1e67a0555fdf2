"""Video latents: chunks, batches, and no state between calls."""

import copy
import threading

import pytest
import torch
from rehearsal.library import LibraryCoder
from torch import nn

from dzrobot.errors import ModalityError
from dzrobot.policies.dreamzero.network.config import VaeConfig
from dzrobot.policies.dreamzero.network.layers import compile_blocks, convolve
from dzrobot.policies.dreamzero.network.vae import Vae

CONFIGS = {
    "2.1": VaeConfig(version="2.1", dim=4, z_dim=4),
    "2.2": VaeConfig(version="2.2", dim=4, z_dim=6, dec_dim=6),
}


@pytest.fixture(scope="module", params=CONFIGS)
def vae(request):
    torch.manual_seed(0)
    vae = Vae(CONFIGS[request.param]).eval().requires_grad_(requires_grad=False)
    for parameter in vae.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return vae


@pytest.fixture(scope="module")
def video():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(3, 3, 9, 32, 64, generator=generator) * 2 - 1


def test_shapes(vae, video):
    config = vae.config
    latents = vae.encode(video)
    stride = config.spatial_stride
    assert latents.shape == (3, config.z_dim, config.latent_frames(9), 32 // stride, 64 // stride)
    assert vae.decode(latents).shape == video.shape
    assert vae.decode(latents).abs().max() <= 1


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_library_gives_the_same_bits(vae, video, dtype):
    """``diffusers`` is somebody else's implementation of the same layers."""
    plain = Vae(vae.config)
    plain.coder = LibraryCoder(vae.config)
    plain.coder.load(vae.coder.state_dict())
    own, plain = copy.deepcopy(vae).to(dtype), plain.to(dtype).eval()
    small = video[:1, ..., :32]
    with torch.no_grad():
        latents = own.encode(small)
        assert torch.equal(latents, plain.encode(small))
        assert torch.equal(own.decode(latents), plain.decode(latents))


def test_single_clips_on_one_thread_have_the_bits_of_torch(monkeypatch):
    """Shapes are drawn; for these, torch's own convolution would write out what pixels see."""
    generator = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def drawn(*of):
        return of[int(torch.randint(len(of), (), generator=generator))]

    try:
        for _ in range(40):
            channels, out = drawn(1, 3, 8, 12, 16, 32), drawn(1, 4, 8, 12, 24, 48)
            shape = (1, channels, drawn(3, 4, 6), drawn(1, 3, 8, 16, 22), drawn(1, 5, 16, 40))
            layer = nn.Conv3d(channels, out, 3, padding=(0, 1, 1))
            with torch.no_grad():
                x = torch.randn(shape, generator=generator)
                expected = layer(x)
                with monkeypatch.context() as patch:
                    patch.delattr("torch.nn.functional.conv3d")
                    assert torch.equal(convolve(x, layer), expected), shape
                # Elsewhere torch's own: several clips, and where gradients are wanted.
                pair = torch.cat([x, x])
                assert torch.equal(convolve(pair, layer), layer(pair))
            convolve(x, layer).sum().backward()
            assert layer.weight.grad is not None
    finally:
        torch.set_num_threads(threads)


def test_a_fit_sees_single_frames_as_everything_else_does(vae, video):
    """While weights are trained, single frames are convolved as images."""
    trained = copy.deepcopy(vae).requires_grad_(requires_grad=True)
    latents = trained.encode(video[:, :, :1])
    assert latents.requires_grad
    torch.testing.assert_close(latents, vae.encode(video[:, :, :1]), atol=1e-5, rtol=1e-5)
    frames = trained.decode(latents, clamp=False)
    torch.testing.assert_close(frames, vae.decode(latents, clamp=False), atol=1e-5, rtol=1e-5)


def test_channels_lie_side_by_side_on_an_accelerator_alone(vae, video):
    moved, layout = copy.deepcopy(vae).to("meta"), {"memory_format": torch.channels_last_3d}
    weights = [m.weight for m in moved.modules() if isinstance(m, torch.nn.Conv3d)]
    assert all(weight.is_contiguous(**layout) for weight in weights)
    assert moved.encode(video.to("meta")).shape == vae.encode(video).shape
    back = moved.to_empty(device="cpu")
    assert all(parameter.is_contiguous() for parameter in back.parameters())


def test_the_layout_changes_last_bits_alone(vae, video):
    laid = copy.deepcopy(vae)
    for module in laid.modules():
        if isinstance(module, torch.nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)
    expected = vae.encode(video)
    assert (laid.encode(video) - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.sampled
def test_norms_compile_once_for_every_shape(vae, video, traced_dtype):
    vae = copy.deepcopy(vae).to(traced_dtype)
    compiled = copy.deepcopy(vae)
    compile_blocks(compiled.pointwise_layers())
    torch.testing.assert_close(compiled.encode(video), vae.encode(video), rtol=0, atol=1e-5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled.encode(video)
    torch.compiler.reset()


def test_first_frame_alone_is_latent_zero_of_the_clip(vae, video):
    first = vae.encode_first_frame(video[:, :, 0])
    assert torch.equal(first, vae.encode(video)[:, :, :1])
    conditioning = vae.encode_conditioning(video[:, :, 0], 9)
    assert torch.equal(first, conditioning[:, :, :1])
    gray = torch.cat([video[:, :, :1], torch.zeros_like(video[:, :, 1:])], dim=2)
    assert torch.equal(conditioning, vae.encode(gray))


def test_a_later_frame_does_not_change_earlier_latents(vae, video):
    changed = video.clone()
    changed[:, :, 5:] = 0
    torch.testing.assert_close(vae.encode(changed)[:, :, :2], vae.encode(video)[:, :, :2])
    assert not torch.equal(vae.encode(changed)[:, :, 2], vae.encode(video)[:, :, 2])


def test_a_batch_equals_its_clips_alone(vae, video):
    latents = vae.encode(video)
    alone = torch.cat([vae.encode(clip[None]) for clip in video])
    torch.testing.assert_close(latents, alone, rtol=1e-4, atol=1e-5)
    decoded = torch.cat([vae.decode(latent[None]) for latent in latents])
    torch.testing.assert_close(vae.decode(latents), decoded, rtol=1e-4, atol=1e-4)


def test_a_call_leaves_nothing_on_the_module(vae, video):
    def attributes():
        return {
            name: {k: copy.copy(v) for k, v in vars(module).items() if k != "_modules"}
            for name, module in vae.named_modules()
        }

    before = attributes()
    vae.decode(vae.encode(video))
    assert attributes() == before


def test_calls_may_overlap(vae, video):
    expected = [vae.encode(clip[None]) for clip in video]
    results = [None] * len(video)

    def work(i):
        results[i] = vae.encode(video[i][None])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(video))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("frames", [2, 4, 8])
def test_frames_that_would_be_dropped_are_refused(vae, video, frames):
    with pytest.raises(ModalityError, match=f"a clip of {frames} frames"):
        vae.encode(video[:, :, :frames])


def test_folding_pixels_is_undone(vae, video):
    assert torch.equal(vae._unfold(vae._fold(video)), video)


def test_half_precision_stays_near(vae, video):
    full = vae.encode(video)
    half = copy.deepcopy(vae).bfloat16().encode(video)
    assert half.dtype == torch.bfloat16
    assert (half.float() - full).norm() / full.norm() < 0.05
