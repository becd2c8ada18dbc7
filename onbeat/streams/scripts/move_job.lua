-- ARGV: wanted state, error ('' for none), is_final ('1'/'0'), epoch ('' for anybody), then the states it may be left from.
-- Returns {moved, state before}. Compare-and-set: the table of legal moves is the caller's, its check is here. A
-- pause does not count as time of the iteration at hand, nor does the queue of a resumed job: its last commit moves on by
-- as much.
local wanted, failure, is_final, epoch = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local allowed = slice(ARGV, 5)
local current = field('state')
if not current then return {0, ''} end
if epoch ~= '' and not is_owner(epoch) then return {0, 'fenced'} end
for _, allowed_state in ipairs(allowed) do
  if allowed_state == current then
    local time = now()
    redis.call('HSET', job, 'state', wanted, 'progress_at', time)
    if failure ~= '' then redis.call('HSET', job, 'error', failure) end
    if is_final == '1' then redis.call('HSET', job, 'finished_at', time) end
    if wanted == 'PAUSED' then redis.call('HSET', job, 'halted_at', time) end
    if current == 'PAUSED' and field('last_commit_at') then
      local worked = math.max(0, tonumber(field('halted_at') or time) - tonumber(field('last_commit_at')))
      redis.call('HSET', job, 'last_commit_at', string.format('%.6f', tonumber(time) - worked))
    end
    if current == 'PENDING' and field('queued_at') then
      skip(tonumber(time) - tonumber(field('queued_at')))
      local worked = tonumber(field('worked_s') or '0')
      if worked > 0 then redis.call('HSET', job, 'started_at', string.format('%.6f', tonumber(time) - worked)) end
    end
    emit('job.state', failure ~= '' and failure or wanted, {state = wanted, before = current})
    return {1, current}
  end
end
return {0, current}
