-- KEYS: job, events, iteration, groups, busy, prompts, rollouts, lengths, spares, lost rollouts, outcomes; or an evaluation
--       with its groups and results.
-- ARGV: entry id, worker, consumer group, number of the iteration or evaluation, group id, RolloutGroup, versions of its
--       spans ('3' or '3,4', '' if the group failed), failure kind ('' if none), worker busy seconds,
--       iteration | evaluation, digest of the RolloutGroup (hex), row of the data ('' if of no interest), tokens of a
--       response, whether it has signal ('1'/'0'), when it was generated (JSON: [seconds before now, until] pairs),
--       source of its prompt ('' or absent: the job has one only), its outcome ('' or absent: no choice needs it).
-- The one place where a group is accepted. If the iteration has spare prompts, a group without signal is
-- replaced in the same move, by the next of them, of the same source. Returns accepted | stale | duplicate | lost | closed.
local unit, groups, busy, prompts, results, lengths = KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local spares, lost_rollouts, outcomes = KEYS[9], KEYS[10], KEYS[11]
local entry, worker, consumers, number, group_id, payload = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local span_versions, failure, busy_s, kind, digest, row = ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12]
local num_tokens, has_signal, generated, source = ARGV[13], ARGV[14], ARGV[15], ARGV[16] or ''
local outcome = ARGV[17] or ''

-- Adds a group's intervals to those in which the iteration was generated. They are kept in order, apart from each other
-- and few: of too many, the two with the shortest gap become one.
local function add_generated(ago, time)
  local opened_at = tonumber(redis.call('HGET', unit, 'opened_at'))
  local intervals, union = cjson.decode(redis.call('HGET', unit, 'generated') or '[]'), {}
  for _, interval in ipairs(ago) do
    local first, last = math.max(opened_at, time - interval[1]), time - interval[2]
    if last > first then intervals[#intervals + 1] = {first, last} end
  end
  table.sort(intervals, function(one, other) return one[1] < other[1] end)
  for _, interval in ipairs(intervals) do
    local before = union[#union]
    if before and interval[1] <= before[2] then before[2] = math.max(before[2], interval[2])
    else union[#union + 1] = interval end
  end
  while #union > 64 do
    local shortest = 1
    for i = 2, #union - 1 do
      if union[i + 1][1] - union[i][2] < union[shortest + 1][1] - union[shortest][2] then shortest = i end
    end
    union[shortest][2] = union[shortest + 1][2]
    table.remove(union, shortest + 1)
  end
  if union[1] then redis.call('HSET', unit, 'generated', cjson.encode(union)) end
end

-- Takes the next spare prompt: its group id and PromptTask, or nothing. One of several sources gets the next group id,
-- behind the bytes of its message: the last value of a field counts.
local function take_spare()
  if source == '' then
    local spare_id, task = redis.call('LPOP', spares), redis.call('LPOP', spares)
    return spare_id, task
  end
  local place = redis.call('LPOS', spares, source)
  if not place then return nil end
  local task = redis.call('LINDEX', spares, place + 1)
  redis.call('LREM', spares, 1, source)
  redis.call('LREM', spares, 1, task)
  local spare_id = number .. '-' .. redis.call('HGET', unit, 'num_groups')
  return spare_id, task .. '\10' .. string.char(#spare_id) .. spare_id
end

local state = field('state')
if state ~= 'RUNNING' and state ~= 'PAUSED' then return 'closed' end
local ledger = redis.call('HGET', groups, group_id)
local unit_state = redis.call('HGET', unit, 'state')
if not ledger or not unit_state then return 'closed' end
if string.sub(ledger, 1, 9) == 'accepted:' then
  redis.call('HINCRBY', unit, 'num_duplicate', 1)
  return 'duplicate'
end
local pending = redis.call('XPENDING', prompts, consumers, entry, entry, 1)
if not pending[1] or pending[1][2] ~= worker or ledger ~= 'waiting:' .. entry then
  redis.call('HINCRBY', unit, 'num_lost', 1)
  emit('group.lost', worker .. ' submitted ' .. group_id .. ' without holding its lease',
    {[kind] = tonumber(number), group_id = group_id, worker_id = worker})
  return 'lost'
end
local version = redis.call('HGET', unit, 'policy_version')
if unit_state ~= 'OPEN' or (failure == '' and span_versions ~= version) then
  redis.call('HINCRBY', unit, 'num_stale', 1)
  emit('group.stale', worker .. ' submitted ' .. group_id .. ' with versions [' .. span_versions .. '], wanted ' .. version,
    {[kind] = tonumber(number), group_id = group_id, worker_id = worker})
  if pending[1][3] < 86400000 then -- handed back, once: not an attempt
    local attempts = math.max(0, pending[1][4] - 1)
    redis.call('XCLAIM', prompts, consumers, worker, 0, entry, 'IDLE', 86400000, 'RETRYCOUNT', attempts, 'JUSTID')
    redis.call('HINCRBY', job, 'num_handed_back', 1)
  end
  return 'stale'
end
local time = now()
local accepted_entry = redis.call('XADD', results, '*', kind, number, 'group_id', group_id, 'group', payload)
redis.call('HSET', groups, group_id, 'accepted:' .. accepted_entry)
redis.call('XACK', prompts, consumers, entry)
redis.call('XDEL', prompts, entry)
redis.call('HDEL', lost_rollouts, entry)
if row ~= '' then redis.call('HSET', lengths, row, num_tokens) end
redis.call('HSET', job, 'progress_at', time)
redis.call('HSETNX', unit, 'first_accepted_at', time)
if kind == 'iteration' then -- not of an evaluation: the iteration of its number may be over
  redis.call('HSET', busy, worker, busy_s)
  add_generated(cjson.decode(generated or '[]'), tonumber(time))
  if outcome ~= '' then redis.call('HSET', outcomes, group_id, outcome) end
  record('accepted', number, group_id, span_versions, worker, accepted_entry, digest, string.match(failure, '^[^:]*'))
end
if failure ~= '' then
  redis.call('HINCRBY', unit, 'num_failed_groups', 1)
  emit('group.failed', group_id .. ': ' .. failure,
    {[kind] = tonumber(number), group_id = group_id, kind = failure, worker_id = worker})
end
if kind == 'iteration' and has_signal == '0' and redis.call('HEXISTS', unit, 'num_replaced') == 1 then
  local spare_id, task = take_spare()
  if spare_id then
    put_prompt(kind, number, groups, prompts, spare_id, task)
    redis.call('HINCRBY', unit, 'num_groups', 1)
    redis.call('HINCRBY', unit, 'num_replaced', 1)
    record('replaced', number, group_id, spare_id)
  else
    redis.call('HINCRBY', unit, 'num_not_replaced', 1)
  end
end
if redis.call('HINCRBY', unit, 'num_accepted', 1) == tonumber(redis.call('HGET', unit, 'num_groups')) then
  redis.call('HSET', unit, 'state', 'DRAINED', 'drained_at', time)
  local num_short = nil
  if kind == 'iteration' then
    redis.call('DEL', spares)
    num_short = redis.call('HGET', unit, 'num_not_replaced')
  end
  if num_short then
    local noun = num_short == '1' and ' group' or ' groups'
    local used = source == '' and ' has used all of its prompts' or ' has used all prompts of a source'
    emit('iteration.short', 'iteration ' .. number .. used .. ', and is ' .. num_short .. noun ..
      ' with signal short (rollout.max_prompts_per_iteration)',
      {iteration = tonumber(number), num_groups = tonumber(num_short)})
  end
  emit(kind .. '.drained', 'all responses of ' .. kind .. ' ' .. number .. ' are in', {[kind] = tonumber(number)})
end
return 'accepted'
