"""The dashboard as a browser shows it, over simulated workers under load."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.dashboard_rig import Rig, rig

pytest.importorskip("playwright", reason="needs playwright")
playwright = pytest.importorskip("playwright.async_api")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREENSHOTS = Path(__file__).parents[2] / "out" / "dashboard"
"""Kept for people to look at."""
DEADLINE_MS = 60_000

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium on PATH"),
]


@dataclass
class Seen:
    """What a page has asked for and complained about."""

    hosts: set[str] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def opened(running: Rig, *, width: int, scheme: str = "light") -> AsyncIterator[tuple[playwright.Page, Seen]]:
    """The dashboard in a window of its own, once it shows decisions."""
    seen = Seen()
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.set_default_timeout(DEADLINE_MS)
        page.on("request", lambda request: seen.hosts.add(urlsplit(request.url).netloc))
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.on("console", lambda message: seen.complaints.append(message.text))
        try:
            await page.goto(running.url)
            await page.wait_for_selector("#decisions details")
            yield page, seen
        finally:
            await browser.close()


async def _num_ended(page: playwright.Page) -> int:
    text = await page.inner_text("#tiles .tile:first-child .more")
    return int(text.split(" ")[0].replace(",", ""))


async def _wait_for_ready(page: playwright.Page, num_workers: int) -> None:
    await page.wait_for_function(
        "wanted => [...document.querySelectorAll('#workers .state.good')].length === wanted", arg=num_workers
    )


async def test_page_is_live_and_asks_nobody_else() -> None:
    async with rig(3, rate_per_s=5.0) as running, opened(running, width=1280) as (page, seen):
        before = await _num_ended(page)
        await page.wait_for_function(
            "before => parseInt(document.querySelector('#tiles .more').textContent.replace(',', '')) > before",
            arg=before,
        )
        await page.wait_for_selector("#plot-ttft svg.main-svg path.js-line")
        await _wait_for_ready(page, 3)
        await running.stop_worker("w2")
        await _wait_for_ready(page, 2)
        await running.start_worker("w2")
        await _wait_for_ready(page, 3)
        assert seen.hosts == {urlsplit(running.url).netloc}
        assert seen.complaints == []


async def test_decision_opens_by_keyboard_and_stays_open_while_others_come() -> None:
    async with rig(3, rate_per_s=5.0) as running, opened(running, width=1280) as (page, seen):
        key = await page.get_attribute("#decisions details", "data-key")
        decision = f"#decisions details[data-key='{key}']"
        await page.focus(f"{decision} summary")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(f"{decision}[open] .detail")
        assert await page.locator(f"{decision} .detail tbody tr").count() == 3
        assert "chosen" in await page.inner_text(f"{decision} .detail tbody tr:first-child")
        await page.wait_for_function(
            "key => Number(document.querySelector('#decisions details').dataset.key.split('/')[1])"
            " > Number(key.split('/')[1]) + 25",
            arg=key,
        )
        assert await page.is_visible(f"{decision} .detail")
        await page.click("#hold")
        assert await page.get_attribute("#hold", "aria-pressed") == "true"
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        await page.screenshot(path=SCREENSHOTS / "1280-light.png", full_page=True)
        assert seen.complaints == []


async def test_page_of_two_routers_shows_each_and_all_else_of_both() -> None:
    async with (
        rig(3, num_routers=2, rate_per_s=8.0) as running,
        opened(running, width=1280, scheme="dark") as (page, seen),
    ):
        await page.wait_for_function(
            "() => new Set([...document.querySelectorAll('#decisions details')]"
            ".map(decision => decision.dataset.key.split('/')[0])).size === 2"
        )
        rows = page.locator("#routers tbody tr")
        assert [await rows.nth(number).locator(".name").inner_text() for number in (0, 1)] == ["router-0", "router-1"]
        # One moment of the page: its figures go on.
        ended = await page.evaluate(
            "() => [...document.querySelectorAll('#routers tbody tr td:nth-child(9)'),"
            " document.querySelector('#tiles .tile .more')].map(cell => parseInt(cell.textContent.replace(',', '')))"
        )
        assert ended[0] + ended[1] == ended[2]
        assert "2 routers" in await page.inner_text("#about")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        await page.screenshot(path=SCREENSHOTS / "1280-dark-routers.png", full_page=True)
        await page.set_viewport_size({"width": 360, "height": 900})
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        await page.screenshot(path=SCREENSHOTS / "360-dark-routers.png", full_page=True)
        assert seen.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_narrow_page_does_not_scroll_sideways(scheme: str) -> None:
    async with rig(3, rate_per_s=5.0) as running, opened(running, width=360, scheme=scheme) as (page, seen):
        await page.wait_for_selector("#plot-cache svg.main-svg")
        await page.click("#decisions summary")
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        is_dark = sum(map(int, background.removeprefix("rgb(").rstrip(")").split(","))) < 3 * 128
        assert is_dark == (scheme == "dark")
        await page.click("#theme")
        assert await page.inner_text("#theme") == "Theme: light"
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        await page.screenshot(path=SCREENSHOTS / f"360-{scheme}.png", full_page=True)
        assert seen.complaints == []


async def test_page_says_when_its_stream_has_stopped() -> None:
    async with rig(2, rate_per_s=5.0) as running, opened(running, width=1280) as (page, _):
        assert await page.inner_text("#live-text") == "Live"
        running.stop_server()
        await page.wait_for_selector("#live[data-state='stale']")
        assert (await page.inner_text("#live-text")).startswith("Stale for ")
