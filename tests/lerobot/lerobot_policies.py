"""Makes and plays policies with LeRobot's own code; runs in LeRobot's Python.

``make KIND FOLDER FEATURES`` writes a policy of random weights with its processors. ``play FOLDER
OBSERVATIONS OUTPUT`` asks ``select_action`` at every step, as ``lerobot_eval`` does.
``play_async FOLDER OBSERVATIONS OUTPUT`` asks LeRobot's own asynchronous server for a chunk when
the last one is over.
"""

import json
import sys

import numpy as np
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.factory import (
    get_policy_class,
    make_policy_config,
    make_pre_post_processors,
)

from dzrobot.rng import torch_seed

SMALL = {
    "act": {
        "chunk_size": 20, "n_action_steps": 6, "dim_model": 32, "n_heads": 2, "n_encoder_layers": 1,
        "dim_feedforward": 64, "n_vae_encoder_layers": 1, "pretrained_backbone_weights": None,
    },
    "act_ensemble": {
        "chunk_size": 20, "n_action_steps": 1, "dim_model": 32, "n_heads": 2, "n_encoder_layers": 1,
        "dim_feedforward": 64, "n_vae_encoder_layers": 1, "pretrained_backbone_weights": None,
        "temporal_ensemble_coeff": 0.01,
    },
    "diffusion": {
        "horizon": 16, "n_action_steps": 4, "down_dims": (32, 64), "num_inference_steps": 3,
        "pretrained_backbone_weights": None, "crop_shape": None, "drop_n_last_frames": 0,
        "spatial_softmax_num_keypoints": 4,
    },
    "smolvla": {
        "chunk_size": 8, "n_action_steps": 4, "num_vlm_layers": 2, "num_steps": 2,
        "resize_imgs_with_padding": (64, 64),
    },
}  # fmt: skip
"""Kind -> what keeps it small."""


def make(kind, folder, features):
    torch.manual_seed(0)
    given = {
        name: PolicyFeature(FeatureType[type_], tuple(shape))
        for name, (type_, shape) in json.loads(features).items()
    }
    ours = {name: given.pop(name) for name in list(given) if name == "action"}
    parts = {"vlm_model_name": make_vlm(f"{folder}/vlm")} if kind == "smolvla" else {}
    config = make_policy_config(
        kind.partition("_")[0], input_features=given, output_features=ours, device="cpu",
        push_to_hub=False, **SMALL[kind], **parts,
    )  # fmt: skip
    policy = get_policy_class(config.type)(config)
    draws = np.random.default_rng(0)
    statistics = {name: _statistics(f, draws) for name, f in {**given, **ours}.items()}
    before, after = make_pre_post_processors(config, dataset_stats=statistics)
    for part in (policy, before, after):
        part.save_pretrained(folder)


def make_vlm(folder):
    """Write what SmolVLA otherwise gets from the hub: sizes of a small network, and a tokenizer."""
    import transformers

    from dzrobot.policies.dreamzero.bundled import default_checkpoint

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(default_checkpoint() / "tokenizer" / "tokenizer.json"),
        pad_token="<pad>", eos_token="</s>",
        extra_special_tokens={
            "fake_image_token": "<fake>", "global_image_token": "<global>",
            "image_token": "<image>", "end_of_utterance_token": "<end>",
        },
    )  # fmt: skip
    transformers.SmolVLMProcessor(
        transformers.SmolVLMImageProcessor(), tokenizer, transformers.SmolVLMVideoProcessor(),
        image_seq_len=4,
    ).save_pretrained(folder)  # fmt: skip
    transformers.SmolVLMConfig(
        text_config={
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 32, "vocab_size": len(tokenizer), "pad_token_id": 0,
        },
        vision_config={
            "model_type": "smolvlm_vision", "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64, "patch_size": 16,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), scale_factor=2,
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def _statistics(feature, draws):
    count = feature.shape[0]
    shape = (count, 1, 1) if feature.type is FeatureType.VISUAL else (count,)
    low = draws.uniform(-1, 0, shape).astype(np.float32)
    return {
        "mean": low / 2, "std": draws.uniform(0.5, 1, shape).astype(np.float32),
        "min": low, "max": low + 1,
    }  # fmt: skip


def play(folder, observations, output):
    from lerobot.configs.policies import PreTrainedConfig

    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder, config=config)
    before, after = make_pre_post_processors(config, pretrained_path=folder)
    policy.eval()
    policy.reset()
    actions, calls = [], 0
    seen = np.load(observations)
    steps = len(seen["observation.state"])
    every = 1 if config.n_obs_steps > 1 else config.n_action_steps
    for step in range(steps):
        batch = {"task": [str(seen["task"])]}
        for name in config.input_features:
            value = torch.from_numpy(seen[name][step])
            if value.dtype == torch.uint8:
                value = value.permute(2, 0, 1).contiguous().float() / 255
            batch[name] = value[None]
        if step % every == 0:
            # The seed of the call that this package makes at this step.
            torch.manual_seed(torch_seed("lerobot", 0, 0, calls))
            calls += 1
        with torch.inference_mode():
            actions.append(after(policy.select_action(before(batch)))[0].numpy())
    np.save(output, np.stack(actions))


def play_async(folder, observations, output):
    """Start LeRobot's server, and speak to it by the stub and messages of its robot client.

    Not by that client itself, which runs on LeRobot's robots alone.
    """
    import pickle
    import time
    from concurrent import futures

    import grpc
    from lerobot.async_inference.configs import PolicyServerConfig
    from lerobot.async_inference.helpers import RemotePolicyConfig, TimedObservation
    from lerobot.async_inference.policy_server import PolicyServer
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.transport import services_pb2, services_pb2_grpc
    from lerobot.transport.utils import send_bytes_in_chunks

    config = PreTrainedConfig.from_pretrained(folder)
    seen = np.load(observations)
    columns = {name: seen[name] for name in config.input_features}
    features = {
        name: {
            "dtype": "image" if values.dtype == np.uint8 else "float32",
            "shape": values.shape[1:],
            "names": [f"{name}.{i}" for i in range(values.shape[1])],
        }
        for name, values in columns.items()
    }
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    services_pb2_grpc.add_AsyncInferenceServicer_to_server(
        PolicyServer(PolicyServerConfig()), server
    )
    stub = services_pb2_grpc.AsyncInferenceStub(
        grpc.insecure_channel(f"localhost:{server.add_insecure_port('localhost:0')}")
    )
    server.start()
    stub.Ready(services_pb2.Empty())
    asked = RemotePolicyConfig(config.type, folder, features, config.n_action_steps, "cpu")
    stub.SendPolicyInstructions(services_pb2.PolicySetup(data=pickle.dumps(asked)))
    actions = []
    for step in range(0, len(seen["observation.state"]), config.n_action_steps):
        raw = {"task": str(seen["task"])}
        for name, values in columns.items():
            if values.dtype == np.uint8:
                raw[name.removeprefix("observation.images.")] = values[step]
            else:
                raw |= dict(zip(features[name]["names"], values[step], strict=True))
        sent = pickle.dumps(TimedObservation(time.time(), step, raw, must_go=True))
        stub.SendObservations(send_bytes_in_chunks(sent, services_pb2.Observation))
        chunk = pickle.loads(stub.GetActions(services_pb2.Empty()).data)
        assert [one.get_timestep() for one in chunk] == list(range(step, step + len(chunk)))
        actions += [one.get_action().numpy() for one in chunk]
    server.stop(None)
    np.save(output, np.stack(actions)[: len(seen["observation.state"])])


if __name__ == "__main__":
    {"make": make, "play": play, "play_async": play_async}[sys.argv[1]](*sys.argv[2:])
