"""The report in a real browser: what a reader sees, does and is protected from."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from browser.report_runs import handoff, lines, make_probe, make_run, metrics, read_lines, rollout
from iwopd.report import write_report

PAYLOADS = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<img src=x onerror=alert(3)>",
    '"><svg onload=alert(4)>',
    "';alert(5);//",
    "{{ 7 * 7 }}{% raw %}",
    "<!--<script>",
    "]]><iframe src=javascript:alert(6)>",
    "<a href='javascript:alert(7)'>x</a>",
    "\u202eevil\u202c \x1b]0;title\x07\x1b[31mred \x00 \x7f \x9b31m",
    "\udcff lone \ud800",
    "%{x}<b>bold</b><br>&lt;",
)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    make_run(folder / "opd-seed0", "opd")
    make_run(folder / "iw-opd-seed0", "iw-opd", skill=0.032)
    handoff(folder)
    return folder


@pytest.fixture(scope="module")
def report(two_runs: Path) -> Path:
    return write_report([two_runs], two_runs / "report.html")


def choose(page: Any, name: str, value: str) -> None:
    page.select_option(f"#t-{name}", value)


def test_page_is_quiet_and_draws_every_chart(report: Path, open_page: Any) -> None:
    opened = open_page(report)
    opened.everything_drawn()
    page = opened.page
    assert report.stat().st_size < 6_000_000
    assert page.locator(".plot").count() >= 12
    assert page.locator("#missing").count() == 0
    # two methods, each a line and a band, with as many points as evaluations
    drawn = page.evaluate("document.getElementById('plot-accuracy-0').data.map((t) => [t.mode, t.x.length, t.name ?? ''])")
    assert [row for row in drawn if row[0] != "lines"] == [["lines+markers", 3, "OPD"], ["lines+markers", 3, "IW-OPD"]]
    evals = read_lines(report.parent / "opd-seed0" / "evals.jsonl")
    shown = page.evaluate("document.getElementById('plot-accuracy-0').data.find((t) => t.name === 'OPD').y")
    assert shown == pytest.approx([100 * record["mean"] for record in evals])
    assert page.locator("#plot-handoff .scatterlayer .trace").count() == 4  # band (two edges), curve, student alone
    assert page.locator("#summary tbody tr").count() == 2
    opened.check_quiet()


def test_tooltip_shows_the_numbers_of_the_run(report: Path, open_page: Any) -> None:
    opened = open_page(report)
    page = opened.page
    choose(page, "run", "1")
    page.locator("#t-list .item").nth(4).click()
    record = read_lines(report.parent / "opd-seed0" / "rollouts.jsonl")[4]
    page.wait_for_function(f"document.getElementById('t-prompt').textContent === '{record['prompt']}'")
    assert page.locator("#t-tokens .t").count() == len(record["tokens"])
    for place in (0, 11, 29):
        page.locator("#t-tokens .t").nth(place).hover()
        words = page.locator("#tip").inner_text().replace("−", "-")
        cells = page.locator("#tip dd").all_inner_texts()
        numbers = [float(cell.replace("−", "-")) for cell in cells if cell and "%" not in cell]
        names = ("student_logprobs", "teacher_logprobs", "gap", "weights", "kl")
        assert numbers == pytest.approx([record[name][place] for name in names], abs=0.51e-4)
        assert f"token {place + 1} of 30, id {record['token_ids'][place]}" in words
    first = next(place for place, gap in enumerate(record["gap"]) if gap < -2)
    assert page.locator("#t-tokens .t.drift").get_attribute("data-i") == str(first)
    assert "wrong answer" in page.locator("#t-badges").inner_text() or record["correct"]
    opened.check_quiet()


def test_the_finding_is_the_largest_thing_on_the_first_screen(report: Path, open_page: Any) -> None:
    page = open_page(report).page
    sizes = page.evaluate(
        "[...document.querySelectorAll('body *')]"
        ".filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))"
        ".map((e) => [parseFloat(getComputedStyle(e).fontSize), e.tagName, e.textContent.trim()])"
    )
    assert max(sizes)[1] == "H1"
    assert max(sizes)[2].startswith("The teacher’s accuracy falls from 90")
    for part in (page.locator(".tile", has_text="Teacher"), page.locator("#plot-handoff")):
        box = part.bounding_box()
        assert box["y"] + box["height"] < 900


def test_numbers_of_a_token_cover_no_token(report: Path, open_page: Any) -> None:
    opened = open_page(report)
    page = opened.page
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        for place in (0, 15, 29):
            page.locator("#t-tokens .t").nth(place).hover()
            tip, answer = page.locator("#tip").bounding_box(), page.locator("#t-tokens .t").nth(place).bounding_box()
            assert tip["y"] + tip["height"] <= answer["y"]
            assert tip["y"] >= 0  # on the screen
    scale = page.locator("#t-strip-scale span").all_inner_texts()
    gaps = read_lines(report.parent / "iw-opd-seed0" / "rollouts.jsonl")[0]["gap"]
    assert "0" in scale
    assert min(float(text.replace("−", "-")) for text in scale) == pytest.approx(min(gaps), rel=0.05)
    assert page.locator("#t-strip-places").inner_text().split("\n") == ["token 1", "gap in nats, by token", "30"]
    opened.check_quiet()


def test_filters_and_sorting(report: Path, open_page: Any) -> None:
    page = open_page(report).page
    records = read_lines(report.parent / "iw-opd-seed0" / "rollouts.jsonl")

    def ids() -> list[str]:
        return [text.split(" ", 1)[1] for text in page.locator("#t-list .item b").all_inner_texts()]

    assert ids() == [record["prompt_id"] for record in records]
    for outcome, (name, value) in {
        "right": ("correct", True),
        "wrong": ("correct", False),
        "cut": ("stop_reason", "length"),
    }.items():
        choose(page, "outcome", outcome)
        assert ids() == [record["prompt_id"] for record in records if record[name] == value]
    choose(page, "outcome", "all")
    choose(page, "step", "10")
    of_step = [record for record in records if record["step"] == 10]
    assert ids() == [record["prompt_id"] for record in of_step]

    def first_drift(record: dict[str, Any]) -> float:
        return next((place for place, gap in enumerate(record["gap"]) if gap < -2), float("inf"))

    choose(page, "sort", "early")
    assert ids() == [record["prompt_id"] for record in sorted(of_step, key=first_drift)]
    choose(page, "sort", "gap")
    assert ids() == [record["prompt_id"] for record in sorted(of_step, key=lambda r: -sum(map(abs, r["gap"])))]
    assert page.locator("#t-count").inner_text().startswith("6 of 18 rollouts")


def test_keyboard_alone(report: Path, open_page: Any) -> None:
    opened = open_page(report)
    page = opened.page
    badge = page.locator("#t-badges")
    badge.get_by_text("eval/0").wait_for()
    page.keyboard.press("j")
    badge.get_by_text("eval/1").wait_for()
    page.keyboard.press("k")
    badge.get_by_text("eval/0").wait_for()
    page.locator("#t-list").focus()
    page.keyboard.press("ArrowDown")
    badge.get_by_text("eval/1").wait_for()
    page.locator("#t-tokens .t").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "token 3 of 30" in page.locator("#tip").inner_text()
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    page.locator('input[name="t-colour"]').first.focus()
    page.keyboard.press("ArrowRight")
    page.locator("#t-scale").get_by_text("weight 1.02").wait_for()
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, select, input')]"
        ".filter((e) => !(e.textContent.trim() || e.getAttribute('aria-label') || e.closest('label'))).length"
    )
    assert unnamed == 0
    opened.check_quiet()


def test_hiding_a_method_and_changing_colours(report: Path, open_page: Any) -> None:
    opened = open_page(report, color_scheme="light")
    page = opened.page
    page.locator("#plot-accuracy-0 .main-svg").first.wait_for()
    page.get_by_role("button", name="IW-OPD").click()
    visible = page.evaluate("document.getElementById('plot-accuracy-0').data.filter((t) => t.visible !== false).length")
    assert visible == 3  # the band's two edges and the line of the other one
    background = "getComputedStyle(document.body).backgroundColor"
    line = "document.getElementById('plot-accuracy-0').data.find((t) => t.name === 'OPD').line.color"
    before = page.evaluate(background), page.evaluate(line)
    page.locator("#theme").click()
    after = page.evaluate(background), page.evaluate(line)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert before[0] != after[0]
    assert before[1] != after[1]
    page.reload()  # choices last
    assert page.evaluate(background) == after[0]
    assert page.get_by_role("button", name="IW-OPD").get_attribute("aria-pressed") == "false"
    opened.check_quiet()


@pytest.mark.parametrize("file_format", ["svg", "png", "csv"])
def test_figures_can_be_downloaded(report: Path, open_page: Any, file_format: str, tmp_path: Path) -> None:
    opened = open_page(report)
    with opened.page.expect_download() as waiting:
        opened.page.locator(f'button[data-chart="accuracy-0"][data-format="{file_format}"]').click()
    saved = tmp_path / waiting.value.suggested_filename
    waiting.value.save_as(saved)
    content = saved.read_bytes()
    if file_format == "svg":
        assert content.startswith(b"<svg")
        assert b"IW-OPD" in content
    elif file_format == "png":
        assert content.startswith(b"\x89PNG")
    else:
        rows = content.decode().split("\r\n")
        assert rows[0] == '"step","OPD","low","high","IW-OPD","low","high"'
        assert len(rows) == 4
    opened.check_quiet()


@pytest.mark.parametrize("options", [{"viewport": None}, {"color_scheme": "dark"}])
def test_narrow_screens_do_not_scroll_sideways(report: Path, open_page: Any, options: dict[str, Any]) -> None:
    opened = open_page(report, color_scheme=options.get("color_scheme", "light"))
    opened.page.set_viewport_size({"width": 390, "height": 844})
    opened.everything_drawn()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    legend = opened.page.evaluate(
        "(({scrollWidth, clientWidth}) => [scrollWidth, clientWidth])(document.querySelector('.legend'))"
    )
    assert legend[0] <= legend[1]  # no method is cut off
    opened.check_quiet()


def test_hostile_text_stays_text(open_page: Any, tmp_path: Path) -> None:
    """Each payload as run name, prompt id, prompt, answer, token and task id."""
    folders = []
    for place, payload in enumerate(PAYLOADS):
        name = payload.replace("/", "∕").replace("\x00", "").replace("\ud800", "")  # what a file system cannot hold
        folder = make_run(tmp_path / name, "opd", seed=place, task=payload, rollouts=1, steps=10, problems=4)
        record = rollout(0, 0, Random(0), 12)
        record |= {"prompt_id": payload, "prompt": payload, "answer": payload, "tokens": [payload] * 12}
        lines(folder / "rollouts.jsonl", [record])
        (folder / "config.toml").write_text(f"seed = {place}\nsteps = 10\n")  # no method: the run's name is the label
        folders.append(folder)
    path = write_report(folders, tmp_path / "report.html")
    opened = open_page(path)
    page = opened.page
    opened.everything_drawn()
    runs = page.locator("#t-run option").count()
    assert runs == len(PAYLOADS)
    for place, payload in enumerate(PAYLOADS):
        choose(page, "run", str(place))
        kept = "<" if "<" in payload else "evil" if "evil" in payload else "lone" if "lone" in payload else payload[:3]
        page.wait_for_function("(text) => document.getElementById('t-prompt').textContent.includes(text)", arg=kept)
        shown = page.locator("#t-prompt").inner_text()
        if payload.isprintable():
            assert shown == payload
        assert not any(bad in shown for bad in "\x1b\x00\x7f\x9b\u202e\ud800\udcff")
        page.locator("#t-tokens .t").first.hover()
        assert kept in page.locator("#tip").inner_text()
    ticks = page.evaluate("[...document.querySelectorAll('#plot-health-stages .ytick text')].map((t) => t.textContent)")
    for payload in ("<script>alert(1)</script>".replace("/", "∕"), "%{x}<b>bold<∕b><br>&lt;"):
        assert payload in [tick.strip() for tick in ticks]  # plotly reads some HTML in labels
    strange = page.evaluate(
        "document.querySelectorAll('main img, iframe, main a[href], [onload], [onerror], b:not(.item b), object').length"
    )
    assert strange == 0
    scripts = page.evaluate("[...document.scripts].filter((s) => s.type !== 'application/json').length")
    assert scripts == 4
    assert "49" not in page.locator("h1").inner_text()  # nobody evaluated the template
    opened.check_quiet()


def test_injected_scripts_would_not_run(report: Path, open_page: Any, tmp_path: Path) -> None:
    """Were a payload ever to get through, the policy is the second wall; this test would see it fall."""
    html = report.read_text(encoding="utf-8")
    hurt = tmp_path / "hurt.html"
    hurt.write_text(
        html.replace(
            "<main id=", "<img src=x onerror=\"document.title='hurt'\"><script>document.title='hurt'</script><main id="
        )
    )
    opened = open_page(hurt)
    assert opened.page.title() != "hurt"
    assert any("Content Security Policy" in words for words in opened.complaints)


def test_damaged_runs_say_what_is_missing(open_page: Any, tmp_path: Path) -> None:
    good = make_run(tmp_path / "good", "opd")
    bad = make_run(tmp_path / "bad", "iw-opd", steps=10, planned=20, task="other")
    (bad / "run.json").write_text('{"format": 7}')
    text = (bad / "metrics.jsonl").read_text()
    (bad / "metrics.jsonl").write_text("{broken\n[1]\n" + text + '{"step": 11, "lo')
    record = json.loads((bad / "rollouts.jsonl").read_text().splitlines()[0])
    record |= {"kl": [None] * 30, "teacher_logprobs": [None] * 30}
    del record["weights"]
    lines(bad / "rollouts.jsonl", [record, {"step": 10, "tokens": 3}])
    opened = open_page(write_report([good, bad, tmp_path / "nowhere"], tmp_path / "report.html"))
    opened.everything_drawn()
    words = opened.page.locator("#missing").inner_text()
    for part in ("nowhere", "format 7", "2 of 13 lines", "cut off", "unfinished: 10 of 20", "other", "no readable tokens"):
        assert part in words, part
    choose(opened.page, "run", "1")
    opened.page.locator("#t-tokens .t").nth(2).hover()
    assert "impossible" in opened.page.locator("#tip").inner_text()
    opened.check_quiet()


def test_live_page_loads_itself_again(two_runs: Path, open_page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10, planned=20)
    path = write_report([run], tmp_path / "report.html", refresh=600)
    opened = open_page(path, own_clock=True)
    assert "10 of 20" in opened.page.locator("#missing").inner_text()
    choose(opened.page, "sort", "late")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(11, Random(0))) + "\n")
    write_report([run], path, refresh=600)
    opened.page.clock.fast_forward(601_000)
    opened.page.get_by_text("11 of 20").first.wait_for()
    opened.page.wait_for_function("() => document.getElementById('t-sort').value === 'late'")  # the reader's choice, restored
    opened.page.locator("#live-toggle").click()
    opened.page.evaluate("window.stays = true")
    opened.page.clock.fast_forward(1_900_000)
    opened.page.wait_for_timeout(500)  # a page that loads itself again has begun to
    assert opened.page.evaluate("window.stays") is True
    assert opened.complaints == []


def test_probes_and_runs_on_one_page(two_runs: Path, open_page: Any, tmp_path: Path) -> None:
    paths = [make_probe(tmp_path / f"{place}.json", name) for place, name in enumerate(("<b>small</b>", "medium"))]
    opened = open_page(write_report([two_runs], tmp_path / "report.html", probes=paths))
    opened.everything_drawn()
    page = opened.page
    assert page.locator("#probe .bias").all_inner_texts() == ["Strong position bias"] * 2
    # a dot and an interval for every row and probe
    dots = page.evaluate("document.getElementById('plot-probe-gain').data.map((t) => [t.name, t.x, t.error_x.array])")
    gains = [row["gain"] for row in json.loads(paths[0].read_text())["alignment"]["rules"] if row["gain"]]
    assert [row[0] for row in dots] == ["&lt;b&gt;small&lt;/b&gt;", "medium"]
    assert dots[1][1] == pytest.approx([gain["mean"] for gain in gains], abs=1e-4)
    assert dots[1][2] == pytest.approx([0.05] * len(gains), abs=1e-4)
    ticks = page.evaluate("[...document.querySelectorAll('#plot-probe-gain .ytick text')].map((t) => t.textContent.trim())")
    assert ticks[:2] == ["OPD", "IW-OPD, gamma 0.5"]
    assert page.locator("#figure-handoff .keys li").all_inner_texts() == [
        "<b>small</b>",
        "medium",
        "hand-off file, world drift",
    ]
    # a probe and a method of the same style are hidden apart
    page.locator("button[data-key='probe-0']").click()
    hidden = "(id) => document.getElementById(id).data.filter((t) => t.visible === false).length"
    assert page.evaluate(hidden, "plot-probe-gap") == 3  # band and curve
    assert page.evaluate(hidden, "plot-probe-gain") == 1
    assert page.evaluate(hidden, "plot-accuracy-0") == 0
    page.locator("#figure-probe-gain summary").click()
    row = page.locator("#figure-probe-gain .numbers tr").nth(2)
    row.wait_for()  # the table is written when it is opened
    cells = row.locator("td").all_inner_texts()
    assert cells == ["IW-OPD, gamma 0.5", "0.1", "0.05", "0.15", "0.1", "0.05", "0.15"]
    opened.check_quiet()


def test_a_probe_alone_on_a_small_screen(open_page: Any, tmp_path: Path) -> None:
    path = write_report(
        [make_probe(tmp_path / "probe.json", overlap=None, missing={"overlap": "left out"})], tmp_path / "r.html"
    )
    opened = open_page(path, color_scheme="dark")
    opened.page.set_viewport_size({"width": 390, "height": 800})
    opened.everything_drawn()
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 390
    assert "left out" in opened.page.locator(".not-measured").inner_text()
    assert opened.page.locator("#runs, .method, #token-view").count() == 0
    opened.check_quiet()


def milliseconds_to_load(open_page: Any, path: Path) -> tuple[float, Any]:
    """The shortest of three loads (other work on the machine slows some down), with the last page."""
    times = []
    for _ in range(3):
        opened = open_page(path)
        opened.page.locator("#t-tokens .t").last.wait_for(state="attached")
        opened.page.locator("#plot-accuracy-0 .main-svg").first.wait_for(state="attached")
        times.append(opened.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
    return min(times), opened


@pytest.mark.slow
def test_a_large_run_opens_quickly(open_page: Any, tmp_path: Path) -> None:
    """1,000 steps and 500 rollouts of 2,000 tokens: below 20 MB, open in less than ten times the time of a small run."""
    small, _ = milliseconds_to_load(open_page, write_report([make_run(tmp_path / "small", steps=10)], tmp_path / "small.html"))
    run = make_run(tmp_path / "large", "iw-opd", steps=1000, rollouts=0)
    noise = Random(0)
    few = [rollout(0, place, noise, 2000) for place in range(10)]
    for record in few:
        record["tokens"] = [f" t{noise.randrange(20000)}" for _ in range(2000)]
        record["token_ids"] = [int(token[2:]) for token in record["tokens"]]
    with (run / "rollouts.jsonl").open("w") as file:
        for place in range(500):
            record = dict(few[place % 10], step=2 * place, prompt_id=f"p{place}")
            file.write(json.dumps(record) + "\n")
    path = write_report([run], tmp_path / "report.html")
    large, opened = milliseconds_to_load(open_page, path)
    size = path.stat().st_size
    print(f"{size / 1e6:.1f} MB, loaded after {large:.0f} ms; the small one after {small:.0f} ms")
    assert size < 20_000_000
    assert large < 10 * small
    assert opened.page.locator("#t-tokens .t").count() == 2000
    assert opened.page.locator("#t-list .item").count() == 500
    assert opened.page.locator("#missing").count() == 0
    opened.check_quiet()
