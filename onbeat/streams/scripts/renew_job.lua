-- ARGV: epoch, lease seconds, what the trainer is doing, and 1 if it hands over the job in good order. Returns the
-- job's state, or nil when the lease was lost.
if not is_owner(ARGV[1]) then return nil end
redis.call('HSET', job, 'lease_until', tonumber(now()) + tonumber(ARGV[2]))
if field('doing') ~= ARGV[3] then redis.call('HSET', job, 'doing', ARGV[3], 'doing_since', now()) end
local state, owner = field('state'), field('owner')
if ARGV[4] == '1' and (state == 'RUNNING' or state == 'PAUSED') then
  emit('job.handed_over', owner .. ' leaves the job to another trainer', {owner = owner})
end
return state
