"""The whole network: training from uint8 frames to losses, and autoregressive rollouts."""

import torch
from torch import Tensor

from dzrobot.policies.dreamzero.network.keymap import load_official
from dzrobot.policies.dreamzero.network.noise import Noise
from dzrobot.policies.dreamzero.network.world_action import (
    LossOptions,
    TrainBatch,
    WorldActionModel,
    training_schedule,
)
from golden_kinds.configs import network_config
from golden_kinds.registry import Golden, Results, checker, relative_l2
from golden_kinds.transformer import FORMS

LOSS, GRADIENT, ROLLOUT = 1e-5, 1e-4, 1e-4


@checker("head_train_forward")
def head_train(golden: Golden) -> Results:
    """Encoders, noising, losses and gradients with the recorded noise injected."""
    model = _model(golden)
    batch = TrainBatch(
        images_BTHW3=golden["in.images"],
        state_BSM=golden["in.state"],
        action_BAM=golden["in.action"],
        action_mask_BAM=golden["in.action_mask"],
        has_real_action_B=golden["in.has_real_action"],
        prompt=model.embed_prompts(golden["in.text"], golden["in.text_attention_mask"]),
    )
    prepared = model.prepare(batch)
    schedule = training_schedule(torch.device("cpu"))
    noise = _noise(golden, model, schedule.timesteps)
    inputs = model.train_inputs(prepared, noise, schedule)
    pairs: dict[str, Tensor | None] = {
        "mid.prompt_emb": batch.prompt.rows_BNE,
        "mid.clip_features": prepared.prompting.image_BPE,
        "mid.video_latents": prepared.latents_BCFYX,
        "mid.y": prepared.first_frame_BCFYX,
        "mid.video_model_input": model.pixels(batch.images_BTHW3)[:, :, ::16],
        "mid.video_weight": schedule.weights[noise.frame_index_BF],
        "mid.action_weight": schedule.weights[noise.action_index_BA],
        "mid.dit_in.clean_latents": inputs.clean_BCFYX,
        "mid.dit_in.noisy_latents": inputs.noisy_BCFYX,
        "mid.dit_in.noisy_actions": inputs.controls.action_BAM,
        "mid.dit_in.state": inputs.controls.state_BSM,
        "mid.dit_in.timestep": inputs.timestep_BF,
        "mid.dit_in.timestep_action": inputs.controls.timestep_BA,
    }
    results: Results = {
        key: (relative_l2(value, golden[key]), LOSS)
        for key, value in pairs.items()
        if value is not None
    }
    for form in FORMS:
        results |= _losses(golden, model, prepared, noise, LossOptions(form=form))
    return results


def _losses(golden, model, prepared, noise, options) -> Results:
    model.zero_grad()
    schedule = training_schedule(torch.device("cpu"))
    video, action = model.model(model.train_inputs(prepared, noise, schedule), options.form)
    losses = model.loss(prepared, noise, options=options)
    losses.loss.backward()
    name = f"{options.form.backend}, savings {options.form.exact_savings}"
    pairs = {
        "out.video_noise_pred": video,
        "out.action_noise_pred": action,
        "out.loss": losses.loss,
        "out.dynamics_loss": losses.dynamics_loss,
        "out.action_loss": losses.action_loss,
    }
    results = {
        f"{key} ({name})": (relative_l2(value, golden[key]), LOSS) for key, value in pairs.items()
    }
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    for key in golden.tensors:
        if key.startswith("grad."):
            actual = gradients[key.replace("grad.", "model.", 1)]
            results[f"{key} ({name})"] = (relative_l2(actual, golden[key]), GRADIENT)
    norm = torch.stack([g.norm() for k, g in gradients.items() if k.startswith("model.")]).norm()
    expected = golden["out.grad_norm_all_dit"]
    results[f"gradient norm ({name})"] = (relative_l2(norm, expected), GRADIENT)
    outside = sorted(key for key in gradients if not key.startswith("model."))
    assert outside == golden.manifest["grads_outside_dit"]
    return results


def _noise(golden: Golden, model: WorldActionModel, timesteps: Tensor) -> Noise:
    """Return the recorded draws; a draw that was not recorded is read off its timestep."""
    draws = {key.split(".", 2)[2]: golden[key] for key in golden.tensors if key.startswith("rng.")}
    frames = draws.get("timestep_id_raw")
    if frames is None:
        given = golden["mid.dit_in.timestep"]
        frames = (given[..., None] - timesteps).abs().argmin(dim=-1)
    return Noise.of(
        model.config.dit,
        draws["video_noise"],
        draws["action_noise"],
        frames,
        draws.get("timestep_action_id"),
    )


def _model(golden: Golden) -> WorldActionModel:
    """Return the network with the weights that the manifest names."""
    weights = golden.companion()
    model = WorldActionModel(network_config(golden)).eval()
    load_official(model, {name: weights[name] for name in weights.tensors})
    for module in (model.text_encoder, model.image_encoder, model.vae):
        module.requires_grad_(False)
    return model
