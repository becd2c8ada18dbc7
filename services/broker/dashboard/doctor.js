// What a job waits for: the doctor's sentences, the beat of its open iterations, and who generates.

import { serverNow } from "./api.js";
import { isOver } from "./controls.js";
import { ago, clock, duration, el, number, setText } from "./dom.js";
import { isSilent } from "./heartbeats.js";

const MOST_WORKERS = 8; // that are shown, the silent ones first
const STEPS = [
  { state: "OPEN", about: "prompts are out" },
  { state: "DRAINED", about: "all groups accepted" },
  { state: "COMMITTED", about: "step done" },
];
const NEXT = {
  OPEN: "Rollouts generate; the trainer works on groups as they are accepted.",
  DRAINED: "All groups are there. The trainer finishes, steps and publishes the next version.",
};

/** `update(diagnosis, isEnded)`: a Diagnosis of the broker. */
export function doctorPanel() {
  const state = el("span", { class: "badge" });
  const findings = el("ul", { class: "findings" });
  const asOf = el("p", { class: "muted doctor-time" });
  const heading = el("h2", { id: "doctor-heading" });
  const element = el(
    "section",
    { class: "card doctor", "data-testid": "doctor", "aria-labelledby": "doctor-heading" },
    el("div", { class: "head" }, heading, state),
    findings,
    asOf,
  );
  const update = (diagnosis, isEnded) => {
    setText(heading, isEnded ? "How it ended" : "What it waits for");
    asOf.hidden = isEnded;
    const numProblems = diagnosis.findings.filter(({ is_problem: isProblem }) => isProblem).length;
    state.className = `badge ${numProblems ? "bad" : "good"}`;
    setText(state, numProblems ? `${numProblems} problem${numProblems > 1 ? "s" : ""}` : "healthy");
    setText(asOf, `as of ${clock(serverNow())}`);
    findings.replaceChildren(...diagnosis.findings.map(showFinding));
  };
  return { element, update };
}

function showFinding(finding) {
  const within = Number.isFinite(finding.deadline_s) ? ` within ${duration(Math.max(0, finding.deadline_s))}` : "";
  const isTold = finding.next && finding.sentence.includes(finding.next);
  const next = finding.next && !isTold ? `Next: ${finding.next}${within}.` : "";
  return el(
    "li",
    { class: finding.is_problem ? "finding problem" : "finding" },
    el("span", { class: "finding-sign", "aria-hidden": "true" }, finding.is_problem ? "!" : "·"),
    el(
      "div",
      {},
      finding.is_problem && el("span", { class: "visually-hidden" }, "Problem: "),
      finding.sentence,
      next && el("p", { class: "muted" }, next),
    ),
  );
}

/**
 * `update(records, workers, job, now)`: IterationRecords, the newest last, and WorkerRecords that serve the job; `now`:
 * by the clock of their heartbeats.
 */
export function beatPanel() {
  const beats = el("div", { class: "beats" });
  const workers = el("ul", { class: "chips", "aria-label": "Rollouts of this job" });
  const heading = el("h2", { id: "beat-heading" });
  const rollouts = el("div", {}, el("h3", { class: "chips-heading", text: "Rollouts" }), workers);
  const element = el(
    "section",
    { class: "card beat-card", "data-testid": "iteration", "aria-labelledby": "beat-heading" },
    heading,
    beats,
    rollouts,
  );
  const update = (records, serving, job, now) => {
    rollouts.hidden = isOver(job);
    const open = records.filter(({ state }) => state !== "COMMITTED");
    const done = records.filter(({ state }) => state === "COMMITTED").slice(-1);
    setText(
      heading,
      open.length > 1 ? "These beats" : open.length ? "This beat" : done.length ? "The last beat" : "No beat yet",
    );
    beats.replaceChildren(...open.map(showBeat), ...done.map(open.length ? showDone : showLast));
    if (!records.length) beats.append(el("p", { class: "muted" }, "No iteration has been opened yet."));
    const shown = [...serving].sort((a, b) => isSilent(b, now) - isSilent(a, now)).slice(0, MOST_WORKERS);
    workers.replaceChildren(...shown.map((worker) => showWorker(worker, job.policy_version, now)));
    if (shown.length < serving.length)
      workers.append(el("li", {}, el("a", { href: "#/workers" }, `and ${serving.length - shown.length} more`)));
    if (!serving.length) workers.append(el("li", { class: "muted" }, "No rollout serves this job at the moment."));
  };
  return { element, update };
}

function showBeat(record) {
  const at = { OPEN: record.opened_at, DRAINED: record.drained_at, COMMITTED: record.committed_at };
  const reached = STEPS.findIndex(({ state }) => state === record.state);
  const steps = STEPS.map(({ state, about }, index) =>
    el(
      "li",
      { class: index <= reached ? "reached" : null, "aria-current": index === reached ? "step" : null },
      el("strong", {}, state),
      el("span", {}, at[state] ? clock(at[state]) : about),
    ),
  );
  return el(
    "article",
    { class: "beat" },
    beatHead(record),
    el("ol", { class: "steps" }, steps),
    groupsBar(record),
    el("p", { class: "muted" }, NEXT[record.state], refusals(record)),
  );
}

function beatHead({ iteration, policy_version: version }) {
  return el(
    "div",
    { class: "head" },
    el("h3", {}, `Iteration ${number(iteration)}`),
    el("span", { class: "muted" }, `policy version ${version}`),
  );
}

function groupsBar({ num_accepted: accepted, num_groups: total, num_failed_groups: failed }) {
  const label = `${accepted} of ${total} groups accepted${failed ? `, ${failed} of them failed` : ""}`;
  const share = (number) => ({ width: `${total ? (100 * number) / total : 0}%` });
  const bar = {
    role: "progressbar",
    "aria-valuemin": 0,
    "aria-valuemax": total,
    "aria-valuenow": accepted,
    "aria-label": label,
  };
  return el(
    "div",
    { class: "groups-bar" },
    el(
      "div",
      { class: "groups-track", ...bar },
      el("span", { class: "accepted", style: share(accepted - failed) }),
      el("span", { class: "failed", style: share(failed) }),
    ),
    el("span", {}, label),
  );
}

function refusals({ num_stale: stale, num_duplicate: duplicate, num_lost: lost }) {
  const told = [
    [stale, "stale"],
    [duplicate, "duplicate"],
    [lost, "without a lease"],
  ].filter(([count]) => count > 0);
  return told.length ? ` Refused: ${told.map(([count, what]) => `${count} ${what}`).join(", ")}.` : "";
}

function showDone(record) {
  const parts = [
    `committed ${ago(record.committed_at)}`,
    `took ${duration(record.wall_s)}`,
    `reward ${number(record.reward_mean)}`,
  ];
  return el(
    "p",
    { class: "muted" },
    el("strong", {}, `Iteration ${number(record.iteration)}`),
    ` ${parts.join(", ")}.`,
  );
}

/** Of the last iteration, when none is open. */
function showLast(record) {
  const facts = [
    ["Committed", `${clock(record.committed_at)}, ${ago(record.committed_at)}`],
    [
      "Groups",
      `${record.num_accepted} accepted${record.num_failed_groups ? `, ${record.num_failed_groups} of them failed` : ""}`,
    ],
    ["Took", duration(record.wall_s)],
    ["Generating", duration(record.generate_s)],
    ["Training", duration(record.train_s)],
    ["Hand-over", duration(record.weight_sync_s)],
    ["Responses", `${number(record.num_responses)}, ${number(record.response_tokens)} tokens`],
  ];
  return el(
    "article",
    { class: "beat" },
    beatHead(record),
    el(
      "dl",
      { class: "facts" },
      facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
    ),
    el("p", { class: "muted" }, refusals(record)),
  );
}

function showWorker(worker, newest, now) {
  const parts = [worker.state];
  if (worker.num_in_flight) parts.push(`${worker.num_in_flight} in flight`);
  if (worker.policy_version !== null && worker.policy_version !== newest)
    parts.push(`version ${worker.policy_version}`);
  if (worker.tokens_per_s) parts.push(`${number(worker.tokens_per_s)} tokens/s`);
  const isLost = isSilent(worker, now);
  const told = isLost ? `silent for ${duration(now - worker.last_seen_at)}` : parts.join(" · ");
  return el(
    "li",
    { class: `chip ${isLost ? "bad" : worker.state}` },
    el("strong", {}, worker.id),
    el("span", {}, told),
  );
}
