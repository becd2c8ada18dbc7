-- KEYS: job, events, prompts. ARGV: worker, count, lease milliseconds, consumer group.
-- First takes over entries whose lease ran out, then new ones. Returns {entry id, attempt, task} triples, flat.
local prompts = KEYS[3]
local worker, count, lease_ms, consumers = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local state = field('state')
if state ~= 'RUNNING' then return {} end
local want, claimed = tonumber(count), {}
local function add(entries)
  for _, entry in ipairs(entries) do
    if entry then -- Redis 6 hands out what was deleted while it was claimed, as nothing
      local fields, task = entry[2], nil
      for i = 1, #fields, 2 do if fields[i] == 'task' then task = fields[i + 1] end end
      local pending = redis.call('XPENDING', prompts, consumers, entry[1], entry[1], 1)
      claimed[#claimed + 1] = entry[1]
      claimed[#claimed + 1] = tostring(pending[1][4])
      claimed[#claimed + 1] = task or '' -- not one of ours
    end
  end
end
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
