// A job's configuration as TOML: what `onbeat jobs create FILE` takes. Values that are null are left out.

const isTable = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isTables = (value) => Array.isArray(value) && value.length > 0 && value.every(isTable);
const bare = (key) => (/^[A-Za-z0-9_-]+$/.test(key) ? key : JSON.stringify(key));

/** Lines of a table: plain values first, then the tables in it. */
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
