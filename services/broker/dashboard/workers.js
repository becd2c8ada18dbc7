// Who works in a pool: its rollouts by their last heartbeat, and what is wrong in the whole installation.

import { ApiError, get, poll, serverNow } from "./api.js";
import { ago, clear, clock, el, number, setText } from "./dom.js";
import { marked } from "./fields.js";
import { heartbeatTime, isSilent } from "./heartbeats.js";
import { addressOf } from "./jobrow.js";

const REFRESH_MS = 3000;
const DOCTOR_EVERY = 3; // looks
const TONES = { generating: "good", updating: "accent", starting: "accent", draining: "warn" };
const COLUMNS = ["Rollout", "State", "Job", "Version", "In flight", "Tokens/s", "Devices", "Last seen"];
const NUMBERS = new Set(["Version", "In flight", "Tokens/s", "Devices"]);

export async function show(main, { pool = "default" }, signal) {
  const page = new WorkersPage(pool, signal);
  main.append(...page.elements());
  await poll(REFRESH_MS, signal, () => page.look());
}

class WorkersPage {
  constructor(pool, signal) {
    Object.assign(this, { pool, signal, looks: 0, seenAt: null });
  }

  elements() {
    this.pools = el("select", { id: "pool", on: { change: () => (location.hash = `#/workers?pool=${encodeURIComponent(this.pools.value)}`) } }, el("option", {}, this.pool));
    this.tiles = el("dl", { class: "tiles" });
    this.problem = el("p", { class: "notice warn", role: "alert", hidden: true });
    this.body = el("tbody");
    this.table = el("div", { class: "card scroll flush", tabindex: "0", role: "region", "aria-label": "Rollouts", hidden: true },
      el("table", { class: "workers" }, el("thead", {}, el("tr", {}, COLUMNS.map((name) => el("th", { scope: "col", class: NUMBERS.has(name) ? "num" : "" }, name)))), this.body));
    this.empty = el("div", { class: "empty", hidden: true }, el("h2", {}, "No rollouts"),
      el("p", {}, "None has been seen in this pool. On one machine this starts all services:"), el("pre", {}, el("code", {}, "onbeat up")));
    this.findings = el("ul", { class: "findings" });
    this.doctor = el("section", { class: "card stack", hidden: true }, el("h2", {}, "What the doctor finds"), this.findings);
    return [
      el("div", { class: "head" }, el("h1", {}, "Workers"), el("div", { class: "actions" }, el("label", { for: "pool" }, "Pool"), this.pools)),
      this.problem, this.tiles, this.table, this.empty, this.doctor,
    ];
  }

  async look() {
    try {
      const [{ workers }, status] = await Promise.all([
        get("/workers", { pool: this.pool }, this.signal),
        get(`/pools/${encodeURIComponent(this.pool)}`, {}, this.signal),
      ]);
      if (this.looks++ % DOCTOR_EVERY === 0) await Promise.all([this.readPools(), this.readDoctor()]);
      this.seenAt = Date.now() / 1000;
      this.problem.hidden = true;
      this.render(workers, status);
    } catch (error) {
      if (this.signal.aborted) return;
      if (!(error instanceof ApiError) || this.seenAt === null) throw error;
      this.problem.hidden = false;
      setText(this.problem, `${error.title}. ${error.detail} This is as of ${clock(this.seenAt)}; it goes on by itself.`);
    }
  }

  /** Pools have no list of their own: those of the newest jobs. */
  async readPools() {
    const { jobs } = await get("/jobs", { limit: 100 }, this.signal);
    const names = [...new Set(["default", this.pool, ...jobs.map((job) => job.pool)])].sort();
    if ([...this.pools.options].map((option) => option.value).join() === names.join()) return;
    clear(this.pools).append(...names.map((name) => el("option", { value: name, selected: name === this.pool }, name)));
  }

  async readDoctor() {
    const { findings } = await get("/doctor", {}, this.signal);
    const problems = findings.filter((finding) => finding.is_problem);
    this.doctor.hidden = problems.length === 0;
    const sentences = new Set(problems.map((finding) => finding.sentence)); // jobs that wait for the same say the same
    clear(this.findings).append(...[...sentences].map((sentence) => el("li", {}, marked(sentence))));
  }

  render(workers, status) {
    const now = status.num_rollouts ? heartbeatTime(workers) : serverNow(); // all of them may have ended
    clear(this.tiles).append(
      ...tile("Rollouts", status.num_rollouts), ...tile("Trainers", status.num_trainers), ...tile("Active jobs", status.num_jobs),
      ...tile("Prompts out", status.num_prompts), ...tile("of them unclaimed", status.num_unclaimed_prompts),
      ...tile("Tokens/s", workers.filter((worker) => !isSilent(worker, now)).reduce((sum, worker) => sum + (worker.tokens_per_s ?? 0), 0)),
    );
    const sorted = workers.toSorted((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
    if (!this.body.contains(document.activeElement)) clear(this.body).append(...sorted.map((worker) => rowOf(worker, now)));
    this.table.hidden = workers.length === 0;
    this.empty.hidden = workers.length > 0;
  }
}

const tile = (name, value) => [el("div", {}, el("dt", {}, name), el("dd", {}, number(value)))];

function rowOf(worker, now) {
  const silent = isSilent(worker, now);
  const seenAt = worker.last_seen_at + serverNow() - now; // by the broker's clock
  const badge = el("span", { class: `badge ${silent ? "bad" : TONES[worker.state] ?? "hollow"}` }, silent ? `silent, was ${worker.state}` : worker.state);
  const job = worker.job_id ? el("a", { class: "mono", href: addressOf(worker.job_id) }, worker.job_id) : "–";
  const numbers = [worker.policy_version, worker.num_in_flight, worker.tokens_per_s, worker.num_devices];
  return el("tr", {}, el("th", { scope: "row", class: "mono" }, worker.id), el("td", {}, badge), el("td", {}, job),
    numbers.map((value) => el("td", { class: "num" }, number(value))), el("td", { title: clock(seenAt) }, ago(seenAt)));
}
