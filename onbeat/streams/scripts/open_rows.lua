-- KEYS: job, events, iteration, groups, rows, held-out rows. ARGV: iteration, digest of the rows (hex), rows to measure
-- the loss on (JSON, '' for none new), then group id / row (JSON) pairs. Opens a supervised iteration once, in order,
-- after the commit of the one before: the trainer, and no rollout, takes its rows. Its version is the one that is
-- trained, published or not. Returns '' or the reason why not.
local unit, groups, rows, held_out_rows = KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local iteration, digest, held_out = ARGV[1], ARGV[2], ARGV[3]
local conversations = slice(ARGV, 4)
if field('state') ~= 'RUNNING' then return 'job is ' .. (field('state') or 'gone') end
if field('num_opened') ~= iteration then return 'next to open is ' .. field('num_opened') end
if field('next_iteration') ~= iteration then return 'next to commit is ' .. field('next_iteration') end
if not field('policy_version') then return 'no trainer has published a version' end
local time, num_rows = now(), #conversations / 2
redis.call('HSET', unit, 'iteration', iteration, 'state', 'OPEN', 'policy_version', iteration, 'num_groups', num_rows,
  'num_accepted', 0, 'opened_at', time, 'is_supervised', 1, 'opened_epoch', field('epoch') or '')
for i = 1, #conversations, 2 do
  redis.call('HSET', rows, conversations[i], conversations[i + 1])
  redis.call('HSET', groups, conversations[i], 'row')
end
if held_out ~= '' then redis.call('HSET', held_out_rows, 'rows', held_out) end
redis.call('HSET', job, 'num_opened', tonumber(iteration) + 1, 'progress_at', time)
if not field('last_commit_at') then redis.call('HSET', job, 'last_commit_at', time) end -- pauses move it on
record('rows', iteration, num_rows, digest)
emit('iteration.opened', 'iteration ' .. iteration .. ' with ' .. num_rows .. ' rows of examples',
  {iteration = tonumber(iteration), policy_version = tonumber(iteration), num_groups = num_rows})
return ''
