/**
 * Line charts with bands: SVG, drawn in pixels of the screen, themed by CSS alone.
 *
 *   const chart = lineChart({title: "Reward", description: "Mean over all responses"});
 *   chart.update([{name: "mean", points: [[0, 0.1], [1, 0.2]], band: [[0, 0, 0.2], [1, 0.1, 0.3]]}]);
 *
 * Series are drawn in the colours --series-1.. and in different dashes, so that colour is not the only sign. The plot
 * is a slider for keyboards and screen readers: arrow keys move through the points, and its value is read out in words.
 */

import { el, number, percent, setText, svg } from "./dom.js";
import {
  extent,
  linear,
  logTicks,
  nearest,
  niceDomain,
  thin,
  thinBand,
  ticks,
  trailingMean,
  wholeTicks,
} from "./scales.js";
import { ValueTable } from "./valuetable.js";

const MOST_POINTS = 600; // that are drawn of a series
const MARGIN = { top: 8, right: 10, bottom: 22, left: 48 };
const DASHES = ["", "6 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 2", "8 2 1 2"];
const NUM_COLOURS = 8;
const NUM_LINES = 5; // of the grid, about
const SMOOTHED = 50; // a smoothed line is the mean over one of so many parts of its points
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const STEPS = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -10, PageUp: 10 };

/**
 * `isPercent`: values are shares. `isLog`: a logarithmic scale, as long as all values are above 0. `domain`: the least
 * that the y axis shows. `x`: what x is, in one word. `level`: of the heading. `height`: of the plot, in
 * pixels. `testId`: for tests.
 */
export function lineChart({
  title,
  unit = "",
  description = "",
  isPercent = false,
  isLog = false,
  domain = null,
  x = "iteration",
  level = 3,
  height = 168,
  testId = null,
}) {
  return new LineChart({ title, unit, description, isPercent, isLog, domain, x, level, height, testId });
}

class LineChart {
  constructor(options) {
    this.options = options;
    this.series = [];
    this.xs = []; // of all series, sorted
    this.cursor = null; // the x that is pointed at; null: the newest
    this.isSmooth = false;
    this.isDue = false;
    this.build();
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  build() {
    const { title, unit, description, x, level, height, testId } = this.options;
    this.at = el("span", { class: "chart-at" });
    this.legend = el("ul", { class: "chart-legend" });
    this.svg = svg("svg", { class: "chart-svg", "aria-hidden": "true", height });
    this.plot = el(
      "div",
      {
        class: "chart-plot",
        role: "slider",
        tabindex: "0",
        style: { height: `${height}px` },
        "aria-label": `${title} by ${this.options.x}`,
      },
      this.svg,
    );
    this.table = new ValueTable({ title, unit, x });
    const about = description && el("p", { class: "chart-about" }, description);
    const summary = el(
      "summary",
      { "aria-label": `${title}: ${about ? "about it, and its values" : "its values"}` },
      about ? "About, values" : "Values",
    );
    this.details = el("details", { class: "chart-details" }, summary, about, this.table.element);
    this.element = el(
      "figure",
      { class: "chart", "data-testid": testId },
      el(
        "figcaption",
        {},
        el(`h${level}`, { class: "chart-title" }, title),
        unit && el("span", { class: "chart-unit" }, unit),
        this.at,
      ),
      this.legend,
      this.plot,
      this.details,
    );
    this.plot.addEventListener("pointermove", (event) => this.pointAtPixel(event.clientX));
    this.plot.addEventListener("pointerdown", (event) => this.pointAtPixel(event.clientX));
    this.plot.addEventListener("pointerleave", () => this.point(null));
    this.plot.addEventListener("blur", () => this.point(null));
    this.plot.addEventListener("keydown", (event) => this.onKey(event));
    this.details.addEventListener("toggle", () => this.fillTable());
  }

  /** [{name, points: [[x, y], ...], band: [[x, low, high], ...]}, ...], each sorted by x. Drawn with the next frame. */
  update(series) {
    this.series = series;
    const xs =
      series.length === 1
        ? series[0].points.map(([x]) => x)
        : [...new Set(series.flatMap((each) => each.points.map(([x]) => x)))].sort((a, b) => a - b);
    this.xs = xs;
    this.drawSoon();
  }

  /** Means over 2% of the points in front of the points themselves, which are faint then. */
  smooth(isOn) {
    this.isSmooth = isOn;
    this.drawSoon();
  }

  drawSoon() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.draw();
      this.fillTable();
    });
  }

  format(value) {
    return this.options.isPercent ? percent(value, value < 0.1 ? 1 : 0) : number(value, 3);
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const isLog = this.options.isLog && this.series.every(({ points }) => points.every(([, y]) => y > 0));
    this.scale = this.scales(width, isLog);
    this.svg.setAttribute("width", width);
    this.svg.replaceChildren(
      ...this.axes(width, isLog),
      ...this.series.map((each, index) => this.bandOf(each, index)).filter(Boolean),
      ...this.series.map((each, index) => this.lineOf(each, index)),
      (this.mark = svg("g", { class: "chart-mark" })),
    );
    this.drawLegend();
    this.showCursor();
  }

  scales(width, isLog) {
    const ys = this.series.flatMap(({ points, band = [] }) => [
      ...points.map(([, y]) => y),
      ...band.flatMap(([, low, high]) => [low, high]),
    ]);
    let [low, high] = extent([...ys, ...(this.options.domain ?? [])]) ?? [0, 1];
    const [top, bottom] = [MARGIN.top, this.options.height - MARGIN.bottom];
    const [left, right] = [MARGIN.left, width - MARGIN.right];
    const x = linear(this.xs.length ? [this.xs[0], this.xs[this.xs.length - 1]] : [0, 1], [left, right]);
    if (isLog) {
      const y = linear([Math.log10(low), Math.log10(high)], [bottom, top]);
      return { x, y: (value) => y(Math.log10(value)), low, high };
    }
    if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
    [low, high] = niceDomain([low, high]);
    return { x, y: linear([low, high], [bottom, top]), low, high };
  }

  axes(width, isLog) {
    const { x, y, low, high } = this.scale;
    const [left, right, bottom] = [MARGIN.left, width - MARGIN.right, this.options.height - MARGIN.bottom];
    const values = isLog ? logTicks(low, high, NUM_LINES) : ticks(low, high, NUM_LINES);
    const lines = values.map((value) =>
      svg("line", { class: "chart-grid", x1: left, x2: right, y1: y(value), y2: y(value) }),
    );
    const labels = values.map((value) =>
      svg("text", { class: "chart-tick", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, this.tick(value)),
    );
    const numbers = this.xs.length
      ? wholeTicks(this.xs[0], this.xs[this.xs.length - 1], Math.max(2, Math.floor(width / 60)))
      : [];
    const below = numbers.map((value) =>
      svg("text", { class: "chart-tick", x: x(value), y: bottom + 16, "text-anchor": "middle" }, number(value)),
    );
    return [...lines, ...labels, ...below];
  }

  /** Short enough for the margin. */
  tick(value) {
    if (this.options.isPercent) return percent(value, Number.isInteger(Math.round(value * 1e6) / 1e4) ? 0 : 1);
    return Math.abs(value) >= 10_000 ? COMPACT.format(value) : number(value, 3);
  }

  lineOf({ points }, index) {
    const window = this.isSmooth ? Math.floor(points.length / SMOOTHED) : 1;
    if (points.length === 1)
      return svg("circle", {
        class: colourOf(index),
        cx: this.scale.x(points[0][0]),
        cy: this.scale.y(points[0][1]),
        r: 3,
      });
    if (window < 2) return this.polyline(points, index, "chart-line");
    return svg(
      "g",
      {},
      this.polyline(points, index, "chart-line faint"),
      this.polyline(trailingMean(points, window), index, "chart-line strong"),
    );
  }

  polyline(points, index, kind) {
    const { x, y } = this.scale;
    const path = thin(points, MOST_POINTS)
      .map(([px, py]) => `${x(px).toFixed(1)},${y(py).toFixed(1)}`)
      .join(" ");
    return svg("polyline", {
      class: `${kind} ${colourOf(index)}`,
      points: path,
      "stroke-dasharray": DASHES[index % DASHES.length] || null,
    });
  }

  bandOf({ band = [] }, index) {
    if (band.length < 2) return null;
    const { x, y } = this.scale;
    const drawn = thinBand(band, MOST_POINTS);
    const above = drawn.map(([px, , high]) => `${x(px).toFixed(1)},${y(high).toFixed(1)}`);
    const below = drawn.map(([px, low]) => `${x(px).toFixed(1)},${y(low).toFixed(1)}`).reverse();
    return svg("polygon", { class: `chart-band ${colourOf(index)}`, points: [...above, ...below].join(" ") });
  }

  // ---- pointing at a value -----------------------------------------------------------------------------------------

  pointAtPixel(clientX) {
    if (!this.scale || !this.xs.length) return;
    const pixel = clientX - this.svg.getBoundingClientRect().left;
    this.point(this.xs[nearest(this.xs, pixel, this.scale.x)]);
  }

  onKey(event) {
    const index = this.cursor === null ? this.xs.length - 1 : nearest(this.xs, this.cursor);
    const moves = {
      Home: 0,
      End: this.xs.length - 1,
      ...(event.key in STEPS ? { [event.key]: index + STEPS[event.key] } : {}),
    };
    if (event.key === "Escape") this.point(null);
    if (!(event.key in moves) || !this.xs.length) return;
    event.preventDefault();
    this.point(this.xs[Math.min(this.xs.length - 1, Math.max(0, moves[event.key]))]);
  }

  /** Point at an x, as the user does: charts that are linked follow. null: at nothing. */
  point(x) {
    if (x === this.cursor) return;
    this.showAt(x);
    this.element.dispatchEvent(new CustomEvent("chart-point", { bubbles: true, detail: { x, chart: this } }));
  }

  /** Show the values at an x; null: the newest. */
  showAt(x) {
    this.cursor = x;
    if (this.mark) this.showCursor();
  }

  showCursor() {
    const x = this.cursor ?? (this.xs.length ? this.xs[this.xs.length - 1] : null);
    // Pointing at nothing shows the newest value of each, which some series have not at the same x.
    const values = this.series.map((each) => (this.cursor === null ? newestOf(each) : valueAt(each, x)));
    this.values.forEach((cell, index) => setText(cell, this.words(values[index])));
    const isOne = this.cursor !== null || values.every((value) => !value || value.x === values[0]?.x);
    const shown = isOne ? (values.find(Boolean)?.x ?? x) : x;
    setText(this.at, x === null ? "" : isOne ? `${this.options.x} ${number(shown)}` : "newest");
    this.describe(x, values);
    this.mark.replaceChildren(...(this.cursor === null ? [] : this.marksAt(x, values)));
  }

  marksAt(x, values) {
    const px = this.scale.x(x);
    const dots = values.map(
      (value, index) => value && svg("circle", { class: colourOf(index), cx: px, cy: this.scale.y(value.y), r: 3.5 }),
    );
    return [
      svg("line", { class: "chart-cursor", x1: px, x2: px, y1: MARGIN.top, y2: this.options.height - MARGIN.bottom }),
      ...dots.filter(Boolean),
    ];
  }

  words(value) {
    if (!value) return "–";
    const spread = value.band ? ` (${this.format(value.band[1])} to ${this.format(value.band[2])})` : "";
    return this.format(value.y) + spread;
  }

  describe(x, values) {
    const told = this.series.map((each, index) => `${each.name} ${this.words(values[index])}`).join(", ");
    const what = {
      "aria-valuemin": this.xs[0] ?? 0,
      "aria-valuemax": this.xs[this.xs.length - 1] ?? 0,
      "aria-valuenow": x ?? 0,
    };
    what["aria-valuetext"] =
      x === null ? "no values yet" : `${this.options.x} ${x}: ${told} ${this.options.unit}`.trim();
    for (const [name, value] of Object.entries(what)) this.plot.setAttribute(name, value);
  }

  drawLegend() {
    const names = JSON.stringify(this.series.map(({ name }) => name));
    if (names === this.names) return;
    this.names = names;
    this.values = this.series.map(() => el("span", { class: "chart-value" }));
    this.legend.replaceChildren(
      ...this.series.map(({ name }, index) => el("li", {}, swatch(index), el("span", {}, name), this.values[index])),
    );
  }

  /** Rows are made when somebody opens it. */
  fillTable() {
    if (!this.details.open) return this.table.clear();
    const names = this.series.map(({ name }) => name);
    this.table.fill(this.xs, names, (x) => this.series.map((each) => this.words(valueAt(each, x))));
  }
}

const colourOf = (index) => `series-${(index % NUM_COLOURS) + 1}`;

function swatch(index) {
  const line = svg("line", {
    class: `chart-line ${colourOf(index)}`,
    x1: 0,
    x2: 24,
    y1: 5,
    y2: 5,
    "stroke-dasharray": DASHES[index % DASHES.length] || null,
  });
  return svg("svg", { width: 24, height: 10, "aria-hidden": "true" }, line);
}

/** {x, y, band} of a series at exactly this x; null without one. */
export function valueAt({ points, band = [] }, x) {
  const index = nearest(points, x, ([px]) => px);
  if (index < 0 || points[index][0] !== x) return null;
  const at = nearest(band, x, ([px]) => px);
  return { x, y: points[index][1], band: at >= 0 && band[at][0] === x ? band[at] : null };
}

function newestOf(series) {
  const { points } = series;
  return points.length ? valueAt(series, points[points.length - 1][0]) : null;
}

/** Pointing at one of the charts within `container` points at the same x in all of them. `charts`: a function. */
export function link(container, charts) {
  container.addEventListener("chart-point", ({ detail }) => {
    for (const chart of charts()) if (chart !== detail.chart) chart.showAt(detail.x);
  });
}
