// Colours for what is drawn on a canvas, which does not follow the theme by itself.

const listeners = new Set();
const colours = new Map();

function change() {
  colours.clear();
  for (const listener of listeners) listener();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", change);
new MutationObserver(change).observe(document.documentElement, { attributeFilter: ["data-theme"] });

/** Returns what ends it. */
export function onThemeChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** A CSS variable as the theme has it now: the variable itself holds both themes. */
export function colourOf(name, alpha = 1) {
  const key = `${name} ${alpha}`;
  if (!colours.has(key)) {
    const probe = document.createElement("span");
    probe.style.color = `color-mix(in srgb, var(${name}) ${100 * alpha}%, transparent)`;
    document.body.append(probe);
    colours.set(key, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(key);
}
