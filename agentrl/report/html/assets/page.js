"use strict";
/* What every page has: its data, elements made of text, numbers as people read them, and charts (drawn by uPlot).
 *
 * Nothing here or in a page's own scripts turns data into markup: `el` appends strings as text, and the page's policy
 * (trusted types) refuses innerHTML and its like.
 */

function pageData(revive) {
  return JSON.parse(document.getElementById("data").textContent, revive);
}

/** Decompress a block of the page: gzip in base64, in an element of its own. */
async function blockText(number) {
  const isThere = () => document.getElementById(`block-${number}`)?.nextSibling; // whole: what follows has begun
  if (!isThere() && document.readyState === "loading")
    await new Promise((go) => addEventListener("DOMContentLoaded", go, { once: true }));
  const text = document.getElementById(`block-${number}`).textContent;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

/** Make an element: attributes, listeners (`onclick: function`), and children, which are elements or text. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** Text with what cannot be seen, or turns the direction of writing, by its number. */
function plain(text) {
  return String(text).replace(
    HIDDEN,
    (letter) => `⟨U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`,
  );
}

const UNITS = ["", " k", " M", " G", " T"];

/** A number with a few digits, in the unit that its metric's name tells: bytes, seconds. */
function shown(number, name = "", digits = 4) {
  if (number === null || number === undefined || Number.isNaN(number)) return "–";
  if (name.endsWith("_bytes")) return `${short(number / 1e6, digits)} MB`;
  if (name.endsWith("_s") && !name.endsWith("per_s")) return `${short(number, 3)} s`;
  return short(number, digits);
}

function short(number, digits) {
  const size = Math.abs(number);
  if (size < 1e-12) return "0"; // what rounding leaves
  if (size >= 1e15 || (size > 0 && size < 1e-4)) return number.toExponential(2).replace("-", "−");
  let power = 0;
  while (size / 1000 ** power >= 100000 && power < 4) power += 1;
  const scaled = number / 1000 ** power;
  const text = Math.abs(scaled) >= 10 ** digits ? scaled.toFixed(0) : String(Number(scaled.toPrecision(digits)));
  return text.replace("-", "−") + UNITS[power];
}

function signed(number) {
  return (number > 0 ? "+" : "") + shown(number);
}

/** The value of a colour of page.css, as it is now. */
function color(name) {
  const probe = el("i", { class: "probe" });
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const NUM_COLORS = 8;
const faded = (name, share) => `color-mix(in srgb, ${name} ${share}%, transparent)`;

/* Charts ------------------------------------------------------------------------------------------------------- */

const charts = { all: new Set(), near: null };

/** A figure that is drawn once it comes near the window, and again where its size or the colours change. */
function chartFigure(attributes, heading, height, draw) {
  const canvas = el("div", { class: "canvas" });
  const figure = el("figure", { class: "chart", ...attributes }, heading, canvas);
  canvas.style.height = `${height}px`;
  let plot = null;
  const chart = {
    figure,
    redraw() {
      if (plot === null) return;
      plot.destroy();
      plot = null;
      chart.draw();
    },
    draw() {
      if (plot === null && canvas.clientWidth > 0) plot = draw(canvas, canvas.clientWidth, height);
    },
    resize() {
      if (plot !== null && canvas.clientWidth > 0 && plot.width !== canvas.clientWidth)
        plot.setSize({ width: canvas.clientWidth, height });
    },
  };
  figure.chart = chart;
  charts.near ??= new IntersectionObserver(
    (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => entry.target.chart.draw()),
    { rootMargin: "400px" },
  );
  charts.near.observe(figure);
  charts.all.add(chart);
  return figure;
}

function eachChart(act) {
  for (const chart of charts.all) {
    if (chart.figure.isConnected) act(chart);
    else charts.all.delete(chart);
  }
}

window.addEventListener("resize", () => eachChart((chart) => chart.resize()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => eachChart((chart) => chart.redraw()));

/** Weight of the steps before in what is drawn of a long curve: 0 draws each step as it is. */
const smoothing = { weight: 0 };
const SMOOTHED_POINTS = 30;

/** Means over the steps before that weigh less the older they are; what is missing stays so. */
function smoothed(values, weight) {
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + value;
    total = weight * total + 1;
    return sum / total;
  });
}

/** The room that the numbers of an axis need. */
function widthOf(_, values) {
  return 16 + 6.4 * Math.max(3, ...(values ?? []).map((value) => String(value).length));
}

/** From the lowest value to the highest, with room for a line where all are alike. */
function rangeOf(_, low, high) {
  if (low === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
  const room = (high - low) * 0.1;
  return [low >= 0 && low < 0.5 * high ? 0 : low - room, high + room];
}

/** What uPlot is told of every chart. */
function plotOptions(width, height, name, series, { unit = "", ...more } = {}) {
  const label = { labelSize: 16, labelGap: 0, labelFont: "11px system-ui, sans-serif" };
  const axis = {
    stroke: color("muted"),
    font: "11px system-ui, sans-serif",
    grid: { stroke: color("line"), width: 1 },
    ticks: { show: false },
    border: { show: false },
  };
  return {
    width,
    height,
    legend: { show: false },
    padding: [8, 10, 0, 0],
    cursor: { sync: { key: "step" }, y: false, points: { size: 6 } },
    scales: {
      x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
      y: { range: rangeOf },
    },
    axes: [
      {
        ...axis,
        size: 22,
        gap: 4,
        label: "step",
        ...label,
        space: 60,
        incrs: [1, 2, 5].flatMap((n) => [...Array(9).keys()].map((k) => n * 10 ** k)).sort((a, b) => a - b),
      },
      { ...axis, size: widthOf, gap: 6, space: 32, ...(unit ? { label: unit, ...label } : {}), values: (_, values) => values.map((value) => shown(value, name)) },
    ],
    series: [{}, ...series],
    ...more,
  };
}

/**
 * Draw curves over steps: the mean thick with its interval as a band, the runs thin. A curve is
 * `{name, color, steps, mean, low, high, runs}`, `runs` being `[{name, values}]`, and `color` 0 to 7; `low`, `high` and `runs`
 * may be left out. `title` names the figure, `metric` the unit of its numbers, `unit` the axis; a long curve is smoothed.
 */
function lineChart({ title, note = "", metric = title, unit = "", curves, height = 150 }) {
  const steps = [...new Set(curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const laid = (curve, values) => {
    const row = new Array(steps.length).fill(null);
    curve.steps.forEach((step, index) => (row[place.get(step)] = values[index]));
    return row;
  };
  const readout = el("output", { class: "readout", "aria-hidden": "true" });
  const last = curves.map((curve) => {
    const values = curve.mean.filter((value) => value !== null);
    return values.length ? `${shown(values[0], metric)} to ${shown(values.at(-1), metric)}` : "no value";
  });
  const words = curves.map((curve, index) => (curves.length > 1 ? `${curve.name}: ${last[index]}` : last[index]));
  const isAlone = steps.length < 2;

  function draw(canvas, width) {
    const [series, bands, columns, means] = [[], [], [steps], []];
    const add = (values, options) => columns.push(values) && series.push({ spanGaps: true, ...options });
    for (const curve of curves) {
      const stroke = color(`curve-${curve.color % NUM_COLORS}`);
      const runs = curve.runs ?? [];
      const isSmoothed = smoothing.weight > 0 && curve.steps.length >= SMOOTHED_POINTS;
      const even = (values) => laid(curve, isSmoothed ? smoothed(values, smoothing.weight) : values);
      if (curve.low && (runs.length === 0 || runs.length > 2)) {
        const bound = { stroke: "transparent", points: { show: false }, auto: runs.length === 0 }; // few seeds: wide bands
        add(even(curve.low), bound);
        add(even(curve.high), bound);
        bands.push({ series: [series.length, series.length - 1], fill: faded(stroke, 16) });
      }
      if (runs.length > 1)
        for (const run of runs)
          add(even(run.values), { stroke: faded(stroke, 38), width: 1, points: { show: false } });
      const line = { stroke, width: 2, points: { show: isAlone || curve.steps.length < 12, size: 5, fill: stroke } };
      const measured = runs.length > 1 ? { ...line, stroke: "transparent", auto: false } : { ...line, stroke: faded(stroke, 30) };
      add(laid(curve, curve.mean), isSmoothed ? { ...measured, width: 1 } : line);
      means.push([series.length, curve]); // pointed at, a step has its own value
      if (isSmoothed) add(even(curve.mean), line);
    }
    const setCursor = (plot) => {
      const at = plot.cursor.idx;
      if (at === null || at === undefined) return readout.replaceChildren(last.length === 1 ? ended(curves[0]) : "");
      const values = means
        .map(([number, curve]) => [curve, plot.data[number][at]])
        .filter(([, value]) => value !== null);
      const text = values.map(([curve, value]) =>
        curves.length > 1 ? `${curve.name} ${shown(value, metric)}` : shown(value, metric),
      );
      readout.replaceChildren(`step ${steps[at]}: ${text.join(" · ") || "–"}`);
    };
    return new uPlot(
      plotOptions(width, height, metric, series, { bands, unit, hooks: { setCursor: [setCursor] } }),
      columns,
      canvas,
    );
  }
  const ended = (curve) => {
    const values = curve.mean.filter((value) => value !== null);
    return values.length ? shown(values.at(-1), metric) : "";
  };
  readout.append(curves.length === 1 ? ended(curves[0]) : "");
  const heading = el(
    "figcaption",
    {},
    el("span", { class: "name" }, plain(title)),
    note && el("small", {}, note),
    readout,
  );
  return chartFigure({ role: "img", "aria-label": plain(`${title}, from ${words.join("; ")}`) }, heading, height, draw);
}

/** Draw parts of a whole over steps, one on the other: `parts` is `[{name, values}]`. */
function stackChart({ title, metric = title, unit = "", steps, parts, height = 180 }) {
  const total = steps.map(() => 0);
  const sums = parts.map((part) => part.values.map((value, index) => (total[index] += Math.max(0, value ?? 0))));
  const readout = el("output", { class: "readout", "aria-hidden": "true" });

  function draw(canvas, width) {
    const strokes = parts.map((_, index) => color(`curve-${index % NUM_COLORS}`));
    const series = sums.map((_, index) => ({
      stroke: strokes[index],
      width: 1,
      fill: index === 0 ? faded(strokes[index], 45) : undefined,
      points: { show: false },
    }));
    const bands = sums
      .slice(1)
      .map((_, index) => ({ series: [index + 2, index + 1], fill: faded(strokes[index + 1], 45) }));
    const setCursor = (plot) => {
      const at = plot.cursor.idx;
      if (at === null || at === undefined) return readout.replaceChildren();
      const text = parts.map((part) => `${part.name} ${shown(part.values[at], metric)}`);
      readout.replaceChildren(`step ${steps[at]}: ${text.join(" · ")}`);
    };
    const options = plotOptions(width, height, metric, series, { bands, unit, hooks: { setCursor: [setCursor] } });
    options.scales.y = { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] };
    return new uPlot(options, [steps, ...sums], canvas);
  }
  const means = parts.map(
    (part) => part.values.reduce((sum, value) => sum + (value ?? 0), 0) / Math.max(1, part.values.length),
  );
  const words = parts.map((part, index) => `${part.name} ${shown(means[index], metric)}`).join(", ");
  const legend = legendOf(parts.map((part, index) => ({ name: part.name, color: index })));
  const heading = el("figcaption", {}, el("span", { class: "name" }, title), legend, readout);
  return chartFigure(
    { class: "chart wide", role: "img", "aria-label": `${title}, on average ${words}` },
    heading,
    height,
    draw,
  );
}

/** Which colour is which, as a list. */
function legendOf(entries) {
  return el(
    "ul",
    { class: "legend" },
    entries.map((entry) =>
      el("li", {}, el("i", { class: `swatch curve-${entry.color % NUM_COLORS}` }), plain(entry.name)),
    ),
  );
}

/** A table: `columns` is `[{name, numeric}]`, `rows` lists of text or elements. */
function table(caption, columns, rows) {
  const kind = (index) => (columns[index].numeric ? "number" : null);
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el(
      "table",
      {},
      el("caption", {}, el("span", {}, caption)),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          columns.map((column, index) => el("th", { scope: "col", class: kind(index) }, column.name)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((row) =>
          el(
            "tr",
            {},
            row.map((cell, index) =>
              el(index === 0 ? "th" : "td", { class: kind(index), scope: index === 0 ? "row" : null }, cell),
            ),
          ),
        ),
      ),
    ),
  );
}
