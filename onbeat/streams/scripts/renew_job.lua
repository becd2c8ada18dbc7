-- ARGV: epoch, lease seconds, what the trainer is doing. Returns the job's state, or nil when the lease was lost.
if not is_owner(ARGV[1]) then return nil end
redis.call('HSET', job, 'lease_until', tonumber(now()) + tonumber(ARGV[2]))
if field('doing') ~= ARGV[3] then redis.call('HSET', job, 'doing', ARGV[3], 'doing_since', now()) end
return field('state')
