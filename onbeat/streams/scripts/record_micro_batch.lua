-- KEYS: job, events, micro batches. ARGV: epoch, index, group ids (comma separated).
-- Idempotent: repeating a call whose answer was lost changes nothing. Returns recorded | fenced | other.
if not is_owner(ARGV[1]) then return 'fenced' end
local index = tonumber(ARGV[2])
if redis.call('LLEN', KEYS[3]) == index then
  redis.call('RPUSH', KEYS[3], ARGV[3])
  return 'recorded'
end
return redis.call('LINDEX', KEYS[3], index) == ARGV[3] and 'recorded' or 'other'
