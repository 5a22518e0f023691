"""The dashboard as a browser shows it, over simulated workers under load."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from router.http_server import bind, serving_http
from router.keys import KeyEntry, KeyRing
from router.tokenizer import Tokenizer
from tests.support.dashboard_rig import rig
from tests.support.fake_generate import FakeGenerate
from tests.support.http_front import echo, make_front
from tests.support.tokenizers import write_model_folder

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
async def opened(
    url: str, *, width: int, scheme: str = "light", key: str | None = None
) -> AsyncIterator[tuple[playwright.Page, Seen]]:
    """The dashboard in a window of its own, once it shows decisions; its user knows `key` when asked for one."""
    seen = Seen()
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            http_credentials=None if key is None else {"username": "", "password": key},
        )
        page.set_default_timeout(DEADLINE_MS)
        page.on("request", lambda request: seen.hosts.add(urlsplit(request.url).netloc))
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.on("console", lambda message: seen.complaints.append(message.text))
        try:
            await page.goto(url)
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
    async with rig(3, rate_per_s=5.0) as running, opened(running.url, width=1280) as (page, seen):
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
    async with rig(3, rate_per_s=5.0) as running, opened(running.url, width=1280) as (page, seen):
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


async def test_tab_key_alone_leads_to_everything_that_can_be_used() -> None:
    async with rig(2, rate_per_s=5.0) as running, opened(running.url, width=1280) as (page, _):
        walked: list[str] = []
        name = "() => { const one = document.activeElement; return one.id || one.className || one.tagName; }"
        for _ in range(60):
            await page.keyboard.press("Tab")
            walked.append(await page.evaluate(name))
            if walked[-1] == "hold":
                await page.keyboard.press("Enter")
            if walked[-1] == "SUMMARY":
                break
        assert walked[0] == "skip"
        assert [one for one in walked if one != "skip"] == ["theme", "groups-scroll", "hold", "SUMMARY"]
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#decisions details[open] .detail")
        await page.keyboard.press("Tab")
        assert "Costs of request" in str(await page.evaluate("document.activeElement.getAttribute('aria-label')"))


async def test_page_of_two_routers_shows_each_and_all_else_of_both() -> None:
    async with (
        rig(3, num_routers=2, rate_per_s=8.0) as running,
        opened(running.url, width=1280, scheme="dark") as (page, seen),
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
    async with rig(3, rate_per_s=5.0) as running, opened(running.url, width=360, scheme=scheme) as (page, seen):
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
    async with rig(2, rate_per_s=5.0) as running, opened(running.url, width=1280) as (page, _):
        assert await page.inner_text("#live-text") == "Live"
        running.stop_server()
        await page.wait_for_selector("#live[data-state='stale']")
        assert (await page.inner_text("#live-text")).startswith("Stale for ")


async def test_page_shows_warnings_hot_prefixes_and_jobs_as_they_are() -> None:
    async with rig(2, rate_per_s=5.0) as running:
        await running.start_worker("mute", tells_blocks=False)
        async with opened(running.url, width=1280) as (page, seen):
            await page.wait_for_selector("#flags .flag >> text=hints only")
            assert (await page.inner_text("#flags .flag")).endswith("counts as held: mute.")
            await page.wait_for_selector("#workers .badge >> text=hints only")
            assert await page.locator("#workers tbody tr", has_text="hints only").count() == 1
            head = [await cell.inner_text() for cell in await page.locator("#groups thead th.col").all()]
            assert sorted(head) == ["mute", "w0", "w1"]
            # What a worker holds that tells nothing is not known; of the others each cell is a share or a dot.
            await page.wait_for_function(
                "place => { const rows = [...document.querySelectorAll('#groups tbody tr')];"
                " const told = rows.map(row => [...row.querySelectorAll('td b')].map(cell => cell.textContent));"
                " return rows.length > 1 && told.every(cells => cells[place] === '?')"
                " && told.some(cells => cells.includes('100 %')); }",
                arg=head.index("mute"),
            )
            jobs = page.locator("#jobs .job")
            assert [await jobs.nth(place).locator(".name").inner_text() for place in (0, 1)] == [
                "in progress",
                "completed",
            ]
            progress = jobs.nth(1).locator("progress")
            assert [await progress.get_attribute(name) for name in ("value", "max")] == ["512", "512"]
            before = await jobs.nth(0).inner_text()
            await page.wait_for_function(
                "before => document.querySelector('#jobs .job').innerText !== before", arg=before
            )
            assert seen.complaints == []


async def test_page_behind_a_key_is_live_and_comes_back_with_its_server(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_model_folder(tmp_path))
    entries = [KeyEntry(name="ops", key="sk-of-who-watches", admin=True), KeyEntry(name="chat", key="sk-of-a-user")]
    async with rig(2, rate_per_s=5.0) as running, contextlib.AsyncExitStack() as servers:
        # Open all the while, so that nobody else gets the port between two servers.
        listener = servers.enter_context(contextlib.closing(bind("127.0.0.1", 0)))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/dashboard"

        async def serve(server: contextlib.AsyncExitStack) -> None:
            keys = KeyRing(entries, asyncio.get_running_loop().time)
            front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, keys=keys, mounts={"dashboard": running.app})
            await server.enter_async_context(serving_http(front, [listener.dup()], front.limits))

        server = await servers.enter_async_context(contextlib.AsyncExitStack())
        await serve(server)
        async with opened(url, width=1280, key="sk-of-who-watches") as (page, seen):
            assert page.context.browser is not None
            stranger = await page.context.browser.new_page(
                http_credentials={"username": "", "password": "sk-of-a-user"}
            )
            refused = await stranger.goto(url)
            assert refused is not None
            assert refused.status == 403
            await page.wait_for_selector("#live[data-state='live']")
            before = await _num_ended(page)
            assert (seen.complaints, seen.hosts) == ([], {urlsplit(url).netloc})
            await server.aclose()
            await page.wait_for_selector("#live[data-state='stale']")
            await serve(server)
            await page.wait_for_selector("#live[data-state='live']")
            assert await _num_ended(page) > before
