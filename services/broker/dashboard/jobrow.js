// One job in the list. What has not changed stays as it is, so that neither focus nor selection is lost.

import { serverNow } from "./api.js";
import { isOver, jobControls, progressBar, stateBadge } from "./controls.js";
import { ago, clear, clock, duration, el, setText } from "./dom.js";
import { showCurve } from "./sparkline.js";

export const addressOf = (id) => `#/jobs/${encodeURIComponent(id)}`;

export class JobRow {
  /** `onSelect(isSelected)`, `onChange(job)`: after a move. */
  constructor(job, isSelected, onSelect, onChange) {
    this.onChange = onChange;
    const label = `Select ${job.name}, ${job.id}, to compare`;
    this.box = el("input", { type: "checkbox", checked: isSelected, "aria-label": label, on: { change: () => onSelect(this.box.checked) } });
    this.link = el("a", { href: addressOf(job.id), text: job.name });
    this.error = el("span", { class: "job-error bad" });
    this.state = el("td", { class: "job-state" });
    this.progress = el("td", { class: "job-progress" });
    this.reward = el("td", { class: "job-reward" });
    this.time = el("td", { class: "job-time" });
    this.controls = el("td", { class: "job-controls" });
    const pool = job.pool === "default" ? "" : el("span", { class: "pool", title: "pool" }, job.pool);
    this.element = el(
      "tr",
      { "data-testid": "job-row", "data-job": job.id },
      el("td", { class: "job-box" }, this.box),
      el("th", { class: "job-name", scope: "row" }, this.link, el("span", { class: "help" }, el("span", { class: "mono" }, job.id), " ", pool), this.error),
      this.state, this.progress, this.reward, this.time, this.controls,
    );
    this.update(job);
  }

  update(job) {
    const before = this.job;
    this.job = job;
    if (before?.state !== job.state) this.showControls(job);
    if (before?.state !== job.state || before.queue_position !== job.queue_position) this.showState(job);
    if (before?.state !== job.state || before.next_iteration !== job.next_iteration) {
      clear(this.progress).append(progressBar(job), el("span", { class: "help" }, `${job.next_iteration} / ${job.num_iterations}`));
    }
    this.showTime();
  }

  showState(job) {
    const place = job.queue_position ? `no. ${job.queue_position} in the queue` : "";
    clear(this.state).append(stateBadge(job), el("span", { class: "help", text: place }));
    setText(this.error, job.error ?? "");
  }

  showControls(job) {
    const hadFocus = this.controls.contains(document.activeElement);
    clear(this.controls).append(jobControls(job, this.onChange));
    if (hadFocus) (this.controls.querySelector("button") ?? this.link).focus();
  }

  showTime() {
    const { job } = this;
    const [what, since] = timeOf(job);
    this.time.title = `created ${clock(job.created_at)}`;
    if (!this.time.firstChild) this.time.append(el("span"), el("span", { class: "help" }));
    setText(this.time.firstChild, what);
    setText(this.time.lastChild, since);
  }

  showCurve(points) {
    showCurve(this.reward, points);
  }
}

/** How long it took or takes, and when that was. */
function timeOf(job) {
  const ended = job.finished_at ?? serverNow();
  const took = job.started_at === null ? "" : duration(Math.max(1, Math.floor(ended - job.started_at)));
  if (isOver(job)) return [took || "never ran", ago(job.finished_at)];
  return job.started_at === null ? [duration(Math.max(1, Math.floor(ended - job.created_at))), "waiting"] : [took, "so far"];
}
