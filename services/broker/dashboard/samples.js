// The texts of the model: responses of an iteration or an evaluation, with a filter, a search and pages.

import { get, isRefusal } from "./api.js";
import { placeOf, solvedAt } from "./before_after.js";
import { number } from "./format.js";
import { addressOf, Component, createRef, html, JobHead, pathOf, promptOf, render, title } from "./parts.js";
import { isTruncated, Rewards, scaleOf } from "./rewards.js";

const PAGE = 20;
const NOTHING_CHOSEN = { iteration: "", evaluation: "", source: "", min: "", max: "", truncated: "", wrong: "", text: "", page: 1 };

/** `group`: the page of that group; else a list, by iteration or evaluation, reward, end and text. */
export async function show(main, params, signal) {
  if (params.group) return (await import("./group.js")).show(main, params, signal);
  const path = pathOf(params.id);
  const [job, { evaluations }] = await Promise.all([get(path, {}, signal), get(`${path}/evaluations`, {}, signal)]);
  const done = evaluations.filter(({ state }) => state === "DONE").map(({ evaluation }) => evaluation);
  const wanted = {
    ...Object.fromEntries(Object.keys(NOTHING_CHOSEN).map((name) => [name, params[name] ?? ""])),
    page: Math.max(1, parseInt(params.page) || 1),
  };
  if (!signal.aborted) render(html`<${SamplesPage} job=${job} evaluations=${done} wanted=${wanted} signal=${signal} />`, main);
}

class SamplesPage extends Component {
  state = { wanted: this.props.wanted, draft: this.props.wanted, found: null, foundFor: null, problem: "", isBusy: true };
  job = this.props.job;
  path = pathOf(this.job.id);
  status = createRef();

  componentDidMount() {
    this.load();
  }

  // ---- the filter --------------------------------------------------------------------------------------------------

  edit(name, value) {
    this.setState(({ draft }) => ({ draft: { ...draft, [name]: value } }));
  }

  submit(event) {
    event.preventDefault();
    const field = (name) => event.currentTarget.elements[`sample-${name}`];
    const names = ["iteration", "from", "source", "min", "max", "text"];
    const [iteration, evaluation, source, min, max, text] = names.map((name) => field(name)?.value ?? "");
    const [truncated, wrong] = ["truncated", "wrong"].map((name) => (field(name).checked ? "1" : ""));
    this.apply({ iteration, evaluation, source, min, max, truncated, wrong, text: text.trim(), page: 1 }, event.type === "submit");
  }

  async step(by) {
    const { draft, found } = this.state;
    const from = draft.iteration === "" ? (found?.[0]?.iteration ?? this.job.num_opened - 1) : Number(draft.iteration);
    if (from + by >= this.job.num_opened) await this.readJob(); // more may have been opened
    if (this.props.signal.aborted) return;
    const to = Math.min(Math.max(0, from + by), Math.max(0, this.job.num_opened - 1));
    this.apply({ ...draft, iteration: String(to), evaluation: "", page: 1 });
  }

  /** The address says what is shown. `isAsked`: read again if it is equal. */
  apply(wanted, isAsked = false) {
    if (!isAsked && JSON.stringify(wanted) === JSON.stringify(this.state.wanted)) return;
    const { page, ...rest } = wanted;
    const query = new URLSearchParams(Object.entries(rest).filter(([, value]) => value !== ""));
    if (page > 1) query.set("page", page);
    history.replaceState(null, "", `${addressOf(this.job.id)}/samples${query.size ? `?${query}` : ""}`);
    this.setState({ wanted, draft: wanted }, () => this.load(isAsked));
  }

  // ---- reading -----------------------------------------------------------------------------------------------------

  /** The job of now, or the former one without an answer: the samples are refused as well then, and that is shown. */
  async readJob() {
    try {
      this.job = await get(this.path, {}, this.props.signal);
    } catch (error) {
      isRefusal(error, this.props.signal);
    }
  }

  async load(withJob = false) {
    this.loading?.abort(); // an answer that comes late would show what is not wanted any more
    this.loading = new AbortController();
    const signal = AbortSignal.any([this.props.signal, this.loading.signal]);
    const { wanted } = this.state;
    this.setState({ isBusy: true });
    try {
      if (withJob) await this.readJob();
      const found = await (wanted.evaluation ? this.readEvaluation(signal, wanted) : this.readIteration(signal, wanted));
      this.setState({ found, foundFor: wanted, problem: "", isBusy: false });
    } catch (error) {
      if (isRefusal(error, signal)) this.setState({ found: [], problem: error.message, isBusy: false });
    }
  }

  /** One more than a page, if there are more. */
  async readIteration(signal, { iteration, source, min, max, truncated, wrong, text, page }) {
    const choice = { min_reward: min, max_reward: max, is_truncated: truncated && "true", is_solved: wrong && "false", text, source };
    const params = { iteration, limit: PAGE + 1, offset: (page - 1) * PAGE, ...choice };
    return (await get(`${this.path}/samples`, params, signal)).samples;
  }

  /** A few are kept of each, so they are chosen here. */
  async readEvaluation(signal, { evaluation, min, max, truncated, wrong, text, page }) {
    const { samples } = await get(`${this.path}/evaluations/${encodeURIComponent(evaluation)}/samples`, {}, signal);
    const leastRight = solvedAt(this.job.config);
    const isWanted = ({ reward, ...sample }) =>
      (reward !== null || (min === "" && max === "" && !wrong)) &&
      (min === "" || reward >= Number(min)) &&
      (max === "" || reward <= Number(max)) &&
      (!truncated || isTruncated(sample)) &&
      (!wrong || reward < leastRight(placeOf(sample))) &&
      [sample.prompt, sample.decoded_prompt ?? "", sample.response].some((part) => part.toLowerCase().includes(text.toLowerCase()));
    return samples.filter(isWanted).slice((page - 1) * PAGE, page * PAGE + 1);
  }

  // ---- what is shown -----------------------------------------------------------------------------------------------

  render(_, { found, foundFor, problem, isBusy, wanted }) {
    const samples = (found ?? []).slice(0, PAGE);
    const scale = scaleOf(samples);
    return html`
      <${JobHead} job=${this.job} what="Samples" current="samples" />
      ${this.filters()}
      <p class=${problem ? "notice bad" : "muted"} role="status" ref=${this.status}>${problem || (found && this.words(samples, foundFor))}</p>
      <div class="samples" aria-busy=${isBusy ? "true" : null}>
        ${samples.map((sample) => html`<${Sample} sample=${sample} scale=${scale} jobId=${this.job.id} isHeldOut=${foundFor.evaluation !== ""} />`)}
      </div>
      <nav class="actions" aria-label="Pages of samples">
        ${wanted.page > 1 && this.turnButton("Previous", wanted.page - 1)}
        ${found?.length > PAGE && this.turnButton("Next", wanted.page + 1)}
        ${problem && html`<button class="button" type="button" onClick=${() => this.load(true)}>Try again</button>`}
      </nav>
    `;
  }

  filters() {
    const { draft, wanted } = this.state;
    const { evaluations } = this.props;
    const { data } = this.job.config; // a list: several sources
    const submit = (event) => this.submit(event);
    const edit = (name) => (event) => this.edit(name, event.target.value);
    const step = (by, name, sign) =>
      html`<button class="button icon" type="button" aria-label=${name} onClick=${() => this.step(by)}>${sign}</button>`;
    const reset = () => this.apply(NOTHING_CHOSEN);
    const tick = (name, label) => html`
      <span><input id="sample-${name}" type="checkbox" checked=${draft[name] !== ""} onInput=${(event) => this.edit(name, event.target.checked ? "1" : "")} />
        <label for="sample-${name}"> ${label}</label></span>
    `;
    const bound = (name, label) => html`
      <${Field} name=${label} id="sample-${name}">
        <input id="sample-${name}" type="number" step="any" placeholder="any" value=${draft[name]} onInput=${edit(name)} />
      <//>
    `;
    return html`
      <form class="filters sample-filters" aria-label="Filter" onSubmit=${submit} onChange=${submit}>
        ${evaluations.length > 0 &&
        html`<${Field} name="From" id="sample-from">
          <select id="sample-from" value=${draft.evaluation} onInput=${edit("evaluation")}>
            <option value="">Training</option>
            ${evaluations.toReversed().map((each) => html`<option value=${String(each)}>Evaluation after ${number(each)}</option>`)}
          </select>
        <//>`}
        <${Field} name="Iteration" id="sample-iteration">
          <input
            id="sample-iteration"
            type="number"
            min="0"
            step="1"
            placeholder="newest"
            value=${draft.iteration}
            disabled=${wanted.evaluation !== ""}
            onInput=${edit("iteration")}
          />
          ${step(-1, "Iteration before", "‹")}${step(1, "Next iteration", "›")}
        <//>
        ${Array.isArray(data) &&
        html`<${Field} name="Source" id="sample-source">
          <select id="sample-source" value=${draft.source} disabled=${wanted.evaluation !== ""} onInput=${edit("source")}>
            <option value="">All</option>
            ${data.map((source) => html`<option value=${source.name}>${source.name}</option>`)}
          </select>
        <//>`}
        <div class="filter-row">${bound("min", "Reward from")}${bound("max", "to")}</div>
        <${Field} name="Text in prompt or response" id="sample-text">
          <input id="sample-text" type="search" maxlength="1000" placeholder="any" value=${draft.text} onInput=${edit("text")} />
        <//>
        <div class="filter-row sample-ticks">${tick("truncated", "Truncated")}${tick("wrong", "Wrong")}</div>
        <div class="actions">
          <button class="button" type="submit">Show</button>
          <button class="button quiet" type="button" onClick=${reset}>Reset</button>
        </div>
      </form>
    `;
  }

  turnButton(name, page) {
    const turn = () => {
      const { wanted, found } = this.state;
      const iteration = wanted.evaluation ? "" : String(found[0]?.iteration ?? wanted.iteration); // not a newer one by now
      this.apply({ ...wanted, iteration, page });
      this.status.current.scrollIntoView({ block: "start" });
    };
    return html`<button class="button" type="button" onClick=${turn}>${name}</button>`;
  }

  words(samples, { evaluation, source, min, max, truncated, wrong, text, page }) {
    const bounds = [min !== "" && `from ${min}`, max !== "" && `up to ${max}`].filter(Boolean).join(" ");
    const range = (bounds && ` with a reward ${bounds}`) + (text && ` with “${text}”`) + (source && !evaluation ? ` of source ${source}` : "");
    const kind = [truncated && "truncated", wrong && "wrong"].filter(Boolean).join(", ");
    const named = title(`${kind} responses`.trim());
    if (!samples.length) return this.job.num_opened ? `No ${named.toLowerCase()}${range} here.` : "No response has been accepted yet.";
    const first = (page - 1) * PAGE + 1;
    const of = evaluation
      ? `evaluation after ${evaluation} iterations`
      : `iteration ${samples[0].iteration}, policy version ${samples[0].policy_version}`;
    return `${named} ${first} to ${first + samples.length - 1} of ${of}${range}.`;
  }
}

const Field = ({ name, id, children }) => html`
  <div class="filter-field"><label for=${id}>${name}</label><div class="filter-row">${children}</div></div>
`;

function Sample({ sample, scale, jobId, isHeldOut }) {
  const { group_id: group, iteration } = sample;
  const address = `${addressOf(jobId)}/samples?${new URLSearchParams({ iteration, group })}`;
  return html`
    <article class="sample" data-testid="sample">
      <div>
        <div class="head">
          <h2 class="sample-name">${promptOf(group)}, response ${(sample.index ?? 0) + 1}${sample.source && ` (${sample.source})`}</h2>
          ${!isHeldOut && html`<a href=${address}>Open group ${group}</a>`}
        </div>
        <${TextBlock} name="Prompt" text=${sample.prompt} />
        ${sample.decoded_prompt && html`<details>
          <summary class="help">Prompt as the model saw it</summary>
          <div class="text of-prompt" tabindex="0" role="group" aria-label="Prompt as the model saw it">${sample.decoded_prompt}</div>
        </details>`}
        <${TextBlock} name="Response" text=${sample.response} />
      </div>
      <div>
        <${Rewards} sample=${sample} scale=${scale} isHeldOut=${isHeldOut} />
      </div>
    </article>
  `;
}

/** Text that somebody else wrote, as it is. */
const TextBlock = ({ name, text }) => html`
  <div class="text-block">
    <h3>${name}</h3>
    <div class="text of-${name.toLowerCase()}" tabindex="0" role="group" aria-label=${name}>${text || "(empty)"}</div>
  </div>
`;
