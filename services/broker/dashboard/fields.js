// Editors of single values. Each has `element`, `path`, `input`, read() -> the value, or undefined for "not sent",
// and write(value); undefined empties it.

import { clear, el } from "./dom.js";
import { limitsOf } from "./schema.js";

/** What the user wrote cannot be sent. */
export class Unreadable extends Error {
  constructor(editor, message) {
    super(message);
    this.editor = editor;
  }
}

export function editorOf(path, place, isRequired) {
  if (place.kind === "switch") return new SwitchEditor(path, place, isRequired);
  if (place.kind === "choice") return new ChoiceEditor(path, place, isRequired);
  if (place.kind === "json") return new JsonEditor(path, place, isRequired);
  return new TextEditor(path, place, isRequired);
}

/** Label, input, help and error of a value. */
class Editor {
  constructor(path, place, isRequired) {
    Object.assign(this, { path, place, isRequired });
    this.error = el("p", { class: "error", id: `${path}-error` });
    this.help = el("p", { class: "help", id: `${path}-help` }, helpOf(place));
    this.input = this.makeInput();
    this.input.id = path;
    this.input.setAttribute("aria-describedby", `${path}-help ${path}-error`);
    if (isRequired) this.input.setAttribute("aria-required", "true");
    this.element = el(
      "div",
      { class: `field of-${place.kind}` },
      labelOf(path, isRequired),
      this.input,
      this.extra(),
      this.error,
      this.help,
    );
  }

  extra() {
    return null;
  }

  complain(message) {
    this.error.textContent = message;
    this.input.setAttribute("aria-invalid", "true");
    this.input.addEventListener("input", () => this.forgive(), { once: true });
  }

  forgive() {
    this.error.textContent = "";
    this.input.removeAttribute("aria-invalid");
  }
}

/** The whole path for those who do not see the section that it stands in. */
export function labelOf(path, isRequired, name = path.split(".").at(-1)) {
  const before = path.slice(0, path.length - name.length);
  return el(
    "label",
    { class: "mono", for: path },
    before && el("span", { class: "visually-hidden" }, before),
    name,
    isRequired && el("span", { class: "required", title: "required", "aria-hidden": "true" }, " *"),
  );
}

function helpOf(place) {
  const limits = limitsOf(place);
  return [
    ...marked(place.description),
    limits && el("span", { class: "limits" }, place.description ? ` (${limits})` : limits),
  ];
}

/** `code` in descriptions. */
export const marked = (text) => text.split("`").map((part, index) => (index % 2 ? el("code", {}, part) : part));

const NUMBER = /^-?\d+(\.\d+)?(e[+-]?\d+)?$/i;

/** The number that `text` is; else the text itself, so that the broker says what is wrong with it. */
function numberOf(text) {
  const value = Number(text);
  const isExact = Number.isFinite(value) && (!Number.isInteger(value) || Number.isSafeInteger(value));
  return NUMBER.test(text) && isExact ? value : text;
}

const shown = (value) =>
  value === undefined || value === null ? "" : typeof value === "string" ? value : JSON.stringify(value);

class TextEditor extends Editor {
  makeInput() {
    const isText = this.place.kind === "text";
    const mode = { text: null, integer: "numeric", number: "decimal" }[this.place.kind];
    return el("input", {
      type: "text",
      inputmode: mode,
      placeholder: shown(this.place.fallback),
      autocomplete: "off",
      spellcheck: "false",
      class: isText ? "wide" : "short",
    });
  }

  /** Only a value that has a default can be wanted to be none at all. */
  extra() {
    if (!this.place.isNullable || (this.place.fallback ?? null) === null) return null;
    this.none = el("input", { type: "checkbox", on: { change: () => (this.input.disabled = this.none.checked) } });
    return el("label", { class: "none" }, this.none, " none");
  }

  read() {
    if (this.none?.checked) return null;
    const isText = this.place.kind === "text";
    const text = isText ? this.input.value : this.input.value.trim();
    if (text === "") return undefined;
    return isText ? text : numberOf(text);
  }

  write(value) {
    const isNone = value === null && this.none !== undefined;
    if (this.none) this.none.checked = this.input.disabled = isNone;
    this.input.value = shown(value);
  }
}

class ChoiceEditor extends Editor {
  makeInput() {
    const { fallback, values } = this.place;
    const usual = fallback === undefined ? "choose" : fallback === null ? "default" : `${fallback} (default)`;
    return el(
      "select",
      {},
      el("option", { value: "" }, usual),
      values.filter((each) => each !== fallback).map((each) => el("option", { value: each }, each)),
    );
  }

  read() {
    return this.input.value === "" ? undefined : this.input.value;
  }

  write(value) {
    this.input.value = value === undefined || value === null || value === this.place.fallback ? "" : value;
  }
}

class SwitchEditor extends Editor {
  makeInput() {
    return el("input", { type: "checkbox", checked: this.place.fallback === true });
  }

  read() {
    return this.input.checked === this.place.fallback ? undefined : this.input.checked;
  }

  write(value) {
    this.input.checked = value ?? this.place.fallback === true;
  }
}

class JsonEditor extends Editor {
  makeInput() {
    const { fallback, schema } = this.place;
    const empty = schema.type === "array" ? "[]" : schema.type === "object" ? "{}" : "";
    return el("textarea", { class: "mono wide", rows: 2, spellcheck: "false", placeholder: shown(fallback) || empty });
  }

  /** Raises Unreadable. */
  read() {
    const text = this.input.value.trim();
    if (text === "") return undefined;
    try {
      return JSON.parse(text);
    } catch (error) {
      if (this.place.takesText && !/^["[{]/.test(text)) return text;
      throw new Unreadable(this, `is no valid JSON: ${error.message}`);
    }
  }

  write(value) {
    const text = value === undefined || value === null ? "" : JSON.stringify(value, null, 2);
    this.input.value = text.length < 60 ? text.replace(/\s*\n\s*/g, " ") : text;
    this.input.rows = Math.min(10, Math.max(2, this.input.value.split("\n").length));
  }
}

/** Fills `box`: required fields in sight, the others folded if `isFolding`. Returns what unfolds them if one is set. */
export function fill(box, editors, isFolding) {
  const [needed, others] = [editors.filter((each) => each.isRequired), editors.filter((each) => !each.isRequired)];
  const grid = (fields) =>
    el(
      "div",
      { class: "fields" },
      fields.map((each) => each.element),
    );
  if (!isFolding || others.length === 0) {
    clear(box).append(grid([...needed, ...others]));
    return () => {};
  }
  const names = others.map((each) => each.path.split(".").at(-1)).join(", ");
  const fold = el(
    "details",
    {},
    el("summary", {}, `${others.length} optional: `, el("span", { class: "mono help" }, names)),
    grid(others),
  );
  clear(box).append(grid(needed), fold);
  return () => (fold.open ||= others.some((each) => each.read() !== undefined));
}
