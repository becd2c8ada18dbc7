// The list of jobs: asked for again while it is in sight, since lists have no stream.

import { ApiError, get, pause, poll } from "./api.js";
import { isOver } from "./controls.js";
import { announce, clear, clock, el, setText } from "./dom.js";
import { JobRow } from "./jobrow.js";
import { RewardCurves } from "./sparkline.js";

const REFRESH_MS = 3000;
const TYPING_MS = 250; // until the broker is asked for what is typed
const PAGE = 50;
const ALL = 1000; // the most that the broker lists; a search looks at all of them
const STATES = ["PENDING", "RUNNING", "PAUSED", "CANCELLING", "SUCCEEDED", "FAILED", "CANCELLED"];
const COLUMNS = ["Job", "State", "Progress", "Reward", "Time"];

export async function show(main, params, signal) {
  const list = new JobListPage(params, signal);
  main.append(...list.elements());
  await list.refresh();
  list.run();
}

class JobListPage {
  constructor({ state = "", q = "" }, signal) {
    this.signal = signal;
    this.rows = new Map(); // by id
    this.jobs = [];
    this.turn = 0; // of the newest request for the list: older answers are not wanted
    this.limit = PAGE;
    this.selected = new Set();
    this.inSight = new Set();
    this.curves = new RewardCurves(signal);
    this.sight = new IntersectionObserver((entries) => this.look(entries), { rootMargin: "100px" });
    signal.addEventListener("abort", () => this.sight.disconnect());
    this.state = el(
      "select",
      { id: "state", on: { change: () => this.filter() } },
      el("option", { value: "" }, "Any state"),
      STATES.map((each) => el("option", { value: each, selected: each === state }, each.toLowerCase())),
    );
    this.text = el("input", {
      id: "search",
      type: "search",
      value: q,
      placeholder: "Name, id or pool",
      on: { input: () => this.filter() },
    });
  }

  elements() {
    this.body = el("tbody");
    this.summary = el("p", { class: "muted" });
    this.problem = el("p", { class: "notice warn", role: "alert", hidden: true });
    this.empty = el("div", { class: "empty", hidden: true });
    this.more = el(
      "button",
      { type: "button", class: "button", hidden: true, on: { click: () => this.showMore() } },
      "Show more",
    );
    this.table = el(
      "table",
      { class: "jobs card", hidden: true },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", {}, hidden("Compare")),
          COLUMNS.map((name) => el("th", { scope: "col" }, name)),
          el("th", {}, hidden("Actions")),
        ),
      ),
      this.body,
    );
    this.compareText = el("span", { role: "status" });
    this.compareLink = el("a", { class: "button primary" }, "Compare");
    this.compare = el(
      "div",
      { class: "compare-bar card", hidden: true },
      this.compareText,
      this.compareLink,
      el("button", { type: "button", class: "button quiet", on: { click: () => this.unselect() } }, "Clear"),
    );
    const filters = el(
      "search",
      { class: "actions" },
      el("label", { class: "visually-hidden", for: "search" }, "Search jobs"),
      this.text,
      el("label", { class: "visually-hidden", for: "state" }, "State"),
      this.state,
    );
    return [
      el(
        "div",
        { class: "head jobs-head" },
        el("h1", {}, "Jobs"),
        filters,
        el("a", { class: "button primary", href: "#/new" }, "New job"),
      ),
      this.summary,
      this.problem,
      this.table,
      this.empty,
      el("div", { class: "actions center" }, this.more),
      this.compare,
    ];
  }

  async run() {
    everySecond(this.signal, () => document.hidden || this.rows.forEach((row) => row.showTime()));
    await pause(REFRESH_MS, this.signal); // it has just been read
    let slowness = 0; // a list that takes long is asked for less often
    poll(REFRESH_MS, this.signal, async () => {
      if (slowness-- > 0) return;
      const started = performance.now();
      await this.refresh();
      slowness = Math.floor((performance.now() - started) / 500);
    });
  }

  async refresh() {
    const asked = `${this.state.value} ${this.limitNow()}`;
    const turn = (this.turn += 1);
    try {
      const { jobs } = await get("/jobs", { state: this.state.value, limit: this.limitNow() }, this.signal);
      const isLate = turn !== this.turn || asked !== `${this.state.value} ${this.limitNow()}`; // asked again meanwhile
      if (isLate) return;
      this.problem.hidden = true;
      this.tellChanges(jobs);
      this.jobs = jobs;
      this.seenAt = Date.now() / 1000;
      this.render();
      this.readCurves();
    } catch (error) {
      if (this.signal.aborted) return;
      if (!(error instanceof ApiError) || !this.seenAt) throw error;
      if (turn !== this.turn) return;
      this.problem.hidden = false;
      setText(
        this.problem,
        `${error.title}. ${error.detail} The list is as of ${clock(this.seenAt)}; it goes on by itself.`,
      );
    }
  }

  limitNow() {
    return this.text.value.trim() ? ALL : this.limit;
  }

  tellChanges(jobs) {
    const before = new Map(this.jobs.map((job) => [job.id, job.state]));
    const changed = jobs.filter((job) => before.has(job.id) && before.get(job.id) !== job.state);
    if (changed.length) announce(changed.map((job) => `${job.name} is ${job.state.toLowerCase()}`).join(", "));
  }

  // ---- what is shown ----

  render() {
    const found = this.jobs.filter((job) => this.matches(job));
    const jobs = found.slice(0, this.limit);
    const rows = jobs.map((job) => this.rowOf(job));
    const listed = new Set(jobs.map((job) => job.id));
    for (const [id, row] of this.rows) if (!listed.has(id)) this.drop(id, row);
    rows.forEach((row, place) => {
      if (this.body.children[place] !== row.element)
        this.body.insertBefore(row.element, this.body.children[place] ?? null);
    });
    this.table.hidden = jobs.length === 0;
    this.more.hidden = found.length < this.limit || this.limit >= ALL;
    this.showEmpty(jobs.length === 0);
    this.summary.hidden = this.jobs.length === 0;
    setText(this.summary, summaryOf(this.jobs, this.jobs.length >= this.limitNow()));
  }

  matches(job) {
    const wanted = this.text.value.trim().toLowerCase();
    const hasState = !this.state.value || job.state === this.state.value;
    return hasState && [job.name, job.id, job.pool].some((word) => word.toLowerCase().includes(wanted));
  }

  rowOf(job) {
    const known = this.rows.get(job.id);
    if (known) {
      known.update(job);
      return known;
    }
    const row = new JobRow(
      job,
      this.selected.has(job.id),
      (isOn) => this.select(job.id, isOn),
      (changed) => this.changed(changed),
    );
    this.rows.set(job.id, row);
    const curve = this.curves.curves.get(job.id);
    if (curve) row.showCurve(curve.points);
    this.sight.observe(row.element);
    return row;
  }

  drop(id, row) {
    this.sight.unobserve(row.element);
    this.inSight.delete(id);
    row.element.remove();
    this.rows.delete(id);
  }

  changed(job) {
    this.jobs = this.jobs.map((each) => (each.id === job.id ? job : each)); // or it would be told as news
    this.rows.get(job.id)?.update(job);
    this.refresh();
  }

  showEmpty(isEmpty) {
    this.empty.hidden = !isEmpty;
    if (!isEmpty) return;
    const isFiltered = this.state.value || this.text.value.trim();
    clear(this.empty).append(...(isFiltered ? this.noMatch() : noJobs()));
  }

  noMatch() {
    const reset = () => {
      this.state.value = this.text.value = "";
      this.filter();
      this.text.focus();
    };
    return [
      el("p", {}, "No job is like that."),
      el("button", { type: "button", class: "button", on: { click: reset } }, "Show all jobs"),
    ];
  }

  // ---- filter, pages, curves ----

  filter() {
    const query = new URLSearchParams({ state: this.state.value, q: this.text.value.trim() });
    for (const [name, value] of [...query]) if (!value) query.delete(name);
    history.replaceState(null, "", `#/${query.size ? `?${query}` : ""}`);
    if (this.seenAt) this.render(); // what is known, at once
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.refresh(), TYPING_MS);
  }

  showMore() {
    this.limit = Math.min(this.limit + PAGE, ALL);
    this.refresh();
  }

  look(entries) {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) this.inSight.add(target.dataset.job);
      else this.inSight.delete(target.dataset.job);
    }
    this.readCurves();
  }

  async readCurves() {
    if (this.isReading || this.signal.aborted) return;
    this.isReading = true;
    try {
      const jobs = this.jobs.filter((job) => this.inSight.has(job.id));
      await this.curves.read(jobs, (id, points) => this.rows.get(id)?.showCurve(points));
    } catch (error) {
      if (!this.signal.aborted) throw error;
    } finally {
      this.isReading = false;
    }
  }

  // ---- comparing ----

  select(id, isOn) {
    if (isOn) this.selected.add(id);
    else this.selected.delete(id);
    const num = this.selected.size;
    this.compare.hidden = num === 0;
    setText(this.compareText, num === 1 ? "1 job selected: choose another one to compare" : `${num} jobs selected`);
    this.compareLink.hidden = num < 2;
    this.compareLink.href = `#/compare?jobs=${[...this.selected].map(encodeURIComponent).join(",")}`;
  }

  unselect() {
    for (const id of [...this.selected]) {
      const box = this.rows.get(id)?.box;
      if (box) box.checked = false;
      this.select(id, false);
    }
  }
}

const hidden = (text) => el("span", { class: "visually-hidden" }, text);

function noJobs() {
  return [
    el("h2", {}, "No jobs yet"),
    el("p", {}, "Create one here, or from a terminal:"),
    el("pre", {}, el("code", {}, "onbeat jobs create examples/quickstart.toml")),
    el("a", { class: "button primary", href: "#/new" }, "New job"),
  ];
}

function summaryOf(jobs, isCut) {
  const active = jobs.filter((job) => !isOver(job));
  const count = (state) => active.filter((job) => job.state === state).length;
  const parts = [
    [count("RUNNING"), "running"],
    [count("PENDING"), "in the queue"],
    [count("PAUSED"), "paused"],
  ];
  const words = parts.filter(([num]) => num).map(([num, what]) => `${num} ${what}`);
  return [...words, `${isCut ? "the newest " : ""}${jobs.length} ${jobs.length === 1 ? "job" : "jobs"}`].join(" · ");
}

/** Once a second: times go on between two looks. */
function everySecond(signal, tick) {
  const timer = setInterval(tick, 1000);
  signal.addEventListener("abort", () => clearInterval(timer));
}
