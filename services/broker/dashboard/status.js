// The state of a job: its newest numbers, the doctor's findings, the open iteration, and the rollouts.

import { serverNow } from "./api.js";
import { ago, clock, duration, number, percent } from "./format.js";
import { elapsedOf, Figures, Fold, html, isOver, isSilent, Live, marked, Meter, Progress } from "./parts.js";

const RECENT = 10; // iterations that the time left is computed from
const MOST_WORKERS = 8; // workers shown, the silent ones first
const [LATE, LATE_S] = [3, 10]; // as services/broker/doctor/verdict.py has it
const NEXT = {
  OPEN: "Rollouts generate; the trainer works on groups as they arrive.",
  UNSERVED: "Its prompts wait for a rollout.",
  DRAINED: "All groups are in. The trainer finishes, steps and publishes the next version.",
};
const NEXT_OF_ROWS = {
  OPEN: "The trainer tokenises the rows of examples.",
  DRAINED: "All rows are tokenised. The trainer learns them in one step.",
};

const VALUES = [
  ["Truncated", "rollout/truncated_frac", "of the responses", percent],
  ["Engine against trainer", "iteration/mismatch_mean", "mean gap of their log probabilities", (gap) => `${number(gap)} nats`],
  ["On-policy", "iteration/staleness_max", "trained on responses of its own version", (behind) => (behind ? `no, by ${number(behind)} versions` : "yes")],
  ["Tokens/s per device", "iteration/tpspd", "trainers and rollouts counted"],
  ["Trainer idle", "iteration/trainer_idle_frac", "of the iteration", percent],
  ["Rollouts idle", "iteration/rollout_idle_frac", "of the iteration", percent],
  ["Overlap", "iteration/overlap_frac", "of the time of generation", percent],
];
// The steps of a start, with what they usually take.
const STEPS = [
  ["A trainer starts and takes the job", "usually 5 to 20 s"],
  ["The trainer loads the model", "usually 5 to 30 s for a small one"],
  ["Rollouts load it into their engine", "usually 20 to 60 s for a small one"],
  ["The first responses are generated", ""],
];
const STEPS_WITH_EXAMPLES = [...STEPS.slice(0, 2), ["The first rows of examples are tokenised", ""]];

// ---- the reward, and how far it is -------------------------------------------------------------------------------

/** The first thing to look at: the newest rewards, how they moved, and how far the job is. */
export function Headline({ job, records, series }) {
  const rewards = [["Reward", "iteration/reward_mean", gain(series)], ["Held-out reward", "eval/reward_mean", "newest evaluation"]]
    .filter(([, name]) => series.last(name) !== null)
    .map(([name, of, about]) => [name, series.last(of), about]);
  const progress = [
    "Iterations",
    html`${number(job.next_iteration)}<small> of ${number(job.num_iterations)}</small>`,
    html`<${Progress} job=${job} /><${Live} of=${() => timeOf(job, records)} />`,
  ];
  return html`<${Figures} label="Reward and progress" className="headline" of=${[...rewards, progress]} />`;
}

function timeOf(job, records) {
  if (!job.started_at) return job.queued_at ? `resumed ${ago(job.queued_at)}` : `submitted ${ago(job.created_at)}`;
  if (isOver(job)) return `took ${elapsedOf(job)}, ended ${ago(job.finished_at)}`;
  const walls = records
    .filter(({ wall_s: wall, iteration }) => wall && iteration > firstAfterWarmStart(job)) // the first one contains the engine's start
    .slice(-RECENT)
    .map(({ wall_s: wall }) => wall);
  if (job.state !== "RUNNING" || !walls.length) return `${elapsedOf(job)} so far`;
  const each = walls.reduce((sum, wall) => sum + wall, 0) / walls.length;
  const open = records.find(({ state }) => state !== "COMMITTED");
  if (open && serverNow() - open.opened_at > LATE * each + LATE_S) return `${elapsedOf(job)} so far`; // nobody knows
  return `${elapsedOf(job)} so far, about ${duration((job.num_iterations - job.next_iteration) * each)} left`;
}

/** As in onbeat/contracts/records.py: supervised iterations before RL do not tell how long the others take. */
const firstAfterWarmStart = (job) => Math.max(job.first_iteration, job.config.warm_start?.num_iterations ?? 0);

const isSft = (job) => job.config.objective?.type === "sft";

/** True if no rollout generates its first iterations. */
export const beginsWithExamples = (job) => isSft(job) || firstAfterWarmStart(job) > job.first_iteration;

/** The facts about a job, beside its id. */
export const aboutOf = (job) =>
  [
    `pool ${job.pool}${job.queue_position ? `, number ${job.queue_position} in its queue` : ""}`,
    job.started_at && !job.queued_at && `started ${clock(job.started_at)}`,
    job.policy_version !== null && `policy version ${number(job.policy_version)}`,
    job.dtype && `precision ${job.dtype}`,
    job.max_tokens_per_micro_batch && `rows of ${number(job.max_tokens_per_micro_batch)} tokens`,
  ].filter(Boolean).join(" · ");

/** The change of the reward: the newest tenth against the first one, of at least 4 iterations. */
function gain(series) {
  const points = series.of("iteration/reward_mean");
  if (points.length < 4) return "mean of the last iteration";
  const size = Math.max(1, Math.floor(points.length / 10));
  const mean = (part) => part.reduce((sum, [, y]) => sum + y, 0) / part.length;
  const [first, last] = [mean(points.slice(0, size)), mean(points.slice(-size))];
  const sign = last >= first ? "+" : "−";
  return html`<span class=${last > first ? "good" : "muted"}>${sign}${number(Math.abs(last - first), 2)}</span> in ${number(points.length)} iterations`;
}

// ---- the doctor --------------------------------------------------------------------------------------------------

/** One line, which begins with how the job learns; open by itself when something is wrong. */
export function Doctor({ diagnosis, job, seenAt }) {
  const problems = diagnosis.findings.filter(({ is_problem: isProblem }) => isProblem);
  const state = problems.length ? `${problems.length} problem${problems.length > 1 ? "s" : ""}` : isOver(job) ? "" : "healthy";
  const what = { SUCCEEDED: "Finished", FAILED: "Failed", CANCELLED: "Cancelled" }[job.state] ?? "Status";
  const isPartOfHeading = job.state === "SUCCEEDED" && problems.length > 0;
  const isFolded = (finding) => finding.is_detail && !finding.is_problem;
  const [shown, folded] = [diagnosis.findings.filter((each) => !isFolded(each)), diagnosis.findings.filter(isFolded)];
  const verdict = diagnosis.verdict || shown[0]?.sentence;
  const list = (findings) => html`<ul class="findings">${findings.map((finding) => html`<${Finding} finding=${finding} job=${job} />`)}</ul>`;
  return html`
    <details class="doctor ${problems.length ? "bad" : ""}" data-testid="doctor" open=${problems.length > 0} key=${problems.length > 0}>
      <summary>
        <h2>${isPartOfHeading ? `${what}, with ${state}` : what}</h2>
        ${state && !isPartOfHeading && html`<span class="badge ${problems.length ? "bad" : "good"}">${state}</span>`}
        ${verdict && html`<span class=${diagnosis.verdict ? "doctor-verdict" : "doctor-first"}>${said(verdict, job)}</span>`}
      </summary>
      ${list(shown)}
      ${folded.length > 0 && html`<${Fold} summary="Leases, streams and deadlines" of=${() => list(folded)} />`}
      ${!isOver(job) && html`<p class="muted">as of ${clock(seenAt)}</p>`}
    </details>
  `;
}

/** The line of the progress tells when the job ended, by a clock that moves. */
const said = (text, job) => marked(isOver(job) ? text.replace(/ \d+ s ago,/, "") : text, job.id);

function Finding({ finding, job }) {
  const within = Number.isFinite(finding.deadline_s) ? ` within ${duration(Math.max(0, finding.deadline_s))}` : "";
  const isSaid = finding.next && finding.sentence.includes(finding.next);
  return html`
    <li class=${finding.is_problem ? "finding problem" : "finding"}>
      ${finding.is_problem && html`<span class="visually-hidden">Problem: </span>`}
      ${said(finding.sentence, job)}
      ${finding.next && !isSaid && html`<p class="muted">Next: ${marked(finding.next)}${within}.</p>`}
    </li>
  `;
}

// ---- the open iteration ------------------------------------------------------------------------------------------

/** `records`: the newest last. `workers`: that serve the job. `now`: by the clock of their heartbeats. */
export function Beat({ records, series, workers, job, now }) {
  const open = records.filter(({ state }) => state !== "COMMITTED");
  const last = records.findLast(({ state }) => state === "COMMITTED");
  const isServed = workers.some((worker) => !isSilent(worker, now));
  const isGenerated = !isSft(job) || job.config.evaluation; // else no rollout ever serves it
  const hasRollouts = isGenerated && !isOver(job) && (job.state !== "PENDING" || workers.length > 0);
  return html`
    <section class="beat" data-testid="iteration" aria-label="Iterations">
      ${open.map((record) => (isOver(job) ? html`<${Unfinished} record=${record} />` : html`<${OpenIteration} record=${record} isServed=${isServed} />`))}
      ${!records.length && isOver(job) && html`<p class="muted">The job ended before it began to train.</p>`}
      ${!records.length && job.state === "PAUSED" && html`<p class="muted">Resume the job to open the first iteration.</p>`}
      <${Start} job=${job} records=${records} workers=${workers} />
      ${hasRollouts && html`<${Rollouts} workers=${workers} job=${job} now=${now} />`}
      ${last && html`<${Committed} record=${last} series=${series} />`}
    </section>
  `;
}

/** The steps until the first responses arrive, and the one that the job is at. */
function Start({ job, records, workers }) {
  const [first] = records;
  const hasBegun = job.next_iteration > job.first_iteration || first?.num_accepted > 0;
  if (hasBegun || !["PENDING", "RUNNING"].includes(job.state) || job.queue_position > 1) return null;
  const isGenerating = first && workers.some((worker) => worker.state !== "starting");
  const step = job.state === "PENDING" ? 0 : job.policy_version === null ? 1 : isGenerating ? 3 : 2;
  const steps = beginsWithExamples(job) ? STEPS_WITH_EXAMPLES : STEPS;
  const current = Math.min(step, steps.length - 1);
  return html`
    <ol class="steps" data-testid="start" aria-label="Steps of the start">
      ${steps.map(
        ([what, usual], index) => html`<li class=${index < current ? "muted" : null} aria-current=${index === current ? "step" : null}>
          ${what}${index < current ? ": done" : index === current && usual ? `, ${usual}` : ""}
        </li>`,
      )}
    </ol>
  `;
}

function OpenIteration({ record, isServed }) {
  const next = record.is_supervised ? NEXT_OF_ROWS[record.state] : NEXT[record.state === "OPEN" && !isServed ? "UNSERVED" : record.state];
  const since = record.drained_at ? `all ${unitOf(record)} since ${clock(record.drained_at)}` : `open since ${clock(record.opened_at)}`;
  return html`
    <article>
      <${IterationHead} record=${record} what="is open" />
      <${Meter} done=${record.num_accepted} total=${record.num_groups} failed=${record.num_failed_groups} label=${groupsIn(record)} />
      <p class="help">${groupsIn(record)}, ${since}</p>
      <p class="muted">${next}${refusals(record)}</p>
    </article>
  `;
}

const IterationHead = ({ record, what }) => html`
  <div class="head">
    <h2>Iteration ${number(record.iteration)} ${what}</h2>
    <span class="help">policy version ${record.policy_version}</span>
  </div>
`;

const unitOf = (record) => (record.is_supervised ? "rows" : "groups");

const groupsIn = (record) => [`${record.num_accepted} of ${record.num_groups} ${unitOf(record)} are in`, ...remarksOn(record)].join("; ");

/** The reasons for the choice of an iteration's prompts, where outcomes decide. */
const CHOSEN = {
  signal: "for their expected signal",
  unseen: "as new rows",
  oldest: "as rows not seen for longest",
  explored: "to explore the levels",
};

/** Remarks on the choice of prompts, and on accepted groups that do not count. */
const remarksOn = ({ is_supervised: isSupervised, num_chosen: chosen = {}, num_failed_groups: failed, num_replaced: replaced, num_not_replaced: missing }) =>
  [
    ...Object.entries(chosen).map(([why, count]) => `${count} prompts chosen ${CHOSEN[why]}`),
    failed && `${failed} of them ${isSupervised ? "left out, too long" : "failed"}`,
    replaced && `${replaced} of them replaced`,
    missing && `${missing} of them not replaced: no prompts are left`,
  ].filter(Boolean);

function refusals({ num_stale: stale, num_duplicate: duplicate, num_lost: lost }) {
  const counts = Object.entries({ stale, duplicate, "without a lease": lost }).filter(([, count]) => count > 0);
  return counts.length ? ` Refused: ${counts.map(([what, count]) => `${count} ${what}`).join(", ")}.` : "";
}

/** The iteration that was open when its job ended. */
const Unfinished = ({ record }) => html`
  <article>
    <${IterationHead} record=${record} what="was not committed" />
    <p class="muted">
      ${[`When the job ended, ${record.num_accepted} of ${record.num_groups} ${unitOf(record)} had arrived`, ...remarksOn(record)].join(", ")}.${refusals(record)}
    </p>
  </article>
`;

/** The newest values: whether the update was sound, and what it cost. */
function Committed({ record, series }) {
  const isRows = record.is_supervised;
  const tokens = `${number(record.response_tokens)} ${isRows ? "learned tokens" : "tokens"}`;
  const about = [`${tokens} in ${record.num_accepted} ${unitOf(record)}`, ...remarksOn(record)].join(", ");
  const ofAll = { generating: record.generate_s, training: record.train_s, "weight sync": record.weight_sync_s };
  const parts = isRows ? { training: record.train_s } : ofAll;
  const loss = ["Loss of examples", number(series.last("sft/loss")), "mean over the learned tokens, in nats"];
  const rows = [
    ["Took", duration(record.wall_s), Object.entries(parts).map(([name, s]) => `${name} ${duration(s)}`).join(", ")],
    [isRows ? "Examples" : "Responses", number(record.num_responses), about],
    ...(isRows ? [loss] : []),
    ...VALUES.filter(([, name]) => series.last(name) !== null).map(([title, name, about, text = number]) => [title, text(series.last(name)), about]),
  ];
  return html`
    <article>
      <${IterationHead} record=${record} what="committed" />
      <dl class="facts" aria-label="Newest values">
        ${rows.map(([name, value, about]) => html`<dt>${name}</dt><dd class="num">${value}</dd><dd class="muted">${about}</dd>`)}
      </dl>
      <p class="help">${clock(record.committed_at)}, <${Live} of=${() => ago(record.committed_at)} />.${refusals(record)}</p>
    </article>
  `;
}

// ---- who generates -----------------------------------------------------------------------------------------------

function Rollouts({ workers, job, now }) {
  const shown = [...workers].sort((a, b) => isSilent(b, now) - isSilent(a, now)).slice(0, MOST_WORKERS);
  return html`
    <div>
      <h3>Rollouts</h3>
      <ul class="chips" aria-label="Rollouts of this job">
        ${shown.map((worker) => html`<${Rollout} worker=${worker} newest=${job.policy_version} now=${now} />`)}
        ${shown.length < workers.length && html`<li><a href="#/workers">and ${workers.length - shown.length} more</a></li>`}
        ${!workers.length && html`<li class="muted">No rollout serves this job at the moment.</li>`}
      </ul>
    </div>
  `;
}

function Rollout({ worker, newest, now }) {
  const isLost = isSilent(worker, now);
  const parts = [
    worker.state,
    worker.num_in_flight && `answering ${worker.num_in_flight}`,
    worker.policy_version !== null && worker.policy_version !== newest && `version ${worker.policy_version}`,
    worker.tokens_per_s && `${number(worker.tokens_per_s)} tokens/s`,
  ].filter(Boolean);
  const text = isLost ? `silent for ${duration(now - worker.last_seen_at)}` : parts.join(" · ");
  return html`<li class="chip ${isLost ? "bad" : worker.state}"><strong>${worker.id}</strong> <span>${text}</span></li>`;
}
