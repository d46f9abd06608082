"""The page in a real browser: what it shows is what report.json holds, with and without scripts, wide and narrow."""

import json
import shutil
import warnings

import pytest

from qed.report import report
from qed.report.text import cell

pytestmark = pytest.mark.browser

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
)


@pytest.fixture(scope="module")
def browser():
    selenium = pytest.importorskip("selenium", reason="selenium is not installed: pip install 'qed-attention[dev]'")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        warnings.warn("the page was not tested in a browser: no chromium and chromedriver found", stacklevel=1)
        pytest.skip("no chromium and chromedriver found")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    assert selenium
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    yield started
    started.quit()


def look(browser, page, *, width=1200, dark=False, scripts=True):
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not scripts})
    browser.get(page.as_uri())


def show_all(browser):
    """Scroll every figure into view and wait until it is drawn."""
    browser.set_script_timeout(30)
    browser.execute_async_script(
        """
        const done = arguments[arguments.length - 1];
        (async () => {
          for (const figure of document.querySelectorAll("figure[data-figure]")) {
            figure.scrollIntoView();
            while (!figure.querySelector(".live .main-svg")) await new Promise((next) => setTimeout(next, 20));
          }
          done();
        })();
        """
    )


def test_every_cell_shows_the_value_of_report_json(browser, page, content):
    look(browser, page)
    shown = browser.execute_script(
        """
        return [...document.querySelectorAll("table[data-table]")].map((table) => [table.dataset.table,
          [...table.querySelectorAll("tbody tr")].map((row) => [...row.children].map((cell) =>
            [cell.dataset.key, cell.dataset.value, cell.textContent]))]);
        """
    )
    assert {name for name, _ in shown} == set(content["tables"])
    for name, rows in shown:
        table = content["tables"][name]
        kinds = {column["key"]: column["kind"] for column in table["columns"]}
        assert len(rows) == len(table["rows"])
        for row, wanted in zip(rows, table["rows"], strict=True):
            for key, value, text in row:
                assert json.loads(value) == wanted.get(key)
                assert text == cell(wanted.get(key), kinds[key])


def test_every_drawn_point_is_the_value_of_report_json(browser, page, content):
    look(browser, page)
    show_all(browser)
    drawn = browser.execute_script(
        """
        return Object.fromEntries([...document.querySelectorAll("figure[data-figure]")].map((figure) =>
          [figure.dataset.figure, figure.querySelector(".live").data.map((trace) =>
            [trace.name, Array.from(trace.y), trace.error_y ? Array.from(trace.error_y.array) : null])]));
        """
    )
    assert set(drawn) == set(content["figures"])
    for name, traces in drawn.items():
        for series in content["figures"][name]["series"]:
            label, y, above = next(trace for trace in traces if trace[0] == series["label"])
            assert y == series["y"], label
            if "high" in series:
                assert above == pytest.approx([high - middle for high, middle in zip(series["high"], y, strict=True)])


def test_toggles_hide_arms_and_seeds_and_switch_the_length_scale(browser, page):
    look(browser, page)
    show_all(browser)
    first = "document.querySelector('figure[data-figure^=accuracy] .live')"
    names = f"return {first}.data.map((trace) => trace.name).filter((name) => name.includes('seed'))"
    assert len(browser.execute_script(names)) == 12
    boxes = browser.find_elements("css selector", "#controls input")
    labels = [box.find_element("xpath", "..").text for box in boxes]
    boxes[labels.index("GDN-2")].click()
    assert browser.execute_script(names) == [*(f"QED, seed {seed}" for seed in range(5)), "QED, mean of 5 seeds"]
    boxes[labels.index("3")].click()
    assert "QED, seed 3" not in browser.execute_script(names)
    assert browser.execute_script(f"return {first}.layout.xaxis.type") == "log"
    browser.find_element("id", "scale").click()
    assert browser.execute_script(f"return {first}.layout.xaxis.type") == "linear"


def test_theme_follows_the_system_and_can_be_changed(browser, page):
    background = "return getComputedStyle(document.body).backgroundColor"
    look(browser, page, dark=True)
    dark = browser.execute_script(background)
    browser.find_element("id", "theme").click()
    light = browser.execute_script(background)
    assert (dark, light) == ("rgb(20, 23, 28)", "rgb(255, 255, 255)")
    look(browser, page)
    assert browser.execute_script(background) == light


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no-scripts"])
def test_nothing_reaches_past_the_page(browser, page, width, scripts):
    look(browser, page, width=width, scripts=scripts)
    layout = browser.execute_cdp_cmd("Page.getLayoutMetrics", {})
    assert layout["cssContentSize"]["width"] == width
    document = browser.execute_cdp_cmd("DOM.getDocument", {"depth": 0})
    figures = browser.execute_cdp_cmd(
        "DOM.querySelectorAll", {"nodeId": document["root"]["nodeId"], "selector": "figure .static > svg"}
    )
    assert figures["nodeIds"]
    if not scripts:
        for node in figures["nodeIds"]:
            box = browser.execute_cdp_cmd("DOM.getBoxModel", {"nodeId": node})["model"]
            assert box["content"][0] >= 0
            assert box["content"][2] <= width
            assert box["height"] > 150


@pytest.mark.parametrize("width", [1200, 390])
def test_labels_of_the_axes_do_not_overlap(browser, page, width):
    look(browser, page, width=width)
    show_all(browser)
    overlaps = browser.execute_script(
        """
        const found = [];
        for (const figure of document.querySelectorAll("figure[data-figure] .live")) {
          const edge = figure.getBoundingClientRect();
          for (const ticks of [".xtick text", ".ytick text"]) {
            const boxes = [...figure.querySelectorAll(ticks)].map((label) => label.getBoundingClientRect());
            boxes.forEach((box, i) => {
              if (box.left < edge.left - 1 || box.right > edge.right + 1) found.push("clipped");
              for (const other of boxes.slice(i + 1)) {
                const across = box.left < other.right && other.left < box.right;
                if (across && box.top < other.bottom && other.top < box.bottom) found.push("overlap");
              }
            });
          }
        }
        return found;
        """
    )
    assert overlaps == []


def test_the_page_asks_for_nothing_and_says_nothing_wrong(browser, page):
    browser.get_log("performance")
    browser.get_log("browser")
    look(browser, page)
    show_all(browser)
    asked = [
        event["params"]["request"]["url"]
        for event in (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [page.as_uri()]
    assert browser.get_log("browser") == []


def test_in_print_the_static_drawings_stand(browser, page):
    look(browser, page)
    show_all(browser)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    shown = browser.execute_script(
        """
        const display = (selector) => [...new Set([...document.querySelectorAll(selector)].map((element) =>
          getComputedStyle(element).display))];
        return [display("figure .static"), display("figure .live"), display("#controls")];
        """
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert shown == [["block"], ["none"], ["none"]]


@pytest.mark.slow
def test_fifty_runs_stay_small_and_open_fast(browser, synthetic_run, tmp_path):
    arms = ("gdn2", "qed", "qed-nogate", "qed-noproj", "qed-rand")
    folders = [
        synthetic_run(tmp_path, arm, seed, half_length=900 + 100 * seed, num_examples=40)
        for arm in arms
        for seed in range(10)
    ]
    page = report(folders, tmp_path / "out", title="Fifty runs")
    assert page.stat().st_size < 10e6
    # Processor time of the page's main thread: what opening costs, whatever else the machine does.
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    look(browser, page)
    metrics = {one["name"]: one["value"] for one in browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]}
    browser.execute_cdp_cmd("Performance.disable", {})
    assert 0 < metrics["TaskDuration"] < 2
