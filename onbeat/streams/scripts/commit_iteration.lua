-- KEYS: job, events, iteration, advantages.
-- ARGV: epoch, iteration, new policy version, weights digest (hex), metrics (JSON), is_published ('1'/'0'), digest of
-- the groups that were used (hex), then group id / advantages of its responses (JSON) pairs, as far as they are reported.
-- Closes a drained iteration and publishes the next version in one move, unless rollouts are to stay on the one that they
-- have; the bound must then still let the next iteration open. Idempotent: a replayed commit is 'already', or 'diverged'
-- when its weights are not those of the first time. Returns committed | already | diverged | open | unbounded, or nil when
-- fenced.
local unit, advantages = KEYS[3], KEYS[4]
local epoch, iteration, version, digest, metrics, is_published = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local used = ARGV[7]
local reported = slice(ARGV, 8)
local state = field('state')
if not is_owner(epoch) or (state ~= 'RUNNING' and state ~= 'PAUSED' and state ~= 'CANCELLING') then return nil end
local next_iteration = tonumber(iteration) + 1
if tonumber(field('next_iteration')) >= next_iteration then
  redis.call('HSET', job, 'progress_at', now())
  return redis.call('HGET', unit, 'weights_digest') == digest and 'already' or 'diverged'
end
if redis.call('HGET', unit, 'state') ~= 'DRAINED' then return 'open' end
if is_published == '1' then
  redis.call('HSET', job, 'policy_version', version, 'weights_digest', digest)
elseif redis.call('HEXISTS', unit, 'is_supervised') == 0 and tonumber(field('policy_version')) < next_iteration - tonumber(field('max_staleness')) then
  return 'unbounded'
end
local time = now()
redis.call('HSET', unit, 'state', 'COMMITTED', 'committed_at', time, 'metrics', metrics, 'weights_digest', digest,
  'committed_epoch', epoch, 'previous_commit_at', field('last_commit_at') or redis.call('HGET', unit, 'opened_at'))
for i = 1, #reported, 2 do redis.call('HSET', advantages, reported[i], reported[i + 1]) end
redis.call('HSET', job, 'next_iteration', next_iteration, 'last_commit_at', time, 'progress_at', time)
record('committed', iteration, version, is_published, digest, used)
emit('iteration.committed', 'iteration ' .. iteration, {iteration = tonumber(iteration), is_published = is_published == '1',
  policy_version = tonumber(version), digest = digest})
return 'committed'
