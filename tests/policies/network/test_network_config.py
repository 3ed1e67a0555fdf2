"""Network configs: what published files say, written back, and what is refused."""

import json
from dataclasses import replace

import pytest

from dzrobot.errors import CheckpointError, ConfigError, UnknownNameError
from dzrobot.policies.dreamzero.network.config import (
    HeadConfig,
    ImageConfig,
    NetworkConfig,
    TextConfig,
    preset,
)

NAMES = ("5b", "14b")


def narrow(config):
    """Return ``config`` with every size changed."""
    return replace(
        config,
        dit=replace(
            config.dit, dim=48, ffn_dim=20, num_heads=2, num_layers=3, text_dim=12, text_len=16,
            clip_dim=10, action_dim=7, max_state_dim=9, hidden_size=11, num_action_per_block=6,
        ),
        text=TextConfig(vocab=50, dim=12, dim_attn=8, dim_ffn=6, num_heads=2, num_layers=1),
        image=ImageConfig(vision_dim=10, vision_heads=1, vision_layers=2, embed_dim=3),
        vae=replace(config.vae, dim=4, dec_dim=8),
        head=HeadConfig(action_horizon=6, lora_rank=2, lora_target_modules=("q", "ffn.0")),
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_published_configs_are_the_presets(contract, name):
    published = json.loads((contract / f"rlinf_config_{name}.json").read_text())
    listing = json.loads((contract / f"dreamzero_{name}_state_dict.json").read_text())
    config = NetworkConfig.from_dict(published)

    expected = preset(name)
    head = replace(
        expected.head,
        target_video_height=published["target_video_height"],
        target_video_width=published["target_video_width"],
    )
    assert config == replace(expected, head=head)
    for field, value in listing["dit_config"].items():
        assert getattr(config.dit, field) == value


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [lambda config: config, narrow])
def test_written_config_reads_back_equal(name, change):
    config = change(preset(name))
    assert NetworkConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_entries_are_ignored_and_the_concat_flag_follows_the_channels():
    for name in NAMES:
        data = preset(name).to_dict()
        head = data["action_head_cfg"]["config"]
        head |= {"num_inference_timesteps": 4, "repa_layer": 8, "action_loss_embodiment_ids": [26]}
        head["diffusion_model_cfg"].pop("concat_first_frame_latent")
        assert NetworkConfig.from_dict(data) == preset(name)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("action_head_cfg",), None, "action_head_cfg"),
        (("action_head_cfg", "config", "diffusion_model_cfg", "dim"), None, "dim"),
        (("action_head_cfg", "config", "diffusion_model_cfg", "dim"), "5120", "expected int"),
        (("action_head_cfg", "config", "diffusion_model_cfg", "model_type"), "t2v", "'i2v'"),
        (("action_head_cfg", "config", "diffusion_model_cfg", "in_dim"), 16, "needs in_dim=36"),
        (("action_head_cfg", "config", "diffusion_model_cfg", "num_heads"), 7, "num_heads=7"),
        (("action_head_cfg", "config", "vae_cfg", "_target_"), "x.WanVideoVAE3", "WanVideoVAE38"),
        (("action_head_cfg", "config", "vae_cfg", "z_dim"), 48, "vae.z_dim=48"),
        (("action_head_cfg", "config", "target_video_height"), None, "both or neither"),
    ],
)
def test_a_config_of_no_network_is_refused(path, value, said):
    data = preset("14b").to_dict()
    *parents, last = path
    section = data
    for key in parents:
        section = section[key]
    section[last] = value
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        NetworkConfig.from_dict(data)
    assert said in str(caught.value)


def test_sizes_that_cannot_be_generated_are_refused_with_the_nearest_one():
    config = preset("5b")
    config.check_size(160, 320)
    with pytest.raises(ConfigError, match="160 x 320"):
        config.check_size(176, 320)
    with pytest.raises(ConfigError, match="frame_seqlen=50"):
        config.check_size(320, 640)
    for name in NAMES:
        config = preset(name)
        config.check_size(*config.target_size)
        rows, columns = config.latent_size(*config.target_size)
        assert rows * columns // 4 == config.dit.frame_seqlen


def test_a_5b_config_without_a_size_means_the_old_default():
    config = preset("5b")
    unsized = replace(config.head, target_video_height=None, target_video_width=None)
    assert replace(config, head=unsized).target_size == (176, 320)
    config = preset("14b")
    unsized = replace(config.head, target_video_height=None, target_video_width=None)
    assert replace(config, head=unsized).target_size is None


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(UnknownNameError, match="14b, 5b"):
        preset("7b")
