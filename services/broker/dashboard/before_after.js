// The same held-out prompts before and after training: the recorded answers of the first and the last evaluation.
// onbeat/terminal/before_after.py pairs them in the same way for the report of a job.

import { get, isRefusal } from "./api.js";
import { number } from "./format.js";
import { Component, html } from "./parts.js";

const SHOWN = 4; // pairs at first
const KINDS = [[false, true], [false, false], [true, false], [true, true]]; // right before, right after

/** `job`: has an evaluation. `path`: of the job. Reads the answers when it is first shown. */
export class BeforeAfter extends Component {
  state = { pairs: null, problem: "", isWhole: false };

  async componentDidMount() {
    const { job, path, signal } = this.props;
    try {
      const { evaluations } = await get(`${path}/evaluations`, {}, signal);
      const done = evaluations.filter(({ state }) => state === "DONE").map(({ evaluation }) => evaluation);
      const ends = [...new Set([done[0], done.at(-1)])].filter((number) => number !== undefined);
      const answers = ends.map((number) => get(`${path}/evaluations/${number}/samples`, {}, signal));
      const [before, after] = (await Promise.all(answers)).map(({ samples }) => samples);
      this.setState({ pairs: pairsOf(before ?? [], after ?? [], solvedAt(job.config)), ends, isAnswered: before?.length > 0 });
    } catch (error) {
      if (isRefusal(error, signal)) this.setState({ problem: error.message });
    }
  }

  render(_, { pairs, ends, isAnswered, problem, isWhole }) {
    if (problem) return html`<p class="notice bad">${problem}</p>`;
    if (!pairs) return html`<p class="muted">Loading the answers…</p>`;
    const shown = telling(pairs).slice(0, isWhole ? Infinity : SHOWN);
    const rest = pairs.length - shown.length;
    return html`
      <div class="stack" data-testid="before-after">
        <p>${sentence(pairs, ends, isAnswered)}</p>
        ${shown.map((pair) => html`<${Pair} pair=${pair} />`)}
        ${rest > 0 && html`<span><button class="button" type="button" onClick=${() => this.setState({ isWhole: true })}>Show ${rest} more</button></span>`}
      </div>
    `;
  }
}

const Pair = ({ pair: { prompt, before, after } }) => html`
  <article class="pair" data-testid="pair">
    <div class="text of-prompt" tabindex="0" role="group" aria-label="Prompt">${prompt}</div>
    <div class="sides">
      <${Side} name="Before" answer=${before} />
      ${after && html`<${Side} name="After" answer=${after} />`}
    </div>
  </article>
`;

const Side = ({ name, answer: { sample, isRight } }) => html`
  <div>
    <h3>${name} <span class=${isRight ? "good" : "bad"}>${isRight ? "✓ right" : "✗ wrong"}, reward ${number(sample.reward)}</span></h3>
    <div class="text" tabindex="0" role="group" aria-label=${`Answer ${name.toLowerCase()}`}>${sample.response || "(empty)"}</div>
  </div>
`;

// ---- pairs ---------------------------------------------------------------------------------------------------------

/** The place of a prompt in an evaluation: the last part of its group's id. */
export const placeOf = ({ group_id: group }) => Number(group.split("-").at(-1));
const keyOf = (sample) => `${placeOf(sample)} ${sample.index ?? 0}`;

/** A function of a prompt's place: the reward from which an answer to it is right. */
export function solvedAt(config) {
  const { sets = [], num_prompts: usual } = config.evaluation;
  let end = 0;
  const ends = sets.map((set) => [(end += set.num_prompts ?? usual), set.solved_at ?? config.solved_at]);
  return (place) => ends.find(([last]) => place < last)?.[1] ?? config.solved_at ?? 1;
}

/** [{prompt, before, after}, ...] of answers to the same prompt at the same place in its group; without later ones, alone.
    Answers without a reward are left out. */
export function pairsOf(earlier, later, solved) {
  const [before, after] = [earlier, later].map((samples) => samples.filter(({ reward }) => reward !== null));
  const judged = (sample) => sample && { sample, isRight: sample.reward >= solved(placeOf(sample)) };
  const newest = new Map(after.map((sample) => [keyOf(sample), sample]));
  const pairs = before.map((sample) => ({ prompt: sample.prompt, before: judged(sample), after: judged(newest.get(keyOf(sample))) }));
  return pairs.filter((pair) => pair.after || !after.length);
}

/** The pairs in an order in which a few show what became of the answers: one of each kind, then a second one of each. */
export function telling(pairs) {
  const kinds = KINDS.map(([was, is]) => pairs.filter((pair) => pair.before.isRight === was && pair.after?.isRight === is));
  const turns = pairs.flatMap((_, turn) => kinds.map((kind) => kind[turn]).filter(Boolean));
  return [...turns, ...pairs.filter((pair) => !pair.after)];
}

function sentence(pairs, [first, last], isAnswered) {
  if (!pairs.length && isAnswered) return "No recorded answer got a reward, so none is right or wrong: the samples show them.";
  if (!pairs.length) return "No answers are recorded yet: the first evaluation must be over.";
  const right = (side) => pairs.filter((pair) => pair[side]?.isRight).length;
  const were = `${right("before")} of ${pairs.length} answers ${right("before") === 1 ? "is" : "are"} right`;
  if (last === undefined) return `Answered once so far: ${were}.`;
  return `The same held-out prompts before and after ${number(last - first)} iterations: ${were} before, ${right("after")} after.`;
}
