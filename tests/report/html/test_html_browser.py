"""Tests of the HTML report in a real browser, Debian's chromium.

Needs chromium, chromium-driver, and axe-core: npm ci --prefix tests/browser
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from specbench_cli.report.gallery.gallery import publish
from specbench_cli.report.html.page import write_html
from specbench_cli.report.report_data import read_report_data

pytestmark = pytest.mark.browser

AXE = Path(__file__).parents[2] / "browser" / "node_modules" / "axe-core" / "axe.min.js"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars"
    " --disable-background-networking --disable-component-update --disable-sync"
).split()
WIDTHS = (1280, 400)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService("/usr/bin/chromedriver")
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


class Page:
    """The report, opened in the browser."""

    def __init__(self, driver, file: Path) -> None:
        self.driver = driver
        self.url = file.as_uri()
        self.reload()

    def reload(self, width: int = 1280, *, dark: bool = False, media: str = "screen") -> None:
        """Reload the page with this width, colour scheme and medium ("screen" or "print")."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=900,
                 deviceScaleFactor=1, mobile=False)  # fmt: skip
        self.cdp("Emulation.setEmulatedMedia", media=media, features=features)
        self.driver.get(self.url)

    def cdp(self, command: str, **arguments):
        return self.driver.execute_cdp_cmd(command, arguments)

    def js(self, script: str, *arguments):
        return self.driver.execute_script(script, *arguments)

    def settle(self) -> None:
        """Wait until the browser has drawn the last change."""
        self.driver.execute_async_script(
            "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
        )

    def find(self, selector: str):
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str):
        return self.driver.find_elements("css selector", selector)

    def style(self, selector: str, name: str) -> str:
        return self.js(
            "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]",
            selector, name,
        )  # fmt: skip

    def visible_values(self, table: str, column: int) -> list[str]:
        return self.js(
            "return [...document.querySelectorAll(`#table-${arguments[0]} tbody tr:not([hidden])`)]"
            ".map((row) => row.cells[arguments[1]].dataset.value ?? '')",
            table, column,
        )  # fmt: skip

    def violations(self) -> list[str]:
        """Return the accessibility violations that axe-core finds, with all sections open."""
        self.js("for (const each of document.querySelectorAll('details')) each.open = true")
        self.js(AXE.read_text(encoding="utf-8"))
        found = self.driver.execute_async_script(
            "axe.run(document, {resultTypes: ['violations']}).then(arguments[0])"
        )
        return [
            f"{each['id']}: {node['html'][:200]} {node['failureSummary']}"
            for each in found["violations"]
            for node in each["nodes"][:3]
        ]


@pytest.fixture
def shots(tmp_path) -> Path:
    """The folder for screenshots: $SPECBENCH_SCREENSHOTS, or a temporary folder."""
    folder = Path(os.environ.get("SPECBENCH_SCREENSHOTS", tmp_path / "screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    """The files that the fixtures write once per module, by name."""
    return {}


@pytest.fixture
def page(browser, files, make_run, tmp_path) -> Page:
    if "page" not in files:
        (files["page"],) = write_html(read_report_data(make_run(prompts=6)), tmp_path)
    browser.get_log("browser"), browser.get_log("performance")
    return Page(browser, files["page"])


def test_page_logs_nothing_and_loads_nothing(page):
    assert page.js("return document.readyState") == "complete"
    assert page.driver.get_log("browser") == []
    events = [json.loads(each["message"])["message"] for each in page.driver.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    # The requests of the browser's own first tab are ignored.
    urls = {each["request"]["url"] for each in sent if each["documentURL"] == page.url}
    assert page.url in urls
    assert {url.split(":")[0] for url in urls} <= {"file", "data"}
    assert [url for url in urls if url.startswith("file:")] == [page.url]


def test_model_output_is_shown_as_text(page):
    assert page.js("return document.scripts.length") == 2
    text = page.js("return document.getElementById('viewer').textContent")
    assert "<script>alert(1)</script>" in text
    assert "<img src=x onerror=alert(2)>" in text
    assert not page.all("#viewer img, #viewer script")


def test_headings_sort_by_click_and_by_key(page):
    from selenium.webdriver import Keys

    column = 2
    heading = f"#table-overall-lossless th:nth-child({column + 1})"
    page.find(f"{heading} button").click()
    descending = [float(each) for each in page.visible_values("overall-lossless", column) if each]
    assert descending == sorted(descending, reverse=True) and len(descending) > 3
    assert page.find(heading).get_attribute("aria-sort") == "descending"
    page.find(f"{heading} button").send_keys(Keys.ENTER)
    assert page.find(heading).get_attribute("aria-sort") == "ascending"
    ascending = page.visible_values("overall-lossless", column)
    assert [float(each) for each in ascending if each] == sorted(descending)
    assert not any(ascending[len(descending) :]), "rows without a figure come last"
    page.find("#table-overall-lossless th:nth-child(2) button").click()
    names = page.visible_values("overall-lossless", 1)
    assert names == sorted(names, key=str.lower)
    assert len(page.all("#table-overall-lossless th[aria-sort]")) == 1


def test_rows_are_filtered_by_text_and_by_selection(page):
    from selenium.webdriver.support.ui import Select

    section = "[data-table=family-lossless]"
    everything = len(page.visible_values("family-lossless", 0))
    Select(page.find(f"{section} select")).select_by_visible_text("qa")
    assert set(page.visible_values("family-lossless", 0)) == {"qa"}
    page.find(f"{section} input").send_keys("sps")
    assert page.visible_values("family-lossless", 3) == ["sps"]
    assert page.find(f"{section} output").text == f"1 of {everything} rows"
    Select(page.find("[data-table=overall-lossless] select")).select_by_visible_text("peer")
    assert page.visible_values("overall-lossless", 1) == ["hf:vanilla"]


def test_pointer_and_keyboard_show_the_details_of_a_token(page):
    from selenium.webdriver import ActionChains, Keys

    tip = page.find("#tip")
    assert not tip.is_displayed()
    token = page.find(".column .token.accepted")
    page.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", token)
    page.settle()  # scrolling hides the tip one frame later
    ActionChains(page.driver).move_to_element(token).perform()
    for words in ("accepted", "probability", "step", "committed", " ms", "since the start"):
        assert words in tip.text
    ActionChains(page.driver).move_to_element(page.find("#tokens-heading")).perform()
    assert not tip.is_displayed()
    first = page.find(".tokens .token")
    page.js("arguments[0].focus()", first)
    assert tip.is_displayed() and "token 0," in tip.text
    assert first.get_attribute("aria-describedby") == "tip"
    active = page.driver.switch_to.active_element
    active.send_keys(Keys.ARROW_RIGHT)
    assert "token 1," in tip.text
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert "step 2 of" in tip.text
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()
    assert len(page.all(".tokens:first-of-type .token[tabindex='0']")) == len(page.all(".tokens"))


def test_methods_are_shown_in_columns_with_their_trees(page):
    boxes = {box.get_attribute("value"): box for box in page.all("#viewer input[type=checkbox]")}
    for label, box in boxes.items():
        if box.is_selected() != (label in ("vanilla", "tree", "hf:vanilla")):
            box.click()
    labels = [each.get_attribute("aria-label").split(",")[0] for each in page.all(".column")]
    assert labels == ["tree", "vanilla", "hf:vanilla"]
    tree = page.find("[aria-label^='tree,'] svg.tree")
    nodes = page.js(
        "return [...arguments[0].querySelectorAll('.node rect')]"
        ".map((box) => [box.x.baseVal.value, box.y.baseVal.value])",
        tree,
    )
    assert len(nodes) >= 9
    assert len({tuple(each) for each in nodes}) == len(nodes), "no two nodes in one place"
    assert len({y for _, y in nodes}) > 1
    before = page.find("[aria-label^='tree,'] .said").text
    page.find("[aria-label='Next step of tree']").click()
    assert page.find("[aria-label^='tree,'] .said").text != before
    page.find("[aria-label='Next prompt']").click()
    assert page.all(".column .token")


def test_dark_follows_the_system_and_the_button(page):
    light = page.style("body", "backgroundColor")
    page.reload(dark=True)
    dark = page.style("body", "backgroundColor")
    assert dark != light and page.find("#theme").get_attribute("aria-pressed") == "true"
    page.find("#theme").click()
    assert page.style("body", "backgroundColor") == light
    page.reload()
    page.find("#theme").click()
    assert page.style("body", "backgroundColor") == dark


def test_print_is_light_and_shows_whole_tables(page, shots):
    light = page.style("body", "color")
    page.reload(dark=True, media="print")
    assert page.style("body", "color") == light
    assert page.style("nav", "display") == "none"
    assert page.style(".scroll", "overflow") == "visible"
    paper = page.cdp("Page.printToPDF", printBackground=True)["data"]
    document = base64.b64decode(paper)
    (shots / "print.pdf").write_bytes(document)
    assert document.startswith(b"%PDF") and len(document) > 20_000


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_page_is_accessible_and_fits_the_width(page, shots, width, dark):
    page.reload(width, dark=dark)
    scroll, client = page.js(
        "const {scrollWidth, clientWidth} = document.documentElement;"
        " return [scrollWidth, clientWidth]"
    )
    assert scroll == client == width
    name = f"{width}-{'dark' if dark else 'light'}"
    for section in (
        "header",
        "#results",
        "#figures",
        "#tokens",
        "#equivalence",
        "#methods",
        "#measured",
    ):
        page.js(
            "document.querySelector(arguments[0]).scrollIntoView({behavior: 'instant'})", section
        )
        page.driver.save_screenshot(str(shots / f"{name}-{section.strip('#')}.png"))
    assert page.violations() == []


@pytest.fixture
def gallery(files, make_run, tmp_path) -> Path:
    """A gallery of one run, written once per module."""
    if "gallery" not in files:
        machine = {"id": "aaaabbbbcccc", "hardware": {"cpu": "some CPU", "cores": 2}}
        labels = ("vanilla", "sps", "tree", "loose", "hf:vanilla")
        run = make_run(prompts=6, labels=labels, machine=machine)
        files["gallery"] = publish(read_report_data(run), tmp_path / "gallery").index.parent
    return files["gallery"]


@pytest.mark.parametrize("name", ["index.html", "runs/run/index.html"])
def test_gallery_is_accessible_and_fits_the_width(browser, gallery, shots, name):
    page = Page(browser, gallery / name)
    for width in WIDTHS:
        for dark in (False, True):
            page.reload(width, dark=dark)
            assert page.js("return document.documentElement.scrollWidth") == width
            assert page.violations() == [], (width, dark)
            labels = f"gallery-{Path(name).parent.name or 'index'}-{width}-{dark:d}.png"
            page.driver.save_screenshot(str(shots / labels))
    assert page.js("return document.scripts.length") == 0
