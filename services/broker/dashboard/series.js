// A job's series, and which of them make which chart. Names are those of docs/observability.md.

import { get } from "./api.js";

const TOKENS_PER_S = "iteration/tokens_per_s"; // the broker tells its parts
const PART = 10_000; // iterations, the most in one answer of /metrics

/**
 * `lines`: [name, series], each, with the series of what lies above and below as a third. `pattern`: each series that it
 * matches is a line, named by its first group; then `lines` are not drawn. A chart is shown when one of its lines has
 * values; `unlessZero`: and when one of them is not 0.
 */
export const CHARTS = [
  {
    id: "reward", title: "Reward",
    description: "Mean of all responses, with one standard deviation around it.",
    lines: [["mean", "iteration/reward_mean", "iteration/reward_std"]],
  },
  {
    id: "held-out", title: "Held-out reward",
    description: "Of prompts that are never trained on, with one standard deviation around it.",
    lines: [["mean", "eval/reward_mean", "eval/reward_std"]],
    pattern: /^eval\/(?!reward\/)([^/]+)\/reward_mean$/,
  },
  {
    id: "parts", title: "Parts of the reward",
    description: "Mean of each, over the responses that have it.",
    pattern: /^reward\/(.+)_mean$/,
  },
  {
    id: "held-out-parts", title: "Parts of the held-out reward",
    description: "Mean of each, over the responses that have it.",
    pattern: /^eval\/((?:[^/]+\/)?reward\/.+)_mean$/,
  },
  {
    id: "solved", title: "Solved prompts", isPercent: true, domain: [0, 1],
    description: "A response is solved from the reward solved_at on. Held out, pass at k: prompts of which any response is. In training: groups of which all responses are, and of which none is; neither teaches where rewards are equal.",
    lines: [
      ["held out, by any of k", "eval/pass_at_k"],
      ["trained, by every response", "rollout/solved_all_frac"],
      ["trained, by none", "rollout/solved_none_frac"],
    ],
  },
  {
    id: "mismatch", title: "Engine against trainer", unit: "nats", isLog: true,
    description: "Gap of trainer's and rollouts' log probabilities of the same token, at the same weights. On-policy is as good as this is small.",
    lines: [["mean", "iteration/mismatch_mean"], ["largest", "iteration/mismatch_max"]],
  },
  {
    id: "kl", title: "KL", unit: "nats",
    description: "Per trained token, to the reference policy.",
    lines: [["to the reference", "train/kl"]],
  },
  {
    id: "entropy", title: "Entropy", unit: "nats",
    description: "Mean over the trained tokens. Near 0 the policy has stopped exploring.",
    lines: [["mean", "train/entropy"]],
  },
  {
    id: "grad-norm", title: "Gradient norm",
    description: "Before clipping.",
    lines: [["norm", "train/grad_norm"]],
  },
  {
    id: "grad-cosine", title: "Gradient cosine",
    description: "With the gradient before. Near 1, stale gradients repeat each other; GAC then projects or skips.",
    domain: [-1, 1],
    lines: [["cosine", "train/grad_cosine"]],
  },
  {
    id: "learning-rate", title: "Learning rate", domain: [0, 0],
    description: "Of the iteration's last step, after warm-up and decay.",
    lines: [["rate", "train/learning_rate"]],
  },
  {
    id: "length", title: "Response length", unit: "tokens", domain: [0, 0],
    description: "Of all responses. 95 of 100 are no longer than p95.",
    lines: [
      ["mean", "rollout/response_tokens_mean"],
      ["shortest", "rollout/response_tokens_min"],
      ["p95", "rollout/response_tokens_p95"],
      ["longest", "rollout/response_tokens_max"],
    ],
  },
  {
    id: "truncated", title: "Truncated responses", isPercent: true, domain: [0, 0.1],
    description: "Share that was cut at rollout.max_response_tokens.",
    lines: [["share", "rollout/truncated_frac"]],
  },
  {
    id: "throughput", title: "Throughput", unit: "tokens/s", domain: [0, 0],
    description: "Prompt and response tokens per second of wall clock. Per device: trainers and rollouts counted.",
    lines: [["all", TOKENS_PER_S], ["per device", "iteration/tpspd"]],
  },
  {
    id: "idle", title: "Idle share", isPercent: true, domain: [0, 1],
    description: "Share of the wall clock in which a side waited.",
    lines: [["trainer", "iteration/trainer_idle_frac"], ["rollouts", "iteration/rollout_idle_frac"]],
  },
  {
    id: "time", title: "Time of an iteration", unit: "s", domain: [0, 0],
    description: "Generating and training overlap: the whole is less than their sum.",
    lines: [
      ["whole", "iteration/wall_s"],
      ["generate", "iteration/generate_s"],
      ["train", "iteration/train_s"],
      ["weight sync", "iteration/weight_sync_s"],
    ],
  },
  {
    id: "staleness", title: "Staleness", unit: "versions", unlessZero: true, domain: [0, 1],
    description: "Policy versions between generating and training, of the oldest token.",
    lines: [["largest", "iteration/staleness_max"]],
  },
  {
    id: "divergence", title: "Divergence", unit: "nats", unlessZero: true,
    description: "Estimated KL per token from the policy that generated to the one that trains, before its step.",
    lines: [["mean", "train/divergence"]],
  },
  {
    id: "clipped", title: "Clipped tokens", isPercent: true, domain: [0, 0.01],
    description: "Share of the trained tokens whose ratio was clipped.",
    lines: [["share", "train/clipped_frac"]],
  },
];

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
    const found = pattern ? [...this.points.keys()].filter((name) => pattern.test(name)).sort() : [];
    return found.length ? found.map((series) => [series.match(pattern)[1].replace("reward/", ""), series]) : lines;
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
    return [...this.points.keys()].filter((name) => !shown.has(name)).sort();
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
