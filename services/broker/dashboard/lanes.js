// Lanes of a timeline on a canvas: quick with 10,000 spans. Kinds differ in pattern as well as in colour.

import { clock, duration } from "./format.js";
import { linear, ticks } from "./spans.js";

export const KINDS = {
  generate: { name: "generate", series: 1, pattern: "solid" },
  score: { name: "score", series: 2, pattern: "dots" },
  environment: { name: "environment", series: 2, pattern: "rising" },
  pull: { name: "pull weights", series: 5, pattern: "rising" },
  load: { name: "load weights", series: 4, pattern: "cross" },
  micro_batch: { name: "micro-batch", series: 3, pattern: "solid" },
  optimizer: { name: "optimizer", series: 6, pattern: "upright" },
  publish: { name: "publish weights", series: 7, pattern: "level" },
  checkpoint: { name: "checkpoint", series: 8, pattern: "cross" },
  wait: { name: "wait", series: 8, pattern: "hollow" },
};
export const TOP = 22; // numbers of the iterations
export const OVERLAP = 12; // the strip below them
export const BOTTOM = 20; // seconds
const TILE = 6;

/** A span in words. */
export function describe(span, origin) {
  const isWeights = span.kind === "pull" || span.kind === "load";
  const what = `${isWeights ? "policy version" : "iteration"} ${span.iteration}`;
  const group = span.group_id ? `group ${span.group_id} of ${what}` : what;
  const from = `from ${(span.start - origin).toFixed(2)} s (${clock(span.start)})`;
  return `${span.lane}: ${KINDS[span.kind]?.name ?? span.kind}, ${group}, ${duration(span.end - span.start)}, ${from}.`;
}

/** How a kind is painted, in the colour of an element. */
function paint(context, pattern, colour) {
  if (pattern === "solid") return colour;
  const ratio = devicePixelRatio;
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(TILE * ratio);
  const brush = tile.getContext("2d");
  brush.scale(tile.width / TILE, tile.height / TILE);
  brush.strokeStyle = brush.fillStyle = colour;
  brush.globalAlpha = pattern === "hollow" ? 0 : 0.35;
  brush.fillRect(0, 0, TILE, TILE);
  brush.globalAlpha = pattern === "hollow" ? 0.45 : 1;
  brush.lineWidth = pattern === "hollow" ? 0.8 : 1.6;
  brush.beginPath();
  if (pattern === "dots") brush.arc(TILE / 2, TILE / 2, 1.5, 0, 7);
  if (pattern === "upright") lines(brush, [[TILE / 2, 0, TILE / 2, TILE]]);
  if (pattern === "level") lines(brush, [[0, TILE / 2, TILE, TILE / 2]]);
  if (["rising", "cross", "hollow"].includes(pattern))
    lines(brush, [
      [-1, TILE + 1, TILE + 1, -1],
      [-1, 1, 1, -1],
      [TILE - 1, TILE + 1, TILE + 1, TILE - 1],
    ]);
  if (pattern === "cross") lines(brush, [[-1, -1, TILE + 1, TILE + 1]]);
  if (pattern === "dots") brush.fill();
  else brush.stroke();
  const fill = context.createPattern(tile, "repeat");
  fill.setTransform(new DOMMatrix([1 / ratio, 0, 0, 1 / ratio, 0, 0]));
  return fill;
}

function lines(brush, segments) {
  for (const [x0, y0, x1, y1] of segments) {
    brush.moveTo(x0, y0);
    brush.lineTo(x1, y1);
  }
}

/** A small picture of a kind, for the legend. Its element's colour is the kind's. */
export function drawSwatch(canvas) {
  const context = sized(canvas, 22, 12);
  const { pattern } = KINDS[canvas.dataset.kind];
  const colour = getComputedStyle(canvas).color;
  context.fillStyle = paint(context, pattern, colour);
  context.fillRect(0, 0, 22, 12);
  context.strokeStyle = colour;
  context.strokeRect(0.5, 0.5, 21, 11);
}

function sized(canvas, width, height) {
  const ratio = devicePixelRatio;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

/** Colours as the theme has them now: `of(name)` resolves a CSS variable. */
export function palette(of) {
  const kinds = Object.entries(KINDS).map(([kind, { series }]) => [kind, of(`--series-${series}`)]);
  return {
    kinds: Object.fromEntries(kinds),
    text: of("--text"),
    muted: of("--muted"),
    border: of("--border"),
    band: of("--raised"),
    surface: of("--surface"),
  };
}

/**
 * Draws lanes [{top, height, items, numRows}] of the seconds `view`, with bands of iterations and a strip where both
 * sides work. `chosen`: an item that is outlined.
 */
export function drawLanes(canvas, { width, height, lanes, view, bands, both, chosen, origin, colours }) {
  const context = sized(canvas, width, height);
  const x = linear(view, [0, width]);
  const visible = ([start, end]) => end > view[0] && start < view[1];
  context.font = `12px ${getComputedStyle(canvas).fontFamily}`;
  context.textBaseline = "middle";
  drawBands(
    context,
    bands.filter(({ start, end }) => visible([start, end])),
    { x, width, height, colours },
  );
  context.fillStyle = colours.text;
  for (const [start, end] of both.filter(visible))
    context.fillRect(x(start), TOP + 3, Math.max(0.5, x(end) - x(start)), OVERLAP - 6);
  const paints = Object.fromEntries(
    Object.entries(KINDS).map(([kind, { pattern }]) => [kind, paint(context, pattern, colours.kinds[kind])]),
  );
  for (const lane of lanes) drawLane(context, lane, { x, view, width, paints, colours });
  drawSeconds(context, { x, view, origin, width, height, colours });
  if (chosen) outline(context, chosen, x, colours);
}

function drawBands(context, bands, { x, width, height, colours }) {
  for (const { iteration, start, end } of bands) {
    const [left, right] = [Math.max(0, x(start)), Math.min(width, x(end))];
    if (iteration % 2 === 0) {
      context.fillStyle = colours.band;
      context.fillRect(left, 0, right - left, height - BOTTOM);
    }
    context.fillStyle = colours.border;
    context.fillRect(Math.round(x(end)) - 0.5, 0, 1, height - BOTTOM);
    const label = right - left > 90 ? `iteration ${iteration}` : String(iteration);
    context.fillStyle = colours.muted;
    if (context.measureText(label).width < right - left - 6) context.fillText(label, left + 4, TOP / 2);
  }
}

function drawLane(context, lane, { x, view, width, paints, colours }) {
  context.fillStyle = colours.border;
  context.fillRect(0, lane.top - 0.5, width, 1);
  let last = { right: -1, row: null, kind: null };
  for (const item of lane.items) {
    const { span } = item;
    if (span.end < view[0] || span.start > view[1]) continue;
    const { left, right, top, height } = box(item, lane, x, width);
    if (right <= last.right && item.row === last.row && span.kind === last.kind) continue; // not one pixel more
    last = { right, row: item.row, kind: span.kind };
    const gap = right - left > 3 ? 0.75 : 0; // so that neighbours are told apart
    context.fillStyle = paints[span.kind] ?? colours.muted;
    context.fillRect(left, top, Math.max(0.75, right - left - gap), height);
    if (right - left > 64 && height > 15) label(context, span.kind, left, top + height / 2, colours);
  }
}

function label(context, kind, left, middle, colours) {
  const text = KINDS[kind]?.name ?? kind;
  const { width } = context.measureText(text);
  if (kind !== "wait") {
    context.fillStyle = colours.surface;
    context.fillRect(left + 3, middle - 7, width + 6, 14);
  }
  context.fillStyle = colours.text;
  context.fillText(text, left + 6, middle);
}

/** Where an item is drawn, in pixels. */
export function box(item, lane, x, width) {
  const [left, right] = [Math.max(-1, x(item.span.start)), Math.min(width + 1, x(item.span.end))];
  const inner = lane.height - 4;
  if (item.row === -1)
    return { left, right, top: lane.top + 2, height: item.span.kind === "pull" ? Math.max(4, inner / 4) : inner };
  const rowHeight = inner / lane.numRows;
  return {
    left,
    right,
    top: lane.top + 2 + item.row * rowHeight,
    height: Math.max(1, rowHeight - (rowHeight > 4 ? 1 : 0)),
  };
}

function outline(context, { item, lane }, x, colours) {
  const { left, right, top, height } = box(item, lane, x, Infinity);
  context.strokeStyle = colours.text;
  context.lineWidth = 2;
  context.strokeRect(left - 1, top - 1, Math.max(3, right - left) + 1, height + 2);
}

function drawSeconds(context, { x, view, origin, width, height, colours }) {
  context.fillStyle = colours.border;
  context.fillRect(0, height - BOTTOM, width, 1);
  for (const value of ticks(view[0] - origin, view[1] - origin, Math.max(2, Math.floor(width / 90)))) {
    const at = x(value + origin);
    context.fillStyle = colours.border;
    context.fillRect(at, height - BOTTOM, 1, 4);
    context.fillStyle = colours.muted;
    const text = `${Number(value.toPrecision(6))} s`;
    if (at + context.measureText(text).width < width) context.fillText(text, at + 3, height - BOTTOM / 2 + 2);
  }
}
