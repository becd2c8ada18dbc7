// One prompt with all its responses, token by token, and the same prompt in other iterations at its side.

import { ApiError, get, pause } from "./api.js";
import { lineChart } from "./charts.js";
import { duration, el, number, percent, setText } from "./dom.js";
import { jobTabs } from "./head.js";
import { advantageBar, largest, largestAdvantage, lengthOf, rewardBars } from "./reward.js";
import { tokenLegend, tokenView } from "./tokens.js";

const MOST_BESIDE = 4;
const ALIKE_WAITS_MS = [1000, 2000, 4000, 8000, 15_000]; // between looks while the broker still reads the groups

/** `beside`: ids of groups, separated by commas. */
export async function showGroups(main, params, signal) {
  const page = new GroupPage(params, signal);
  await page.load();
  main.append(...page.build());
  await page.loadAlike();
}

class GroupPage {
  constructor({ id, group, beside = "", iteration }, signal) {
    Object.assign(this, { id, group, iteration, signal });
    this.path = `/jobs/${encodeURIComponent(id)}`;
    this.beside = beside
      .split(",")
      .filter((each) => each && each !== group)
      .slice(0, MOST_BESIDE - 1);
    this.areMarked = true;
    this.isPlain = false;
  }

  async load() {
    const read = (group) => get(`${this.path}/groups/${encodeURIComponent(group)}`, {}, this.signal);
    const [main, ...others] = await Promise.allSettled([this.group, ...this.beside].map(read));
    if (main.status === "rejected") throw main.reason;
    this.groups = [main.value, ...others.filter(({ status }) => status === "fulfilled").map(({ value }) => value)];
    this.lost = others
      .filter(({ status }) => status === "rejected")
      .map(({ reason }) => reason.detail || reason.message);
  }

  address(group, beside = []) {
    const query = new URLSearchParams({ group, ...(beside.length ? { beside: beside.join(",") } : {}) });
    return `#/jobs/${encodeURIComponent(this.id)}/samples?${query}`;
  }

  // ---- parts -------------------------------------------------------------------------------------------------------

  build() {
    const [group] = this.groups;
    this.columns = el("div", { class: this.groups.length > 1 ? "groups several" : "groups" });
    this.readout = el(
      "p",
      { class: "token-readout", role: "status", "data-testid": "token-readout" },
      "Point at a token, or move with the arrow keys.",
    );
    this.alikeText = el("p", { class: "muted", role: "status" }, "Looking…");
    this.alike = el(
      "section",
      { class: "card alike", "aria-labelledby": "alike-heading", "data-testid": "alike" },
      el("h2", { id: "alike-heading", text: "Same prompt in other iterations" }),
      this.alikeText,
    );
    const back = `#/jobs/${encodeURIComponent(this.id)}/samples?iteration=${group.iteration}`;
    const title =
      this.groups.length > 1
        ? `Groups ${this.groups.map(({ group_id: id }) => id).join(" and ")}`
        : `Group ${group.group_id}`;
    this.drawGroups();
    return [
      el(
        "header",
        { class: "job-head" },
        el("h1", {}, title),
        el("p", {}, el("a", { href: back }, `All samples of iteration ${group.iteration}`)),
        jobTabs(this.id, "samples"),
      ),
      ...this.lost.map((why) => el("p", { class: "notice warn" }, why)),
      el(
        "section",
        { class: "card prompt", "aria-labelledby": "prompt-heading" },
        el("h2", { id: "prompt-heading", text: "Prompt" }),
        el(
          "div",
          { class: "text", tabindex: "0", role: "region", "aria-label": "Text of the prompt" },
          group.prompt || "(empty)",
        ),
        el("p", { class: "muted" }, `${number(group.num_prompt_tokens)} tokens`),
      ),
      el(
        "section",
        { class: "responses", "aria-labelledby": "responses-heading", "data-testid": "group-detail" },
        el("div", { class: "head" }, el("h2", { id: "responses-heading", text: "Responses" }), this.options()),
        tokenLegend(),
        this.columns,
        this.readout,
      ),
      this.alike,
    ];
  }

  options() {
    const box = (id, name, isOn, change) => {
      const input = el("input", { type: "checkbox", id, checked: isOn, on: { change: () => change(input.checked) } });
      return el("span", {}, input, " ", el("label", { for: id }, name));
    };
    const redraw = (name) => (isOn) => {
      this[name] = isOn;
      this.drawGroups();
    };
    return el(
      "div",
      { class: "actions" },
      box("marks", "Show white space", this.areMarked, redraw("areMarked")),
      box("plain", "Plain text", this.isPlain, redraw("isPlain")),
    );
  }

  drawGroups() {
    const all = this.groups.flatMap(({ responses }) => responses);
    const scale = { most: largest(all), mostAdvantage: largestAdvantage(all) };
    this.columns.replaceChildren(...this.groups.map((group) => this.column(group, scale)));
  }

  column(group, scale) {
    const facts = [
      `policy version ${group.policy_version}`,
      group.worker_id,
      `generated in ${duration(group.generate_s)}`,
      `scored in ${duration(group.score_s)}`,
    ];
    return el(
      "div",
      { class: "group" },
      el("h3", {}, `Iteration ${group.iteration}, group ${group.group_id}`),
      el("p", { class: "muted" }, facts.join(" · ")),
      group.failure && el("p", { class: "notice bad" }, `This group failed and was not trained: ${group.failure}`),
      el(
        "div",
        { class: "response-row" },
        group.responses.map((response, index) => this.response(group, response, index, scale)),
      ),
    );
  }

  response(group, response, index, { most, mostAdvantage }) {
    const name = `response ${index + 1} of group ${group.group_id}`;
    const tokens = group.tokens?.[index] ?? [];
    const isText = this.isPlain || !tokens.length;
    const text = isText
      ? el(
          "div",
          { class: "tokens plain", tabindex: "0", role: "region", "aria-label": `Text of ${name}` },
          response.response || "(empty)",
        )
      : tokenView(tokens, {
          name,
          areMarked: this.areMarked,
          onPoint: (words) => setText(this.readout, `Response ${index + 1}, ${words}`),
        });
    return el(
      "article",
      { class: "card response", "data-testid": "response" },
      el("h4", {}, `Response ${index + 1}`),
      rewardBars(response, most),
      advantageBar(response.advantage, mostAdvantage),
      lengthOf(response),
      tokens.length > 0 && el("p", { class: "muted" }, `mean probability ${percent(meanProbability(tokens))}`),
      text,
    );
  }

  // ---- the same prompt elsewhere -----------------------------------------------------------------------------------

  async loadAlike() {
    setText(this.alikeText, "Looking…");
    try {
      this.drawAlike(await this.readAlike());
    } catch (error) {
      if (this.signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      setText(this.alikeText, error.detail || error.title);
      const again = el("button", { class: "button", type: "button" }, "Ask again");
      again.addEventListener("click", () => {
        again.remove();
        this.loadAlike();
      });
      this.alike.append(again);
    }
  }

  /** 503: the broker still reads the groups; that is waited for. */
  async readAlike() {
    const path = `${this.path}/groups/${encodeURIComponent(this.group)}/alike`;
    for (const wait of ALIKE_WAITS_MS) {
      try {
        return (await get(path, {}, this.signal)).groups;
      } catch (error) {
        if (!(error instanceof ApiError) || error.status !== 503) throw error;
      }
      await pause(wait, this.signal);
    }
    return (await get(path, {}, this.signal)).groups;
  }

  drawAlike(groups) {
    if (groups.length < 2)
      return setText(this.alikeText, "None is kept: this prompt came once, or its other groups are no longer kept.");
    const shown = new Set(this.groups.map(({ group_id: id }) => id));
    const rows = groups.map((summary) => this.alikeRow(summary, shown)).reverse(); // the newest first
    const names = ["Beside", "Iteration", "Version", "Group", "Responses", "Mean reward"];
    const head = el(
      "tr",
      {},
      names.map((name) => el("th", { scope: "col" }, name)),
    );
    const compare = el(
      "button",
      { class: "button primary", type: "button", "data-testid": "compare-groups", on: { click: () => this.compare() } },
      "Show side by side",
    );
    this.alike.replaceChildren(
      this.alike.firstElementChild,
      this.alikeChart(groups),
      el(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Groups with the same prompt" },
        el(
          "table",
          {},
          el("caption", {}, `Mark up to ${MOST_BESIDE - 1} others`),
          el("thead", {}, head),
          el("tbody", {}, rows),
        ),
      ),
      compare,
    );
    this.limit();
  }

  alikeRow(summary, shown) {
    const { group_id: id, iteration, policy_version: version, num_responses: count, reward_mean: reward } = summary;
    const isThis = id === this.group;
    const box = el("input", {
      type: "checkbox",
      value: id,
      checked: shown.has(id),
      disabled: isThis,
      "aria-label": `Group ${id} of iteration ${iteration} beside`,
      on: { change: () => this.limit() },
    });
    const cells = [
      number(iteration),
      number(version),
      isThis ? `${id} (this one)` : el("a", { href: this.address(id) }, id),
      number(count),
      reward === null ? "failed" : number(reward),
    ];
    return el(
      "tr",
      { "aria-current": isThis ? "true" : null },
      el("td", {}, box),
      cells.map((cell) => el("td", {}, cell)),
    );
  }

  alikeChart(groups) {
    const chart = lineChart({
      title: "Mean reward of this prompt",
      testId: "chart-alike",
      description: "One point per iteration in which it came.",
    });
    const points = groups
      .filter(({ reward_mean: reward }) => reward !== null)
      .map(({ iteration, reward_mean: reward }) => [iteration, reward]);
    chart.update([{ name: "mean reward", points }]);
    return chart.element;
  }

  marked() {
    return [...this.alike.querySelectorAll("input:checked")]
      .map(({ value }) => value)
      .filter((id) => id !== this.group);
  }

  /** Not more than fit beside each other. */
  limit() {
    const isFull = this.marked().length >= MOST_BESIDE - 1;
    for (const box of this.alike.querySelectorAll("input"))
      box.disabled = box.value === this.group || (isFull && !box.checked);
  }

  compare() {
    location.hash = this.address(this.group, this.marked());
  }
}

const meanProbability = (tokens) => tokens.reduce((sum, { logprob }) => sum + Math.exp(logprob), 0) / tokens.length;
