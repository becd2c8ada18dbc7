// Elements and formatted values. Text always goes through text nodes: nothing is parsed as HTML.

import { serverNow } from "./api.js";

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "selected", "open", "indeterminate"]);
const MISSING = "–";

/**
 * el("a", {class: "button", href: "#/", "aria-label": "Jobs", on: {click: go}, style: {width: "3em"}}, "Jobs")
 * `text` sets the text; an attribute of null, undefined or false is left out, of true is empty. Children may be nodes,
 * strings, numbers, lists of them; null, undefined and false are left out.
 */
export const el = (tag, props = {}, ...children) => fill(document.createElement(tag), props, children);

/** The same for SVG. */
export const svg = (tag, props = {}, ...children) => fill(document.createElementNS(SVG, tag), props, children);

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "style") for (const [key, each] of Object.entries(value)) setStyle(node, key, each);
    else if (name === "text") node.textContent = value ?? "";
    else if (PROPERTIES.has(name)) node[name] = value;
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function setStyle(node, name, value) {
  if (name.startsWith("--")) node.style.setProperty(name, value);
  else node.style[name] = value;
}

export function clear(node) {
  node.replaceChildren();
  return node;
}

/** Sets the text only when it differs: no selection is lost, nothing is read out again. */
export function setText(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
}

/** Said by screen readers, seen by nobody. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

// ---- values: null and NaN are shown as a dash -------------------------------------------------------------------

const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
const formats = new Map();

function format(options) {
  const name = JSON.stringify(options);
  if (!formats.has(name)) formats.set(name, new Intl.NumberFormat("en", options));
  return formats.get(name);
}

/** `digits` significant ones, whole numbers in full: 0.1234 -> 0.123, 12345.6 -> 12,346, 2e-6 -> 2e-6. */
export function number(x, digits = 3) {
  if (!isNumber(x)) return MISSING;
  const size = Math.abs(x);
  if (Number.isInteger(x) || size >= 10 ** digits) return format({ maximumFractionDigits: 0 }).format(x);
  if (size < 1e-3) return x.toExponential(digits - 1).replace(/\.?0+e/, "e");
  return format({ maximumSignificantDigits: digits }).format(x);
}

/** 0.283 -> 28%. */
export const percent = (x, digits = 0) => (isNumber(x) ? `${(100 * x).toFixed(digits)}%` : MISSING);

/** Seconds: 0.0123 -> 12 ms, 4.56 -> 4.6 s, 125 -> 2 min 5 s, 7500 -> 2 h 5 min, 200000 -> 2 d 7 h. */
export function duration(s) {
  if (!isNumber(s)) return MISSING;
  if (s < 0.9995) return `${Math.round(1000 * s)} ms`;
  if (s < 9.95) return `${s.toFixed(1)} s`;
  const whole = Math.round(s);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return two(whole, 60, "min", 1, "s");
  return whole < 86_400 ? two(whole, 3600, "h", 60, "min") : two(whole, 86_400, "d", 3600, "h");
}

function two(s, large, largeUnit, small, smallUnit) {
  const rest = Math.floor((s % large) / small);
  return `${Math.floor(s / large)} ${largeUnit}${rest ? ` ${rest} ${smallUnit}` : ""}`;
}

/** Powers of 1000: 1234567 -> 1.23 MB. */
export function bytes(x) {
  if (!isNumber(x)) return MISSING;
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(Math.floor(Math.log10(Math.max(x, 1)) / 3), units.length - 1);
  return `${number(x / 1000 ** power)} ${units[power]}`;
}

/** Unix seconds as the time of day here; with the date when it is not today. */
export function clock(unix) {
  if (!isNumber(unix)) return MISSING;
  const time = new Date(1000 * unix);
  const isToday = time.toDateString() === new Date().toDateString();
  const day = isToday ? {} : { year: "numeric", month: "short", day: "numeric" };
  return time.toLocaleString(undefined, { ...day, hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

/** Unix seconds of the broker: "12 s ago", in whole seconds. */
export function ago(unix) {
  if (!isNumber(unix)) return MISSING;
  const s = Math.floor(serverNow() - unix);
  return s < 1 ? "now" : `${s < 60 ? `${s} s` : duration(s).replace(/(min) \d+ s$/, "$1")} ago`;
}
