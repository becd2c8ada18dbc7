-- KEYS: job, events, iteration, groups, rows, rollouts.
-- ARGV: epoch, iteration, trainer, then group id / RolloutGroup / digest (hex) / failure kind ('' if none) quadruples, one
-- for each row. Records the tokens of all rows of a supervised iteration, once, as accepted groups: from here on they are
-- trained as they are recorded, whoever trains. Returns recorded | already | closed, or nil when fenced.
local unit, groups, rows, rollouts = KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local epoch, iteration, trainer = ARGV[1], ARGV[2], ARGV[3]
local recorded = slice(ARGV, 4)
local state = field('state')
if not is_owner(epoch) then return nil end
if redis.call('HGET', unit, 'state') ~= 'OPEN' then return 'already' end
if state ~= 'RUNNING' and state ~= 'PAUSED' then return 'closed' end
local num_failed, time = 0, now()
for i = 1, #recorded, 4 do
  local group_id, payload, digest, failure = recorded[i], recorded[i + 1], recorded[i + 2], recorded[i + 3]
  local entry = redis.call('XADD', rollouts, '*', 'iteration', iteration, 'group_id', group_id, 'group', payload)
  redis.call('HSET', groups, group_id, 'accepted:' .. entry)
  record('accepted', iteration, group_id, '', trainer, entry, digest, failure)
  if failure ~= '' then num_failed = num_failed + 1 end
end
redis.call('HSET', unit, 'num_accepted', #recorded / 4, 'num_failed_groups', num_failed, 'state', 'DRAINED',
  'drained_at', time)
redis.call('HSET', job, 'progress_at', time)
redis.call('DEL', rows)
emit('iteration.drained', 'the rows of iteration ' .. iteration .. ' are tokenised', {iteration = tonumber(iteration)})
return 'recorded'
