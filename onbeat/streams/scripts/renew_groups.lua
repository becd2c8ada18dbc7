-- KEYS: job, events, prompts. ARGV: worker, consumer group, idle ms to set, then entry ids.
-- Idle 0 renews the worker's leases; a large idle hands them back. Entries owned by others are left alone.
-- Returns the entry ids that are still this worker's.
local mine = {}
for i = 4, #ARGV do
  local pending = redis.call('XPENDING', KEYS[3], ARGV[2], ARGV[i], ARGV[i], 1)
  if pending[1] and pending[1][2] == ARGV[1] then
    redis.call('XCLAIM', KEYS[3], ARGV[2], ARGV[1], 0, ARGV[i], 'IDLE', ARGV[3], 'JUSTID')
    mine[#mine + 1] = ARGV[i]
  end
end
return mine
