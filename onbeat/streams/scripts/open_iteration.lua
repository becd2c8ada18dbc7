-- KEYS: job, events, iteration, groups, prompts, spares. ARGV: iteration, policy version, consumer group, number of groups
-- to begin with, then group id / PromptTask pairs: of these groups, and spare ones, which `submit_group` dispatches when a
-- group is to be replaced.
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
local num_groups = tonumber(ARGV[4])
dispatch('iteration', ARGV[1], ARGV[2], KEYS[3], KEYS[4], KEYS[5], 5, num_groups)
for i = 5 + 2 * num_groups, #ARGV do redis.call('RPUSH', KEYS[6], ARGV[i]) end
if redis.call('EXISTS', KEYS[6]) == 1 then redis.call('HSET', KEYS[3], 'num_replaced', 0) end
redis.call('HSET', job, 'num_opened', iteration + 1)
if not field('last_commit_at') then redis.call('HSET', job, 'last_commit_at', now()) end -- pauses move it on
record('opened', ARGV[1], ARGV[2], num_groups)
return ''
