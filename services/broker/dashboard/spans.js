// Arithmetic of timelines: which spans lie beside each other, what is covered, what lies where. No DOM.

export const TRAINER = "trainer";

/**
 * Spans of one lane with the row that each is drawn in: [{span, row}], by start, and the number of rows. Spans of a
 * group stay in one row, groups that overlap get rows of their own. Those of weights (`over`) lie over all rows.
 */
export function packLane(spans) {
  const chains = new Map(); // spans of the same chain
  for (const span of spans) {
    const key = span.group_id ? `${span.iteration} ${span.group_id}` : `${chains.size}`;
    const chain = chains.get(key) ?? { start: Infinity, end: -Infinity, spans: [], isOver: isOver(span) };
    chain.start = Math.min(chain.start, span.start);
    chain.end = Math.max(chain.end, span.end);
    chain.spans.push(span);
    chains.set(key, chain);
  }
  const ends = []; // ends of each row
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

/**
 * [{iteration, start, end}]: where each iteration lies. From the end of the one before to the trainer's last span, which
 * comes with the commit. With several open at a time the bands overlap by their prompts, but not by their commits.
 */
export function bands({ iterations, spans, start, end }) {
  const found = [];
  for (const iteration of iterations) {
    const ends = spans.filter((span) => span.iteration === iteration && span.lane === TRAINER).map((span) => span.end);
    const before = found.at(-1)?.end ?? start;
    if (before < end) found.push({ iteration, start: before, end: ends.length ? Math.max(before, ...ends) : end });
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
