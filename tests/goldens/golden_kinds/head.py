"""The whole network: training from uint8 frames to losses, and autoregressive rollouts."""

import torch
from torch import Tensor

from dzrobot.policies.dreamzero.checkpoints.load import load_weights
from dzrobot.policies.dreamzero.checkpoints.sources import StateDictSource
from dzrobot.policies.dreamzero.network.config import GenerateOptions
from dzrobot.policies.dreamzero.network.diffusion import DiffusionNoise
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.session import (
    InferenceNoise,
    InferenceRequest,
    Prompt,
    SessionCache,
    noise_shapes,
    seeded_noise,
)
from dzrobot.policies.dreamzero.network.world_action import (
    LossOptions,
    TrainBatch,
    WorldActionModel,
    training_schedule,
)
from golden_kinds.configs import network_config
from golden_kinds.registry import Golden, Results, checker, exact, relative_l2
from golden_kinds.transformer import FORMS

LOSS, GRADIENT, ROLLOUT = 1e-5, 1e-4, 1e-4


@checker("head_train_forward")
def head_train(golden: Golden) -> Results:
    """Encoders, noising, losses and gradients with the recorded noise injected."""
    model = _model(golden)
    batch = TrainBatch(
        images=golden["in.images"],
        state_BSM=golden["in.state"],
        action_BAM=golden["in.action"],
        action_mask_BAM=golden["in.action_mask"],
        has_real_action_B=golden["in.has_real_action"],
        prompt=model.embed_prompts(golden["in.text"], golden["in.text_attention_mask"]),
    )
    prepared = model.prepare(batch)
    schedule = training_schedule(golden.device)
    noise = _noise(golden, model, schedule.timesteps)
    inputs = model.train_inputs(prepared, noise, schedule)
    pairs: dict[str, Tensor | None] = {
        "mid.prompt_emb": batch.prompt.rows_BNE,
        "mid.clip_features": prepared.prompting.image_BPE,
        "mid.video_latents": prepared.latents_BCFYX,
        "mid.y": prepared.first_frame_BCFYX,
        "mid.video_model_input": model.pixels(golden["in.images"])[:, :, ::16],
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
    schedule = training_schedule(golden.device)
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


def _noise(golden: Golden, model: WorldActionModel, timesteps: Tensor) -> DiffusionNoise:
    """Return the recorded draws; a draw that was not recorded is read off its timestep."""
    draws = {key.split(".", 2)[2]: golden[key] for key in golden.tensors if key.startswith("rng.")}
    frames = draws.get("timestep_id_raw")
    if frames is None:
        given = golden["mid.dit_in.timestep"]
        frames = (given[..., None] - timesteps).abs().argmin(dim=-1)
    return DiffusionNoise.of(
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
    load_weights(model, StateDictSource(values={name: weights[name] for name in weights.tensors}))
    for module in (model.text_encoder, model.image_encoder, model.vae):
        module.requires_grad_(False)
    return model.to(golden.device, golden.dtype)


@checker("head_ar_inference")
def head_rollout(golden: Golden) -> Results:
    """Every call of a rollout: start frames, cache lengths, evaluations and what they returned."""
    model, batch = _model(golden), range(golden.manifest["B"])
    sessions, videos = [SessionCache() for _ in batch], None
    mode = golden.manifest["step_mode"]
    options = GenerateOptions(
        dit_steps=mode if mode == "dynamic" else int(mode),
        solver_steps=golden.manifest["num_inference_steps"],
        cfg_scale=golden.manifest["cfg_scale"],
    )
    results: Results = _seed_results(golden, model, options) if len(batch) == 1 else {}
    for call in golden.manifest["calls"]:
        tag, before = f"call{call['call']}", sessions[0].start
        latents = videos if call["used_latent_video"] else None
        with _StepRecorder(model) as steps:
            requests = [_request(golden, tag, b, latents) for b in batch]
            prediction = predict(model, sessions, requests, options)
        videos = torch.stack(prediction.videos)
        results |= _call_results(golden, tag, steps)
        kept = [session.keys_values[0].valid[-1] for session in sessions]
        pairs = {
            "action_pred": prediction.action_BAM,
            "video_pred": videos,
            "kv_cache_last_block": torch.cat([kv[:, 0:1] for kv in kept], dim=1),
            "kv_cache_neg_last_block": torch.cat([kv[:, 1:2] for kv in kept], dim=1),
        }
        for key, value in pairs.items():
            results[f"{tag}.{key}"] = (relative_l2(value, golden[f"{tag}.out.{key}"]), ROLLOUT)
        found = {
            "current_start_frame_before": before,
            "current_start_frame_after": sessions[0].start,
            "dit_evals": prediction.evaluations[0],
            "kv_tokens_after": sessions[0].keys_values[0].length,
            "video_pred_frames": videos.shape[2],
        }
        results |= {f"{tag}.{key}": exact(value, call[key]) for key, value in found.items()}
        times = [t for n, *t in golden.manifest["dit_eval_timesteps"] if n == call["call"]]
        results[f"{tag}.timesteps"] = exact(steps.timesteps, times)
    return results


def _request(golden: Golden, tag: str, b: int, latents: Tensor | None) -> InferenceRequest:
    """Return what one sample of a call asks for."""
    negative = [golden[f"in.{name}_negative"] for name in ("text", "text_attention_mask")]
    return InferenceRequest(
        images_THW3=golden[f"{tag}.in.images"][b],
        state_SM=golden[f"{tag}.in.state"][b],
        prompt=Prompt(golden[f"{tag}.in.text"][b], golden[f"{tag}.in.text_attention_mask"][b]),
        negative=Prompt(*(rows[min(b, len(rows) - 1)] for rows in negative)),
        latent_video_CFYX=None if latents is None else latents[b],
        noise=InferenceNoise(
            *(golden[f"noise.{name}"][b].to(golden.dtype) for name in ("video", "action"))
        ),
    )


class _StepRecorder:
    """Keeps what the transformer was asked and what it answered during one call."""

    def __init__(self, model: WorldActionModel) -> None:
        self._transformer = model.model
        self.calls: list[tuple] = []

    def __enter__(self) -> "_StepRecorder":
        plain = self._transformer.step

        def step(inputs, cache, contexts):
            outputs = plain(inputs, cache, contexts)
            self.calls.append((inputs, outputs))
            return outputs

        self._transformer.step = step
        return self

    def __exit__(self, *_: object) -> None:
        del self._transformer.step

    @property
    def timesteps(self) -> list[list[int]]:
        return [
            [int(inputs.timestep_BF[0, 0]), int(inputs.controls.timestep_BA[0, 0])]
            for inputs, _ in self.calls
            if inputs.controls is not None
        ]


def _call_results(golden: Golden, tag: str, steps: _StepRecorder) -> Results:
    results: Results = {}
    evaluation, batch = 0, golden.manifest["B"]
    for inputs, (video, action) in steps.calls:
        if inputs.controls is None:
            pairs = {f"prefill_start{inputs.start_frame}.latents": inputs.video_BCFYX[:batch]}
        else:
            pairs = {
                f"eval{evaluation}.noisy_video_in": inputs.video_BCFYX[:batch],
                f"eval{evaluation}.noisy_action_in": inputs.controls.action_BAM[:batch],
                f"eval{evaluation}.video_cond": video[:batch],
                f"eval{evaluation}.video_uncond": video[batch:],
                f"eval{evaluation}.action_cond": action[:batch],
            }
            evaluation += 1
        for name, value in pairs.items():
            key = f"{tag}.{name}"
            if key in golden.tensors:
                results[key] = (relative_l2(value, golden[key]), ROLLOUT)
    return results


def _seed_results(golden: Golden, model: WorldActionModel, options: GenerateOptions) -> Results:
    """Compare the noise that a call draws by itself."""
    latent = tuple(golden["noise.video"].shape[-2:])
    noise = seeded_noise(
        noise_shapes(model.config, latent), options.seed, dtype=golden["noise.video"].dtype
    )
    pairs = {"noise.video": noise.video_CFYX, "noise.action": noise.action_AM}
    return {key: (relative_l2(value[None], golden[key]), LOSS) for key, value in pairs.items()}
