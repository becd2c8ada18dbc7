-- KEYS: job, events, pending jobs of the submitter. ARGV: job id, limit of the pending jobs ('': none), the state that it
-- was seen in, then, if it gets more iterations: configuration, its digest (hex), number of iterations, evaluation that
-- is due next ('' for the one that is).
-- A job that is over waits for a trainer again, with all that it has. The time in between is no time of an iteration.
-- Returns resumed, full, the state that it is in instead, or '' without such a job.
local pending, job_id, limit, seen = KEYS[3], ARGV[1], ARGV[2], ARGV[3]
local config, digest, num_iterations, next_evaluation = ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local current, time = field('state'), now()
if current ~= seen then return current or '' end
if is_full(pending, limit) then return 'full' end
redis.call('ZADD', pending, 'NX', field('created_at'), job_id)
if config then
  redis.call('HSET', job, 'config', config, 'num_iterations', num_iterations)
  if next_evaluation ~= '' then redis.call('HSET', job, 'next_evaluation', next_evaluation) end
  record('extended', digest, num_iterations)
end
skip(tonumber(time) - tonumber(field('finished_at')))
if field('started_at') then
  redis.call('HSET', job, 'worked_s', string.format('%.6f', tonumber(field('finished_at')) - tonumber(field('started_at'))))
end
redis.call('HDEL', job, 'error', 'finished_at', 'started_at')
redis.call('HINCRBY', job, 'epoch', 1) -- a trainer that has not noticed the end is fenced off
redis.call('HSET', job, 'state', 'PENDING', 'queued_at', time, 'progress_at', time)
emit('job.state', 'PENDING', {state = 'PENDING', before = current})
return 'resumed'
