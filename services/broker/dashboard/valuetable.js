// The values of a chart as a table, for screen readers and for exact numbers.

import { el, number } from "./dom.js";

export class ValueTable {
  constructor({ title, unit, x }) {
    this.x = x;
    this.caption = unit ? `${title}, ${unit}` : title;
    this.element = el("div", {
      class: "chart-table",
      tabindex: "0",
      role: "region",
      "aria-label": `Values of ${title}`,
    });
  }

  clear() {
    this.element.replaceChildren();
  }

  /** A row for each of `xs`; `wordsAt(x)`: its cells. With one series rows never change, so only new ones are made. */
  fill(xs, names, wordsAt) {
    const body = this.element.querySelector("tbody");
    const shape = JSON.stringify([names, xs[0]]);
    const isSame = body && names.length === 1 && shape === this.shape;
    const numDrawn = body?.rows.length ?? 0;
    const isLonger = isSame && numDrawn <= xs.length && xs[numDrawn - 1] === this.last; // none came in between
    const rows = (isLonger ? xs.slice(numDrawn) : xs).map((x) => row(x, wordsAt(x)));
    this.shape = shape;
    this.last = xs.at(-1);
    if (isLonger) body.append(...rows);
    else this.element.replaceChildren(this.table(names, rows));
  }

  table(names, rows) {
    const heads = [this.x, ...names].map((name) => el("th", { scope: "col" }, name));
    return el(
      "table",
      {},
      el("caption", {}, this.caption),
      el("thead", {}, el("tr", {}, heads)),
      el("tbody", {}, rows),
    );
  }
}

function row(x, words) {
  const cells = words.map((text) => el("td", {}, text));
  return el("tr", {}, el("th", { scope: "row" }, number(x)), cells);
}
