// One prompt with all its responses, token by token.

import { get } from "./api.js";
import { duration, number, percent } from "./format.js";
import { addressOf, Component, createRef, html, JobHead, moved, pathOf, promptOf, render } from "./parts.js";
import { Rewards, scaleOf } from "./rewards.js";

export async function show(main, { id, group }, signal) {
  const path = pathOf(id);
  const [job, detail] = await Promise.all([get(path, {}, signal), get(`${path}/groups/${encodeURIComponent(group)}`, {}, signal)]);
  if (!signal.aborted) render(html`<${GroupPage} job=${job} group=${detail} />`, main);
}

class GroupPage extends Component {
  state = { areMarked: true, isPlain: false };
  scale = scaleOf(this.props.group.responses);
  readout = createRef();

  /** Writes the line alone: the pointed token changes often. */
  point(words) {
    this.readout.current.textContent = words;
  }

  render({ job, group }, { areMarked, isPlain }) {
    const isRow = group.is_supervised; // no engine gave its tokens a probability
    return html`
      <${JobHead} job=${job} what=${promptOf(group.group_id)} current="samples" />
      <section class="stack" aria-labelledby="prompt-heading">
        <div class="head">
          <h2 id="prompt-heading">Prompt</h2>
          <a href="${addressOf(job.id)}/samples?iteration=${group.iteration}">All samples of iteration ${group.iteration}</a>
        </div>
        <h3>Text of the row</h3>
        <div class="text" tabindex="0" role="region" aria-label="Text of the prompt">${group.prompt || "(empty)"}</div>
        <h3>As the model saw it</h3>
        ${group.prompt_parts.length ? html`<${Decoded} parts=${group.prompt_parts} name="Prompt as the model saw it" />` : NOT_RECORDED}
        <p class="help">${number(group.num_prompt_tokens)} tokens</p>
        ${group.chosen && html`<p class="help" data-testid="chosen">${group.chosen}</p>`}
      </section>
      <section class="stack" aria-labelledby="responses-heading" data-testid="group-detail">
        <div class="head">
          <h2 id="responses-heading">Responses</h2>
          ${!isRow && html`<div class="actions">${this.box("areMarked", "Show white space")}${this.box("isPlain", "Plain text")}</div>`}
        </div>
        ${!isRow && html`<${TokenLegend} />`}
        ${this.responses(group, areMarked, isPlain)}
        ${!isRow &&
        html`<p class="token-readout" role="status" data-testid="token-readout" ref=${this.readout}>
          Point at a token, or move with the arrow keys.
        </p>`}
      </section>
    `;
  }

  box(name, label) {
    const change = (event) => this.setState({ [name]: event.target.checked });
    return html`<span><input type="checkbox" id=${name} checked=${this.state[name]} onChange=${change} /> <label for=${name}>${label}</label></span>`;
  }

  responses(group, areMarked, isPlain) {
    const facts = [
      `policy version ${group.policy_version}`,
      ...(group.is_supervised
        ? [`an example, tokenised by ${group.worker_id}`]
        : [group.worker_id, `generated in ${duration(group.generate_s)}`, `scored in ${duration(group.score_s)}`]),
    ];
    return html`
      <div class="group">
        <h3>${promptOf(group.group_id)}</h3>
        <p class="help">${facts.join(" · ")}</p>
        ${group.failure && html`<p class="notice bad">This group failed and was not trained: ${group.failure}</p>`}
        <div class="response-row">
          ${group.responses.map((response, index) => this.response(group, response, index, areMarked, isPlain))}
        </div>
      </div>
    `;
  }

  response(group, response, index, areMarked, isPlain) {
    const name = `response ${index + 1} of group ${group.group_id}`;
    const tokens = group.tokens?.[index] ?? [];
    const shown = { name, areMarked, isPlain, isRow: group.is_supervised, onPoint: (words) => this.point(`Response ${index + 1}, ${words}`) };
    return html`
      <article class="response" data-testid="response">
        <h4>Response ${index + 1}</h4>
        <${Rewards} sample=${response} scale=${this.scale}>${tokens.length > 0 && ` · mean probability ${percent(meanProbability(tokens))}`}<//>
        ${response.turns.length ? turnsOf(response.turns, tokens, shown) : html`<${Said} text=${response.response} tokens=${tokens} ...${shown} />`}
      </article>
    `;
  }
}

/** The text of the policy: token by token, or plain. */
const Said = ({ text, isPlain, ...spoken }) =>
  isPlain || !spoken.tokens.length
    ? html`<div class="tokens" tabindex="0" role="region" aria-label="Text of ${spoken.name}">${text || "(empty)"}</div>`
    : html`<${Tokens} ...${spoken} />`;

const NOT_RECORDED = html`<p class="help" data-testid="decoded">Not recorded.</p>`;

/** A decoded prompt; special tokens are marked, because text may look like one. */
const Decoded = ({ parts, name }) => html`
  <div class="text" tabindex="0" role="region" aria-label=${name} data-testid="decoded">
    ${parts.map(({ text, is_special: isSpecial, num_left_out: numLeftOut }) => {
      if (numLeftOut) return html`<em>[${number(numLeftOut)} tokens are left out here]</em>`;
      return isSpecial ? html`<span class="special">${text}</span>` : text;
    })}
  </div>
`;

// ---- an episode, turn by turn ------------------------------------------------------------------------------------

/** The environment's text is plain; the policy's is shown token by token: only that is trained. */
function turnsOf(turns, tokens, { name, isRow, onPoint, ...shown }) {
  let start = 0;
  return html`
    <ol class="turns" data-testid="turns">
      ${turns.map((turn, index) => {
        const own = tokens.slice(start, start + turn.num_tokens);
        start += turn.num_tokens;
        const point = (words) => onPoint(`turn ${index + 1}, ${words}`);
        return html`
          <li class="turn" data-testid="turn">
            <p class="help">${factsOfTurn(turn, index, isRow).join(" · ")}</p>
            ${turn.messages.map(messageOf)}
            ${turn.observed_parts.length > 0 &&
            html`<details>
              <summary class="help">Observed tokens as the model saw them</summary>
              <${Decoded} parts=${turn.observed_parts} name="Observed tokens of turn ${index + 1} of ${name}" />
            </details>`}
            <${Said} text=${turn.text} tokens=${own} name="turn ${index + 1} of ${name}" onPoint=${point} ...${shown} />
          </li>
        `;
      })}
    </ol>
  `;
}

function factsOfTurn(turn, index, isRow) {
  const from = turn.continues === null ? "the prompt" : `turn ${turn.continues + 1}`;
  return [
    `Turn ${index + 1}`,
    turn.is_fork && `history rewritten: shares only the beginning of ${from}`,
    turn.num_observed_tokens && `${number(turn.num_observed_tokens)} tokens observed, not trained`,
    turn.num_cached_tokens && `${number(turn.num_cached_tokens)} of its prompt from the engine's cache`,
    turn.reward !== null && `reward ${number(turn.reward)}`,
    !isRow && `environment ${duration(turn.waited_s)}`,
    !isRow && `generated in ${duration(turn.generate_s)}`,
    turn.finish_reason === "length" && "truncated",
  ].filter(Boolean);
}

function messageOf({ role = "?", content, tool_calls: calls }) {
  const textOf = (value) => (typeof value === "string" ? value : value ? JSON.stringify(value) : "");
  return html`
    <div class="message">
      <b>${String(role)}</b> ${textOf(content)}
      ${(Array.isArray(calls) ? calls : []).map((call) => html`<code>${call?.function?.name}(${textOf(call?.function?.arguments)})</code>`)}
    </div>
  `;
}

// ---- tokens, coloured by the probability with which they were sampled --------------------------------------------

// By probability, the likeliest first: likely tokens stay plain, so that the eye finds the others.
const LEVELS = [
  { least: 0.9, name: "90% or more" },
  { least: 0.5, name: "50% to 90%" },
  { least: 0.2, name: "20% to 50%" },
  { least: 0.05, name: "5% to 20%" },
  { least: 0.01, name: "1% to 5%" },
  { least: -1, name: "below 1%" },
];
const MARKS = new Map([
  [" ", "·"],
  ["\t", "⇥\t"],
  ["\n", "↵\n"],
  ["\r", "␍"],
  ["\u00a0", "⍽"],
]);
const STEPS = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, PageUp: -50, PageDown: 50 };

/** Index into LEVELS; -1 of a log probability that is none. */
export function levelOf(logprob) {
  if (!Number.isFinite(logprob)) return -1;
  return LEVELS.findIndex(({ least }) => Math.exp(logprob) >= least);
}

/** White space made visible; ends of lines still end the line. */
export const visible = (text) => text.replace(/[ \t\n\r\u00a0]/g, (character) => MARKS.get(character));

const TokenLegend = () => html`
  <ul class="token-legend" aria-label="Colours by probability of the token">
    ${LEVELS.map(
      ({ name }, level) => html`<li><span class="token level-${level}" aria-hidden="true">token</span>${name}</li>`,
    )}
  </ul>
`;

/**
 * Tokens that one can move through. `onPoint(words)`: what is pointed at. `areMarked`: white space is shown.
 * One stop of the Tab key, whatever their number; arrow keys move.
 */
class Tokens extends Component {
  root = createRef();
  current = -1;

  shouldComponentUpdate({ areMarked }) {
    return areMarked !== this.props.areMarked;
  }

  point(index) {
    const { tokens, onPoint } = this.props;
    const spans = this.root.current.children;
    spans[this.current]?.classList.remove("current");
    this.current = index;
    spans[index]?.classList.add("current");
    if (tokens[index]) onPoint(describeToken(tokens[index], index, tokens.length));
  }

  under(event) {
    const index = event.target.closest?.("[data-index]")?.dataset.index;
    if (index !== undefined) this.point(Number(index));
  }

  onKey(event) {
    const to = moved(event, STEPS, this.current, this.props.tokens.length - 1);
    if (to === null) return;
    this.point(to);
    this.root.current.children[this.current].scrollIntoView({ block: "nearest" });
  }

  render({ tokens, name, areMarked }) {
    return html`
      <div
        class="tokens"
        tabindex="0"
        role="group"
        aria-label="Tokens of ${name}; arrow keys move"
        ref=${this.root}
        onPointerOver=${(event) => this.under(event)}
        onPointerDown=${(event) => this.under(event)}
        onKeyDown=${(event) => this.onKey(event)}
      >
        ${tokens.map((token, index) => {
          const level = levelOf(token.logprob);
          return html`<span class=${level < 0 ? "token" : `token level-${level}`} data-index=${index}>${shown(token, areMarked)}</span>`;
        })}
      </div>
    `;
  }
}

const meanProbability = (tokens) => tokens.reduce((sum, { logprob }) => sum + Math.exp(logprob), 0) / tokens.length;

function shown({ id, text }, areMarked) {
  if (text === null || text === undefined) return `⟨${id}⟩`;
  if (text === "") return "▫"; // within a character, or a special token
  return areMarked ? visible(text).replaceAll("·", "\u200b·") : text; // a line may end before it
}

/** `token 3 of 40: "·the", id 262, probability 83%, log probability -0.186` */
function describeToken({ id, text, logprob }, index, total) {
  const what =
    text === null || text === undefined
      ? "text not known"
      : text === ""
        ? "no text of its own"
        : `“${visible(text).replace(/[\n\t]/g, "")}”`;
  const probability = Math.exp(logprob);
  const chance = probability < 0.001 ? number(probability, 2) : percent(probability, probability < 0.1 ? 2 : 1);
  return `token ${index + 1} of ${total}: ${what}, id ${id}, probability ${chance}, log probability ${number(logprob, 4)}`;
}
