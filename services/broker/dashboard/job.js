// The page of a job, live: loaded whole at first, then followed by its stream. Drawn at most once per frame.

import { ApiError, del, get, pause, poll, serverNow, stream } from "./api.js";
import { lineChart, link } from "./charts.js";
import { confirmed, isOver, tell } from "./controls.js";
import { beatPanel, doctorPanel } from "./doctor.js";
import { announce, el, number, setText } from "./dom.js";
import { eventLog, MOST_EVENTS } from "./events.js";
import { jobHead } from "./head.js";
import { heartbeatTime } from "./heartbeats.js";
import { CHARTS, Series } from "./series.js";
import { configPanel } from "./config.js";
import { timelinePanel } from "./timeline.js";

const RECENT = 10; // iterations whose events are shown at first
const WORKERS_MS = 5000;
const SCORES = ["reward_mean", "reward_std", "pass_at_k", "response_tokens_mean", "truncated_frac"];
const MOST_EVENT_PAGES = 20; // of 500

export async function show(main, { id }, signal) {
  const page = new JobPage(id, signal);
  await page.load();
  if (signal.aborted) return;
  main.append(...page.build());
  page.drawAll();
  await page.follow();
}

class JobPage {
  constructor(id, signal) {
    this.path = `/jobs/${encodeURIComponent(id)}`;
    this.signal = signal;
    this.series = new Series();
    this.records = new Map(); // by iteration: the newest ones
    this.workers = [];
    this.beatNow = 0; // by the clock of the workers' heartbeats
    this.gapAfter = null; // since this iteration the curves may have holes
    this.fresh = []; // events that are not in the log yet
    this.charts = new Map();
    this.isDue = { job: false, curves: false, beat: false, doctor: false };
    this.isWaiting = false; // for a frame
  }

  async load() {
    const read = (path, params) => get(path, params, this.signal);
    const afterOf = (job) => Math.max(-1, job.next_iteration - RECENT - 1);
    const jobRead = read(this.path);
    const recentRead = jobRead.then((job) => read(`${this.path}/iterations`, { after: afterOf(job) })); // beside the metrics
    const whole = [jobRead, recentRead, read(`${this.path}/metrics`), read(`${this.path}:explain`)];
    const [job, { iterations }, { metrics }, diagnosis] = await Promise.all(whole);
    this.job = job;
    this.diagnosis = diagnosis;
    this.series.load(metrics);
    for (const record of iterations) this.records.set(record.iteration, record);
    // The id of an event begins with its time in milliseconds: whoever knows a time has a cursor.
    this.cursor = afterOf(job) >= 0 && iterations.length ? `${Math.floor(iterations[0].opened_at * 1000)}` : "0";
  }

  // ---- parts -------------------------------------------------------------------------------------------------------

  build() {
    this.head = jobHead(this.job, { onChange: (job) => this.take("job", job), onDelete: () => this.remove() });
    this.doctor = doctorPanel();
    this.beat = beatPanel();
    this.timeline = timelinePanel({ path: this.path, jobId: this.job.id, signal: this.signal });
    this.log = eventLog({
      loadOlder: this.cursor === "0" ? null : (oldest) => this.eventsBefore(oldest),
      loadedAt: serverNow(),
    });
    this.first = el("div", { class: "first-chart" }); // the reward's, at the top
    this.grid = el("div", { class: "charts" });
    this.empty = el("p", { class: "empty", text: "Curves begin with the first committed iteration." });
    this.more = el(
      "details",
      { class: "more-charts", on: { toggle: () => this.mark("curves") } },
      el("summary", {}, "More series"),
      el("div", { class: "charts" }),
    );
    const curves = el(
      "section",
      { class: "job-curves", "aria-labelledby": "curves-heading" },
      el("div", { class: "head" }, el("h2", { id: "curves-heading", text: "Curves" }), this.smoothBox()),
      this.empty,
      this.grid,
      this.more,
    );
    const now = el("div", { class: "now" }, this.first, this.beat.element, this.doctor.element);
    for (const part of [now, curves]) link(part, () => this.charts.values());
    return [this.head.element, now, this.timeline.element, curves, this.log.element, configPanel(this.job)];
  }

  smoothBox() {
    const smooth = () => [...this.charts.values()].forEach((chart) => chart.smooth(this.smooth.checked));
    this.smooth = el("input", { type: "checkbox", id: "smooth", checked: true, on: { change: smooth } });
    const label = el(
      "label",
      { for: "smooth", title: "A mean over 2% of the iterations; the values themselves are faint" },
      "Smooth long curves",
    );
    return el("span", { class: "actions" }, this.smooth, label);
  }

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
      await tell("Delete was refused", error);
    }
  }

  /** All that are kept, up to this one. */
  async eventsBefore(oldest) {
    const found = [];
    for (let page = 0, after = "0"; page < MOST_EVENT_PAGES; page += 1) {
      const { events } = await get(`${this.path}/events`, { after }, this.signal);
      found.push(...events);
      if (!events.length || parseInt(events[events.length - 1].id) >= parseInt(oldest)) break;
      after = events[events.length - 1].id;
    }
    return found;
  }

  // ---- what comes in -----------------------------------------------------------------------------------------------

  async follow() {
    const isDone = new AbortController();
    const watching = this.watchWorkers(AbortSignal.any([this.signal, isDone.signal]));
    const clock = setInterval(() => this.head.tick(), 1000);
    this.signal.addEventListener("abort", () => clearInterval(clock));
    try {
      const onMessage = (kind, data) => this.take(kind, data);
      await stream(`${this.path}/stream`, {
        after: this.cursor,
        signal: this.signal,
        onMessage,
        onState: (state) => this.takeState(state),
      });
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.head.connection("refused", error.detail);
    }
    isDone.abort();
    await watching;
  }

  async watchWorkers(signal) {
    await poll(WORKERS_MS, signal, async () => {
      if (isOver(this.job)) return;
      try {
        const { workers } = await get("/workers", { pool: this.job.pool }, signal);
        this.beatNow = heartbeatTime(workers);
        this.workers = workers.filter((worker) => worker.job_id === this.job.id);
        this.mark("beat");
      } catch (error) {
        if (!(error instanceof ApiError) && !signal.aborted) throw error; // the stream's state tells of the network
      }
    });
  }

  takeState(state) {
    this.head.connection(state);
    if (state === "lost") this.gapAfter ??= this.newestKnown();
    else if (state === "open" && this.gapAfter !== null) this.fillGap();
  }

  /** The last iteration whose values are in the curves, and those of the evaluations up to it. */
  newestKnown() {
    const committed = [...this.records.values()].filter(({ state }) => state === "COMMITTED");
    const iteration = Math.max(-1, ...committed.map((record) => record.iteration));
    if (!this.job.config.evaluation) return iteration;
    return Math.min(iteration, this.series.of("eval/reward_mean").at(-1)?.[0] ?? -1); // they may end later
  }

  /** The stream tells again only of iterations whose events are still kept. */
  async fillGap() {
    this.filling?.abort(); // it may have been asked before the last loss
    this.filling = new AbortController();
    const signal = AbortSignal.any([this.signal, this.filling.signal]);
    while (!signal.aborted) {
      try {
        const { metrics } = await get(`${this.path}/metrics`, { after: this.gapAfter }, signal);
        for (const [x, values] of byIteration(metrics)) this.series.add(x, values);
        this.gapAfter = null;
        return this.mark("curves");
      } catch (error) {
        if (signal.aborted) return;
        if (!(error instanceof ApiError)) throw error;
      }
      await pause(WORKERS_MS, signal);
    }
  }

  take(kind, data) {
    if (kind === "job") this.takeJob(data);
    else if (kind === "iteration") this.takeIteration(data);
    else if (kind === "event") this.takeEvent(data);
    else if (kind === "explain") {
      this.diagnosis = data;
      this.mark("doctor");
    }
  }

  takeJob(job) {
    this.job = job;
    if (isOver(job)) this.workers = [];
    this.mark("job", "beat");
  }

  takeIteration({ record, point }) {
    const before = this.records.get(record.iteration);
    this.records.set(record.iteration, record);
    for (const old of [...this.records.keys()].sort((a, b) => a - b).slice(0, -2 * RECENT)) this.records.delete(old);
    this.mark("beat");
    if (before?.num_accepted !== record.num_accepted || before?.state !== record.state) this.timeline.refresh();
    if (record.state !== "COMMITTED") return;
    this.series.add(record.iteration, point);
    this.mark("curves");
  }

  takeEvent(event) {
    this.fresh.push(event);
    if (this.fresh.length > 2 * MOST_EVENTS) this.fresh.splice(0, MOST_EVENTS); // no frame is drawn while hidden
    if (event.kind === "evaluation.done") {
      const scores = SCORES.filter((name) => name in event.data).map((name) => [`eval/${name}`, event.data[name]]);
      this.series.add(event.data.evaluation, Object.fromEntries(scores));
      this.mark("curves");
    }
    this.mark();
  }

  // ---- what is shown -----------------------------------------------------------------------------------------------

  /** To be drawn with the next frame. */
  mark(...parts) {
    for (const part of parts) this.isDue[part] = true;
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      if (!this.signal.aborted) this.draw();
    });
  }

  drawAll() {
    for (const part of Object.keys(this.isDue)) this.isDue[part] = true;
    this.draw();
  }

  draw() {
    const { job, curves, beat, doctor } = this.isDue;
    for (const part of Object.keys(this.isDue)) this.isDue[part] = false;
    if (job || curves || beat) this.head.update(this.job, this.series, [...this.records.values()]);
    if (curves) this.drawCurves();
    if (beat) this.beat.update(sorted(this.records), this.workers, this.job, this.beatNow);
    if (doctor || job) this.doctor.update(this.diagnosis, isOver(this.job));
    this.log.add(this.fresh.splice(0));
  }

  drawCurves() {
    const [reward, ...rest] = CHARTS;
    this.drawChart({ ...reward, level: 2, height: 250 }, this.first, this.series.lines(reward));
    for (const chart of rest) this.drawChart(chart, this.grid, this.series.lines(chart));
    this.first.hidden = !this.first.childElementCount;
    this.empty.hidden = this.grid.childElementCount > 0;
    const others = this.series.others();
    this.more.hidden = !others.length;
    setText(this.more.querySelector("summary"), `${number(others.length)} more series`);
    if (!this.more.open) return;
    for (const name of others) {
      this.drawChart({ id: name, title: name }, this.more.lastElementChild, [
        this.series.line({ name: "value", series: name }),
      ]);
    }
  }

  /** A chart is made when there is something to show, in the order of CHARTS. */
  drawChart({ id, lines: _, unlessZero: __, ...options }, grid, lines) {
    if (!lines.length) return;
    if (!this.charts.has(id)) {
      const chart = lineChart({ ...options, testId: `chart-${id}` });
      chart.smooth(this.smooth.checked);
      this.charts.set(id, chart);
      const place = grid === this.grid ? CHARTS.findIndex((each) => each.id === id) : 0;
      const next = CHARTS.slice(place + 1).find((each) => this.charts.has(each.id));
      grid.insertBefore(chart.element, place > 0 && next ? this.charts.get(next.id).element : null);
    }
    this.charts.get(id).update(lines);
  }
}

/** {name: [[x, y], ...]} as [x, {name: y}] pairs. */
function byIteration(metrics) {
  const points = new Map();
  for (const [name, values] of Object.entries(metrics)) {
    for (const [x, y] of values) {
      if (!points.has(x)) points.set(x, {});
      points.get(x)[name] = y;
    }
  }
  return points;
}

const sorted = (records) => [...records.values()].sort((a, b) => a.iteration - b.iteration);
