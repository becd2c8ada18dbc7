// The newest rewards of the jobs that are in sight: few, small requests, one after the other.

import { ApiError, get } from "./api.js";
import { clear, el, number, svg } from "./dom.js";

const NUM_POINTS = 40;
const MAX_REQUESTS = 6; // at a time; the next look goes on with the others
const [WIDTH, HEIGHT] = [88, 24];

/** Keeps the last points of each job, and asks only for those after them. */
export class RewardCurves {
  constructor(signal) {
    this.signal = signal;
    this.curves = new Map(); // job id -> {points, next}: as of iteration `next`
  }

  /** Reads what is new of jobs [{id, next_iteration}]; calls onCurve(id, points) for each that has changed. */
  async read(jobs, onCurve) {
    const isDue = (job) => job.next_iteration > (this.curves.get(job.id)?.next ?? 0);
    for (const job of jobs.filter(isDue).slice(0, MAX_REQUESTS)) {
      const known = this.curves.get(job.id)?.points ?? [];
      const after = Math.max(known.at(-1)?.[0] ?? -1, job.next_iteration - 1 - NUM_POINTS);
      try {
        const { metrics } = await get(`/jobs/${encodeURIComponent(job.id)}/metrics`, { after }, this.signal);
        const points = [...known, ...(metrics["iteration/reward_mean"] ?? [])].slice(-NUM_POINTS);
        this.curves.set(job.id, { points, next: job.next_iteration });
        onCurve(job.id, points);
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        return; // the list says what is wrong
      }
    }
  }
}

/** Puts the newest reward and the way there into `cell`. */
export function showCurve(cell, points) {
  if (points.length === 0) return;
  clear(cell).append(
    svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, "aria-hidden": "true" },
      svg("polyline", { points: coordinates(points) }), dot(points)),
    el("span", { class: "num", text: number(points.at(-1)[1]) }),
  );
}

function scales(points) {
  const values = points.map(([, y]) => y);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [first, last] = [points[0][0], points.at(-1)[0]];
  return {
    x: (iteration) => 2 + ((iteration - first) / Math.max(1, last - first)) * (WIDTH - 6),
    y: (value) => HEIGHT - 3 - ((value - low) / (high - low || 1)) * (HEIGHT - 6),
  };
}

function coordinates(points) {
  const { x, y } = scales(points);
  return points.map(([iteration, value]) => `${x(iteration).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
}

function dot(points) {
  const { x, y } = scales(points);
  const [iteration, value] = points.at(-1);
  return svg("circle", { cx: x(iteration).toFixed(1), cy: y(value).toFixed(1), r: 2.2 });
}
