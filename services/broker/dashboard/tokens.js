// Tokens of responses, coloured by the probability with which they were sampled. Shows text, never reads it as HTML.

import { el, number, percent } from "./dom.js";

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

export function tokenLegend() {
  const items = LEVELS.map(({ name }, level) =>
    el("li", {}, el("span", { class: `token level-${level}`, "aria-hidden": "true" }, "token"), name),
  );
  return el("ul", { class: "token-legend", "aria-label": "Colours by probability of the token" }, items);
}

/**
 * Tokens that one can move through. `onPoint(words)`: what is pointed at. `areMarked`: white space is shown.
 * One stop of the Tab key, whatever their number; arrow keys move.
 */
export function tokenView(tokens, { name, areMarked, onPoint }) {
  const spans = tokens.map((token, index) => {
    const level = levelOf(token.logprob);
    return el(
      "span",
      { class: level < 0 ? "token" : `token level-${level}`, "data-index": index },
      shown(token, areMarked),
    );
  });
  let current = -1;
  const point = (index) => {
    spans[current]?.classList.remove("current");
    current = index;
    spans[current]?.classList.add("current");
    if (current >= 0) onPoint(describeToken(tokens[current], current, tokens.length));
  };
  const view = el(
    "div",
    { class: "tokens", tabindex: "0", role: "group", "aria-label": `Tokens of ${name}; arrow keys move` },
    spans,
  );
  const under = (event) => Number(event.target.closest?.("[data-index]")?.dataset.index ?? -1);
  view.addEventListener("pointerover", (event) => under(event) >= 0 && point(under(event)));
  view.addEventListener("pointerdown", (event) => under(event) >= 0 && point(under(event)));
  view.addEventListener("keydown", (event) => {
    const ends = { Home: 0, End: tokens.length - 1 };
    const wanted = ends[event.key] ?? current + STEPS[event.key];
    if (Number.isNaN(wanted) || !tokens.length) return;
    event.preventDefault();
    point(Math.min(tokens.length - 1, Math.max(0, wanted)));
    spans[current].scrollIntoView({ block: "nearest" });
  });
  return view;
}

function shown({ id, text }, areMarked) {
  if (text === null || text === undefined) return `⟨${id}⟩`;
  if (text === "") return "▫"; // within a character, or a special token
  return areMarked ? visible(text).replaceAll("·", "\u200b·") : text; // a line may end before it
}

/** `token 3 of 40: "·the", id 262, probability 83%, log probability -0.186` */
export function describeToken({ id, text, logprob }, index, total) {
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
