// What every page does: keys, light and dark, marks for comparing, and news while the page is looked at.
import { startCharts, refreshCharts } from "./charts.js";
import { startTokens } from "./tokens.js";
import { startTimeline } from "./timeline.js";

const root = document.documentElement;
const all = (query, within = document) => [...within.querySelectorAll(query)];
const one = (query) => document.querySelector(query);

// --- light and dark

const wanted = localStorage.getItem("forge-env-theme");
if (wanted) root.classList.add(wanted);
one("[data-theme-switch]")?.addEventListener("click", () => {
  const dark = root.classList.contains("dark") || (!root.classList.contains("light") && matchMedia("(prefers-color-scheme: dark)").matches);
  root.classList.remove("dark", "light");
  root.classList.add(dark ? "light" : "dark");
  localStorage.setItem("forge-env-theme", dark ? "light" : "dark");
  refreshCharts(true);
  document.dispatchEvent(new Event("themed"));
});

// --- keys

const dialog = one("[data-keys-dialog]");
one("[data-keys]")?.addEventListener("click", () => dialog.showModal());
let here = -1;

function step(by) {
  const rows = all("[data-row]");
  if (!rows.length) return;
  here = Math.min(Math.max(here + by, 0), rows.length - 1);
  rows.forEach((row, place) => row.classList.toggle("here", place === here));
  rows[here].scrollIntoView({ block: "nearest" });
  rows[here].querySelector("a")?.focus({ preventScroll: true });
}

const follow = (element) => element && element.click();
const keys = {
  j: () => step(1), k: () => step(-1),
  "[": () => follow(one("a[rel=prev]")), "]": () => follow(one("a[rel=next]")),
  g: () => follow(one("[data-group]")), t: () => follow(one("[data-tokens-tab]")),
  "/": () => one("[data-search]")?.focus(), "?": () => dialog.showModal(),
  u: () => { const parts = location.pathname.split("/"); location.href = parts[3] === "t" || parts[3] === "g" ? parts.slice(0, 3).join("/") + "/trajectories" : parts[3] ? parts.slice(0, 3).join("/") : "/"; },
  x: () => { const box = all("[data-row]")[Math.max(here, 0)]?.querySelector("[data-mark]"); if (box) { box.checked = !box.checked; marked(); } },
  c: () => { const button = one("[data-compare-button]"); if (button && !button.disabled) compare(); },
  Enter: () => { const row = all("[data-row]")[here]; if (row && document.activeElement === document.body) location.href = row.dataset.row; },
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
  const typing = event.target.closest("input:not([type=checkbox]):not([type=radio]):not([type=range]), select, textarea");
  if (typing) { if (event.key === "Escape") event.target.blur(); return; }
  const act = keys[event.key];
  if (act) { if (event.key !== "Enter") event.preventDefault(); act(); }
});

// --- marks

const boxes = () => all("[data-mark]").filter((box) => box.checked);
function compare() { location.href = "/compare?" + boxes().map((box) => box.dataset.mark).join("&"); }
function marked() {
  const chosen = boxes().map((box) => box.dataset.name);
  const button = one("[data-compare-button]");
  if (!button) return;
  button.disabled = chosen.length < 2;
  one("[data-marked]").textContent = chosen.length ? chosen.join(", ") : "select two or more runs, also with x";
}
document.addEventListener("change", (event) => { if (event.target.matches("[data-mark]")) marked(); });
one("[data-compare]")?.addEventListener("submit", (event) => { event.preventDefault(); compare(); });
marked();
all("[data-filters] select").forEach((field) => field.addEventListener("change", () => field.form.requestSubmit()));
one("[data-filters]")?.addEventListener("submit", (event) => {
  all("input, select", event.target).forEach((field) => { field.disabled = !field.value; });
});
addEventListener("pageshow", () => all("[data-filters] :disabled").forEach((field) => { field.disabled = false; }));

// --- news: the server is asked only while somebody looks

// A browser opens six connections to a server, and all tabs share them: at most three wait for news, others ask now and then.

const MOST_WAITING = 3, ASK_MS = 5000;
let wanted_news = false, source = null, release = null, timer = null, pending = false;
const sign = one("[data-live-sign]");

function listen() {
  if (!document.body.dataset.events || wanted_news || document.hidden) return;
  wanted_news = true;
  attempt(0);
}
function attempt(number) {
  if (!wanted_news) return;
  if (number === MOST_WAITING) { timer = setInterval(renew, ASK_MS); sign.hidden = false; return; }
  navigator.locks.request(`forge-env-news-${number}`, { ifAvailable: true }, (lock) => {
    if (!lock || !wanted_news) { attempt(number + 1); return undefined; }
    return new Promise((done) => { release = done; open(); });
  });
}
function open() {
  source = new EventSource(document.body.dataset.events);
  source.addEventListener("hello", () => { sign.hidden = false; });
  source.addEventListener("news", renew);
  source.onerror = () => { sign.hidden = true; };
}
function leave() {
  wanted_news = false;
  source?.close(); release?.(); clearInterval(timer);
  source = release = timer = null;
  sign.hidden = true;
}
document.addEventListener("visibilitychange", () => { if (document.hidden) leave(); else { listen(); renew(); } });
addEventListener("pagehide", leave);
addEventListener("pageshow", listen);

// Answers are computed anew whenever a run has grown: a page asks for them every few seconds at most.
const LEAST_MS = 4000;
let last = -LEAST_MS, later = null;

async function renew() {
  if (!document.body.dataset.events || document.hidden) return;
  const left = last + LEAST_MS - performance.now();
  if (pending || left > 0) { later ??= setTimeout(() => { later = null; renew(); }, Math.max(left, 200)); return; }
  pending = true;
  last = performance.now();
  try {
    // A document that a request parses runs nothing, and needs no HTML made of text here.
    const fresh = await new Promise((resolve, reject) => {
      const request = new XMLHttpRequest();
      request.open("GET", location.href);
      request.responseType = "document";
      request.onload = () => (request.status === 200 && request.response ? resolve(request.response) : reject(new Error(request.status)));
      request.onerror = reject;
      request.send();
    });
    for (const part of all("[data-live]")) {
      const other = fresh.querySelector(`[data-live="${CSS.escape(part.dataset.live)}"]`);
      if (!other || part.contains(document.activeElement) || part.querySelector("details[open]")) continue;
      if (part.dataset.live === "total" && part.textContent !== other.textContent) {
        const news = one("[data-news]");
        if (news) { news.hidden = false; news.querySelector("a").href = location.href; } // no row moves under the reader
      }
      if (part.innerHTML !== other.innerHTML) {
        const chosen = new Set(all("[data-mark]", part).filter((box) => box.checked).map((box) => box.dataset.mark));
        part.replaceChildren(...[...other.childNodes].map((node) => document.importNode(node, true)));
        all("[data-mark]", part).forEach((box) => { box.checked = chosen.has(box.dataset.mark); });
      }
    }
    await refreshCharts(false);
  } catch { /* the server is gone, or the run: the page stays as it is */ } finally { pending = false; }
}

startCharts();
startTokens();
startTimeline();
listen();
document.body.dataset.ready = "true";
