// All charts share one x axis: zooming in one of them zooms all.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#3b82f6", "#ef4444", "#10b981", "#f59e0b", "#8b5cf6", "#ec4899", "#14b8a6", "#84a016"];
const HEIGHT = 220, NEAR_PX = 5;
const LOOKS = ["calm", "turn", "bad"];
const DAY_S = 86400;
const CLOCK_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200,
  DAY_S, 2 * DAY_S, 7 * DAY_S, 30 * DAY_S];
const AXES = { time: "time (UTC)", seconds: "seconds at work", steps: "steps", samples: "samples" };
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let axis = "time", shown = null, plots = [];

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= unit) return +(value / unit).toPrecision(4) + letter;
  if (size > 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(+value.toPrecision(4));
}

function clock(at) {
  const text = new Date(at * 1000).toISOString();
  return shown.max - shown.min > DAY_S ? text.slice(5, 16).replace("T", " ") : text.slice(11, 19);
}

// Lines are interrupted while the run was not running.
function pauses(plot) {
  const places = (range) => range.map((at) => plot.valToPos(at, "x", true));
  return axis === "time" ? data.pauses.map(places) : [];
}

// x and y of a line, without points that the run was rolled back behind.
function table(line) {
  const xs = [], ys = [];
  data.sources[line.source][axis].forEach((x, i) => {
    if (x !== null) { xs.push(x); ys.push(line.y[i]); }
  });
  return [xs, ys];
}

function tables(chart) {
  const all = chart.lines.map(table);
  const isOne = chart.lines.every((line) => line.source === chart.lines[0].source);
  return isOne ? [all[0][0], ...all.map((one) => one[1])] : uPlot.join(all);
}

function extent() {
  let min = Infinity, max = -Infinity;
  for (const source of Object.values(data.sources))
    for (const x of source[axis]) if (x !== null) { min = Math.min(min, x); max = Math.max(max, x); }
  return max > min ? { min, max } : { min: min - 1, max: min + 1 };
}

function show(range) {
  shown = range;
  for (const plot of plots) plot.setScale("x", range);
}

function follow(plot, key) {
  const { min, max } = plot.scales.x;
  if (key === "x" && shown && min !== null && (min !== shown.min || max !== shown.max))
    show({ min, max });
}

function drawEvents(plot) {
  if (!document.getElementById("marks").checked) return;
  const { left, top, width, height } = plot.bbox, pen = plot.ctx;
  const marks = new Map();  // Of several marks at one place the most severe is drawn.
  for (const event of data.events) {
    const x = Math.round(plot.valToPos(event[axis], "x", true));
    if (x < left || x > left + width) continue;
    if (!marks.has(x) || LOOKS.indexOf(event.look) > LOOKS.indexOf(marks.get(x)))
      marks.set(x, event.look);
  }
  pen.save();
  pen.lineWidth = devicePixelRatio;
  pen.globalAlpha = 0.6;
  for (const [x, look] of marks) {
    pen.strokeStyle = css("--" + look);
    pen.beginPath();
    pen.moveTo(x, top);
    pen.lineTo(x, top + height);
    pen.stroke();
  }
  pen.restore();
}

function tellEvent(plot) {
  const x = plot.cursor.left;
  if (x === undefined || x < 0 || !plot.root.matches(":hover")) return;
  const near = data.events.filter((e) => Math.abs(plot.valToPos(e[axis], "x") - x) <= NEAR_PX);
  document.getElementById("event").textContent = near.slice(0, 3).map((e) => e.text).join(" · ");
}

function options(chart, width) {
  const isLog = chart.loss && document.getElementById("log").checked;
  const side = {
    stroke: () => css("--faint"), grid: { stroke: () => css("--line"), width: 1 },
    ticks: { stroke: () => css("--line"), width: 1 },
  };
  const name = AXES[axis], told = axis === "time" ? clock : short;
  return {
    width, height: HEIGHT,
    scales: { x: { time: false }, y: isLog ? { distr: 3 } : {} },
    cursor: {
      sync: { key: "dlctl" }, drag: { x: true, y: false },
      bind: { dblclick: () => () => { show(extent()); return null; } },
    },
    axes: [
      { ...side, size: 32, space: 80, ...(axis === "time" ? { incrs: CLOCK_S } : {}), values: (_, ticks) => ticks.map(told) },
      { ...side, size: 60, values: (_, ticks) => ticks.map((v) => v === null ? "" : short(v)) },
    ],
    series: [
      { label: name, value: (_, v) => v === null ? "–" : told(v) },
      ...chart.lines.map((line, i) => ({
        label: line.name, stroke: COLORS[i % COLORS.length], width: 1.5, spanGaps: false, gaps: pauses,
        points: { show: line.y.length < 60 }, value: (_, v) => short(v),
      })),
    ],
    hooks: { draw: [drawEvents], setScale: [follow], setCursor: [tellEvent] },
  };
}

function build() {
  const main = document.getElementById("charts");
  for (const plot of plots) plot.destroy();
  plots = [];
  shown = extent();
  main.replaceChildren();
  for (const chart of data.charts) {
    const figure = document.createElement("figure"), head = document.createElement("h2");
    const unit = document.createElement("small");
    head.textContent = chart.title + " ";
    unit.textContent = chart.unit;
    head.append(unit);
    figure.append(head);
    main.append(figure);
    const box = document.createElement("div");
    figure.append(box);
    plots.push(new uPlot(options(chart, box.clientWidth), tables(chart), box));
  }
  show(extent());
}

for (const [name, label] of Object.entries(AXES)) {
  const button = document.createElement("button");
  button.textContent = label;
  button.setAttribute("aria-pressed", name === axis);
  button.onclick = () => {
    axis = name;
    for (const other of button.parentNode.children)
      other.setAttribute("aria-pressed", other === button);
    build();
  };
  document.getElementById("axes").append(button);
}
document.getElementById("log").onchange = build;
document.getElementById("marks").onchange = () => plots.forEach((plot) => plot.redraw(false));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  plots.forEach((plot) => plot.redraw(false)));
addEventListener("resize", () => plots.forEach((plot) =>
  plot.setSize({ width: plot.root.parentNode.clientWidth, height: HEIGHT })));
build();
