-- ARGV: wanted state, error ('' for none), is_final ('1'/'0'), epoch ('' for anybody), then the states it may be left from.
-- Returns {moved, state before}. Compare-and-set: the table of legal moves is the caller's, its check is here.
local current = field('state')
if not current then return {0, ''} end
if ARGV[4] ~= '' and not is_owner(ARGV[4]) then return {0, 'fenced'} end
for i = 5, #ARGV do
  if ARGV[i] == current then
    local time = now()
    redis.call('HSET', job, 'state', ARGV[1], 'progress_at', time)
    if ARGV[2] ~= '' then redis.call('HSET', job, 'error', ARGV[2]) end
    if ARGV[3] == '1' then redis.call('HSET', job, 'finished_at', time) end
    emit('job.state', ARGV[2] ~= '' and ARGV[2] or ARGV[1], {state = ARGV[1], before = current})
    return {1, current}
  end
end
return {0, current}
