-- ARGV: epoch, dtype, the reason for it. The first record stays: every trainer and rollout of the job computes in it.
-- Returns the recorded dtype, or nil when the lease was lost.
local epoch, dtype, reason = ARGV[1], ARGV[2], ARGV[3]
if not is_owner(epoch) then return nil end
if redis.call('HSETNX', job, 'dtype', dtype) == 1 then emit('job.dtype', reason, {dtype = dtype}) end
return field('dtype')
