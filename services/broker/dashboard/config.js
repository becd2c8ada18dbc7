// A job's configuration, to read and to copy.

import { announce, el } from "./dom.js";
import { toToml } from "./toml.js";

export function configPanel(job) {
  const forms = { TOML: toToml(job.config), JSON: JSON.stringify(job.config, null, 2) };
  const text = el(
    "pre",
    { class: "config-text", tabindex: "0", role: "region", "aria-label": "Configuration" },
    forms.TOML,
  );
  const choose = (name) => {
    text.textContent = forms[name];
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.textContent === name));
  };
  const buttons = Object.keys(forms).map((name) =>
    el(
      "button",
      { class: "button", type: "button", "aria-pressed": String(name === "TOML"), on: { click: () => choose(name) } },
      name,
    ),
  );
  const copy = el("button", { class: "button", type: "button", on: { click: () => copyText(text) } }, "Copy");
  return el(
    "details",
    { class: "card config", "data-testid": "config" },
    el("summary", {}, el("h2", { text: "Configuration" })),
    el(
      "div",
      { class: "actions" },
      el("div", { class: "choice", role: "group", "aria-label": "Format" }, buttons),
      copy,
    ),
    text,
  );
}

async function copyText(node) {
  try {
    await navigator.clipboard.writeText(node.textContent);
    announce("Copied");
  } catch {
    // No clipboard on a page that did not come over TLS: it is marked, Ctrl-C takes it.
    getSelection().selectAllChildren(node);
    announce("Selected: press Control C to copy");
  }
}
