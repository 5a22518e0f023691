// The dashboard: shows one picture of a router after the other. All text goes in as text, never as markup.
"use strict";

const CHART_INTERVAL_MS = 1900;
const STALE_AFTER_S = 3;
const HISTORY_S = 300;
const MOST_DECISIONS = 20;
const POOL = ["pinned", "running", "shared", "private", "free"];
const STATES = {
  ready: "good", draining: "warn", resting: "warn", silent: "bad", away: "bad", suspected: "bad",
};
const CHARTS = [
  { id: "requests", title: "Requests per second", axis: "/s", lines: [["requests_per_s", "ended"], ["failures_per_s", "failed"]] },
  { id: "ttft", title: "Time to first token", axis: "s", lines: [["ttft_p50_s", "p50"], ["ttft_p95_s", "p95"]] },
  { id: "itl", title: "Inter-token latency", axis: "ms", scale: 1000, lines: [["itl_p50_s", "p50"], ["itl_p95_s", "p95"]] },
  { id: "cache", title: "Share of prompt tokens from cache", axis: "%", scale: 100, top: 100, lines: [["cached_share", "cached"], ["matched_share", "matched"], ["possible_share", "possible"]] },
];

const byId = (id) => document.getElementById(id);
const number = (value, digits = 0) => value == null ? "–" : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (share) => share == null ? "–" : `${number(share * 100)} %`;
const adaptive = (value) => value == null ? "–" : number(value, value < 10 ? 1 : 0);

function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 0.0995) return `${number(seconds * 1000, seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 1) return `${number(seconds * 1000)} ms`;
  if (seconds < 100) return `${number(seconds, seconds < 10 ? 2 : 1)} s`;
  return seconds < 7200 ? `${number(seconds / 60)} min` : `${number(seconds / 3600)} h`;
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// One child for each item, found again by its key, in the order of the items. What is open or focused stays so.
function keyed(parent, items, keyOf, create, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let before = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    known.delete(key);
    if (!child) {
      child = create(item);
      child.dataset.key = key;
    }
    if (child === before) before = before.nextElementSibling;
    else parent.insertBefore(child, before);
    update(child, item);
  }
  for (const child of known.values()) child.remove();
}

// Header, flags, figures.

function showHead(view) {
  const shown = view.routers.length;
  const others = view.num_routers > shown ? ` of ${view.num_routers}` : "";
  const whose = shown > 1 ? `${shown}${others} routers` : view.routers[0].router + (others && `, one${others}`);
  setText(byId("about"), `${view.model} · policy ${view.policy} · ${whose} · up ${duration(view.uptime_s)} · ${view.version}`);
  document.title = `${adaptive(view.now.requests_per_s)} req/s · kvroute`;
  setText(byId("window"), number(view.window_s));
  keyed(byId("flags"), view.flags, (flag) => flag.name + flag.text,
    (flag) => make("li", { class: "flag" }, make("b", {}, flag.name), flag.text), () => {});
}

function tile(label, extra = "") {
  const element = make("div", { class: `tile ${extra}` }, make("dt", {}, label));
  element.append(make("dd", { class: "value" }), make("dd", { class: "more" }));
  byId("tiles").append(element);
  return element;
}

function bullet(label, extra = "") {
  return make("div", { class: `bullet ${extra}` }, make("span", {}, label),
    make("span", { class: "track", "aria-hidden": "true" }, make("span", { class: "fill" })), make("span", { class: "num" }));
}

function setBullet(element, share) {
  element.children[1].firstChild.style.width = `${(share ?? 0) * 100}%`;
  setText(element.children[2], percent(share));
}

const tiles = {
  requests: tile("Requests"), ttft: tile("Time to first token"), itl: tile("Inter-token latency"),
  tokens: tile("Output"), cache: tile("Prompt tokens from cache", "cache"), queue: tile("Under way"), workers: tile("Workers ready"),
};
const bullets = [bullet("cached", "first"), bullet("matched"), bullet("possible")];
tiles.cache.querySelector(".more").className = "bullets";
tiles.cache.querySelector(".bullets").append(...bullets);

function setTile(element, value, unit, more) {
  const shown = element.querySelector(".value");
  if (!shown.firstChild) shown.append("", make("small"));
  if (shown.firstChild.nodeValue !== value) shown.firstChild.nodeValue = value;
  setText(shown.lastChild, unit);
  if (more != null) setText(element.querySelector(".more"), more);
}

function showTiles(view) {
  const now = view.now;
  const split = (text) => text.includes(" ") ? text.split(" ") : [text, ""];
  setTile(tiles.requests, adaptive(now.requests_per_s), "/s", `${number(view.num_requests)} ended · ${adaptive(now.failures_per_s)} failed/s`);
  setTile(tiles.ttft, ...split(duration(now.ttft_p50_s)), `p50 · p95 ${duration(now.ttft_p95_s)}`);
  setTile(tiles.itl, ...split(duration(now.itl_p50_s)), `p50 · p95 ${duration(now.itl_p95_s)}`);
  setTile(tiles.tokens, number(now.output_tokens_per_s), "tok/s", `${number(now.prompt_tokens_per_s)} tok/s of prompts`);
  setTile(tiles.cache, ...split(percent(now.cached_share)), null);
  setTile(tiles.queue, number(view.num_under_way), "", `${number(view.num_held)} held · ${number(view.num_failovers)} failovers`);
  const ready = view.workers.filter((worker) => worker.state === "ready").length;
  setTile(tiles.workers, number(ready), `of ${number(view.workers.length)}`, ready === view.workers.length ? "all of them" : `${number(view.workers.length - ready)} not ready`);
  setBullet(bullets[0], now.cached_share);
  setBullet(bullets[1], now.matched_share);
  setBullet(bullets[2], now.possible_share);
}

// Charts.

let history = [];
let chartsAt = 0;

function makeCharts() {
  for (const chart of CHARTS) {
    const keys = make("span", { class: "keys" }, ...chart.lines.map(([, name], index) => make("span", { class: `key k${index + 1}` }, name)));
    const plot = make("div", { class: "plot", id: `plot-${chart.id}`, role: "img" });
    byId("charts").append(make("figure", { class: "chart" }, make("figcaption", {}, make("b", {}, chart.title), keys), plot));
  }
}

// Dearer than all else on the page, so not for every picture, and not where nobody sees it.
function showChartsIfDue() {
  if (document.hidden || performance.now() - chartsAt < CHART_INTERVAL_MS) return;
  chartsAt = performance.now();
  showCharts();
}

function showCharts() {
  if (!window.Plotly) return;
  const style = getComputedStyle(document.documentElement);
  const probe = byId("theme");
  const colour = (name) => { probe.style.outlineColor = `var(--${name})`; const value = getComputedStyle(probe).outlineColor; probe.style.outlineColor = ""; return value; };
  const colours = [colour("t1"), colour("t2"), colour("t6")];
  const grid = colour("line"), muted = colour("muted");
  const end = history.length ? history[history.length - 1].ends_at_s : 0;
  const xs = history.map((point) => point.ends_at_s - end);
  for (const chart of CHARTS) {
    const scale = chart.scale ?? 1;
    const lines = chart.lines.map(([key, name], index) => ({
      x: xs, y: history.map((point) => point[key] == null ? null : point[key] * scale), name,
      type: "scatter", mode: "lines", connectgaps: false,
      line: { width: 1.75, color: colours[index], dash: ["solid", "dash", "dot"][index] },
      hovertemplate: `%{y:.3~g} ${chart.axis}`,
    }));
    const highest = Math.max(1e-6, ...lines.flatMap((line) => line.y.filter((y) => y != null)));
    Plotly.react(`plot-${chart.id}`, lines, {
      margin: { l: 46, r: 18, t: 8, b: 26 }, showlegend: false, hovermode: "x unified", dragmode: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: style.fontFamily || "system-ui", size: 11, color: muted },
      hoverlabel: { bgcolor: colour("panel"), bordercolor: grid, font: { color: colour("text") } },
      xaxis: { range: [-HISTORY_S, 0], fixedrange: true, ticks: "outside", ticklen: 6, tickcolor: "rgba(0,0,0,0)", tickvals: [-300, -240, -180, -120, -60, 0], ticktext: ["−5 min", "−4", "−3", "−2", "−1", "now"], gridcolor: grid, zeroline: false, showline: false, hoverformat: ".0f", unifiedhovertitle: { text: "%{x} s" } },
      yaxis: { range: [0, chart.top ?? highest * 1.15], fixedrange: true, ticksuffix: ` ${chart.axis}`, nticks: 4, gridcolor: grid, zeroline: false, ticks: "outside", ticklen: 4, tickcolor: "rgba(0,0,0,0)" },
    }, { displayModeBar: false, responsive: true });
    const last = history[history.length - 1];
    const told = last ? chart.lines.map(([key, name]) => `${name} ${last[key] == null ? "unknown" : adaptive(last[key] * scale)}${last[key] == null ? "" : " " + chart.axis}`).join(", ") : "nothing yet";
    byId(`plot-${chart.id}`).setAttribute("aria-label", `${chart.title}, now: ${told}`);
  }
}

// Workers.

function makeLegend() {
  const words = { pinned: "pinned", running: "in use", shared: "shared", private: "private", free: "free" };
  byId("pool-legend").append(...POOL.map((kind) => make("li", {}, make("i", { class: kind, "aria-hidden": "true" }), words[kind])));
}

function makeWorker(worker) {
  const cell = (label, extra = "") => make("td", { role: "cell", class: extra, "data-label": label });
  const pool = make("td", { role: "cell", class: "pool-cell" },
    make("div", { class: "pool", role: "img" }, ...POOL.map((kind) => make("span", { class: kind }))), make("div", { class: "pool-text" }));
  return make("tr", { role: "row" },
    make("td", { role: "cell", class: "name" }, worker.worker, make("span", { class: "badge" })),
    make("td", { role: "cell" }, make("span", { class: "state" })),
    cell("Running", "num"), cell("Waiting", "num"), pool, cell("Hit rate", "num"), cell("Requests", "num"), cell("Status age", "num"));
}

function updateWorker(row, worker) {
  const cells = row.children;
  const badges = [worker.is_cache_aware ? "" : "not cache-aware", worker.tells_blocks ? "" : "hints only", worker.is_home ? "" : "away from home"].filter(Boolean);
  setText(cells[0].lastChild, badges.join(", "));
  const state = cells[1].firstChild;
  state.className = `state ${STATES[worker.state] ?? "warn"}`;
  setText(state, worker.state);
  row.classList.toggle("gone", worker.state === "away");
  row.title = `${worker.engine}, eviction ${worker.eviction}`;
  setText(cells[2], worker.num_running == null ? "–" : `${number(worker.num_running)} / ${number(worker.max_num_seqs)}`);
  setText(cells[3], number(worker.num_waiting));
  const blocks = worker.kv_blocks;
  const [bar, text] = cells[4].children;
  POOL.forEach((kind, index) => { bar.children[index].style.width = blocks ? `${blocks[kind] / worker.kv_total_blocks * 100}%` : "0"; });
  const told = blocks ? POOL.filter((kind) => blocks[kind]).map((kind) => `${number(blocks[kind])} ${kind === "running" ? "in use" : kind}`).join(" · ") : "not told yet";
  setText(text, told);
  bar.setAttribute("aria-label", `${number(worker.kv_total_blocks)} KV blocks: ${told}`);
  setText(cells[5], worker.is_cache_untold ? "not told" : percent(worker.hit_rate));
  setText(cells[6], number(worker.num_requests));
  setText(cells[7], duration(worker.status_age_s));
}

function showWorkers(view) {
  keyed(byId("workers").tBodies[0], view.workers, (worker) => worker.worker, makeWorker, updateWorker);
  byId("workers").hidden = !view.workers.length;
  byId("no-workers").hidden = view.workers.length > 0;
}

// Routers, where there are several behind this address.

let isOneOfSeveral = false;

function showRouters(view) {
  isOneOfSeveral = view.routers.length > 1;
  byId("routers-section").hidden = !isOneOfSeveral;
  if (!isOneOfSeveral) return;
  const cell = (label) => make("td", { role: "cell", class: "num", "data-label": label });
  keyed(byId("routers").tBodies[0], view.routers, (router) => router.router, (router) => make("tr", { role: "row" },
    make("td", { role: "cell", class: "name" }, router.router), make("td", { role: "cell" }, make("span", { class: "state" })),
    cell("Requests/s"), cell("TTFT p50"), cell("TTFT p95"), cell("From cache"), cell("Under way"), cell("Held"), cell("Ended"), cell("Up")),
  (row, router) => {
    const state = row.children[1].firstChild;
    state.className = `state ${router.is_store_resting ? "bad" : "good"}`;
    setText(state, router.is_store_resting ? "no store" : "store answers");
    const now = router.now;
    [adaptive(now.requests_per_s), duration(now.ttft_p50_s), duration(now.ttft_p95_s), percent(now.cached_share),
      number(router.num_under_way), number(router.num_held), number(router.num_requests), duration(router.uptime_s),
    ].forEach((text, index) => setText(row.children[index + 2], text));
  });
}

// Hot prefixes.

function showGroups(view) {
  const workers = view.workers.map((worker) => worker.worker);
  const table = byId("groups");
  const head = JSON.stringify(workers);
  if (table.dataset.workers !== head) {
    table.dataset.workers = head;
    table.tHead.replaceChildren(make("tr", {}, make("th", { scope: "col", class: "lead" }, make("span", { class: "hidden" }, "Prefix")),
      ...workers.map((worker) => make("th", { scope: "col", class: "col" }, worker))));
    table.tBodies[0].replaceChildren();
  }
  keyed(table.tBodies[0], view.groups, (group) => group.name + group.num_blocks, (group) => make("tr", {},
    make("th", { scope: "row", class: "lead" }, make("span", { class: "mono" }, group.name), make("span", { class: "sub" })),
    ...workers.map(() => make("td", {}, make("div", { class: "cell" }, make("span", { class: "fill", "aria-hidden": "true" }), make("b")))),
  ), (row, group) => {
    setText(row.firstChild.lastChild, `${number(group.num_tokens)} tokens · ${number(group.requests_per_min)}/min`);
    workers.forEach((worker, index) => {
      const cell = row.children[index + 1].firstChild;
      const held = group.worker_to_blocks == null || !view.workers[index].tells_blocks ? null : (group.worker_to_blocks[worker] ?? 0) / group.num_blocks;
      cell.firstChild.style.height = `${(held ?? 0) * 100}%`;
      setText(cell.lastChild, held == null ? "?" : held ? percent(held) : "·");
    });
  });
  table.hidden = !view.groups.length;
  byId("no-groups").hidden = view.groups.length > 0;
}

// Decisions.

let isHeld = false;
let decisions = [];
// Each router counts its own.
const nameOf = (decision) => `${decision.router}/${decision.number}`;

function makeDecision(decision) {
  const time = new Date(decision.decided_at * 1000).toLocaleTimeString("en-GB");
  const cache = make("span", { class: "fromcache" }, make("span"), make("span", { class: "track", "aria-hidden": "true" }, make("span", { class: "fill" })));
  const element = make("details", { class: "decision" }, make("summary", {},
    make("span", {}, time), make("span", { class: "request mono clip", title: decision.request }, decision.request),
    make("span", { class: "to clip name" }, decision.worker), cache,
    make("span", { class: "held num" }), make("span", { class: "first num" })));
  element.addEventListener("toggle", () => {
    if (element.open && !element.querySelector(".detail")) element.append(makeDetail(element.decision));
  });
  return element;
}

function updateDecision(element, decision) {
  element.decision = decision;
  const [, , , cache, held, first] = element.firstChild.children;
  const tokens = decision.cached_tokens ?? decision.matched_tokens;
  const guessed = decision.cached_tokens == null ? " expected" : "";
  setText(cache.firstChild, decision.is_cache_untold ? "not told" : `${number(tokens)} of ${number(decision.num_prompt_tokens)}${guessed}`);
  cache.lastChild.hidden = decision.is_cache_untold;
  cache.lastChild.firstChild.style.width = `${tokens / Math.max(1, decision.num_prompt_tokens) * 100}%`;
  setText(held, duration(decision.waited_s));
  setText(first, decision.ttft_s == null ? "…" : duration(decision.ttft_s));
}

function makeDetail(decision) {
  const terms = [...new Set(decision.candidates.flatMap((candidate) => Object.keys(candidate.terms)))];
  const most = Math.max(1e-9, ...decision.candidates.map((candidate) => candidate.total ?? 0));
  const cost = (value) => value == null ? "–" : Math.abs(value) >= 100 ? number(value) : value.toPrecision(3);
  const rows = decision.candidates.map((candidate, index) => make("tr", { class: index ? "" : "won" },
    make("td", {}, candidate.worker, index ? "" : make("span", { class: "badge" }, "chosen")),
    make("td", {}, make("div", { class: "cost", "aria-hidden": "true" }, ...terms.map((name, place) => {
      const part = make("span", { class: `c${place % 6 + 1}` });
      part.style.width = `${Math.max(0, candidate.terms[name] ?? 0) / most * 100}%`;
      return part;
    }))),
    make("td", { class: "num" }, cost(candidate.total)), make("td", { class: "num" }, number(candidate.matched_tokens)),
    ...terms.map((name) => make("td", { class: "num" }, cost(candidate.terms[name])))));
  const router = isOneOfSeveral ? ` Decided by ${decision.router}.` : "";
  const attempt = decision.attempt > 1 ? ` This was attempt ${decision.attempt}.` : "";
  const more = decision.num_more ? ` ${number(decision.num_more)} more candidates cost more.` : "";
  return make("div", { class: "detail" },
    make("p", { class: "why" }, `${decision.why}. An endless cache would have given ${number(decision.possible_tokens)} tokens.${attempt}${router}${more}`),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Costs of request ${decision.request}` },
      make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Worker"), make("th", { scope: "col" }, "Cost"),
        make("th", { scope: "col", class: "num" }, "total"), make("th", { scope: "col", class: "num" }, "matched"),
        ...terms.map((name, place) => make("th", { scope: "col", class: `num term c${place % 6 + 1}` }, name)))), make("tbody", {}, ...rows))));
}

function showDecisions(view) {
  if (!isHeld) {
    const open = new Set([...byId("decisions").children].filter((child) => child.open).map((child) => child.dataset.key));
    const fresh = new Set(view.decisions.map(nameOf));
    const old = decisions.filter((decision) => !fresh.has(nameOf(decision)));
    const merged = [...view.decisions, ...old];
    decisions = merged.filter((decision, index) => index < MOST_DECISIONS || open.has(nameOf(decision)));
  }
  keyed(byId("decisions"), decisions, nameOf, makeDecision, updateDecision);
  byId("no-decisions").hidden = decisions.length > 0;
}

// Store and jobs.

function showStore(view) {
  const store = view.store;
  const state = byId("store-state");
  state.className = `state ${store.is_resting ? "bad" : "good"}`;
  setText(state, store.is_resting ? "does not answer" : "answers");
  const facts = [...Object.entries(store.counts), ["requests routed without it", store.num_degraded]];
  keyed(byId("store"), facts.flatMap(([name, value]) => [[`t${name}`, name], [`d${name}`, number(value)]]), ([key]) => key,
    ([key]) => make(key[0] === "t" ? "dt" : "dd"), (element, [, text]) => setText(element, text));
}

function showJobs(view) {
  keyed(byId("jobs"), view.jobs, (job) => job.id, (job) => make("li", { class: "job" },
    make("div", { class: "row" }, make("span", { class: "mono" }, job.id), make("span", { class: "name" })),
    make("progress", { "aria-label": `Progress of ${job.id}` }), make("div", { class: "note" })), (element, job) => {
    setText(element.firstChild.lastChild, job.state.replace("_", " "));
    element.children[1].max = Math.max(1, job.num_rows);
    element.children[1].value = job.num_done;
    const failed = job.num_failed ? `, ${number(job.num_failed)} failed` : "";
    setText(element.lastChild, `${number(job.num_done)} of ${number(job.num_rows)} rows${failed}, for ${duration(view.taken_at - job.began_at)}`);
  });
  byId("no-jobs").hidden = view.jobs.length > 0;
}

// The stream.

let lastAt = null;

function show(view) {
  lastAt = performance.now();
  history = [...(view.history.length ? view.history : history), view.now];
  history = history.filter((point) => point.ends_at_s <= view.now.ends_at_s && view.now.ends_at_s - point.ends_at_s <= HISTORY_S);
  showHead(view);
  showTiles(view);
  showRouters(view);
  showWorkers(view);
  showGroups(view);
  showDecisions(view);
  showStore(view);
  showJobs(view);
  showChartsIfDue();
  showLife();
}

function showLife() {
  const live = byId("live");
  const age = lastAt == null ? null : (performance.now() - lastAt) / 1000;
  const state = age == null ? "waiting" : age > STALE_AFTER_S ? "stale" : "live";
  live.dataset.state = state;
  setText(byId("live-text"), state === "live" ? "Live" : state === "stale" ? `Stale for ${number(age)} s` : "Connecting");
  document.body.classList.toggle("stale", state === "stale");
}

function listen() {
  const stream = new EventSource("/dashboard/events");
  stream.onmessage = (event) => show(JSON.parse(event.data));
  stream.onerror = () => {
    showLife();
    // The browser comes back by itself after a broken connection, but not after an answer that it does not take.
    if (stream.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
}

// Theme: what the system has, or what was chosen here.

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText(byId("theme"), `Theme: ${theme}`);
  byId("theme").setAttribute("aria-label", `Colour theme: ${theme === "auto" ? "as the system" : theme}`);
  showCharts();
}

function storedTheme() {
  try { return localStorage.getItem("kvroute-theme"); } catch { return null; }
}

byId("theme").addEventListener("click", () => {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % THEMES.length];
  try { localStorage.setItem("kvroute-theme", theme); } catch { /* the choice lasts as long as the page */ }
  setTheme(theme);
});
byId("hold").addEventListener("click", (event) => {
  isHeld = !isHeld;
  event.target.setAttribute("aria-pressed", String(isHeld));
  setText(event.target, isHeld ? "Held" : "Hold");
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showCharts);

makeCharts();
makeLegend();
setTheme(THEMES.includes(storedTheme()) ? storedTheme() : "auto");
setInterval(showLife, 500);
listen();
