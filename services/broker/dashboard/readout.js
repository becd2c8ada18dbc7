// A timeline in words and tables, for those who do not see its drawing, and for exact numbers.

import { clock, duration, el, number, percent } from "./dom.js";
import { KINDS } from "./lanes.js";
import { TRAINER, covered, overlap, totals } from "./spans.js";

const MOST_ROWS = 500;

/** A span in words. */
export function describe(span, origin) {
  const what =
    span.kind === "pull" || span.kind === "load" ? `policy version ${span.iteration}` : `iteration ${span.iteration}`;
  const group = span.group_id ? `group ${span.group_id} of ${what}` : what;
  const from = `from ${(span.start - origin).toFixed(2)} s (${clock(span.start)})`;
  return `${span.lane}: ${KINDS[span.kind]?.name ?? span.kind}, ${group}, ${duration(span.end - span.start)}, ${from}.`;
}

/** Idle shares of both sides, how much of the time both work, and what the adviser says. */
export function summarise(timeline) {
  const whole = timeline.end - timeline.start;
  if (!timeline.lanes.length || whole <= 0) return "No iteration has been opened yet.";
  const [first, last] = [timeline.iterations[0], timeline.iterations[timeline.iterations.length - 1]];
  const idle = timeline.lanes
    .filter(({ id, idle_frac: share }) => id !== TRAINER && share !== null)
    .map(({ idle_frac: share }) => share);
  const trainer = timeline.lanes.find(({ id }) => id === TRAINER)?.idle_frac ?? null;
  const which = first === last ? `Iteration ${first}` : `Iterations ${first} to ${last}`;
  const parts = [
    trainer === null
      ? "what the trainer did is told at the commit"
      : `the trainer was idle ${percent(trainer)} of the time`,
  ];
  if (idle.length)
    parts.push(
      `${idle.length > 1 ? `${idle.length} rollouts were idle ${percent(mean(idle))} on average` : `the rollout ${percent(idle[0])}`}`,
    );
  if (trainer !== null)
    parts.push(
      `generation and micro-batches ran side by side for ${percent(covered(overlap(timeline.spans)) / whole)}`,
    );
  const advice = timeline.advice ? ` Advice, predicted from the last iterations: ${timeline.advice}.` : "";
  return `${which}, ${duration(whole)}: ${parts.join("; ")}.${advice}`;
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function table(caption, columns, rows) {
  const head = el(
    "tr",
    {},
    columns.map((name) => el("th", { scope: "col" }, name)),
  );
  const body = rows.map(([name, ...cells]) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, name),
      cells.map((cell) => el("td", {}, cell)),
    ),
  );
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, body)),
  );
}

export function lanesTable({ lanes, spans }) {
  const kinds = Object.keys(KINDS).filter((kind) => spans.some((span) => span.kind === kind));
  const rows = lanes.map(({ id, idle_frac: idle }) => {
    const sums = totals(spans.filter(({ lane }) => lane === id));
    return [id, percent(idle), ...kinds.map((kind) => (sums.has(kind) ? duration(sums.get(kind)) : "–"))];
  });
  return table(
    "Time by lane; spans of a rollout overlap",
    ["Lane", "Idle", ...kinds.map((kind) => KINDS[kind].name)],
    rows,
  );
}

export function spansTable({ spans, start }) {
  const shown = spans.slice(0, MOST_ROWS);
  const rows = shown.map((span) => [
    span.lane,
    KINDS[span.kind]?.name ?? span.kind,
    number(span.iteration),
    span.group_id ?? "–",
    `${(span.start - start).toFixed(3)} s`,
    duration(span.end - span.start),
  ]);
  const caption =
    shown.length < spans.length ? `The first ${number(shown.length)} of ${number(spans.length)} spans` : "Spans";
  return table(caption, ["Lane", "Kind", "Iteration or version", "Group", "Begin", "Length"], rows);
}
