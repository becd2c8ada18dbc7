// Editors of sections: of their fields, of one section out of several, of a section that may be left out.
// Like those of single values; write() returns the dotted names that it has no field for.

import { clear, el } from "./dom.js";
import { editorOf, fill, labelOf, marked } from "./fields.js";

export function placeEditor(path, place, isRequired) {
  if (place.kind !== "section" && place.kind !== "union") return editorOf(path, place, isRequired);
  const Kind = place.kind === "union" ? UnionEditor : SectionEditor;
  return new Kind(path, place, isRequired);
}

const joined = (path, name) => (path ? `${path}.${name}` : name);

/** Fields by name, without a frame. */
export class FieldSet {
  constructor(path, fields) {
    this.path = path;
    this.editors = new Map(fields.map(([name, place, isRequired]) => [name, placeEditor(joined(path, name), place, isRequired)]));
  }

  /** {} when nothing is set. */
  read() {
    const values = [...this.editors].map(([name, editor]) => [name, editor.read()]);
    return Object.fromEntries(values.filter(([, value]) => value !== undefined));
  }

  write(value) {
    const unknown = Object.keys(value).filter((name) => !this.editors.has(name)).map((name) => joined(this.path, name));
    return [...unknown, ...[...this.editors].flatMap(([name, editor]) => editor.write(value[name]) ?? [])];
  }

  /** The editor of "rollout.temperature", or of the nearest section around it. */
  find(path) {
    for (const editor of this.editors.values()) {
      if (path === editor.path || path.startsWith(`${editor.path}.`)) return editor.find?.(path) ?? editor;
    }
    return null;
  }
}

/** Whatever is no table cannot be shown here: it is named as unknown, and stays in the JSON. */
const isTable = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

class Framed {
  constructor(path, place, isRequired) {
    Object.assign(this, { path, place, isRequired });
    this.box = el("div", { class: "box" });
    this.error = el("p", { class: "error", id: `${path}-error` });
    const about = place.description && el("p", { class: "help" }, marked(place.description));
    this.element = el("fieldset", { class: "section" }, el("legend", { class: "mono" }, path.split(".").at(-1)), this.head(), about, this.error, this.box);
  }

  complain(message) {
    this.error.textContent = message;
    this.input?.setAttribute("aria-invalid", "true");
    this.input?.setAttribute("aria-describedby", this.error.id);
  }

  forgive() {
    this.error.textContent = "";
    this.input?.removeAttribute("aria-invalid");
  }

  find(path) {
    return path === this.path ? this : this.fields?.find(path) ?? this;
  }
}

/** A section. One that is null unless given has a switch. */
class SectionEditor extends Framed {
  constructor(path, place, isRequired) {
    super(path, place, isRequired);
    this.fields = new FieldSet(path, place.fields);
    this.reveal = fill(this.box, [...this.fields.editors.values()], isRequired);
    this.input = this.toggle ?? this.box.querySelector("input, select, textarea");
    this.show();
  }

  head() {
    if (!this.place.isNullable) return null;
    this.toggle = el("input", { type: "checkbox", id: this.path, on: { change: () => this.show() } });
    return el("label", { class: "none", for: this.path }, this.toggle, ` use ${this.path}`);
  }

  show() {
    this.box.hidden = this.toggle ? !this.toggle.checked : false;
  }

  read() {
    if (this.toggle && !this.toggle.checked) return undefined;
    const value = this.fields.read();
    return Object.keys(value).length || this.toggle || this.isRequired ? value : undefined;
  }

  write(value) {
    const isGiven = isTable(value);
    if (this.toggle) this.toggle.checked = isGiven;
    this.show();
    const unknown = this.fields.write(isGiven ? value : {});
    this.reveal();
    return isGiven || (value ?? null) === null ? unknown : [this.path];
  }
}

/** One of several sections, by its tag. */
class UnionEditor extends Framed {
  constructor(path, place, isRequired) {
    super(path, place, isRequired);
    this.show();
  }

  head() {
    const { tag, variants, usual, isNullable } = this.place;
    const id = `${this.path}.${tag}`;
    this.input = el("select", { id, on: { change: () => this.swap() } }, isNullable && el("option", { value: "" }, "none"),
      [...variants.keys()].map((value) => el("option", { value, selected: !isNullable && value === usual }, value)));
    return el("div", { class: "field" }, labelOf(id, this.isRequired, tag), this.input);
  }

  show() {
    const variant = this.place.variants.get(this.input.value);
    this.fields = variant ? new FieldSet(this.path, variant.fields) : null;
    clear(this.box);
    if (!variant) return;
    const about = el("p", { class: "help" }, marked(variant.description));
    const fields = el("div", { class: "box" });
    this.reveal = fill(fields, [...this.fields.editors.values()], this.isRequired);
    this.box.append(...(variant.description ? [about] : []), fields);
  }

  /** Another tag was chosen: what the new section has as well is taken over. */
  swap() {
    const values = this.fields?.read() ?? {};
    this.show();
    this.set(values);
  }

  set(values) {
    if (!this.fields) return [];
    const unknown = this.fields.write(values);
    this.reveal();
    return unknown;
  }

  read() {
    const { tag, usual, isNullable } = this.place;
    if (!this.fields) return undefined;
    const value = this.fields.read();
    const isUsual = !this.isRequired && !isNullable && this.input.value === usual && Object.keys(value).length === 0;
    return isUsual ? undefined : { [tag]: this.input.value, ...value };
  }

  write(value) {
    const { tag, usual, isNullable, variants } = this.place;
    if ((value ?? null) !== null && !isTable(value)) return [this.path];
    const wanted = value?.[tag] ?? (isNullable && !value ? "" : usual);
    if (wanted !== "" && !variants.has(wanted)) return [`${this.path}.${tag}`];
    this.input.value = wanted;
    this.show();
    const { [tag]: _, ...values } = value ?? {};
    return this.set(values);
  }
}
