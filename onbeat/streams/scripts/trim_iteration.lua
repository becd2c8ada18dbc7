-- KEYS: job, events, rollouts, groups, micro batches, taken groups, advantages.
-- ARGV: iteration, how many durable iterations are kept.
-- Drops the contents of the oldest iteration that still has them, if a checkpoint contains it and the newer ones that are
-- to be kept: its own entries of the stream, which in `bounded` lie between those of others, what only a replay needs, and
-- what is reported of each response. Returns 1, or 0 when it is not its turn.
local iteration = tonumber(ARGV[1])
if tonumber(field('num_trimmed') or '0') ~= iteration then return 0 end
if iteration + tonumber(ARGV[2]) >= tonumber(field('checkpoint_iteration') or '0') then return 0 end
for _, state in ipairs(redis.call('HVALS', KEYS[4])) do
  local entry = string.match(state, '^accepted:(.+)$')
  if entry then redis.call('XDEL', KEYS[3], entry) end
end
redis.call('DEL', KEYS[5], KEYS[6], KEYS[7])
redis.call('HSET', job, 'num_trimmed', iteration + 1)
return 1
