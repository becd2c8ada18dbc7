-- KEYS: job, events, deleted. ARGV: the final states. From here on there is no such job: its record becomes the record
-- of the deletion, and every script refuses. The other keys are removed after that, in batches.
-- Returns 'deleting' (perhaps again), or the state that it must leave first, or '' when there never was such a job.
local deleted = KEYS[3]
local final_states = slice(ARGV, 1)
local state = field('state')
if not state then return redis.call('EXISTS', deleted) == 1 and 'deleting' or '' end
for _, final in ipairs(final_states) do
  if state == final then
    redis.call('RENAME', job, deleted)
    return 'deleting'
  end
end
return state
