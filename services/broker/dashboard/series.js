// A job's series, and their lines in a chart. Names are those of docs/observability.md.

import { get } from "./api.js";
import { CHARTS } from "./table.js";

const TOKENS_PER_S = "iteration/tokens_per_s"; // the broker tells its parts
const PART = 10_000; // iterations, the most in one answer of /metrics

/** Values by series and iteration, as they come: all at first, then one point after the other. */
export class Series {
  constructor() {
    this.points = new Map(); // name -> [[x, y], ...], sorted by x
  }

  /** {name: y} of one iteration or evaluation. The same x again replaces its value. */
  add(x, values) {
    const tokens = values["iteration/prompt_tokens"] + values["iteration/response_tokens"];
    const rate = tokens / values["iteration/wall_s"];
    for (const [name, y] of Object.entries(Number.isFinite(rate) ? { ...values, [TOKENS_PER_S]: rate } : values)) {
      if (!this.points.has(name)) this.points.set(name, []);
      insert(this.points.get(name), x, y);
    }
  }

  /** Reads what the job at `path` has after an iteration, in as many parts as the broker makes of it. */
  async read(path, after, signal) {
    for (let isWhole = false; !isWhole;) {
      const { metrics } = await get(`${path}/metrics`, { after }, signal);
      this.addAll(metrics);
      const iterations = metrics["iteration/wall_s"] ?? [];
      isWhole = iterations.length < PART;
      after = iterations.at(-1)?.[0];
    }
  }

  /** {name: [[x, y], ...]} of /metrics: all, or what is new or has come late. */
  addAll(metrics) {
    const byX = new Map();
    for (const [name, points] of Object.entries(metrics)) {
      for (const [x, y] of points) {
        if (!byX.has(x)) byX.set(x, {});
        byX.get(x)[name] = y;
      }
    }
    for (const [x, values] of byX) this.add(x, values);
  }

  of(name) {
    return this.points.get(name) ?? [];
  }

  last(name) {
    return this.of(name).at(-1)?.[1] ?? null;
  }

  /** The lines of a chart of CHARTS; none when it is not to be shown. */
  lines(chart) {
    const lines = this.linesOf(chart).map((line) => this.line(...line)).filter(({ points }) => points.length);
    const isFlat = chart.unlessZero && lines.every(({ points }) => points.every(([, y]) => y === 0));
    return isFlat ? [] : lines;
  }

  /** The lines of a chart, or those that its pattern finds. */
  linesOf({ lines = [], pattern }) {
    const names = pattern ? [...this.points.keys()].filter((name) => pattern.test(name) && !this.isRepeated(name)).sort() : [];
    return names.length ? names.map((series) => [series.match(pattern)[1].replace("reward/", ""), series]) : lines;
  }

  /** True for a score that a named held-out set has, too: the first of several has each twice. As in onbeat/charts/table.py. */
  isRepeated(name) {
    const [area, score] = [name.slice(0, 5), name.slice(4)]; // "eval/" and "/reward_mean"
    const isSame = (other) => JSON.stringify(this.of(other)) === JSON.stringify(this.of(name));
    const names = area === "eval/" ? [...this.points.keys()] : [];
    return names.some((other) => other !== name && other.startsWith(area) && other.endsWith(score) && isSame(other));
  }

  line(name, series, spread) {
    const points = this.of(series);
    const around = new Map(spread ? this.of(spread) : []);
    const isShare = points.every(([, y]) => y >= 0 && y <= 1); // one deviation around a share is a share
    const inside = (y) => (isShare ? Math.min(1, Math.max(0, y)) : y);
    const edges = ([x, y]) => [x, inside(y - around.get(x)), inside(y + around.get(x))];
    return { name, points, band: points.filter(([x]) => around.has(x)).map(edges) };
  }

  /** Names that are in no chart. */
  others() {
    const lines = CHARTS.flatMap((chart) => [...(chart.lines ?? []), ...this.linesOf(chart)]);
    const shown = new Set(lines.flatMap(([, ...series]) => series));
    return [...this.points.keys()].filter((name) => !shown.has(name) && !this.isRepeated(name)).sort();
  }
}

function insert(points, x, y) {
  let index = points.length;
  while (index > 0 && points[index - 1][0] >= x) index -= 1; // nearly always the last
  points.splice(index, points[index]?.[0] === x ? 1 : 0, [x, y]);
}

/** Index of the element whose `at(element)` is nearest to `value`; -1 of an empty array. Sorted by `at`. */
export function nearest(sorted, value, at = (element) => element) {
  if (!sorted.length) return -1;
  let low = 0;
  let high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at(sorted[middle]) < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - at(sorted[low - 1]) <= at(sorted[low]) - value ? low - 1 : low;
}
