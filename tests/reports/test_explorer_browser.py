"""The explorer in a real headless Chromium: sliders, links, keyboard, a narrow screen.

Needs Debian's chromium and chromium-driver, and selenium: ``pytest -m live`` runs it.
"""

import shlex
import shutil
import time

import pytest

from eldr_sim.simulator.run import simulate

from .test_explorer import from_command, serving

pytestmark = pytest.mark.live
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --window-size=1400,1200"
)


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    paths = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if not all(paths):
        pytest.skip("chromium and chromium-driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    for flag in shlex.split(FLAGS):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(paths[1]))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def url():
    with serving() as (_, url):
        yield url


def text(browser, name):
    return browser.execute_script("return document.getElementById(arguments[0]).textContent", name)


def settle(browser):
    """Wait until everything of the state is there and drawn."""
    end = time.monotonic() + 300  # the first run compiles, and draws routing
    while time.monotonic() < end:
        time.sleep(0.1)
        if text(browser, "status") == "" and not browser.execute_script(
            "return document.querySelectorAll('.plot.waiting').length - "
            "document.querySelectorAll('figure[hidden] .waiting').length"
        ):
            return
    raise AssertionError(text(browser, "status"))


def move(browser, name, value):
    browser.execute_script(
        "const c = document.getElementById('controls').elements[arguments[0]];"
        "c.value = arguments[1]; c.dispatchEvent(new Event('input', {bubbles: true}));",
        name, value,
    )  # fmt: skip
    time.sleep(0.3)


def shown(browser):
    """Return the figures of the tiles by name."""
    return dict(browser.execute_script(
        "return [...document.querySelectorAll('#figures div')].map((d) => "
        "[d.querySelector('span').textContent, d.querySelector('b').textContent])"
    ))  # fmt: skip


def curve(browser, name):
    return browser.execute_script(
        "const d = document.getElementById(arguments[0]).data;"
        "return d.map((t) => [t.name, [...t.x], [...t.y]])", name,
    )  # fmt: skip


def test_a_dragged_slider_a_link_and_pins(browser, url):
    browser.get(url)
    settle(browser)
    before = shown(browser)
    move(browser, "d", 4)
    settle(browser)
    command = text(browser, "command")
    assert "--topology 1P4D" in command
    assert shown(browser) != before
    summary = simulate(from_command(command)).summary
    tpot = float(shown(browser)["Median TPOT (ms)"])
    assert tpot == pytest.approx(summary["median_tpot_ms"], 5e-3)
    name, rates, values = curve(browser, "tpot")[0]
    assert (name, len(rates)) == ("p50", 8)
    assert values[rates.index(20)] == pytest.approx(summary["median_tpot_ms"])
    browser.find_element("id", "pin").click()
    move(browser, "rate", 60)
    settle(browser)
    assert "--request-rate 64" in text(browser, "command")
    assert "p99, topology=1P4D" in [name for name, *_ in curve(browser, "tpot")]
    link, tiles = browser.current_url, shown(browser)
    browser.get("about:blank")
    browser.get(link)
    settle(browser)
    assert shown(browser) == tiles
    pinned = [len(x) for name, x, _ in curve(browser, "tpot") if name == "p99, topology=1P4D"]
    assert pinned == [8]


def test_wrong_input_is_said_and_mended(browser, url):
    browser.get(f"{url}/#more=nothing%3D3")
    time.sleep(1.0)
    assert "nothing" in text(browser, "status")
    assert "wrong" in browser.find_element("id", "status").get_attribute("class")
    move(browser, "more", "")
    settle(browser)
    faded = "return [...document.querySelectorAll('#figures.waiting, .plot.waiting')].length"
    assert browser.execute_script(faded) == 0
    move(browser, "more", "decode.gpu=none")
    time.sleep(1.0)
    assert browser.execute_script(faded) > 1, "figures of the state before look like its own"
    browser.get(f"{url}/#goodput=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
    time.sleep(1.0)
    assert "goodput" in text(browser, "status")
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0


def test_the_keyboard_alone_and_a_narrow_screen(browser, url):
    from selenium.webdriver.common.keys import Keys

    browser.get("about:blank")
    browser.get(url)
    settle(browser)
    for _ in range(40):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        if browser.switch_to.active_element.get_attribute("name") == "d":
            break
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    time.sleep(0.3)
    settle(browser)
    assert "--topology 1P3D" in text(browser, "command")
    browser.set_window_size(500, 900)
    time.sleep(0.3)
    wide = browser.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert wide <= 0
    browser.set_window_size(1400, 1200)


def test_nothing_leaves_the_machine_and_nothing_fails(browser, url):
    import json

    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in asked
            if m["method"] == "Network.requestWillBeSent"]  # fmt: skip
    assert urls
    assert all(one.startswith((url, "data:", "blob:", "about:")) for one in urls)
    assert [entry["message"] for entry in browser.get_log("browser")] == []


@pytest.mark.parametrize("width", [1400, 780, 390])
def test_three_widths(browser, url, width, tmp_path):
    """The answer and its cause are on the first screen; on a phone before the controls."""
    size = {"width": width, "height": 850, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get("about:blank")
    browser.get(url)
    settle(browser)
    top = "return document.getElementById(arguments[0]).getBoundingClientRect().top"
    places = {name: browser.execute_script(top, name) for name in ("answer", "limits", "controls")}
    assert text(browser, "answer")
    assert "What limits it" in text(browser, "limits")
    assert 0 <= places["answer"] < places["limits"] < 850
    assert (places["answer"] < places["controls"]) == (width < 760)
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(wide) <= 0
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll('input, select, button, .plot')].filter((e) => "
        "!(e.closest('label') || e.textContent.trim() || e.getAttribute('aria-label'))).length"
    )
    assert unnamed == 0
    picture = tmp_path / f"explorer_{width}.png"
    browser.save_screenshot(str(picture))
    assert picture.stat().st_size > 20_000, "an empty page"
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_price_follows_the_gpu_until_it_is_typed(browser, url):
    browser.get("about:blank")
    browser.get(url)
    settle(browser)
    move(browser, "gpu", "H200")
    settle(browser)
    assert "--price-per-gpu-hour" in text(browser, "command")
    move(browser, "price_per_gpu_hour", "9")
    move(browser, "gpu", "H100")
    settle(browser)
    assert "--price-per-gpu-hour 9" in text(browser, "command")
