// The workers of a pool: its rollouts by their last heartbeat, and the problems of the whole installation.

import { get, isRefusal, poll, serverNow } from "./api.js";
import { ago, clock, number } from "./format.js";
import { addressOf, asOf, Component, Figures, heartbeatTime, html, isSilent, marked, render, Table } from "./parts.js";

const REFRESH_MS = 5000;
const TONES = { generating: "good", updating: "accent", starting: "accent", draining: "warn" };
const COLUMNS = ["Rollout", "State", "Job", "Last seen", "Version", "Answering now", "Tokens/s", "Devices"];
const NUMBERS_FROM = 4;

export async function show(main, { pool = "default" }, signal) {
  const first = await look(pool, signal);
  if (!signal.aborted) render(html`<${WorkersPage} pool=${pool} first=${first} signal=${signal} />`, main);
}

/** Pools have no list of their own: those of the newest jobs. */
async function look(pool, signal) {
  const read = (path, params = {}) => get(path, params, signal);
  const [{ workers }, status, { jobs }, { findings }] = await Promise.all([
    read("/workers", { pool }), read(`/pools/${encodeURIComponent(pool)}`), read("/jobs", { limit: 100 }), read("/doctor"),
  ]);
  const pools = [...new Set(["default", pool, ...jobs.map((job) => job.pool)])].sort();
  const problems = findings.filter((finding) => finding.is_problem).map((finding) => finding.sentence);
  const sentences = [...new Set(problems)]; // jobs may wait for the same
  return { workers, status, pools, sentences, seenAt: Date.now() / 1000, problem: "" };
}

class WorkersPage extends Component {
  state = this.props.first;

  componentDidMount() {
    poll(REFRESH_MS, this.props.signal, () => this.refresh());
  }

  async refresh() {
    const { pool, signal } = this.props;
    try {
      this.setState(await look(pool, signal));
    } catch (error) {
      if (isRefusal(error, signal)) this.setState({ problem: asOf(error, this.state.seenAt) });
    }
  }

  render({ pool }, { workers, status, pools, sentences, problem }) {
    const now = status.num_rollouts ? heartbeatTime(workers) : serverNow(); // all of them may have ended
    const alive = workers.filter((worker) => !isSilent(worker, now));
    const figures = [
      ["Rollouts", status.num_rollouts],
      ["Trainers", status.num_trainers, startingOf(status.num_starting_trainers)],
      ["Active jobs", status.num_jobs],
      ["Prompts waiting", status.num_unclaimed_prompts, `of ${number(status.num_prompts)} without an answer`],
      ["Tokens/s", alive.reduce((sum, worker) => sum + (worker.tokens_per_s ?? 0), 0)],
    ];
    const choose = (event) => (location.hash = `#/workers?pool=${encodeURIComponent(event.target.value)}`);
    return html`
      <div class="head">
        <h1>Workers</h1>
        <div class="actions">
          <label for="pool">Pool</label>
          <select id="pool" value=${pool} onChange=${choose}>${pools.map((name) => html`<option>${name}</option>`)}</select>
        </div>
      </div>
      ${problem && html`<p class="notice warn" role="alert">${problem}</p>`}
      ${sentences.length > 0 &&
      html`<section class="notice bad">
        <h2>What the doctor finds</h2>
        <ul class="findings">${sentences.map((sentence) => html`<li class="finding">${marked(sentence)}</li>`)}</ul>
      </section>`}
      <${Figures} label="The pool" of=${figures} />
      ${workers.length
        ? html`<${Table} label="Rollouts" columns=${COLUMNS} rows=${rowsOf(workers, now)} numbersFrom=${NUMBERS_FROM} className="ids" />`
        : NO_ROLLOUTS}
    `;
  }
}

const startingOf = (num) => (num === 1 ? "a trainer is starting" : num > 1 ? `${num} trainers are starting` : "");

const NO_ROLLOUTS = html`
  <div class="empty">
    <h2>No rollouts</h2>
    <p>None has been seen in this pool. On one machine this starts all services:</p>
    <pre><code>onbeat up</code></pre>
  </div>
`;

function rowsOf(workers, now) {
  return workers
    .toSorted((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }))
    .map((worker) => {
      const silent = isSilent(worker, now);
      const seenAt = worker.last_seen_at + serverNow() - now; // time on the broker's clock
      const tone = silent ? "bad" : (TONES[worker.state] ?? "hollow");
      return [
        html`<span class="mono">${worker.id}</span>`,
        html`<span class="badge ${tone}">${silent ? `silent, was ${worker.state}` : worker.state}</span>`,
        worker.job_id ? html`<a class="mono" href=${addressOf(worker.job_id)}>${worker.job_id}</a>` : "–",
        html`<span title=${clock(seenAt)}>${ago(seenAt)}</span>`,
        ...[worker.policy_version, worker.num_in_flight, worker.tokens_per_s, worker.num_devices].map((value) => number(value)),
      ];
    });
}
