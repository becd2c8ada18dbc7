// Arithmetic of timelines: which spans lie beside each other, what is covered, what lies where. Pure, no DOM.

export const TRAINER = "trainer";
const WORK = new Set(["micro_batch"]); // what a trainer does while rollouts generate

/**
 * Spans of one lane with the row that each is drawn in: [{span, row}], by start, and the number of rows. Spans of a
 * group stay in one row, groups that overlap get rows of their own. Those of weights (`over`) lie over all rows.
 */
export function packLane(spans) {
  const chains = new Map(); // what belongs together
  for (const span of spans) {
    const key = span.group_id ? `${span.iteration} ${span.group_id}` : `${chains.size}`;
    const chain = chains.get(key) ?? { start: Infinity, end: -Infinity, spans: [], isOver: isOver(span) };
    chain.start = Math.min(chain.start, span.start);
    chain.end = Math.max(chain.end, span.end);
    chain.spans.push(span);
    chains.set(key, chain);
  }
  const ends = []; // of each row
  const items = [];
  for (const chain of [...chains.values()].sort((a, b) => a.start - b.start)) {
    let row = chain.isOver ? -1 : ends.findIndex((end) => end <= chain.start + 1e-6);
    if (row === -1 && !chain.isOver) row = ends.push(0) - 1;
    if (row >= 0) ends[row] = chain.end;
    items.push(...chain.spans.map((span) => ({ span, row })));
  }
  items.sort((a, b) => a.span.start - b.span.start || a.row - b.row);
  return { items, numRows: Math.max(1, ends.length) };
}

const isOver = ({ kind }) => kind === "pull" || kind === "load";

/** Intervals [start, end] joined where they touch, by start. */
export function union(intervals) {
  const joined = [];
  for (const [start, end] of [...intervals].sort((a, b) => a[0] - b[0])) {
    const last = joined[joined.length - 1];
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else joined.push([start, end]);
  }
  return joined;
}

/** What two unions have in common. */
export function intersect(a, b) {
  const common = [];
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    const [start, end] = [Math.max(a[i][0], b[j][0]), Math.min(a[i][1], b[j][1])];
    if (start < end) common.push([start, end]);
    if (a[i][1] < b[j][1]) i += 1;
    else j += 1;
  }
  return common;
}

export const covered = (intervals) => intervals.reduce((sum, [start, end]) => sum + end - start, 0);

/** When at least one rollout generates and the trainer works on micro-batches. */
export function overlap(spans) {
  const of = (test) => union(spans.filter(test).map(({ start, end }) => [start, end]));
  return intersect(
    of(({ kind }) => kind === "generate"),
    of(({ kind, lane }) => lane === TRAINER && WORK.has(kind)),
  );
}

/**
 * [{iteration, start, end}]: where each iteration lies. From the commit before to its own; `records` tell when, else
 * the spans do. With several open at a time the bands overlap by their prompts, but not by their commits.
 */
export function bands(timeline, records) {
  const known = new Map(records.map((record) => [record.iteration, record]));
  const found = [];
  for (const iteration of timeline.iterations) {
    const own = timeline.spans.filter((span) => span.iteration === iteration && !isOver(span));
    const record = known.get(iteration);
    const before = found.length ? found[found.length - 1].end : timeline.start;
    const ends = own.filter(({ lane }) => lane === TRAINER).map(({ end }) => end);
    const end = record ? (record.committed_at ?? timeline.end) : ends.length ? Math.max(...ends) : timeline.end;
    if (before < timeline.end)
      found.push({ iteration, start: before, end: Math.min(Math.max(end, before), timeline.end) });
  }
  return found;
}

/** The item of a packed lane at a moment, the one in `row` first; within `slack` seconds. null: none. */
export function itemAt(items, time, row, slack = 0) {
  let best = null;
  for (const item of items) {
    const { start, end } = item.span;
    if (start - slack > time) break;
    if (end + slack < time) continue;
    if (item.row === row) return item;
    if (item.row === -1 || best === null) best = item;
  }
  return best?.row === -1 || best === null ? best : null;
}

/** Seconds by kind, of the spans of a lane. */
export function totals(spans) {
  const sums = new Map();
  for (const { kind, start, end } of spans) sums.set(kind, (sums.get(kind) ?? 0) + end - start);
  return sums;
}

// ---- axes --------------------------------------------------------------------------------------------------------

/** Maps the domain's ends onto the range's ends. A domain of no width maps to the middle. */
export function linear([d0, d1], [r0, r1]) {
  if (d0 === d1) return () => (r0 + r1) / 2;
  const slope = (r1 - r0) / (d1 - d0);
  return (value) => r0 + (value - d0) * slope;
}

/** Round steps of 1, 2 or 5 times a power of ten: about `count` ticks within [low, high]. */
export function ticks(low, high, count = 5) {
  if (!(high > low)) return Number.isFinite(low) ? [low] : [];
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= rough * 0.999) ?? 10);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  // Divided where the step is below 1: 3 / 10 is 0.3, and 3 * 0.1 is not.
  const value = (index) => (step < 1 ? index / Math.round(1 / step) : index * step);
  return Array.from({ length: last - first + 1 }, (_, index) => value(first + index));
}
