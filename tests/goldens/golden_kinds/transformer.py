"""The transformer alone: training forward and backward, inference over a cache, attention masks."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from dzrobot.policies.dreamzero.network.attention import AttentionPattern, TokenLayout, dense_mask
from dzrobot.policies.dreamzero.network.dit import (
    CausalDiT,
    Controls,
    Prompting,
    StepInputs,
    TrainForm,
    TrainInputs,
)
from dzrobot.policies.dreamzero.network.layers import spread
from dzrobot.policies.dreamzero.network.session import KVCache
from golden_kinds.configs import dit_config
from golden_kinds.registry import Golden, Results, checker, exact, relative_l2

OUTPUT, GRADIENT = 1e-5, 1e-4
FORMS = [TrainForm(backend=b, exact_savings=s) for b in ("dense", "packed") for s in (False, True)]


@checker("dit_train_forward")
def dit_train(golden: Golden) -> Results:
    """Outputs and gradients in every form, inner quantities in the plain one, other windows."""
    config = dit_config(golden.manifest["config"])
    model = _model(golden, config)
    inputs = _train_inputs(golden)
    results: Results = {}
    for form in FORMS:
        name = f"{form.backend}, savings {form.exact_savings}"
        model.zero_grad()
        with _Recorder(model) as seen:
            video, action = model(inputs, form)
        cotangents = golden["in.cotangent_video"], golden["in.cotangent_action"]
        ((video * cotangents[0]).sum() + (action * cotangents[1]).sum()).backward()
        pairs = {"out.video_noise_pred": video, "out.action_noise_pred": action}
        if not form.exact_savings:
            pairs |= seen.of(model, inputs, form)
        results |= {
            f"{key} ({name})": (relative_l2(pairs[key], golden[key]), OUTPUT) for key in pairs
        }
        results |= _gradients(golden, model, name)
    for key in golden.tensors:
        if key.startswith("out.max_chunk_size=") and key.endswith(".video_noise_pred"):
            results |= _other_window(golden, key.removesuffix(".video_noise_pred"), inputs)
    return results


@checker("dit_ar_inference_kv_cache")
def dit_infer(golden: Golden) -> Results:
    """Prefill and denoise calls in order, with the context's keys and values computed once."""
    config = dit_config(golden.manifest["config"])
    model = _model(golden, config)
    batch, frames = (
        golden.manifest["B"],
        max(call["start_frame"] + call["frames"] for call in golden.manifest["calls"]),
    )
    cache = KVCache.allocate(
        config,
        rows=batch,
        frames=frames,
        device=torch.device("cpu"),
        dtype=golden["in.context"].dtype,
    )
    results: Results = {}
    with torch.no_grad():
        context = model.embed_context(_prompting(golden))
        projected = model.project(context)
        for call in golden.manifest["calls"]:
            step = _step_inputs(golden, call)
            before = cache.valid.clone()
            video, action = model.step(step, cache, projected)
            plain, _ = model.step(step, cache, [context] * config.num_layers)
            tag = call["tag"]
            if _all_equal(step):
                once, _ = model.step(replace(step, one_timestep=True), cache, projected)
                results[f"{tag} one timestep"] = (relative_l2(once, video), OUTPUT)
            results[f"{tag} cache untouched"] = exact(cache.valid, before)
            results[f"{tag} context cache"] = exact(video, plain)
            results[f"{tag}.video"] = (relative_l2(video, golden[f"{tag}.out.video"]), OUTPUT)
            if action is not None:
                expected = golden[f"{tag}.out.action"]
                results[f"{tag}.action"] = (relative_l2(action, expected), OUTPUT)
            if call["update_kv_cache"]:
                cache.commit(call["frames"] * config.frame_seqlen)
                for layer, kept in enumerate(cache.valid):
                    expected = golden[f"{tag}.out.kv_cache.{layer}"]
                    results[f"{tag}.kv.{layer}"] = (relative_l2(kept, expected), OUTPUT)
    return results


@checker("attention_mask_examples")
def attention_masks(golden: Golden) -> Results:
    """Boolean masks, row by row."""
    results: Results = {}
    for number, example in enumerate(golden.manifest):
        config, frames = example["config"], example["latent_frames"]
        blocks = (frames - 1) // config["num_frame_per_block"]
        layout = TokenLayout(
            frames=frames,
            rows=1,
            columns=example["tokens_per_frame"],
            block_frames=config["num_frame_per_block"],
            block_actions=config["num_action_per_block"],
            block_states=config["num_state_per_block"],
            actions=blocks * config["num_action_per_block"],
            states=blocks * config["num_state_per_block"],
            clean_frames=frames,
        )
        pattern = AttentionPattern(layout, config["max_chunk_size"])
        mask = dense_mask(pattern, torch.device("cpu"))
        rows = ["".join(".1"[int(bit)] for bit in row) for row in mask]
        results[f"mask {number}"] = exact(rows, example["rows"])
    return results


def _all_equal(step: StepInputs) -> bool:
    """Return whether all tokens have the same timestep."""
    actions = [] if step.controls is None else [step.controls.timestep_BA.flatten()]
    return torch.cat([step.timestep_BF.flatten(), *actions]).unique().numel() == 1


class _Recorder:
    """Keeps the outputs of modules during one forward pass."""

    def __init__(self, model: CausalDiT) -> None:
        names = {"head", "img_emb", "state_encoder", "action_encoder", "text_embedding"}
        self.seen: dict[str, Tensor] = {}
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if name in names or name.startswith("blocks.")
        }
        self._modules["time_embedding"] = model.time_embedding
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "_Recorder":
        for name, module in self._modules.items():
            self._hooks.append(module.register_forward_hook(self._keep(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, name: str):
        def hook(module: nn.Module, args: object, output: Tensor) -> None:
            self.seen[name] = output

        return hook

    def of(self, model: CausalDiT, inputs: TrainInputs, form: TrainForm) -> dict[str, Tensor]:
        """Return the recorded quantities under the names of the file."""
        layout = model.train_layout(inputs, form)
        seen = dict(self.seen)
        time_BLD = spread(seen.pop("time_embedding"), layout.runs)
        first = len(layout.clean)
        # The file flattens the batch of this one module.
        pairs = {
            "mid.time_embedding#0": time_BLD[:, first:].flatten(0, 1),
            "mid.time_embedding#1": time_BLD[:, :first].flatten(0, 1),
        }
        for number, video in enumerate((inputs.noisy_BCFYX, inputs.clean_BCFYX)):
            tokens_BLD = model.embed_video(video, inputs.first_frame_BCFYX)
            grid = (layout.frames, layout.rows, layout.columns)
            volume = tokens_BLD.unflatten(1, grid).permute(0, 4, 1, 2, 3)
            pairs[f"mid.patch_embedding#{number}"] = volume
        wanted = ("self_attn", "cross_attn")
        for name, value in seen.items():
            inner = name.split(".")[2:]
            if not inner or (len(inner) == 1 and inner[0] in wanted):
                pairs[f"mid.{name}"] = value
        return pairs


def _gradients(golden: Golden, model: CausalDiT, name: str) -> Results:
    gradients = {key: p.grad for key, p in model.named_parameters()}
    without = {key for key, gradient in gradients.items() if gradient is None}
    results: Results = {
        f"without gradient ({name})": exact(without, set(golden.manifest["params_without_grad"]))
    }
    for key in golden.tensors:
        if key.startswith("grad."):
            actual = gradients[key.removeprefix("grad.")]
            results[f"{key} ({name})"] = (relative_l2(actual, golden[key]), GRADIENT)
    norm = torch.stack([g.norm() for g in gradients.values() if g is not None]).norm()
    results[f"gradient norm ({name})"] = (relative_l2(norm, golden["out.grad_norm_all"]), GRADIENT)
    return results


def _other_window(golden: Golden, prefix: str, inputs: TrainInputs) -> Results:
    config = dit_config(golden.manifest["config"])
    config = replace(config, max_chunk_size=int(prefix.partition("=")[2]))
    model, results = _model(golden, config), {}
    for form in FORMS:
        with torch.no_grad():
            video, action = model(inputs, form)
        for key, actual in (("video_noise_pred", video), ("action_noise_pred", action)):
            error = relative_l2(actual, golden[f"{prefix}.{key}"])
            results[f"{prefix}.{key} ({form})"] = (error, OUTPUT)
    return results


def _model(golden: Golden, config) -> CausalDiT:
    model = CausalDiT(config)
    model.load_state_dict(golden.weights())
    return model


def _prompting(golden: Golden) -> Prompting:
    return Prompting(text_BNE=golden["in.context"], image_BPE=golden["in.clip_feature"])


def _train_inputs(golden: Golden) -> TrainInputs:
    return TrainInputs(
        noisy_BCFYX=golden["in.x"],
        clean_BCFYX=golden["in.clean_x"],
        timestep_BF=golden["in.timestep"],
        controls=Controls(
            action_BAM=golden["in.action"],
            timestep_BA=golden["in.timestep_action"],
            state_BSM=golden["in.state"],
        ),
        prompting=_prompting(golden),
        first_frame_BCFYX=golden["in.y"] if "in.y" in golden.tensors else None,
    )


def _step_inputs(golden: Golden, call) -> StepInputs:
    tag, start = call["tag"], call["start_frame"]
    controls = None
    if call["with_action"]:
        controls = Controls(
            action_BAM=golden[f"{tag}.in.action"],
            timestep_BA=golden[f"{tag}.in.timestep_action"],
            state_BSM=golden[f"{tag}.in.state"],
        )
    first_frame = None
    if "in.y" in golden.tensors:
        first_frame = golden["in.y"][:, :, start : start + call["frames"]]
    return StepInputs(
        video_BCFYX=golden[f"{tag}.in.x"],
        timestep_BF=golden[f"{tag}.in.timestep"],
        start_frame=start,
        controls=controls,
        first_frame_BCFYX=first_frame,
    )
