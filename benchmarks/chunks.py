"""Networks with random weights as a policy has them, and the chunks of their episodes."""

from collections.abc import Iterator, Sequence

import torch
from train_setup import PROMPT_ROWS, Bench

from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.prompt_batches import PromptBatch
from dzrobot.policies.dreamzero.network.session import (
    GenerateOptions,
    InferenceRequest,
    Prompt,
    SessionCache,
)
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.training.bench.measuring import timed
from dzrobot.training.run.build import empty_network


def random_network(
    config: NetworkConfig, device: torch.device, dtype: torch.dtype, *, text_encoder: bool = True
) -> WorldActionModel:
    """Return a network on ``device`` with random weights; norms start at one."""
    model = empty_network(config, is_lora=False, text_encoder=text_encoder).to(dtype)
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.normal_(std=0.02)
        for module in model.modules():
            if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
                module.weight.fill_(1)
    return model


def question(bench: Bench, frames: int) -> InferenceRequest:
    """Return one call's question."""
    config = bench.config
    height, width = config.target_size or bench.robot.image_size
    rows = torch.arange(config.dit.text_len)
    prompt, negative = (
        Prompt(torch.full_like(rows, token), rows < min(PROMPT_ROWS, len(rows))) for token in (1, 2)
    )
    return InferenceRequest(
        images_THW3=torch.randint(0, 256, (frames, height, width, 3), dtype=torch.uint8),
        state_SM=torch.rand(1, config.dit.max_state_dim), prompt=prompt, negative=negative,
    )  # fmt: skip


def episodes(
    bench: Bench, model: WorldActionModel, batches: Sequence[PromptBatch] | None = None
) -> Iterator[dict[int, float]]:
    """Yield the seconds of an episode's chunks, by the latent frame at which each begins.

    An episode ends where its window does. The first one compiles, allocates and encodes prompts.
    """
    options = GenerateOptions()
    window = options.window(model.config.dit)
    prompts = SessionCache().prompts
    while True:
        session, times = SessionCache(prompts=prompts), {}
        asked = question(bench, 1)
        while (start := session.next_start(asked, window)) not in times:
            spent: list[float] = []
            with timed(spent, bench.world.device):
                predict(model, [session], [asked], options, batches)
            times[start] = spent[0]
            asked = question(bench, 4)
        yield times
