-- KEYS: job, events, rollouts, then the group ledgers of the iterations that the checkpoint makes durable.
-- ARGV: epoch, next iteration, path, consumer group. Only now are the groups acknowledged. Returns 1, or nil when fenced.
if not is_owner(ARGV[1]) then return nil end
for i = 4, #KEYS - 1 do
  for _, state in ipairs(redis.call('HVALS', KEYS[i])) do
    local entry = string.match(state, '^accepted:(.+)$')
    if entry then redis.call('XACK', KEYS[3], ARGV[4], entry) end
  end
end
if tonumber(ARGV[2]) >= tonumber(field('checkpoint_iteration') or '0') then -- a restored one may be an older one
  redis.call('HSET', job, 'checkpoint', ARGV[3], 'checkpoint_iteration', ARGV[2])
end
emit('checkpoint.written', ARGV[3], {next_iteration = tonumber(ARGV[2])})
return 1
