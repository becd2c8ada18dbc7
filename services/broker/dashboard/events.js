// The log of a job's events: newest first, with a filter. Screen readers are told of the important ones only.

import { isRefusal } from "./api.js";
import { clock } from "./format.js";
import { announce, Component, html } from "./parts.js";

const MOST_ROWS = 200;
const MOST_EVENTS = 5000; // events kept in memory
// These events occur in every iteration of a healthy job.
const ROUTINE = new Set([
  "iteration.opened", "iteration.drained", "iteration.committed", "prompts.claimed", "weights.published",
  "worker.updated", "checkpoint.written", "evaluation.opened", "evaluation.drained",
]);
const BAD = /\.failed$|\.fault$|\.stalled$/;
const WARN = new Set(["group.stale", "group.lost", "group.released", "iteration.short", "job.taken_over", "process.ended", "process.silent", "stream.foreign",
  "worker.left", "worker.lost", "worker.model_failed"]);
const AREAS = ["job", "iteration", "evaluation", "group", "worker", "weights", "trainer", "process"];

const isImportant = ({ kind }) => !ROUTINE.has(kind);

/** The class of its colour. */
function toneOf({ kind, data }) {
  if (BAD.test(kind) || data?.state === "FAILED") return "bad";
  if (WARN.has(kind) || data?.state === "CANCELLING" || data?.state === "PAUSED") return "warn";
  return kind === "evaluation.done" || data?.state === "SUCCEEDED" ? "good" : "";
}

/** The order of two ids of events, "milliseconds-number". */
export function order(a, b) {
  const [[aTime, aNumber], [bTime, bNumber]] = [a, b].map((id) => id.split("-").map(Number));
  return aTime - bTime || (aNumber ?? 0) - (bNumber ?? 0);
}

/** The newest MOST_EVENTS of two lists, each once, the newest first; the same list when there is nothing new. */
export function merge(known, events) {
  const ids = new Set(known.map(({ id }) => id));
  const fresh = new Map(events.filter(({ id }) => !ids.has(id)).map((event) => [event.id, event]));
  return fresh.size ? [...known, ...fresh.values()].sort((a, b) => order(b.id, a.id)).slice(0, MOST_EVENTS) : known;
}

/** Tells screen readers of an event, if it is one that they would want to hear of. */
export function announceEvent(event) {
  if (isImportant(event)) announce(`${event.kind}: ${event.message}`);
}

/** `events`: another list when they change. `loadOlder()` takes in the older ones; null: there are none. */
export class EventLog extends Component {
  state = { kind: "", text: "", isLoading: false, isComplete: false, problem: "" };

  shouldComponentUpdate({ events }, state) {
    return events !== this.props.events || state !== this.state;
  }

  isShown(event) {
    const { kind, text } = this.state;
    const isOfKind = kind === "important" ? isImportant(event) : event.kind.startsWith(kind);
    const wanted = text.trim().toLowerCase();
    return isOfKind && (!wanted || `${event.kind} ${event.message}`.toLowerCase().includes(wanted));
  }

  async loadOlder() {
    this.setState({ isLoading: true, problem: "" });
    try {
      await this.props.loadOlder();
      this.setState({ isComplete: true }); // these were all
    } catch (error) {
      if (error.name === "AbortError") return; // the page was left
      if (isRefusal(error)) this.setState({ problem: `They could not be read: ${error.message}` });
    } finally {
      this.setState({ isLoading: false });
    }
  }

  render({ events, loadOlder }, { kind, text, isLoading, isComplete, problem }) {
    const matching = events.filter((event) => this.isShown(event));
    const shown = matching.slice(0, MOST_ROWS);
    const more = matching.length > shown.length ? `the newest ${shown.length} of ` : "";
    const rest = matching.length < events.length ? ` of ${events.length}` : "";
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
            placeholder="any text"
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
