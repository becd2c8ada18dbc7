// The answer of the broker to a job that is not created yet: wrong fields, rows, and first prompts with their rewards.

import { number } from "./format.js";
import { html, marked, Table } from "./parts.js";

/** The wrong fields of a refused job. `goTo(line)` shows a line of the text; `report`: a ref of the whole. */
export const Refusal = ({ problem: { title, detail, errors }, goTo, report }) => html`
  <div class="notice bad" role="alert" tabindex="-1" id="job-problem" ref=${report}>
    <h2>${title}</h2>
    <p>${detail}</p>
    <ul class="wrong-fields">
      ${errors.toSorted((a, b) => (a.line ?? 0) - (b.line ?? 0)).map(
        ({ field, message, line }) => html`<li>
          ${line && html`<button type="button" class="link" onClick=${() => goTo(line)}>Line ${line}</button> `}
          <code>${field}</code> ${message}
        </li>`,
      )}
    </ul>
  </div>
`;

/** A job that would be accepted. `preview` null: it is on its way; `why`: the reason why there is none. */
export const Checked = ({ validation, preview, why, isCurrent }) => html`
  <section class="stack checked" aria-labelledby="checked-heading" data-testid="checked">
    <div class="notice ${isCurrent ? "" : "warn"}">
      <h2 id="checked-heading">${isCurrent ? "The broker would accept this job" : "Accepted before your last change"}</h2>
      ${!isCurrent && html`<p>The text has changed since. Check it again.</p>`}
      <ul class="wrong-fields">
        ${validation.rows.map((count) => html`<li>${rowsOf(count)}</li>`)}
        ${validation.notes.map((note) => html`<li>${marked(note)}</li>`)}
      </ul>
    </div>
    ${why && html`<p class="notice bad">${why}</p>`}
    ${!preview && !why && html`<p class="muted" role="status">Reading the first prompts and trying the reward on them…</p>`}
    ${preview && html`<${Prompts} ...${preview} />`}
  </section>
`;

function rowsOf({ field, path, num_accepted: accepted, num_refused: refused, reasons }) {
  const why = Object.entries(reasons).map(([reason, count]) => `; ${number(count)} ${reason}`);
  return html`<code>${field}</code>: ${number(accepted)} of ${number(accepted + refused)} rows of ${path} can be used${why}`;
}

const Prompts = ({ prompts, notes }) => html`
  ${notes.map((note) => html`<p class="help">${marked(note)}</p>`)}
  ${prompts.map(
    ({ text, num_tokens: count, trials, teacher_text: teacherText }, index) => html`
      <article class="stack previewed" data-testid="previewed">
        <h3>Prompt ${index + 1}${count !== null && html`<span class="help">, ${number(count)} tokens, as the model gets it</span>`}</h3>
        <div class="text of-prompt" tabindex="0" role="group" aria-label="Prompt ${index + 1}">${text}</div>
        ${
          teacherText !== null &&
          html`<p class="help">The teacher reads</p>
          <div class="text of-prompt" tabindex="0" role="group" aria-label="Prompt ${index + 1} of the teacher">${teacherText}</div>`
        }
        ${trials.length > 0 && html`<${Trials} trials=${trials} number=${index + 1} />`}
      </article>
    `,
  )}
`;

/** The rewards of the row's own answer and of an empty response. */
function Trials({ trials, number: place }) {
  const rows = trials.map((trial) => [
    trial.response === "empty" ? "an empty response" : html`the row's answer <span class="mono">${shortened(trial.text)}</span>`,
    trial.reward_name,
    trial.message ? html`<span class="error">failed: ${trial.message}</span>` : trial.reward === null ? "no opinion" : number(trial.reward),
  ]);
  const isPaidNothing = trials.some(({ response, reward }) => response !== "empty" && reward === 0);
  return html`
    <${Table} label="Rewards of prompt ${place}" className="small" columns=${["response", "reward", "value"]} rows=${rows} numbersFrom=${2} />
    ${isPaidNothing && html`<p class="warn">The reward gives the row's own answer 0.</p>`}
  `;
}

const shortened = (text) => (text.length > 80 ? `${text.slice(0, 80)}…` : text);
