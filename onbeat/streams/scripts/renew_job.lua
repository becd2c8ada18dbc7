-- ARGV: epoch, lease seconds, what the trainer is doing, and 1 if it hands over the job in good order. Returns the
-- job's state, or nil when the lease was lost.
local epoch, lease_s, doing, is_handover = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if not is_owner(epoch) then return nil end
redis.call('HSET', job, 'lease_until', tonumber(now()) + tonumber(lease_s))
if field('doing') ~= doing then redis.call('HSET', job, 'doing', doing, 'doing_since', now()) end
local state, owner = field('state'), field('owner')
if is_handover == '1' and (state == 'RUNNING' or state == 'PAUSED') then
  emit('job.handed_over', owner .. ' leaves the job to another trainer', {owner = owner})
end
return state
