// Supplies of a new job: a data file that is sent from here; names of installed rewards, tasks and environments.

import { get, isRefusal, put } from "./api.js";
import { announce, Component, createRef, Fold, html } from "./parts.js";

const NAMES = { rewards: "Rewards", tasks: "Tasks of reasoning_gym", environments: "Environments" };
const PARQUET = /\.parquet$/i;
const ROWS = /^\s*type\s*=\s*["'](jsonl|parquet)["']/; // a section that reads rows of a file
const HEADER = /^\s*\[+\s*([^\]]+?)\s*\]+/;

/** Sends a data file to the broker. `onUse({type, path})`: the job is to read it. */
export class Upload extends Component {
  state = { isSending: "", record: null, problem: "" };
  field = createRef();

  async send({ target }) {
    const [file] = target.files;
    if (!file || this.state.isSending) return;
    this.setState({ isSending: file.name, record: null, problem: "" });
    const name = file.name.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[._-]+/, "") || "data";
    try {
      const record = await put(`/datasets/${encodeURIComponent(name.slice(-128))}`, file, this.props.signal);
      this.setState({ record });
      announce(`${record.name} is uploaded`);
    } catch (error) {
      if (isRefusal(error, this.props.signal)) this.setState({ problem: error.message });
    } finally {
      this.setState({ isSending: "" });
      if (this.field.current) this.field.current.value = ""; // else the same file could not be sent again
    }
  }

  render({ onUse }, { isSending, record, problem }) {
    const use = () => onUse({ type: PARQUET.test(record.name) ? "parquet" : "jsonl", path: record.path });
    return html`
      <div class="filter-field">
        <label for="data-file">Upload a data file, JSONL or Parquet</label>
        <input
          id="data-file"
          type="file"
          accept=".jsonl,.ndjson,.parquet"
          ref=${this.field}
          onChange=${(event) => this.send(event)}
        />
        <p class=${problem ? "error" : "help"} role="status">
          ${problem || (isSending && `${isSending} is being sent…`) || (record && html`It is there as <code>${record.path}</code>`)}
        </p>
        ${record && html`<span><button type="button" class="button" onClick=${use}>Use it in [data]</button></span>`}
      </div>
    `;
  }
}

/** The names that a job may use, read when somebody opens them. */
export class Installed extends Component {
  state = { installed: null, problem: "" };

  async read() {
    if (this.isRead) return;
    this.isRead = true;
    try {
      this.setState({ installed: await get("/installed", {}, this.props.signal) });
    } catch (error) {
      if (isRefusal(error, this.props.signal)) this.setState({ problem: error.message });
    }
  }

  render(_, { installed, problem }) {
    const names = () => {
      this.read();
      if (!installed) return html`<p class=${problem ? "error" : "muted"} role="status">${problem || "Reading them…"}</p>`;
      return Object.entries(NAMES).map(
        ([part, title]) => html`
          <h3>${title}</h3>
          <p class="names">
            ${installed[part].length ? installed[part].map((name) => html`<code>${name}</code> `) : "none installed here"}
          </p>
        `,
      );
    };
    return html`<${Fold} summary="Rewards, tasks and environments to choose from" of=${names} />`;
  }
}

/**
 * A job's text with this file as its data. A section [data] that reads rows keeps its other keys; any other is replaced.
 * null: `data` is written in another way than as a section.
 */
export function withData(text, { type, path }) {
  const lines = text.split("\n");
  const wanted = [`type = ${JSON.stringify(type)}`, `path = ${JSON.stringify(path)}`];
  const nameOf = (line) => HEADER.exec(line)?.[1];
  const start = lines.findIndex((line) => nameOf(line) === "data");
  if (start < 0) {
    if (lines.some((line) => /^\s*data\s*[.=]/.test(line))) return null;
    return `${text.trimEnd()}\n\n[data]\n${wanted.join("\n")}\n`;
  }
  const isOther = (line) => nameOf(line) !== undefined && !nameOf(line).startsWith("data.");
  let end = start + 1;
  while (end < lines.length && !isOther(lines[end])) end += 1;
  while (end > start + 1 && /^\s*(#|$)/.test(lines[end - 1])) end -= 1; // comments above the next section
  const inside = lines.slice(start + 1, end);
  const kept = inside.some((line) => ROWS.test(line)) ? inside.filter((line) => !/^\s*(type|path)\s*=/.test(line)) : [];
  return [...lines.slice(0, start + 1), ...wanted, ...kept, ...lines.slice(end)].join("\n");
}
