"""The loader is strict, tells everything at once and says where."""

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field, ValidationError, model_validator

from dzrobot.configuration import FrozenConfig, field_notes, load_config, parse_value
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.errors import ConfigError
from dzrobot.training.sft_config import SFTConfig


class Source(FrozenConfig):
    path: str
    weight: Annotated[float, Field(gt=0)] = 1.0


class Optim(FrozenConfig):
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)


class Run(FrozenConfig):
    steps: Annotated[int, Field(ge=1)]
    optim: Optim = Optim()
    data: tuple[str | Source, ...] = ()
    output: Path | None = None

    @model_validator(mode="after")
    def few(self):
        if self.steps > 1000:
            raise ValueError(f"steps={self.steps} is more than 1000; lower it")
        return self


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_file_then_overrides(tmp_path):
    path = write(tmp_path, "steps: 5\noptim:\n  lr: 1e-4\ndata: [a, {path: b, weight: 2}]\n")
    run = load_config(Run, path, ["optim.betas=[0.5, 6e-1]", "data.1.weight=3e0", "output=out"])
    assert run == Run(
        steps=5, optim=Optim(lr=0.0001, betas=(0.5, 0.6)), output=Path("out"),
        data=("a", Source(path="b", weight=3.0)),
    )  # fmt: skip
    with pytest.raises(ValidationError):
        run.steps = 6


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.e-4", ".1e-3", "0.0001", "1e-04"])
def test_small_numbers_are_numbers(text):
    assert load_config(Optim, None, [f"lr={text}"]).lr == 1e-4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("-3", -3), ("3.", 3.0), (".5", 0.5), ("-2.5e+3", -2500.0), ("007", "007"),
        ("1:30", "1:30"), ("2026-01-02", "2026-01-02"), ("e4", "e4"), ('"5"', "5"), ("a=b", "a=b"),
        ("true", True), ("yes", "yes"), ("off", "off"), ("null", None), ("", None),
        ("[1e-3, a]", [1e-3, "a"]), ("{a: 1}", {"a": 1}),
    ],
)  # fmt: skip
def test_values_are_what_they_look_like(text, value):
    read = parse_value(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('steps="3"', "got '3', which is text; allowed: a number"),
        ("steps=true", "got True, which is a boolean; allowed: a number"),
        ('optim.betas=[0.1, "0.2"]', "got '0.2', which is text"),
        ("steps=3.5", "allowed: a valid integer"),
        ("steps=null", "got None"),
        ("data=[5]", "got 5"),
    ],
)
def test_kinds_are_not_bent(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(Run, {"steps": 1}, [override])
    assert message in str(caught.value)


def test_whole_floats_are_integers_where_asked():
    assert load_config(Run, None, ["steps=1e2"]).steps == 100


def test_name_of_another_section_is_found():
    with pytest.raises(ConfigError, match=r"lr: no such field. Did you mean 'optim.lr'\?"):
        load_config(Run, {"steps": 1}, ["lr=1"])


def test_merge_keys(tmp_path):
    text = "steps: 5\noptim:\n  <<: {lr: 1e-2}\n  betas: [0.5, 0.6]\n"
    assert load_config(Run, write(tmp_path, text)).optim == Optim(lr=1e-2, betas=(0.5, 0.6))


def test_mapping_is_left_alone():
    given = {"steps": 1, "optim": {"lr": 1.0}}
    assert load_config(Run, given, ["optim.lr=2"]).optim.lr == 2.0
    assert given == {"steps": 1, "optim": {"lr": 1.0}}


def test_all_faults_at_once_with_place_and_remedy(tmp_path):
    optim = "optim:\n  lr: fast\n  betas: [1]\n"
    path = write(tmp_path, f"stepz: 5\n{optim}data:\n  - a\n  - {{path: b, weight: -1}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(Run, path, ["optim.momentun=1"])
    lines = str(caught.value).splitlines()
    expected = [
        ("stepz", "Did you mean 'steps'?", f"{path}:1"),
        ("optim.lr", "'fast'", f"{path}:3"),
        ("optim.betas.1", "is needed", f"{path}:4"),
        ("optim.momentun", "Known: betas, lr", "optim.momentun=1"),
        ("data.1.weight", "greater than 0", f"{path}:7"),
        ("steps", "is needed", ""),
    ]
    assert len(lines) == 1 + len(expected)
    for name, *parts in expected:
        (line,) = [line for line in lines if line.startswith(f"  {name}: ")]
        assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("steps: 1\nsteps: 2\n", [], "given twice"),
        ("- 1\n", [], "mapping"),
        ("a: [\n", [], "not YAML"),
        ("steps: 1\n", ["steps"], "key=value"),
        ("steps: 1\n", ["steps.a=1"], "not a section"),
        ("data: [a]\nsteps: 1\n", ["data.4=b"], "list of 1"),
        ("steps: 2000\n", [], "lower it"),
    ],
)
def test_refusals(tmp_path, text, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(Run, write(tmp_path, text), overrides)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_config(Run, tmp_path / "none.yaml")


def test_every_field_of_a_recipe_and_of_a_workcell_is_explained():
    for model in (SFTConfig, FrankaConfig):
        notes = list(field_notes(model))
        assert len(notes) > 40
        names = [note.name for note in notes]
        assert len(set(names)) == len(names)
        assert not [note.name for note in notes if not note.type or "Annotated" in note.type]
    assert not [note.name for note in field_notes(SFTConfig) if not note.meaning]
    by_name = {note.name: note for note in field_notes(SFTConfig)}
    assert by_name["optim.lr"].meaning == "Peak learning rate."
    assert by_name["runner.max_steps"].default == "needed"
    assert by_name["data.train_data_paths.*.weight"].type == "float"
