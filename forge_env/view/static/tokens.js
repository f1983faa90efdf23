// Colours of tokens: one text a turn, coloured by ranges, so that 32,000 tokens are a few hundred elements.
const SCALE = [[0.9, null], [0.5, "t1"], [0.1, "t2"], [0.01, "t3"], [0, "t4"]];
let data = null, turns = [], starts = [];

const byProbability = (logprob) => { const p = Math.exp(logprob); return SCALE.find(([least]) => p >= least)[1]; };
const keys = {
  logprob: [["p ≥ 0.9", ""], ["p < 0.9", "c1"], ["< 0.5", "c2"], ["< 0.1", "c3"], ["< 0.01", "c4"]],
  advantage: [["positive: probability increases", "c5"], ["negative: probability decreases", "c3"]],
  mask: [["sampled", "c6"], ["not sampled: masked", ""]],
};
let versions = [];

function classOf(mode, turn, place) {
  if (mode === "logprob") return byProbability(turn.logprobs[place]);
  if (mode === "version") return ["t6", "t5", "t1", "t3", "t2", "t4"][versions.indexOf(turn.versions[place]) % 6];
  if (mode === "advantage") return data.advantage === null || data.advantage === 0 ? null : data.advantage > 0 ? "t5" : "t3";
  return "t6";
}

function paint(mode) {
  const found = new Map(["t1", "t2", "t3", "t4", "t5", "t6"].map((name) => [name, []]));
  data.turns.forEach((turn, number) => {
    const text = turns[number]?.firstChild;
    if (!text) return;
    let from = 0, kind = classOf(mode, turn, 0);
    for (let place = 1; place <= turn.lengths.length; place += 1) {
      const next = place < turn.lengths.length ? classOf(mode, turn, place) : undefined;
      if (next === kind) continue;
      const start = starts[number][from], end = Math.min(starts[number][place], text.length);
      if (kind && end > start) found.get(kind).push(new StaticRange({ startContainer: text, startOffset: start, endContainer: text, endOffset: end }));
      from = place; kind = next;
    }
  });
  CSS.highlights.clear();
  for (const [name, ranges] of found) if (ranges.length) CSS.highlights.set(name, new Highlight(...ranges.slice(0, 30000)));
  const room = document.querySelector("[data-token-key]");
  const named = mode === "version" ? versions.slice(0, 12).map((version, place) => [`version ${version}`, ["c6", "c5", "c1", "c3", "c2", "c4"][place % 6]]) : keys[mode];
  room.replaceChildren(...named.map(([label, name]) => {
    const mark = document.createElement("i"), item = document.createElement("span");
    if (name) mark.className = name;
    item.append(mark, ` ${label}`);
    return item;
  }));
}

function tokenAt(event) {
  const range = document.caretPositionFromPoint ? document.caretPositionFromPoint(event.clientX, event.clientY) : null;
  const old = !range && document.caretRangeFromPoint ? document.caretRangeFromPoint(event.clientX, event.clientY) : null;
  const node = range?.offsetNode ?? old?.startContainer, offset = range?.offset ?? old?.startOffset;
  const number = turns.findIndex((turn) => turn.firstChild === node);
  if (number < 0) return null;
  let low = 0, high = starts[number].length - 1;
  while (low < high - 1) { const middle = (low + high) >> 1; if (starts[number][middle] <= offset) low = middle; else high = middle; }
  return [number, low];
}

export async function startTokens() {
  const holder = document.querySelector("[data-tokens]");
  if (!holder) return;
  const answer = await fetch(holder.dataset.tokens);
  if (!answer.ok) return;
  data = await answer.json();
  turns = [...holder.querySelectorAll("[data-turn]")];
  starts = data.turns.map((turn) => { let at = 0; return [0, ...turn.lengths.map((length) => (at += length))]; });
  versions = [...new Set(data.turns.flatMap((turn) => turn.versions))].sort((a, b) => a - b);
  if (typeof Highlight === "undefined") { document.querySelector("[data-token-key]").textContent = "this browser does not support text highlights"; return; }
  const inputs = [...document.querySelectorAll("[data-token-bar] input")];
  const asked = new URL(location.href).searchParams.get("colour");
  for (const input of inputs) {
    if (input.value === asked) input.checked = true;
    input.addEventListener("change", () => {
      paint(input.value);
      const address = new URL(location.href);
      address.searchParams.set("colour", input.value);
      history.replaceState(null, "", address);
    });
  }
  paint(inputs.find((input) => input.checked)?.value ?? "logprob");
  const tip = document.querySelector("[data-token-tip]");
  holder.addEventListener("mousemove", (event) => {
    const found = tokenAt(event);
    if (!found) { tip.hidden = true; return; }
    const [number, place] = found, turn = data.turns[number];
    if (place >= turn.ids.length) { tip.hidden = true; return; }
    const text = turns[number].firstChild.data.slice(starts[number][place], starts[number][place + 1]);
    const p = 100 * Math.exp(turn.logprobs[place]);
    tip.textContent = `${JSON.stringify(text)}  id ${turn.ids[place]}\nlog-prob ${turn.logprobs[place].toPrecision(3)}  p ${p.toFixed(p < 99.95 ? 1 : 2)} %\nversion ${turn.versions[place]}${data.advantage === null ? "" : `\n${data.learned ? "advantage" : "reward minus group mean"} ${data.advantage.toFixed(3)}`}`;
    tip.hidden = false;
    tip.style.left = `${Math.min(event.pageX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.pageY + 18}px`;
  });
  holder.addEventListener("mouseleave", () => { tip.hidden = true; });
  holder.dataset.painted = "true";
}
