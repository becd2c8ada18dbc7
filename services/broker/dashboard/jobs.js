// The list of jobs: asked for again while it is in sight, since lists have no stream.

import { get, isReadOnly, isRefusal, poll, serverNow } from "./api.js";
import { columnsOf } from "./differences.js";
import { ago, clock, duration, number } from "./format.js";
import {
  addressOf, announce, asOf, Component, createRef, elapsedOf, html, isOver, JobControls, Live, marked, pathOf, Progress, render, StateBadge,
} from "./parts.js";

const REFRESH_MS = 3000;
const TYPING_MS = 250; // until the broker is asked for what is typed
const PAGE = 50;
const ALL = 500; // the most that the broker lists; a search looks at the newest ones
const STATES = ["PENDING", "RUNNING", "PAUSED", "CANCELLING", "SUCCEEDED", "FAILED", "CANCELLED"];
const MOST_COLUMNS = 4; // columns for keys that differ
const NUM_POINTS = 40; // points of a small curve
const MAX_CURVES = 20; // curves read at a time; the next look goes on with the others
const [WIDTH, HEIGHT] = [96, 26]; // pixels of a small curve

export async function show(main, { state = "", q = "", differ = "" }, signal) {
  const page = { state, text: q, hasKeys: Boolean(differ), limit: PAGE };
  const { jobs } = await get("/jobs", paramsOf(page), signal);
  if (!signal.aborted) render(html`<${JobsPage} ...${page} jobs=${jobs} signal=${signal} />`, main);
}

const paramsOf = ({ state, text, limit }) => ({ state, limit: text.trim() ? ALL : limit });

class JobsPage extends Component {
  state = {
    filter: { state: this.props.state, text: this.props.text, hasKeys: this.props.hasKeys, limit: PAGE },
    selected: [],
    problem: "",
  };
  jobs = this.props.jobs; // as they were read last
  curves = new Map(); // job id -> {points, next, state, problem}: as of iteration `next` in that state
  turn = 0; // number of the newest request for the list: older answers are not wanted
  seenAt = Date.now() / 1000;
  search = createRef();

  componentDidMount() {
    this.readCurves();
    poll(REFRESH_MS, this.props.signal, () => this.refresh());
  }

  async refresh() {
    const { signal } = this.props;
    const turn = (this.turn += 1);
    try {
      const { jobs } = await get("/jobs", paramsOf(this.state.filter), signal);
      if (turn !== this.turn) return; // asked again meanwhile
      this.announceChanges(jobs);
      this.jobs = jobs;
      this.seenAt = Date.now() / 1000;
      this.setState({ problem: "" }, () => this.readCurves());
    } catch (error) {
      if (isRefusal(error, signal) && turn === this.turn) this.setState({ problem: asOf(error, this.seenAt) });
    }
  }

  announceChanges(jobs) {
    const before = new Map(this.jobs.map((job) => [job.id, job.state]));
    const changed = jobs.filter((job) => before.has(job.id) && before.get(job.id) !== job.state);
    if (changed.length) announce(changed.map((job) => `${job.name} is ${job.state.toLowerCase()}`).join(", "));
  }

  /** After a move of the user. */
  changed(job) {
    this.jobs = this.jobs.map((each) => (each.id === job.id ? job : each)); // or it would be announced as news
    this.setState({});
    this.refresh();
  }

  // ---- filter, pages, curves ----

  filter(change) {
    const filter = { ...this.state.filter, ...change };
    this.turn += 1; // an answer to the old question is not wanted any more
    this.setState({ filter }); // jobs that are already here are shown at once
    const chosen = { state: filter.state, q: filter.text.trim(), differ: filter.hasKeys ? "1" : "" };
    const query = new URLSearchParams(Object.entries(chosen).filter(([, value]) => value));
    history.replaceState(null, "", `#/${query.size ? `?${query}` : ""}`);
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.refresh(), TYPING_MS);
  }

  /** The jobs that are looked for, as many as are shown. */
  found() {
    const { state, text, limit } = this.state.filter;
    const wanted = text.trim().toLowerCase();
    const isWanted = (job) => [job.name, job.id, job.pool].some((word) => word.toLowerCase().includes(wanted));
    return this.jobs.filter((job) => (!state || job.state === state) && isWanted(job)).slice(0, limit);
  }

  /** The newest rewards of the jobs that are shown, and their first problem: small requests, only for what is new. */
  async readCurves() {
    const { signal } = this.props;
    if (this.isReading || signal.aborted) return;
    this.isReading = true;
    const isDue = (job) => {
      const known = this.curves.get(job.id);
      return job.next_iteration > (known?.next ?? 0) || (job.next_iteration > 0 && job.state !== known.state);
    };
    try {
      for (const job of this.found().filter(isDue).slice(0, MAX_CURVES)) {
        const known = this.curves.get(job.id)?.points ?? [];
        const after = Math.max(known.at(-1)?.[0] ?? -1, job.next_iteration - 1 - NUM_POINTS);
        const { metrics } = await get(`${pathOf(job.id)}/metrics`, { after }, signal);
        const points = [...known, ...(metrics["iteration/reward_mean"] ?? [])].slice(-NUM_POINTS);
        const { findings } = await get(`${pathOf(job.id)}:explain`, {}, signal);
        const problem = findings.find((finding) => finding.is_problem)?.sentence.replaceAll(job.id, "it");
        this.curves.set(job.id, { points, next: job.next_iteration, state: job.state, problem });
        this.setState({});
      }
    } catch (error) {
      isRefusal(error, signal); // the list says what is wrong
    } finally {
      this.isReading = false;
    }
  }

  select(id, isOn) {
    const rest = this.state.selected.filter((each) => each !== id);
    this.setState({ selected: isOn ? [...rest, id] : rest });
  }

  // ---- what is shown ----

  render(_, { filter, selected, problem }) {
    const { jobs } = this;
    const shown = this.found();
    const keys = filter.hasKeys ? columnsOf(shown) : null;
    const columns = keys?.slice(0, MOST_COLUMNS) ?? [];
    const scale = scaleOf(shown.map(({ id }) => this.curves.get(id)?.points ?? []));
    const notes = [summaryOf(jobs, jobs.length >= paramsOf(filter).limit), ...notesOf(scale, keys)];
    const hasMore = shown.length >= filter.limit && filter.limit < ALL;
    return html`
      <div class="head jobs-head">
        <h1>Jobs</h1>
        ${this.filters(filter)}
        ${!isReadOnly && html`<a class="button primary" href="#/new">New job</a>`}
      </div>
      ${jobs.length > 0 && html`<p class="muted">${notes.join(" · ")}</p>`}
      ${problem && html`<p class="notice warn" role="alert">${problem}</p>`}
      <div class=${columns.length ? "scroll" : null}>
        ${shown.length ? this.table(shown, selected, scale, columns) : this.empty(filter)}
      </div>
      ${hasMore &&
      html`<div class="actions center">
        <button type="button" class="button" onClick=${() => this.filter({ limit: Math.min(filter.limit + PAGE, ALL) })}>Show more</button>
      </div>`}
      ${selected.length > 0 && this.compareBar(selected)}
    `;
  }

  filters({ state, text, hasKeys }) {
    return html`
      <search class="actions">
        <label class="visually-hidden" for="search">Search jobs</label>
        <input
          id="search"
          type="search"
          ref=${this.search}
          value=${text}
          placeholder="Name, id or pool"
          onInput=${(event) => this.filter({ text: event.target.value })}
        />
        <label class="visually-hidden" for="state">State</label>
        <select id="state" value=${state} onChange=${(event) => this.filter({ state: event.target.value })}>
          <option value="">Any state</option>
          ${STATES.map((each) => html`<option value=${each}>${each.toLowerCase()}</option>`)}
        </select>
        <span class="actions">
          <input id="differ" type="checkbox" checked=${hasKeys} onChange=${(event) => this.filter({ hasKeys: event.target.checked })} />
          <label for="differ">Columns for what differs</label>
        </span>
      </search>
    `;
  }

  table(jobs, selected, scale, keys) {
    const column = (name) => html`<th scope="col">${name}</th>`;
    return html`
      <table class="jobs">
        <thead>
          <tr>
            <th><span class="visually-hidden">Compare</span></th>
            ${["Job", "State"].map(column)}
            ${keys.map(({ name, key }) => html`<th class="job-value" scope="col" title=${key}>${name}</th>`)}
            ${["Reward", "Progress", "Time"].map(column)}
            <th><span class="visually-hidden">Actions</span></th>
          </tr>
        </thead>
        <tbody>
          ${jobs.map(
            (job) => html`<${JobRow}
              key=${job.id}
              job=${job}
              points=${this.curves.get(job.id)?.points}
              problem=${this.curves.get(job.id)?.problem}
              scale=${scale}
              values=${keys.map(({ name, texts }) => [name, texts.get(job.id) ?? "–"])}
              isSelected=${selected.includes(job.id)}
              onSelect=${(isOn) => this.select(job.id, isOn)}
              onChange=${(changed) => this.changed(changed)}
            />`,
          )}
        </tbody>
      </table>
    `;
  }

  empty({ state, text }) {
    const reset = () => {
      this.filter({ state: "", text: "" });
      this.search.current.focus();
    };
    if (!state && !text.trim()) return NO_JOBS;
    return html`
      <div class="empty">
        <p>No job matches the search.</p>
        <button type="button" class="button" onClick=${reset}>Show all jobs</button>
      </div>
    `;
  }

  compareBar(selected) {
    const address = `#/compare?jobs=${selected.map(encodeURIComponent).join(",")}`;
    const text = selected.length === 1 ? "1 job selected: choose another one to compare" : `${selected.length} jobs selected`;
    return html`
      <div class="compare-bar">
        <span role="status">${text}</span>
        ${selected.length > 1 && html`<a class="button primary" href=${address}>Compare</a>`}
        <button type="button" class="button quiet" onClick=${() => this.setState({ selected: [] })}>Clear</button>
      </div>
    `;
  }
}

const NO_JOBS = isReadOnly ? html`<div class="empty"><h2>No jobs were recorded here</h2></div>` : html`
  <div class="empty">
    <h2>No jobs yet</h2>
    <p>Start with the quick start here, or from a terminal:</p>
    <pre><code>onbeat jobs create examples/quickstart.toml</code></pre>
    <a class="button primary" href="#/new">New job</a>
  </div>
`;

function summaryOf(jobs, isCut) {
  const count = (state) => jobs.filter((job) => job.state === state).length;
  const parts = Object.entries({ running: count("RUNNING"), "in the queue": count("PENDING"), paused: count("PAUSED") });
  const words = parts.filter(([, num]) => num).map(([what, num]) => `${num} ${what}`);
  return [...words, `${isCut ? "the newest " : ""}${jobs.length} ${jobs.length === 1 ? "job" : "jobs"}`].join(" · ");
}

/** One scale for all curves: from 0, or the lowest value below it, to the highest. */
export function scaleOf(curves) {
  const values = curves.flatMap((points) => points.map(([, y]) => y));
  return values.length ? [Math.min(0, ...values), Math.max(0, ...values)] : null;
}

function notesOf(scale, keys) {
  const notes = scale ? [`reward curves from ${number(scale[0])} to ${number(scale[1])}`] : [];
  if (keys?.length === 0) notes.push("no differences but names");
  if (keys?.length > MOST_COLUMNS) notes.push(`the first ${MOST_COLUMNS} of ${keys.length} keys that differ: search for similar jobs to see the others`);
  return notes;
}

// ---- one job -----------------------------------------------------------------------------------------------------

class JobRow extends Component {
  shouldComponentUpdate(next) {
    const { props } = this;
    const isSame = ["state", "next_iteration", "queue_position", "error"].every((name) => next.job[name] === props.job[name]);
    const isAlike = ["scale", "values"].every((name) => JSON.stringify(next[name]) === JSON.stringify(props[name]));
    return !isSame || !isAlike || ["points", "problem", "isSelected"].some((name) => next[name] !== props[name]);
  }

  render({ job, points, problem, scale, values, isSelected, onSelect, onChange }) {
    const place = job.queue_position ? `no. ${job.queue_position} in the queue` : "";
    return html`
      <tr data-testid="job-row">
        <td class="job-box">
          <input
            type="checkbox"
            checked=${isSelected}
            aria-label="Select ${job.name}, ${job.id}, to compare"
            onChange=${(event) => onSelect(event.target.checked)}
          />
        </td>
        <th class="job-name" scope="row">
          <a href=${addressOf(job.id)}>${job.name}</a>
          <span class="help"><span class="mono">${job.id}</span> ${job.pool !== "default" && html`<span class="pool" title="pool">${job.pool}</span>`}</span>
          ${job.error && html`<span class="job-error bad">${job.error}</span>`}
          ${problem && !job.error && html`<span class="job-error bad" data-testid="job-finding">! ${marked(problem)}</span>`}
        </th>
        <td class="job-state"><${StateBadge} job=${job} />${place && html`<span class="help">${place}</span>`}</td>
        ${values.map(([name, text]) => html`<td class="job-value mono" data-key=${name} title=${text}>${text}</td>`)}
        <td class="job-reward">${points?.length > 0 && html`<${Curve} points=${points} scale=${scale} />`}</td>
        <td class="job-progress">
          <${Progress} job=${job} />
          <span class="help">${job.next_iteration} / ${job.num_iterations}</span>
        </td>
        <td class="job-time" title="created ${clock(job.created_at)}">
          <span><${Live} of=${() => timeOf(job)[0]} /></span>
          <span class="help"><${Live} of=${() => timeOf(job)[1]} /></span>
        </td>
        <td class="job-controls"><${JobControls} job=${job} onChange=${onChange} /></td>
      </tr>
    `;
  }
}

/** The time that a job took or takes, and when that was. */
function timeOf(job) {
  if (isOver(job)) return [job.started_at === null ? "never ran" : elapsedOf(job), ago(job.finished_at)];
  return job.started_at === null ? [duration(Math.max(1, Math.floor(serverNow() - (job.queued_at ?? job.created_at)))), "waiting"] : [elapsedOf(job), "so far"];
}

/** The newest reward and the way there. */
function Curve({ points, scale: [low, high] }) {
  const newest = points.at(-1)[1];
  const [first, last] = [points[0][0], points.at(-1)[0]];
  const x = (iteration) => (2 + ((iteration - first) / Math.max(1, last - first)) * (WIDTH - 6)).toFixed(1);
  const y = (value) => (HEIGHT - 3 - ((value - low) / (high - low || 1)) * (HEIGHT - 6)).toFixed(1);
  return html`
    <svg class="spark" viewBox="0 0 ${WIDTH} ${HEIGHT}" width=${WIDTH} height=${HEIGHT} aria-hidden="true">
      <polyline points=${points.map(([px, py]) => `${x(px)},${y(py)}`).join(" ")} />
      <circle cx=${x(last)} cy=${y(newest)} r="2.2" />
    </svg>
    <span class="num">${number(newest)}</span>
  `;
}
