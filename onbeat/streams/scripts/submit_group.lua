-- KEYS: job, events, iteration, groups, busy, prompts, rollouts, lengths, spares; or an evaluation with its groups and
--       results.
-- ARGV: entry id, worker, consumer group, number of the iteration or evaluation, group id, RolloutGroup, versions of its
--       spans ('3' or '3,4', '' if the group failed), failure kind ('' if none), worker busy seconds,
--       iteration | evaluation, digest of the RolloutGroup (hex), row of the data ('' if of no interest), tokens of a
--       response, whether its rewards differ ('1'/'0').
-- The one place where a group is accepted. If the iteration has spare prompts, a group whose rewards do not differ is
-- replaced in the same move, by the next of them. Returns accepted | stale | duplicate | lost | closed.
local state = field('state')
if state ~= 'RUNNING' and state ~= 'PAUSED' then return 'closed' end
local kind = ARGV[10]
local ledger = redis.call('HGET', KEYS[4], ARGV[5])
local unit_state = redis.call('HGET', KEYS[3], 'state')
if not ledger or not unit_state then return 'closed' end
if string.sub(ledger, 1, 9) == 'accepted:' then
  redis.call('HINCRBY', KEYS[3], 'num_duplicate', 1)
  return 'duplicate'
end
local pending = redis.call('XPENDING', KEYS[6], ARGV[3], ARGV[1], ARGV[1], 1)
if not pending[1] or pending[1][2] ~= ARGV[2] or ledger ~= 'waiting:' .. ARGV[1] then
  redis.call('HINCRBY', KEYS[3], 'num_lost', 1)
  emit('group.lost', ARGV[2] .. ' submitted ' .. ARGV[5] .. ' without holding its lease',
    {[kind] = tonumber(ARGV[4]), group_id = ARGV[5], worker_id = ARGV[2]})
  return 'lost'
end
local version = redis.call('HGET', KEYS[3], 'policy_version')
if unit_state ~= 'OPEN' or (ARGV[8] == '' and ARGV[7] ~= version) then
  redis.call('HINCRBY', KEYS[3], 'num_stale', 1)
  emit('group.stale', ARGV[2] .. ' submitted ' .. ARGV[5] .. ' with versions [' .. ARGV[7] .. '], wanted ' .. version,
    {[kind] = tonumber(ARGV[4]), group_id = ARGV[5], worker_id = ARGV[2]})
  if pending[1][3] < 86400000 then -- handed back, once: not an attempt
    local attempts = math.max(0, pending[1][4] - 1)
    redis.call('XCLAIM', KEYS[6], ARGV[3], ARGV[2], 0, ARGV[1], 'IDLE', 86400000, 'RETRYCOUNT', attempts, 'JUSTID')
  end
  return 'stale'
end
local time = now()
local entry = redis.call('XADD', KEYS[7], '*', kind, ARGV[4], 'group_id', ARGV[5], 'group', ARGV[6])
redis.call('HSET', KEYS[4], ARGV[5], 'accepted:' .. entry)
redis.call('XACK', KEYS[6], ARGV[3], ARGV[1])
redis.call('XDEL', KEYS[6], ARGV[1])
if ARGV[12] ~= '' then redis.call('HSET', KEYS[8], ARGV[12], ARGV[13]) end
redis.call('HSET', job, 'progress_at', time)
redis.call('HSETNX', KEYS[3], 'first_accepted_at', time)
if kind == 'iteration' then -- not of an evaluation: the iteration of its number may be over
  redis.call('HSET', KEYS[5], ARGV[2], ARGV[9])
  record('accepted', ARGV[4], ARGV[5], ARGV[7], ARGV[2], entry, ARGV[11], string.match(ARGV[8], '^[^:]*'))
end
if ARGV[8] ~= '' then
  redis.call('HINCRBY', KEYS[3], 'num_failed_groups', 1)
  emit('group.failed', ARGV[5] .. ': ' .. ARGV[8],
    {[kind] = tonumber(ARGV[4]), group_id = ARGV[5], kind = ARGV[8], worker_id = ARGV[2]})
end
if kind == 'iteration' and ARGV[14] == '0' and redis.call('HEXISTS', KEYS[3], 'num_replaced') == 1 then
  local group_id, task = redis.call('LPOP', KEYS[9]), redis.call('LPOP', KEYS[9])
  if group_id then
    put_prompt(kind, ARGV[4], KEYS[4], KEYS[6], group_id, task)
    redis.call('HINCRBY', KEYS[3], 'num_groups', 1)
    redis.call('HINCRBY', KEYS[3], 'num_replaced', 1)
    record('replaced', ARGV[4], ARGV[5], group_id)
  else
    redis.call('HINCRBY', KEYS[3], 'num_not_replaced', 1)
  end
end
if redis.call('HINCRBY', KEYS[3], 'num_accepted', 1) == tonumber(redis.call('HGET', KEYS[3], 'num_groups')) then
  redis.call('HSET', KEYS[3], 'state', 'DRAINED', 'drained_at', time)
  local num_short = nil
  if kind == 'iteration' then
    redis.call('DEL', KEYS[9])
    num_short = redis.call('HGET', KEYS[3], 'num_not_replaced')
  end
  if num_short then
    local groups = num_short == '1' and ' group' or ' groups'
    emit('iteration.short', 'iteration ' .. ARGV[4] .. ' has used all of its prompts, and is ' .. num_short .. groups ..
      ' with different rewards short (rollout.max_prompts_per_iteration)',
      {iteration = tonumber(ARGV[4]), num_groups = tonumber(num_short)})
  end
  emit(kind .. '.drained', kind .. ' ' .. ARGV[4], {[kind] = tonumber(ARGV[4])})
end
return 'accepted'
