-- KEYS: job, events, prompts. ARGV: worker, consumer group, renew | release | fail, tokens that were generated for the
-- entries and are thrown away, then entry ids.
-- renew keeps the worker's leases. release hands them back as if they had never been claimed; fail hands them back and
-- the attempt counts. Entries that are owned by others or handed back already are left alone.
-- Returns the entry ids that were still this worker's: none without such a job.
local prompts = KEYS[3]
local worker, consumers, outcome, num_discarded = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local entries = slice(ARGV, 5)
local mine = {}
if not field('state') then return mine end
for _, entry in ipairs(entries) do
  local pending = redis.call('XPENDING', prompts, consumers, entry, entry, 1)
  if pending[1] and pending[1][2] == worker and pending[1][3] < 86400000 then
    local idle, attempts = 86400000, pending[1][4] -- XAUTOCLAIM counts: the next claim is attempt + 1
    if outcome == 'renew' then idle = 0 end
    if outcome == 'release' then attempts = math.max(0, attempts - 1) end
    redis.call('XCLAIM', prompts, consumers, worker, 0, entry, 'IDLE', idle, 'RETRYCOUNT', attempts, 'JUSTID')
    mine[#mine + 1] = entry
  end
end
if num_discarded ~= '0' then redis.call('HINCRBY', job, 'num_discarded_tokens', num_discarded) end
if outcome ~= 'renew' and #mine > 0 then redis.call('HINCRBY', job, 'num_handed_back', #mine) end
return mine
