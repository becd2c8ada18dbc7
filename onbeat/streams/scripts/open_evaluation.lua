-- KEYS: job, events, evaluation, groups, prompts, open evaluations.
-- ARGV: evaluation, policy version, the evaluation after this one, then group id / PromptTask pairs.
-- Opens each evaluation once, in order, with the published version. Returns '' or the reason why not.
local unit, groups, prompts, open_evaluations = KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local evaluation, version, following = ARGV[1], ARGV[2], ARGV[3]
local tasks = slice(ARGV, 4)
if field('state') ~= 'RUNNING' then return 'job is ' .. (field('state') or 'gone') end
local due = field('next_evaluation') or '0'
if due ~= evaluation then return 'next evaluation is ' .. due end
if field('policy_version') ~= version then return 'published version is ' .. (field('policy_version') or 'none') end
dispatch('evaluation', evaluation, version, unit, groups, prompts, tasks, #tasks / 2)
redis.call('SADD', open_evaluations, evaluation)
redis.call('HSET', job, 'next_evaluation', following)
return ''
