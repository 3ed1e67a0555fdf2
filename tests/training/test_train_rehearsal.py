"""A step and a chunk that run without memory: what they cost, and what must not be in them."""

import dataclasses

import pytest
import torch
import train_worlds
from rehearsal.operators import RECORDED, HostReadError
from rehearsal.runs import (
    META,
    ChunkSetup,
    StepSetup,
    rehearse,
    rehearse_chunks,
    rehearse_prompt,
    rehearse_step,
    with_layers,
)
from torch import nn

from dzrobot.policies.dreamzero.network.attention import attend, plain_devices
from dzrobot.policies.dreamzero.network.config import GenerateOptions
from dzrobot.policies.dreamzero.network.prompt import attended_rows
from dzrobot.policies.dreamzero.tiny import tiny_config
from dzrobot.training.cost.flops import encoder_flops, executed_flops, sample_shape
from dzrobot.training.cost.memory import Setup
from dzrobot.training.recipes.architecture import run_network
from dzrobot.training.sft_config import ModelConfig, ParallelConfig

ROBOT = train_worlds.ROBOT
BATCH = 2
WORDS = 20
SENT = {
    # What a batch and a request bring, and noise, which is drawn on the host.
    "outside of dzrobot",
    "policies.dreamzero.network.diffusion.draw_noise.<locals>.<genexpr>",
    "policies.dreamzero.network.prompt.compact",
    "policies.dreamzero.network.generate._sent",
}
"""Who may send tensors to the device inside a step or a chunk."""


def network(variant, layers=3):
    config = run_network(tiny_config(variant, ROBOT), ModelConfig(embodiment_tag=ROBOT.tag), ROBOT)
    return with_layers(config, layers)


def step_plan(variant="5b", *, stored=False, **parallel):
    return StepSetup(
        setup=Setup(
            network=network(variant), model=ModelConfig(embodiment_tag=ROBOT.tag),
            parallel=ParallelConfig(**parallel), image_size=ROBOT.image_size, micro_batch=BATCH,
            devices=1, averaged=False,
        ),
        robot=ROBOT, prompt_rows=WORDS, has_stored_images=stored,
    )  # fmt: skip


def chunk_plan(variant, *, history, layers=3):
    return ChunkSetup(
        network=network(variant, layers), image_size=ROBOT.image_size, prompt_rows=WORDS,
        options=GenerateOptions(dit_steps=5, history="recent" if history else "off"),
    )  # fmt: skip


@pytest.mark.long
def test_less_video_takes_less_of_a_chunk():
    plan = chunk_plan("5b", history=False, layers=1)
    plans = [
        dataclasses.replace(plan, options=dataclasses.replace(plan.options, video=video))
        for video in ("full", "once", "skip")
    ]
    full, once, skip = (
        max(chunk.flops for chunk in rehearse_chunks(one).values()) for one in plans
    )
    assert full > once > skip > 0


LONG = [pytest.param(variant, marks=pytest.mark.long) for variant in ("5b", "14b")]


def test_a_teacher_runs_forward_once_for_each_of_its_steps():
    plan = step_plan(stored=True, activation_checkpointing="none")
    none, once, twice = (
        stage_flops(
            rehearse_step(
                dataclasses.replace(
                    plan, setup=dataclasses.replace(plan.setup, teacher_steps=steps)
                )
            ),
            "teacher",
        )
        for steps in (0, 1, 2)
    )
    assert none == 0
    assert twice == 2 * once > 0


@pytest.fixture(scope="module", params=["5b, stored images", *LONG])
def step(request):
    variant, _, stored = request.param.partition(",")
    return request.param, rehearse_step(step_plan(variant, stored=bool(stored)))


@pytest.fixture(scope="module", params=["5b, first", *LONG])
def chunks(request):
    variant, _, first = request.param.partition(",")
    plan = chunk_plan(variant, history=not first)
    return {**rehearse_chunks(plan), "prompt": rehearse_prompt(plan)}


def stage_flops(rehearsal, *stages):
    return sum(
        count * kernel.flops
        for kernel, count in rehearsal.calls.items() if kernel.stage in stages
    )  # fmt: skip


def test_operations_are_those_of_the_closed_forms(step):
    name, whole = step
    variant, _, stored = name.partition(",")
    config = network(variant)
    shape = sample_shape(config.dit, config.head.num_frames, config.vae.temporal_stride)
    forward = BATCH * executed_flops(config.dit, shape, attended_rows(WORDS))
    assert stage_flops(whole, "transformer") == pytest.approx(forward, rel=1e-6)
    encoders = 0 if stored else BATCH * encoder_flops(config, ROBOT.image_size, 0)
    assert stage_flops(whole, "encoders") == pytest.approx(encoders, rel=1e-6)
    # Twice the forward pass, and blocks once more; attention's backward pass computes scores again.
    backward = stage_flops(whole, "transformer, backward")
    assert backward == pytest.approx(3 * forward, rel=0.1)


def test_a_step_multiplies_in_half_precision_and_never_waits(step):
    _, whole = step
    assert whole.single_products == {}
    assert whole.misplaced == {}
    assert {upload.place for upload in whole.uploads} <= SENT
    assert [upload for upload in whole.uploads if upload.is_blocking] == []


def test_a_chunk_multiplies_in_half_precision_and_never_waits(chunks):
    assert next(iter(chunks)) == 0
    for rehearsal in chunks.values():
        assert rehearsal.single_products == {}
        assert rehearsal.misplaced == {}
        blocking = [upload.place for upload in rehearsal.uploads if upload.is_blocking]
        assert blocking == []


def test_chunks_send_only_what_is_new(chunks):
    for place, rehearsal in chunks.items():
        if place != "prompt":
            assert {upload.place for upload in rehearsal.uploads} <= SENT


def test_chunks_know_their_recorded_steps(chunks):
    for place, rehearsal in chunks.items():
        stages = {call.stage for call in rehearsal.calls}
        if place == "prompt":
            assert (rehearsal.replays, stages) == (0, {"prompt"})
            continue
        # All of a call is one recording: encoders, contexts, reading and denoising.
        assert rehearsal.replays == 1
        assert stages == {"chunk", RECORDED}
        assert sum(n for call, n in rehearsal.calls.items() if call.stage != RECORDED) < 100


def test_operators_are_counted_with_their_operations_and_bytes():
    x, weight = (torch.empty(64, 64, device=META, dtype=torch.bfloat16) for _ in range(2))
    found = rehearse(lambda _: ((x + 1).relu() @ weight + 1).relu())
    size = 2 * 64 * 64
    sizes = sorted(call.bytes_ for call in found.calls.elements())
    assert sizes == [*4 * [2 * size], 3 * size]
    assert found.flops == 2 * 64**3


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: x.cpu(),
        lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: bool((x > 0).any()),
    ],
)  # fmt: skip
def test_a_host_read_is_refused(read):
    with pytest.raises(HostReadError, match="reads a tensor"):
        rehearse(lambda _: read(torch.empty(3, device=META)))


def test_a_processor_is_rehearsed_as_an_accelerator():
    leaf = torch.ones(1, 3, 2, 8, dtype=torch.bfloat16, requires_grad=True)

    def train(_):
        attend(leaf, leaf, leaf).sum().backward()

    found = rehearse(train, torch.device("cpu"))
    assert found.calls
    assert found.single_products == {}
    assert plain_devices == {"cpu"}


def test_what_should_not_be_is_found():
    def wrong(counter):
        with counter.stage("wrong"):
            x = torch.empty(8, 8, device=META)
            x @ x
            torch.tensor([1.0, 2.0], device=META)
            torch.zeros(5).to(META)
            torch.zeros(7).to(META, non_blocking=True)

    found = rehearse(wrong)
    assert found.single_products == {"wrong: mm": 1}
    sent = sorted((upload.bytes_, upload.is_blocking) for upload in found.uploads)
    assert sent == [(8, True), (20, True), (28, False)]


def test_a_much_smaller_image_skips_most_of_the_larger_one():
    def bytes_of(size):
        def run(counter):
            image = torch.empty(1, 1, 1024, 1024, device=META)
            nn.functional.interpolate(image, size=size, mode="bilinear")

        (call,) = rehearse(run).calls
        return call.bytes_

    assert bytes_of((512, 512)) == 4 * (1024**2 + 512**2)
    assert bytes_of((8, 8)) == 8 * 8 * (2 * 64 + 4)
