"""README.md of exports, read as the Hugging Face hub reads it."""

from dataclasses import replace

import pytest
from checkpoint_layouts import copy_sidecars
from huggingface_hub import ModelCard
from test_checkpoint_lora import trained  # noqa: F401 - a fixture

from dzrobot.policies.dreamzero.checkpoints.convert import ConvertOptions, convert
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.passport import License, model_card, read_license

RECIPE = {
    "model": {"model_path": "nvidia/some-base"},
    "data": {
        "train_data_paths": ["lerobot/libero", {"dataset_path": ["someone/more"]}, "/data/own"]
    },
}


def data(folder):
    return ModelCard.load(folder / "README.md").data


def test_what_the_recipe_names(trained):  # noqa: F811
    passport = replace(open_checkpoint(trained[1]).own_passport, recipe=RECIPE)
    terms = License(license="other", license_name="terms", license_link="https://example.org")
    text = model_card(passport, terms, adapters=True, complete=False)
    found = ModelCard(text).data
    assert found.base_model == "nvidia/some-base"
    assert found.base_model_relation == "adapter"
    assert found.datasets == ["lerobot/libero", "someone/more"]
    assert (found.license, found.license_name) == ("other", "terms")
    assert found.library_name == "dzrobot"
    assert {"lora", "libero_sim", "dreamzero"} <= set(found.tags)


def test_cards_are_written_and_carried(trained, tiny, tmp_path):  # noqa: F811
    """Adapters have one; the merged weights another; a card that is there stays as it is."""
    assert "lora" in data(trained[1]).tags
    (trained[1] / "README.md").write_text("---\nlicense: mit\n---\n\nMine.\n")
    for layout in ("directory", "peft"):
        done = convert([trained[1]], tmp_path / layout, ConvertOptions(to=layout))
        assert (done.path / "README.md").read_text().endswith("Mine.\n")
    options = ConvertOptions(merge=True, base=(str(tiny),))
    merged = data(convert([trained[1]], tmp_path / "merged", options).path)
    assert merged.license == "mit"
    assert "lora" not in merged.tags


ODD = {
    "none": None,
    "no front matter": "# Title",
    "open": "---\nlicense: mit\n",
    "a list": "---\n- a\n---\n",
    "a number": "---\nlicense: 5\n---\n",
    "no yaml": "---\nlicense: [\n---\n",
    "an object": "---\nlicense: !!python/object/apply:os.getcwd []\n---\n",
}


@pytest.mark.parametrize("kind", ODD)
def test_a_card_that_says_nothing(tiny, tmp_path, kind):
    folder = copy_sidecars(tiny, tmp_path / "odd")
    if ODD[kind] is not None:
        (folder / "README.md").write_text(ODD[kind])
    assert read_license(folder) == License()
    assert read_license(None) == License()
