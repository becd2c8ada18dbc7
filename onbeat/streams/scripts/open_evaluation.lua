-- KEYS: job, events, evaluation, groups, prompts, open evaluations.
-- ARGV: evaluation, policy version, the evaluation after this one, then group id / PromptTask pairs.
-- Opens each evaluation once, in order, with the published version. Returns '' or the reason why not.
if field('state') ~= 'RUNNING' then return 'job is ' .. (field('state') or 'gone') end
local due = field('next_evaluation') or '0'
if due ~= ARGV[1] then return 'next evaluation is ' .. due end
if field('policy_version') ~= ARGV[2] then return 'published version is ' .. (field('policy_version') or 'none') end
dispatch('evaluation', ARGV[1], ARGV[2], KEYS[3], KEYS[4], KEYS[5], 4, (#ARGV - 3) / 2)
redis.call('SADD', KEYS[6], ARGV[1])
redis.call('HSET', job, 'next_evaluation', ARGV[3])
return ''
