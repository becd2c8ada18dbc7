// The canvas of a timeline with its lanes, and how one moves in it: pointer, wheel, keyboard.

import { el, percent } from "./dom.js";
import { BOTTOM, KINDS, OVERLAP, TOP, drawLanes, drawSwatch, palette } from "./lanes.js";
import { describe } from "./readout.js";
import { linear } from "./scales.js";
import { bands, itemAt, overlap, packLane } from "./spans.js";

const ROW = 5; // pixels of one of several rows in a lane
const MOST_LANE = 96;
const LEAST_S = 0.01; // that a view shows
const SLACK_PX = 3; // around a span that is thinner
const DRAG_PX = 4; // less is a click

export class LaneView {
  /** onChoose(item or null): pointed at. onOpen(item): clicked, or Enter. onZoom(isFit): is all shown, or a part? */
  constructor({ isLarge, signal, onChoose, onOpen, onZoom }) {
    Object.assign(this, { isLarge, onChoose, onOpen, onZoom });
    this.least = isLarge ? 40 : 34; // pixels of a lane
    this.lanes = [];
    this.isFit = true; // all is shown, also what comes
    this.chosen = null; // {item, lane}
    this.isDue = false;
    this.build();
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.followTheme(signal);
  }

  /** A canvas does not change its colours by itself. */
  followTheme(signal) {
    const redraw = () => this.draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw, { signal });
    const observer = new MutationObserver(redraw);
    observer.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    signal.addEventListener("abort", () => observer.disconnect());
  }

  build() {
    this.swatches = Object.entries(KINDS).map(([kind, { series }]) =>
      el("canvas", { class: `kind series-${series}`, "data-kind": kind, "aria-hidden": "true" }),
    );
    this.keys = this.swatches.map((swatch) =>
      el("li", { "data-kind": swatch.dataset.kind }, swatch, KINDS[swatch.dataset.kind].name),
    );
    this.legend = el(
      "ul",
      { class: "timeline-legend", "aria-label": "Kinds of spans" },
      this.keys,
      el("li", { "data-kind": "both" }, el("span", { class: "kind both", "aria-hidden": "true" }), "both sides work"),
    );
    this.names = el("div", { class: "lane-names", "aria-hidden": "true" });
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.sliders = el("div", { class: "lane-sliders" });
    this.plot = el("div", { class: "lane-plot" }, this.canvas, this.sliders);
    this.probe = el("span", { hidden: true });
    this.element = el(
      "div",
      { class: `lanes${this.isLarge ? " large" : ""}`, role: "group", "aria-label": "Lanes" },
      this.names,
      this.plot,
      this.probe,
    );
    this.listen();
  }

  // ---- what is shown -----------------------------------------------------------------------------------------------

  update(timeline, records) {
    this.timeline = timeline;
    this.bands = bands(timeline, records);
    this.both = overlap(timeline.spans);
    const byLane = new Map(timeline.lanes.map(({ id }) => [id, []]));
    for (const span of timeline.spans) byLane.get(span.lane)?.push(span);
    let top = TOP + OVERLAP;
    this.lanes = timeline.lanes.map(({ id, idle_frac: idle }) => {
      const packed = packLane(byLane.get(id));
      const height = Math.min(MOST_LANE, Math.max(this.least, packed.numRows * ROW + 4));
      const lane = { id, idle, top, height, ...packed };
      top += height;
      return lane;
    });
    this.height = top + BOTTOM;
    this.keep();
    if (this.isFit || !this.view) this.view = [timeline.start, Math.max(timeline.end, timeline.start + LEAST_S)];
    const kinds = new Set(timeline.spans.map(({ kind }) => kind));
    for (const key of this.keys) key.hidden = !kinds.has(key.dataset.kind);
    this.drawNames();
    this.draw();
  }

  /** What was chosen stays so when the same span comes again; its start may have become known better meanwhile. */
  keep() {
    if (!this.chosen) return;
    const { span } = this.chosen.item;
    const lane = this.lanes.find(({ id }) => id === span.lane);
    const same = (lane?.items ?? []).filter(
      ({ span: { kind, iteration, group_id: group } }) =>
        kind === span.kind && iteration === span.iteration && group === span.group_id,
    );
    const distance = (item) => Math.abs(item.span.start - span.start);
    same.sort((one, other) => distance(one) - distance(other));
    this.chosen = same.length ? { item: same[0], lane } : null;
  }

  drawNames() {
    this.names.replaceChildren(
      ...this.lanes.map(({ id, idle, top, height }) =>
        el(
          "div",
          { class: "lane-name", style: { top: `${top}px`, height: `${height}px` } },
          el("strong", { title: id }, id),
          el("span", {}, idle === null ? "idle –" : `idle ${percent(idle)}`),
        ),
      ),
    );
    this.names.style.height = `${this.height}px`;
    const shown = [...this.sliders.children].map(({ dataset }) => dataset.lane);
    const isSame = JSON.stringify(shown) === JSON.stringify(this.lanes.map(({ id }) => id));
    if (!isSame) this.sliders.replaceChildren(...this.lanes.map(({ id }, index) => newSlider(id, index))); // else the focus stays
    this.lanes.forEach((lane, index) => this.place(this.sliders.children[index], lane));
  }

  place(slider, lane) {
    slider.style.top = `${lane.top}px`;
    slider.style.height = `${lane.height}px`;
    const idle = lane.idle === null ? "" : `, idle ${percent(lane.idle)}`;
    slider.setAttribute("aria-label", `${lane.id}${idle}, ${lane.items.length} spans`);
    this.describeSlider(slider, lane);
  }

  describeSlider(slider, lane) {
    const isHere = this.chosen?.lane.id === lane.id;
    const index = isHere ? lane.items.indexOf(this.chosen.item) : 0;
    const text = isHere ? describe(this.chosen.item.span, this.timeline.start) : "no span chosen, arrow keys move";
    const values = {
      "aria-valuemin": 0,
      "aria-valuemax": Math.max(0, lane.items.length - 1),
      "aria-valuenow": index,
      "aria-valuetext": text,
    };
    for (const [name, value] of Object.entries(values)) slider.setAttribute(name, value);
  }

  draw() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.drawNow();
    });
  }

  drawNow() {
    const width = this.plot.clientWidth;
    if (!width || !this.timeline) return;
    for (const swatch of this.swatches) drawSwatch(swatch);
    const { lanes, view, bands: shown, both, chosen, height } = this;
    const colours = palette((name) => this.colour(name));
    drawLanes(this.canvas, {
      width,
      height,
      lanes,
      view,
      bands: shown,
      both,
      chosen,
      origin: this.timeline.start,
      colours,
    });
    this.plot.style.height = `${height}px`;
  }

  /** A CSS variable as the theme has it: the variable itself may hold both themes. */
  colour(name) {
    this.probe.style.color = `var(${name})`;
    return getComputedStyle(this.probe).color;
  }

  // ---- zoom --------------------------------------------------------------------------------------------------------

  /** `factor` below 1: in. `at`: seconds that stay where they are. */
  zoom(factor, at = this.chosen ? middle(this.chosen.item.span) : (this.view[0] + this.view[1]) / 2) {
    if (!this.timeline) return;
    const [start, end] = this.view;
    const length = Math.max(LEAST_S, (end - start) * factor);
    const begin = at - ((at - start) / (end - start)) * length;
    this.show(begin, begin + length);
  }

  /** By a share of what is shown. */
  pan(share) {
    if (!this.timeline) return;
    const by = share * (this.view[1] - this.view[0]);
    this.show(this.view[0] + by, this.view[1] + by);
  }

  fit() {
    if (this.timeline) this.show(this.timeline.start, this.timeline.end);
  }

  /** Within what there is. */
  show(start, end) {
    const { start: first, end: last } = this.timeline;
    const length = Math.min(end - start, last - first);
    const begin = Math.min(Math.max(start, first), last - length);
    this.view = [begin, begin + length];
    this.isFit = length >= (last - first) * (1 - 1e-9);
    this.onZoom(this.isFit);
    this.draw();
  }

  // ---- pointer and keys --------------------------------------------------------------------------------------------

  listen() {
    this.plot.addEventListener("pointermove", (event) => this.onMove(event));
    this.plot.addEventListener("pointerdown", (event) => this.onDown(event));
    this.plot.addEventListener("pointerup", (event) => this.onUp(event));
    this.plot.addEventListener("pointercancel", () => (this.drag = null));
    this.plot.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.sliders.addEventListener("keydown", (event) => this.onKey(event));
    this.sliders.addEventListener("focusin", (event) => this.onFocus(event.target));
  }

  itemUnder(event) {
    const frame = this.plot.getBoundingClientRect();
    const y = event.clientY - frame.top;
    const lane = this.lanes.find(({ top, height }) => y >= top && y < top + height);
    if (!lane) return null;
    const time = this.timeAt(event.clientX - frame.left);
    const row = Math.floor(((y - lane.top - 2) / (lane.height - 4)) * lane.numRows);
    const item = itemAt(lane.items, time, row, (SLACK_PX * (this.view[1] - this.view[0])) / this.plot.clientWidth);
    return item && { item, lane };
  }

  timeAt(pixel) {
    return linear([0, this.plot.clientWidth], this.view)(pixel);
  }

  onMove(event) {
    if (!this.timeline) return;
    if (this.drag) {
      const by = event.clientX - this.drag.x;
      if (Math.abs(by) > DRAG_PX) this.drag.isMoved = true;
      const seconds = (by * (this.drag.view[1] - this.drag.view[0])) / this.plot.clientWidth;
      if (this.drag.isMoved) this.show(this.drag.view[0] - seconds, this.drag.view[1] - seconds);
      return;
    }
    const found = this.itemUnder(event);
    if (found) this.choose(found); // what was chosen stays, so that its link can be reached
  }

  onDown(event) {
    if (!this.timeline || event.button !== 0) return;
    this.drag = { x: event.clientX, view: this.view, isMoved: false };
    this.plot.setPointerCapture(event.pointerId);
  }

  onUp(event) {
    const drag = this.drag;
    this.drag = null;
    if (!drag || drag.isMoved) return;
    const found = this.itemUnder(event);
    if (!found) return;
    this.choose(found);
    if (event.pointerType === "mouse") this.onOpen(found.item); // on glass the first touch only tells
  }

  onWheel(event) {
    if (!this.timeline || !this.isLarge) return;
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !isSideways) return;
    event.preventDefault();
    if (isSideways) this.pan(event.deltaX / this.plot.clientWidth);
    else this.zoom(2 ** (event.deltaY / 200), this.timeAt(event.clientX - this.plot.getBoundingClientRect().left));
  }

  onKey(event) {
    const index = this.lanes.findIndex(({ id }) => id === event.target.dataset.lane);
    const lane = this.lanes[index];
    if (!lane) return;
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
      Enter: () => this.chosen && this.onOpen(this.chosen.item),
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
    if (item.span.start < start || item.span.end > end)
      this.show(middle(item.span) - (end - start) / 2, middle(item.span) + (end - start) / 2);
  }

  focusLane(index) {
    const slider = this.sliders.children[Math.min(this.lanes.length - 1, Math.max(0, index))];
    slider?.focus();
  }

  /** One lane is in the order of Tab: that which was used last. */
  onFocus(slider) {
    for (const each of this.sliders.children) each.tabIndex = each === slider ? 0 : -1;
  }

  choose(chosen) {
    if (chosen?.item === this.chosen?.item) return;
    const before = this.chosen;
    this.chosen = chosen;
    for (const each of [before, chosen]) {
      const slider = each && [...this.sliders.children].find(({ dataset }) => dataset.lane === each.lane.id);
      if (slider) this.describeSlider(slider, each.lane);
    }
    this.onChoose(chosen?.item ?? null);
    this.draw();
  }
}

const newSlider = (id, index) =>
  el("div", { class: "lane-slider", role: "slider", tabindex: index ? "-1" : "0", "data-lane": id });
const middle = ({ start, end }) => (start + end) / 2;
