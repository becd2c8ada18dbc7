// What the model said: responses of an iteration or an evaluation, with a filter and pages; and one group of them.

import { ApiError, get } from "./api.js";
import { clear, el, number } from "./dom.js";
import { showGroups } from "./group.js";
import { jobTabs } from "./head.js";
import { advantageBar, largest, largestAdvantage, lengthOf, rewardBars } from "./reward.js";

const PAGE = 20;

/** `group`: that group, with those of `beside` at its side; else a list, by iteration or evaluation and reward. */
export async function show(main, params, signal) {
  const path = `/jobs/${encodeURIComponent(params.id)}`;
  if (params.group) return showGroups(main, params, signal);
  const [job, { evaluations }] = await Promise.all([get(path, {}, signal), get(`${path}/evaluations`, {}, signal)]);
  const page = new SamplesPage(
    job,
    evaluations.filter(({ state }) => state === "DONE"),
    params,
    signal,
  );
  main.append(...page.build());
  await page.load();
}

class SamplesPage {
  constructor(job, evaluations, params, signal) {
    this.job = job;
    this.evaluations = evaluations;
    this.signal = signal;
    this.path = `/jobs/${encodeURIComponent(job.id)}`;
    this.wanted = {
      iteration: params.iteration ?? "",
      evaluation: params.evaluation ?? "",
      min: params.min ?? "",
      max: params.max ?? "",
      page: Math.max(1, parseInt(params.page) || 1),
    };
  }

  build() {
    this.status = el("p", { class: "muted", role: "status" });
    this.list = el("div", { class: "samples" });
    this.pages = el("nav", { class: "actions pages", "aria-label": "Pages of samples" });
    return [
      el(
        "header",
        { class: "job-head" },
        el("h1", {}, `Samples of ${this.job.name}`),
        el("p", { class: "muted mono job-id" }, this.job.id),
        jobTabs(this.job.id, "samples"),
      ),
      this.filters(),
      this.status,
      this.list,
      this.pages,
    ];
  }

  // ---- the filter --------------------------------------------------------------------------------------------------

  filters() {
    const { wanted } = this;
    this.iteration = el("input", {
      id: "sample-iteration",
      type: "number",
      min: 0,
      step: 1,
      value: wanted.iteration,
      placeholder: "newest",
    });
    this.least = el("input", { id: "sample-min", type: "number", step: "any", value: wanted.min, placeholder: "any" });
    this.most = el("input", { id: "sample-max", type: "number", step: "any", value: wanted.max, placeholder: "any" });
    const step = (by) =>
      el(
        "button",
        {
          class: "button icon",
          type: "button",
          "aria-label": by < 0 ? "Iteration before" : "Next iteration",
          on: { click: () => this.step(by) },
        },
        by < 0 ? "‹" : "›",
      );
    const field = (name, input, ...more) =>
      el(
        "div",
        { class: "filter-field" },
        el("label", { for: input.id }, name),
        el("div", { class: "filter-row" }, input, more),
      );
    const form = el(
      "form",
      {
        class: "card filters sample-filters",
        "aria-label": "Filter",
        on: { submit: (event) => this.submit(event), change: (event) => this.submit(event) },
      },
      this.evaluations.length > 0 && field("From", this.sourceSelect()),
      field("Iteration", this.iteration, step(-1), step(1)),
      field("Reward from", this.least),
      field("to", this.most),
      el(
        "div",
        { class: "actions" },
        el("button", { class: "button", type: "submit" }, "Show"),
        el("button", { class: "button quiet", type: "button", on: { click: () => this.reset() } }, "Reset"),
      ),
    );
    return form;
  }

  sourceSelect() {
    const options = this.evaluations.map(({ evaluation }) =>
      el(
        "option",
        { value: evaluation, selected: String(evaluation) === this.wanted.evaluation },
        `Evaluation after ${number(evaluation)}`,
      ),
    );
    this.source = el("select", { id: "sample-source" }, el("option", { value: "" }, "Training"), options.reverse());
    return this.source;
  }

  submit(event) {
    event.preventDefault();
    const wanted = {
      iteration: this.iteration.value,
      evaluation: this.source?.value ?? "",
      min: this.least.value,
      max: this.most.value,
      page: 1,
    };
    this.apply(wanted, event.type === "submit");
  }

  async step(by) {
    const from =
      this.iteration.value === "" ? (this.shownIteration ?? this.job.num_opened - 1) : Number(this.iteration.value);
    if (from + by >= this.job.num_opened) await this.readJob(); // more may have been opened
    if (this.signal.aborted) return;
    const to = Math.min(Math.max(0, from + by), Math.max(0, this.job.num_opened - 1));
    this.iteration.value = to;
    this.apply({ ...this.wanted, iteration: String(to), evaluation: "", page: 1 });
  }

  reset() {
    this.iteration.value = this.least.value = this.most.value = "";
    this.apply({ iteration: "", evaluation: "", min: "", max: "", page: 1 });
  }

  /** The address says what is shown, and the page stays as it is otherwise. `isAsked`: read again if it is equal. */
  apply(wanted, isAsked = false) {
    if (!isAsked && JSON.stringify(wanted) === JSON.stringify(this.wanted)) return;
    this.wanted = wanted;
    if (this.source) this.source.value = wanted.evaluation;
    history.replaceState(null, "", this.address(wanted));
    this.load(isAsked);
  }

  address({ page, ...rest }) {
    const query = new URLSearchParams(Object.entries(rest).filter(([, value]) => value !== ""));
    if (page > 1) query.set("page", page);
    const text = query.toString();
    return `#/jobs/${encodeURIComponent(this.job.id)}/samples${text ? `?${text}` : ""}`;
  }

  // ---- the list ----------------------------------------------------------------------------------------------------

  /** What the job is by now; without an answer what it was: the samples are refused as well then, and that is told. */
  async readJob() {
    try {
      this.job = await get(this.path, {}, this.signal);
    } catch (error) {
      if (!(error instanceof ApiError) && !this.signal.aborted) throw error;
    }
  }

  async load(withJob = false) {
    this.loading?.abort(); // an answer that comes late would show what is not wanted any more
    this.loading = new AbortController();
    const signal = AbortSignal.any([this.signal, this.loading.signal]);
    this.iteration.disabled = this.wanted.evaluation !== "";
    this.list.setAttribute("aria-busy", "true");
    try {
      if (withJob) await this.readJob();
      this.showPage(this.wanted.evaluation ? await this.readEvaluation(signal) : await this.readIteration(signal));
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      clear(this.list);
      const again = el(
        "button",
        { class: "button", type: "button", on: { click: () => this.load(true) } },
        "Try again",
      );
      this.pages.replaceChildren(again);
      this.status.textContent = error.detail || error.title;
    }
    this.list.removeAttribute("aria-busy");
  }

  async readIteration(signal) {
    const { iteration, min, max, page } = this.wanted;
    const range = { min_reward: min, max_reward: max };
    const { samples } = await get(
      `${this.path}/samples`,
      { iteration, limit: PAGE + 1, offset: (page - 1) * PAGE, ...range },
      signal,
    );
    this.shownIteration = samples[0]?.iteration;
    return samples;
  }

  /** A few are kept of each, so the reward is looked at here. */
  async readEvaluation(signal) {
    const { evaluation, min, max, page } = this.wanted;
    const { samples } = await get(`${this.path}/evaluations/${encodeURIComponent(evaluation)}/samples`, {}, signal);
    const wanted = samples.filter(
      ({ reward }) => (min === "" || reward >= Number(min)) && (max === "" || reward <= Number(max)),
    );
    return wanted.slice((page - 1) * PAGE, page * PAGE + 1);
  }

  showPage(found) {
    const samples = found.slice(0, PAGE);
    const [most, mostAdvantage] = [largest(samples), largestAdvantage(samples)];
    this.list.replaceChildren(...samples.map((sample) => this.card(sample, most, mostAdvantage)));
    this.status.textContent = this.words(samples);
    const turn = (name, page) =>
      el("button", { class: "button", type: "button", on: { click: () => this.turn(page) } }, name);
    const { page } = this.wanted;
    this.pages.replaceChildren(
      ...[page > 1 && turn("Previous", page - 1), found.length > PAGE && turn("Next", page + 1)].filter(Boolean),
    );
  }

  turn(page) {
    this.apply({ ...this.wanted, page });
    this.status.scrollIntoView({ block: "start" });
  }

  words(samples) {
    const { evaluation, min, max, page } = this.wanted;
    const range =
      min !== "" || max !== ""
        ? ` with a reward ${min !== "" ? `from ${min} ` : ""}${max !== "" ? `up to ${max}` : ""}`.trimEnd()
        : "";
    if (!samples.length)
      return this.job.num_opened ? `No response${range} here.` : "No response has been accepted yet.";
    const first = (page - 1) * PAGE + 1;
    const of = evaluation
      ? `evaluation after ${evaluation} iterations`
      : `iteration ${samples[0].iteration}, policy version ${samples[0].policy_version}`;
    return `Responses ${first} to ${first + samples.length - 1} of ${of}${range}.`;
  }

  card(sample, most, mostAdvantage) {
    const { group_id: group, iteration } = sample;
    const query = new URLSearchParams({ iteration, group });
    const link = el(
      "a",
      { class: "button", href: `#/jobs/${encodeURIComponent(this.job.id)}/samples?${query}` },
      `All of group ${group}`,
    );
    return el(
      "article",
      { class: "card sample", "data-testid": "sample" },
      el(
        "div",
        { class: "sample-texts" },
        el("h2", { class: "sample-name" }, `Group ${group}, response ${(sample.index ?? 0) + 1}`),
        textBlock("Prompt", sample.prompt),
        textBlock("Response", sample.response),
      ),
      el(
        "div",
        { class: "sample-facts" },
        rewardBars(sample, most),
        advantageBar(sample.advantage, mostAdvantage),
        lengthOf(sample),
        !this.wanted.evaluation && link,
      ),
    );
  }
}

/** Text that somebody else wrote, as it is. */
export function textBlock(name, text) {
  return el(
    "div",
    { class: `text-block of-${name.toLowerCase()}` },
    el("h3", {}, name),
    el("div", { class: "text", tabindex: "0", role: "group", "aria-label": name }, text || "(empty)"),
  );
}
