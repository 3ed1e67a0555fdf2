"""One step of the trainer: recorded numbers, independence of the batch, stored prompts."""

import contextlib
import dataclasses
import weakref
from datetime import timedelta

import pytest
import torch
import train_worker
import train_worlds

from dzrobot.policies.dreamzero.network.world_action import (
    LossCounts,
    LossOptions,
    TrainBatch,
    training_schedule,
)
from dzrobot.training.run.export import TrainedSource
from dzrobot.training.run.inputs import keyed_generator, sample_noise, with_less_video
from dzrobot.training.run.parallel import DTYPES, clean_name, parallelize
from dzrobot.training.run.trainer import backward
from dzrobot.training.sft_config import ParallelConfig


def test_loss_and_gradients_equal_the_recorded_ones(goldens, solo):
    from golden_kinds.registry import manifests

    recorded = [golden for golden in manifests(goldens) if golden.kind == "head_train_forward"]
    assert recorded
    for golden in recorded:
        trains_as_recorded(golden, solo)


def trains_as_recorded(golden, solo):
    """Check losses and gradients of one recorded training pass."""
    from golden_kinds import head
    from golden_kinds.registry import relative_l2

    model = head._model(golden)
    batch = TrainBatch(
        images=golden["in.images"],
        state_BSM=golden["in.state"],
        action_BAM=golden["in.action"],
        action_mask_BAM=golden["in.action_mask"],
        has_real_action_B=golden["in.has_real_action"],
        prompt=model.embed_prompts(golden["in.text"], golden["in.text_attention_mask"]),
    )
    noise = head._noise(golden, model, training_schedule(torch.device("cpu")).timesteps)
    layout = ParallelConfig(param_dtype="fp32", compile=False, activation_checkpointing="full")
    parallelize(model.model, model.model.blocks, layout, solo)
    size = float(len(golden["in.images"]))
    counts = LossCounts(samples=size, actions=size)
    losses = backward(model, model.prepare(batch), noise, counts, LossOptions())
    expected = torch.stack([golden["out.dynamics_loss"], golden["out.action_loss"]]).flatten()
    assert relative_l2(losses, expected) <= 1e-5
    for parameter_name, parameter in model.model.named_parameters():
        key = f"grad.{clean_name(parameter_name)}"
        if key in golden.tensors:
            assert relative_l2(parameter.grad.full_tensor(), golden[key]) <= 1e-4, key


def micro_batches(run, count):
    batches = run.batches(8)
    return [next(batches) for _ in range(count)]


@pytest.mark.sampled
@pytest.mark.parametrize("norm", ["padded", "masked"])
def test_a_batch_is_the_mean_of_its_samples(train_root, solo, norm):
    one_by_one_as_a_batch(train_root, solo, {"model__action_loss_norm": norm})


def one_by_one_as_a_batch(train_root, solo, changes):
    """Check that samples of one batch give what they give alone; return that."""
    one = train_worker.gradients(train_worker.trainer(solo, train_root, **changes))
    four = train_worker.gradients(
        train_worker.trainer(solo, train_root, **changes, runner__micro_batch_size=4)
    )
    torch.testing.assert_close(one[0], four[0], rtol=0, atol=1e-6)
    for name, gradient in one[1].items():
        torch.testing.assert_close(four[1][name], gradient, rtol=1e-5, atol=1e-6)
    return one


@pytest.mark.parametrize(
    ("norm", "order"),
    [("padded", "read computed read computed"), ("masked", "read read computed computed")],
)
def test_a_micro_batch_is_read_when_it_is_needed(train_root, solo, norm, order):
    """The masked norm has to know all micro-batches first."""
    changes = {"model__action_loss_norm": norm, "runner__micro_batch_size": 2}
    run, events = train_worker.trainer(solo, train_root, **changes), []
    prepare, batches = run.prepare, run.batches(8)

    def read():
        for batch in batches:
            events.append("read")
            yield batch

    def prepared(batch):
        events.append("computed")
        return prepare(batch)

    run.prepare = prepared
    run.train_step(read())
    assert " ".join(events) == order


def test_steps_and_evaluations_that_compile_would_say_so(train_root, solo, tmp_path):
    changes = {"data__holdout_episodes": 1, "runner__eval_interval": 2, "runner__max_steps": 2}
    changes |= {"runner__eval_windows": 1, "runner__output_dir": tmp_path}
    run, works = train_worker.trainer(solo, train_root, **changes), []

    class Notice:
        def watching(self, work):
            works.append(work)
            return contextlib.nullcontext()

    run.components = dataclasses.replace(run.components, compiling=Notice())
    run.run()
    assert works == ["training step", "training step", "evaluation"]


@pytest.mark.sampled
@pytest.mark.parametrize("norm", ["padded", "masked"])
def test_samples_without_actions_are_counted_over_the_whole_step(train_root, solo, norm):
    """Uneven micro-batches: what they add up to is the loss of the whole batch."""
    changes = {"model__action_loss_norm": norm}
    run = train_worker.trainer(solo, train_root, **changes)
    parts = micro_batches(run, 4)
    for batch in parts[:3]:
        batch["has_real_action"][:] = False
    counts = run._counts(parts)
    summed = sum(run.forward_backward(run.prepare(b), b, counts) for b in parts)
    alone = run.forward_backward(
        run.prepare(parts[3]), parts[3], LossCounts(samples=1.0, actions=1.0)
    )
    share = 1.0 if norm == "masked" else 0.25
    assert summed[1].item() == pytest.approx(share * alone[1].item(), rel=1e-5)


def test_stored_prompts_equal_live_ones(train_root, solo, tmp_path):
    stored = train_worker.trainer(solo, train_root, runner__output_dir=tmp_path / "a")
    live = train_worker.trainer(
        solo, train_root, runner__output_dir=tmp_path / "b", model__cache_prompts=False
    )
    assert stored.components.model.text_encoder is None
    prompts = micro_batches(stored, 1)[0]["prompt"] + [
        train_worlds.ROBOT.prompt.format(task=task) for task in train_worlds.TASKS
    ]
    cpu = torch.device("cpu")
    first, second = (run.components.inputs.prompts.embed(prompts, cpu) for run in (stored, live))
    assert first.lengths == second.lengths
    torch.testing.assert_close(first.rows_BNE, second.rows_BNE, rtol=0, atol=1e-6)


def test_cut_prompts_end_where_the_shortest_of_the_micro_batch_does(train_root, solo):
    """The published trainer's rule: for each length v of the batch, ``prompt_emb[:, v:] = 0``."""
    run = train_worker.trainer(
        solo, train_root, runner__micro_batch_size=4, model__prompt_rows="cut"
    )
    batch = micro_batches(run, 1)[0]
    own = run.components.inputs.prompts.embed(batch["prompt"], torch.device("cpu"))
    assert len(set(own.lengths)) == 2
    wanted = own.rows_BNE.clone()
    for length in own.lengths:
        wanted[:, length:] = 0
    found = run.prepare(batch).prompting.text_BNE
    assert torch.equal(found, wanted[:, : found.shape[1]])
    assert not torch.equal(own.rows_BNE, wanted)


def test_noise_depends_on_seed_step_and_slot_alone(train_root, solo):
    run = train_worker.trainer(solo, train_root, runner__micro_batch_size=2)
    batch = micro_batches(run, 1)[0]
    prepared, network = run.prepare(batch), run.components.network
    both = sample_noise(network, prepared, 3, 7, [4, 9])
    single = dataclasses.replace(
        prepared,
        latents_BCFYX=prepared.latents_BCFYX[:1], action_BAM=prepared.action_BAM[:1],
    )  # fmt: skip
    alone = sample_noise(network, single, 3, 7, [9])
    assert torch.equal(both.video_BCFYX[1], alone.video_BCFYX[0])
    assert torch.equal(both.frame_index_BF[1], alone.frame_index_BF[0])
    assert torch.equal(both.action_BAM[1], alone.action_BAM[0])
    draws = {
        tuple(torch.rand(2, generator=keyed_generator("noise", *key)).tolist())
        for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    }
    assert len(draws) == 4


@pytest.mark.sampled
@pytest.mark.parametrize("video", ["once", "skip"])
def test_which_samples_are_trained_with_less_video_depends_on_seed_step_and_slot(
    train_root, solo, video
):
    changes = {"model__action_only_ratio": 0.5, "model__action_only_video": video}
    run = train_worker.trainer(solo, train_root, **changes, runner__micro_batch_size=4)
    prepared = run.prepare(micro_batches(run, 1)[0])
    model, slots = run.components.config.model, [0, 5, 6, 7]
    noise = sample_noise(run.components.network, prepared, 0, 3, slots)
    drawn = [
        bool(torch.rand((), generator=keyed_generator("action only", 0, 3, slot)) < 0.5)
        for slot in range(100)
    ]
    assert 30 < sum(drawn) < 70
    chosen = [drawn[slot] for slot in slots]
    assert len(set(chosen)) == 2
    found = with_less_video(noise, (0, 3), slots, model)
    if video == "skip":
        assert found.hides_video_B.tolist() == chosen
        assert torch.equal(found.frame_index_BF, noise.frame_index_BF)
    else:
        assert found.hides_video_B is None
        wanted = noise.frame_index_BF * ~torch.tensor(chosen)[:, None]
        assert torch.equal(found.frame_index_BF, wanted)
    # Actions keep their own noise level, and nothing else has changed.
    assert torch.equal(found.action_index_BA, noise.action_index_BA)
    assert found.video_BCFYX is noise.video_BCFYX
    none = model.model_copy(update={"action_only_ratio": 0.0})
    assert with_less_video(noise, (0, 3), slots, none) is noise


@pytest.mark.long
@pytest.mark.parametrize("video", ["once", "skip"])
def test_less_video_goes_through_a_step(train_root, solo, video):
    """Samples of one batch do not touch each other; without any video there is no loss of it."""
    changes = {"model__action_only_ratio": 0.5, "model__action_only_video": video}
    one = one_by_one_as_a_batch(train_root, solo, changes)
    plain = train_worker.gradients(train_worker.trainer(solo, train_root))
    changes["model__action_only_ratio"] = 1.0
    every = train_worker.gradients(train_worker.trainer(solo, train_root, **changes))
    assert every[0][0] == 0 < one[0][0] < plain[0][0]
    assert every[0][1] != plain[0][1]


@pytest.mark.long
def test_compiled_blocks_agree_and_are_compiled_once(traced_dtype, train_root, solo):
    """Whole-graph capture and no recompilation."""
    from torch._dynamo.utils import counters

    (dtype,) = (name for name, dtype in DTYPES.items() if dtype == traced_dtype)
    changes = {"parallel__activation_checkpointing": "full", "parallel__param_dtype": dtype}
    eager = train_worker.gradients(train_worker.trainer(solo, train_root, **changes))
    counters.clear()
    run = train_worker.trainer(solo, train_root, **changes, parallel__compile=True)
    compiled = train_worker.gradients(run)
    torch.testing.assert_close(compiled[0], eager[0], rtol=0, atol=1e-6)
    for name, gradient in eager[1].items():
        torch.testing.assert_close(compiled[1][name], gradient, rtol=1e-5, atol=1e-6)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    batches = run.batches(8)
    for _ in range(2):
        run.train_step(batches)
        run.step += 1
    assert counters["stats"]["unique_graphs"] == graphs


def test_newly_initialized_adapters_change_nothing(train_root, solo):
    """B is zero, so the first loss is that of the base; A is drawn by seed and layer."""
    full = train_worker.trainer(solo, train_root)
    lora = train_worker.trainer(solo, train_root, model__is_lora=True)
    assert torch.equal(train_worker.gradients(lora)[0], train_worker.gradients(full)[0])
    trained = lora.components.optimizer.named
    downs = {name: p for name, p in trained.items() if ".lora_A." in name}
    ups = [p for name, p in trained.items() if ".lora_B." in name]
    assert len(downs) == len(ups) > 0
    assert not any(p.any() for p in ups)
    drawn = {name: p.full_tensor().detach() for name, p in downs.items()}
    bounds = {name: p.shape[1] ** -0.5 for name, p in drawn.items()}
    # Uniform on its whole range: the standard deviation is the bound over the root of three.
    for name, values in drawn.items():
        assert values.abs().max() <= bounds[name]
        assert values.std().item() == pytest.approx(bounds[name] / 3**0.5, rel=0.25)
    others = train_worker.trainer(solo, train_root, model__is_lora=True, runner__seed=4)
    name = next(iter(drawn))
    assert not torch.equal(others.components.optimizer.named[name].full_tensor(), drawn[name])


def test_processes_wait_for_hours_for_what_the_main_one_does_alone(solo):
    """Rollouts and exports: by default the others would give up after half an hour."""
    options = solo.host_group._get_backend(torch.device("cpu")).options
    assert options._timeout >= timedelta(hours=12)


def test_an_export_holds_one_tensor_at_a_time(train_root, solo):
    source = TrainedSource(train_worker.trainer(solo, train_root).components)
    read, most = [], 0
    with source.shared():
        for _, tensor in source.stream(source.tensors):
            read.append(weakref.ref(tensor))
            most = max(most, sum(one() is not None for one in read))
    assert len(read) == len(source.tensors) > 10
    assert most <= 2
