-- KEYS: job, events, iteration, groups, prompts. ARGV: iteration, policy version, consumer group, then
-- group id / PromptTask pairs.
-- Opens each iteration once, in order, with the published version, which may be max_staleness older than the iteration
-- (0 in the strict modes: right after the commit of the one before). While rollouts still have prompts to claim, opening
-- waits: the version may be a newer one then. Returns '' or the reason why not.
local iteration, version = tonumber(ARGV[1]), tonumber(ARGV[2])
if field('state') ~= 'RUNNING' then return 'job is ' .. (field('state') or 'gone') end
if field('num_opened') ~= ARGV[1] then return 'next to open is ' .. field('num_opened') end
if field('policy_version') ~= ARGV[2] then return 'published version is ' .. (field('policy_version') or 'none') end
local oldest = iteration - tonumber(field('max_staleness'))
if version < oldest then return 'needs version ' .. oldest .. ' or newer' end
if version < iteration and num_unclaimed(KEYS[5], ARGV[3]) > 0 then return 'prompts are still unclaimed' end
local time, num_groups = now(), (#ARGV - 3) / 2
redis.call('HSET', KEYS[3], 'iteration', ARGV[1], 'state', 'OPEN', 'policy_version', ARGV[2],
  'num_groups', num_groups, 'num_accepted', 0, 'opened_at', time)
for i = 4, #ARGV, 2 do
  redis.call('HSET', KEYS[4], ARGV[i], 'waiting')
  redis.call('XADD', KEYS[5], '*', 'iteration', ARGV[1], 'group_id', ARGV[i], 'task', ARGV[i + 1])
end
redis.call('HSET', job, 'num_opened', iteration + 1, 'progress_at', time)
emit('iteration.opened', 'iteration ' .. ARGV[1] .. ' on policy version ' .. ARGV[2],
  {iteration = tonumber(ARGV[1]), policy_version = tonumber(ARGV[2]), num_groups = num_groups})
return ''
