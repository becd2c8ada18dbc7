// Values as text: numbers, times, sizes. null and NaN are shown as a dash.

import { serverNow } from "./api.js";

const MISSING = "–";

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

/** Seconds: 0.0123 -> 12 ms, 4.56 -> 4.6 s, 125 -> 2 min 5 s, 3483 -> 58 min, 7500 -> 2 h 5 min, 200000 -> 2 d 7 h. */
export function duration(s) {
  if (!isNumber(s)) return MISSING;
  if (s < 0.9995) return `${Math.round(1000 * s)} ms`;
  if (s < 9.95) return `${s.toFixed(1)} s`;
  const whole = Math.round(s);
  if (whole < 60) return `${whole} s`;
  if (whole < 600) return two(whole, 60, "min", 1, "s");
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  return whole < 86_400 ? two(whole, 3600, "h", 60, "min") : two(whole, 86_400, "d", 3600, "h");
}

function two(s, large, largeUnit, small, smallUnit) {
  const rest = Math.floor((s % large) / small);
  return `${Math.floor(s / large)} ${largeUnit}${rest ? ` ${rest} ${smallUnit}` : ""}`;
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

// ---- TOML --------------------------------------------------------------------------------------------------------

export const isTable = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
export const isTables = (value) => Array.isArray(value) && value.length > 0 && value.every(isTable);
const bare = (key) => (/^[A-Za-z0-9_-]+$/.test(key) ? key : JSON.stringify(key));

/** A job's configuration as `onbeat jobs create FILE` takes it: plain values first, then tables. null is left out. */
export function toToml(table, path = []) {
  const entries = Object.entries(table).filter(([, value]) => value !== null && value !== undefined);
  const plain = entries
    .filter(([, value]) => !isTable(value) && !isTables(value))
    .map(([key, value]) => `${bare(key)} = ${inline(value)}`);
  const nested = entries.flatMap(([key, value]) => {
    const name = [...path, bare(key)];
    if (isTables(value)) return value.map((each) => `\n[[${name.join(".")}]]\n${toToml(each, name)}`);
    return isTable(value) ? [`\n[${name.join(".")}]\n${toToml(value, name)}`] : [];
  });
  return [...plain, ...nested].join("\n");
}

function inline(value) {
  if (Array.isArray(value)) return `[${value.map(inline).join(", ")}]`;
  if (isTable(value))
    return `{ ${Object.entries(value)
      .filter(([, each]) => each !== null)
      .map(([key, each]) => `${bare(key)} = ${inline(each)}`)
      .join(", ")} }`;
  if (typeof value === "string") return JSON.stringify(value).replaceAll("\u007f", "\\u007f");
  return String(value); // numbers and truth values are alike in both
}
