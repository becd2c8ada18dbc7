-- KEYS: job, events, versions, weights of the version. ARGV: policy version, worker, its numbers (JSON of WeightUpdate).
-- A rollout serves a version from now on; the first one to do so sets the version's time. A rollout that comes back to a
-- version keeps its first numbers there; the event has the new ones. Returns 1, or 0 without such a job.
local versions, weights = KEYS[3], KEYS[4]
local version, worker, numbers = ARGV[1], ARGV[2], ARGV[3]
if not field('state') then return 0 end
redis.call('HSETNX', versions, version, now())
redis.call('HSETNX', weights, 'rollout:' .. worker, numbers)
local update = cjson.decode(numbers)
emit('worker.updated', worker .. ' serves policy version ' .. version, {policy_version = tonumber(version),
  worker_id = worker, num_bytes = update.received_bytes, pull_s = update.pull_s, apply_s = update.apply_s,
  load_s = update.load_s, open_s = update.open_s})
return 1
