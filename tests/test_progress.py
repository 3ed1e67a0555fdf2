"""What is waited for and how long still: at once on a terminal, now and then in a log."""

import io
import time

from rich.console import Console

from dzrobot import progress
from dzrobot.progress import HINT_S, MOVES_HZ, PATIENCE_S, Lines, TimeLeft, progress_bar, waiting


class Clock:
    """Seconds that a test moves."""

    now = 100.0

    def __call__(self):
        return self.now


def console_of(stream, *, terminal=False):
    return Console(file=stream, force_terminal=terminal, width=160)


def written(reports, *, every, terminal=False):
    stream = io.StringIO()
    with progress_bar("work", console_of(stream, terminal=terminal), every) as show:
        for report in reports:
            show(*report)
    return stream.getvalue()


def test_the_estimate_knows_only_what_this_process_did():
    clock = Clock()
    left = TimeLeft(clock)
    assert left.estimate(900, 1000) == "0:00:00 so far"
    clock.now += 5
    assert left.estimate(900, 1000) == "0:00:05 so far"
    clock.now += 5
    assert left.estimate(910, 1000) == "0:01:30 left"
    clock.now += 10
    assert left.estimate(950, 1000) == "0:00:20 left"


def test_a_log_gets_lines_and_short_work_none():
    reports = [(1, 4), (2, 4, "2 of 2 succeeded [so far]"), (4, 4)]
    lines = written(reports, every=0).splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "work: 1 of 4", "2 of 2 succeeded [so far]: 2 of 4", "work: 4 of 4",
    ]  # fmt: skip
    assert lines[0].endswith("0:00:00 so far")
    assert lines[2].endswith("0:00:00 left")
    assert written(reports, every=60) == ""


def test_a_log_hears_of_work_that_reports_nothing():
    clock, stream = Clock(), io.StringIO()
    lines = Lines(
        what="loading", console=console_of(stream), first=PATIENCE_S, hint="it is big", clock=clock
    )
    began = clock.now
    for second in range(75):
        clock.now = began + second
        lines.beat()
        if second == 45:
            lines.show(0, 3)
    assert HINT_S <= PATIENCE_S == 10
    assert stream.getvalue().splitlines() == [
        "loading: 0:00:10 so far (it is big)",
        "loading: 0:00:40 so far",
        "loading: 0 of 3, 0:00:25 so far",
    ]


def test_a_terminal_gets_a_line_that_moves():
    text = written([(3, 4), (4, 4, "all of it")], every=60, terminal=True)
    assert "4/4" in text
    assert "all of it" in text


def test_a_terminal_sees_at_once_what_is_waited_for():
    stream = io.StringIO()
    with waiting("loading [it]", console=console_of(stream, terminal=True)):
        assert "loading [it]" in stream.getvalue()
        shown = len(stream.getvalue())
        time.sleep(1.5 / MOVES_HZ)
        assert len(stream.getvalue()) > shown
    # Work of unknown size has no bar that could stand still, nor a time that nobody knows.
    assert "-:--:--" not in stream.getvalue()
    assert "0/" not in stream.getvalue()


def test_a_terminal_is_told_why_the_first_piece_takes_long(monkeypatch):
    monkeypatch.setattr(progress, "HINT_S", 0.0)
    stream = io.StringIO()
    with progress_bar("work", console_of(stream, terminal=True), hint="it compiles") as show:
        show(3, 6)
        time.sleep(1.5 / MOVES_HZ)
        assert "it compiles" in stream.getvalue()
        # How long it will take is not known yet.
        assert "3/6" in stream.getvalue()
        assert "-:--:--" not in stream.getvalue()
        show(4, 6)
        time.sleep(1.5 / MOVES_HZ)
        told = stream.getvalue().rpartition("4/6")[2]
        assert told
        assert "it compiles" not in told


def test_a_log_keeps_quiet_about_a_short_wait():
    stream = io.StringIO()
    with waiting("loading", console=console_of(stream)):
        pass
    assert stream.getvalue() == ""
