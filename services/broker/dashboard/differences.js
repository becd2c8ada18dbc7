// The differences between the configurations of several jobs, and the lines that they make in a chart.

import { isTable, isTables } from "./format.js";

const LONGEST = 60; // characters of a label
const MISSING = "–";
const OF_EACH_JOB = /^name$|^data(\.\d+)?\.now$/; // keys that hardly two jobs share: the date of templates is that of the submission

/**
 * The values of a configuration as text, by dotted key, as in onbeat/config/differences.py: {"data": {"type": "jsonl"}}
 * -> "data.type": "jsonl". Tables in lists have their place as a key. null and [] are keys that are not there.
 */
export function flatten(table, path = "", flat = new Map()) {
  for (const [name, value] of Object.entries(table)) {
    if (value === null || (Array.isArray(value) && !value.length)) continue;
    if (isTable(value) || isTables(value)) flatten(value, `${path}${name}.`, flat);
    else flat.set(path + name, textOf(value));
  }
  return flat;
}

/** 0.00001 -> 1e-5, as people write it. */
function textOf(value) {
  if (typeof value === "string") return value;
  const isTiny = typeof value === "number" && value !== 0 && Math.abs(value) < 1e-3;
  return isTiny ? value.toExponential() : JSON.stringify(value);
}

/** [[key, [text, ...]], ...]: the keys that are not equal everywhere, the seed last, with a text for each configuration. Not name and date. */
export function differencesOf(configs) {
  const flat = configs.map((config) => flatten(config));
  const keys = [...new Set(flat.flatMap((values) => [...values.keys()]))].filter((key) => !OF_EACH_JOB.test(key));
  keys.sort((one, other) => (one === "seed") - (other === "seed"));
  return keys.map((key) => [key, flat.map((values) => values.get(key) ?? MISSING)]).filter(([, texts]) => new Set(texts).size > 1);
}

/** The last word of each key, or the whole key where several end with that word, or it says little by itself. */
export function shortNames(keys) {
  const last = (key) => key.split(".").at(-1);
  const isClear = (word) => !["name", "path", "type"].includes(word) && keys.filter((key) => last(key) === word).length === 1;
  return keys.map((key) => (isClear(last(key)) ? last(key) : key));
}

/**
 * A column of the list for each key in which its jobs differ: [{key, name, texts}, ...], `texts` by job id. Keys that all
 * jobs have come first. A job whose record cannot be read has an empty configuration, and no texts.
 */
export function columnsOf(jobs) {
  const readable = jobs.filter(({ config }) => Object.keys(config).length);
  const numMissing = ([, texts]) => texts.filter((text) => text === MISSING).length;
  const differences = differencesOf(readable.map(({ config }) => config)).sort((one, other) => numMissing(one) - numMissing(other));
  const names = shortNames(differences.map(([key]) => key));
  const textsOf = (texts) => new Map(readable.map(({ id }, place) => [id, texts[place]]));
  return differences.map(([key, texts], index) => ({ key, name: names[index], texts: textsOf(texts) }));
}

/**
 * [{label, places}, ...]: a line for each job, in order, but one for those that differ only in their seeds. `places`: the
 * indices of its jobs. `label`: the values that tell it from the others, such as "learning_rate=1e-5, 3 seeds"; the name
 * of its first job where they are too long or tell nothing. `jobs`: [{name, config}, ...].
 */
export function linesOf(jobs) {
  const differences = differencesOf(jobs.map(({ config }) => config)).filter(([key]) => key !== "seed");
  const names = shortNames(differences.map(([key]) => key));
  const labels = jobs.map((_, place) => differences.map(([, texts], index) => `${names[index]}=${texts[place]}`).join(", "));
  const alike = [...Map.groupBy(jobs.keys(), (place) => labels[place]).values()];
  const hasSeeds = (places) => areUnique(places.map((place) => jobs[place].config.seed));
  const lines = alike.flatMap((places) => (hasSeeds(places) ? [places] : places.map((place) => [place])));
  const isClear = areUnique(lines.map(([place]) => labels[place])) && labels.every((label) => label.length <= LONGEST);
  return lines.map((places) => {
    const [{ name }, label] = [jobs[places[0]], labels[places[0]]];
    const seeds = places.length > 1 ? `${places.length} seeds` : "";
    return { places, label: [isClear ? label : name, seeds].filter(Boolean).join(", ") || name };
  });
}

const areUnique = (values) => new Set(values).size === values.length;
