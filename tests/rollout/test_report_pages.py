"""The page of an evaluation: what it holds, that it is safe, and that a browser can use it."""

import json
import re
import shutil
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest

from dzrobot import cli
from dzrobot.recording.media import encode_png, read_png
from dzrobot.rollout.evaluation.card import keep_card, read_cases
from dzrobot.rollout.evaluation.evaluate import evaluate
from dzrobot.rollout.evaluation.planning import EvaluationRequest, RunOptions, prepare
from dzrobot.rollout.footage import photo_file
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec
from dzrobot.rollout.records import RECORDS_FILE, Record, RecordFile

pytest.importorskip("plotly", reason="no plotly: pip install -e '.[report]'")
pytest.importorskip("statsmodels", reason="no statsmodels: pip install -e '.[report]'")

PHOTO = np.full((8, 16, 3), (200, 60, 20), np.uint8)
HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=\"alert(1)\">{{ 7*7 }}"
)


def run(folder, policy):
    selection = EvalSpec(
        protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", tasks=(0, 2), episodes=3,
        max_steps=20, arguments={"resolution": 32},
    )  # fmt: skip
    evaluation = EvaluationRequest(spec=selection, policy=PolicySpec(name=policy))
    evaluate(prepare(evaluation), folder, RunOptions(workers=0))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return results of a policy that steers, with a hostile text, and of one that stands still."""
    root = tmp_path_factory.mktemp("reported")
    run(root / "steer", "rollout_policies:Steer")
    run(root / "still", "hold")
    records = list(RecordFile(root / "steer").records.values())
    records = [replace(one, task=HOSTILE) if one.task_id else one for one in records]
    # As an evaluation on an arm takes one of every initial state.
    photo = photo_file(root / "still", records[0].case)
    photo.parent.mkdir()
    photo.write_bytes(encode_png(PHOTO))
    records[-2] = Record.failed(cases(root)[records[-2].case], HOSTILE)
    lines = [json.dumps(asdict(record)) for record in records]
    (root / "steer" / RECORDS_FILE).write_text("\n".join(lines) + "\n")
    return root


def cases(root):
    return {case.name: case for case in read_cases(root / "steer")}


def page_data(page):
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text())
    return json.loads(found[1])


@pytest.fixture(scope="module")
def pair(results, tmp_path_factory):
    out = tmp_path_factory.mktemp("page")
    folders = [str(results / name) for name in ("steer", "still")]
    assert cli.main(["report", *folders, "-o", str(out)]) == 0
    return out / "report.html"


def test_the_page_stands_in_the_results_folder_unless_asked_otherwise(results, capsys):
    assert cli.main(["report", str(results / "still")]) == 0
    assert str(results / "still" / "report" / "report.html") in capsys.readouterr().out
    first = (results / "still" / "report" / "report.html").read_bytes()
    assert cli.main(["report", str(results / "still")]) == 0
    assert (results / "still" / "report" / "report.html").read_bytes() == first


def test_it_holds_every_episode_and_plays_its_videos_from_beside_itself(results, pair):
    episodes = page_data(pair)["episodes"]
    assert [episode["case"] for episode in episodes] == list(cases(results))
    records = RecordFile(results / "steer").records
    for episode in episodes:
        steer, still = episode["runs"]
        record = records[episode["case"]]
        wanted = "error" if record.error else "success" if record.success else "failure"
        assert (steer["outcome"], still["outcome"]) == (wanted, "failure")
        assert still["failure"] == "never reached"
        for letter, run in (("a", steer), ("b", still)):
            if run["outcome"] == "error":
                assert run["video"] is None
                continue
            assert run["video"] == f"media/{letter}/{episode['case']}.mp4"
            assert (pair.parent / run["video"]).stat().st_size > 0


def test_the_photo_of_an_initial_state_stands_beside_the_episode(pair):
    first, *others = page_data(pair)["episodes"]
    steer, still = first["runs"]
    assert steer["photo"] is None
    np.testing.assert_array_equal(read_png(pair.parent / still["photo"]), PHOTO)
    assert {run["photo"] for episode in others for run in episode["runs"]} == {None}


def test_nothing_is_fetched_and_texts_from_outside_stay_texts(pair):
    text = pair.read_text()
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=.?(?:https?:)?//", text)
    assert HOSTILE not in text
    assert "<script>document.title" not in text
    assert "&lt;script&gt;document.title" in text, "the table of tasks shows it"
    assert page_data(pair)["episodes"][-1]["task"] == HOSTILE
    assert text.count("plotly.js v") <= 1


@pytest.mark.parametrize("place", ["../outside.mp4.txt", "/etc/passwd", "videos/none.mp4"])
def test_nothing_but_videos_is_copied_from_where_a_record_points(results, place, tmp_path):
    folder = tmp_path / "results"
    shutil.copytree(results / "still", folder, ignore=shutil.ignore_patterns("report", "starts"))
    (tmp_path / "outside.mp4.txt").write_text("secret")
    records = RecordFile(folder).records.values()
    lines = [json.dumps(asdict(replace(record, video=place))) for record in records]
    (folder / RECORDS_FILE).write_text("\n".join(lines) + "\n")
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "out")]) == 0
    assert not list((tmp_path / "out").rglob("media/*/*"))
    assert {e["runs"][0]["video"] for e in page_data(tmp_path / "out/report.html")["episodes"]} == {
        None
    }


def test_links_in_what_a_stranger_sends_lead_nowhere(results, tmp_path):
    """Neither is read through a link in the results, nor written through one in the report."""
    folder, victim = tmp_path / "results", tmp_path / "victim"
    shutil.copytree(results / "still", folder, ignore=shutil.ignore_patterns("report"))
    victim.mkdir()
    (victim / "film.mp4").write_text("mine")
    films = sorted(path for path in (folder / "videos").rglob("*.mp4"))
    films[0].unlink()
    films[0].symlink_to(victim / "film.mp4")
    photo = next((folder / "starts").rglob("*.png"))
    photo.unlink()
    photo.symlink_to(victim / "film.mp4")
    cases = [record.case for record in RecordFile(folder).records.values() if record.video]
    media = folder / "report" / "media" / "a"
    media.mkdir(parents=True)
    for name in (*(f"{case}.mp4" for case in cases), "../../report.html"):
        (media / name).symlink_to(victim / "film.mp4")
    assert cli.main(["report", str(folder)]) == 0
    shown = [e["runs"][0]["video"] for e in page_data(folder / "report/report.html")["episodes"]]
    assert [place is None for place in shown].count(False) == len(cases) - 1
    shutil.rmtree(folder / "report")
    (folder / "report").symlink_to(victim)
    assert cli.main(["report", str(folder)]) == 0
    assert {path.name: path.read_text() for path in victim.iterdir()} == {"film.mp4": "mine"}
    assert not list((folder / "report").rglob("*-start.png"))


def test_what_cannot_be_reported_is_refused_in_one_line(results, tmp_path, capsys, monkeypatch):
    run(tmp_path / "other", "random")
    card = tmp_path / "other" / "card.json"
    card.write_text(card.read_text().replace('"seed": 0', '"seed": 1'))
    assert cli.main(["report", str(results / "steer"), str(tmp_path / "other")]) == 2
    assert "seed: 0 in" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2
    (tmp_path / "file").write_text("")
    assert cli.main(["report", str(results / "still"), "-o", str(tmp_path / "file")]) == 2
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr("dzrobot.importing.find_spec", lambda name: None)
    capsys.readouterr()
    assert cli.main(["report", str(results / "still")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "plotly" in said
    assert ".[report]" in said


TIMES = {"p50": 1.0, "p95": 2.0}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Return the page of two thousand episodes."""
    folder = tmp_path_factory.mktemp("large")
    selection = EvalSpec(protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", episodes=2000)
    ready = prepare(EvaluationRequest(spec=selection, policy=PolicySpec(name="hold")))
    keep_card(folder, ready.card, ready.plan.cases)
    records = [
        replace(
            Record.failed(case, ""), error=None, success=case.episode % 3 == 0, steps=5,
            task="reach", ended="success", action_sha256="0" * 64, policy_ms=TIMES, env_ms=TIMES,
            wall_s=1.0,
        )
        for case in ready.plan.cases
    ]  # fmt: skip
    text = "\n".join(json.dumps(asdict(record)) for record in records)
    (folder / RECORDS_FILE).write_text(text + "\n")
    assert cli.main(["report", str(folder)]) == 0
    return folder / "report" / "report.html"


def test_two_thousand_episodes_make_a_page(large):
    assert len(page_data(large)["episodes"]) == 2000
    assert large.stat().st_size < 3e6


def test_films_get_a_second_name_and_no_second_copy(results, pair):
    film = next((results / "still" / "videos").glob("*.mp4"))
    (shown,) = [path for path in pair.parent.rglob("*.mp4") if path.samefile(film)]
    assert shown.parts[-2] == "b"


@pytest.fixture(scope="module")
def browser(chromium):
    """Return a real browser without a window."""
    selenium = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
    from selenium.webdriver.chrome.service import Service

    options = selenium.ChromeOptions()
    options.binary_location = chromium[0]
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--window-size=1400,1000"):  # fmt: skip
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = selenium.Chrome(options=options, service=Service(chromium[1]))
    yield running
    running.quit()


def shown(browser):
    script = "return [...document.querySelectorAll('#episodes tbody tr')].filter(r => !r.hidden)"
    return browser.execute_script(f"{script}.map(r => r.dataset.case)")


def choose(browser, name, value):
    from selenium.webdriver.support.select import Select

    Select(browser.find_element("id", name)).select_by_value(value)


def comes_to_show(browser, expected):
    """Wait until the list shows the cases ``expected``."""
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 60).until(lambda _: shown(browser) == expected, f"not {expected}")


def press(browser, selector, text=None):
    found = browser.find_elements("css selector", selector)
    [button] = [each for each in found if text in (None, each.text)]
    browser.execute_script("arguments[0].click()", button)


def test_a_browser_filters_sorts_and_plays(browser, pair):
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get(pair.as_uri())
    data = page_data(pair)["episodes"]
    every = [episode["case"] for episode in data]
    assert browser.title != "taken"
    assert browser.find_elements("css selector", "#classes .main-svg"), "plotly drew"
    comes_to_show(browser, every)
    flips = [e["case"] for e in data if e["runs"][0]["outcome"] == "success"]
    assert 0 < len(flips) < len(every) - 1
    failed = [e["case"] for e in data if "error" in [run["outcome"] for run in e["runs"]]]
    for name, value, expected in (
        ("by-flip", "lost", flips), ("by-flip", "won", []), ("by-outcome", "error", failed),
        ("by-failure", "error", failed),
    ):  # fmt: skip
        choose(browser, name, value)
        comes_to_show(browser, expected)
        choose(browser, name, "")
        comes_to_show(browser, every)
    heads = [one.text for one in browser.find_elements("css selector", "#episodes thead button")]
    # What differs comes before what is wide: the table scrolls to the side.
    assert heads.index("flip") < heads.index("A outcome") < heads.index("B steps")
    tiles = browser.find_elements("css selector", "section.tiles")
    assert [one.accessible_name for one in tiles] == ["summary of A", "summary of B"]
    search = browser.find_element("id", "by-text")
    search.send_keys("task02 episode001")
    comes_to_show(browser, [name for name in every if name.endswith("task02-episode001")])
    search.send_keys("\ue003" * 20)
    comes_to_show(browser, every)

    steps = {e["case"]: e["runs"][0]["steps"] for e in data}
    for order in (1, -1):
        press(browser, "#episodes thead button", "A steps")
        seen = [steps[name] for name in shown(browser) if steps[name] is not None]
        assert seen == sorted(seen)[::order]

    press(browser, f"tr[data-case='{flips[0]}']")
    films = browser.find_elements("css selector", "#episode video")
    assert len(films) == 2
    press(browser, "#play")
    WebDriverWait(browser, 60).until(
        lambda _: all(film.get_property("currentTime") > 0 for film in films)
    )
    place = "const place = document.querySelector('.controls input'); place.value = 0.5;"
    browser.execute_script(place + "place.dispatchEvent(new Event('input'))")
    ends = max(film.get_property("duration") for film in films)
    for film in films:
        assert film.get_property("paused")
        expected = min(ends / 2, film.get_property("duration"))
        assert film.get_property("currentTime") == pytest.approx(expected, abs=0.01)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_browser_lists_many_episodes_a_part_at_a_time(browser, large):
    browser.get(large.as_uri())
    every = [f"dzrobot_point-v0-task00-episode{n:03d}" for n in range(2000)]
    assert shown(browser) == every[:200]
    press(browser, "#more")
    assert shown(browser) == every[:400]
    # What is looked for is found among all, and the count is of all.
    choose(browser, "by-outcome", "success")
    comes_to_show(browser, every[::3][:200])
    assert browser.find_element("id", "count").text == "667 of 2000 episodes"
    press(browser, "#episodes thead button", "episode")
    press(browser, "#episodes thead button", "episode")
    comes_to_show(browser, every[::-1][1::3][:200])
    browser.find_element("id", "by-text").send_keys("episode1998")
    comes_to_show(browser, every[1998:1999])
    assert not browser.find_element("id", "more").is_displayed()


def test_a_browser_shows_the_photo_of_an_initial_state(browser, pair):
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get(pair.as_uri())
    first, *_ = page_data(pair)["episodes"]
    press(browser, f"tr[data-case='{first['case']}']")
    loaded = "return [...document.querySelectorAll('#episode img')].map(i => i.naturalWidth)"
    WebDriverWait(browser, 60).until(lambda _: browser.execute_script(loaded) == [PHOTO.shape[1]])


@pytest.mark.sampled
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_their_background_in_both_schemes(browser, pair, scheme):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(pair.as_uri())
    back = brightness(browser, "background-color", "body")
    assert (back > 0.5) == (scheme == "light")
    for place in ("body", "#tasks td", "td.success", "td.failure", ".faint", "#filters select"):
        text = brightness(browser, "color", place)
        contrast = (max(back, text) + 0.05) / (min(back, text) + 0.05)
        assert contrast >= 4.5, f"{place}: {contrast:.1f}"


def brightness(browser, name, place):
    """Return the relative luminance of a color, as WCAG 2 defines it."""
    element = browser.find_element("css selector", place)
    color = [
        int(number) / 255 for number in re.findall(r"\d+", element.value_of_css_property(name))
    ]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_nothing_is_cut_off_on_a_narrow_screen(browser, pair):
    size = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.get(pair.as_uri())
        outside = browser.execute_script(
            "return [...document.body.querySelectorAll('*')].filter(e => !e.parentElement.closest("
            "'.scroll, svg') && e.getBoundingClientRect().right > innerWidth)"
            ".map(e => e.outerHTML.slice(0, 80))"
        )
        whole = browser.execute_script("return document.documentElement.scrollWidth")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert browser.find_elements("id", "episodes")
    assert outside == []
    assert whole <= 420
