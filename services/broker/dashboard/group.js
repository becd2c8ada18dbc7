// One prompt with all its responses, token by token, and the same prompt in other iterations at its side.

import { get, isRefusal, pause } from "./api.js";
import { Chart } from "./charts.js";
import { duration, number, percent } from "./format.js";
import { addressOf, Component, createRef, html, JobHead, moved, pathOf, render, Table } from "./parts.js";
import { Rewards, scaleOf } from "./samples.js";

const MOST_BESIDE = 4;
const ALIKE_WAITS_MS = [1000, 2000, 4000, 8000, 15_000]; // between looks while the broker still reads the groups

/** `beside`: ids of groups, separated by commas. */
export async function show(main, { id, group, beside = "" }, signal) {
  const others = beside.split(",").filter((each) => each && each !== group).slice(0, MOST_BESIDE - 1);
  const read = (each) => get(`${pathOf(id)}/groups/${encodeURIComponent(each)}`, {}, signal);
  const [job, first, ...rest] = await Promise.allSettled([get(pathOf(id), {}, signal), ...[group, ...others].map(read)]);
  const refused = [job, first].find(({ status }) => status === "rejected");
  if (refused) throw refused.reason;
  const groups = [first, ...rest].filter(({ status }) => status === "fulfilled").map(({ value }) => value);
  const lost = rest.filter(({ status }) => status === "rejected").map(({ reason }) => reason.detail || reason.message);
  if (!signal.aborted) render(html`<${GroupPage} job=${job.value} groups=${groups} lost=${lost} signal=${signal} />`, main);
}

const addressOfGroup = (id, group, beside = []) =>
  `${addressOf(id)}/samples?${new URLSearchParams({ group, ...(beside.length && { beside: beside.join(",") }) })}`;

class GroupPage extends Component {
  state = { areMarked: true, isPlain: false };
  scale = scaleOf(this.props.groups.flatMap(({ responses }) => responses));
  readout = createRef();

  /** What is pointed at changes often: only its line is written. */
  point(words) {
    this.readout.current.textContent = words;
  }

  render({ job, groups, lost, signal }, { areMarked, isPlain }) {
    const [group] = groups;
    const ids = groups.map(({ group_id: each }) => each);
    const what = ids.length > 1 ? `Groups ${ids.join(" and ")}` : `Group ${ids[0]}`;
    return html`
      <${JobHead} job=${job} what=${what} current="samples" />
      ${lost.map((why) => html`<p class="notice warn">${why}</p>`)}
      <section class="stack" aria-labelledby="prompt-heading">
        <div class="head">
          <h2 id="prompt-heading">Prompt</h2>
          <a href="${addressOf(job.id)}/samples?iteration=${group.iteration}">All samples of iteration ${group.iteration}</a>
        </div>
        <div class="text" tabindex="0" role="region" aria-label="Text of the prompt">${group.prompt || "(empty)"}</div>
        <p class="help">${number(group.num_prompt_tokens)} tokens</p>
      </section>
      <section class="stack" aria-labelledby="responses-heading" data-testid="group-detail">
        <div class="head">
          <h2 id="responses-heading">Responses</h2>
          <div class="actions">${this.box("areMarked", "Show white space")}${this.box("isPlain", "Plain text")}</div>
        </div>
        <${TokenLegend} />
        <div class=${ids.length > 1 ? "groups several" : "groups"}>
          ${groups.map((each) => this.column(each, areMarked, isPlain))}
        </div>
        <p class="token-readout" role="status" data-testid="token-readout" ref=${this.readout}>
          Point at a token, or move with the arrow keys.
        </p>
      </section>
      <${SamePrompt} id=${job.id} group=${group.group_id} shown=${ids} signal=${signal} />
    `;
  }

  box(name, label) {
    const change = (event) => this.setState({ [name]: event.target.checked });
    return html`<span><input type="checkbox" id=${name} checked=${this.state[name]} onChange=${change} /> <label for=${name}>${label}</label></span>`;
  }

  column(group, areMarked, isPlain) {
    const facts = [
      `policy version ${group.policy_version}`,
      group.worker_id,
      `generated in ${duration(group.generate_s)}`,
      `scored in ${duration(group.score_s)}`,
    ];
    return html`
      <div class="group">
        <h3>Iteration ${group.iteration}, group ${group.group_id}</h3>
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
    const shown = { name, areMarked, isPlain, onPoint: (words) => this.point(`Response ${index + 1}, ${words}`) };
    return html`
      <article class="response" data-testid="response">
        <h4>Response ${index + 1}</h4>
        <${Rewards} sample=${response} scale=${this.scale}>${tokens.length > 0 && ` · mean probability ${percent(meanProbability(tokens))}`}<//>
        ${response.turns.length ? turnsOf(response.turns, tokens, shown) : html`<${Said} text=${response.response} tokens=${tokens} ...${shown} />`}
      </article>
    `;
  }
}

/** What the policy said: token by token, or as plain text. */
const Said = ({ text, isPlain, ...spoken }) =>
  isPlain || !spoken.tokens.length
    ? html`<div class="tokens" tabindex="0" role="region" aria-label="Text of ${spoken.name}">${text || "(empty)"}</div>`
    : html`<${Tokens} ...${spoken} />`;

// ---- an episode, turn by turn ------------------------------------------------------------------------------------

/** What came from the environment is plain; what the policy said is shown token by token: only that is trained. */
function turnsOf(turns, tokens, { name, onPoint, ...shown }) {
  let start = 0;
  return html`
    <ol class="turns" data-testid="turns">
      ${turns.map((turn, index) => {
        const own = tokens.slice(start, start + turn.num_tokens);
        start += turn.num_tokens;
        const point = (words) => onPoint(`turn ${index + 1}, ${words}`);
        return html`
          <li class="turn" data-testid="turn">
            <p class="help">${factsOfTurn(turn, index).join(" · ")}</p>
            ${turn.messages.map(messageOf)}
            <${Said} text=${turn.text} tokens=${own} name="turn ${index + 1} of ${name}" onPoint=${point} ...${shown} />
          </li>
        `;
      })}
    </ol>
  `;
}

function factsOfTurn(turn, index) {
  const from = turn.continues === null ? "the prompt" : `turn ${turn.continues + 1}`;
  return [
    `Turn ${index + 1}`,
    turn.is_fork && `history rewritten: shares only the beginning of ${from}`,
    turn.num_observed_tokens && `${number(turn.num_observed_tokens)} tokens observed, not trained`,
    turn.num_cached_tokens && `${number(turn.num_cached_tokens)} of its prompt from the engine's cache`,
    turn.reward !== null && `reward ${number(turn.reward)}`,
    `environment ${duration(turn.waited_s)}`,
    `generated in ${duration(turn.generate_s)}`,
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

// ---- the same prompt in other iterations -------------------------------------------------------------------------

class SamePrompt extends Component {
  state = { groups: null, problem: "", marked: this.props.shown.filter((id) => id !== this.props.group) };

  componentDidMount() {
    this.load();
  }

  async load() {
    this.setState({ problem: "" });
    try {
      this.setState({ groups: await this.read() });
    } catch (error) {
      if (isRefusal(error, this.props.signal)) this.setState({ problem: error.message });
    }
  }

  /** 503: the broker still reads the groups; that is waited for. */
  async read() {
    const { id, group, signal } = this.props;
    const path = `${pathOf(id)}/groups/${encodeURIComponent(group)}/alike`;
    for (const wait of ALIKE_WAITS_MS) {
      try {
        return (await get(path, {}, signal)).groups;
      } catch (error) {
        if (error.status !== 503) throw error;
      }
      await pause(wait, signal);
    }
    return (await get(path, {}, signal)).groups;
  }

  mark(id, isOn) {
    const rest = this.state.marked.filter((each) => each !== id);
    this.setState({ marked: isOn ? [...rest, id] : rest });
  }

  render({ id, group }, { groups, problem, marked }) {
    return html`
      <section class="alike" aria-labelledby="alike-heading" data-testid="alike">
        <h2 id="alike-heading">Same prompt in other iterations</h2>
        ${problem || !groups || groups.length < 2 ? this.words() : this.found(id, group, groups, marked)}
      </section>
    `;
  }

  words() {
    const { problem, groups } = this.state;
    const none = "None is kept: this prompt came once, or its other groups are no longer kept.";
    return html`
      <p class="muted" role="status">${problem || (groups ? none : "Looking…")}</p>
      ${problem && html`<button class="button" type="button" onClick=${() => this.load()}>Ask again</button>`}
    `;
  }

  found(id, group, groups, marked) {
    const columns = ["Group", "Iteration", "Version", "Responses", "Mean reward"];
    const points = groups.filter((each) => each.reward_mean !== null).map((each) => [each.iteration, each.reward_mean]);
    this.lines ??= [{ name: "mean reward", points }];
    return html`
      <${Chart}
        title="Mean reward of this prompt"
        testId="chart-alike"
        description="One point per iteration in which it came."
        lines=${this.lines}
      />
      <${Table}
        label="Groups with the same prompt"
        caption="Tick up to ${MOST_BESIDE - 1} others to show them side by side."
        columns=${columns}
        rows=${groups.toReversed().map((each) => this.row(id, group, each, marked))}
        numbersFrom=${1}
        className="small ids"
      />
      <button
        class="button primary"
        type="button"
        data-testid="compare-groups"
        onClick=${() => (location.hash = addressOfGroup(id, group, marked))}
      >
        Show side by side
      </button>
    `;
  }

  /** Not more can be marked than fit beside each other. */
  row(id, group, { group_id: each, iteration, policy_version: version, num_responses: count, reward_mean: reward }, marked) {
    const isThis = each === group;
    const isMarked = marked.includes(each);
    const name = html`
      <input
        type="checkbox"
        value=${each}
        checked=${isThis || isMarked}
        disabled=${isThis || (!isMarked && marked.length >= MOST_BESIDE - 1)}
        aria-label="Group ${each} of iteration ${iteration} beside"
        onChange=${(event) => this.mark(each, event.target.checked)}
      />${" "}
      ${isThis ? `${each} (this one)` : html`<a href=${addressOfGroup(id, each)}>${each}</a>`}
    `;
    return [name, number(iteration), number(version), number(count), reward === null ? "failed" : number(reward)];
  }
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
