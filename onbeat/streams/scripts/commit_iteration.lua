-- KEYS: job, events, iteration, advantages.
-- ARGV: epoch, iteration, new policy version, weights digest (hex), metrics (JSON), is_published ('1'/'0'), digest of
-- the groups that were used (hex), then group id / advantages of its responses (JSON) pairs, as far as they are reported.
-- Closes a drained iteration and publishes the next version in one move, unless rollouts are to stay on the one that they
-- have; the bound must then still let the next iteration open. Idempotent: a replayed commit is 'already', or 'diverged'
-- when its weights are not those of the first time. Returns committed | already | diverged | open | unbounded, or nil when
-- fenced.
local state = field('state')
if not is_owner(ARGV[1]) or (state ~= 'RUNNING' and state ~= 'PAUSED' and state ~= 'CANCELLING') then return nil end
local next_iteration = tonumber(ARGV[2]) + 1
if tonumber(field('next_iteration')) >= next_iteration then
  redis.call('HSET', job, 'progress_at', now())
  return redis.call('HGET', KEYS[3], 'weights_digest') == ARGV[4] and 'already' or 'diverged'
end
if redis.call('HGET', KEYS[3], 'state') ~= 'DRAINED' then return 'open' end
if ARGV[6] == '1' then
  redis.call('HSET', job, 'policy_version', ARGV[3], 'weights_digest', ARGV[4])
elseif tonumber(field('policy_version')) < next_iteration - tonumber(field('max_staleness')) then
  return 'unbounded'
end
local time = now()
redis.call('HSET', KEYS[3], 'state', 'COMMITTED', 'committed_at', time, 'metrics', ARGV[5], 'weights_digest', ARGV[4],
  'previous_commit_at', field('last_commit_at') or redis.call('HGET', KEYS[3], 'opened_at'))
for i = 8, #ARGV, 2 do redis.call('HSET', KEYS[4], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', job, 'next_iteration', next_iteration, 'last_commit_at', time, 'progress_at', time)
record('committed', ARGV[2], ARGV[3], ARGV[6], ARGV[4], ARGV[7])
emit('iteration.committed', 'iteration ' .. ARGV[2], {iteration = tonumber(ARGV[2]), is_published = ARGV[6] == '1',
  policy_version = tonumber(ARGV[3]), digest = ARGV[4]})
return 'committed'
