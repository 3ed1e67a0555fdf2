"""Prompt encoder, image encoder and video autoencoder."""

import torch
from torch import nn

from dzrobot.policies.dreamzero.checkpoints.load import load_weights, official_state
from dzrobot.policies.dreamzero.checkpoints.sources import StateDictSource
from dzrobot.policies.dreamzero.network.image import ImageEncoder
from dzrobot.policies.dreamzero.network.prompt import PromptCache, TextEncoder
from dzrobot.policies.dreamzero.network.vae import Vae, channel_statistics
from golden_kinds.configs import image_config, text_config, vae_config
from golden_kinds.registry import Golden, Results, checker, exact, relative_l2

TOLERANCE = 1e-5


def loaded(module: nn.Module, golden: Golden) -> tuple[nn.Module, Results]:
    """Return ``module`` with the weights, and whether they are written back unchanged."""
    weights = golden.weights()
    load_weights(module, StateDictSource(values=weights))
    written = official_state(module)
    same = written.keys() == weights.keys() and all(
        torch.equal(written[name], weights[name]) for name in weights
    )
    return module.eval().requires_grad_(requires_grad=False), {"weights": exact(same, True)}


@checker("umt5_text_encoder")
def text(golden: Golden) -> Results:
    encoder, results = loaded(TextEncoder(text_config(golden.manifest["config"])), golden)
    ids, mask = golden["in.input_ids"], golden["in.attention_mask"]
    expected = golden["out.prompt_emb_per_sample_masked"]
    hidden = encoder.stack(ids, mask.bool())
    valid = mask.bool()
    return results | {
        "last_hidden": (
            relative_l2(hidden[valid], golden["out.last_hidden"][valid]),
            TOLERANCE,
        ),
        "prompt_emb": (relative_l2(encoder(ids, mask), expected), TOLERANCE),
        "cached": (
            relative_l2(PromptCache().embed(lambda: encoder, ids, mask), expected),
            TOLERANCE,
        ),
        "padding rows": exact(encoder(ids, mask)[~valid].abs().max().item(), 0.0),
    }


@checker("clip_vision")
def image(golden: Golden) -> Results:
    encoder, results = loaded(ImageEncoder(image_config(golden.manifest["config"])), golden)
    frames = golden["in.image"][:, 0]
    pixels = golden["mid.pixel_values_b0_rows0_8"]
    kept = encoder.pixels(frames)[: pixels.shape[0], :, : pixels.shape[2]]
    return results | {
        "pixels": (relative_l2(kept, pixels), TOLERANCE),
        "features": (relative_l2(encoder(frames), golden["out.clip_features"]), TOLERANCE),
    }


@checker("vae21", "vae22")
def vae(golden: Golden) -> Results:
    config = vae_config(golden.manifest["config"], golden.kind)
    coder, results = loaded(Vae(config), golden)
    for name in ("spatial_stride", "temporal_stride", "patch_size"):
        results[name] = exact(getattr(config, name), golden.manifest["config"][name])
    mean, std = channel_statistics(coder.config, torch.device("cpu"))
    results["mean"] = (relative_l2(mean.flatten(), golden["const.mean"]), 1e-7)
    results["std"] = (relative_l2(std.flatten(), golden["const.std"]), 1e-7)
    lengths = [name.removeprefix("in.video_") for name in golden.tensors if "in.video" in name]
    assert lengths, "no clips"
    for length in lengths:
        video, expected = golden[f"in.video_{length}"], golden[f"out.latent_{length}"]
        results[f"encode {length}"] = (relative_l2(coder.encode(video), expected), TOLERANCE)
        first = coder.encode_first_frame(video[:, :, 0])
        results[f"first of {length}"] = (relative_l2(first, expected[:, :, :1]), TOLERANCE)
    prefix = "out.latent_first_frame_then_zeros_"
    for name in golden.tensors:
        if name.startswith(prefix):
            video = golden[f"in.video_{name.removeprefix(prefix)}"]
            latents = coder.encode_conditioning(video[:, :, 0], video.shape[2])
            results[name] = (relative_l2(latents, golden[name]), TOLERANCE)
    decoded = coder.decode(golden["in.decode_latent"], clamp=False)
    results["decode"] = (relative_l2(decoded, golden["out.decoded_raw"]), TOLERANCE)
    return results
