-- KEYS: job, events, micro batches, taken groups. ARGV: epoch, `rank:index`, then group ids.
-- Grants a trainer replica those groups that no replica has taken yet. Idempotent: repeating a call whose answer was
-- lost returns what was granted then. Stored with its number in the order of recording: that of a replay, whoever takes
-- over whose micro-batches. Returns the granted ids, comma separated ('' for none), or nil when fenced.
local micro_batches, taken = KEYS[3], KEYS[4]
local epoch, place = ARGV[1], ARGV[2]
local group_ids = slice(ARGV, 3)
if not is_owner(epoch) then return nil end
local recorded = redis.call('HGET', micro_batches, place)
if recorded then return string.match(recorded, '|(.*)') end
local granted = {}
for _, group_id in ipairs(group_ids) do
  if redis.call('SADD', taken, group_id) == 1 then granted[#granted + 1] = group_id end
end
local ids = table.concat(granted, ',')
if ids ~= '' then
  redis.call('HSET', micro_batches, place, redis.call('HLEN', micro_batches) .. '|' .. ids)
  redis.call('HSET', job, 'progress_at', now())
end
return ids
