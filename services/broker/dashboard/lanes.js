// The lanes of a timeline, with uPlot's axis and zoom: quick with 10,000 spans. Kinds differ in pattern as well as in
// colour. One slider for keyboards and screen readers, which reads out the chosen span.

import { colourOf, Plot } from "./charts.js";
import { clock, duration, percent } from "./format.js";
import { createRef, html, moved } from "./parts.js";
import { nearest } from "./series.js";
import { bands, itemAt, packLane } from "./spans.js";

export const KINDS = {
  generate: { name: "generate", series: 1, pattern: "solid" },
  score: { name: "score", series: 2, pattern: "falling" },
  environment: { name: "environment", series: 2, pattern: "rising" },
  pull: { name: "pull weights", series: 5, pattern: "rising" },
  load: { name: "load weights", series: 4, pattern: "cross" },
  micro_batch: { name: "micro-batch", series: 3, pattern: "solid" },
  optimizer: { name: "optimizer", series: 6, pattern: "upright" },
  publish: { name: "publish weights", series: 7, pattern: "level" },
  checkpoint: { name: "checkpoint", series: 8, pattern: "cross" },
  wait: { name: "wait", series: 8, pattern: "faint" },
};
const TILE = 6; // pixels of a pattern
const RISING = [[-1, 7, 7, -1], [-1, 1, 1, -1], [5, 7, 7, 5]];
const FALLING = RISING.map(([x0, y0, x1, y1]) => [TILE - x0, y0, TILE - x1, y1]);
const STROKES = { rising: RISING, falling: FALLING, cross: [...RISING, ...FALLING], upright: [[3, 0, 3, 6]], level: [[0, 3, 6, 3]] };

const TOP = 22; // pixels for the numbers of the iterations
const OVERLAP = 12; // pixels for the strip below them
const BOTTOM = 24; // pixels for the seconds
const ROW = 5; // pixels of one of several rows in a lane
const LEAST_LANE = { large: 40, small: 34 };
const MOST_LANE = 96;
const FONT = "12px system-ui, sans-serif";
const LABEL_PX = 7; // width of a digit in that font
const LEAST_S = 0.01; // length of the shortest view
const SLACK_PX = 3; // around a span that is thinner
const DRAG_PX = 4; // less is a click
const STEPS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };

/** A span in words. */
export function describe(span, origin) {
  const isWeights = span.kind === "pull" || span.kind === "load";
  const what = `${isWeights ? "policy version" : "iteration"} ${span.iteration}`;
  const group = span.group_id ? `group ${span.group_id} of ${what}` : what;
  const from = `from ${(span.start - origin).toFixed(2)} s (${clock(span.start)})`;
  return `${span.lane}: ${KINDS[span.kind]?.name ?? span.kind}, ${group}, ${duration(span.end - span.start)}, ${from}.`;
}

/**
 * `onChoose(item or null)`: pointed at. `onOpen(item)`: clicked, or Enter. `onZoom(isFit)`: is all shown, or a part?
 * Others zoom it by `zoom`, `pan` and `fit`. Moments on its axis are seconds since the timeline's start.
 */
export class Lanes extends Plot {
  chosen = null; // {item, lane}
  isFit = true; // all is shown, also what comes
  legend = createRef();

  constructor(props) {
    super(props);
    this.layOut(props);
  }

  componentWillReceiveProps(props) {
    if (props.timeline !== this.props.timeline) this.layOut(props);
  }

  componentDidUpdate({ timeline }) {
    if (timeline !== this.props.timeline) this.draw();
    else this.chart?.redraw(false);
  }

  layOut({ timeline, isLarge }) {
    this.bands = bands(timeline);
    const byLane = new Map(timeline.lanes.map(({ id }) => [id, []]));
    for (const span of timeline.spans) byLane.get(span.lane)?.push(span);
    let top = TOP + OVERLAP;
    this.lanes = timeline.lanes.map(({ id, idle_frac: idle }) => {
      const packed = packLane(byLane.get(id));
      const least = isLarge ? LEAST_LANE.large : LEAST_LANE.small;
      const lane = { id, idle, top, height: Math.min(MOST_LANE, Math.max(least, packed.numRows * ROW + 4)), ...packed };
      top += lane.height;
      return lane;
    });
    this.height = top + BOTTOM;
    this.kinds = Object.keys(KINDS).filter((kind) => timeline.spans.some((span) => span.kind === kind));
    this.keep();
  }

  /** Keeps the choice when the same span comes again; its start may have become known better meanwhile. */
  keep() {
    if (!this.chosen) return;
    const { span } = this.chosen.item;
    const lane = this.lanes.find(({ id }) => id === span.lane);
    const isSame = (other) => ["kind", "iteration", "group_id"].every((name) => other[name] === span[name]);
    const distance = (item) => Math.abs(item.span.start - span.start);
    const [closest] = (lane?.items ?? []).filter((item) => isSame(item.span)).sort((a, b) => distance(a) - distance(b));
    this.chosen = closest ? { item: closest, lane } : null;
  }

  /** The lane of the chosen span, else the first one with spans: a trainer has none before its first commit. */
  get lane() {
    return this.chosen?.lane ?? this.lanes.find(({ items }) => items.length) ?? this.lanes[0];
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------

  get length() {
    const { start, end } = this.props.timeline;
    return Math.max(LEAST_S, end - start);
  }

  draw() {
    if (!this.width) return;
    const data = [[0, this.length], [null, null]];
    if (!this.chart) return this.make(this.options(), data);
    this.chart.setSize({ width: this.width, height: this.height });
    this.chart.setData(data, this.isFit);
  }

  options() {
    const line = { stroke: () => colourOf("--border"), width: 1 };
    const seconds = ({ scales: { x } }, values) =>
      values.map((value) => {
        const text = `${Number(value.toPrecision(6))} s`;
        const space = ((x.max - value) / (x.max - x.min)) * this.width;
        return space < text.length * LABEL_PX ? "" : text; // it would be cut
      });
    const click = (_, event) => Math.abs(event.clientX - this.downAt) >= DRAG_PX && event.stopPropagation(); // a drag
    return {
      padding: [0, 0, 0, 0],
      scales: { x: { time: false }, y: { range: [0, 1] } },
      axes: [
        { font: FONT, stroke: () => colourOf("--muted"), grid: { show: false }, ticks: { ...line, size: 4 }, border: { ...line, show: true }, size: BOTTOM, gap: 3, space: 90, align: 1, values: seconds },
        { show: false },
      ],
      series: [{}, { show: false }],
      cursor: { y: false, points: { show: false }, drag: { x: Boolean(this.props.isLarge), y: false, dist: DRAG_PX, click } },
      hooks: { draw: [(chart) => this.paint(chart)], setScale: [(chart, key) => key === "x" && this.zoomed(chart.scales.x)] },
    };
  }

  paint({ ctx: context, bbox, scales }) {
    const ratio = devicePixelRatio;
    context.save();
    context.scale(ratio, ratio);
    context.font = FONT;
    context.textBaseline = "middle";
    context.textAlign = "left";
    const { start } = this.props.timeline;
    const { min, max } = scales.x;
    const width = bbox.width / ratio;
    const x = (moment) => ((moment - start - min) / (max - min)) * width;
    const isSeen = ({ start: from, end }) => end - start > min && from - start < max;
    drawBands(context, this.bands.filter(isSeen), { x, width, height: bbox.height / ratio });
    context.fillStyle = colourOf("--text");
    for (const [from, end] of this.props.timeline.both_work) context.fillRect(x(from), TOP + 3, Math.max(0.5, x(end) - x(from)), OVERLAP - 6);
    const paints = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, paintOf(context, kind)]));
    for (const lane of this.lanes) drawLane(context, lane, { x, isSeen, width, paints });
    if (this.chosen) outline(context, this.chosen, x);
    context.restore();
    for (const swatch of this.legend.current.querySelectorAll("canvas")) drawSwatch(swatch);
  }

  render({ isLarge, timeline }) {
    const { chosen, lanes, lane } = this;
    return html`
      <ul class="timeline-legend" aria-label="Kinds of spans" ref=${this.legend}>
        ${this.kinds.map((kind) => html`<li key=${kind}><canvas class="kind" data-kind=${kind} aria-hidden="true"></canvas>${KINDS[kind].name}</li>`)}
        <li key="both"><span class="kind both" aria-hidden="true"></span>both sides work</li>
      </ul>
      <div class="lanes">
        <div class="lane-names" aria-hidden="true">
          ${lanes.map(
            ({ id, idle, top, height }) => html`<div class="lane-name" style=${{ top: `${top}px`, height: `${height}px` }}>
              <strong title=${id}>${id}</strong><span>idle ${percent(idle)}</span>
            </div>`,
          )}
        </div>
        <div
          class="lane-plot"
          role="slider"
          tabindex="0"
          ref=${this.plot}
          style=${{ height: `${this.height}px` }}
          aria-label="Spans by lane: ${lanes.map(({ id }) => id).join(", ")}"
          aria-valuemin="0"
          aria-valuemax=${Math.max(0, lane.items.length - 1)}
          aria-valuenow=${chosen ? lane.items.indexOf(chosen.item) : 0}
          aria-valuetext=${chosen ? describe(chosen.item.span, timeline.start) : "no span chosen, arrow keys move"}
          onKeyDown=${(event) => this.onKey(event)}
          onPointerMove=${(event) => event.buttons || this.choose(this.under(event) ?? this.chosen)}
          onPointerDown=${(event) => (this.downAt = event.clientX)}
          onClick=${(event) => this.onClick(event)}
          onWheel=${isLarge ? (event) => this.onWheel(event) : null}
        ></div>
      </div>
    `;
  }

  // ---- zoom --------------------------------------------------------------------------------------------------------

  get view() {
    const { min, max } = this.chart.scales.x;
    return [min, max];
  }

  zoomed({ min, max }) {
    this.isFit = max - min >= this.length * (1 - 1e-9);
    this.props.onZoom(this.isFit);
  }

  /** `factor` below 1: in. `at`: the moment that stays where it is. */
  zoom(factor, at = this.chosen ? this.middle(this.chosen.item) : (this.view[0] + this.view[1]) / 2) {
    const [start, end] = this.view;
    const length = Math.max(LEAST_S, (end - start) * factor);
    const begin = at - ((at - start) / (end - start)) * length;
    this.show(begin, begin + length);
  }

  /** By a share of what is shown. */
  pan(share) {
    const by = share * (this.view[1] - this.view[0]);
    this.show(this.view[0] + by, this.view[1] + by);
  }

  fit() {
    this.show(0, this.length);
  }

  /** Within what there is. */
  show(start, end) {
    const length = Math.min(end - start, this.length);
    const min = Math.min(Math.max(start, 0), this.length - length);
    this.chart?.setScale("x", { min, max: min + length });
    this.zoomed({ min, max: min + length }); // uPlot says nothing of a scale that stays the same
  }

  middle({ span }) {
    return (span.start + span.end) / 2 - this.props.timeline.start;
  }

  // ---- pointer and keys --------------------------------------------------------------------------------------------

  /** The {item, lane} under a pointer; null: none. What was chosen before stays then, so that its link can be reached. */
  under(event) {
    const frame = this.plot.current.getBoundingClientRect();
    const y = event.clientY - frame.top;
    const lane = this.lanes.find(({ top, height }) => y >= top && y < top + height);
    if (!lane || !this.chart) return null;
    const row = Math.floor(((y - lane.top - 2) / (lane.height - 4)) * lane.numRows);
    const slack = (SLACK_PX * (this.view[1] - this.view[0])) / this.width;
    const item = itemAt(lane.items, this.momentOf(event) + this.props.timeline.start, row, slack);
    return item && { item, lane };
  }

  momentOf(event) {
    return this.chart.posToVal(event.clientX - this.plot.current.getBoundingClientRect().left, "x");
  }

  /** A touch only selects; the details have a link. */
  onClick(event) {
    const found = this.under(event);
    if (!found) return;
    this.choose(found);
    if (event.pointerType !== "touch") this.props.onOpen(found.item);
  }

  onWheel(event) {
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !isSideways) return;
    event.preventDefault();
    if (isSideways) this.pan(event.deltaX / this.width);
    else this.zoom(2 ** (event.deltaY / 200), this.momentOf(event));
  }

  onKey(event) {
    if (!this.chart || event.ctrlKey || event.metaKey || event.altKey) return;
    const { lane } = this;
    const item = this.chosen?.item;
    const actions = {
      ArrowUp: () => this.toLane(lane, -1),
      ArrowDown: () => this.toLane(lane, 1),
      "+": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.fit(),
      Enter: () => item && this.props.onOpen(item),
      Escape: () => this.choose(null),
    };
    if (actions[event.key]) {
      event.preventDefault();
      return actions[event.key]();
    }
    const index = moved(event, STEPS, lane.items.indexOf(item), lane.items.length - 1);
    if (index !== null) this.step(lane, index);
  }

  /** To the span of the lane above or below that begins at about the same time. */
  toLane(lane, by) {
    const to = this.lanes[Math.min(this.lanes.length - 1, Math.max(0, this.lanes.indexOf(lane) + by))];
    const start = this.chosen?.item.span.start ?? this.props.timeline.start;
    if (to.items.length) this.step(to, nearest(to.items, start, ({ span }) => span.start));
  }

  step(lane, index) {
    const item = lane.items[index];
    this.choose({ item, lane });
    const [start, end] = this.view;
    const at = this.middle(item);
    if (at < start || at > end) this.show(at - (end - start) / 2, at + (end - start) / 2);
  }

  choose(chosen) {
    if (chosen?.item === this.chosen?.item) return;
    this.chosen = chosen;
    this.props.onChoose(chosen?.item ?? null);
    this.setState({});
  }
}

// ---- on the canvas, in CSS pixels ----------------------------------------------------------------------------------

/** The paint of a kind: its pattern and colour. */
function paintOf(context, kind) {
  const { pattern, series } = KINDS[kind];
  const colour = colourOf(`--series-${series}`, pattern === "faint" ? 0.14 : 1);
  if (!STROKES[pattern]) return colour;
  const ratio = devicePixelRatio;
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(TILE * ratio);
  const brush = tile.getContext("2d");
  brush.scale(tile.width / TILE, tile.height / TILE);
  brush.strokeStyle = brush.fillStyle = colour;
  brush.globalAlpha = 0.35;
  brush.fillRect(0, 0, TILE, TILE);
  brush.globalAlpha = 1;
  brush.lineWidth = 1.6;
  for (const [x0, y0, x1, y1] of STROKES[pattern]) {
    brush.moveTo(x0, y0);
    brush.lineTo(x1, y1);
  }
  brush.stroke();
  const fill = context.createPattern(tile, "repeat");
  fill.setTransform(new DOMMatrix([1 / ratio, 0, 0, 1 / ratio, 0, 0]));
  return fill;
}

/** A small picture of a kind, for the legend. */
function drawSwatch(canvas) {
  const ratio = devicePixelRatio;
  [canvas.width, canvas.height] = [22 * ratio, 12 * ratio]; // as .kind has it
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = paintOf(context, canvas.dataset.kind);
  context.fillRect(0, 0, 22, 12);
}

function drawBands(context, bands, { x, width, height }) {
  for (const { iteration, start, end } of bands) {
    const [left, right] = [Math.max(0, x(start)), Math.min(width, x(end))];
    if (iteration % 2 === 0) {
      context.fillStyle = colourOf("--raised");
      context.fillRect(left, 0, right - left, height);
    }
    const label = right - left > 90 ? `iteration ${iteration}` : String(iteration);
    context.fillStyle = colourOf("--muted");
    if (context.measureText(label).width < right - left - 6) context.fillText(label, left + 4, TOP / 2);
  }
}

function drawLane(context, lane, { x, isSeen, width, paints }) {
  context.fillStyle = colourOf("--border");
  context.fillRect(0, lane.top - 0.5, width, 1);
  let last = { right: -1, row: null, kind: null };
  for (const item of lane.items) {
    const { kind } = item.span;
    if (!isSeen(item.span)) continue;
    const { left, right, top, height } = box(item, lane, x, width);
    if (right <= last.right && item.row === last.row && kind === last.kind) continue; // not one pixel more
    last = { right, row: item.row, kind };
    const gap = right - left > 3 ? 0.75 : 0; // so that neighbours are told apart
    context.fillStyle = paints[kind] ?? colourOf("--muted");
    context.fillRect(left, top, Math.max(0.75, right - left - gap), height);
  }
}

/** Where an item is drawn. */
function box(item, lane, x, width) {
  const [left, right] = [Math.max(-1, x(item.span.start)), Math.min(width + 1, x(item.span.end))];
  const inner = lane.height - 4;
  if (item.row === -1) return { left, right, top: lane.top + 2, height: item.span.kind === "pull" ? Math.max(4, inner / 4) : inner };
  const rowHeight = inner / lane.numRows;
  const height = Math.max(1, rowHeight - (rowHeight > 4 ? 1 : 0));
  return { left, right, top: lane.top + 2 + item.row * rowHeight, height };
}

function outline(context, { item, lane }, x) {
  const { left, right, top, height } = box(item, lane, x, Infinity);
  context.strokeStyle = colourOf("--text");
  context.lineWidth = 2;
  context.strokeRect(left - 1, top - 1, Math.max(3, right - left) + 1, height + 2);
}
