// The table of charts that the report of a job and a notebook read, too: onbeat/charts/table.json. Its colours become
// the variables --series-1 to --series-8 of the page.

import TABLE from "./charts.json" with { type: "json" };

TABLE.colours.forEach(({ light, dark }, index) => {
  document.documentElement.style.setProperty(`--series-${index + 1}`, `light-dark(${light}, ${dark})`);
});

export const DASHES = TABLE.dashes; // not by colour alone
export const GROUPS = TABLE.groups;

/**
 * `lines`: [name, series], each, with the series of what lies above and below as a third. `pattern`: each series that it
 * matches is a line, named by its first group; then `lines` are not drawn. A chart is shown when one of its lines has
 * values; `unlessZero`: and when one of them is not 0.
 */
export const CHARTS = TABLE.charts.map(({ pattern, ...chart }) => ({ ...chart, pattern: pattern && new RegExp(pattern) }));
