-- ARGV: epoch, lease seconds. Returns the job's state, or nil when the lease was lost.
if not is_owner(ARGV[1]) then return nil end
redis.call('HSET', job, 'lease_until', tonumber(now()) + tonumber(ARGV[2]))
return field('state')
