// The page of a job, live: loaded whole at first, then followed by its stream. Drawn at most once per frame.

import { del, get, isReadOnly, isRefusal, pause, poll, serverNow, stream } from "./api.js";
import { BeforeAfter } from "./before_after.js";
import { Chart, Pointer } from "./charts.js";
import { announceEvent, EventLog, merge } from "./events.js";
import { number, toToml } from "./format.js";
import {
  announce, Component, confirmed, createRef, Fold, FoldOnPhone, heartbeatTime, html, isOver, JobControls, JobHead, pathOf, render, showRefusal,
} from "./parts.js";
import { Series } from "./series.js";
import { aboutOf, Beat, beginsWithExamples, Doctor, Headline } from "./status.js";
import { CHARTS } from "./table.js";
import { TimelinePanel } from "./timeline.js";

const RECENT = 10; // iterations whose events are shown at first
const WORKERS_MS = 5000;
const NO_SCORES = ["evaluation", "policy_version"]; // additional values in the event of an evaluation
const MOST_EVENT_PAGES = 20; // pages of 500 events
const CONNECTIONS = {
  connecting: "connecting…",
  open: "live",
  lost: "connection lost, trying again",
  over: "",
  refused: "not live",
};

export async function show(main, { id }, signal) {
  const first = await load(pathOf(id), signal);
  if (!signal.aborted) render(html`<${JobPage} first=${first} signal=${signal} />`, main);
}

async function load(path, signal) {
  const read = (part, params) => get(path + part, params, signal);
  const afterOf = (job) => Math.max(-1, job.next_iteration - RECENT - 1);
  const jobRead = read("");
  const recentRead = jobRead.then((job) => read("/iterations", { after: afterOf(job) })); // metrics are read meanwhile
  const series = new Series();
  const [job, { iterations }, diagnosis] = await Promise.all([
    jobRead, recentRead, read(":explain"), series.read(path, -1, signal),
  ]);
  // The id of an event begins with its time in milliseconds: a time is a cursor.
  const cursor = afterOf(job) >= 0 && iterations.length ? `${Math.floor(iterations[0].opened_at * 1000)}` : "0";
  return { job, iterations, series, diagnosis, cursor };
}

class JobPage extends Component {
  state = { connection: "connecting", why: "", isSmooth: true };
  path = pathOf(this.props.first.job.id);
  job = this.props.first.job;
  cursor = this.props.first.cursor; // the newest event
  diagnosis = this.props.first.diagnosis;
  seenAt = serverNow(); // the diagnosis
  series = this.props.first.series;
  lines = new Map(); // lines of each chart, until their values change
  records = this.props.first.iterations; // the newest ones, in order
  workers = [];
  now = 0; // time on the clock of the workers' heartbeats
  events = []; // the newest first
  arrived = []; // events that are not among them yet
  openedAt = serverNow();
  turn = 0; // number of the newest call of catchUp
  pointer = new Pointer();
  timeline = createRef();

  componentDidMount() {
    this.follow();
    this.readWorkers();
    poll(WORKERS_MS, this.props.signal, () => (isOver(this.job) ? this.lookForResume() : this.readWorkers()));
  }

  // ---- what comes in -----------------------------------------------------------------------------------------------

  async follow() {
    const { signal } = this.props;
    try {
      const onMessage = (kind, data, id) => {
        this.cursor = id ?? this.cursor;
        this.take(kind, data);
      };
      await stream(`${this.path}/stream`, { after: this.cursor, signal, onMessage, onState: (state) => this.takeState(state) });
    } catch (error) {
      if (isRefusal(error, signal)) this.setState({ connection: "refused", why: error.detail });
    }
  }

  /** A job that is over has no stream: somebody may resume it. */
  async lookForResume() {
    const { signal } = this.props;
    if (this.state.connection !== "over") return;
    try {
      const job = await get(this.path, {}, signal);
      if (isOver(job)) return;
      this.take("job", job);
      this.follow();
    } catch (error) {
      isRefusal(error, signal); // it may be deleted: what was read of it stays
    }
  }

  async readWorkers() {
    if (isOver(this.job)) return;
    const { signal } = this.props;
    try {
      const { workers } = await get("/workers", { pool: this.job.pool }, signal);
      const isNobody = this.diagnosis.findings.some(({ waits_for: what }) => what === "a rollout");
      this.now = isNobody ? serverNow() : heartbeatTime(workers); // all of them may have ended
      this.workers = workers.filter((worker) => worker.job_id === this.job.id);
      this.drawSoon();
    } catch (error) {
      isRefusal(error, signal); // the stream's state shows the network
    }
  }

  takeState(connection) {
    this.setState({ connection, why: "" });
    if (connection === "open") this.catchUp();
  }

  /** Reads the values after those in the curves: the stream repeats only iterations whose events are still kept. */
  async catchUp() {
    const { signal } = this.props;
    const names = ["iteration/wall_s", ...(this.job.config.evaluation ? ["eval/reward_mean"] : [])];
    const known = Math.min(...names.map((name) => this.series.of(name).at(-1)?.[0] ?? -1)); // evaluations may end later
    const turn = (this.turn += 1); // a later call goes on in its place
    for (let isRead = false; !isRead && turn === this.turn && !signal.aborted;) {
      try {
        await this.series.read(this.path, known, signal);
        this.drawCurvesSoon();
        isRead = true;
      } catch (error) {
        isRefusal(error, signal);
        await pause(WORKERS_MS, signal);
      }
    }
  }

  take(kind, data) {
    if (kind === "job") this.job = data;
    else if (kind === "iteration") this.takeIteration(data);
    else if (kind === "event") this.takeEvent(data);
    else if (kind === "explain") [this.diagnosis, this.seenAt] = [data, serverNow()];
    this.drawSoon();
  }

  takeIteration({ record, point }) {
    const before = this.records.find(({ iteration }) => iteration === record.iteration);
    const all = [...this.records.filter((each) => each !== before), record];
    this.records = all.sort((a, b) => a.iteration - b.iteration).slice(-2 * RECENT);
    const isNews = before?.num_accepted !== record.num_accepted || before?.state !== record.state;
    if (isNews) this.timeline.current?.refresh();
    if (record.state !== "COMMITTED") return;
    this.series.add(record.iteration, point);
    this.drawCurvesSoon();
  }

  takeEvent(event) {
    this.arrived.push(event);
    if (event.time > this.openedAt) announceEvent(event);
    if (event.kind !== "evaluation.done") return;
    const scores = Object.entries(event.data).filter(([name, value]) => Number.isFinite(value) && !NO_SCORES.includes(name));
    this.series.add(event.data.evaluation, Object.fromEntries(scores.map(([name, value]) => [`eval/${name}`, value])));
    this.drawCurvesSoon();
  }

  drawCurvesSoon() {
    this.lines.clear();
    this.drawSoon();
  }

  drawSoon() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.events = merge(this.events, this.arrived.splice(0));
      if (!this.props.signal.aborted) this.setState({});
    });
  }

  // ---- what is asked for -------------------------------------------------------------------------------------------

  async remove() {
    const heading = `Delete ${this.job.name}?`;
    const detail =
      "Its record, curves, responses, events and audit log are removed. Checkpoints are files on the trainer's disk, and stay.";
    if (!(await confirmed({ heading, detail, yes: "Delete the job", no: "Keep it" }))) return;
    try {
      await del(this.path);
      announce(`${this.job.name} is deleted`);
      location.hash = "#/";
    } catch (error) {
      await showRefusal("Delete was refused", error);
    }
  }

  /** Takes in all events that are kept, up to the oldest one that is known. */
  loadOlder = async () => {
    const oldest = this.events.at(-1)?.id;
    for (let page = 0, after = "0"; page < MOST_EVENT_PAGES; page += 1) {
      const { events } = await get(`${this.path}/events`, { after }, this.props.signal);
      this.arrived.push(...events);
      after = events.at(-1)?.id;
      if (!after || parseInt(after) >= parseInt(oldest)) break;
    }
    this.drawSoon();
  };

  // ---- what is shown -----------------------------------------------------------------------------------------------

  /** The lines of a chart of CHARTS, or of a single series; the same list until the values change. */
  linesOf(chart) {
    if (!this.lines.has(chart.id)) {
      this.lines.set(chart.id, CHARTS.includes(chart) ? this.series.lines(chart) : [this.series.line("value", chart.id)]);
    }
    return this.lines.get(chart.id);
  }

  chart(chart, options = {}) {
    const lines = this.linesOf(chart);
    if (!lines.length) return null;
    return html`<${Chart}
      key=${chart.id}
      testId="chart-${chart.id}"
      ...${chart}
      ...${options}
      lines=${lines}
      pointer=${this.pointer}
      isSmooth=${this.state.isSmooth}
      ends=${[this.job.first_iteration, this.job.num_iterations - 1]}
    />`;
  }

  render({ first }, { connection, why }) {
    const { job, records } = this;
    const isErrorNews = job.error && !this.diagnosis.findings.some(({ sentence }) => sentence.includes(job.error));
    const live = html`
      <span class="live" data-testid="live" data-state=${connection}>${CONNECTIONS[connection]}${why && `: ${why}`}</span>
    `;
    return html`
      <${JobHead} job=${job} current="" live=${live} about=${aboutOf(job)}>${this.controls(job)}<//>
      ${isErrorNews && html`<p class="notice bad">${job.error}</p>`}
      <${Headline} job=${job} records=${records} series=${this.series} />
      <${Doctor} diagnosis=${this.diagnosis} job=${job} seenAt=${this.seenAt} />
      ${this.lead(job, records)}
      ${this.curves()}
      ${job.config.evaluation && html`<${Fold} summary=${html`<h2>Before and after</h2>`} of=${() => this.answers(job)} />`}
      <${FoldOnPhone} summary=${html`<h2>Timeline</h2>`} of=${() => html`
        <${TimelinePanel} ref=${this.timeline} id=${job.id} signal=${this.props.signal} />
      `} />
      <${FoldOnPhone} summary=${html`<h2>Events</h2>`} of=${() => html`
        <${EventLog} events=${this.events} loadOlder=${first.cursor === "0" ? null : this.loadOlder} />
      `} />
      <${Configuration} job=${job} />
    `;
  }

  /** A new evaluation makes other pairs: they are read again. */
  answers(job) {
    const newest = this.series.of("eval/reward_mean").at(-1)?.[0];
    return html`<${BeforeAfter} key=${newest} job=${job} path=${this.path} signal=${this.props.signal} />`;
  }

  controls(job) {
    const remove = html`<button class="button danger" type="button" data-testid="delete-job" onClick=${() => this.remove()}>Delete</button>`;
    const onChange = (changed) => this.take("job", changed);
    return html`<${JobControls} job=${job} onChange=${onChange}>
      ${!isReadOnly && html`<a class="button" href="#/new?from=${encodeURIComponent(job.id)}">Duplicate</a>`}
      ${!isReadOnly && isOver(job) && remove}
    <//>`;
  }

  /** The chart that leads: of the reward or, as long as there is none, of the loss of examples. */
  get main() {
    return ["reward", "examples"].map((id) => CHARTS.find((chart) => chart.id === id)).find((chart) => this.linesOf(chart).length > 0);
  }

  /** The reward, wide, beside the open iteration and the last one. */
  lead(job, records) {
    const { main } = this;
    const what = beginsWithExamples(job) ? "The loss of the examples" : "The reward";
    const heldOut = CHARTS.find(({ id }) => id === "held-out");
    return html`
      <div class="lead">
        <div class="stack">
          ${main
            ? this.chart(main, { level: 2, height: 360 })
            : html`<div class="empty"><p>${what} is shown from the first committed iteration on.</p></div>`}
          ${this.chart(heldOut, { level: 2, height: 180 })}
        </div>
        <${Beat} records=${records} series=${this.series} workers=${this.workers} job=${job} now=${this.now} />
      </div>
    `;
  }

  curves() {
    const leading = ["reward", "held-out", this.main?.id];
    const charts = CHARTS.filter(({ id }) => !leading.includes(id)).map((chart) => this.chart(chart)).filter(Boolean);
    const others = this.series.others();
    if (!charts.length && !others.length) return null;
    const smooth = (event) => this.setState({ isSmooth: event.target.checked });
    return html`
      <section class="stack" aria-labelledby="curves-heading">
        <div class="head">
          <h2 id="curves-heading">Curves</h2>
          <span class="actions">
            <input type="checkbox" id="smooth" checked=${this.state.isSmooth} onChange=${smooth} />
            <label for="smooth" title="A mean over 2% of the iterations; the values themselves are faint">Smooth long curves</label>
          </span>
        </div>
        <${FoldOnPhone} summary="${number(charts.length)} curves" of=${() => html`<div class="charts">${charts}</div>`} />
        ${others.length > 0 && html`<${Fold} summary="${number(others.length)} more series" of=${() => this.others(others)} />`}
      </section>
    `;
  }

  others(names) {
    return html`<div class="charts">${names.map((name) => this.chart({ id: name, title: name }))}</div>`;
  }
}

/** A job's configuration, to read and to copy. */
class Configuration extends Component {
  text = createRef();
  said = createRef();

  tell(words) {
    announce(words);
    this.said.current.textContent = words;
  }

  async copy() {
    try {
      await navigator.clipboard.writeText(this.text.current.textContent);
      this.tell("Copied");
    } catch {
      // No clipboard on a page that did not come over TLS: it is marked, Ctrl-C takes it.
      getSelection().selectAllChildren(this.text.current);
      this.tell("Selected: press Control C to copy");
    }
  }

  shouldComponentUpdate({ job }) {
    return job.num_iterations !== this.props.job.num_iterations; // nothing else changes
  }

  render({ job }) {
    const text = () => html`
      <div class="stack">
        <span><button class="button" type="button" onClick=${() => this.copy()}>Copy</button> <span class="muted" ref=${this.said}></span></span>
        <pre tabindex="0" role="region" aria-label="Configuration" ref=${this.text}>${toToml(job.config)}</pre>
      </div>
    `;
    return html`<${Fold} summary=${html`<h2>Configuration</h2>`} of=${text} />`;
  }
}
