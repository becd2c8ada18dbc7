// Several jobs on the same axes: their curves, what they were told to do differently, and how it went.

import { ApiError, get, pause, poll } from "./api.js";
import { lineChart, link } from "./charts.js";
import { isOver, stateBadge } from "./controls.js";
import { announce, clear, duration, el, number } from "./dom.js";
import { addressOf } from "./jobrow.js";
import { CHARTS, Series } from "./series.js";

const MOST = 8; // jobs: as many as there are colours
const REFRESH_MS = 5000;
const AGAIN = 5; // iterations that are asked for once more: their evaluations may come later
const ENDS = 5; // iterations that the first and the last reward are the mean of
const CONCERNS_ALL = [0, 401, 429]; // refusals that the other jobs would have as well

export async function show(main, { jobs = "" }, signal) {
  const ids = [...new Set(jobs.split(",").filter(Boolean))];
  if (ids.length < 2) return main.append(el("h1", {}, "Compare jobs"), howTo());
  const page = new Comparison(signal);
  const failures = await page.load(ids.slice(0, MOST));
  if (signal.aborted) return;
  main.append(...page.elements(failures, ids.length));
  page.draw();
  page.run();
}

function howTo() {
  return el(
    "div",
    { class: "empty" },
    el("p", {}, "Tick two or more jobs in the list, then choose Compare."),
    el("a", { class: "button", href: "#/" }, "All jobs"),
  );
}

class Comparison {
  constructor(signal) {
    this.signal = signal;
    this.runs = []; // {job, series, isGone}
    this.charts = new Map(); // by the name of the series
    this.added = []; // names of series that were chosen besides
  }

  /** What the broker said of those that could not be had. */
  async load(ids) {
    const answers = await Promise.allSettled(ids.map((id) => this.read(id)));
    const failed = answers.filter(({ status }) => status === "rejected").map(({ reason }) => reason);
    const worse = failed.find((error) => !(error instanceof ApiError) || error.status === 401);
    if (worse || failed.length === ids.length) throw worse ?? failed[0];
    this.runs = answers.filter(({ status }) => status === "fulfilled").map(({ value }) => value);
    return failed.map((error) => error.detail || error.message);
  }

  async read(id) {
    const path = `/jobs/${encodeURIComponent(id)}`;
    const [job, { metrics }] = await Promise.all([get(path, {}, this.signal), get(`${path}/metrics`, {}, this.signal)]);
    const series = new Series();
    series.load(metrics);
    return { job, series, isGone: false };
  }

  elements(failures, numAsked) {
    const notes = numAsked > MOST ? [...failures, `Only the first ${MOST} of ${numAsked} jobs are shown.`] : failures;
    this.notes = el("div", {}, notes.map(note));
    this.facts = el("tbody");
    this.differences = el("div");
    this.grid = el("div", { class: "grid charts" });
    this.others = el("select", { id: "other-curves", on: { change: () => this.addCurve() } });
    link(this.grid, () => [...this.charts.values()]);
    return [
      el(
        "div",
        { class: "head" },
        el("h1", {}, `Compare ${this.runs.length} jobs`),
        el("a", { class: "button", href: "#/" }, "Choose others"),
      ),
      this.notes,
      section("How it went", this.table("How it went", this.facts)),
      el(
        "section",
        { class: "curves", "aria-label": "Curves" },
        el(
          "div",
          { class: "head" },
          el("h2", {}, "Curves"),
          el("label", { class: "muted", for: "other-curves" }, "Another curve"),
          this.others,
        ),
        this.grid,
      ),
      section("What they were told to do differently", this.differences),
    ];
  }

  /** Names of the jobs above their columns, in the colours of their curves. */
  table(label, body) {
    const heads = this.runs.map(({ job }, index) =>
      el(
        "th",
        { scope: "col" },
        el("span", { class: "swatch", style: { background: `var(--series-${index + 1})` } }),
        el("a", { href: addressOf(job.id) }, this.nameOf(job)),
      ),
    );
    return el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
      el("table", { class: "compared" }, el("thead", {}, el("tr", {}, el("td"), heads)), body),
    );
  }

  /** Jobs of the same name have their id beside it. */
  nameOf(job) {
    const isUnique = this.runs.filter((run) => run.job.name === job.name).length === 1;
    return isUnique ? job.name : `${job.name} ${job.id.slice(-6)}`;
  }

  // ---- drawing ----

  draw() {
    clear(this.facts).append(...FACTS.map(([name, valueOf]) => row(name, this.runs.map(valueOf))));
    this.drawDifferences();
    for (const chart of CHARTS) {
      if (this.runs.some(({ series }) => series.lines(chart).length))
        this.drawChart(headOf(chart), chart.lines[0].series);
    }
    for (const name of this.added) this.drawChart({ title: name }, name);
    this.offerOthers();
  }

  drawChart(options, name) {
    if (!this.charts.has(name)) {
      const chart = lineChart(options);
      this.charts.set(name, chart);
      this.grid.append(chart.element);
    }
    this.charts
      .get(name)
      .update(this.runs.map(({ job, series }) => ({ name: this.nameOf(job), points: series.of(name) })));
  }

  offerOthers() {
    const names = [...new Set(this.runs.flatMap(({ series }) => [...series.points.keys()]))]
      .filter((name) => !this.charts.has(name))
      .sort();
    if (names.join() === this.offered) return;
    this.offered = names.join();
    clear(this.others).append(
      el("option", { value: "" }, "choose"),
      ...names.map((name) => el("option", { value: name }, name)),
    );
  }

  addCurve() {
    const name = this.others.value;
    if (!name) return;
    this.added.push(name);
    this.drawChart({ title: name }, name);
    this.offerOthers();
    this.charts.get(name).element.scrollIntoView({ block: "nearest" });
  }

  drawDifferences() {
    const configs = this.runs.map(({ job }) => flatten(job.config));
    const names = [...new Set(configs.flatMap((config) => [...config.keys()]))].filter((name) => name !== "name");
    const different = names.filter((name) => new Set(configs.map((config) => config.get(name))).size > 1);
    if (different.join() === this.drawnDifferences) return;
    this.drawnDifferences = different.join();
    const body = el(
      "tbody",
      {},
      different.map((name) =>
        row(
          el("span", { class: "mono" }, name),
          configs.map((config) => config.get(name) ?? "–"),
          "mono",
        ),
      ),
    );
    clear(this.differences).append(
      different.length
        ? this.table("Differences", body)
        : el("p", { class: "muted" }, "Nothing: their configurations are equal but for the name."),
    );
  }

  // ---- going on ----

  async run() {
    await pause(REFRESH_MS, this.signal); // it has just been read
    poll(REFRESH_MS, this.signal, () => this.refresh());
  }

  async refresh() {
    const active = this.runs.filter(({ job, isGone }) => !isGone && !isOver(job));
    for (const run of active) {
      try {
        await this.update(run);
      } catch (error) {
        if (this.signal.aborted) return;
        if (!(error instanceof ApiError)) throw error;
        if (error.status === 404) this.lose(run);
        else if (CONCERNS_ALL.includes(error.status)) break; // what is shown stays; the next look may do
      }
    }
    if (active.length && !this.signal.aborted) this.draw();
  }

  /** Its curves stay as they are. */
  lose(run) {
    run.isGone = true;
    const text = `${this.nameOf(run.job)} is gone: it was deleted. What is shown of it is what was read before.`;
    this.notes.append(note(text));
    announce(text);
  }

  async update(run) {
    const path = `/jobs/${encodeURIComponent(run.job.id)}`;
    const after = Math.max(-1, run.job.next_iteration - 1 - AGAIN);
    const job = await get(path, {}, this.signal);
    const { metrics } = await get(`${path}/metrics`, { after }, this.signal);
    run.job = job; // after both: what is asked for next depends on it
    for (const [x, values] of byIteration(metrics)) run.series.add(x, values);
  }
}

/** {name: [[x, y], ...]} -> Map of x to {name: y}. */
function byIteration(metrics) {
  const found = new Map();
  for (const [name, points] of Object.entries(metrics)) {
    for (const [x, y] of points) found.set(x, { ...found.get(x), [name]: y });
  }
  return found;
}

/** Of a chart of one job with several lines only the first is drawn: there is one for each job. */
function headOf({ id, title, lines, unit, isPercent, isLog, domain }) {
  return {
    title: lines.length > 1 ? `${title}, ${lines[0].name}` : title,
    unit,
    isPercent,
    isLog,
    domain,
    testId: `chart-${id}`,
  };
}

const note = (text) => el("p", { class: "notice warn" }, text);

const section = (heading, ...content) => el("section", { class: "card stack" }, el("h2", {}, heading), content);

const row = (name, values, className = "") =>
  el(
    "tr",
    {},
    el("th", { scope: "row" }, name),
    values.map((value) => el("td", { class: className }, value)),
  );

/** {"data": {"type": "jsonl"}} -> "data.type": jsonl. Lists are values. */
function flatten(value, path = "", found = new Map()) {
  for (const [name, each] of Object.entries(value)) {
    const isTable = typeof each === "object" && each !== null && !Array.isArray(each);
    if (isTable) flatten(each, `${path}${name}.`, found);
    else found.set(path + name, typeof each === "string" ? each : JSON.stringify(each));
  }
  return found;
}

const valuesOf = ({ series }, name) => series.of(name).map(([, y]) => y);
const mean = (values) => (values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null);
const last = (values) => values.at(-1);

const FACTS = [
  ["State", ({ job, isGone }) => (isGone ? "gone" : stateBadge(job))],
  ["Iterations", ({ job }) => `${job.next_iteration} of ${job.num_iterations}`],
  [`Reward, first ${ENDS}`, (run) => number(mean(valuesOf(run, "iteration/reward_mean").slice(0, ENDS)))],
  [`Reward, last ${ENDS}`, (run) => number(mean(valuesOf(run, "iteration/reward_mean").slice(-ENDS)))],
  ["Held-out reward, newest", (run) => number(last(valuesOf(run, "eval/reward_mean")))],
  ["Time", ({ job }) => (job.started_at && job.finished_at ? duration(job.finished_at - job.started_at) : "–")],
  ["Time of an iteration", (run) => duration(mean(valuesOf(run, "iteration/wall_s")) ?? NaN)],
  ["Tokens per second", (run) => number(mean(valuesOf(run, "iteration/tokens_per_s")))],
  ["TPSPD", (run) => number(mean(valuesOf(run, "iteration/tpspd")))],
  ["Mismatch", (run) => number(mean(valuesOf(run, "iteration/mismatch_mean")))],
];
