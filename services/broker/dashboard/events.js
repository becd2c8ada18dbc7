// The log of a job's events: newest first, with a filter. Screen readers are told of the important ones only.

import { ApiError } from "./api.js";
import { announce, clock, el, setText } from "./dom.js";

const MOST_ROWS = 200;
export const MOST_EVENTS = 5000; // that are kept
// What happens in every iteration of a healthy job.
const ROUTINE = new Set([
  "iteration.opened",
  "iteration.drained",
  "iteration.committed",
  "prompts.claimed",
  "weights.published",
  "worker.updated",
  "checkpoint.written",
  "evaluation.opened",
  "evaluation.drained",
]);
const BAD = /\.failed$|\.fault$|\.stalled$/;
const WARN = new Set([
  "group.stale",
  "group.lost",
  "group.released",
  "job.taken_over",
  "stream.foreign",
  "worker.left",
]);
const LOAD = "Load older events";
const AREAS = ["job", "iteration", "evaluation", "group", "worker", "weights", "trainer"];

export const isImportant = ({ kind }) => !ROUTINE.has(kind);

/** The class of its colour. */
export function toneOf({ kind, data }) {
  if (BAD.test(kind) || data?.state === "FAILED") return "bad";
  if (WARN.has(kind) || data?.state === "CANCELLING" || data?.state === "PAUSED") return "warn";
  return kind === "evaluation.done" || data?.state === "SUCCEEDED" ? "good" : "";
}

/**
 * `add(events)`: in any order, each shown once. `loadOlder(oldest)` resolves to all before that one;
 * null: there are none. */
export function eventLog({ loadOlder, loadedAt }) {
  const log = new EventLog(loadOlder, loadedAt);
  return { element: log.element, add: (events) => log.add(events) };
}

class EventLog {
  constructor(loadOlder, loadedAt) {
    this.loadOlder = loadOlder;
    this.loadedAt = loadedAt; // what came before is not announced
    this.events = new Map(); // by id
    this.build();
  }

  build() {
    const areas = AREAS.map((area) => el("option", { value: `${area}.` }, `${area[0].toUpperCase()}${area.slice(1)}`));
    const change = { on: { input: () => this.draw() } };
    this.kind = el(
      "select",
      { id: "event-kind", ...change },
      el("option", { value: "" }, "All"),
      el("option", { value: "important" }, "Important"),
      areas,
    );
    this.text = el("input", {
      id: "event-text",
      type: "search",
      autocomplete: "off",
      placeholder: "rollout-0",
      ...change,
    });
    this.count = el("span", { class: "muted" });
    this.list = el("ol", { class: "events", tabindex: "0", "aria-label": "Events, newest first" });
    this.older = el(
      "button",
      { class: "button", type: "button", hidden: !this.loadOlder, on: { click: () => this.loadMore() } },
      LOAD,
    );
    this.problem = el("p", { class: "notice bad", role: "alert", hidden: true });
    this.element = el(
      "section",
      { class: "card", "data-testid": "events", "aria-labelledby": "events-heading" },
      el("div", { class: "head" }, el("h2", { id: "events-heading", text: "Events" }), this.count),
      el(
        "div",
        { class: "filters" },
        el("label", { for: "event-kind" }, "Show"),
        this.kind,
        el("label", { for: "event-text" }, "containing"),
        this.text,
      ),
      this.list,
      this.older,
      this.problem,
    );
  }

  add(events) {
    const fresh = events.filter(({ id }) => !this.events.has(id));
    if (!fresh.length) return;
    for (const event of fresh) this.events.set(event.id, event);
    this.dropOldest();
    const heard = fresh.filter((event) => isImportant(event) && event.time > this.loadedAt);
    if (heard.length)
      announce(
        heard
          .slice(-3)
          .map(({ kind, message }) => `${kind}: ${message}`)
          .join(". "),
      );
    this.draw();
  }

  dropOldest() {
    if (this.events.size <= MOST_EVENTS) return;
    const ids = [...this.events.keys()].sort(order);
    for (const id of ids.slice(0, ids.length - MOST_EVENTS)) this.events.delete(id);
  }

  isShown(event) {
    const kind = this.kind.value;
    const isOfKind = kind === "important" ? isImportant(event) : event.kind.startsWith(kind);
    const wanted = this.text.value.trim().toLowerCase();
    return isOfKind && (!wanted || `${event.kind} ${event.message}`.toLowerCase().includes(wanted));
  }

  draw() {
    const matching = [...this.events.values()].filter((event) => this.isShown(event)).sort((a, b) => order(b.id, a.id));
    const shown = matching.slice(0, MOST_ROWS);
    this.place(shown);
    const more = matching.length > shown.length ? `the newest ${shown.length} of ` : "";
    setText(
      this.count,
      `${more}${matching.length}${matching.length < this.events.size ? ` of ${this.events.size}` : ""}`,
    );
  }

  /** Rows that stay are not touched, so that what is selected stays as well. */
  place(shown) {
    const wanted = new Set(shown.map(({ id }) => id));
    for (const row of [...this.list.children]) if (!wanted.has(row.dataset.id)) row.remove();
    let next = this.list.firstElementChild;
    for (const event of shown) {
      if (next?.dataset.id === event.id) next = next.nextElementSibling;
      else this.list.insertBefore(showEvent(event), next);
    }
  }

  async loadMore() {
    this.older.disabled = true;
    setText(this.older, "Loading…");
    const oldest = [...this.events.keys()].sort(order)[0];
    this.problem.hidden = true;
    try {
      this.add(await this.loadOlder(oldest));
      this.older.hidden = true; // these were all
    } catch (error) {
      if (error.name === "AbortError") return; // the page was left
      if (!(error instanceof ApiError)) throw error;
      setText(this.problem, `They could not be read: ${error.detail || error.title}`);
      this.problem.hidden = false;
    } finally {
      this.older.disabled = false;
      setText(this.older, LOAD);
    }
  }
}

/** Of two ids of events, "milliseconds-number". */
export function order(a, b) {
  const [[aTime, aNumber], [bTime, bNumber]] = [a, b].map((id) => id.split("-").map(Number));
  return aTime - bTime || (aNumber ?? 0) - (bNumber ?? 0);
}

function showEvent(event) {
  return el(
    "li",
    { "data-id": event.id, class: isImportant(event) ? "important" : null },
    el("time", { datetime: new Date(1000 * event.time).toISOString() }, clock(event.time)),
    el("span", { class: `event-kind ${toneOf(event)}` }, event.kind),
    el("span", { class: "event-message" }, event.message),
  );
}
