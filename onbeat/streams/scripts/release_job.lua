-- ARGV: a run of a trainer that is surely over, as its supervisor saw it end. Ends the lease that this very run held, so
-- that its successor need not wait until it runs out. Like a lease that ran out, it leaves the epoch as it is: the next
-- claim fences off whatever the old run may still have sent. Returns 1, or 0 when another run holds the job.
local run = ARGV[1]
if field('run') ~= (field('epoch') or '') .. ':' .. run then return 0 end
if tonumber(field('lease_until') or '0') > tonumber(now()) then redis.call('HSET', job, 'lease_until', now()) end
return 1
