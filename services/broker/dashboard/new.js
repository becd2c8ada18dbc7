// A new job: its TOML in a text editor. The broker checks it, names all wrong fields and their lines, and shows what the
// job would begin with.

import { ApiError, get, isReadOnly, postToml } from "./api.js";
import { Checked, Refusal } from "./check.js";
import { toToml } from "./format.js";
import { addressOf, announce, Component, confirmed, createRef, html, pathOf, render } from "./parts.js";
import { Installed, Upload, withData } from "./supplies.js";

const QUICKSTART = "assets/quickstart.toml"; // examples/quickstart.toml
const NO_SECTION = "The job writes its data in another way than as a section [data]; name the file there by hand: path = ";
const READ_ONLY = html`
  <h1>New job</h1>
  <p class="notice warn">This view is read-only and creates no jobs. <code>onbeat up</code> in the same folder starts a broker that does.</p>
`;
const drafts = new Map(); // texts of jobs not created yet, by the job that they began with: a page may be left

/** `params.from`: a job whose configuration it starts with; without one, the quick start. */
export async function show(main, { from }, signal) {
  if (isReadOnly) return render(READ_ONLY, main);
  const text = from
    ? `${toToml((await get(pathOf(from), {}, signal)).config)}\n`
    : await (await fetch(QUICKSTART, { signal })).text();
  if (!signal.aborted) render(html`<${NewJob} text=${text} from=${from} signal=${signal} />`, main);
}

class NewJob extends Component {
  state = { text: drafts.get(this.props.from) ?? this.props.text, problem: null, checked: null, isSending: false, isChecking: false };
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
    this.setState({ text: this.saved, problem: null, checked: null });
    drafts.delete(this.props.from);
    announce("The quick start is in the editor");
    this.editor.current.focus();
    this.editor.current.setSelectionRange(0, 0);
  }

  write(text) {
    drafts.set(this.props.from, text);
    this.setState({ text });
  }

  /** Puts the uploaded file into the section [data]. */
  useData(data) {
    const text = withData(this.state.text, data);
    if (text === null) {
      announce("The data are not a section of their own here");
      this.setState({ problem: new ApiError(0, { title: "Nothing was changed", detail: NO_SECTION + data.path }) });
      return;
    }
    this.write(text);
    announce(`${data.path} is in the section data`);
    this.setState({}, () => this.goTo(text.slice(0, text.indexOf(data.path)).split("\n").length));
  }

  // ---- check and create ----

  async check() {
    if (this.state.isChecking) return;
    const { text } = this.state;
    const { signal } = this.props;
    this.setState({ isChecking: true, problem: null, checked: null });
    await this.attempt(async () => {
      const validation = await postToml("/jobs:validate", text, {}, signal);
      this.setState({ checked: { text, validation, preview: null, why: "" } });
      announce("The broker would accept this job");
      const shown = await this.preview(text);
      this.setState(({ checked }) => ({ checked: { ...checked, ...shown } }));
    });
    this.setState({ isChecking: false });
  }

  /** The first prompts, or why there are none: the job is accepted all the same. */
  async preview(text) {
    try {
      return { preview: await postToml("/jobs:preview", text, {}, this.props.signal) };
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      const errors = error.errors.map(({ field, message }) => `${field}: ${message}`);
      return { why: `The first prompts cannot be shown. ${errors.join("; ") || error.message}` };
    }
  }

  async send(event) {
    event.preventDefault();
    if (this.state.isSending) return;
    this.setState({ isSending: true, problem: null, checked: null });
    const { text } = this.state;
    await this.attempt(async () => {
      const job = await postToml("/jobs", text, { "Idempotency-Key": this.keyFor(text) });
      drafts.delete(this.props.from);
      announce(`${job.name} is created`);
      if (!this.props.signal.aborted) location.hash = addressOf(job.id); // else somebody is elsewhere by now
    });
    this.setState({ isSending: false });
  }

  /** Shows a refusal of the broker beside the text. */
  async attempt(act) {
    try {
      await act();
    } catch (error) {
      if (this.props.signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      if (error.status !== 401) this.setState({ problem: error, checked: null }, () => this.report.current?.focus());
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

  render(_, { text, problem, checked, isSending, isChecking }) {
    const { signal } = this.props;
    return html`
      <div class="head">
        <h1>New job</h1>
        <button type="button" class="button" onClick=${() => this.startFromQuickStart()}>Start from the quick start</button>
      </div>
      <form class="job-form" aria-label="New job" onSubmit=${(event) => this.send(event)}>
        <label for="job-toml">The job as TOML</label>
        <p class="help" id="job-help">
          Keys that are left out have their defaults. <em>Check</em> names all that is wrong and shows the first prompts; it creates nothing.
        </p>
        <div class="job-desk">
          <div class="stack">
            ${this.textArea(text, problem)}
            <div class="actions">
              <button class="button" type="button" data-testid="check-job" aria-disabled=${isChecking ? "true" : null} onClick=${() => this.check()}>
                ${isChecking ? "Checking…" : "Check"}
              </button>
              <button class="button primary" type="submit" data-testid="submit-job" aria-disabled=${isSending ? "true" : null}>
                Create job
              </button>
            </div>
          </div>
          <div class="stack">
            ${problem && html`<${Refusal} problem=${problem} goTo=${(line) => this.goTo(line)} report=${this.report} />`}
            ${checked && html`<${Checked} ...${checked} isCurrent=${checked.text === text} />`}
            <${Upload} signal=${signal} onUse=${(data) => this.useData(data)} />
            <${Installed} signal=${signal} />
            <p class="help">Programs do the same over REST: <a href="docs">its routes and fields</a></p>
          </div>
        </div>
      </form>
    `;
  }

  textArea(text, problem) {
    return html`
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
    `;
  }
}
