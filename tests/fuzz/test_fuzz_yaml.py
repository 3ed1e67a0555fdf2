"""Recipes and ``key=value``: whatever is written there, a plan or one message."""

import json

import pytest
from harness import LIGHT, assert_refused, corrupted, mutations, refuses
from hypothesis import given, settings

from dzrobot.configuration import load_config, read_config
from dzrobot.training.recipes.read import RECIPES, load_recipe
from dzrobot.training.sft_config import SFTConfig

run = LIGHT.run
RECIPE = RECIPES / "tiny_cpu.yaml"
DOCUMENT = read_config(RECIPE).values

BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) or 1}]\n" for i in range(1, 10))
BOMB = "a0: &a0 [1]\n" + BOMB
MAPS = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 10)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 10)
)

VALUES = {
    "tag of Python": "!!python/object:os.system x",
    "tag of a name": "!!python/name:os.system",
    "tag of a call": "!!python/object/apply:os.system ['echo RAN']",
    "tag binary": "!!binary '%%%'",
    "tag sequence": "!!seq x",
    "tag mapping": "!!map x",
    "tag text": "!!str [1]",
    "tag whole number": "!!int foo",
    "tag number": "!!float foo",
    "tag boolean": "!!bool maybe",
    "tag date": "!!timestamp abc",
    "tag set": "!!set {a}",
    "tag of nobody": "!thing x",
    "lone tag": "! x",
    "key that is a list": "{[1, 2]: 3}",
    "key that is a mapping": "{{a: 1}: 3}",
    "key that is null": "{null: 3}",
    "key twice": "{a: 1, a: 2}",
    "merge of a number": "{<<: 5}",
    "merge of a list": "{<<: [1, 2]}",
    "whole number of 5000 digits": "9" * 5000,
    "whole number of 70 bits": str(2**70),
    "beyond a float": "1e400",
    "deep list": "[" * 100_000,
    "deep mapping": "{a: " * 100_000,
    "deep and closed": "[" * 50_000 + "]" * 50_000,
    "alias of itself": "&a [*a]",
    "alias of itself, mapping": "&a {b: *a}",
    "merge of itself": "&a {<<: *a}",
    "alias of nothing": "*nobody",
    "bomb": "[&a [1,1,1,1,1,1,1,1,1,1]" + "".join(
        f", &b{i} [{','.join(['*a' if i == 0 else f'*b{i - 1}'] * 10)}]" for i in range(9)
    ) + "]",
    "two documents": "1\n---\n2",
    "directive": "%YAML 9.9\n--- 1",
    "many values": "[" + "1," * 200_000 + "]",
    "NUL": '"a\\0b"',
    "half of a pair": '"\\ud800"',
    "control character": "a\x07b",
    "tab": "\t- a",
    "unclosed": '"abc',
    "indicator": "@x",
}  # fmt: skip
"""Text of values that no field takes, each refused by the loader itself."""

FILES = {
    "binary": bytes(range(256)),
    "latin-1": "runner: é".encode("latin-1"),
    "UTF-16": "runner: {}".encode("utf-16"),
    "NUL": b"runner: a\0b",
    "list": b"- 1\n- 2\n",
    "scalar": b"5\n",
    "bomb of lists": BOMB.encode(),
    "bomb of mappings": MAPS.encode(),
    "bomb of merges": MERGES.encode(),
    "3 MB": b"a: " + b"x" * 3_000_000,
    "deep": b"".join(b" " * i + b"a:\n" for i in range(2000)),
    "keys twice": b"runner: {}\nrunner: {}\n",
    "two documents": b"runner: {}\n---\nrunner: {}\n",
}

OVERRIDES = {
    "superscript": "data.train_data_paths.²=x",
    "superscript alone": "²=x",
    "position that is none": "data.train_data_paths.99999999999999999999999=x",
    "negative position": "data.train_data_paths.-1=x",
    "10000 parts": ".".join(["a"] * 10_000) + "=1",
    "long path": "runner.output_dir=/x/" + "x" * 5000,
    "long path of short names": "runner.output_dir=" + "/x" * 5000,
    "long name": "x" * 50_000 + "=1",
    "no name": "=1",
    "only dots": "...=1",
    "no value": "runner",
    "nothing": "",
    "a section": "runner=5",
    "below a value": "runner.max_steps.x=1",
    "NaN": "optim.lr=nan",
    "infinite": "optim.lr=inf",
    "infinite, as YAML writes it": "optim.lr=.inf",
}


@pytest.fixture(scope="module")
def good():
    """Return a plan of a recipe in which nothing is wrong, up to where torch would be loaded."""
    result = run(["plan", RECIPE])
    assert "no architecture to plan with: give model.preset" in result.output
    return result


@pytest.mark.sampled
@pytest.mark.parametrize("name", VALUES)
def test_values_no_field_takes(good, name, tmp_path):
    """The same refusal in a file and on the command line."""
    assert refuses(lambda: read_config(None, [f"a={VALUES[name]}"])) is not None
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model:\n {VALUES[name]}\n")
    assert_refused(run(["plan", path]), good)
    assert_refused(run(["plan", RECIPE, f"runner.output_dir={VALUES[name][:100_000]}"]), good)


@pytest.mark.sampled
@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_recipe(good, name, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(FILES[name])
    for command in ("plan", "train"):
        assert_refused(run([command, path]), good)


@pytest.mark.sampled
@pytest.mark.parametrize("name", OVERRIDES)
def test_overrides_that_are_none(good, name):
    for command in ("plan", "train"):
        assert_refused(run([command, RECIPE, OVERRIDES[name]]), good)


def test_places_that_hold_no_recipe(good, tmp_path):
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    (tmp_path / "dangling.yaml").symlink_to(tmp_path / "nowhere")
    names = [tmp_path / "loop.yaml", tmp_path / "dangling.yaml", tmp_path / "none.yaml"]
    names += ["/dev/zero.yaml", "~nobody-of-that-name/a.yaml", "x" * 300 + ".yaml", "a\0b.yaml"]
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    names += [tmp_path / "folder.yaml", tmp_path / "zero.yaml"]
    for name in names:
        assert_refused(run(["plan", name]), good)


def test_every_field_of_a_recipe_corrupted(tmp_path):
    """JSON is YAML: the mutations of the harness, read as recipes are, without torch."""
    path, held = tmp_path / "recipe.yaml", 0
    for name, content in mutations(DOCUMENT):
        if "deep" in name and not name.startswith(("only", "optim.lr ")):
            continue
        path.write_bytes(content)
        refuses(lambda: load_recipe(str(path), [], 1))
        held += 1
    assert held > 400


@settings(max_examples=300, deadline=None)
@given(corrupted(DOCUMENT))
def test_recipes_of_anything(content):
    refuses(lambda: load_config(SFTConfig, json.loads(content)))


def test_what_people_write_is_taken(tmp_path):
    """Anchors, merges, comments, a byte order mark: no part of YAML is lost that a file needs."""
    path = tmp_path / "recipe.yaml"
    path.write_text("\ufeff" + RECIPE.read_text() + "# the end\n", encoding="utf-8")
    assert read_config(path).values == DOCUMENT
    text = "a: &x {k: 1, l: [1, 2]}\nb: {<<: *x, k: 2}\nc: *x\n"
    path.write_text(text)
    values = read_config(path, ["c.k=9"]).values
    assert values["b"] == {"k": 2, "l": [1, 2]}
    assert (values["a"]["k"], values["c"]["k"]) == (1, 9)
