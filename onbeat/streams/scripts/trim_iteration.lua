-- KEYS: job, events, rollouts, groups, micro batches, taken groups, advantages.
-- ARGV: iteration, how many durable iterations are kept.
-- Drops the contents of the oldest iteration that still has them, if a checkpoint contains it and the newer ones that are
-- to be kept: its own entries of the stream, which in `bounded` lie between those of others, what only a replay needs, and
-- what is reported of each response. Returns 1, or 0 when it is not its turn.
local rollouts, groups, micro_batches, taken, advantages = KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local iteration, num_kept = tonumber(ARGV[1]), tonumber(ARGV[2])
if tonumber(field('num_trimmed') or '0') ~= iteration then return 0 end
if iteration + num_kept >= tonumber(field('checkpoint_iteration') or '0') then return 0 end
for _, state in ipairs(redis.call('HVALS', groups)) do
  local entry = string.match(state, '^accepted:(.+)$')
  if entry then redis.call('XDEL', rollouts, entry) end
end
redis.call('DEL', micro_batches, taken, advantages)
redis.call('HSET', job, 'num_trimmed', iteration + 1)
return 1
