// The log of a job's events: newest first, with a filter. Screen readers are told of the important ones only.

import { isRefusal } from "./api.js";
import { clock } from "./format.js";
import { announce, Component, html } from "./parts.js";

const MOST_ROWS = 200;
const MOST_EVENTS = 5000; // that are kept
// What happens in every iteration of a healthy job.
const ROUTINE = new Set([
  "iteration.opened", "iteration.drained", "iteration.committed", "prompts.claimed", "weights.published",
  "worker.updated", "checkpoint.written", "evaluation.opened", "evaluation.drained",
]);
const BAD = /\.failed$|\.fault$|\.stalled$/;
const WARN = new Set(["group.stale", "group.lost", "group.released", "iteration.short", "job.taken_over", "stream.foreign", "worker.left"]);
const AREAS = ["job", "iteration", "evaluation", "group", "worker", "weights", "trainer"];

const isImportant = ({ kind }) => !ROUTINE.has(kind);

/** The class of its colour. */
function toneOf({ kind, data }) {
  if (BAD.test(kind) || data?.state === "FAILED") return "bad";
  if (WARN.has(kind) || data?.state === "CANCELLING" || data?.state === "PAUSED") return "warn";
  return kind === "evaluation.done" || data?.state === "SUCCEEDED" ? "good" : "";
}

/** Of two ids of events, "milliseconds-number". */
export function order(a, b) {
  const [[aTime, aNumber], [bTime, bNumber]] = [a, b].map((id) => id.split("-").map(Number));
  return aTime - bTime || (aNumber ?? 0) - (bNumber ?? 0);
}

/** Each event once, the newest MOST_EVENTS of them. */
export class EventStore {
  /** `since`: Unix seconds; what came before is not announced. */
  constructor(since) {
    this.since = since;
    this.byId = new Map();
    this.version = 0; // changes with each new event
  }

  /** In any order. */
  add(events) {
    const fresh = events.filter(({ id }) => !this.byId.has(id));
    if (!fresh.length) return;
    this.version += 1;
    for (const event of fresh) this.byId.set(event.id, event);
    if (this.byId.size > MOST_EVENTS) this.dropOldest();
    const heard = fresh.filter((event) => isImportant(event) && event.time > this.since);
    if (heard.length) announce(heard.slice(-3).map(({ kind, message }) => `${kind}: ${message}`).join(". "));
  }

  dropOldest() {
    const ids = [...this.byId.keys()].sort(order);
    for (const id of ids.slice(0, ids.length - MOST_EVENTS)) this.byId.delete(id);
  }

  /** Newest first. */
  newest(test = () => true) {
    return [...this.byId.values()].filter(test).sort((a, b) => order(b.id, a.id));
  }
}

/** `loadOlder(oldest)` resolves to all events before that one; null: there are none. */
export class EventLog extends Component {
  state = { kind: "", text: "", isLoading: false, isComplete: false, problem: "" };

  shouldComponentUpdate({ version }, state) {
    return version !== this.props.version || state !== this.state;
  }

  isShown(event) {
    const { kind, text } = this.state;
    const isOfKind = kind === "important" ? isImportant(event) : event.kind.startsWith(kind);
    const wanted = text.trim().toLowerCase();
    return isOfKind && (!wanted || `${event.kind} ${event.message}`.toLowerCase().includes(wanted));
  }

  async loadOlder() {
    const { store, loadOlder } = this.props;
    this.setState({ isLoading: true, problem: "" });
    try {
      store.add(await loadOlder(store.newest().at(-1)?.id));
      this.setState({ isComplete: true }); // these were all
    } catch (error) {
      if (error.name === "AbortError") return; // the page was left
      if (isRefusal(error)) this.setState({ problem: `They could not be read: ${error.message}` });
    } finally {
      this.setState({ isLoading: false });
    }
  }

  render({ store, loadOlder }, { kind, text, isLoading, isComplete, problem }) {
    const matching = store.newest((event) => this.isShown(event));
    const shown = matching.slice(0, MOST_ROWS);
    const more = matching.length > shown.length ? `the newest ${shown.length} of ` : "";
    const rest = matching.length < store.byId.size ? ` of ${store.byId.size}` : "";
    return html`
      <section class="event-log" data-testid="events" aria-labelledby="events-heading">
        <div class="head"><h2 id="events-heading">Events</h2><span class="muted">${`${more}${matching.length}${rest}`}</span></div>
        <div class="filters">
          <label for="event-kind">Show</label>
          <select id="event-kind" value=${kind} onInput=${(event) => this.setState({ kind: event.target.value })}>
            <option value="">All</option>
            <option value="important">Important</option>
            ${AREAS.map((area) => html`<option value="${area}.">${area[0].toUpperCase()}${area.slice(1)}</option>`)}
          </select>
          <label for="event-text">containing</label>
          <input
            id="event-text"
            type="search"
            autocomplete="off"
            placeholder="rollout-0"
            value=${text}
            onInput=${(event) => this.setState({ text: event.target.value })}
          />
        </div>
        <ol class="events" tabindex="0" aria-label="Events, newest first">
          ${shown.map((event) => html`<${Row} key=${event.id} event=${event} />`)}
        </ol>
        ${loadOlder &&
        !isComplete &&
        html`<button class="button" type="button" disabled=${isLoading} onClick=${() => this.loadOlder()}>
          ${isLoading ? "Loading…" : "Load older events"}
        </button>`}
        ${problem && html`<p class="notice bad" role="alert">${problem}</p>`}
      </section>
    `;
  }
}

class Row extends Component {
  shouldComponentUpdate() {
    return false; // an event never changes
  }

  render({ event }) {
    return html`
      <li class=${isImportant(event) ? "important" : null}>
        <time datetime=${new Date(1000 * event.time).toISOString()}>${clock(event.time)}</time>
        <span class="event-kind ${toneOf(event)}">${event.kind}</span>
        <span class="event-message">${event.message}</span>
      </li>
    `;
  }
}
