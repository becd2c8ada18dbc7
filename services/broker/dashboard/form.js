// A new job: a form made from the schema that the broker has of a job, or the same as JSON. The broker validates.

import { ApiError, get, post } from "./api.js";
import { confirmed } from "./controls.js";
import { announce, clear, el } from "./dom.js";
import { Unreadable } from "./fields.js";
import { addressOf } from "./jobrow.js";
import { placeOf } from "./schema.js";
import { FieldSet } from "./sections.js";

const QUICKSTART = "assets/quickstart.json"; // examples/quickstart.toml

/** `params.from`: a job whose configuration it starts with. */
export async function show(main, params, signal) {
  const schema = await get("/job-schema", {}, signal);
  const source = params.from && (await get(`/jobs/${encodeURIComponent(params.from)}`, {}, signal));
  if (!signal.aborted) new JobForm(schema, signal).mount(main, source?.config);
}

class JobForm {
  constructor(schema, signal) {
    this.signal = signal;
    this.fields = new FieldSet("", placeOf(schema, schema).fields);
    this.view = "form";
    this.sent = { body: "", key: "" };
    this.problem = el("div", { class: "notice bad", role: "alert", tabindex: "-1", hidden: true });
    this.text = el("textarea", {
      id: "json",
      class: "mono wide",
      rows: 24,
      spellcheck: "false",
      "aria-describedby": "json-help",
    });
    this.submit = el("button", { class: "button primary", type: "submit", "data-testid": "submit-job" }, "Create job");
    this.toggle = el(
      "button",
      { class: "button", type: "button", on: { click: () => this.switchView() } },
      "Edit as JSON",
    );
  }

  mount(main, config) {
    const json = el(
      "div",
      { class: "card", hidden: true },
      el("label", { for: "json" }, "The job as JSON"),
      el(
        "p",
        { class: "help", id: "json-help" },
        "What is left out has its default. The keys are those of the TOML files.",
      ),
      this.text,
    );
    this.views = { form: this.layout(), json };
    const fillIn = el(
      "button",
      { class: "button", type: "button", on: { click: () => this.fillIn() } },
      "Fill in the quick start",
    );
    main.append(
      el("div", { class: "head" }, el("h1", {}, "New job"), el("div", { class: "actions" }, fillIn, this.toggle)),
      el(
        "p",
        { class: "muted" },
        "Grey text in a field is its default. Fields with ",
        el("span", { class: "required" }, "*"),
        " are required.",
      ),
      el(
        "form",
        {
          class: "job-form",
          novalidate: true,
          "aria-label": "New job",
          on: { submit: (event) => this.send(event), input: () => (this.isTouched = true) },
        },
        this.problem,
        this.views.form,
        json,
        el("div", { class: "actions" }, this.submit),
      ),
    );
    if (config) this.write(config);
  }

  /** Single values in a card of their own, required sections open, the others folded. */
  layout() {
    const editors = [...this.fields.editors.values()];
    const isSection = (editor) => editor.element.tagName === "FIELDSET";
    const single = editors.filter((editor) => !isSection(editor) && editor.place.kind !== "json");
    const needed = editors.filter((editor) => isSection(editor) && editor.isRequired);
    const others = editors
      .filter((editor) => !single.includes(editor) && !needed.includes(editor))
      .sort((a, b) => isSection(b) - isSection(a));
    const card = (...content) => el("div", { class: "card" }, content);
    return el(
      "div",
      { class: "views" },
      card(
        el(
          "div",
          { class: "fields" },
          single.map((editor) => editor.element),
        ),
      ),
      el(
        "div",
        { class: "columns" },
        needed.map((editor) => card(editor.element)),
      ),
      el("h2", {}, "Optional"),
      el("div", { class: "card folds" }, others.map(foldOf)),
    );
  }

  // ---- form and JSON ----

  /** Raises Unreadable, or SyntaxError. */
  read() {
    return this.view === "form" ? this.fields.read() : JSON.parse(this.text.value);
  }

  switchView() {
    this.forgive();
    try {
      if (this.view === "form") this.text.value = JSON.stringify(this.read(), null, 2);
      else this.toForm(this.read());
    } catch (error) {
      return this.explain(error);
    }
    this.view = this.view === "form" ? "json" : "form";
    for (const [name, element] of Object.entries(this.views)) element.hidden = name !== this.view;
    this.toggle.textContent = this.view === "form" ? "Edit as JSON" : "Back to the form";
    if (this.view === "json") this.text.focus();
  }

  toForm(job) {
    if (typeof job !== "object" || job === null || Array.isArray(job))
      throw new SyntaxError("it must be one object: {...}");
    const unknown = this.write(job);
    if (unknown.length) {
      throw new SyntaxError(
        `the form has no place for ${unknown.join(", ")}; correct that here, or create the job from here`,
      );
    }
  }

  async fillIn() {
    const question = {
      heading: "Fill in the quick start?",
      detail: "It takes the place of what you have entered.",
      yes: "Fill in",
      no: "Keep mine",
    };
    if (this.isTouched && !(await confirmed(question))) return;
    const job = await (await fetch(QUICKSTART, { signal: this.signal })).json();
    this.forgive();
    this.text.value = JSON.stringify(job, null, 2);
    this.write(job);
    this.isTouched = false;
    announce("The quick start is filled in");
  }

  /** The names that the form has no field for. Folded sections that something is set in are unfolded. */
  write(job) {
    const unknown = this.fields.write(job);
    for (const fold of this.views.form.querySelectorAll(".fold")) fold.open ||= job[fold.dataset.name] !== undefined;
    return unknown;
  }

  // ---- create ----

  async send(event) {
    event.preventDefault();
    if (this.submit.disabled) return;
    this.forgive();
    this.submit.disabled = true;
    try {
      const body = this.read();
      const job = await post("/jobs", body, { "Idempotency-Key": this.keyFor(JSON.stringify(body)) });
      announce(`${job.name} is created`);
      if (!this.signal.aborted) location.hash = addressOf(job.id); // else somebody is elsewhere by now
    } catch (error) {
      this.explain(error);
    } finally {
      this.submit.disabled = false;
    }
  }

  /** The same job sent twice, by a double click or after an answer that was lost, is one job. */
  keyFor(body) {
    if (body !== this.sent.body) {
      const random = crypto.getRandomValues(new Uint8Array(16)); // randomUUID is for https only
      this.sent = { body, key: Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("") };
    }
    return this.sent.key;
  }

  // ---- what is wrong ----

  explain(error) {
    if (error instanceof Unreadable) {
      this.complain("Not sent yet", "", [{ field: error.editor.path, message: error.message }]);
    } else if (error instanceof SyntaxError) {
      this.complain("This is no job in JSON", error.message, []);
    } else if (!(error instanceof ApiError)) {
      throw error;
    } else if (error.status !== 401) {
      this.complain(error.title, error.detail, error.errors);
    }
  }

  /** Each message beside its field, and all of them together above. */
  complain(title, detail, errors) {
    const found = errors.map(({ field, message }) => {
      const editor = this.view === "form" ? this.fields.find(field) : null;
      return { field, editor, message: message.replace(` (${editor?.place.description})`, "") }; // it is there already
    });
    for (const { editor, field, message } of found)
      editor?.complain(editor.path === field ? message : `${field} ${message}`);
    clear(this.problem).append(
      el("h2", {}, title),
      el("p", {}, detail),
      el(
        "ul",
        {},
        found.map(({ editor, field, message }) =>
          el("li", {}, editor ? linkTo(editor, field) : el("code", {}, field), ` ${message}`),
        ),
      ),
    );
    this.problem.hidden = false;
    const inputs = found.map(({ editor }) => editor?.input).filter(Boolean);
    const first = inputs.sort((a, b) => (a.compareDocumentPosition(b) & Node.DOCUMENT_POSITION_FOLLOWING ? -1 : 1))[0];
    if (first) goTo(first);
    else this.problem.focus();
  }

  forgive() {
    this.problem.hidden = true;
    for (const error of this.views.form.querySelectorAll(".error")) error.textContent = "";
    for (const input of this.views.form.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  }
}

function foldOf(editor) {
  const names = editor.fields ? [...editor.fields.editors.keys()].join(", ") : editor.place.description;
  return el(
    "details",
    { class: "fold", "data-name": editor.path },
    el("summary", {}, el("span", { class: "mono" }, editor.path), el("span", { class: "help" }, names)),
    editor.element,
  );
}

const linkTo = (editor, field) =>
  el("button", { type: "button", class: "link mono", on: { click: () => goTo(editor.input) } }, field);

/** Unfolds what hides it. */
function goTo(input) {
  for (let fold = input.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  input.focus();
}
