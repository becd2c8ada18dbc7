// The head of a job's page: what it is, how far it is, what may be done with it, and the numbers of now.

import { serverNow } from "./api.js";
import { isOver, jobControls, progressBar, stateBadge } from "./controls.js";
import { clock, duration, el, number, percent, setText } from "./dom.js";

const RECENT = 10; // iterations that the time left is told from
const CONNECTIONS = {
  connecting: "connecting…",
  open: "live",
  lost: "connection lost, trying again",
  over: "",
  refused: "not live",
};

/** The links between the pages of a job. `current`: "", "timeline" or "samples". */
export function jobTabs(jobId, current) {
  const tabs = [
    ["", "Overview"],
    ["samples", "Samples"],
    ["timeline", "Timeline"],
  ];
  const path = `#/jobs/${encodeURIComponent(jobId)}`;
  const links = tabs.map(([part, name]) =>
    el("a", { href: part ? `${path}/${part}` : path, "aria-current": part === current ? "page" : null }, name),
  );
  return el("nav", { class: "tabs", "aria-label": "Pages of this job" }, links);
}

/** `update(job, series, records)`, `tick()` once a second, `connection(state, why)`. */
export function jobHead(job, { onChange, onDelete }) {
  return new Head(job, onChange, onDelete);
}

class Head {
  constructor(job, onChange, onDelete) {
    this.job = job;
    this.onChange = onChange;
    this.onDelete = onDelete;
    this.secondsPerIteration = null;
    this.state = el("span");
    this.live = el("span", { class: "live muted", "data-testid": "live" });
    this.controls = el("div", { class: "actions" });
    this.progress = el("div");
    this.told = el("span");
    this.error = el("p", { class: "notice bad", hidden: true });
    this.values = Object.fromEntries(["started", "elapsed", "left", "version", "dtype", "pool"].map((name) => [name, el("dd")]));
    this.tiles = el("dl", { class: "newest", "aria-label": "Newest values" });
    this.element = el(
      "header",
      { class: "job-head" },
      el(
        "div",
        { class: "head" },
        el("div", { class: "job-title" }, el("h1", { text: job.name }), this.state, this.live),
        this.controls,
      ),
      el("p", { class: "muted mono job-id" }, job.id),
      jobTabs(job.id, ""),
      this.error,
      el("div", { class: "job-progress-row" }, this.progress, this.told),
      this.facts(),
      this.tiles,
    );
  }

  facts() {
    const names = {
      started: "Started",
      elapsed: "Elapsed",
      left: "Time left",
      version: "Policy version",
      dtype: "Computes in",
      pool: "Pool",
    };
    const rows = Object.entries(names).map(([key, name]) =>
      el("div", { class: "job-fact" }, el("dt", {}, name), this.values[key]),
    );
    return el("dl", { class: "job-facts" }, rows);
  }

  update(job, series, records) {
    const isMoved = job.state !== this.job.state || !this.controls.childElementCount;
    this.job = job;
    this.state.replaceChildren(stateBadge(job));
    this.progress.replaceChildren(progressBar(job));
    setText(this.told, `${number(job.next_iteration)} of ${number(job.num_iterations)} iterations`);
    if (isMoved) this.drawControls(); // only then: else the focus is lost
    this.error.hidden = !job.error;
    setText(this.error, job.error ?? "");
    setText(this.values.version, job.policy_version === null ? "none yet" : number(job.policy_version));
    setText(this.values.dtype, job.dtype ?? "not chosen yet");
    setText(this.values.pool, job.queue_position ? `${job.pool}, number ${job.queue_position} in its queue` : job.pool);
    setText(
      this.values.started,
      job.started_at ? clock(job.started_at) : `not yet; submitted ${clock(job.created_at)}`,
    );
    const walls = records
      .filter(({ wall_s: wall }) => wall)
      .slice(-RECENT)
      .map(({ wall_s: wall }) => wall);
    this.secondsPerIteration = walls.length ? walls.reduce((sum, wall) => sum + wall, 0) / walls.length : null;
    this.drawTiles(series);
    this.tick();
  }

  drawControls() {
    const remove = el(
      "button",
      { class: "button danger", type: "button", "data-testid": "delete-job", on: { click: this.onDelete } },
      "Delete",
    );
    this.controls.replaceChildren(isOver(this.job) ? remove : jobControls(this.job, this.onChange));
  }

  /** What moves with the clock. */
  tick() {
    const { started_at: started, finished_at: finished, state } = this.job;
    setText(
      this.values.elapsed,
      started ? duration(Math.max(0, Math.floor((finished ?? serverNow()) - started))) : "–",
    );
    this.values.left.parentElement.hidden = isOver(this.job);
    setText(this.values.left, state === "RUNNING" && this.secondsPerIteration ? this.left() : "–");
  }

  left() {
    const rest = (this.job.num_iterations - this.job.next_iteration) * this.secondsPerIteration;
    return `about ${duration(rest)}`;
  }

  drawTiles(series) {
    const of = (name) => series.last(`iteration/${name}`);
    const tiles = [
      ["Reward", number(of("reward_mean")), of("reward_mean"), gain(series)],
      ["Mismatch", number(of("mismatch_mean")), of("mismatch_mean"), "mean gap of log probabilities"],
      [
        "Staleness",
        number(of("staleness_max")),
        of("staleness_max"),
        of("staleness_max") === 0 ? "on-policy: every token" : "versions at most",
      ],
      ["Trainer idle", percent(of("trainer_idle_frac")), of("trainer_idle_frac"), "of the last iteration"],
      ["Rollouts idle", percent(of("rollout_idle_frac")), of("rollout_idle_frac"), "of the last iteration"],
      ["TPSPD", number(of("tpspd")), of("tpspd"), "tokens per second per device"],
    ];
    const shown = tiles.filter(([, , value]) => value !== null);
    this.tiles.hidden = !shown.length;
    this.tiles.replaceChildren(
      ...shown.map(([name, text, , about]) =>
        el(
          "div",
          { class: "newest-value" },
          el("dt", {}, name),
          el("dd", {}, el("strong", {}, text), el("span", {}, about)),
        ),
      ),
    );
  }

  connection(state, why = "") {
    this.live.dataset.state = state;
    setText(this.live, why ? `${CONNECTIONS[state]}: ${why}` : CONNECTIONS[state]);
  }
}

/** How the reward moved: the newest tenth against the first one, of at least 4 iterations. */
function gain(series) {
  const points = series.of("iteration/reward_mean");
  if (points.length < 4) return "mean of the last iteration";
  const size = Math.max(1, Math.floor(points.length / 10));
  const mean = (part) => part.reduce((sum, [, y]) => sum + y, 0) / part.length;
  const change = mean(points.slice(-size)) - mean(points.slice(0, size));
  return `${change >= 0 ? "+" : "−"}${number(Math.abs(change), 2)} since the beginning`;
}
