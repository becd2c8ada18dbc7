// The reward of a response with its parts, and its advantage, as bars.

import { number } from "./format.js";
import { html } from "./parts.js";

const FINISHED = { stop: "finished by itself" };

/** The values that fill a bar: the largest reward or part, 1 at least, and the largest advantage. */
export function scaleOf(samples) {
  const rewards = samples.flatMap(({ reward, reward_parts: parts }) => [reward, ...Object.values(parts ?? {})]);
  return {
    reward: Math.max(1, ...rewards.map(Math.abs)),
    advantage: Math.max(1e-9, ...samples.map(({ advantage }) => Math.abs(advantage ?? 0))),
  };
}

/** One cut turn cuts an episode. */
export const isTruncated = ({ finish_reason: end, turns }) => [end, ...(turns ?? []).map((turn) => turn.finish_reason)].includes("length");

/** The reward with its parts, the advantage to either side of zero, and how it ended; a row of examples has none of it. */
export const Rewards = ({ sample: { reward, reward_parts: parts, advantage, ...sample }, scale, isHeldOut = false, children }) => html`
  <ul class="bars">
    ${sample.is_supervised
      ? html`<li class="muted pending">example: learned, without a reward</li>`
      : reward === null
      ? html`<li class="muted pending">reward: no opinion, ${isHeldOut ? "not counted" : "not trained"}</li>`
      : html`<${Bar} name="reward" value=${reward} most=${scale.reward} className="whole" />`}
    ${Object.entries(parts ?? {}).map(([name, value]) => html`<${Bar} name=${name} value=${value} most=${scale.reward} />`)}
    ${!isHeldOut &&
    reward !== null &&
    (Number.isFinite(advantage)
      ? html`<${Bar} name="advantage" value=${advantage} most=${scale.advantage} isSigned=${true} />`
      : html`<li class="muted pending">advantage: known after the commit</li>`)}
  </ul>
  <p class="help">
    ${number(sample.num_tokens)} ${sample.is_supervised ? "learned tokens" : html`tokens · <${End} sample=${sample} />`}${children}
  </p>
`;

function End({ sample }) {
  const isCut = isTruncated(sample);
  return html`<span class=${isCut ? "warn" : null}>${isCut ? "truncated" : (FINISHED[sample.finish_reason] ?? sample.finish_reason)}</span>`;
}

function Bar({ name, value, most, className = "", isSigned = false }) {
  const width = `${((isSigned ? 50 : 100) * Math.min(1, Math.abs(value) / most)).toFixed(1)}%`;
  const side = isSigned ? { width, [value < 0 ? "right" : "left"]: "50%" } : { width };
  return html`
    <li class=${className}>
      <span>${name}</span>
      <span class=${isSigned ? "bar-track signed" : "bar-track"} aria-hidden="true">
        <span class=${value < 0 ? "bar-fill negative" : "bar-fill"} style=${side}></span>
      </span>
      <span class="num">${isSigned && value > 0 ? "+" : ""}${number(value || 0)}</span>
    </li>
  `; // not -0
}
