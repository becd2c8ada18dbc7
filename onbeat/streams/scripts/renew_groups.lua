-- KEYS: job, events, prompts. ARGV: worker, consumer group, renew | release | fail, then entry ids.
-- renew keeps the worker's leases. release hands them back as if they had never been claimed; fail hands them back and
-- the attempt counts. Entries that are owned by others or handed back already are left alone.
-- Returns the entry ids that were still this worker's: none without such a job.
local mine = {}
if not field('state') then return mine end
for i = 4, #ARGV do
  local pending = redis.call('XPENDING', KEYS[3], ARGV[2], ARGV[i], ARGV[i], 1)
  if pending[1] and pending[1][2] == ARGV[1] and pending[1][3] < 86400000 then
    local idle, attempts = 86400000, pending[1][4] -- XAUTOCLAIM counts: the next claim is attempt + 1
    if ARGV[3] == 'renew' then idle = 0 end
    if ARGV[3] == 'release' then attempts = math.max(0, attempts - 1) end
    redis.call('XCLAIM', KEYS[3], ARGV[2], ARGV[1], 0, ARGV[i], 'IDLE', idle, 'RETRYCOUNT', attempts, 'JUSTID')
    mine[#mine + 1] = ARGV[i]
  end
end
return mine
