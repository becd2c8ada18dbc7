// Who did what while the last iterations were made: a page of its own, and a small one on the job's page.

import { ApiError, get, stream } from "./api.js";
import { el, number, setText } from "./dom.js";
import { jobTabs } from "./head.js";
import { LaneView } from "./laneview.js";
import { describe, lanesTable, spansTable, summarise } from "./readout.js";

const CHOICES = [1, 2, 3, 5, 10, 20];
const SMALL = 3; // iterations on the job's page
const REFRESH_MS = 2000;
const REST = 10; // times as long as an answer took: large ones are asked for less often

export async function show(main, { id, iterations }, signal) {
  const path = `/jobs/${encodeURIComponent(id)}`;
  const job = await get(path, {}, signal);
  const wanted = CHOICES.includes(Number(iterations)) ? Number(iterations) : 5;
  const panel = new TimelinePanel({ path, jobId: id, signal, wanted, isLarge: true });
  main.append(
    el(
      "header",
      { class: "job-head" },
      el("h1", {}, `Timeline of ${job.name}`),
      el("p", { class: "muted mono job-id" }, id),
      jobTabs(id, "timeline"),
    ),
    panel.element,
  );
  await panel.load();
  await stream(`${path}/stream`, {
    after: `${Date.now()}`,
    signal,
    onMessage: (kind) => kind === "iteration" && panel.refresh(),
  });
}

/** The small one. `refresh()`: something has changed. */
export function timelinePanel({ path, jobId, signal }) {
  const panel = new TimelinePanel({ path, jobId, signal, wanted: SMALL, isLarge: false });
  panel.load();
  return panel;
}

class TimelinePanel {
  constructor({ path, jobId, signal, wanted, isLarge }) {
    Object.assign(this, { path, jobId, signal, wanted, isLarge });
    this.isLive = true;
    this.isReading = false;
    this.isStale = false; // something changed while it was read
    this.view = new LaneView({
      isLarge,
      signal,
      onChoose: (item) => this.tell(item),
      onOpen: (item) => this.open(item),
      onZoom: (isFit) => this.setLive(isFit),
    });
    this.build();
  }

  build() {
    this.summary = el("p", { class: "timeline-summary", "data-testid": "timeline-summary" });
    this.readout = el("p", { class: "timeline-readout", "data-testid": "timeline-readout" });
    this.tables = el(
      "details",
      { class: "timeline-tables", on: { toggle: () => this.drawTables() } },
      el("summary", {}, "As tables"),
    );
    const more = el("a", { href: `#/jobs/${encodeURIComponent(this.jobId)}/timeline` }, "Larger, with zoom");
    this.element = el(
      "section",
      { class: "card timeline", "data-testid": "timeline", "aria-labelledby": "timeline-heading" },
      el(
        "div",
        { class: "head" },
        el("h2", { id: "timeline-heading", text: this.isLarge ? "Who did what" : "Timeline" }),
        this.isLarge ? this.tools() : more,
      ),
      this.summary,
      this.view.legend,
      this.view.element,
      this.readout,
      this.tables,
    );
    this.tell(null);
  }

  tools() {
    const choose = el(
      "select",
      { id: "timeline-iterations", on: { change: () => this.choose(Number(choose.value)) } },
      CHOICES.map((count) => el("option", { value: count, selected: count === this.wanted }, number(count))),
    );
    this.live = el("input", {
      type: "checkbox",
      id: "timeline-live",
      checked: true,
      on: { change: () => (this.live.checked ? this.view.fit() : this.setLive(false)) },
    });
    const button = (name, text, act) =>
      el("button", { class: "button icon", type: "button", "aria-label": name, title: name, on: { click: act } }, text);
    return el(
      "div",
      { class: "actions" },
      el("label", { for: "timeline-iterations" }, "Iterations"),
      choose,
      el("span", {}, this.live, " ", el("label", { for: "timeline-live" }, "Live")),
      button("Zoom in", "+", () => this.view.zoom(0.5)),
      button("Zoom out", "−", () => this.view.zoom(2)),
      button("Earlier", "◂", () => this.view.pan(-0.25)),
      button("Later", "▸", () => this.view.pan(0.25)),
      el("button", { class: "button", type: "button", on: { click: () => this.view.fit() } }, "Show all"),
    );
  }

  choose(count) {
    this.wanted = count;
    history.replaceState(null, "", `#/jobs/${encodeURIComponent(this.jobId)}/timeline?iterations=${count}`);
    this.view.fit();
    this.load();
  }

  /** A part that somebody looks at would move away under him: it stands still until all is shown again. */
  setLive(isLive) {
    if (isLive === this.isLive) return;
    this.isLive = isLive;
    if (this.live) this.live.checked = isLive;
    if (isLive) this.refresh();
  }

  // ---- reading -----------------------------------------------------------------------------------------------------

  /** Read it again, but not more often than every REFRESH_MS, or REST times what the last answer took. */
  refresh() {
    if (!this.isLive) return;
    if (this.isReading) this.isStale = true;
    else this.load();
  }

  async load() {
    this.isReading = true;
    this.isStale = false;
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const begun = performance.now();
    try {
      const timeline = await get(`${this.path}/timeline`, { iterations: this.wanted }, this.signal);
      const after = (timeline.iterations[0] ?? 0) - 1;
      const { iterations } = await get(`${this.path}/iterations`, { after, limit: 20 }, this.signal);
      if (turn === this.turn) this.show(timeline, iterations); // else others were asked for meanwhile
    } catch (error) {
      if (this.signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      setText(this.summary, `The timeline could not be read: ${error.detail || error.title}`);
    }
    const restMs = Math.max(REFRESH_MS, REST * (performance.now() - begun));
    setTimeout(() => {
      if (turn !== this.turn) return; // the later one tells when
      this.isReading = false;
      if (this.isStale && this.isLive && !this.signal.aborted) this.load();
    }, restMs);
  }

  show(timeline, records) {
    this.timeline = timeline;
    this.view.update(timeline, records);
    setText(this.summary, summarise(timeline));
    const isEmpty = !timeline.lanes.length;
    for (const part of [this.view.legend, this.view.element, this.readout, this.tables]) part.hidden = isEmpty;
    if (this.tables.open) this.drawTables();
  }

  // ---- words -------------------------------------------------------------------------------------------------------

  tell(item) {
    if (!item) {
      const how = this.isLarge
        ? "Point at a span, or move with the arrow keys. + and − zoom, dragging moves, Control and the wheel zoom."
        : "Point at a span, or move with the arrow keys.";
      this.readout.replaceChildren(el("span", { class: "muted" }, how));
      return;
    }
    const link = item.span.group_id && el("a", { href: this.groupLink(item.span) }, "Its responses");
    this.readout.replaceChildren(...[describe(item.span, this.timeline.start), link && " ", link].filter(Boolean));
  }

  groupLink(span) {
    return `#/jobs/${encodeURIComponent(this.jobId)}/samples?iteration=${span.iteration}&group=${encodeURIComponent(span.group_id)}`;
  }

  open(item) {
    if (item.span.group_id) location.hash = this.groupLink(item.span);
  }

  drawTables() {
    const summary = this.tables.firstElementChild;
    if (!this.tables.open || !this.timeline) return this.tables.replaceChildren(summary);
    this.tables.replaceChildren(summary, lanesTable(this.timeline), spansTable(this.timeline));
  }
}
