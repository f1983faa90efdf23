// Curves: one cursor over all, drag zooms all, a click leads to the step's episodes. The state is in the address.
const charts = [];
let holder = null, data = null, zoom = null, smooth = 0, log = false;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const DASHES = [[], [4, 3], [1, 3], [9, 3]];
const colour = (place) => css(`--s${place % 6}`);
const make = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value); else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
};
const short = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) if (size >= limit) return `${+(value / { G: 1e9, M: 1e6, k: 1e3 }[unit]).toPrecision(3)}${unit}`;
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(4));
};

function smoothed(values) {
  // An exponential mean that is not drawn to its beginning.
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = smooth * mean + (1 - smooth) * value;
    weight = smooth * weight + (1 - smooth);
    return mean / weight;
  });
}

function aligned(chart) {
  const steps = [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const columns = [steps], series = [{}], bands = [];
  const width = chart.key === "reward" ? 2 : 1.5;
  const put = (line, values) => { const column = new Array(steps.length).fill(null); line.x.forEach((x, index) => { column[place.get(x)] = log && values[index] <= 0 ? null : values[index]; }); return column; };
  chart.lines.forEach((line) => {
    const paint = colour(line.colour);
    if (line.e.length) {
      columns.push(put(line, line.y.map((y, n) => y + line.e[n])), put(line, line.y.map((y, n) => y - line.e[n])));
      const hidden = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      series.push({ ...hidden }, { ...hidden });
      bands.push({ series: [series.length - 2, series.length - 1], fill: paint + "26" });
    }
    const few = line.e.length > 0 || line.x.length <= 2;
    if (smooth > 0 && !line.e.length && line.x.length > 4) {
      columns.push(put(line, line.y));
      series.push({ stroke: paint + "44", width: 1, points: { show: false }, spanGaps: true });
      columns.push(put(line, smoothed(line.y)));
    } else columns.push(put(line, line.y));
    series.push({ label: line.label, stroke: paint, width, spanGaps: true, points: { show: few, size: 6, fill: paint }, _line: line, dash: DASHES[line.dash % 4] });
  });
  return { columns, series, bands };
}

// A histogram a step: cells as dark as their share, on the same steps and under the same cursor as the curves.
function cells(chart, plot) {
  const pen = plot.ctx, steps = plot.data[0], { left, top, width, height } = plot.bbox, paint = colour(0);
  const most = Math.max(1e-9, ...chart.lines.flatMap((line) => line.y));
  pen.save(); pen.beginPath(); pen.rect(left, top, width, height); pen.clip();
  pen.fillStyle = paint;
  chart.lines.forEach((line, row) => {
    const y = plot.valToPos(row + 1, "y", true), h = plot.valToPos(row, "y", true) - y;
    line.y.forEach((share, at) => {
      if (!share) return;
      const begin = at ? (steps[at - 1] + steps[at]) / 2 : steps[0] - ((steps[1] ?? steps[0] + 1) - steps[0]) / 2;
      const end = at < steps.length - 1 ? (steps[at] + steps[at + 1]) / 2 : steps[at] + (steps[at] - (steps[at - 1] ?? steps[at] - 1)) / 2;
      const x = Math.round(plot.valToPos(begin, "x", true));
      pen.globalAlpha = 0.08 + 0.92 * (share / most);
      pen.fillRect(x, Math.round(y), Math.round(plot.valToPos(end, "x", true)) - x, Math.round(y + h) - Math.round(y));
    });
  });
  pen.restore();
}

function draw(entry) {
  const { chart, room } = entry;
  entry.plot?.destroy();
  const { columns, series, bands } = chart.strip ? { columns: [chart.lines[0].x, ...chart.lines.map((line) => line.y)], series: [{}, ...chart.lines.map((line) => ({ label: line.label, stroke: "transparent", width: 0, points: { show: false }, _line: line }))], bands: [] } : aligned(chart);
  const large = chart.key === "reward", bins = chart.lines.length;
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const all = columns.slice(1).flat().filter((value) => value !== null);
  const unit = all.length && all.every((value) => value >= -0.05 && value <= 1.05) && (large || Math.max(...all) > 0.5);
  const options = {
    width: Math.max(room.clientWidth, 120), height: large ? Math.max(230, Math.min(340, innerWidth / 4)) : 140,
    legend: { show: false }, series, bands, padding: [10, 16, 0, 0],
    cursor: { sync: { key: "runs" }, drag: { x: true, y: false, setScale: false }, points: { size: 7 }, y: false },
    scales: { x: { time: false, ...(zoom ? { range: zoom } : {}) }, y: chart.strip ? { range: [0, bins] } : log ? { distr: 3 } : unit ? { range: [0, 1] } : {} },
    axes: [{ ...axis, size: 26, space: 60, incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000] }, { ...axis, size: chart.strip ? 76 : 46, space: large ? 44 : 34,
      ...(chart.strip ? { grid: { show: false }, splits: () => chart.lines.map((_, row) => row + 0.5).filter((_, row) => bins <= 6 || row % 2 === 0), values: (_, ticks) => ticks.map((tick) => chart.lines[Math.floor(tick)].label) } : { values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) }) }],
    hooks: {
      setSelect: [(plot) => { const { left, width } = plot.select; if (width > 6) setZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]); }],
      setCursor: [(plot) => tell(entry, plot)],
      ...(chart.strip ? { drawAxes: [(plot) => cells(chart, plot)] } : {}),
    },
  };
  entry.plot = new uPlot(options, columns, room);
  entry.plot.over.addEventListener("click", (event) => {
    const link = holder.dataset.stepLink, at = entry.plot.cursor.idx;
    if (!link || at === null || at === undefined || entry.moved) return;
    event.preventDefault();
    location.href = link + Math.max(1, columns[0][at]);
  });
  entry.plot.over.addEventListener("mousedown", (event) => { entry.moved = false; entry.from = event.clientX; });
  entry.plot.over.addEventListener("mouseup", (event) => { entry.moved = Math.abs(event.clientX - entry.from) > 4; });
  entry.plot.over.addEventListener("mouseleave", () => { entry.tip.hidden = true; });
}

function tell(entry, plot) {
  const { tip, chart } = entry, { idx, left, top } = plot.cursor;
  if (idx === null || idx === undefined || left < 0 || !plot.over.matches(":hover")) { tip.hidden = true; return; }
  const lines = [`step ${plot.data[0][idx]}`];
  plot.series.forEach((series, place) => {
    const value = plot.data[place][idx];
    if (!series._line || value === null || value === undefined || (chart.strip && !value)) return;
    const at = series._line.x.indexOf(plot.data[0][idx]);
    lines.push(`${series.label}  ${chart.strip ? `${(100 * value).toFixed(0)} %` : short(value)}${series._line.e.length && at >= 0 ? ` ± ${short(series._line.e[at])}` : ""}`);
  });
  tip.textContent = lines.join("\n");
  tip.hidden = false;
  const room = entry.card.clientWidth;
  tip.style.left = `${Math.min(left + plot.over.offsetLeft + 26, room - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.max(top - 10, 28)}px`;
}

function setZoom(range) {
  zoom = range;
  document.querySelector("[data-zoom-out]")?.toggleAttribute("hidden", !zoom);
  keep();
  charts.forEach(draw);
}

function keep() {
  if (!holder.dataset.charts) return; // a file's address stays as it is
  const address = new URL(location.href);
  const set = (name, value) => (value ? address.searchParams.set(name, value) : address.searchParams.delete(name));
  set("smooth", smooth ? String(smooth) : "");
  set("log", log ? "1" : "");
  set("zoom", zoom ? zoom.map((value) => +value.toPrecision(5)).join("_") : "");
  history.replaceState(null, "", address);
}

function save(entry, kind) {
  const link = make("a");
  const name = entry.chart.title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  if (kind === "png") {
    const source = entry.plot.ctx.canvas, ratio = devicePixelRatio || 1, top = 34 * ratio;
    const canvas = make("canvas");
    canvas.width = source.width; canvas.height = source.height + top;
    const pen = canvas.getContext("2d");
    pen.fillStyle = css("--card"); pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(source, 0, top);
    pen.font = `600 ${13 * ratio}px system-ui, sans-serif`; pen.fillStyle = css("--ink");
    pen.fillText(entry.chart.title, 12 * ratio, 22 * ratio);
    let x = 24 * ratio + pen.measureText(entry.chart.title).width;
    pen.font = `${12 * ratio}px system-ui, sans-serif`;
    if (!entry.chart.strip) entry.chart.lines.forEach((line) => { pen.fillStyle = colour(line.colour); pen.fillText(line.label, x, 22 * ratio); x += pen.measureText(line.label).width + 14 * ratio; });
    canvas.toBlob((blob) => { link.href = URL.createObjectURL(blob); link.download = `${name}.png`; link.click(); setTimeout(() => URL.revokeObjectURL(link.href), 1000); });
    return;
  }
  const address = new URL(`${holder.dataset.export}.${kind}`, location.href);
  address.searchParams.set("key", entry.chart.key);
  if (zoom) { address.searchParams.set("low", zoom[0]); address.searchParams.set("high", zoom[1]); }
  link.href = address; link.download = `${name}.${kind}`; link.click();
}

function build() {
  charts.splice(0).forEach((entry) => entry.plot?.destroy());
  holder.replaceChildren();
  const still = make("div", { class: "charts" }), rest = make("div", { class: "charts" });
  const moving = data.charts.filter((chart) => !chart.constant);
  const known = moving.filter((chart) => chart.known);
  for (const chart of data.charts) {
    const card = make("section", { class: `chart${chart.key === "reward" ? " large" : ""}`, "data-chart": chart.key });
    const title = make("h3", {}, chart.title, " ", make("small", {}, chart.unit));
    const keys = make("div", { class: "legend" });
    if (chart.lines.length > 1 && !chart.strip) chart.lines.forEach((line) => keys.append(make("span", {}, make("i", { class: `s${line.colour % 6}${line.dash ? " dashed" : ""}` }), line.label)));
    const room = make("div"), tip = make("div", { class: "tip", hidden: "" });
    card.append(make("header", {}, title, keys), room, tip);
    const entry = { chart, room, card, tip };
    if (!holder.dataset.charts || holder.dataset.export) {
      const kinds = holder.dataset.export ? ["png", "svg", "csv"] : ["png"];
      const buttons = kinds.map((kind) => make("button", { type: "button", onclick: () => save(entry, kind) }, kind.toUpperCase()));
      card.append(make("details", { class: "save" }, make("summary", {}, "save"), ...buttons));
    }
    if (chart.constant && chart.key !== "reward") {
      const value = chart.strip ? chart.lines.filter((line) => line.y[0]).map((line) => line.label).join(", ") : chart.lines.map((line) => short(line.y[0])).join(", ");
      still.append(make("p", { class: "soft" }, `${chart.title}: ${value}`));
    } else {
      (known.includes(chart) ? holder : rest).append(card);
      charts.push(entry);
    }
  }
  const fold = (title, room) => {
    const part = make("details", { class: "fold" }, make("summary", {}, `${title} (${room.children.length})`), room);
    part.addEventListener("toggle", () => charts.filter((entry) => room.contains(entry.card)).forEach((entry) => { if (part.open) draw(entry); }));
    if (room.children.length) holder.append(part);
  };
  fold("further metrics", rest);
  fold("constant over the whole run", still);
  charts.filter((entry) => !rest.contains(entry.card)).forEach(draw);
  holder.dataset.drawn = String(charts.length);
}

async function source() {
  if (!holder.dataset.charts) return document.getElementById("charts").textContent; // a saved page
  const answer = await fetch(holder.dataset.charts);
  return answer.ok ? answer.text() : holder.text;
}

export async function refreshCharts(again) {
  if (!holder) return;
  if (again) { charts.forEach((entry) => { if (entry.plot) draw(entry); }); return; }
  const text = await source();
  if (text === holder.text) return;
  holder.text = text;
  data = JSON.parse(text);
  const open = [...holder.querySelectorAll("details.fold[open] > summary")].map((summary) => summary.textContent.split(" (")[0]);
  build();
  for (const fold of holder.querySelectorAll("details.fold")) if (open.some((name) => fold.textContent.startsWith(name))) fold.open = true;
}

export function startCharts() {
  holder = document.querySelector("[data-charts]");
  if (!holder || typeof uPlot === "undefined") return;
  const asked = new URL(location.href).searchParams;
  smooth = Math.min(0.98, Math.max(0, +asked.get("smooth") || 0));
  log = asked.get("log") === "1";
  const range = (asked.get("zoom") || "").split("_").map(Number);
  if (range.length === 2 && range[0] < range[1]) zoom = range;
  const slider = document.querySelector("[data-smooth]"), box = document.querySelector("[data-log]"), out = document.querySelector("[data-zoom-out]");
  slider.value = smooth; box.checked = log; out.hidden = !zoom;
  slider.addEventListener("input", () => { smooth = +slider.value; charts.forEach((entry) => { if (entry.plot) draw(entry); }); keep(); });
  box.addEventListener("change", () => { log = box.checked; keep(); charts.forEach((entry) => { if (entry.plot) draw(entry); }); });
  out.addEventListener("click", () => setZoom(null));
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; charts.forEach((entry) => entry.plot?.setSize({ width: entry.room.clientWidth, height: entry.plot.height })); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => refreshCharts(true));
  refreshCharts(false).catch(() => {});
}
