/**
 * Arithmetic of charts and timelines: scales, ticks, thinning, search. Pure, no DOM.
 */

/** [smallest, largest] of the finite values, or null without any. */
export function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

/** Maps the domain's ends onto the range's ends. A domain of no width maps to the middle. */
export function linear([d0, d1], [r0, r1]) {
  if (d0 === d1) return () => (r0 + r1) / 2;
  const slope = (r1 - r0) / (d1 - d0);
  return (value) => r0 + (value - d0) * slope;
}

/** Round steps of 1, 2 or 5 times a power of ten: about `count` ticks within [low, high]. */
export function ticks(low, high, count = 5) {
  if (!(high > low)) return Number.isFinite(low) ? [low] : [];
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= rough * 0.999) ?? 10);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  // Divided where the step is below 1: 3 / 10 is 0.3, and 3 * 0.1 is not.
  const value = (index) => (step < 1 ? index / Math.round(1 / step) : index * step);
  return Array.from({ length: last - first + 1 }, (_, index) => value(first + index));
}

/** [low, high] widened to round values. */
export function niceDomain([low, high], count = 10) {
  const values = ticks(low, high, count);
  if (values.length < 2) return [low, high];
  const step = values[1] - values[0];
  const [first, last] = [values[0], values[values.length - 1]];
  return [low < first - step * 1e-6 ? first - step : first, high > last + step * 1e-6 ? last + step : last];
}

/** Whole numbers only, for iterations. */
export function wholeTicks(low, high, count = 5) {
  return ticks(low, high, Math.min(count, Math.max(1, high - low))).filter(Number.isInteger);
}

/** Powers of ten within [low, high], at most `count` of them; with their 2 and 5 fold where there are few. */
export function logTicks(low, high, count = 5) {
  const from = Math.floor(Math.log10(low));
  const to = Math.ceil(Math.log10(high));
  const factors = high / low > 100 ? [1] : [1, 2, 5];
  const every = Math.max(1, Math.ceil((to - from) / count));
  const values = [];
  for (let power = from; power <= to; power += every) {
    for (const factor of factors) values.push(Number(`${factor}e${power}`));
  }
  return values.filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

/** Index of the element whose `at(element)` is nearest to `value`; -1 of an empty array. Sorted by `at`. */
export function nearest(sorted, value, at = (element) => element) {
  if (!sorted.length) return -1;
  let low = 0;
  let high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at(sorted[middle]) < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - at(sorted[low - 1]) <= at(sorted[low]) - value ? low - 1 : low;
}

/** At most `most` of the points [x, y]: first, last, and the lowest and highest of each stretch between them. */
export function thin(points, most = 600) {
  if (points.length <= most) return points;
  const kept = [points[0]];
  for (const [start, end] of stretches(1, points.length - 1, Math.floor((most - 2) / 2))) {
    let low = start;
    let high = start;
    for (let index = start; index < end; index += 1) {
      if (points[index][1] < points[low][1]) low = index;
      if (points[index][1] > points[high][1]) high = index;
    }
    kept.push(points[Math.min(low, high)]);
    if (low !== high) kept.push(points[Math.max(low, high)]);
  }
  kept.push(points[points.length - 1]);
  return kept;
}

/** The same of a band [x, low, high]: the hull of each stretch. */
export function thinBand(band, most = 600) {
  if (band.length <= most) return band;
  const inner = Array.from(stretches(1, band.length - 1, most - 2), ([start, end]) => {
    let [x, low, high] = band[start];
    for (let index = start; index < end; index += 1) {
      low = Math.min(low, band[index][1]);
      high = Math.max(high, band[index][2]);
    }
    x = (x + band[end - 1][0]) / 2;
    return [x, low, high];
  });
  return [band[0], ...inner, band[band.length - 1]];
}

/** Mean of each point and those before it, `window` in all; fewer at the beginning. */
export function trailingMean(points, window) {
  let sum = 0;
  return points.map(([x, y], index) => {
    sum += y - (index >= window ? points[index - window][1] : 0);
    return [x, sum / Math.min(index + 1, window)];
  });
}

function* stretches(from, to, number) {
  const size = (to - from) / number;
  for (let index = 0; index < number; index += 1) {
    const start = from + Math.floor(index * size);
    const end = from + Math.floor((index + 1) * size);
    if (end > start) yield [start, end];
  }
}
