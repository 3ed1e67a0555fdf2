"""Whoever waits for a compiler is told so, and how long it took before."""

import logging

import pytest
import torch

from dzrobot.policies.dreamzero import compiling
from dzrobot.policies.dreamzero.compiling import CompileNotice


@pytest.fixture
def notice(tmp_path, monkeypatch):
    """Return a function: a notice on a clock that moves on by what the compiler is said to take."""
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path))
    torch.compiler.reset()

    def made(seconds=0.0, key="small", is_on=True):
        times = iter(range(1000))
        return CompileNotice(
            what="2 blocks", key=key, device=torch.device("cpu"), is_on=is_on,
            clock=lambda: seconds * next(times),
        )  # fmt: skip

    return made


def double(x):
    return x + x


def compiled():
    """Return a function that its first call compiles."""
    torch.compiler.reset()
    return torch.compile(double, backend="eager", dynamic=False)


def said(caplog, notice, function, work="training step", size=2):
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=compiling.__name__), notice.watching(work):
        function(torch.ones(size))
    return caplog.messages


def test_the_first_step_says_what_is_compiled_and_how_long_it_took(notice, caplog):
    function = compiled()
    first = said(caplog, notice(585.0), function)
    assert first == [
        "compiling 2 blocks; this training step takes minutes: it was not compiled on this machine "
        "before",
        "compiled 2 blocks in 585 s",
    ]
    assert said(caplog, notice(585.0), function) == [], "nothing is compiled again"
    second = said(caplog, notice(4.0), compiled())
    assert second[0].endswith("takes minutes at first: 585 s last time on this machine")
    third = said(caplog, notice(4.0), compiled())
    assert third[0].endswith("4 s last time on this machine, 585 s at most")


def test_any_later_step_that_compiles_says_so_too(notice, caplog):
    """As for a prompt of another length."""
    function = compiled()
    said(caplog, notice(), function)
    assert len(said(caplog, notice(), function, size=3)) == 2


@pytest.mark.parametrize(("key", "work"), [("large", "training step"), ("small", "evaluation")])
def test_other_code_has_times_of_its_own(notice, caplog, key, work):
    said(caplog, notice(585.0), compiled())
    assert "not compiled on this machine before" in said(
        caplog, notice(1.0, key), compiled(), work
    )[0]  # fmt: skip


@pytest.mark.parametrize("content", ["", "{", "[]", '{"last": "x"}', '{"last": 1}'])
def test_a_damaged_file_of_times_is_as_none(notice, caplog, content):
    file = notice().file("training step")
    file.parent.mkdir()
    file.write_text(content)
    assert "not compiled on this machine before" in said(caplog, notice(7.0), compiled())[0]
    assert "7 s last time" in said(caplog, notice(7.0), compiled())[0]


def test_a_process_that_does_not_speak_is_silent(notice, caplog):
    assert said(caplog, notice(is_on=False), compiled()) == []


def test_work_that_fails_leaves_nothing_behind(notice, caplog):
    handler = torch._dynamo.callback.callback_handler
    function = compiled()

    def fails(x):
        function(x)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), notice(5.0).watching("plan"):
        fails(torch.ones(2))
    assert not handler.start_callbacks
    assert not handler.end_callbacks
    assert not notice().file("plan").exists()
