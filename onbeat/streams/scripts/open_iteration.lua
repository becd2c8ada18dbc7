-- KEYS: job, events, iteration, groups, prompts, spares. ARGV: iteration, policy version, consumer group, number of groups
-- to begin with, how the prompts were chosen (JSON; '' if by no outcomes) and its digest (hex), then group id / PromptTask
-- pairs: of these groups, and spare ones (in a job of several sources with the source in place of the group id), which
-- `submit_group` dispatches when a group is to be replaced.
-- Opens each iteration once, in order, with the published version, which may be max_staleness older than the iteration
-- (0 in the strict modes: right after the commit of the one before). While rollouts still have prompts to claim, opening
-- waits: the version may be a newer one then. Returns '' or the reason why not.
local unit, groups, prompts, spares = KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local iteration, version, consumers, num_groups = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local choice, choice_digest = ARGV[5], ARGV[6]
local tasks = slice(ARGV, 7)
if field('state') ~= 'RUNNING' then return 'job is ' .. (field('state') or 'gone') end
if field('num_opened') ~= iteration then return 'next to open is ' .. field('num_opened') end
if field('policy_version') ~= version then return 'published version is ' .. (field('policy_version') or 'none') end
local oldest = tonumber(iteration) - tonumber(field('max_staleness'))
if tonumber(version) < oldest then return 'needs version ' .. oldest .. ' or newer' end
local is_older = tonumber(version) < tonumber(iteration)
if is_older and num_unclaimed(prompts, consumers) > 0 then return 'prompts are still unclaimed' end
dispatch('iteration', iteration, version, unit, groups, prompts, tasks, num_groups)
redis.call('HSET', unit, 'opened_epoch', field('epoch') or '')
for i = 2 * num_groups + 1, #tasks do redis.call('RPUSH', spares, tasks[i]) end
if redis.call('EXISTS', spares) == 1 then redis.call('HSET', unit, 'num_replaced', 0) end
redis.call('HSET', job, 'num_opened', tonumber(iteration) + 1)
if not field('last_commit_at') then redis.call('HSET', job, 'last_commit_at', now()) end -- pauses move it on
if choice == '' then
  record('opened', iteration, version, num_groups)
else
  redis.call('HSET', unit, 'choice', choice)
  record('opened', iteration, version, num_groups, choice_digest)
end
return ''
