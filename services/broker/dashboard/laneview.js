// The lanes of a timeline: a canvas, and how one moves in it by pointer, wheel and keyboard.

import { colourOf, onThemeChange } from "./theming.js";
import { percent } from "./format.js";
import { BOTTOM, describe, drawLanes, drawSwatch, KINDS, OVERLAP, palette, TOP } from "./lanes.js";
import { Component, createRef, html } from "./parts.js";
import { bands, itemAt, linear, overlap, packLane } from "./spans.js";

const ROW = 5; // pixels of one of several rows in a lane
const LEAST_LANE = { large: 40, small: 34 }; // pixels
const MOST_LANE = 96;
const LEAST_S = 0.01; // that a view shows
const SLACK_PX = 3; // around a span that is thinner
const DRAG_PX = 4; // less is a click

/**
 * `records`: of the iterations in the timeline. `onChoose(item or null)`: pointed at. `onOpen(item)`: clicked, or Enter.
 * `onZoom(isFit)`: is all shown, or a part? Others zoom it by `zoom`, `pan` and `fit`.
 */
export class Lanes extends Component {
  chosen = null; // {item, lane}
  isFit = true; // all is shown, also what comes
  view = null; // [start, end] in seconds
  focused = null; // id of the lane that is in the order of Tab
  plot = createRef();
  canvas = createRef();
  legend = createRef();

  constructor(props) {
    super(props);
    this.layOut(props);
  }

  componentWillReceiveProps(props) {
    if (props.timeline !== this.props.timeline) this.layOut(props);
  }

  componentDidMount() {
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.plot.current);
    this.forget = onThemeChange(() => this.draw());
    this.draw();
  }

  componentDidUpdate() {
    this.draw();
  }

  componentWillUnmount() {
    this.observer.disconnect();
    this.forget();
  }

  // ---- what is shown -----------------------------------------------------------------------------------------------

  layOut({ timeline, records, isLarge }) {
    this.bands = bands(timeline, records);
    this.both = overlap(timeline.spans);
    const byLane = new Map(timeline.lanes.map(({ id }) => [id, []]));
    for (const span of timeline.spans) byLane.get(span.lane)?.push(span);
    let top = TOP + OVERLAP;
    this.lanes = timeline.lanes.map(({ id, idle_frac: idle }) => {
      const packed = packLane(byLane.get(id));
      const least = isLarge ? LEAST_LANE.large : LEAST_LANE.small;
      const height = Math.min(MOST_LANE, Math.max(least, packed.numRows * ROW + 4));
      const lane = { id, idle, top, height, ...packed };
      top += height;
      return lane;
    });
    this.height = top + BOTTOM;
    this.kinds = Object.keys(KINDS).filter((kind) => timeline.spans.some((span) => span.kind === kind));
    this.keep();
    if (this.isFit || !this.view) this.view = [timeline.start, Math.max(timeline.end, timeline.start + LEAST_S)];
  }

  /** What was chosen stays so when the same span comes again; its start may have become known better meanwhile. */
  keep() {
    if (!this.chosen) return;
    const { span } = this.chosen.item;
    const lane = this.lanes.find(({ id }) => id === span.lane);
    const isSame = (other) => ["kind", "iteration", "group_id"].every((name) => other[name] === span[name]);
    const distance = (item) => Math.abs(item.span.start - span.start);
    const [nearest] = (lane?.items ?? []).filter((item) => isSame(item.span)).sort((a, b) => distance(a) - distance(b));
    this.chosen = nearest ? { item: nearest, lane } : null;
  }

  draw() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      const width = this.plot.current?.clientWidth;
      if (!width) return;
      for (const swatch of this.legend.current.querySelectorAll("canvas")) drawSwatch(swatch);
      const { lanes, view, bands: shown, both, chosen, height } = this;
      const options = { width, height, lanes, view, bands: shown, both, chosen, origin: this.props.timeline.start };
      drawLanes(this.canvas.current, { ...options, colours: palette(colourOf) });
    });
  }

  render({ isLarge }) {
    return html`
      <ul class="timeline-legend" aria-label="Kinds of spans" ref=${this.legend}>
        ${this.kinds.map(
          (kind) => html`<li key=${kind}>
            <canvas class="kind series-${KINDS[kind].series}" data-kind=${kind} aria-hidden="true"></canvas>${KINDS[kind].name}
          </li>`,
        )}
        <li key="both"><span class="kind both" aria-hidden="true"></span>both sides work</li>
      </ul>
      <div class="lanes ${isLarge ? "large" : ""}" role="group" aria-label="Lanes">
        <div class="lane-names" aria-hidden="true" style=${{ height: `${this.height}px` }}>
          ${this.lanes.map(
            ({ id, idle, top, height }) => html`<div class="lane-name" style=${{ top: `${top}px`, height: `${height}px` }}>
              <strong title=${id}>${id}</strong><span>idle ${idle === null ? "–" : percent(idle)}</span>
            </div>`,
          )}
        </div>
        <div
          class="lane-plot"
          ref=${this.plot}
          style=${{ height: `${this.height}px` }}
          onPointerMove=${(event) => this.onMove(event)}
          onPointerDown=${(event) => this.onDown(event)}
          onPointerUp=${(event) => this.onUp(event)}
          onPointerCancel=${() => (this.drag = null)}
          onWheel=${(event) => this.onWheel(event)}
        >
          <canvas ref=${this.canvas} aria-hidden="true"></canvas>
          <div class="lane-sliders">${this.lanes.map((lane) => this.slider(lane))}</div>
        </div>
      </div>
    `;
  }

  /** One lane is in the order of Tab: that which was used last. */
  slider(lane) {
    const isHere = this.chosen?.lane.id === lane.id;
    const idle = lane.idle === null ? "" : `, idle ${percent(lane.idle)}`;
    const text = isHere ? describe(this.chosen.item.span, this.props.timeline.start) : "no span chosen, arrow keys move";
    const stop = this.lanes.some(({ id }) => id === this.focused) ? this.focused : this.lanes[0].id;
    return html`
      <div
        key=${lane.id}
        class="lane-slider"
        role="slider"
        tabindex=${lane.id === stop ? "0" : "-1"}
        data-lane=${lane.id}
        style=${{ top: `${lane.top}px`, height: `${lane.height}px` }}
        aria-label="${lane.id}${idle}, ${lane.items.length} spans"
        aria-valuemin="0"
        aria-valuemax=${Math.max(0, lane.items.length - 1)}
        aria-valuenow=${isHere ? lane.items.indexOf(this.chosen.item) : 0}
        aria-valuetext=${text}
        onKeyDown=${(event) => this.onKey(event)}
        onFocus=${() => this.focusOn(lane.id)}
      ></div>
    `;
  }

  focusOn(id) {
    this.focused = id;
    this.setState({});
  }

  // ---- zoom --------------------------------------------------------------------------------------------------------

  /** `factor` below 1: in. `at`: seconds that stay where they are. */
  zoom(factor, at = this.chosen ? middle(this.chosen.item.span) : (this.view[0] + this.view[1]) / 2) {
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
    this.show(this.props.timeline.start, this.props.timeline.end);
  }

  /** Within what there is. */
  show(start, end) {
    const { start: first, end: last } = this.props.timeline;
    const length = Math.min(end - start, last - first);
    const begin = Math.min(Math.max(start, first), last - length);
    this.view = [begin, begin + length];
    this.isFit = length >= (last - first) * (1 - 1e-9);
    this.props.onZoom(this.isFit);
    this.draw();
  }

  // ---- pointer and keys --------------------------------------------------------------------------------------------

  itemUnder(event) {
    const frame = this.plot.current.getBoundingClientRect();
    const y = event.clientY - frame.top;
    const lane = this.lanes.find(({ top, height }) => y >= top && y < top + height);
    if (!lane) return null;
    const time = this.timeAt(event.clientX - frame.left);
    const row = Math.floor(((y - lane.top - 2) / (lane.height - 4)) * lane.numRows);
    const slack = (SLACK_PX * (this.view[1] - this.view[0])) / this.plot.current.clientWidth;
    const item = itemAt(lane.items, time, row, slack);
    return item && { item, lane };
  }

  timeAt(pixel) {
    return linear([0, this.plot.current.clientWidth], this.view)(pixel);
  }

  onMove(event) {
    if (this.drag) {
      const by = event.clientX - this.drag.x;
      if (Math.abs(by) > DRAG_PX) this.drag.isMoved = true;
      const seconds = (by * (this.drag.view[1] - this.drag.view[0])) / this.plot.current.clientWidth;
      if (this.drag.isMoved) this.show(this.drag.view[0] - seconds, this.drag.view[1] - seconds);
      return;
    }
    const found = this.itemUnder(event);
    if (found) this.choose(found); // what was chosen stays, so that its link can be reached
  }

  onDown(event) {
    if (event.button !== 0) return;
    this.drag = { x: event.clientX, view: this.view, isMoved: false };
    this.plot.current.setPointerCapture(event.pointerId);
  }

  onUp(event) {
    const { drag } = this;
    this.drag = null;
    if (!drag || drag.isMoved) return;
    const found = this.itemUnder(event);
    if (!found) return;
    this.choose(found);
    if (event.pointerType === "mouse") this.props.onOpen(found.item); // a touch only selects; the details have a link
  }

  onWheel(event) {
    if (!this.props.isLarge) return;
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !isSideways) return;
    event.preventDefault();
    const { clientWidth } = this.plot.current;
    if (isSideways) this.pan(event.deltaX / clientWidth);
    else this.zoom(2 ** (event.deltaY / 200), this.timeAt(event.clientX - this.plot.current.getBoundingClientRect().left));
  }

  onKey(event) {
    const index = this.lanes.findIndex(({ id }) => id === event.currentTarget.dataset.lane);
    const lane = this.lanes[index];
    const at = this.chosen?.lane.id === lane.id ? lane.items.indexOf(this.chosen.item) : -1;
    const steps = {
      ArrowLeft: at - 1,
      ArrowRight: at + 1,
      PageUp: at - 10,
      PageDown: at + 10,
      Home: 0,
      End: lane.items.length - 1,
    };
    const actions = {
      ArrowUp: () => this.focusLane(index - 1),
      ArrowDown: () => this.focusLane(index + 1),
      "+": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.fit(),
      Enter: () => this.chosen && this.props.onOpen(this.chosen.item),
      Escape: () => this.choose(null),
    };
    const act = event.key in steps ? () => this.step(lane, steps[event.key]) : actions[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  step(lane, index) {
    if (!lane.items.length) return;
    const item = lane.items[Math.min(lane.items.length - 1, Math.max(0, index))];
    this.choose({ item, lane });
    const [start, end] = this.view;
    const half = (end - start) / 2;
    if (item.span.start < start || item.span.end > end) this.show(middle(item.span) - half, middle(item.span) + half);
  }

  focusLane(index) {
    const { id } = this.lanes[Math.min(this.lanes.length - 1, Math.max(0, index))];
    [...this.plot.current.querySelectorAll("[data-lane]")].find(({ dataset }) => dataset.lane === id)?.focus();
  }

  choose(chosen) {
    if (chosen?.item === this.chosen?.item) return;
    this.chosen = chosen;
    this.props.onChoose(chosen?.item ?? null);
    this.setState({});
  }
}

const middle = ({ start, end }) => (start + end) / 2;
