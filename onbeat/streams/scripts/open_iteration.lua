-- KEYS: job, events, iteration, groups, prompts. ARGV: iteration, policy version, then group id / PromptTask pairs.
-- Opens at most once, only right after the one before is committed, and only with the published version.
-- Returns '' or the reason why not.
if field('state') ~= 'RUNNING' then return 'job is ' .. (field('state') or 'gone') end
if field('next_iteration') ~= ARGV[1] then return 'next iteration is ' .. field('next_iteration') end
if field('policy_version') ~= ARGV[2] then return 'published version is ' .. (field('policy_version') or 'none') end
if redis.call('HEXISTS', KEYS[3], 'state') == 1 then return 'already open' end
local time, num_groups = now(), (#ARGV - 2) / 2
redis.call('HSET', KEYS[3], 'iteration', ARGV[1], 'state', 'OPEN', 'policy_version', ARGV[2],
  'num_groups', num_groups, 'num_accepted', 0, 'opened_at', time)
for i = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[4], ARGV[i], 'waiting')
  redis.call('XADD', KEYS[5], '*', 'iteration', ARGV[1], 'group_id', ARGV[i], 'task', ARGV[i + 1])
end
redis.call('HSET', job, 'progress_at', time)
emit('iteration.opened', 'iteration ' .. ARGV[1] .. ' on policy version ' .. ARGV[2],
  {iteration = tonumber(ARGV[1]), policy_version = tonumber(ARGV[2]), num_groups = num_groups})
return ''
