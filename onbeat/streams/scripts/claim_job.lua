-- ARGV: owner, lease seconds, and an id of this run of the owner, or ''. A PENDING job starts; one whose lease ran out is
-- taken over, unless it is paused. Each claim raises the epoch, which fences off every earlier owner. Returns the epoch,
-- or nil.
local owner, lease_s, run = ARGV[1], ARGV[2], ARGV[3]
local state, time = field('state'), now()
local is_pending = state == 'PENDING'
local is_owned = state == 'RUNNING' or state == 'CANCELLING'
local is_orphan = is_owned and tonumber(field('lease_until') or '0') < tonumber(time)
if not (is_pending or is_orphan) then return nil end
if is_pending then
  -- After a resume, the time before it counts as the job's, and that in the queue as no iteration's.
  local started_at = tonumber(time) - tonumber(field('worked_s') or '0')
  redis.call('HSET', job, 'state', 'RUNNING', 'started_at', string.format('%.6f', started_at))
  if field('queued_at') then skip(tonumber(time) - tonumber(field('queued_at'))) end
  emit('job.state', 'RUNNING', {state = 'RUNNING', before = 'PENDING'})
else
  local before = field('owner') or '?'
  local how = owner == before and ' was restarted and continues' or ' takes over from ' .. before
  emit('job.taken_over', owner .. how .. ' at iteration ' .. field('next_iteration'), {owner = owner})
end
redis.call('HSET', job, 'owner', owner, 'lease_until', tonumber(time) + tonumber(lease_s), 'progress_at', time)
local epoch = tostring(redis.call('HINCRBY', job, 'epoch', 1))
redis.call('HSET', job, 'run', epoch .. ':' .. run)
return epoch
