// What a response was worth: its reward with the parts as bars, and its advantage to either side of zero.

import { el, number } from "./dom.js";

const FINISHED = { stop: "finished by itself", length: "cut at the limit of tokens" };

/** `most`: the largest size of a reward or part around it, which fills a bar. */
export function rewardBars(sample, most) {
  const parts = Object.entries(sample.reward_parts ?? {});
  return el(
    "ul",
    { class: "bars" },
    bar("reward", sample.reward, most, "whole"),
    parts.map(([name, value]) => bar(name, value, most)),
  );
}

function bar(name, value, most, kind = "") {
  const share = most > 0 ? Math.min(1, Math.abs(value) / most) : 0;
  const fill = el("span", {
    class: value < 0 ? "bar-fill negative" : "bar-fill",
    style: { width: `${(100 * share).toFixed(1)}%` },
  });
  return el(
    "li",
    { class: kind },
    el("span", { class: "bar-name" }, name),
    el("span", { class: "bar-track", "aria-hidden": "true" }, fill),
    el("span", { class: "bar-value" }, number(value || 0)),
  ); // not -0
}

/** The largest size of the rewards and their parts; 1 at least where all are within 0 and 1. */
export function largest(samples) {
  const values = samples.flatMap(({ reward, reward_parts: parts }) => [reward, ...Object.values(parts ?? {})]);
  return Math.max(1, ...values.map(Math.abs));
}

/** Signed, to the left or right of zero. Nothing where it is not told. */
export function advantageBar(advantage, most) {
  if (advantage === null || advantage === undefined) return el("p", { class: "advantage muted" }, "advantage not told");
  const share = most > 0 ? Math.min(1, Math.abs(advantage) / most) : 0;
  const sign = advantage > 0 ? "+" : advantage < 0 ? "−" : "";
  const side = { width: `${(50 * share).toFixed(1)}%`, [advantage < 0 ? "right" : "left"]: "50%" };
  return el(
    "p",
    { class: "advantage" },
    el("span", { class: "bar-name" }, "advantage"),
    el(
      "span",
      { class: "bar-track both-ways", "aria-hidden": "true" },
      el("span", { class: advantage < 0 ? "bar-fill negative" : "bar-fill", style: side }),
    ),
    el("span", { class: "bar-value" }, `${sign}${number(Math.abs(advantage))}`),
  );
}

export const largestAdvantage = (samples) =>
  Math.max(1e-9, ...samples.map(({ advantage }) => Math.abs(advantage ?? 0)));

/** `42 tokens · finished by itself` */
export function lengthOf(sample) {
  const isCut = sample.finish_reason === "length";
  return el(
    "p",
    { class: "finish" },
    `${number(sample.num_tokens)} tokens · `,
    el("span", { class: isCut ? "warn" : "muted" }, FINISHED[sample.finish_reason] ?? sample.finish_reason),
  );
}
