-- KEYS: job, events, evaluation, groups, prompts, open evaluations, results.
-- ARGV: evaluation, DONE | FAILED, the evaluation after this one if it cannot be opened, else itself, consumer group,
-- message, scores (JSON), samples (JSON).
-- A drained evaluation becomes DONE; one that cannot be opened, or makes no progress, is FAILED and its prompts are
-- withdrawn. What was generated is dropped: scores and samples stay. Returns 1, or 0 when it had ended or may not end so, or
-- without such a job.
local unit, groups, prompts, open_evaluations, results = KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local evaluation, outcome, following, consumers, message, scores = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local samples = ARGV[7]
if not field('state') then return 0 end
local state = redis.call('HGET', unit, 'state')
if state == 'DONE' or state == 'FAILED' or (outcome == 'DONE' and state ~= 'DRAINED') then return 0 end
if state and following ~= evaluation then return 0 end -- another broker could open it
for _, entry in ipairs(outcome == 'FAILED' and redis.call('XRANGE', prompts, '-', '+') or {}) do
  if entry[2][1] == 'evaluation' and entry[2][2] == evaluation then
    redis.call('XACK', prompts, consumers, entry[1])
    redis.call('XDEL', prompts, entry[1])
  end
end
local time = now()
redis.call('HSET', unit, 'evaluation', evaluation, 'state', outcome, 'message', message, 'scores', scores,
  'samples', samples, 'ended_at', time)
redis.call('DEL', groups, results)
redis.call('SREM', open_evaluations, evaluation)
redis.call('HSET', job, 'progress_at', time)
if (field('next_evaluation') or '0') == evaluation then redis.call('HSET', job, 'next_evaluation', following) end
local data = cjson.decode(scores)
data.evaluation, data.policy_version = tonumber(evaluation), tonumber(redis.call('HGET', unit, 'policy_version'))
emit(outcome == 'DONE' and 'evaluation.done' or 'evaluation.failed', message, data)
return 1
