-- KEYS: job, events, micro batches, taken groups. ARGV: epoch, `rank:index`, then group ids.
-- Grants a trainer replica those groups that no replica has taken yet. Idempotent: repeating a call whose answer was
-- lost returns what was granted then. Stored with its number in the order of recording: that of a replay, whoever takes
-- over whose micro-batches. Returns the granted ids, comma separated ('' for none), or nil when fenced.
if not is_owner(ARGV[1]) then return nil end
local recorded = redis.call('HGET', KEYS[3], ARGV[2])
if recorded then return string.match(recorded, '|(.*)') end
local granted = {}
for i = 3, #ARGV do
  if redis.call('SADD', KEYS[4], ARGV[i]) == 1 then granted[#granted + 1] = ARGV[i] end
end
local ids = table.concat(granted, ',')
if ids ~= '' then
  redis.call('HSET', KEYS[3], ARGV[2], redis.call('HLEN', KEYS[3]) .. '|' .. ids)
  redis.call('HSET', job, 'progress_at', now())
end
return ids
