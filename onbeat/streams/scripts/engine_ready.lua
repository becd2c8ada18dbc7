-- KEYS: job, events, versions. ARGV: policy version, worker, pull seconds, apply seconds, bytes.
-- A rollout serves a version from now on; the first one to do so sets the version's time.
redis.call('HSETNX', KEYS[3], ARGV[1], now())
emit('worker.updated', ARGV[2] .. ' serves policy version ' .. ARGV[1], {policy_version = tonumber(ARGV[1]),
  worker_id = ARGV[2], pull_s = tonumber(ARGV[3]), apply_s = tonumber(ARGV[4]), num_bytes = tonumber(ARGV[5])})
return 1
