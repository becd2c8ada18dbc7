-- KEYS: job, events, weights of the version.
-- ARGV: epoch, policy version, weights address, digest (hex), numbers (JSON, '' for none). A trainer serves weights from
-- here on. Only a job's first version is published by this: later ones by their commit, or never. A version that is
-- announced again, by a trainer that starts again, keeps its first numbers and must have its first weights: rollouts may
-- hold them. Returns announced | diverged, or nil when fenced.
if not is_owner(ARGV[1]) then return nil end
redis.call('HSETNX', KEYS[3], 'digest', ARGV[4])
if redis.call('HGET', KEYS[3], 'digest') ~= ARGV[4] then return 'diverged' end
redis.call('HSET', job, 'weights_address', ARGV[3], 'progress_at', now())
if ARGV[5] ~= '' then redis.call('HSETNX', KEYS[3], 'published', ARGV[5]) end
if not field('policy_version') then
  redis.call('HSET', job, 'policy_version', ARGV[2], 'weights_digest', ARGV[4])
  record('published', ARGV[2], ARGV[4])
  emit('weights.published', 'policy version ' .. ARGV[2], {policy_version = tonumber(ARGV[2])})
end
return 'announced'
