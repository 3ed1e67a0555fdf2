"""How long still: honest after a resume, a line now and then where there is no terminal."""

import io

from rich.console import Console

from dzrobot.progress import TimeLeft, progress_bar


def written(reports, *, every, terminal=False):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100)
    with progress_bar("work", console, every) as show:
        for report in reports:
            show(*report)
    return stream.getvalue()


def test_the_estimate_knows_only_what_this_process_did():
    seconds = iter([0.0, 10.0, 20.0])
    left = TimeLeft(lambda: next(seconds))
    assert left.estimate(900, 1000) == "unknown"
    assert left.estimate(910, 1000) == "0:01:30"
    assert left.estimate(950, 1000) == "0:00:20"


def test_a_file_gets_lines_and_short_work_none():
    reports = [(1, 4), (2, 4, "2 of 2 succeeded [so far]"), (4, 4)]
    lines = written(reports, every=0).splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "work: 1 of 4", "2 of 2 succeeded [so far]: 2 of 4", "work: 4 of 4",
    ]  # fmt: skip
    assert lines[0].endswith("unknown left")
    assert lines[2].endswith("0:00:00 left")
    assert written(reports, every=60) == ""


def test_a_terminal_gets_a_line_that_moves():
    text = written([(3, 4), (4, 4, "all of it")], every=60, terminal=True)
    assert "4/4" in text
    assert "all of it" in text
