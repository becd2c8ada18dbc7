// Which rollouts are silent. Their heartbeats carry a clock that may differ from the broker's by minutes.

import { serverNow } from "./api.js";

const SILENT_S = 10; // as the broker's doctor counts it
const NEWEST_S = 5; // the newest heartbeat of a pool is not older, if any of its rollouts lives

/** Now by the clock of the heartbeats, as far as they tell. `workers`: all of a pool. */
export function heartbeatTime(workers) {
  const now = serverNow();
  const newest = workers.reduce((latest, { last_seen_at: seen }) => Math.max(latest, seen), -Infinity);
  return workers.length ? Math.min(Math.max(now, newest), newest + NEWEST_S) : now;
}

/** `now`: of `heartbeatTime`. */
export const isSilent = (worker, now) => now - worker.last_seen_at > SILENT_S;
