-- KEYS: job, events, traces. ARGV: broker, lease seconds, first iteration that is left to export ('' as it was).
-- One broker at a time exports the traces of a job: it takes and keeps the job, and says how far it is. A lease of 0 gives
-- the job back. Returns the first iteration that is left, or nil while another broker has the job, or without such a job.
if not field('state') then return nil end
local holder, time = redis.call('HGET', KEYS[3], 'broker'), tonumber(now())
if holder and holder ~= ARGV[1] and tonumber(redis.call('HGET', KEYS[3], 'held_until')) > time then return nil end
redis.call('HSET', KEYS[3], 'broker', ARGV[1], 'held_until', string.format('%.6f', time + tonumber(ARGV[2])))
local left = redis.call('HGET', KEYS[3], 'next_iteration') or '0'
-- Never backwards: a broker that was late may find the lease free, and say what others have done since.
if ARGV[3] ~= '' and tonumber(ARGV[3]) > tonumber(left) then
  left = ARGV[3]
  redis.call('HSET', KEYS[3], 'next_iteration', left)
end
return left
