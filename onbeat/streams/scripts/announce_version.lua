-- KEYS: job, events, weights of the version.
-- ARGV: epoch, policy version, weights address, digest (hex), numbers (JSON, '' for none). A trainer serves weights from
-- here on. Only a job's first version is published by this: later ones by their commit, or never. A version that is
-- announced again, by a trainer that starts again, keeps its first numbers and must have its first weights: rollouts may
-- hold them. Returns announced | diverged, or nil when fenced.
local weights = KEYS[3]
local epoch, version, address, digest, numbers = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if not is_owner(epoch) then return nil end
redis.call('HSETNX', weights, 'digest', digest)
if redis.call('HGET', weights, 'digest') ~= digest then return 'diverged' end
redis.call('HSET', job, 'weights_address', address, 'progress_at', now())
if numbers ~= '' then redis.call('HSETNX', weights, 'published', numbers) end
if not field('policy_version') then
  redis.call('HSET', job, 'policy_version', version, 'weights_digest', digest)
  record('published', version, digest)
  emit('weights.published', 'policy version ' .. version, {policy_version = tonumber(version)})
end
return 'announced'
