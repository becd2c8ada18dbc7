// What a JSON schema, as pydantic writes it, says of one place in a job. Pure, no DOM.

/**
 * One place: {kind, schema, description, fallback, isNullable, ...}. `fallback` is the default, undefined without one.
 * kind "section": `fields`, a list of [name, place, isRequired]; "union": `tag` and `variants`, by tag;
 * "choice": `values`; "number", "integer", "text", "switch"; "json": whatever else, a list or a table.
 */
export function placeOf(schema, root) {
  const full = resolve(schema, root);
  const options = (full.anyOf ?? []).map((each) => resolve(each, root));
  const isNullable = options.some((each) => each.type === "null");
  const others = options.filter((each) => each.type !== "null");
  const inner = isNullable && others.length === 1 ? others[0] : full;
  const description = full.description ?? inner.description ?? "";
  return { ...shapeOf(inner, root), schema: inner, description, fallback: full.default, isNullable };
}

/** A reference with what stands beside it: its own description goes first. */
function resolve(schema, root) {
  if (!schema.$ref) return schema;
  const name = schema.$ref.split("/").at(-1);
  const { $ref, ...beside } = schema;
  return { ...root.$defs[name], ...beside, name };
}

function shapeOf(schema, root) {
  if (schema.discriminator) return unionOf(schema, root);
  if (schema.properties) return { kind: "section", fields: fieldsOf(schema, root) };
  if (schema.enum) return { kind: "choice", values: schema.enum };
  if (schema.type === "boolean") return { kind: "switch" };
  if (schema.type === "integer" || schema.type === "number") return { kind: schema.type };
  if (schema.type === "string") return { kind: "text" };
  const takesText = (schema.anyOf ?? []).some((each) => each.type === "string");
  return { kind: "json", takesText };
}

const RANKS = { json: 1, section: 2, union: 2 };
const rankOf = ([, place, isRequired]) => (isRequired ? 0 : 10) + (RANKS[place.kind] ?? 0);

/** Required ones first, of either kind the small ones first. */
function fieldsOf(schema, root, without = "") {
  const required = new Set(schema.required ?? []);
  const names = Object.keys(schema.properties).filter((name) => name !== without);
  return names
    .map((name) => [name, placeOf(schema.properties[name], root), required.has(name)])
    .sort((a, b) => rankOf(a) - rankOf(b));
}

/** The section that has a default for the tag is the one that is meant without a tag. */
function unionOf(schema, root) {
  const { propertyName: tag, mapping } = schema.discriminator;
  const variants = new Map();
  let usual;
  for (const [value, $ref] of Object.entries(mapping)) {
    const section = resolve({ $ref }, root);
    variants.set(value, { description: section.description ?? "", fields: fieldsOf(section, root, tag), name: section.name });
    usual ??= section.properties[tag].default;
  }
  return { kind: "union", tag, variants, usual };
}

/** "from 1 to 64", "above 0"; "" without limits. */
export function limitsOf({ schema }) {
  const low = schema.minimum !== undefined ? `from ${schema.minimum}` : schema.exclusiveMinimum !== undefined ? `above ${schema.exclusiveMinimum}` : "";
  const high = schema.maximum !== undefined ? `to ${schema.maximum}` : schema.exclusiveMaximum !== undefined ? `below ${schema.exclusiveMaximum}` : "";
  return [low, low ? high : high.replace("to ", "at most ")].filter(Boolean).join(high.startsWith("below") ? ", " : " ");
}
