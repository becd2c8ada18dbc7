// Line charts with bands, drawn by uPlot; around each a legend, a table of its values, and a slider for keyboards and
// screen readers: arrow keys move through the points, and the values are read out in words.

import { number, percent } from "./format.js";
import { Component, createRef, Fold, html, moved, Table } from "./parts.js";
import { nearest } from "./series.js";
import { DASHES } from "./table.js";
import uPlot from "./vendor/uPlot.esm.js";

const colourName = (index) => `--series-${(index % 8) + 1}`;
const SMOOTHED = 50; // a smoothed line is the mean over one of so many parts of its points
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const STEPS = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -10, PageUp: 10 };
const FONT = "11px system-ui, sans-serif";
const LABEL_PX = 6.5; // width of a digit in that font

// ---- what uPlot draws: as wide as its element, in the colours of the theme ------------------------------------------

const plots = new Set(); // plots of the page
const colours = new Map();

function onThemeChange() {
  colours.clear();
  for (const plot of plots) plot.chart?.redraw(false);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onThemeChange);
new MutationObserver(onThemeChange).observe(document.documentElement, { attributeFilter: ["data-theme"] });

/** A CSS variable as the theme has it now: the variable itself holds both themes. */
export function colourOf(name, alpha = 1) {
  const key = `${name} ${alpha}`;
  if (!colours.has(key)) {
    const probe = document.createElement("span");
    probe.style.color = `color-mix(in srgb, var(${name}) ${100 * alpha}%, transparent)`;
    document.body.append(probe);
    colours.set(key, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(key);
}

/** `draw()` makes or refreshes `chart`, a uPlot in the element of `plot`, which is `width` by `height` pixels. */
export class Plot extends Component {
  plot = createRef();
  width = 0; // as the browser reports after each layout; 0: not in sight

  componentDidMount() {
    plots.add(this);
    this.observer = new ResizeObserver(([entry]) => this.resize(Math.floor(entry.contentRect.width)));
    this.observer.observe(this.plot.current);
    this.resize(Math.floor(this.plot.current.getBoundingClientRect().width)); // keys may come before the observer's call
  }

  componentWillUnmount() {
    plots.delete(this);
    this.observer.disconnect();
    this.chart?.destroy();
  }

  resize(width) {
    if (width === this.width) return;
    this.width = width;
    if (this.chart && width) this.chart.setSize({ width, height: this.height });
    this.draw(); // values may have come while it was out of sight
  }

  make(options, data) {
    this.chart?.destroy();
    const shared = { width: this.width, height: this.height, legend: { show: false } };
    this.chart = new uPlot({ ...shared, ...options }, data, this.plot.current);
    this.chart.root.setAttribute("aria-hidden", "true");
  }
}

// ---- a chart -------------------------------------------------------------------------------------------------------

/** A pointer shared by charts: the value that one of them points at is shown in all. */
export class Pointer {
  charts = new Set();

  /** null: at nothing, which shows the newest values. */
  point(x) {
    for (const chart of this.charts) chart.showAt(x);
  }
}

/**
 * `lines`: [{name, points: [[x, y], ...], band: [[x, low, high], ...]}, ...], each sorted by x; a new list when they
 * change. `bandName`: the words for a band. `ends`: the first and last iterations of the job. `isPercent`: values are
 * shares. `isLog`: a logarithmic scale, as long as all values are above 0. `domain`: the least that the y axis shows.
 * `level`: of the heading. `height`: of the plot, in pixels.
 */
export class Chart extends Plot {
  state = { at: null };

  get pointer() {
    return this.props.pointer ?? (this.own ??= new Pointer());
  }

  componentDidMount() {
    super.componentDidMount();
    this.pointer.charts.add(this);
  }

  componentDidUpdate({ lines, isSmooth }) {
    if (lines !== this.props.lines || isSmooth !== this.props.isSmooth) this.draw();
  }

  componentWillUnmount() {
    super.componentWillUnmount();
    this.pointer.charts.delete(this);
  }

  shouldComponentUpdate(props, state) {
    return state !== this.state || ["lines", "isSmooth", "title"].some((name) => props[name] !== this.props[name]);
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------

  /** The chart is made again only when its shape changes: other lines, another kind of scale. */
  draw() {
    if (!this.width) return;
    const { lines, isLog } = this.props;
    const canBeLog = Boolean(isLog) && lines.every(({ points, band = [] }) => [...points, ...band].every(([, y]) => y > 0));
    const { data, series, bands } = layersOf(lines, this.props.isSmooth);
    const shape = JSON.stringify([canBeLog, series.map(({ kind, index, isDot }) => [kind, index, isDot])]);
    if (shape === this.shape) {
      this.chart.setData(data);
      return;
    }
    this.shape = shape;
    const hooks = { draw: [() => this.placeCursor()] };
    const options = optionsOf(this.props, series, bands, canBeLog);
    options.scales.x.range = ({ data: [xs] }) => axisOf(xs[0] ?? null, xs.at(-1) ?? null, this.props.ends); // uPlot widens one x to 100
    this.make({ ...options, hooks }, data);
  }

  get height() {
    return this.props.height ?? 168;
  }

  get bandName() {
    return this.props.bandName ?? "one standard deviation";
  }

  // ---- pointing at a value -----------------------------------------------------------------------------------------

  showAt(x) {
    if (x === this.state.at) return;
    this.setState({ at: x });
    this.placeCursor(x);
  }

  placeCursor(x = this.state.at) {
    if (!this.chart) return; // it is just being made
    const left = x === null ? -10 : this.chart.valToPos(x, "x");
    this.chart.setCursor({ left, top: x === null ? -10 : 0 }, false);
  }

  onMove(event) {
    const xs = xsOf(this.props.lines);
    if (!this.chart || !xs.length) return;
    const pixel = event.clientX - this.chart.over.getBoundingClientRect().left;
    this.pointer.point(xs[nearest(xs, this.chart.posToVal(pixel, "x"))]);
  }

  onKey(event) {
    const xs = xsOf(this.props.lines);
    const index = this.state.at === null ? xs.length - 1 : nearest(xs, this.state.at);
    if (event.key === "Escape") return this.pointer.point(null);
    const to = moved(event, STEPS, index, xs.length - 1);
    if (to !== null) this.pointer.point(xs[to]);
  }

  // ---- words -------------------------------------------------------------------------------------------------------

  /** `isShort`: in a column, whose title says what stands in parentheses. */
  words(value, isShort = false) {
    if (!value) return "–";
    if (!value.band) return this.format(value.y);
    const range = `${this.rounded(value.band[1])} to ${this.rounded(value.band[2])}`;
    return isShort ? `${this.format(value.y)} (${range})` : `${this.format(value.y)}, ${this.bandName}: ${range}`;
  }

  rounded = (value) => (this.props.isPercent ? percent(value) : number(value, 2));

  format(value) {
    const { isPercent, lines } = this.props;
    if (lines !== this.measured) [this.measured, this.digits] = [lines, digitsFor(lines.flatMap(({ points }) => points))];
    return isPercent ? percent(value, value < 0.1 ? 1 : 0) : number(value, this.digits);
  }

  render({ title, unit = "", description = "", lines, level = 3, height = 168, testId, isWide }, { at }) {
    const xs = xsOf(lines);
    const x = at ?? xs.at(-1) ?? null;
    // Pointing at nothing shows the newest value of each, which some lines have not at the same x.
    const values = lines.map((line) => (at === null ? newestOf(line) : valueAt(line, x)));
    const isOne = at !== null || values.every((value) => !value || value.x === values[0]?.x);
    const spoken = lines.map((line, index) => `${line.name} ${this.words(values[index])}`).join(", ");
    const summary = `${title}: ${description ? "about it, and its values" : "its values"}`;
    return html`
      <figure class=${isWide ? "chart wide" : "chart"} data-testid=${testId}>
        <figcaption>
          <${`h${level}`} class="chart-title">${title}<//>
          ${unit && html`<span class="chart-unit">${unit}</span>`}
          <span class="chart-at">${x === null ? "" : isOne ? `iteration ${number(values.find(Boolean)?.x ?? x)}` : "newest"}</span>
        </figcaption>
        <ul class="chart-legend">
          ${lines.map(
            ({ name }, index) => html`<li>
              <${Swatch} index=${index} /><span>${name}</span><span class="chart-value">${this.words(values[index])}</span>
            </li>`,
          )}
        </ul>
        <div
          class="chart-plot"
          role="slider"
          tabindex="0"
          ref=${this.plot}
          style=${{ height: `${height}px` }}
          aria-label="${title} by iteration"
          aria-valuemin=${xs[0] ?? 0}
          aria-valuemax=${xs.at(-1) ?? 0}
          aria-valuenow=${x ?? 0}
          aria-valuetext=${x === null ? "no values yet" : `iteration ${x}: ${spoken} ${unit}`.trim()}
          onKeyDown=${(event) => this.onKey(event)}
          onPointerMove=${(event) => this.onMove(event)}
          onPointerDown=${(event) => this.onMove(event)}
          onPointerLeave=${() => this.pointer.point(null)}
          onBlur=${() => this.pointer.point(null)}
        ></div>
        <${Fold} className="chart-details" label=${summary} summary=${description ? "About, values" : "Values"} of=${() => this.values(xs)} />
      </figure>
    `;
  }

  values(xs) {
    const { title, unit, lines, description } = this.props;
    const rows = xs.map((x) => [number(x), ...lines.map((line) => this.words(valueAt(line, x), true))]);
    return html`
      ${description && html`<p class="help">${description}</p>`}
      <${Table}
        label="Values of ${title}"
        caption=${unit ? `${title}, ${unit}` : title}
        columns=${["iteration", ...lines.map(({ name, band }) => (band?.length ? `${name} (${this.bandName})` : name))]}
        rows=${rows}
        numbersFrom=${1}
        className="small"
      />
    `;
  }
}

export const Swatch = ({ index }) => html`
  <svg width="24" height="10" aria-hidden="true" class="swatch-line" style=${{ color: `var(${colourName(index)})` }}>
    <line x1="0" x2="24" y1="5" y2="5" stroke-dasharray=${DASHES[index % DASHES.length].join(" ") || null} />
  </svg>
`;

// ---- values --------------------------------------------------------------------------------------------------------

/** The x values of all lines, sorted. */
function xsOf(lines) {
  if (lines.length === 1) return lines[0].points.map(([x]) => x);
  return [...new Set(lines.flatMap(({ points }) => points.map(([x]) => x)))].sort((a, b) => a - b);
}

/** {x, y, band} of a line at exactly this x; null without one. */
function valueAt({ points, band = [] }, x) {
  const index = nearest(points, x, ([px]) => px);
  if (index < 0 || points[index][0] !== x) return null;
  const at = nearest(band, x, ([px]) => px);
  return { x, y: points[index][1], band: at >= 0 && band[at][0] === x ? band[at] : null };
}

const newestOf = (line) => (line.points.length ? valueAt(line, line.points.at(-1)[0]) : null);

/** Mean of each point and those before it, `window` in all; fewer at the beginning. */
export function trailingMean(points, window) {
  let sum = 0;
  return points.map(([x, y], index) => {
    sum += y - (index >= window ? points[index - window][1] : 0);
    return [x, sum / Math.min(index + 1, window)];
  });
}

/** Significant digits that tell the values of a curve apart: 3, and more for one that hardly moves. 10.81 and 10.79: 5. */
export function digitsFor(points) {
  const ys = points.map(([, y]) => y);
  const [low, high] = ys.reduce(([least, most], y) => [Math.min(least, y), Math.max(most, y)], [Infinity, -Infinity]);
  const ratio = Math.max(Math.abs(low), Math.abs(high)) / (high - low);
  return Number.isFinite(ratio) ? Math.min(8, Math.max(3, Math.ceil(Math.log10(ratio)) + 2)) : 3;
}

// ---- what uPlot is given -------------------------------------------------------------------------------------------

/** Columns of values, and for each what it is: the edges of a band, a line, or a faint line below its mean. */
function layersOf(lines, isSmooth) {
  const xs = xsOf(lines);
  const column = (pairs) => {
    const byX = new Map(pairs);
    return xs.map((x) => byX.get(x) ?? null);
  };
  const [data, series, bands] = [[xs], [], []];
  const add = (pairs, layer) => {
    data.push(column(pairs));
    series.push(layer);
  };
  lines.forEach(({ points, band = [] }, index) => {
    if (band.length > 1) {
      bands.push({ series: [data.length, data.length + 1], index });
      add(band.map(([x, , high]) => [x, high]), { kind: "edge", index });
      add(band.map(([x, low]) => [x, low]), { kind: "edge", index });
    }
    const window = isSmooth ? Math.floor(points.length / SMOOTHED) : 1;
    const isDot = points.length === 1;
    add(points, { kind: window < 2 ? "line" : "faint", index, isDot });
    if (window >= 2) add(trailingMean(points, window), { kind: "mean", index });
  });
  return { data, series, bands };
}

function optionsOf({ isPercent, domain, height = 168 }, layers, bands, isLog) {
  const stroke = (index, alpha = 1) => () => colourOf(colourName(index), alpha);
  const axis = { font: FONT, stroke: () => colourOf("--muted"), ticks: { show: false } };
  const series = layers.map(({ kind, index, isDot }) => ({
    stroke: kind === "edge" ? null : stroke(index, kind === "faint" ? 0.35 : 1),
    width: { edge: 0, faint: 1, line: 1.6, mean: 2.2 }[kind],
    dash: kind === "faint" ? [] : DASHES[index % DASHES.length],
    spanGaps: true,
    points: { show: Boolean(isDot), size: 7, fill: stroke(index), stroke: stroke(index) },
    isPointed: kind === "line" || kind === "faint",
  }));
  return {
    padding: [8, 10, 0, 0],
    scales: {
      x: { time: false },
      y: isLog ? { distr: 3 } : { range: (_, low, high) => rangeOf(low, high, domain) },
    },
    axes: [
      { ...axis, grid: { show: false }, size: 24, gap: 4, incrs: WHOLE, space: 56, values: (_, xs) => xs.map((x) => number(x)) },
      {
        ...axis,
        grid: { stroke: () => colourOf("--border"), width: 1, filter: (_, values) => (isLog ? onlyPowers(values) : values) },
        space: height > 200 ? 40 : 24,
        gap: 6,
        incrs: ROUND,
        size: (_, texts) => 14 + LABEL_PX * Math.max(3, ...(texts ?? []).map((text) => text?.length ?? 0)),
        values: (_, ys, __, ___, step) => ys.map((y) => (y === null ? null : tickOf(y, step, isPercent, isLog))),
      },
    ],
    series: [{}, ...series],
    bands: bands.map(({ series: edges, index }) => ({ series: edges, fill: stroke(index, 0.16) })),
    cursor: {
      y: false,
      points: { show: (chart, index) => chart.series[index].isPointed && document.createElement("div") },
    },
  };
}

const powers = (from, to) => Array.from({ length: to - from + 1 }, (_, index) => from + index);
const ROUND = powers(-15, 20).flatMap((power) => [1, 2, 5].map((factor) => Number(`${factor}e${power}`)));
const WHOLE = ROUND.filter((step) => step >= 1);

/** The labels of a logarithmic axis, at powers of ten only. */
const onlyPowers = (values) => values.map((value) => (Math.abs(Math.log10(value) % 1) < 1e-9 ? value : null));

/**
 * The x axis: as long as the job, whose first and last iterations are `ends`, so that a curve shows how far it is. But a
 * long job's first values take at least a tenth of it, and as many as 100 iterations always fit.
 */
export function axisOf(low, high, [first, last] = [low, high]) {
  if (low === null) return [low, high];
  const start = Math.min(low, first);
  const end = Math.max(high, Math.min(last, Math.max(start + 100, start + 10 * (high - start))));
  return start === end ? [start - 0.5, end + 0.5] : [start, end];
}

/** The values with some space around them, and at least `domain`. Values that are never below 0 have no axis there. */
function rangeOf(low, high, domain) {
  if (low === null) return [null, null];
  const least = Math.min(low, domain?.[0] ?? low);
  const most = Math.max(high, domain?.[1] ?? high);
  const around = least === most ? Math.abs(least) / 2 || 0.5 : (most - least) * 0.06;
  return [least >= 0 ? Math.max(0, least - around) : least - around, most + around];
}

/** With as many digits as tell one tick from the next. */
export function tickOf(value, step, isPercent = false, isLog = false) {
  if (value === 0 && !isPercent) return "0";
  if (isLog) return number(value, 1);
  if (isPercent) return percent(value, digitsOf(100 * step));
  if (Math.abs(value) >= 10_000 && step >= 10) return COMPACT.format(value);
  return Math.abs(value) < 1e-4 && value !== 0 ? number(value, 3) : value.toFixed(digitsOf(step));
}

const digitsOf = (step) => Math.min(12, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)));
