// Several jobs: what differs in their configurations, their results, and their curves on the same axes.

import { ApiError, get, isRefusal, poll } from "./api.js";
import { Chart, Pointer, Swatch } from "./charts.js";
import { differencesOf, linesOf } from "./differences.js";
import { duration, number } from "./format.js";
import { addressOf, announce, Component, html, isOver, pathOf, render, StateBadge, Table } from "./parts.js";
import { Series } from "./series.js";
import { CHARTS } from "./table.js";

const MOST_LINES = 8; // lines: as many as there are colours
const MOST_JOBS = 24; // jobs that are loaded: three seeds for each line
const REFRESH_MS = 5000;
const AGAIN = 5; // iterations that are asked for once more: their evaluations may come later
const ENDS = 5; // iterations that the first and the last reward are the mean of
const CONCERNS_ALL = [0, 401, 429]; // refusals that the other jobs would have as well
const ABOUT_SEEDS =
  "Jobs that differ only in their seeds are one line: the mean of those that have reached an iteration, in a band from the lowest to the highest.";

export async function show(main, { jobs = "" }, signal) {
  const ids = [...new Set(jobs.split(",").filter(Boolean))];
  if (ids.length < 2) return render(HOW_TO, main);
  const { runs, notes } = await load(ids.slice(0, MOST_JOBS), signal);
  const places = linesOf(runs.map(({ job }) => job)).slice(0, MOST_LINES).flatMap((line) => line.places);
  const shown = runs.filter((_, place) => places.includes(place));
  const numLeft = runs.length - shown.length + Math.max(0, ids.length - MOST_JOBS);
  if (numLeft) notes.push(`One page has at most ${MOST_LINES} lines and ${MOST_JOBS} jobs; left out: ${numLeft} of ${ids.length} jobs.`);
  if (!signal.aborted) render(html`<${Comparison} runs=${shown} notes=${notes} signal=${signal} />`, main);
}

const HOW_TO = html`
  <h1>Compare jobs</h1>
  <div class="empty">
    <p>Tick two or more jobs in the list, then choose Compare.</p>
    <a class="button" href="#/">All jobs</a>
  </div>
`;

/** `notes`: what the broker said of those that could not be had. */
async function load(ids, signal) {
  const answers = await Promise.allSettled(ids.map((id) => read(id, signal)));
  const failed = answers.filter(({ status }) => status === "rejected").map(({ reason }) => reason);
  const worse = failed.find((error) => !(error instanceof ApiError) || error.status === 401);
  if (worse || failed.length === ids.length) throw worse ?? failed[0];
  const runs = answers.filter(({ status }) => status === "fulfilled").map(({ value }) => value);
  return { runs, notes: failed.map((error) => error.message) };
}

async function read(id, signal) {
  const series = new Series();
  const [job] = await Promise.all([get(pathOf(id), {}, signal), series.read(pathOf(id), -1, signal)]);
  return { job, series, isGone: false };
}

class Comparison extends Component {
  state = { notes: this.props.notes, added: [] }; // series that were chosen besides
  runs = this.props.runs; // {job, series, isGone}
  lines = new Map(); // lines by series, until their values change
  pointer = new Pointer();

  componentDidMount() {
    poll(REFRESH_MS, this.props.signal, () => this.refresh());
  }

  async refresh() {
    const { signal } = this.props;
    const active = this.runs.filter(({ isGone }) => !isGone);
    for (const run of active) {
      try {
        await this.update(run);
      } catch (error) {
        if (!isRefusal(error, signal)) return;
        if (error.status === 404) this.lose(run);
        else if (CONCERNS_ALL.includes(error.status)) break; // the shown lines stay; the next look may succeed
      }
    }
    this.lines.clear();
    if (active.length && !signal.aborted) this.setState({});
  }

  async update(run) {
    const path = pathOf(run.job.id);
    const job = await get(path, {}, this.props.signal);
    if (isOver(job) && isOver(run.job)) return;
    const evaluated = run.job.config.evaluation ? (run.series.of("eval/reward_mean").at(-1)?.[0] ?? -1) : Infinity;
    const after = Math.max(-1, Math.min(run.job.next_iteration - 1 - AGAIN, evaluated));
    await run.series.read(path, after, this.props.signal);
    run.job = job; // after both: what is asked for next depends on it
  }

  /** The curves of a lost run stay as they are. */
  lose(run) {
    run.isGone = true;
    const text = `${this.nameOf(run.job)} was deleted. These are the values loaded before.`;
    this.setState({ notes: [...this.state.notes, text] });
    announce(text);
  }

  /** Jobs of the same name have their id beside it. */
  nameOf(job) {
    const isUnique = this.runs.filter((run) => run.job.name === job.name).length === 1;
    return isUnique ? job.name : `${job.name} ${job.id.slice(-6)}`;
  }

  // ---- what is shown ----

  render(_, { notes, added }) {
    this.drawn = linesOf(this.runs.map(({ job }) => ({ name: this.nameOf(job), config: job.config })));
    const hasSeeds = this.drawn.some(({ places }) => places.length > 1);
    const isShown = (chart, series) => chart.lines && series.of(firstOf(chart)).length && series.lines(chart).length;
    const shown = CHARTS.filter((chart) => this.runs.some(({ series }) => isShown(chart, series)));
    const charts = [
      ...shown.map((chart, index) => this.chart(headOf(chart, index), firstOf(chart))),
      ...added.map((name) => this.chart({ title: name }, name)),
    ];
    return html`
      <div class="head">
        <h1>Compare ${this.runs.length} jobs</h1>
        <a class="button" href="#/">Choose others</a>
      </div>
      ${notes.map((text) => html`<p class="notice warn">${text}</p>`)}
      ${this.differences()}
      ${this.section("Results", FACTS.map(([name, valueOf]) => [name, this.runs.map(valueOf)]))}
      <section class="stack" aria-label="Curves">
        <div class="head"><h2>Curves</h2>${this.chooser(shown, added)}</div>
        ${hasSeeds && html`<p class="help">${ABOUT_SEEDS}</p>`}
        <div class="charts">${charts}</div>
      </section>
    `;
  }

  chart(options, name) {
    if (!this.lines.has(name)) {
      const curvesOf = (places) => places.map((place) => this.runs[place].series.of(name));
      this.lines.set(name, this.drawn.map(({ label, places }) => ({ name: label, ...overSeeds(curvesOf(places)) })));
    }
    const shared = { lines: this.lines.get(name), pointer: this.pointer, bandName: "lowest to highest" };
    return html`<${Chart} key=${name} ...${options} ...${shared} />`;
  }

  chooser(shown, added) {
    const drawn = new Set([...shown.map(firstOf), ...added]);
    const names = [...new Set(this.runs.flatMap(({ series }) => [...series.points.keys()]))].filter((name) => !drawn.has(name)).sort();
    const choose = (event) => event.target.value && this.setState({ added: [...added, event.target.value] });
    return html`
      <span class="actions">
        <label class="muted" for="other-curves">Another curve</label>
        <select id="other-curves" value="" onChange=${choose}>
          <option value="">choose</option>
          ${names.map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
      </span>
    `;
  }

  differences() {
    const differences = differencesOf(this.runs.map(({ job }) => job.config));
    const title = "Configuration differences";
    if (differences.length) {
      const code = (text) => html`<span class="mono">${text}</span>`;
      return this.section(title, differences.map(([key, texts]) => [code(key), texts.map(code)]));
    }
    return html`<section class="stack">
      <h2>${title}</h2>
      <p class="muted">Nothing: their configurations are equal but for the name.</p>
    </section>`;
  }

  /** Names of the jobs above their columns, in the colours of their curves. */
  section(title, rows) {
    const lineOf = (place) => this.drawn.findIndex(({ places }) => places.includes(place));
    const columns = this.runs.map(({ job }, place) => html`<${Swatch} index=${lineOf(place)} /> <a href=${addressOf(job.id)}>${this.nameOf(job)}</a>`);
    return html`
      <section class="stack">
        <h2>${title}</h2>
        <${Table} label=${title} className="compared" columns=${["Job", ...columns]} rows=${rows.map(([name, cells]) => [name, ...cells])} />
      </section>
    `;
  }
}

const firstOf = ({ lines }) => lines[0][1];

/** The head of a chart, which has a line for each job: only the first of the several lines of one job. */
function headOf({ id, title, lines, unit, isPercent, isLog, domain }, index) {
  const name = lines.length > 1 ? `${title}, ${lines[0][0]}` : title;
  return { title: name, unit, isPercent, isLog, domain, testId: `chart-${id}`, isWide: index === 0, height: index ? 168 : 260 };
}

/** The mean of the curves of several seeds and a band around it, over those that have a value at an iteration. */
export function overSeeds(curves) {
  if (curves.length === 1) return { points: curves[0] };
  const columns = [...Map.groupBy(curves.flat(), ([x]) => x)].map(([x, points]) => [x, points.map(([, y]) => y)]);
  columns.sort(([x], [other]) => x - other);
  return {
    points: columns.map(([x, ys]) => [x, mean(ys)]),
    band: columns.map(([x, ys]) => [x, Math.min(...ys), Math.max(...ys)]),
  };
}

const valuesOf = ({ series }, name) => series.of(name).map(([, y]) => y);
const mean = (values) => (values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null);

const FACTS = [
  ["State", ({ job, isGone }) => (isGone ? "gone" : html`<${StateBadge} job=${job} />`)],
  ["Iterations", ({ job }) => `${job.next_iteration} of ${job.num_iterations}`],
  [`Reward, first ${ENDS}`, (run) => number(mean(valuesOf(run, "iteration/reward_mean").slice(0, ENDS)))],
  [`Reward, last ${ENDS}`, (run) => number(mean(valuesOf(run, "iteration/reward_mean").slice(-ENDS)))],
  ["Held-out reward, newest", (run) => number(valuesOf(run, "eval/reward_mean").at(-1))],
  ["Time", ({ job }) => (job.started_at && job.finished_at ? duration(job.finished_at - job.started_at) : "–")],
  ["Time of an iteration", (run) => duration(mean(valuesOf(run, "iteration/wall_s")) ?? NaN)],
  ["Tokens per second", (run) => number(mean(valuesOf(run, "iteration/tokens_per_s")))],
  ["Tokens/s per device", (run) => number(mean(valuesOf(run, "iteration/tpspd")))],
  ["Engine against trainer, nats", (run) => number(mean(valuesOf(run, "iteration/mismatch_mean")))],
];
