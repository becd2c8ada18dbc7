-- ARGV: the state that it was seen in, then, if it gets more iterations: configuration, its digest (hex), number of
-- iterations, evaluation that is due next ('' for the one that is).
-- A job that is over waits for a trainer again, with all that it has. The time in between is no time of an iteration.
-- Returns resumed, the state that it is in instead, or '' without such a job.
local current, time = field('state'), now()
if current ~= ARGV[1] then return current or '' end
if ARGV[2] then
  redis.call('HSET', job, 'config', ARGV[2], 'num_iterations', ARGV[4])
  if ARGV[5] ~= '' then redis.call('HSET', job, 'next_evaluation', ARGV[5]) end
  record('extended', ARGV[3], ARGV[4])
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
