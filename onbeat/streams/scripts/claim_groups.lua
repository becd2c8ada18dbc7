-- KEYS: job, events, prompts, lost rollouts. ARGV: worker, count, lease milliseconds, consumer group.
-- First takes over entries that were handed back or whose lease ran out, then new ones. A lease that ran out is no
-- attempt: its rollout is lost, which an event reports and the entry remembers.
-- Returns {entry id, attempt, task, ids of rollouts that were lost with it (JSON, or '')}, flat.
local prompts, lost_rollouts = KEYS[3], KEYS[4]
local worker, count, lease_ms, consumers = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local state = field('state')
if state ~= 'RUNNING' then return {} end
local want, claimed = tonumber(count), {}

-- Hands back, as if they had never been claimed, the entries whose lease ran out.
local function hand_back_lost()
  local holders, groups_of = {}, {}
  local num_pending = redis.call('XPENDING', prompts, consumers)[1]
  if num_pending == 0 then return end
  for _, pending in ipairs(redis.call('XPENDING', prompts, consumers, 'IDLE', lease_ms, '-', '+', num_pending)) do
    local entry, holder, idle, attempts = pending[1], pending[2], pending[3], pending[4]
    local stored = idle < 86400000 and redis.call('XRANGE', prompts, entry, entry)[1]
    if stored then -- neither handed back already, nor deleted
      redis.call('XCLAIM', prompts, consumers, holder, 0, entry, 'IDLE', 86400000,
        'RETRYCOUNT', math.max(0, attempts - 1), 'JUSTID')
      local lost = cjson.decode(redis.call('HGET', lost_rollouts, entry) or '[]')
      lost[#lost + 1] = holder
      redis.call('HSET', lost_rollouts, entry, cjson.encode(lost))
      if not groups_of[holder] then
        holders[#holders + 1] = holder
        groups_of[holder] = {}
      end
      local group_ids = groups_of[holder]
      for i = 1, #stored[2], 2 do
        if stored[2][i] == 'group_id' then group_ids[#group_ids + 1] = stored[2][i + 1] end
      end
    end
  end
  for _, holder in ipairs(holders) do
    local group_ids = groups_of[holder]
    local shown = table.concat(group_ids, ', ', 1, math.min(#group_ids, 8)) .. (#group_ids > 8 and ', ...' or '')
    local noun = #group_ids == 1 and ' group' or ' groups'
    emit('worker.lost', holder .. ' died or fell silent with ' .. #group_ids .. noun .. ', generated again: ' .. shown,
      {worker_id = holder, group_ids = group_ids})
  end
end

local function add(entries)
  for _, entry in ipairs(entries) do
    if entry then -- Redis 6 hands out what was deleted while it was claimed, as nothing
      local fields, task = entry[2], nil
      for i = 1, #fields, 2 do if fields[i] == 'task' then task = fields[i + 1] end end
      local pending = redis.call('XPENDING', prompts, consumers, entry[1], entry[1], 1)
      claimed[#claimed + 1] = entry[1]
      claimed[#claimed + 1] = tostring(pending[1][4])
      claimed[#claimed + 1] = task or '' -- not one of ours
      claimed[#claimed + 1] = redis.call('HGET', lost_rollouts, entry[1]) or ''
    end
  end
end
hand_back_lost()
local cursor, num_orphans = '0-0', 0
repeat -- one call looks at a bounded part of the pending entries
  local answer = redis.call('XAUTOCLAIM', prompts, consumers, worker, lease_ms, cursor, 'COUNT', want - num_orphans)
  cursor, num_orphans = answer[1], num_orphans + #answer[2]
  add(answer[2])
until cursor == '0-0' or num_orphans >= want
if num_orphans < want then
  local fresh = redis.call('XREADGROUP', 'GROUP', consumers, worker, 'COUNT', want - num_orphans, 'STREAMS', prompts, '>')
  if fresh then
    add(fresh[1][2])
    if tonumber(field('max_staleness')) > 0 and num_unclaimed(prompts, consumers) == 0 then
      emit('prompts.claimed', 'all prompts are claimed', {}) -- the next iteration may be due
    end
  end
end
return claimed
