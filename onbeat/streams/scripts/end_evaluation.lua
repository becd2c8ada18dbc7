-- KEYS: job, events, evaluation, groups, prompts, open evaluations, results.
-- ARGV: evaluation, DONE | FAILED, the evaluation after this one if it cannot be opened, else itself, consumer group,
-- message, scores (JSON), samples (JSON).
-- A drained evaluation becomes DONE; one that cannot be opened, or makes no progress, is FAILED and its prompts are
-- withdrawn. What was generated is dropped: scores and samples stay. Returns 1, or 0 when it had ended or may not end so, or
-- without such a job.
if not field('state') then return 0 end
local state = redis.call('HGET', KEYS[3], 'state')
if state == 'DONE' or state == 'FAILED' or (ARGV[2] == 'DONE' and state ~= 'DRAINED') then return 0 end
if state and ARGV[3] ~= ARGV[1] then return 0 end -- another broker could open it
for _, entry in ipairs(ARGV[2] == 'FAILED' and redis.call('XRANGE', KEYS[5], '-', '+') or {}) do
  if entry[2][1] == 'evaluation' and entry[2][2] == ARGV[1] then
    redis.call('XACK', KEYS[5], ARGV[4], entry[1])
    redis.call('XDEL', KEYS[5], entry[1])
  end
end
local time = now()
redis.call('HSET', KEYS[3], 'evaluation', ARGV[1], 'state', ARGV[2], 'message', ARGV[5], 'scores', ARGV[6],
  'samples', ARGV[7], 'ended_at', time)
redis.call('DEL', KEYS[4], KEYS[7])
redis.call('SREM', KEYS[6], ARGV[1])
redis.call('HSET', job, 'progress_at', time)
if (field('next_evaluation') or '0') == ARGV[1] then redis.call('HSET', job, 'next_evaluation', ARGV[3]) end
local data = cjson.decode(ARGV[6])
data.evaluation, data.policy_version = tonumber(ARGV[1]), tonumber(redis.call('HGET', KEYS[3], 'policy_version'))
emit(ARGV[2] == 'DONE' and 'evaluation.done' or 'evaluation.failed', ARGV[5], data)
return 1
