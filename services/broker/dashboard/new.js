// A new job: its TOML in a text editor. The broker validates it and names the fields and lines that are wrong.

import { ApiError, get, postToml } from "./api.js";
import { toToml } from "./format.js";
import { addressOf, announce, Component, confirmed, createRef, html, pathOf, render } from "./parts.js";

const QUICKSTART = "assets/quickstart.toml"; // examples/quickstart.toml
const drafts = new Map(); // texts of jobs not created yet, by the job that they began with: a page may be left

/** `params.from`: a job whose configuration it starts with; without one, the quick start. */
export async function show(main, { from }, signal) {
  const text = from
    ? `${toToml((await get(pathOf(from), {}, signal)).config)}\n`
    : await (await fetch(QUICKSTART, { signal })).text();
  if (!signal.aborted) render(html`<${NewJob} text=${text} from=${from} signal=${signal} />`, main);
}

class NewJob extends Component {
  state = { text: drafts.get(this.props.from) ?? this.props.text, problem: null, isSending: false };
  saved = this.props.text; // text that a click on the quick start may replace without a question
  sent = { text: "", key: "" };
  editor = createRef();
  report = createRef();

  async startFromQuickStart() {
    const question = {
      heading: "Start from the quick start?",
      detail: "It takes the place of what you have written.",
      yes: "Replace it",
      no: "Keep mine",
    };
    if (this.state.text !== this.saved && !(await confirmed(question))) return;
    this.saved = await (await fetch(QUICKSTART, { signal: this.props.signal })).text();
    this.setState({ text: this.saved, problem: null });
    drafts.delete(this.props.from);
    announce("The quick start is in the editor");
    this.editor.current.focus();
    this.editor.current.setSelectionRange(0, 0);
  }

  write(text) {
    drafts.set(this.props.from, text);
    this.setState({ text });
  }

  // ---- create ----

  async send(event) {
    event.preventDefault();
    if (this.state.isSending) return;
    this.setState({ isSending: true, problem: null });
    const { text } = this.state;
    try {
      const job = await postToml("/jobs", text, { "Idempotency-Key": this.keyFor(text) });
      drafts.delete(this.props.from);
      announce(`${job.name} is created`);
      if (!this.props.signal.aborted) location.hash = addressOf(job.id); // else somebody is elsewhere by now
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status !== 401) this.setState({ problem: error }, () => this.report.current?.focus());
    } finally {
      this.setState({ isSending: false });
    }
  }

  /** The same job sent twice, by a double click or after an answer that was lost, is one job. */
  keyFor(text) {
    if (text !== this.sent.text) {
      const random = crypto.getRandomValues(new Uint8Array(16)); // randomUUID is for https only
      this.sent = { text, key: Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("") };
    }
    return this.sent.key;
  }

  // ---- what is wrong ----

  /** Selects the line in the editor and brings it into sight. */
  goTo(line) {
    const editor = this.editor.current;
    const lines = editor.value.split("\n");
    const start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
    editor.focus();
    editor.setSelectionRange(start, start + (lines[line - 1] ?? "").length);
    const height = editor.scrollHeight / Math.max(lines.length, 1);
    editor.scrollTop = Math.max(0, (line - 4) * height);
  }

  problem({ title, detail, errors }) {
    return html`
      <div class="notice bad" role="alert" tabindex="-1" id="job-problem" ref=${this.report}>
        <h2>${title}</h2>
        <p>${detail}</p>
        <ul class="wrong-fields">
          ${errors.toSorted((a, b) => (a.line ?? 0) - (b.line ?? 0)).map(
            ({ field, message, line }) => html`<li>
              ${line && html`<button type="button" class="link" onClick=${() => this.goTo(line)}>Line ${line}</button> `}
              <code>${field}</code> ${message}
            </li>`,
          )}
        </ul>
      </div>
    `;
  }

  render(_, { text, problem, isSending }) {
    return html`
      <div class="head">
        <h1>New job</h1>
        <button type="button" class="button" onClick=${() => this.startFromQuickStart()}>Start from the quick start</button>
      </div>
      <form class="job-form" aria-label="New job" onSubmit=${(event) => this.send(event)}>
        <label for="job-toml">The job as TOML</label>
        <p class="help" id="job-help">
          Keys that are left out have their defaults. The broker checks the job before it creates it.
        </p>
        ${problem && this.problem(problem)}
        <textarea
          id="job-toml"
          class="mono"
          rows="28"
          ref=${this.editor}
          value=${text}
          spellcheck=${false}
          autocapitalize="off"
          autocomplete="off"
          wrap="off"
          placeholder="[model]"
          aria-describedby=${problem ? "job-help job-problem" : "job-help"}
          aria-invalid=${problem ? "true" : null}
          onInput=${(event) => this.write(event.target.value)}
        ></textarea>
        <div class="actions">
          <button class="button primary" type="submit" data-testid="submit-job" aria-disabled=${isSending ? "true" : null}>
            Create job
          </button>
        </div>
      </form>
    `;
  }
}
