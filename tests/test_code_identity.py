"""A result names the code that made it, and results of different code are not mixed unasked."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dzrobot import __version__, code_identity
from dzrobot.cli import main
from dzrobot.code_identity import CODE, CodeIdentity, code_with, content_hash, package_code
from dzrobot.errors import ConfigError, ProtocolError
from dzrobot.rollout.evaluation.card import card_digest, read_card
from dzrobot.rollout.evaluation.comparison import compare, read_results
from dzrobot.rollout.evaluation.evaluate import evaluate, merge
from dzrobot.rollout.evaluation.planning import EvaluationRequest, RunOptions, prepare
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec
from dzrobot.rollout.records import RecordFile

ROOT = Path(__file__).parents[1]
ELSEWHERE = CodeIdentity(version="0.1.0", commit="c0ffee", content="f" * 64)


def tree(folder):
    files = {
        "__init__.py": "version = 1", "recipes/a.yaml": "lr: 1", "arm.urdf": "<robot/>",
        "README.md": "words", "pages/report.css": "p {}", "weights/model.safetensors": "0",
        "__pycache__/a.py": "compiled",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("name", ["__init__.py", "recipes/a.yaml", "arm.urdf"])
def test_what_is_executed_or_read_counts(tmp_path, name):
    before = content_hash(tree(tmp_path))
    (tmp_path / name).write_text("other")
    assert content_hash(tmp_path) != before


def test_a_new_file_and_a_new_name_count(tmp_path):
    before = content_hash(tree(tmp_path))
    (tmp_path / "__init__.py").rename(tmp_path / "other.py")
    assert content_hash(tmp_path) != before


@pytest.mark.parametrize(
    "name",
    ["README.md", "pages/report.css", "weights/model.safetensors", "__pycache__/a.py", "new.md"],
)
def test_documents_pages_and_weights_do_not_count(tmp_path, name):
    before = content_hash(tree(tmp_path))
    (tmp_path / name).write_text("other")
    assert content_hash(tmp_path) == before


def test_a_checkout_with_links_equals_a_wheel_without():
    whole = package_code().content
    linked = ROOT / "dzrobot"
    assert content_hash(linked) == whole
    assert (linked / "envs").is_symlink()


def test_a_commit_is_told_only_of_the_package(tmp_path, monkeypatch):
    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True)

    tree(tmp_path / "dzrobot")
    (tmp_path / "docs.txt").write_text("words")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(code_identity, "_PACKAGE", tmp_path / "dzrobot")
    commit = code_identity.package_commit()
    assert len(commit) == 40
    (tmp_path / "docs.txt").write_text("other words")
    assert code_identity.package_commit() == commit
    (tmp_path / "dzrobot" / "new.py").write_text("")
    assert code_identity.package_commit() == f"{commit}-modified"


def test_code_with_equal_content_is_the_same_whatever_its_commit():
    code = CodeIdentity(version="0.1.0", commit="a", content="1")
    assert code.is_same(replace(code, commit="b"))
    assert not code.is_same(replace(code, content="2"))
    assert not code.is_same(replace(code, modules={"mine": "3"}))
    assert "commit not" not in code.text
    assert "content not recorded" in CodeIdentity(version="0.1.0").text


def test_a_users_modules_count_with_what_they_use(tmp_path, monkeypatch):
    (tmp_path / "users_helper.py").write_text("GAIN = 1\n")
    (tmp_path / "users_policy.py").write_text("import numpy\nfrom users_helper import GAIN\n"
                                              "import users_helper\n")  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    __import__("users_policy")
    found = code_with(["users_policy", "numpy", "dzrobot.rng", "json", "not_there"])
    assert found.modules.keys() == {"users_policy", "users_helper"}
    (tmp_path / "users_helper.py").write_text("GAIN = 2\n")
    assert not code_with(["users_policy"]).is_same(found)


def test_a_process_that_starts_later_refuses_other_files():
    code_identity.check_unchanged(package_code().content)
    with pytest.raises(ConfigError, match="have changed since this run began"):
        code_identity.check_unchanged("0" * 64)


SPEC = EvalSpec(
    protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", tasks=(0,), episodes=2,
    max_steps=20, arguments={"resolution": 32},
)  # fmt: skip


@pytest.fixture(scope="module")
def ours():
    return prepare(EvaluationRequest(spec=SPEC, policy=PolicySpec(name="random")))


@pytest.fixture(scope="module")
def theirs(ours):
    return replace(ours, card={**ours.card, CODE: [ELSEWHERE.plain()]})


def run(prepared, folder, **options):
    return evaluate(prepared, folder, RunOptions(workers=0, videos="none", **options))


def test_other_code_resumes_only_with_a_word_and_is_marked(ours, theirs, tmp_path, capsys):
    folder = tmp_path / "mixed"
    first, second = (case.name for case in ours.plan.cases)
    run(theirs, folder, only=frozenset([first]))
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(ProtocolError, match="--allow-other-code") as refused:
        run(ours, folder)
    assert "commit c0ffee, content ffffffffffff" in str(refused.value)
    assert package_code().content[:12] in str(refused.value)
    assert {path: path.read_bytes() for path in before} == before
    summary = run(ours, folder, allow_other_code=True)
    assert summary.complete
    assert read_card(folder)[CODE] == [ELSEWHERE.plain(), *ours.card[CODE]]
    assert json.loads((folder / "summary.json").read_text())["card"] == read_card(folder)
    ran_by = {name: record.code for name, record in RecordFile(folder).records.items()}
    assert ran_by == {first: ELSEWHERE.name, second: package_code().name}
    # Both are now named there, so each goes on without the word.
    run(ours, folder)
    run(theirs, folder)
    assert main(["merge", str(tmp_path / "whole"), str(folder)]) == 0
    assert ", by 2 different codes" in " ".join(capsys.readouterr().out.split())


def test_a_change_of_documents_resumes_without_a_word(ours, tmp_path):
    code = {**ours.card[CODE][0], "commit": "c0ffee"}
    run(replace(ours, card={**ours.card, CODE: [code]}), tmp_path, only=frozenset())
    run(ours, tmp_path)
    assert read_card(tmp_path)[CODE] == [code]


def test_a_card_of_an_earlier_version_is_of_other_code(ours, tmp_path):
    run(ours, tmp_path, only=frozenset())
    card = json.loads((tmp_path / "card.json").read_text())
    del card[CODE]
    card["versions"]["dzrobot"] = "0.0.9"
    (tmp_path / "card.json").write_text(json.dumps(card))
    with pytest.raises(ProtocolError, match=r"0\.0\.9 \(content not recorded\) in"):
        run(ours, tmp_path)
    run(ours, tmp_path, allow_other_code=True)
    assert [code["version"] for code in read_card(tmp_path)[CODE]] == ["0.0.9", __version__]


def test_runs_of_different_code_are_compared_and_marked(ours, theirs, tmp_path, capsys):
    folders = [tmp_path / name for name in ("ours", "again", "theirs")]
    for folder, prepared in zip(folders, (ours, ours, theirs), strict=True):
        run(prepared, folder)
    found = compare([read_results(folder) for folder in folders])
    assert [comparison.code for comparison in found] == ["same", "other"]
    assert main(["compare", *map(str, folders)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "content ffffffffffff" in said
    assert "the difference is of that as well" in said
    assert main(["compare", *map(str, folders[:2])]) == 0
    assert "content" not in capsys.readouterr().out


def test_shards_of_different_code_are_merged_only_with_a_word(ours, theirs, tmp_path):
    parts = tmp_path / "0", tmp_path / "1"
    for number, (part, prepared) in enumerate(zip(parts, (ours, theirs), strict=True)):
        run(prepared, part, shard=(number, 2))
    with pytest.raises(ProtocolError, match="different code"):
        merge(tmp_path / "whole", parts)
    assert merge(tmp_path / "whole", parts, allow_other_code=True).complete
    assert len(read_card(tmp_path / "whole")[CODE]) == 2


def test_the_code_of_a_server_counts_as_well(ours, tmp_path):
    def asked(code):
        policy = {"policy": "remote", "server": {"policy": "x", CODE: [code.plain()]}}
        return replace(ours, card={**ours.card, "policy": policy})

    run(asked(ELSEWHERE), tmp_path, only=frozenset())
    with pytest.raises(ProtocolError, match=r"the policy's server: 0\.1\.0"):
        run(asked(replace(ELSEWHERE, content="0" * 64)), tmp_path)
    run(asked(replace(ELSEWHERE, commit="docs only")), tmp_path)
    assert card_digest(asked(ELSEWHERE).card) != card_digest(ours.card)


def test_the_folder_of_an_evaluation_does_not_depend_on_the_code(ours, theirs):
    assert card_digest(ours.card) == card_digest(theirs.card)


@pytest.mark.long
def test_two_checkouts_end_to_end(tmp_path):
    """As a user meets it: a copy of the package with a changed environment, in its own process."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "dzrobot", copy / "dzrobot",
                    ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))  # fmt: skip
    fakes = copy / "dzrobot" / "envs" / "fakes.py"
    results = tmp_path / "results"

    def dzrobot(path, *words):
        env = {**os.environ, "PYTHONPATH": str(path)}
        command = [sys.executable, "-m", "dzrobot.cli", *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    def evaluated(path, *words):
        return dzrobot(
            path, "eval", "--env", "dzrobot/point-v0", "--policy", "random", "--episodes", "2",
            "--workers", "1", "--videos", "none", "--output", str(results), *words,
        )  # fmt: skip

    assert evaluated(ROOT).returncode == 0
    assert evaluated(copy).returncode == 0, "a copy without links is the same code"
    fakes.write_text(fakes.read_text() + "\n# another environment\n")
    lines = (results / "records.jsonl").read_text().splitlines(keepends=True)
    (results / "records.jsonl").write_text(lines[0])
    refused = evaluated(copy)
    assert refused.returncode == 2
    assert "--allow-other-code" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert evaluated(copy, "--allow-other-code").returncode == 0
    assert len(read_card(results)[CODE]) == 2
