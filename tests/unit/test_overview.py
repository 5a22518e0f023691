"""The one picture of a router: from traffic over fake engines to plain values, text and HTTP."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from router.dashboard import charts_path, dashboard_app
from router.explain import explain, explanation_text, read_body, wait_for_statuses
from router.http_call import DEPARTURE, Departure
from router.keys import ANYBODY, Caller
from router.overview import BatchJob, Flag, Overview, Viewpoint
from router.service import Router
from router.top import picture, plain_text
from shared.errors import ContextTooLong, InvalidRequest, NoWorker
from shared.transport.base import Timings
from shared.vtime import run_virtual
from tests.support.lines import lines_to
from tests.support.rack import ask, mirrored_rack, prompt, rack

JOB = BatchJob("batch_1", "in_progress", 100, 40, 2, 0.0)
SLOW = {"token_s": 0.005, "prefill_s_per_token": 0.001}


async def _serve_some(router: Router, workers: Any) -> None:
    """Six prompts with one beginning and two with another."""
    for tail in range(6):
        await ask(router, f"r{tail}", prompt(1, 320, tail=tail))
        await workers.settle()
    for tail in range(2):
        await ask(router, f"s{tail}", prompt(2, 160, tail=tail))
        await workers.settle()


async def _jobs() -> list[BatchJob]:
    return [JOB]


def _overview_after_traffic() -> Overview:
    async def scenario() -> Overview:
        async with mirrored_rack(3, **SLOW) as workers, workers.router() as router:
            await _serve_some(router, workers)
            await asyncio.sleep(2.0)
            return await Viewpoint(router, _jobs).take()

    taken: Overview = run_virtual(scenario())
    return taken


@pytest.fixture(scope="module")
def overview() -> Overview:
    return _overview_after_traffic()


def test_overview_tells_what_was_served(overview: Overview) -> None:
    assert (overview.model, overview.policy, overview.block_size_tokens) == ("fake", "cost", 16)
    assert (overview.num_requests, overview.num_under_way, overview.num_held) == (8, 0, 0)
    assert overview.now.cached_share == overview.now.matched_share == overview.now.possible_share
    assert overview.now.cached_share == pytest.approx((5 * 320 + 160) / (6 * 340 + 2 * 180))
    assert overview.now.ttft_p50_s is not None
    assert overview.history
    assert overview.flags == ()


def test_overview_tells_of_every_worker(overview: Overview) -> None:
    assert [row.worker for row in overview.workers] == ["w0", "w1", "w2"]
    assert {row.state for row in overview.workers} == {"ready"}
    assert sum(row.num_requests for row in overview.workers) == 8
    for row in overview.workers:
        assert row.kv_blocks is not None
        blocks = row.kv_blocks
        assert blocks.pinned + blocks.running + blocks.shared + blocks.private + blocks.free == row.kv_total_blocks
        assert (row.hit_rate is None) == (row.num_requests == 0)


def test_overview_tells_which_worker_holds_which_prefix(overview: Overview) -> None:
    holders = {decision.request: decision.worker for decision in overview.decisions}
    assert [(group.num_tokens, group.worker_to_blocks) for group in overview.groups] == [
        (320, {holders["r5"]: 20}),
        (160, {holders["s1"]: 10}),
    ]


def test_overview_tells_decisions_newest_first_with_all_candidates(overview: Overview) -> None:
    newest = overview.decisions[0]
    assert [decision.request for decision in overview.decisions] == ["s1", "s0", *(f"r{n}" for n in range(5, -1, -1))]
    assert (newest.matched_tokens, newest.cached_tokens, newest.possible_tokens) == (160, 160, 160)
    assert {candidate.worker for candidate in newest.candidates} == {"w0", "w1", "w2"}
    assert newest.candidates[0].worker == newest.worker
    assert "own_s" in newest.candidates[0].terms


def test_overview_is_json_without_numbers_that_json_has_not(overview: Overview) -> None:
    text = json.dumps(overview.to_json(), allow_nan=False)
    assert json.loads(text)["jobs"] == [
        {
            "id": "batch_1",
            "state": "in_progress",
            "num_rows": 100,
            "num_done": 40,
            "num_failed": 2,
            "began_at": 0.0,
        }
    ]


def test_overview_of_a_router_without_workers_says_so() -> None:
    async def scenario() -> None:
        async with rack(0) as workers, workers.router() as router:
            state = (await Viewpoint(router).take()).to_json()
            assert [flag["name"] for flag in state["flags"]] == ["no worker"]
            assert (state["workers"], state["groups"], state["decisions"]) == ([], [], [])
            assert state["now"]["ttft_p50_s"] is None
            assert "no worker" in plain_text(state)

    run_virtual(scenario())


def test_overview_names_workers_that_hang_and_takes_them_for_used_where_all_do() -> None:
    async def scenario() -> None:
        async with lines_to(2) as lines:
            lines.freeze(*lines.worker_to_connect)
            await asyncio.sleep(1.1 * Timings().pulse_s)
            overview = await Viewpoint(lines.router).take()
            assert [row.state for row in overview.workers] == ["silent", "silent"]
            (flag,) = overview.flags
            assert (flag.name, flag.text.endswith("unless all do: w0, w1.")) == ("silent", True)
            assert "silent" in plain_text(overview.to_json())

    run_virtual(scenario())


def test_overview_names_workers_that_are_not_used_for_their_caches() -> None:
    async def scenario() -> None:
        async with rack(1) as workers:
            await workers.start_worker("odd", parity=b"another")
            async with workers.router() as router:
                viewpoint = Viewpoint(router, flags=[lambda: [Flag("tokenizer", "Its cache is off.")]])
                flags = (await viewpoint.take()).flags
                assert [flag.name for flag in flags] == ["parity", "tokenizer"]
                assert flags[0].text.endswith("describe: odd.")

    run_virtual(scenario())


# In a terminal.


def test_top_shows_figures_workers_prefixes_decisions_and_jobs(overview: Overview) -> None:
    text = plain_text(overview.to_json())
    lines = text.splitlines()
    assert lines[0].startswith("kvroute ")
    assert "fake  policy cost" in lines[0]
    assert "from cache 73% (matched 73%, possible 73%)" in text
    assert sum(line.startswith(("w0", "w1", "w2")) for line in lines) == 3
    assert "batch_1" in text
    assert "40/100" in text
    assert max(map(len, lines)) <= 110
    assert "\x1b" not in text


def test_top_draws_blocks_in_proportion_and_none_of_a_kind_away(overview: Overview) -> None:
    state = overview.to_json()
    state["workers"] = state["workers"][:1]
    state["workers"][0] |= {
        "kv_blocks": {"pinned": 1, "running": 299, "shared": 300, "private": 0, "free": 600},
        "kv_total_blocks": 1200,
    }
    assert f"#{'=' * 6}{'s' * 6}{'.' * 11} 600/1,200" in plain_text(state)


@pytest.mark.parametrize("width", [80, 110])
def test_top_cuts_reasons_and_bars_alone_where_names_are_long(overview: Overview, width: int) -> None:
    state = overview.to_json()
    for one in (*state["workers"], *state["decisions"]):
        one["worker"] = f"127.0.0.1:{20_000 + int(one['worker'][1:])}"
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(picture(state))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines if " ready " in line] == [f"127.0.0.1:{20_000 + n}" for n in range(3)]
    ages_ms = [f"{1e3 * row['status_age_s']:.0f} ms" for row in state["workers"]]
    assert [" ".join(line.split()[-2:]) for line in lines if " ready " in line] == ages_ms
    (place,) = [number for number, line in enumerate(lines) if line.endswith("why")]
    assert lines[place].split() == ["time", "request", "worker", "from", "cache", "held", "TTFT", "why"]
    for line, decision in zip(lines[place + 1 :], state["decisions"], strict=False):
        assert f"{1e3 * decision['ttft_s']:.0f} ms" in line
        assert line.split()[2] == decision["worker"]


# The decision for one prompt.


def test_explained_decision_is_the_one_that_is_then_made() -> None:
    async def scenario() -> None:
        async with mirrored_rack(3, **SLOW) as workers, workers.router() as router:
            await _serve_some(router, workers)
            num_decisions = router.watch.decisions.num_decisions
            token_ids = prompt(1, 320, tail=99)
            told = await explain(router, token_ids)
            assert router.watch.decisions.num_decisions == num_decisions
            assert (router.fleet.num_bookings, len(router.queue)) == (0, 0)
            _, trace = await ask(router, "x", token_ids)
            assert (told.worker, told.candidates[0].matched_tokens) == (trace.worker, trace.matched_tokens)
            made = router.watch.decisions.last(1)[0]
            assert [candidate.worker for candidate in told.candidates] == [
                candidate.worker for candidate in made.candidates
            ]
            assert told.is_sent_now
            text = explanation_text(told.to_json())
            assert text.startswith("340 tokens, 21 full blocks, policy cost\nwould go to ")
            assert {line.split()[0] for line in text.splitlines()[3:]} == {"w0", "w1", "w2"}

    run_virtual(scenario())


def test_salted_prompt_finds_nothing_of_unsalted_ones() -> None:
    async def scenario() -> None:
        async with mirrored_rack(2, **SLOW) as workers, workers.router() as router:
            await _serve_some(router, workers)
            told = await explain(router, prompt(1, 320, tail=99), salt="tenant")
            assert {candidate.matched_tokens for candidate in told.candidates} == {0}

    run_virtual(scenario())


def test_prompt_that_no_worker_can_hold_is_refused_as_its_request_would_be() -> None:
    async def scenario() -> None:
        async with rack(1, max_model_len_tokens=512) as workers, workers.router() as router:
            with pytest.raises(ContextTooLong, match="no worker's context is longer than 512 tokens"):
                await explain(router, prompt(1, 600, tail=0))

    run_virtual(scenario())


def test_nothing_is_explained_without_workers() -> None:
    async def scenario() -> None:
        async with rack(0) as workers, workers.router() as router:
            with pytest.raises(NoWorker):
                await explain(router, [1, 2, 3])

    run_virtual(scenario())


def test_statuses_are_waited_for() -> None:
    async def scenario() -> None:
        async with rack(2) as workers, workers.router() as router:
            await wait_for_statuses(router)
            assert all(member.status is not None for member in router.fleet.members())

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "must be an object"),
        (b'{"model": "m"}', "must be an object with messages or prompt"),
        (b"{}", "exactly one is needed"),
        (b'{"prompt": "a", "messages": []}', "exactly one is needed"),
        (b'{"prompt": 3}', "prompt: not a string"),
        (b'{"prompt": "a", "cache_salt": 3}', "cache_salt"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_bad_prompt_is_refused_with_what_is_wrong(raw: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_body(raw)


# Over HTTP.


class Front:
    """A dashboard asked without a server."""

    def __init__(self, overview: Overview, **options: Any) -> None:
        self.num_taken = 0
        self.overview = overview
        self._app = dashboard_app(self.take, **options)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self._answer),
            base_url="http://test",
            headers={"content-type": "application/json"},
        )

    async def take(self, with_history: bool) -> Overview:
        self.num_taken += 1
        return self.overview

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app({**scope, DEPARTURE: Departure()}, receive, send)


async def test_page_and_assets_allow_nothing_from_elsewhere(overview: Overview) -> None:
    front = Front(overview)
    async with front.client as client:
        page = await client.get("/dashboard")
        script = await client.get("/dashboard/static/dashboard.js")
        charts = await client.get("/dashboard/static/plotly.min.js")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "<script>" not in page.text
    assert "style=" not in page.text
    assert "http://" not in page.text + script.text
    assert "https://" not in page.text + script.text
    assert (page.status_code, script.status_code, charts.status_code) == (200, 200, 200)
    assert charts.content == charts_path().read_bytes()


async def test_unchanged_asset_is_not_sent_again(overview: Overview) -> None:
    async with Front(overview).client as client:
        first = await client.get("/dashboard/static/dashboard.css")
        again = await client.get("/dashboard/static/dashboard.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fdemo.yaml", "demo.yaml", "grafana.json"])
async def test_no_other_file_is_served(overview: Overview, name: str) -> None:
    async with Front(overview).client as client:
        assert (await client.get(f"/dashboard/static/{name}")).status_code == 404


async def test_snapshot_is_the_overview(overview: Overview) -> None:
    async with Front(overview).client as client:
        answer = await client.get("/dashboard/snapshot.json")
    assert answer.json() == json.loads(json.dumps(overview.to_json()))
    assert answer.headers["cache-control"] == "no-store"


async def test_prompt_is_explained_and_a_bad_one_refused(overview: Overview) -> None:
    async def explained(raw: bytes, caller: Caller) -> dict[str, Any]:
        assert caller is ANYBODY
        if read_body(raw).text == "no worker":
            raise NoWorker("no worker takes requests now", retry_after_s=2.0)
        return {"worker": "w1"}

    async with Front(overview, explain=explained).client as client:
        assert (await client.post("/dashboard/explain", content=b'{"prompt": "a"}')).json() == {"worker": "w1"}
        refused = [
            await client.post("/dashboard/explain", content=content)
            for content in (b"{}", b'{"prompt": "no worker"}', b" " * ((4 << 20) + 1))
        ]
        # What a page of another site can have a browser send.
        as_text = {"content-type": "text/plain"}
        form = await client.post("/dashboard/explain", content=b'{"prompt": "a"}', headers=as_text)
        assert (form.status_code, form.json()["error"]["param"]) == (400, "content-type")
    told = [(one.status_code, one.json()["error"]["code"], one.headers["x-should-retry"]) for one in refused]
    assert told == [
        (400, "invalid_value", "false"),
        (503, "service_unavailable", "true"),
        (413, "request_too_large", "false"),
    ]
    assert refused[1].headers["retry-after-ms"] == "2000"


def test_prompt_to_explain_that_trickles_in_is_given_up(overview: Overview) -> None:
    async def scenario() -> None:
        async def trickle() -> AsyncIterator[bytes]:
            while True:
                yield b" "
                await asyncio.sleep(1.0)

        async def explained(raw: bytes, caller: Caller) -> dict[str, Any]:
            raise AssertionError("it never comes whole")

        async with Front(overview, explain=explained).client as client:
            late = await client.post("/dashboard/explain", content=trickle())
        assert (late.status_code, late.json()["error"]["code"]) == (408, "request_timeout")

    run_virtual(scenario())


class Viewer:
    """One who reads the stream of events, without a server in between."""

    def __init__(self, app: Any) -> None:
        self.events: asyncio.Queue[bytes] = asyncio.Queue()
        self._gone = asyncio.Event()
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "GET",
            "path": "/dashboard/events",
            "raw_path": b"/dashboard/events",
            "root_path": "",
            "query_string": b"",
            "headers": [],
            "asgi": {"spec_version": "2.4", "version": "3.0"},
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and message.get("body"):
            self.events.put_nowait(message["body"])

    async def stop(self) -> None:
        self._gone.set()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def test_stream_tells_a_picture_each_second_that_all_viewers_share(overview: Overview) -> None:
    async def scenario() -> None:
        front = Front(overview)
        app = dashboard_app(front.take)
        viewers = [Viewer(app) for _ in range(5)]
        for viewer in viewers:
            assert (await viewer.events.get()).startswith(b"retry: 2000\ndata: {")
        assert front.num_taken == 5  # the first one of each has the history
        began_at_s = asyncio.get_running_loop().time()
        for _ in range(10):
            for viewer in viewers:
                assert (await viewer.events.get()).startswith(b"data: {")
        assert asyncio.get_running_loop().time() - began_at_s == pytest.approx(10.0, abs=0.1)
        assert front.num_taken == 15
        for viewer in viewers:
            await viewer.stop()

    run_virtual(scenario())


def test_stream_ends_with_the_server(overview: Overview) -> None:
    async def scenario() -> None:
        ending = asyncio.Event()
        viewer = Viewer(dashboard_app(Front(overview).take, is_ending=ending.is_set))
        await viewer.events.get()
        ending.set()
        async with asyncio.timeout(3.0):
            await viewer.task

    run_virtual(scenario())
