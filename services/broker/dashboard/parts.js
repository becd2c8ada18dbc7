// What all pages are made of: Preact with htm, and the parts of a job that several pages show.

import { ApiError, post, serverNow } from "./api.js";
import { duration, number } from "./format.js";
import htm from "./vendor/htm.module.js";
import { Component, createRef, h, render } from "./vendor/preact.module.js";

export { Component, createRef, render };
export const html = htm.bind(h);

/** Said by screen readers, seen by nobody. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

// ---- text that moves with the clock ------------------------------------------------------------------------------

const living = new Set();
setInterval(() => document.hidden || living.forEach((each) => each.setState({})), 1000);

/** Text that is computed again every second: <Live of=${() => ago(job.created_at)} />. */
export class Live extends Component {
  componentDidMount() {
    living.add(this);
  }

  componentWillUnmount() {
    living.delete(this);
  }

  render({ of }) {
    return of();
  }
}

// ---- a job -------------------------------------------------------------------------------------------------------

const TONES = { RUNNING: "accent", PAUSED: "warn", CANCELLING: "warn", SUCCEEDED: "good", FAILED: "bad" };
const HOLLOW = new Set(["PENDING", "CANCELLED"]);
const MOVES = { PENDING: ["cancel"], RUNNING: ["pause", "cancel"], PAUSED: ["resume", "cancel"] };

export const isOver = (job) => ["CANCELLED", "SUCCEEDED", "FAILED"].includes(job.state);
export const addressOf = (id) => `#/jobs/${encodeURIComponent(id)}`;
export const pathOf = (id) => `/jobs/${encodeURIComponent(id)}`;

/** The state in words and colour. */
export const StateBadge = ({ job }) => html`
  <span class="badge ${TONES[job.state] ?? ""} ${HOLLOW.has(job.state) ? "hollow" : ""}" data-testid="job-state">
    ${job.state.toLowerCase()}
  </span>
`;

/** Committed iterations of all. */
export function Progress({ job }) {
  const [done, total] = [job.next_iteration, job.num_iterations];
  const tone = { SUCCEEDED: "good", FAILED: "bad" }[job.state] ?? "";
  const label = `${done} of ${total} iterations`;
  return html`
    <span
      class="progress ${tone}"
      data-testid="job-progress"
      title=${label}
      role="progressbar"
      aria-valuemin="0"
      aria-valuemax=${total}
      aria-valuenow=${done}
      aria-label=${label}
    >
      <span style=${{ width: `${(100 * done) / total}%` }}></span>
    </span>
  `;
}

/** Links between the pages of a job. `current`: "", "timeline" or "samples". */
export function JobTabs({ id, current }) {
  const tabs = Object.entries({ "": "Overview", samples: "Samples", timeline: "Timeline" });
  return html`
    <nav class="tabs" aria-label="Pages of this job">
      ${tabs.map(
        ([part, name]) => html`
          <a href=${addressOf(id) + (part && `/${part}`)} aria-current=${part === current ? "page" : null}>${name}</a>
        `,
      )}
    </nav>
  `;
}

/** Head of a page that belongs to a job. */
export const JobHead = ({ id, title, current, children }) => html`
  <header class="job-head">
    <h1>${title}</h1>
    ${children ?? html`<p class="muted mono job-id">${id}</p>`}
    <${JobTabs} id=${id} current=${current} />
  </header>
`;

export const title = (words) => words[0].toUpperCase() + words.slice(1);

/** Buttons for what may be done in this state; `onChange(job)` gets the record after it. */
export class JobControls extends Component {
  root = createRef();

  /** When the last button goes while it has the focus, the focus goes to the job's name. */
  getSnapshotBeforeUpdate() {
    return this.root.current.contains(document.activeElement);
  }

  componentDidUpdate(before, _, hadFocus) {
    const isLost = hadFocus && !this.root.current.contains(document.activeElement);
    if (isLost) this.root.current.closest("tr, header")?.querySelector("a, h1")?.focus();
  }

  async move(verb) {
    const { job, onChange } = this.props;
    if (this.state.isMoving || (verb === "cancel" && !(await isCancelWanted(job)))) return;
    this.setState({ isMoving: true });
    try {
      const changed = await post(`${pathOf(job.id)}:${verb}`);
      announce(`${job.name} is ${changed.state.toLowerCase()}`);
      onChange(changed);
    } catch (error) {
      await showRefusal(`${title(verb)} was refused`, error);
    } finally {
      this.setState({ isMoving: false });
    }
  }

  render({ job, children }, { isMoving = false }) {
    const button = (verb) => html`
      <button
        type="button"
        class="button"
        data-testid="${verb}-job"
        aria-label="${title(verb)} ${job.name}, ${job.id}"
        aria-disabled=${isMoving ? "true" : null}
        onClick=${() => this.move(verb)}
      >
        ${title(verb)}
      </button>
    `; // aria-disabled: a disabled one would lose the focus
    return html`<span class="actions" ref=${this.root}>${(MOVES[job.state] ?? []).map(button)}${children}</span>`;
  }
}

// ---- questions ---------------------------------------------------------------------------------------------------

const isCancelWanted = (job) =>
  confirmed({
    heading: `Cancel ${job.name}?`,
    detail: `${job.id} has ${job.next_iteration} of ${job.num_iterations} iterations. Its record and checkpoints stay; \`onbeat jobs resume\` brings it back.`,
    yes: "Cancel the job",
    no: "Keep it",
  });

/** Asks in a dialog. Resolves to false when it is closed in any other way. */
export async function confirmed({ heading, detail, yes, no }) {
  const buttons = html`<button class="button" value="no">${no}</button>
    <button class="button danger" value="yes">${yes}</button>`;
  return (await opened(heading, detail, buttons)) === "yes";
}

/** Shows what the broker said of a refusal. */
export async function showRefusal(heading, error) {
  if (error instanceof ApiError && error.status === 401) return; // the key form is there
  if (!(error instanceof ApiError)) throw error;
  await opened(heading, error.detail || error.title, html`<button class="button" value="ok">Close</button>`);
}

function opened(heading, detail, buttons) {
  const dialog = document.createElement("dialog");
  dialog.setAttribute("aria-labelledby", "dialog-heading");
  document.body.append(dialog);
  const form = html`<form method="dialog">
    <h2 id="dialog-heading">${heading}</h2>
    <p>${detail}</p>
    <div class="actions">${buttons}</div>
  </form>`;
  render(form, dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
    dialog.showModal();
  });
}

// ---- words, tables and rollouts ----------------------------------------------------------------------------------

/** A sentence of the broker with its `code`, and in a reader's words: "58 min" for 3483 s. `id`: of the page's job. */
export const marked = (text, id) =>
  text.split("`").map((part, index) => (index % 2 ? html`<code>${part}</code>` : inWords(part, id)));

const inWords = (text, id) =>
  (id ? text.replaceAll(id, (_, at) => (at ? "this job" : "This job")) : text)
    .replace(/(?<![.\d])\d{2,} s\b/g, (time) => duration(parseInt(time)))
    .replace(/has been [A-Z]+/, (words) => words.toLowerCase());

/** A table that may be wider than the page. `rows`: lists of cells, the first one names the row. */
export const Table = ({ caption, columns, rows, className = "" }) => html`
  <div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table class=${className}>
      <caption>${caption}</caption>
      <thead>
        <tr>${columns.map((name) => html`<th scope="col">${name}</th>`)}</tr>
      </thead>
      <tbody>
        ${rows.map(
          ([name, ...cells]) => html`<tr>
            <th scope="row">${name}</th>
            ${cells.map((cell) => html`<td>${cell}</td>`)}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>
`;

const SILENT_S = 10; // as the broker's doctor counts it
const NEWEST_S = 5; // the newest heartbeat of a pool is not older, if any of its rollouts lives

/** Now by the clock of the heartbeats, which may differ from the broker's by minutes. `workers`: all of a pool. */
export function heartbeatTime(workers) {
  const now = serverNow();
  const newest = workers.reduce((latest, { last_seen_at: seen }) => Math.max(latest, seen), -Infinity);
  return workers.length ? Math.min(Math.max(now, newest), newest + NEWEST_S) : now;
}

/** `now`: of `heartbeatTime`. */
export const isSilent = (worker, now) => now - worker.last_seen_at > SILENT_S;

/** Names and values side by side, without boxes: [[name, value, about], ...]. */
export const Figures = ({ label, of }) => html`
  <dl class="figures" aria-label=${label}>
    ${of.map(
      ([name, value, about]) => html`<div>
        <dt>${name}</dt>
        <dd><strong>${typeof value === "number" ? number(value) : value}</strong>${about && html`<span>${about}</span>`}</dd>
      </div>`,
    )}
  </dl>
`;
