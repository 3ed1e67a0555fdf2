"""A step and a chunk that run without memory: what they cost, and what must not be in them."""

import dataclasses
import json

import pytest
import torch
import train_worlds
from torch import nn

from dzrobot import cli
from dzrobot.policies.dreamzero.network.attention import attend, plain_devices
from dzrobot.policies.dreamzero.network.prompt import attended_rows
from dzrobot.policies.dreamzero.network.session import GenerateOptions
from dzrobot.policies.dreamzero.tiny import tiny_config
from dzrobot.training.cost.accelerators import DEVICES, FULL, Rate, floor, roofline
from dzrobot.training.cost.flops import encoder_flops, executed_flops, sample_shape
from dzrobot.training.cost.memory import Setup
from dzrobot.training.forecast.forecast import REPLAY_LAUNCHES, costs, forecast
from dzrobot.training.forecast.operators import BETWEEN, RECORDED, HostReadError
from dzrobot.training.forecast.published import way_seconds
from dzrobot.training.forecast.rehearsal import (
    META,
    ChunkSetup,
    StepSetup,
    of_all_layers,
    rehearse,
    rehearse_chunks,
    rehearse_prompt,
    rehearse_step,
)
from dzrobot.training.recipes.architecture import run_network
from dzrobot.training.run.optimizer import Optimizer
from dzrobot.training.sft_config import ModelConfig, OptimConfig, ParallelConfig

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
    return dataclasses.replace(config, dit=dataclasses.replace(config.dit, num_layers=layers))


def step_plan(variant="5b", *, layers=3, stored=False, lora=False, devices=1, **parallel):
    config = network(variant, layers)
    if lora:
        head = dataclasses.replace(config.head, train_architecture="lora")
        config = dataclasses.replace(config, head=head)
    return StepSetup(
        setup=Setup(
            network=config, model=ModelConfig(embodiment_tag=ROBOT.tag, is_lora=lora),
            parallel=ParallelConfig(**parallel), image_size=ROBOT.image_size, micro_batch=BATCH,
            devices=devices, averaged=False,
        ),
        robot=ROBOT, prompt_rows=WORDS, has_stored_images=stored,
    )  # fmt: skip


def chunk_plan(variant, *, history):
    return ChunkSetup(
        network=network(variant), image_size=ROBOT.image_size, prompt_rows=WORDS,
        options=GenerateOptions(dit_steps=5, history=history),
    )  # fmt: skip


def test_less_video_takes_less_of_a_chunk():
    plan = chunk_plan("5b", history=False)
    ways = [("full", 5), ("once", 5), ("skip", 5)]
    # So slow that its arithmetic alone takes time.
    device = dataclasses.replace(DEVICES[0], half_tflops=1e-6)
    seconds = way_seconds(plan, ways, device, "compiled")
    assert list(seconds) == ways
    full, once, skip = seconds.values()
    assert full > once > skip


LONG = [pytest.param(variant, marks=pytest.mark.long) for variant in ("5b", "14b")]


def test_a_teacher_runs_forward_once_for_each_of_its_steps():
    plan = step_plan(stored=True, activation_checkpointing="none")
    none, once, twice = (
        rehearse_step(
            dataclasses.replace(plan, setup=dataclasses.replace(plan.setup, teacher_steps=steps))
        ).micro_batch.of_stage("teacher").flops
        for steps in (0, 1, 2)
    )  # fmt: skip
    assert none == 0
    assert twice == 2 * once > 0


@pytest.fixture(scope="module", params=["5b, stored images", *LONG])
def step(request):
    variant, _, stored = request.param.partition(",")
    return request.param, rehearse_step(step_plan(variant, stored=bool(stored))).micro_batch


@pytest.fixture(scope="module", params=["5b, first", *LONG])
def chunks(request):
    variant, _, first = request.param.partition(",")
    plan = chunk_plan(variant, history=not first)
    return {**rehearse_chunks(plan), "prompt": rehearse_prompt(plan)}


def stage_flops(rehearsal, *stages):
    return sum(
        count * kernel.flops
        for kernel, count in rehearsal.eager.items() if kernel.stage in stages
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


@pytest.mark.long
def test_what_further_blocks_add_is_what_they_run():
    # With three blocks kept, all five are run through; without recompute that changes nothing else.
    plain = {"activation_checkpointing": "none"}
    added = rehearse_step(step_plan(layers=5, stored=True, **plain))
    run = rehearse_step(step_plan(layers=5, stored=True, kept_blocks=3, **plain))
    assert added.micro_batch.eager == run.micro_batch.eager
    assert added.micro_batch.compiled == run.micro_batch.compiled


@pytest.mark.long
def test_only_what_is_trained_is_updated_and_only_shares_of_it():
    whole, eighth, lora = (
        rehearse_step(step_plan(stored=True, **kind))
        for kind in ({}, {"devices": 8}, {"lora": True})
    )

    def moved(rehearsal):
        return sum(count * kernel.bytes_ for kernel, count in rehearsal.update.eager.items())

    assert moved(eighth) < moved(whole) / 4
    assert moved(lora) < moved(whole)
    assert whole.micro_batch.link_bytes == 0
    assert eighth.micro_batch.link_bytes > 0


def test_the_update_moves_what_the_optimizer_moves():
    shapes = [(24, 8), (40,), (16, 16)]
    parameters = {f"w{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes)}
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer = Optimizer(parameters.items(), OptimConfig(), total_updates=10)
    found = rehearse(lambda _: optimizer.step(), torch.device("cpu"))
    fused = [kernel for kernel in found.eager if kernel.operator == "_fused_adamw_"]
    numel = sum(parameter.numel() for parameter in parameters.values())
    # Four tensors are read, three written; besides, single numbers.
    assert sum(kernel.bytes_ for kernel in fused) == pytest.approx(4 * 8 * numel, rel=0.15)


def test_one_launch_for_all_blocks_grows_with_them():
    def run(blocks):
        x = torch.empty(blocks, 8, device=META)
        return rehearse(lambda _: [x + 1, *(x[0] * 2 for _ in range(blocks))])

    assert of_all_layers(run, 2, 7).eager == run(7).eager


class Block(nn.Module):
    """Two element-wise operators, a product, two more."""

    def forward(self, x, weight):
        return ((x + 1).relu() @ weight + 1).relu()


def test_a_compiled_block_is_one_kernel_between_products():
    x, weight = (torch.empty(64, 64, device=META, dtype=torch.bfloat16) for _ in range(2))
    found = rehearse(lambda _: Block()(x, weight))
    size = 2 * 64 * 64
    assert sorted(kernel.bytes_ for kernel in found.eager.elements()) == [*4 * [2 * size], 3 * size]
    # What is made last is read by nobody here, so one of the two is all that is left.
    assert [kernel.operator for kernel in found.compiled] == ["fused", "mm"]
    assert found.flops == 2 * 64**3


def test_time_is_the_longest_of_arithmetic_traffic_launches_and_link():
    x = torch.empty(4096, 4096, device=META, dtype=torch.bfloat16)
    h100 = roofline(DEVICES[0], FULL)
    product = rehearse(lambda _: x @ x)
    assert forecast(product, h100, "graph").total == pytest.approx(2 * 4096**3 / 989e12)
    added = rehearse(lambda _: x + x)
    assert forecast(added, h100, "graph").total == pytest.approx(4096**2 * 6 / 3350e9, rel=0.34)
    many = rehearse(lambda _: [x[0] + 1 for _ in range(100)])
    assert forecast(many, h100, "eager").total == pytest.approx(100 * h100.launch_s)
    sent = rehearse(lambda counter: counter.send(450e9))
    assert forecast(sent, h100, "eager").total == pytest.approx(1)
    (line,) = costs(product, h100, "eager")
    assert (line.operator, line.share, line.launches) == ("mm", 1, 1)


def test_graphs_spare_the_launches_of_recorded_steps_and_no_others():
    small = torch.empty(8, device=META)

    def run(counter):
        for _ in range(100):
            small + 1
        for _ in range(3):
            with counter.recorded():
                for _ in range(50):
                    small + 1
            for _ in range(7):
                small + 1

    found, h100 = rehearse(run), roofline(DEVICES[0])
    assert found.replays == 3
    for form, launches in (("compiled", 100 + 3 * 57), ("graph", 100 + 3 * (7 + REPLAY_LAUNCHES))):
        assert forecast(found, h100, form).host == pytest.approx(launches * h100.launch_s)
    # Before the first recorded step the device waits for the host; what it runs later is not hidden
    # behind those launches.
    slow = dataclasses.replace(
        h100, bytes_s=Rate(((1.0, 1e6),)), in_place_bytes_s=Rate(((1.0, 1e6),))
    )
    seconds = 3 * 57 * 64 / 1e6
    assert forecast(found, slow, "graph").total == pytest.approx(100 * 64 / 1e6 + seconds)
    assert forecast(found, h100, "graph").total == pytest.approx(
        forecast(found, h100, "graph").host
    )
    assert forecast(found, floor(DEVICES[0]), "compiled").host == 0


def test_chunks_know_their_recorded_steps(chunks):
    for place, rehearsal in chunks.items():
        stages = {kernel.stage for kernel in rehearsal.compiled}
        if place == "prompt":
            assert (rehearsal.replays, stages) == (0, {"prompt"})
            continue
        # All of a call is one recording: encoders, contexts, reading and denoising.
        assert rehearsal.replays == 1
        assert stages == {"chunk", RECORDED, BETWEEN}
        assert sum(n for kernel, n in rehearsal.eager.items() if kernel.stage != RECORDED) < 100


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
    assert found.eager
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


def test_what_is_written_over_allocates_nothing():
    def run(counter):
        x = torch.empty(100, device=META)
        x.add_(1)
        x.add(1)

    found = rehearse(run).eager
    assert {kernel.operator: kernel.is_in_place for kernel in found} == {"add_": True, "add": False}
    ours = dataclasses.replace(
        roofline(DEVICES[0]), bytes_s=Rate(((1.0, 1.0),)), in_place_bytes_s=Rate(((1.0, 4.0),)),
        launch_s=0.0,
    )  # fmt: skip
    # 800 bytes either way.
    assert forecast(rehearse(run), ours, "eager").device == pytest.approx(800 + 200)


def test_a_much_smaller_image_skips_most_of_the_larger_one():
    def bytes_of(size):
        def run(counter):
            image = torch.empty(1, 1, 1024, 1024, device=META)
            nn.functional.interpolate(image, size=size, mode="bilinear")

        (kernel,) = rehearse(run).eager
        return kernel.bytes_

    assert bytes_of((512, 512)) == 4 * (1024**2 + 512**2)
    assert bytes_of((8, 8)) == 8 * 8 * (2 * 64 + 4)


@pytest.mark.long
def test_plan_prints_the_forecast(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(network("5b").to_dict()))
    words = [f"model.config_path={tmp_path / 'config.json'}", "data.cache_features=true"]
    words += ["data.augment=false"]
    assert cli.main(["plan", "tiny_cpu", *words, "--profile"]) == 0
    text = capsys.readouterr().out
    assert all(device.name in text for device in DEVICES)
    # The recipe computes in float32, and the forecast says so.
    assert "float32 product" in text
