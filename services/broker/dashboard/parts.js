// Parts of all pages: Preact with htm, and the elements that several pages show.

import { isReadOnly, isRefusal, post, serverNow } from "./api.js";
import { clock, duration, number } from "./format.js";
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

/** A bar of what is done, and of what of it has failed. */
export const Meter = ({ done, total, failed = 0, label, tone = "" }) => html`
  <span
    class="meter ${tone}"
    title=${label}
    role="progressbar"
    aria-valuemin="0"
    aria-valuemax=${total}
    aria-valuenow=${done}
    aria-label=${label}
  >
    <span style=${{ width: `${(100 * (done - failed)) / (total || 1)}%` }}></span>
    ${failed > 0 && html`<span class="failed" style=${{ width: `${(100 * failed) / total}%` }}></span>`}
  </span>
`;

/** Committed iterations of all. */
export function Progress({ job: { state, next_iteration: done, num_iterations: total } }) {
  const tone = { SUCCEEDED: "good", FAILED: "bad" }[state];
  return html`<${Meter} done=${done} total=${total} tone=${tone} label=${`${done} of ${total} iterations`} />`;
}

/** The time that a job has run. */
export const elapsedOf = (job) => duration(Math.max(1, Math.floor((job.finished_at ?? serverNow()) - job.started_at)));

const TABS = { "": "Overview", samples: "Samples", timeline: "Timeline" };

/** The same head on all pages of a job. `what`: is shown of it. `current`: a key of TABS. `live`: beside its state. */
export const JobHead = ({ job, what, current, live, about, children }) => html`
  <header class="job-head">
    <div class="head">
      <div class="job-title">
        <h1>${what && html`<span class="visually-hidden">${what} of </span>`}${job.name}</h1>
        <${StateBadge} job=${job} />
        ${live}
      </div>
      ${children}
    </div>
    <p class="help"><span class="mono">${job.id}</span>${about && ` · ${about}`}</p>
    <nav class="tabs" aria-label="Pages of this job">
      ${Object.entries(TABS).map(
        ([part, name]) => html`
          <a href=${addressOf(job.id) + (part && `/${part}`)} aria-current=${part === current ? "page" : null}>${name}</a>
        `,
      )}
    </nav>
  </header>
`;

/** The prompt of a group, whose id is "3-0", or "eval-4-0" of an evaluation. Counted from 1, as people count. */
export function promptOf(groupId) {
  const [, evaluation, count, index] = /^(eval-)?(\d+)-(\d+)$/.exec(groupId) ?? [];
  if (index === undefined) return `Group ${groupId}`;
  const place = Number(index) + 1;
  return evaluation ? `Held-out prompt ${place} after ${count} iterations` : `Prompt ${place} of iteration ${count}`;
}

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
    const moves = isReadOnly ? [] : (MOVES[job.state] ?? []);
    return html`<span class="actions" ref=${this.root}>${moves.map(button)}${children}</span>`;
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
  if (!isRefusal(error) || error.status === 401) return; // the key form is there
  await opened(heading, error.message, html`<button class="button" value="ok">Close</button>`);
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

// ---- words, tables and keys --------------------------------------------------------------------------------------

/** A sentence of the broker with its `code`, and in a reader's words: "58 min" for 3483 s. `id`: of the page's job. */
export const marked = (text, id) =>
  text.split("`").map((part, index) => (index % 2 ? html`<code>${part}</code>` : inWords(part, id)));

const inWords = (text, id) =>
  (id ? text.replaceAll(id, (_, at) => (at ? "this job" : "This job")) : text)
    .replace(/(?<![.\d])\d{2,} s\b/g, (time) => duration(parseInt(time)))
    .replace(/has been [A-Z]+/, (words) => words.toLowerCase());

/**
 * A table that may be wider than the page. `rows`: lists of cells, the first one names the row. `numbersFrom`: the first
 * column of numbers. `label`: instead of a `caption`.
 */
export const Table = ({ caption, label = caption, columns, rows, numbersFrom = Infinity, className = "" }) => html`
  <div class="scroll ${className}" tabindex="0" role="region" aria-label=${label}>
    <table>
      ${caption && html`<caption>${caption}</caption>`}
      <thead>
        <tr>${columns.map((name, index) => html`<th scope="col" class=${index >= numbersFrom ? "num" : null}>${name}</th>`)}</tr>
      </thead>
      <tbody>
        ${rows.map(
          ([name, ...cells]) => html`<tr>
            <th scope="row">${name}</th>
            ${cells.map((cell, index) => html`<td class=${index + 1 >= numbersFrom ? "num" : null}>${cell}</td>`)}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>
`;

/** Details whose content, `of()`, is made when somebody opens them. */
export class Fold extends Component {
  render({ summary, label, of, className }, { isOpen }) {
    return html`
      <details class=${className} onToggle=${(event) => this.setState({ isOpen: event.target.open })}>
        <summary aria-label=${label}>${summary}</summary>
        ${isOpen && of()}
      </details>
    `;
  }
}

const phone = window.matchMedia("(max-width: 760px)"); // as in style.css

/** Folded on a phone, where the page would be long; elsewhere as it is. */
export const FoldOnPhone = ({ summary, of }) => (phone.matches ? html`<${Fold} summary=${summary} of=${of} />` : of());

/** The place that a key moves to: from `index` by its step, to an end by Home and End. null: it is no such key. */
export function moved(event, steps, index, last) {
  const wanted = { Home: 0, End: last }[event.key] ?? index + steps[event.key];
  if (Number.isNaN(wanted) || last < 0) return null;
  event.preventDefault();
  return Math.min(last, Math.max(0, wanted));
}

/** Why what is shown is not refreshed. */
export const asOf = (error, seenAt) => `${error.title}. ${error.detail} This is as of ${clock(seenAt)}; it goes on by itself.`;

// ---- rollouts ----------------------------------------------------------------------------------------------------

const SILENT_S = 10; // as the broker's doctor counts it
const STARTING_S = 120; // the longest start of a process that has announced its start and loads its libraries
const NEWEST_S = 5; // the newest heartbeat of a pool is not older, if any of its rollouts lives

/** Now by the clock of the heartbeats, which may differ from the broker's by minutes. `workers`: all of a pool. */
export function heartbeatTime(workers) {
  const now = serverNow();
  const newest = workers.reduce((latest, { last_seen_at: seen }) => Math.max(latest, seen), -Infinity);
  return workers.length ? Math.min(Math.max(now, newest), newest + NEWEST_S) : now;
}

/** `now`: of `heartbeatTime`. */
export const isSilent = (worker, now) =>
  now - worker.last_seen_at > (worker.state === "starting" && !worker.job_id ? STARTING_S : SILENT_S);

/** Names and values side by side, without boxes: [[name, value, about], ...]. */
export const Figures = ({ label, of, className = "" }) => html`
  <dl class="figures ${className}" aria-label=${label}>
    ${of.map(
      ([name, value, about]) => html`<div>
        <dt>${name}</dt>
        <dd><strong>${typeof value === "number" ? number(value) : value}</strong>${about && html`<span>${about}</span>`}</dd>
      </div>`,
    )}
  </dl>
`;
