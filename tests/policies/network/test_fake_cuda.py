"""What a GPU would be given to do, at the true widths: nothing that makes the host wait for it."""

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import CUDA, SOLVER_STEPS, counted, cut, fake_cuda, known_prompt, placed
from rehearsal.operators import OperatorCounter

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.modality.video import draw_augmentation, encode_views
from dzrobot.policies.dreamzero.network.attention import (
    AttentionPattern,
    TokenLayout,
    train_attention,
)
from dzrobot.policies.dreamzero.network.config import GenerateOptions
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.graphs import prompt_batches
from dzrobot.policies.dreamzero.network.layers import Block, Conditioning, Context, Rope
from dzrobot.policies.dreamzero.network.prompt import PromptEmbedding
from dzrobot.policies.dreamzero.network.session import (
    InferenceNoise,
    InferenceRequest,
    SessionCache,
    noise_shapes,
)
from dzrobot.policies.dreamzero.network.world_action import LossCounts, TrainBatch
from dzrobot.training.run.inputs import sample_noise

ROBOT = load_embodiment("oxe_droid")
SIZES = ("5b", pytest.param("14b", marks=pytest.mark.long))
FEW = GenerateOptions(dit_steps=SOLVER_STEPS, solver_steps=SOLVER_STEPS)
WINDOW = (0, 3, 5, 7)


def request(config, size, frames):
    shapes = noise_shapes(config, config.latent_size(*size))
    video, action = (torch.empty(shape, dtype=torch.bfloat16, device=CUDA) for shape in shapes)
    return InferenceRequest(
        images_THW3=torch.empty(frames, *size, 3, dtype=torch.uint8),
        state_SM=torch.empty(1, config.dit.max_state_dim),
        prompt=known_prompt(config, 1),
        negative=known_prompt(config, 2),
        noise=InferenceNoise(video, action),
    )


@pytest.mark.long
@pytest.mark.parametrize("name", SIZES)
def test_chunks_mix_no_devices_and_make_the_host_wait_for_none(name):
    config = cut(name, 1)
    size = config.target_size or ROBOT.image_size
    with fake_cuda():
        network, session = placed(config), SessionCache()
        for turn in range(2):
            for place in WINDOW:
                asked = request(config, size, 4 if turn or place else 1)
                with counted() as counter:
                    made = predict(network, [session], [asked], FEW)
                assert made.starts == (place,)
                assert made.action_BAM.device == CUDA
                assert counter.misplaced == {}
                # Tables of a new place are sent once; from then on nothing waits.
                assert turn == 0 or not any(sent.is_blocking for sent in counter.uploads)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["5b", "14b"])
@pytest.mark.parametrize("noisy_only", [False, True])
def test_a_training_block_is_one_graph(name, noisy_only):
    """At the true width: traced as a whole, and nothing of it makes the host wait for a GPU."""
    dit, graphs = cut(name).dit, []
    layout = TokenLayout(
        frames=9, rows=5, columns=10, actions=4 * dit.num_action_per_block, states=4,
        block_frames=2, block_actions=dit.num_action_per_block, block_states=1, clean_frames=7,
    )  # fmt: skip
    pattern = AttentionPattern(layout, dit.max_chunk_size)

    def inputs(device):
        def made(*shape, dtype=torch.bfloat16):
            return torch.empty(1, *shape, dtype=dtype, device=device)

        attention = train_attention(
            pattern, "packed", torch.device(device), noisy_only=noisy_only,
            hides_video_B=made(dtype=torch.bool) if name == "5b" else None,
        )  # fmt: skip
        groups = sum(count for count, _ in attention.runs)
        angles = made(layout.length, 1, dit.head_dim // 2, dtype=torch.float32)[0]
        context = Context(made(128, dit.dim), made(257, dit.dim), made(128))
        given = Conditioning(made(groups, 6, dit.dim), Rope(angles, angles), context)
        return made(layout.length, dit.dim), given, attention

    def keep(graph, given):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    with torch.no_grad():
        with torch.device("meta"):
            block = Block(dit).to(torch.bfloat16)
        shape = torch.compile(block, fullgraph=True, dynamic=False, backend=keep)(*inputs("meta"))
        assert len(graphs) == 1
        with fake_cuda(), counted() as counter:
            weights = {k: torch.empty_like(w, device=CUDA) for k, w in block.named_parameters()}
            made = torch.func.functional_call(block, weights, inputs(CUDA))
    assert made.shape == shape.shape
    assert counter.misplaced == {}
    assert not any(sent.is_blocking for sent in counter.uploads)


def batch_of(config, size=2):
    """Return what a trainer sends of ``size`` samples, and makes of it on the device."""
    timing, dit = ROBOT.timing, config.dit

    def sent(*shape, dtype=torch.float32):
        return torch.empty(size, *shape, dtype=dtype).to(CUDA, non_blocking=True)

    views = {
        view.key: sent(timing.frames, *view.resolution, 3, dtype=torch.uint8)
        for view in ROBOT.views
    }
    draws = [draw_augmentation(0, number) for number in range(size)]
    actions = (timing.actions, dit.action_dim)
    return TrainBatch(
        images=encode_views(views, ROBOT, draws),
        state_BSM=sent(timing.blocks, dit.max_state_dim),
        action_BAM=sent(*actions),
        action_mask_BAM=sent(*actions, dtype=torch.bool),
        has_real_action_B=sent(dtype=torch.bool),
        prompt=PromptEmbedding(
            sent(dit.text_len, dit.text_dim, dtype=torch.bfloat16), (20,) * size
        ),
    )


@pytest.mark.parametrize("name", SIZES)
def test_a_training_step_forward_mixes_no_devices_and_makes_the_host_wait_for_none(name):
    config = cut(name, 1)
    with fake_cuda(), torch.no_grad():
        network = placed(config)
        for step in range(2):
            with counted() as counter:
                prepared = network.prepare(batch_of(config))
                noise = sample_noise(config, prepared, 0, step, range(2))
                losses = network.loss(prepared, noise, LossCounts(samples=2.0, actions=2.0))
            assert losses.loss.device == CUDA
            assert counter.misplaced == {}
            assert step == 0 or not any(sent.is_blocking for sent in counter.uploads)


class Stream(SimpleNamespace):
    """What torch builds for processors refuse to make."""

    def __init__(self, device):
        super().__init__(device=device)


def record_with(monkeypatch, recording):
    """Let ``recording`` stand for the context in which torch records."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=list))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)


@pytest.mark.long
def test_every_device_records_on_a_stream_of_its_own(monkeypatch):
    """Torch's own one belongs to the device that records first."""
    recorded = []

    class Recording(nullcontext):
        def __init__(self, graph, pool=None, stream=None, capture_error_mode="global"):
            super().__init__()
            recorded.append((stream and stream.device, capture_error_mode))

    devices, config = [torch.device(f"cuda:{number}") for number in range(2)], cut("5b", 1)
    with fake_cuda(), torch.no_grad():
        first, second = (placed(config, device) for device in devices)
        record_with(monkeypatch, Recording)
        batches = prompt_batches(first.model, 2, second.model, graphs=True)
        asked = request(config, config.target_size, 1)
        predict(first, [SessionCache()], [asked], FEW, batches)
    # One step that reads frames and one that denoises, on each.
    assert Counter(recorded) == {(device, "thread_local"): 2 for device in devices}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "places", [WINDOW[:2], pytest.param(WINDOW, marks=pytest.mark.long)], ids=["two", "all"]
)
def test_a_recorded_call_reads_and_sends_nothing_and_leaves_few_launches(name, places, monkeypatch):
    inside = []

    class Recording(OperatorCounter):
        def __init__(self, graph, **_):
            super().__init__(CUDA)
            inside.append(self)

    config = cut(name, 1)
    size = config.target_size or ROBOT.image_size
    with fake_cuda(), torch.no_grad():
        network, session = placed(config), SessionCache()
        record_with(monkeypatch, Recording)
        batches = prompt_batches(network.model, 2, graphs=True)
        is_full = places == WINDOW
        for turn in range(2):
            if not is_full:
                # It would go on with the next place.
                session = SessionCache()
            for place in places:
                asked = request(config, size, 4 if place or (turn and is_full) else 1)
                with counted() as counter:
                    made = predict(network, [session], [asked], FEW, batches)
                assert made.starts == (place,)
                assert made.action_BAM.device == CUDA
                assert counter.misplaced == {}
                # Tables of a new place are sent once; from then on nothing waits.
                assert turn == 0 or not any(sent.is_blocking for sent in counter.uploads)
    assert len(inside) == len(places)
    for recording in inside:
        # A host read of the device would have raised.
        assert recording.calls
        assert recording.uploads == Counter()
        assert recording.misplaced == {}
    # Of the last call, which nothing is recorded in.
    assert counter.calls.total() < 100
