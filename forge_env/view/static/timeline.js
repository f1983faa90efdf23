// The timeline: what every actor did when. The server sends what can be seen of a stretch.
const TOP = 26, LEFT = 136, GAP = 12;
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
let holder, canvas, tip, data = null, view = null, begin = 0, end = 0, asked = 0;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const said = (seconds) => (!seconds ? "0s" : seconds < 0.9995 ? `${+(seconds * 1000).toPrecision(3)}ms` : seconds < 60 ? `${+seconds.toPrecision(4)}s` : seconds < 3600 ? `${Math.floor(seconds / 60)}m${String(Math.floor(seconds % 60)).padStart(2, "0")}s` : `${Math.floor(seconds / 3600)}h${String(Math.floor((seconds % 3600) / 60)).padStart(2, "0")}m`);

async function load() {
  const mine = (asked += 1);
  const address = new URL(holder.dataset.timeline, location.href);
  if (view) { address.searchParams.set("from", view[0]); address.searchParams.set("to", view[1]); }
  address.searchParams.set("width", Math.round(holder.clientWidth * (devicePixelRatio || 1)));
  const answer = await fetch(address);
  if (!answer.ok || mine !== asked) return;
  data = await answer.json();
  begin = data.begin; end = data.end;
  view ??= [data.low, data.high];
  draw();
}

function layout() {
  const rows = [];
  let y = TOP, before = null;
  const many = data.lanes.filter((lane) => lane.many).length;
  for (const lane of data.lanes) {
    const height = lane.many ? (many > 60 ? 5 : 7) : 20;
    if (lane.track !== before) { y += before === null ? 0 : GAP; }
    rows.push({ lane, y, height, first: lane.track !== before, small: lane.many });
    y += height + (lane.many ? 1 : 3);
    before = lane.track;
  }
  for (const counter of data.counters) { y += GAP; rows.push({ counter, y, height: 30, first: true }); y += 30; }
  return { rows, height: y + 10 };
}

let placed = [];
function draw() {
  const ratio = devicePixelRatio || 1, width = holder.clientWidth, { rows, height } = layout();
  canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const [low, high] = view, left = width < 600 ? 78 : LEFT, px = (at) => left + ((at - low) / (high - low)) * (width - left - 8);
  pen.fillStyle = css("--card"); pen.fillRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
  const span = high - low, raw = span / Math.max(2, width / 130), power = 10 ** Math.floor(Math.log10(raw));
  const step = (raw > 0.5 ? STEPS : [1, 2, 5, 10].map((factor) => factor * power)).find((value) => value >= raw) ?? raw;
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) {
    pen.strokeStyle = css("--line"); pen.beginPath(); pen.moveTo(px(at) + 0.5, 0); pen.lineTo(px(at) + 0.5, height); pen.stroke();
    pen.fillStyle = css("--soft"); if (px(at) + 4 + pen.measureText(said(at)).width < width) pen.fillText(said(at), px(at) + 4, 11);
  }
  const paints = [0, 1, 2, 3, 4, 5].map((place) => css(`--s${place}`));
  const paint = data.names.map((name) => (name.wait ? css("--w0") : paints[+name.css.slice(1)] + (name.name === "group" ? "99" : "")));
  const tile = document.createElement("canvas"); tile.width = tile.height = 8;
  const brush = tile.getContext("2d"); brush.fillStyle = css("--w0"); brush.fillRect(0, 0, 8, 8); brush.strokeStyle = css("--w1"); brush.lineWidth = 2;
  brush.beginPath(); brush.moveTo(-2, 10); brush.lineTo(10, -2); brush.moveTo(-2, 2); brush.lineTo(2, -2); brush.moveTo(6, 10); brush.lineTo(10, 6); brush.stroke();
  const hatch = pen.createPattern(tile, "repeat"), ink = css("--ink"), on = css("--on-series");
  placed = [];
  pen.save(); pen.beginPath(); pen.rect(left, 0, width - left, height); pen.clip();
  for (const row of rows) {
    if (row.counter) {
      const most = Math.max(1e-9, ...row.counter.points.map((point) => point[1]));
      pen.strokeStyle = paints[0]; pen.beginPath();
      row.counter.points.forEach(([at, value], index) => { const y = row.y + row.height - (value / most) * (row.height - 4); if (index) pen.lineTo(px(at), y); else pen.moveTo(px(at), y); });
      pen.stroke();
      continue;
    }
    for (const [start, finish, name, whose] of row.lane.spans) {
      const x = px(start), w = Math.max(px(finish) - x - (finish - start > span / width ? 0.6 : 0), 0.7);
      pen.fillStyle = data.names[name].wait ? hatch : paint[name];
      pen.fillRect(x, row.y, w, row.height);
      placed.push([x, row.y, w, row.height, row.lane.track, data.names[name].name, whose, start, finish]);
      if (!row.small && w > 46) {
        const text = data.names[name].name, room = pen.measureText(text).width;
        if (room < w - 10) {
          if (data.names[name].wait) { pen.fillStyle = css("--w0"); pen.fillRect(Math.max(x, left) + 3, row.y + 3, room + 6, row.height - 6); }
          pen.fillStyle = data.names[name].wait ? ink : on; pen.fillText(text, Math.max(x, left) + 6, row.y + row.height / 2 + 0.5);
        }
      }
    }
  }
  pen.restore();
  pen.fillStyle = ink;
  for (const row of rows) if (row.first) pen.fillText((row.counter ? row.counter.name : row.lane.track).slice(0, 20).replace(/,.*/, (rest) => (width < 600 ? "" : rest)).slice(0, width < 600 ? 11 : 20), 10, row.y + Math.min(row.height, 20) / 2);
  pen.fillStyle = css("--soft");
  for (const row of rows) if (row.counter?.points.length) pen.fillText(`up to ${(+Math.max(...row.counter.points.map((point) => point[1])).toPrecision(3)).toLocaleString("en")}`, 10, row.y + 24);
  holder.dataset.drawn = String(placed.length);
}

let waiting = null;
function go(low, high) {
  const least = 1e-4, span = Math.min(Math.max(high - low, least), end - begin);
  low = Math.min(Math.max(low, begin), end - span);
  view = [low, low + span];
  draw();
  clearTimeout(waiting);
  waiting = setTimeout(() => { load().catch(() => {}); keep(); }, 120);
}
function keep() {
  const address = new URL(location.href);
  if (view[0] <= begin && view[1] >= end) { address.searchParams.delete("from"); address.searchParams.delete("to"); }
  else { address.searchParams.set("from", view[0].toFixed(4)); address.searchParams.set("to", view[1].toFixed(4)); }
  history.replaceState(null, "", address);
}
function zoom(factor, middle) { const [low, high] = view; go(middle - (middle - low) * factor, middle + (high - middle) * factor); }

export function startTimeline() {
  holder = document.querySelector("[data-timeline]");
  if (!holder) return;
  canvas = holder.querySelector("canvas"); tip = holder.querySelector(".tip");
  const wanted = new URL(location.href).searchParams, from = parseFloat(wanted.get("from")), to = parseFloat(wanted.get("to"));
  if (from >= 0 && to > from) view = [from, to];
  const left = () => (holder.clientWidth < 600 ? 78 : LEFT);
  const timeAt = (x) => view[0] + ((x - left()) / (holder.clientWidth - left() - 8)) * (view[1] - view[0]);
  holder.addEventListener("wheel", (event) => { if (!data) return; event.preventDefault(); zoom(Math.exp(event.deltaY * 0.0016), timeAt(event.offsetX)); }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => { drag = [event.clientX, ...view]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (!data) return;
    if (drag) { const moved = ((drag[0] - event.clientX) / (holder.clientWidth - left())) * (drag[2] - drag[1]); go(drag[1] + moved, drag[2] + moved); tip.hidden = true; return; }
    const found = placed.findLast(([x, y, w, h]) => event.offsetX >= x - 1 && event.offsetX <= x + Math.max(w, 2) && event.offsetY >= y - 1 && event.offsetY <= y + h + 1);
    if (!found) { tip.hidden = true; return; }
    const [, , , , track, name, whose, start, finish] = found;
    tip.textContent = `${track}: ${name}${whose ? ` (${whose})` : ""}\n${said(finish - start)} from ${said(start)}`;
    tip.hidden = false;
    tip.style.left = `${Math.min(event.offsetX + 14, holder.clientWidth - tip.offsetWidth - 6)}px`;
    tip.style.top = `${event.offsetY + 16 + tip.offsetHeight > canvas.clientHeight ? event.offsetY - tip.offsetHeight - 8 : event.offsetY + 16}px`;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  holder.addEventListener("dblclick", () => go(begin, end));
  holder.addEventListener("keydown", (event) => {
    if (!data) return;
    const span = view[1] - view[0], middle = (view[0] + view[1]) / 2;
    const act = { ArrowLeft: () => go(view[0] - span / 5, view[1] - span / 5), ArrowRight: () => go(view[0] + span / 5, view[1] + span / 5), "+": () => zoom(0.7, middle), "=": () => zoom(0.7, middle), "-": () => zoom(1.4, middle), 0: () => go(begin, end) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  addEventListener("resize", () => { if (data) draw(); });
  document.addEventListener("themed", () => { if (data) draw(); });
  load().catch(() => {});
}
