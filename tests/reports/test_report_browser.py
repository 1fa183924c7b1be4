"""Reports in a real headless Chromium. Needs Debian's chromium and chromium-driver, and selenium.

Run with ``pytest -m live tests/reports/test_report_browser.py``.
"""

import base64
import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eldr_sim.reports.page import write_report
from eldr_sim.simulator.results import write_json, write_table

pytestmark = pytest.mark.live

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update"
)

#: Contrast of every visible text with what is behind it: [ratio, text, colour, ground].
CONTRASTS = """
const parse = (c) => c.match(/[\\d.]+/g).map(Number);
const light = (c) => {
  const [r, g, b] = c.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const element = node.parentElement, style = getComputedStyle(element);
  if (!node.data.trim() || !element.getClientRects().length) continue;
  if (element.closest("#js-plotly-tester")) continue;  // off the page
  let ground = element, colour = null;
  for (; ground && !colour; ground = ground.parentElement) {
    const c = parse(getComputedStyle(ground).backgroundColor);
    if (c.length === 3 || c[3] === 1) colour = c;
  }
  const ink = parse(element.closest("svg") ? style.fill : style.color);
  const [a, b] = [light(ink), light(colour)];
  found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.data.trim(), ink, colour]);
}
return found;
"""


@pytest.fixture(scope="module")
def page(report_folders, tmp_path_factory):
    """A page of every kind of folder."""
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report(sorted(report_folders.iterdir()), out)
    return out


@pytest.fixture
def browse(tmp_path):
    """Open a file in a browser of its own; returns the driver."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install 'eldr-sim[browser]'")
    from selenium.webdriver.chrome.service import Service

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver here: apt-get install chromium chromium-driver")
    opened = []

    def open_(path, width=1200, height=900, *, scheme="light", media="", mobile=False):
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        profile = tmp_path / f"profile-{len(opened)}"
        for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        browser = webdriver.Chrome(options=options, service=Service(driver))
        opened.append(browser)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        emulated = {"media": media, "features": features}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
        browser.get(path.as_uri())
        return browser

    yield open_
    for browser in opened:
        browser.quit()


def cells(browser, table, column):
    """Return texts and values of a column of a table."""
    script = """
    const rows = [...arguments[0].tBodies[0].rows].map((row) => row.cells[arguments[1]]);
    return rows.map((cell) => [cell.textContent, cell.dataset.value]);
    """
    return browser.execute_script(script, table, column)


def test_page_loads_nothing_and_complains_of_nothing(page, browse):
    browser = browse(page)
    addresses = [
        message["params"]["request"]["url"]
        for entry in browser.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"]
        == "Network.requestWillBeSent"
    ]
    asked = {a for a in addresses if not a.startswith(("data:", "blob:", "chrome"))}
    assert asked == {page.as_uri()}
    assert browser.get_log("browser") == []


def test_a_click_sorts(page, browse):
    browser = browse(page)
    table = browser.find_element("xpath", "//table[caption='Latencies of completed requests, ms']")
    buttons = table.find_elements("css selector", "thead button")
    heads = table.find_elements("css selector", "thead th")
    before = [float(value) for _, value in cells(browser, table, 4)]
    buttons[4].click()
    assert [float(value) for _, value in cells(browser, table, 4)] == sorted(before)
    assert [h.get_attribute("aria-sort") for h in heads] == ["none"] * 4 + ["ascending"]
    buttons[4].click()
    assert [float(v) for _, v in cells(browser, table, 4)] == sorted(before, reverse=True)
    assert heads[4].get_attribute("aria-sort") == "descending"
    buttons[0].send_keys("\ue007")  # Enter
    names = [text for text, _ in cells(browser, table, 0)]
    assert names == sorted(names)
    assert [h.get_attribute("aria-sort") for h in heads] == ["ascending"] + ["none"] * 4


def test_missing_values_stay_last(browse, tmp_path, report_folders):
    folder = tmp_path / "jsq"
    shutil.copytree(report_folders / "jsq", folder)
    summary = json.loads((folder / "summary.json").read_text())
    write_json(folder / "summary.json", summary | {"p99_ttft_ms": None})
    write_report([folder], tmp_path / "page.html")
    browser = browse(tmp_path / "page.html")
    table = browser.find_element("xpath", "//table[caption='Latencies of completed requests, ms']")
    button = table.find_elements("css selector", "thead button")[4]
    for _ in range(2):
        button.click()
        values = [value for _, value in cells(browser, table, 4)]
        assert values[-1] == ""
        assert all(values[:-1])


#: Where in the window the highest bar, or the middle of the longest other series, of a picture is.
MARK = """
const box = arguments[0], { xaxis, yaxis } = box._fullLayout, area = box.getBoundingClientRect();
const shown = box.data.filter((trace) => trace.hoverinfo !== "skip");
const bars = shown[0].type === "bar";
const size = (trace) => bars ? Math.max(...trace.y) : trace.x.length;
const trace = shown.reduce((a, b) => size(b) > size(a) ? b : a);
const i = bars ? trace.y.indexOf(size(trace)) : trace.x.length >> 1;
const under = bars ? shown.slice(0, shown.indexOf(trace)) : [];
const y = bars ? under.reduce((height, other) => height + other.y[i], trace.y[i] / 2) : trace.y[i];
const within = (axis, value) =>
  axis._offset + Math.min(Math.max(axis.d2p(value), 1), axis._length - 1);
return [area.left + within(xaxis, trace.x[i]), area.top + within(yaxis, y)];
"""


def hovered(browser, picture):
    """Return the lines of the label that a picture shows."""
    script = """
    const label = arguments[0].querySelector(".hoverlayer .hovertext");
    return label ? [...label.querySelectorAll("tspan.line")].map((t) => t.textContent) : null;
    """
    return browser.execute_script(script, picture)


def point_at(browser, x, y):
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    actions = ActionBuilder(browser)
    actions.pointer_action.move_to_location(round(x), round(y))
    actions.perform()


def test_pictures_say_their_values_to_pointer_and_keyboard(page, browse):
    from selenium.webdriver.support.ui import WebDriverWait

    browser = browse(page)
    wait = WebDriverWait(browser, 5)
    pictures = browser.find_elements("css selector", ".plot")
    assert len(pictures) > 10
    for picture in pictures:
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", picture)
        point_at(browser, *browser.execute_script(MARK, picture))
        wait.until(lambda _, picture=picture: hovered(browser, picture))
    point_at(browser, 1, 1)
    named = "//figure[figcaption='Distribution of TTFT']//div[@role='img']"
    picture = browser.find_element("xpath", named)
    browser.execute_script("arguments[0].focus()", picture)
    said = []
    for key in ("\ue014", "\ue014", "\ue012"):  # right arrow twice, left arrow
        picture.send_keys(key)
        said.append(hovered(browser, picture))
        told = browser.execute_script("return document.getElementById('told').textContent")
        assert told == "; ".join(said[-1])
    assert said[0] != said[1]
    assert said[0] == said[2]
    picture.send_keys("\ue00c")  # Escape
    wait.until(lambda _: hovered(browser, picture) is None)


def test_a_click_on_a_name_hides_its_series(page, browse):
    from selenium.webdriver.support.ui import WebDriverWait

    browser = browse(page)
    picture = browser.find_element("xpath", "//figure[figcaption='Distribution of TTFT']")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", picture)
    visible = """
    return arguments[0].querySelector(".plot")._fullData.map((trace) => trace.visible);
    """
    assert browser.execute_script(visible, picture) == [True, True]
    picture.find_element("css selector", ".legendtoggle").click()
    wanted = ["legendonly", True]
    WebDriverWait(browser, 5).until(lambda _: browser.execute_script(visible, picture) == wanted)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_as_wcag_aa_asks(page, browse, scheme):
    browser = browse(page, scheme=scheme)
    for details in browser.find_elements("css selector", "details"):
        browser.execute_script("arguments[0].open = true", details)
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    dark = max(int(v) for v in ground[4:-1].split(",")) < 100
    assert dark == (scheme == "dark")
    found = browser.execute_script(CONTRASTS)
    assert len(found) > 300
    assert [entry for entry in found if entry[0] < 4.5] == []
    # The button turns from automatic to light to dark, whatever the system prefers.
    button = browser.find_element("id", "theme")
    for expected in (False, True):
        button.click()
        ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (max(int(v) for v in ground[4:-1].split(",")) < 100) == expected
        found = browser.execute_script(CONTRASTS)
        assert [entry for entry in found if entry[0] < 4.5] == []


def test_phone_scrolls_down_only(page, browse):
    browser = browse(page, 390, 844, mobile=True)
    for details in browser.find_elements("css selector", "details"):
        browser.execute_script("arguments[0].open = true", details)
    wide, shown = browser.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert shown == 390
    assert wide == 390
    sizes = browser.execute_script(
        "return [...document.querySelectorAll('.plot .main-svg')].map((svg) => "
        "svg.getBoundingClientRect().right)"
    )
    assert sizes
    assert max(sizes) <= 390
    texts = browser.execute_script(
        "return [...document.querySelectorAll('.plot text')].map((text) => "
        "parseFloat(getComputedStyle(text).fontSize))"
    )
    assert min(texts) >= 10
    # A table that is wider than the phone scrolls in its box.
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('.scroll')].map((b) => [b.clientWidth, b.scrollWidth,"
        " getComputedStyle(b).overflowX])"
    )
    assert any(inner > outer for outer, inner, _ in boxes)
    assert {overflow for *_, overflow in boxes} == {"auto"}


def test_prints_light_and_without_controls(page, browse):
    browser = browse(page, scheme="dark")
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    pdf = base64.b64decode(printed["data"])
    assert pdf.startswith(b"%PDF-")
    assert pdf.count(b"/Type /Page\n") >= 3
    browser = browse(page, scheme="dark", media="print")
    style = "return getComputedStyle(arguments[0])[arguments[1]]"
    body = browser.find_element("tag name", "body")
    assert browser.execute_script(style, body, "backgroundColor") == "rgb(255, 255, 255)"
    assert not browser.find_element("id", "theme").is_displayed()
    (box, *_) = browser.find_elements("css selector", ".scroll")
    assert browser.execute_script(style, box, "overflowX") == "visible"
    found = browser.execute_script(CONTRASTS)
    assert [entry for entry in found if entry[0] < 4.5] == []


def test_what_files_say_does_not_run(browse, tmp_path, report_folders):
    evil = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    folder = tmp_path / "jsq"
    shutil.copytree(report_folders / "jsq", folder)
    requests = pq.read_table(folder / "requests.parquet")
    index = requests.column_names.index("domain")
    column = pa.array([evil] * len(requests))
    write_table(folder / "requests.parquet", requests.set_column(index, "domain", column))
    summary = json.loads((folder / "summary.json").read_text())
    summary["trace"]["model"] = evil
    write_json(folder / "summary.json", summary | {"label": evil, "latency_warnings": [evil]})
    write_report([folder], tmp_path / "page.html")
    browser = browse(tmp_path / "page.html")
    assert browser.title == f"{evil} · eldr-sim"
    assert browser.execute_script("return window.ran") is None
    assert browser.find_elements("tag name", "img") == []
    assert browser.get_log("browser") == []


def test_tables_fit_half_a_screen(page, browse):
    """At 780 px no table is cut: cells wrap."""
    browser = browse(page, 780)
    cut = browser.execute_script(
        "return [...document.querySelectorAll('.scroll')]"
        ".filter((box) => box.scrollWidth > box.clientWidth + 1)"
        ".map((box) => box.getAttribute('aria-label'))"
    )
    assert cut == []
