"""Operations against published numbers and torch's counter; memory against what torch keeps."""

import dataclasses
import functools
import json

import pytest
import torch
import train_worlds
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dzrobot import cli
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.network.config import DiTConfig, preset
from dzrobot.policies.dreamzero.network.dit import CausalDiT, Controls, Prompting, TrainInputs
from dzrobot.policies.dreamzero.tiny import tiny_config
from dzrobot.training.cost.flops import (
    SampleCost,
    encoder_flops,
    executed_flops,
    model_flops,
    sample_shape,
)
from dzrobot.training.cost.memory import (
    GIB,
    Setup,
    activation_bytes,
    block_activations,
    count_parameters,
    plan_memory,
)
from dzrobot.training.cost.plan import (
    RunPlan,
    check_fits,
    most_accumulation,
    plan_run,
    run_speed,
    settle,
)
from dzrobot.training.cost.speed import describe_measured, describe_speed, peak_tflops
from dzrobot.training.recipes.read import plan_recipe
from dzrobot.training.run import parallel
from dzrobot.training.run.build import build
from dzrobot.training.sft_config import ModelConfig, ParallelConfig

SMALL = DiTConfig(
    model_type="ti2v", dim=64, ffn_dim=256, in_dim=4, out_dim=4, num_heads=4, num_layers=3,
    frame_seqlen=6, concat_first_frame_latent=False, freq_dim=32, text_dim=32, text_len=16,
    clip_dim=32, num_action_per_block=4, hidden_size=24,
)  # fmt: skip


def small_inputs(batch=1):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    return TrainInputs(
        noisy_BCFYX=draw(batch, 4, 9, 4, 6), clean_BCFYX=draw(batch, 4, 9, 4, 6),
        timestep_BF=torch.rand(batch, 9) * 1000,
        controls=Controls(
            action_BAM=draw(batch, 16, 32), timestep_BA=torch.rand(batch, 16) * 1000,
            state_BSM=draw(batch, 4, 64),
        ),
        prompting=Prompting(text_BNE=draw(batch, 16, 32), image_BPE=draw(batch, 257, 32)),
    )  # fmt: skip


@pytest.mark.parametrize("actions", [24, 16])
@pytest.mark.parametrize("size", ["5b", "14b"])
def test_published_definition(contract, size, actions):
    known = json.loads((contract / "flops_raw.json").read_text())
    dit = dataclasses.replace(preset(size).dit, num_action_per_block=actions)
    found = model_flops(dit, sample_shape(dit, 33))
    assert found == pytest.approx(known[f"dit_{size}_train_fwd_na{actions}"], rel=1e-9)


def test_executed_equals_what_torch_counts():
    model = CausalDiT(SMALL)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(small_inputs())
    found = executed_flops(SMALL, sample_shape(SMALL, 33))
    assert found == pytest.approx(counter.get_total_flops(), rel=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("size", "parts"),
    [
        ("5b", ("vae22_160x320_encode_T33", "clip_257")),
        ("14b", ("vae21_352x640_encode_T33", "vae21_352x640_encode_T33", "clip_257")),
    ],
)
def test_encoders(contract, size, parts):
    known = json.loads((contract / "flops_raw.json").read_text())
    found = encoder_flops(preset(size), (352, 640), 0)
    assert found == pytest.approx(sum(known[part] for part in parts), rel=0.01)
    text = encoder_flops(preset(size), (352, 640), 512) - found
    assert text == pytest.approx(known["t5_512"], rel=0.01)


def test_shares_of_the_peak():
    cost = SampleCost(model_forward=2.0, executed_forward=1.5, encoders=1.0, recomputed_share=1.0)
    assert (cost.model, cost.executed) == (6.0, 7.0)
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 989
    assert peak_tflops("some other device") is None


def wider():
    return dataclasses.replace(SMALL, dim=256, ffn_dim=1024, frame_seqlen=24, num_layers=4)


def layout(mode):
    return ParallelConfig(param_dtype="fp32", activation_checkpointing=mode, compile=False)


class Products(TorchDispatchMode):
    """Counts the bytes of what selective checkpointing keeps, which the hooks do not see."""

    def __init__(self):
        super().__init__()
        self.bytes_ = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func in parallel._EXPENSIVE:
            self.bytes_ += (found[0] if isinstance(found, tuple) else found).nbytes
        return found


@functools.cache
def kept_bytes(mode):
    """Return what torch keeps between forward and backward."""
    model = CausalDiT(wider())
    parallel.checkpoint_activations(model.blocks, layout(mode))
    inputs = dataclasses.replace(
        small_inputs(), noisy_BCFYX=torch.randn(1, 4, 9, 8, 12),
        clean_BCFYX=torch.randn(1, 4, 9, 8, 12),
    )  # fmt: skip
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), Products() as made:
        model(inputs)
    saved = sum(storage.nbytes() for storage in kept.values())
    return saved + (made.bytes_ if mode == "selective" else 0)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_activations_are_what_torch_keeps(mode):
    tiny = tiny_config("5b", train_worlds.ROBOT)
    head = dataclasses.replace(tiny.head, num_frames=33)
    setup = Setup(
        network=dataclasses.replace(tiny, dit=wider(), head=head), parallel=layout(mode),
        model=ModelConfig(embodiment_tag="x"), image_size=(32, 32), micro_batch=1, devices=1,
        averaged=False,
    )  # fmt: skip
    # While one block is computed again, it holds everything.
    again = 0 if mode == "none" else kept_bytes("none") / wider().num_layers
    assert activation_bytes(setup) == pytest.approx(kept_bytes(mode) + again, rel=0.25)


def big(devices=1, micro_batch=1, **model):
    return Setup(
        network=preset("14b"), model=ModelConfig(embodiment_tag="oxe_droid", **model),
        parallel=ParallelConfig(), image_size=(352, 640), micro_batch=micro_batch,
        devices=devices, averaged=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def counts():
    """Return the parameters of the 14B."""
    return count_parameters(preset("14b"), is_lora=False)


def test_counts_of_the_published_networks(counts):
    assert counts.trained == pytest.approx(16.484e9, rel=1e-3)
    assert counts.text == pytest.approx(5.681e9, rel=1e-3)
    assert count_parameters(preset("14b"), is_lora=True).trained == 108_582_944


def test_states_shrink_with_devices(counts):
    one, eight = (plan_memory(big(devices), counts) for devices in (1, 8))
    names = ("master weights, float32", "gradients, float32", "Adam moments, float32")
    for name in names:
        first, second = (
            next(item.bytes_ for item in plan.items if item.name == name) for plan in (one, eight)
        )
        assert first == pytest.approx(8 * second)
    # Weights, gradients and two moments; beside them what a block needs, and no second copy.
    assert 16 * counts.trained < one.peak < 20 * counts.trained + 24 * GIB


def accumulating(devices=8, parts=4, **parallel):
    return dataclasses.replace(big(devices), parts=parts, parallel=ParallelConfig(**parallel))


def planned(setup, counts, **parallel):
    changed = setup.parallel.model_copy(update=parallel)
    return plan_memory(dataclasses.replace(setup, parallel=changed), counts).peak


def test_gradients_are_put_off_where_memory_allows(counts):
    """Whole gradients if they fit; over copies of the weights always, as it takes no memory."""
    spread = {"fsdp": {}, "hsdp": {"strategy": "hsdp", "shard_size": 4}, "ddp": {"strategy": "ddp"}}
    chosen = {}
    for name, layout in spread.items():
        setup = accumulating(**layout)
        each, last = (
            planned(setup, counts, enable_gradient_accumulation=way) for way in (False, True)
        )
        shards = {"fsdp": 8, "hsdp": 4, "ddp": 1}[name]
        more = 4 * counts.trained * (1 - 1 / shards)
        assert last - each == pytest.approx(1.03 * more)
        chosen[name] = [most_accumulation(setup, limit) for limit in (0, last - 1, last)]
        assert planned(setup, counts, enable_gradient_accumulation="replicas") == each
    assert chosen == {
        "fsdp": [False, False, True], "hsdp": ["replicas", "replicas", True],
        "ddp": [True, True, True],
    }  # fmt: skip


def test_what_sums_would_round_or_nothing_accumulates_is_not_put_off():
    plenty = 1e15
    assert most_accumulation(accumulating(), plenty) is True
    assert most_accumulation(accumulating(parts=1), plenty) is False
    assert most_accumulation(accumulating(reduce_dtype="bf16"), plenty) is False


def test_weights_kept_between_micro_batches_are_counted(counts):
    each = 1.03 * 2 * counts.block * preset("14b").dit.num_layers
    setup = accumulating()
    peak = planned(setup, counts)
    kept = planned(setup, counts, reshard_after_backward=False)
    # Activations are no longer there when all weights are.
    assert 0.5 * each < kept - peak < each
    once = dataclasses.replace(setup, parts=1)
    assert planned(once, counts, reshard_after_backward=False) == planned(once, counts)
    whole = planned(setup, counts, reshard_after_forward=False)
    assert planned(
        setup, counts, reshard_after_forward=False, reshard_after_backward=False
    ) == whole  # fmt: skip


@pytest.mark.parametrize(("device_bytes", "compiles"), [(0.0, False), (1e12, True)])
def test_only_an_accelerator_compiles_unasked(train_root, device_bytes, compiles):
    base = open_checkpoint(train_root / "tiny").config
    for asked, settled in (("auto", compiles), (True, True), (False, False)):
        config = train_worlds.config(train_root, parallel__compile=asked)
        assert settle(config, base, 1, device_bytes).parallel.compile is settled


def test_what_recorded_blocks_hold_is_counted(counts):
    setup = big(8)
    more = planned(setup, counts, cuda_graphs="blocks") - planned(setup, counts)
    assert more == pytest.approx(1.03 * (4 * counts.block + block_activations(setup)))


def test_accumulation_that_does_not_fit_is_named(counts):
    setup = accumulating(enable_gradient_accumulation=True)
    plan = RunPlan(setup, counts, plan_memory(setup, counts))
    with pytest.raises(ConfigError, match="enable_gradient_accumulation=false"):
        check_fits(plan, 80)


def test_a_run_that_does_not_fit_is_refused_with_ways_out(counts):
    setup = big(micro_batch=4)
    plan = RunPlan(setup, counts, plan_memory(setup, counts))
    with pytest.raises(ConfigError) as caught:
        check_fits(plan, 141)
    text = str(caught.value)
    assert "4 devices of 141 GiB" in text
    assert "model.is_lora=true" in text
    assert "cpu_offload=true" in text
    check_fits(plan, 10_000)


def test_memory_is_filled_with_kept_blocks(train_root, solo):
    """One block more would be too much; without a device of known size there is nothing to fill."""
    asked = {"parallel__fill_memory": True, "parallel__activation_checkpointing": "full"}
    config = train_worlds.config(train_root, **asked)
    tiny = open_checkpoint(train_root / "tiny").config
    # So large that activations and not the encoders take most.
    dit = dataclasses.replace(tiny.dit, dim=2048, ffn_dim=8192, num_heads=16, num_layers=4)
    base = dataclasses.replace(tiny, dit=dit)

    def peak(kept):
        parallel = config.parallel.model_copy(update={"kept_blocks": kept})
        changed = config.model_copy(update={"parallel": parallel})
        return plan_run(changed, base, 1).memory.peak

    blocks = base.dit.num_layers
    for limit, kept in ((peak(2), 2), (peak(3) - 1, 2), (peak(blocks), blocks), (1, 0)):
        assert settle(config, base, 1, limit).parallel.kept_blocks == kept
    with pytest.raises(ConfigError, match=r"this run has none: give parallel.kept_blocks a number"):
        build(config, solo)


def speed_of(recipe, *changes, devices=8, peak=989.0):
    planned = plan_recipe(recipe, changes, devices)
    config, base = planned.config, planned.network
    return run_speed(config, base, devices, peak)


def text_of(speed):
    return "\n".join(describe_speed(speed))


@pytest.mark.parametrize(
    ("network", "published", "unfitted"), [("5b", 4.44, 1.10), ("14b", 0.150, 0.111)]
)
def test_the_estimate_is_fitted_to_one_published_rate_and_says_how_far_off_another_is(
    network, published, unfitted
):
    speed = speed_of(f"droid_sft_dreamzero_{network}")
    assert speed.differences == ()
    assert speed.rate == pytest.approx(published, rel=1e-3)
    text = text_of(speed)
    rows = [line for line in text.splitlines() if "not fitted" in line]
    (row,) = (line for line in rows if f" {unfitted:g} " in line)
    assert f"{published / unfitted:.2f} times too high" in row
    assert f"{published:.3g}  fitted" in text
    assert "measured with this trainer on a GPU: nothing yet" in text


def test_an_estimate_names_what_differs_from_the_published_run():
    changes = ("model.is_lora=true", "runner.micro_batch_size=1", "runner.global_batch_size=1")
    speed = speed_of("libero_sft_dreamzero_5b", *changes, devices=1, peak=312.0)
    assert speed.differences == (
        "1 device", "a peak of 312 TFLOP/s", "libero_sim", "micro-batch 1", "adapters"
    )  # fmt: skip
    # Of the same operations, the peak and the fitted share are all that counts.
    twice = speed_of("libero_sft_dreamzero_5b", *changes, devices=1, peak=624.0)
    assert twice.rate == pytest.approx(2 * speed.rate)
    assert "not as in that row: 1 device" in text_of(speed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("parallel.param_dtype=fp32", "the published rows compute in bfloat16"),
        ("parallel.cpu_offload=true", "no row with offload was published for FSDP2"),
        ("parallel.float8=true", "the published rows have no products in float8"),
    ],
)
def test_what_was_not_published_is_not_estimated(change, reason):
    speed = speed_of("droid_sft_dreamzero_5b", change)
    assert speed.rate is None
    text = text_of(speed)
    assert f"samples per second: not known: {reason}" in text
    # What is known of the network is still said.
    assert "4.44" in text


def test_a_small_network_has_no_speed_on_a_gpu(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps(tiny_config("5b", train_worlds.ROBOT).to_dict())
    )
    assert cli.main(["plan", "tiny_cpu", f"model.config_path={tmp_path / 'config.json'}"]) == 0
    text = capsys.readouterr().out
    assert "samples per second: not known: no network of this size was published" in text
    assert "samples/s" not in text


def test_a_profile_parts_the_operations_of_a_sample(capsys):
    words = ["plan", "droid_sft_dreamzero_5b", "--gpus", "8", "--profile"]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    parts = [line for line in lines if "TFLOP" in line and line.endswith("%")]
    whole = next(line for line in lines if line.startswith("operations of one sample"))
    shares = sum(float(line.split()[-3]) for line in parts)
    assert shares == pytest.approx(float(whole.split()[-2]), rel=1e-3)
    assert len(parts) == 4


def test_nothing_is_forecast_for_a_machine_that_is_not_there(capsys):
    """The other side is this machine: torch's own word on whether it has a GPU."""
    assert cli.main(["plan", "droid_sft_dreamzero_5b", "--gpus", "8", "--memory", "80"]) == 0
    named = capsys.readouterr().out
    assert named.startswith("planned for 8 x 80 GiB, 989 TFLOP/s each (as named; this machine has ")
    # The slowest and the fastest of the published programs, with two digits each.
    assert "estimated 4.5 to 36 samples/s, 0.56 to 4.4 per device" in named
    assert cli.main(["plan", "libero_lora_dreamzero_5b"]) == 0
    here = capsys.readouterr().out
    assert here.startswith("planned for ")
    has_gpu = torch.cuda.is_available()
    assert ("and torch sees no GPU\n" in here) is not has_gpu
    assert ("\nfits " in here) is has_gpu
    assert ("samples/s, " in here) is has_gpu


def test_a_measured_rate_is_a_range_with_two_digits():
    told = describe_measured([2.713, 2.688, 2.951], 8000)
    assert told.startswith("measured here: 2.7 to 3 samples/s in 3 trials; the run's 8,000 samples")
    assert "0:45:00 to 0:50:00" in told
