// Parts that several pages show of a job: state, progress, and the buttons that move it.

import { ApiError, post } from "./api.js";
import { announce, el } from "./dom.js";

const TONES = { RUNNING: "accent", PAUSED: "warn", CANCELLING: "warn", SUCCEEDED: "good", FAILED: "bad" };
const HOLLOW = new Set(["PENDING", "CANCELLED"]);
const MOVES = {
  PENDING: ["cancel"],
  RUNNING: ["pause", "cancel"],
  PAUSED: ["resume", "cancel"],
};

export const isOver = (job) => ["CANCELLED", "SUCCEEDED", "FAILED"].includes(job.state);

/** The state in words and colour. */
export function stateBadge(job) {
  const tone = `${TONES[job.state] ?? ""}${HOLLOW.has(job.state) ? " hollow" : ""}`;
  return el("span", { class: `badge ${tone}`, "data-testid": "job-state", text: job.state.toLowerCase() });
}

/** Committed iterations of all. */
export function progressBar(job) {
  const [done, total] = [job.next_iteration, job.num_iterations];
  const tone = { SUCCEEDED: "good", FAILED: "bad" }[job.state] ?? "";
  const label = `${done} of ${total} iterations`;
  const bar = { role: "progressbar", "aria-valuemin": 0, "aria-valuemax": total, "aria-valuenow": done, "aria-label": label };
  return el(
    "span",
    { class: `progress ${tone}`, "data-testid": "job-progress", title: label, ...bar },
    el("span", { style: { width: `${(100 * done) / total}%` } }),
  );
}

/** Buttons for what may be done in this state; `onChange(job)` gets the record after it. */
export function jobControls(job, onChange) {
  const buttons = (MOVES[job.state] ?? []).map((verb) => moveButton(job, verb, onChange));
  return el("span", { class: "actions" }, buttons);
}

function moveButton(job, verb, onChange) {
  const attributes = { type: "button", class: "button", "data-testid": `${verb}-job`, "aria-label": `${title(verb)} ${job.name}, ${job.id}` };
  const button = el("button", { ...attributes, on: { click: () => move(job, verb, button, onChange) } }, title(verb));
  return button;
}

const title = (verb) => verb[0].toUpperCase() + verb.slice(1);

async function move(job, verb, button, onChange) {
  if (button.ariaDisabled === "true" || (verb === "cancel" && !(await isCancelWanted(job)))) return;
  button.ariaDisabled = "true"; // a disabled one would lose the focus
  try {
    const changed = await post(`/jobs/${encodeURIComponent(job.id)}:${verb}`);
    announce(`${job.name} is ${changed.state.toLowerCase()}`);
    onChange(changed);
  } catch (error) {
    button.ariaDisabled = null;
    await tell(`${title(verb)} was refused`, error);
  }
}

const isCancelWanted = (job) =>
  confirmed({
    heading: `Cancel ${job.name}?`,
    detail: `${job.id} has ${job.next_iteration} of ${job.num_iterations} iterations. Its record and checkpoints stay; \`onbeat jobs resume\` brings it back.`,
    yes: "Cancel the job",
    no: "Keep it",
  });

/** Asks in a dialog. Resolves to false when it is closed in any other way. */
export function confirmed({ heading, detail, yes, no }) {
  const answer = (value) => el("button", { class: value === "yes" ? "button danger" : "button", value }, value === "yes" ? yes : no);
  return opened(heading, detail, answer("no"), answer("yes")).then((value) => value === "yes");
}

/** Shows what the broker said of a refusal. */
export async function tell(heading, error) {
  if (error instanceof ApiError && error.status === 401) return; // the key form is there
  if (!(error instanceof ApiError)) throw error;
  await opened(heading, error.detail || error.title, el("button", { class: "button", value: "ok" }, "Close"));
}

function opened(heading, detail, ...buttons) {
  const dialog = el(
    "dialog",
    { "aria-labelledby": "dialog-heading" },
    el("form", { method: "dialog" }, el("h2", { id: "dialog-heading", text: heading }), el("p", { text: detail }),
      el("div", { class: "actions" }, buttons)),
  );
  document.body.append(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
    dialog.showModal();
  });
}
