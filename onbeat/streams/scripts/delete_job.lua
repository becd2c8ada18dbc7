-- KEYS: job, events, deleted. ARGV: the final states. From here on there is no such job: its record becomes the record
-- of the deletion, and every script refuses. The other keys are removed after that, in batches.
-- Returns 'deleting' (perhaps again), or the state that it must leave first, or '' when there never was such a job.
local state = field('state')
if not state then return redis.call('EXISTS', KEYS[3]) == 1 and 'deleting' or '' end
for _, final in ipairs(ARGV) do
  if state == final then
    redis.call('RENAME', job, KEYS[3])
    return 'deleting'
  end
end
return state
