-- ARGV: epoch, dtype, the reason for it. The first record stays: every trainer and rollout of the job computes in it.
-- Returns the recorded dtype, or nil when the lease was lost.
if not is_owner(ARGV[1]) then return nil end
if redis.call('HSETNX', job, 'dtype', ARGV[2]) == 1 then emit('job.dtype', ARGV[3], {dtype = ARGV[2]}) end
return field('dtype')
