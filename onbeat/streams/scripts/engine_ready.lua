-- KEYS: job, events, versions, weights of the version. ARGV: policy version, worker, its numbers (JSON of WeightUpdate).
-- A rollout serves a version from now on; the first one to do so sets the version's time. A rollout that comes back to a
-- version keeps its first numbers there; the event has the new ones. Returns 1, or 0 without such a job.
if not field('state') then return 0 end
redis.call('HSETNX', KEYS[3], ARGV[1], now())
redis.call('HSETNX', KEYS[4], 'rollout:' .. ARGV[2], ARGV[3])
local update = cjson.decode(ARGV[3])
emit('worker.updated', ARGV[2] .. ' serves policy version ' .. ARGV[1], {policy_version = tonumber(ARGV[1]),
  worker_id = ARGV[2], num_bytes = update.received_bytes, pull_s = update.pull_s, apply_s = update.apply_s,
  load_s = update.load_s, open_s = update.open_s})
return 1
