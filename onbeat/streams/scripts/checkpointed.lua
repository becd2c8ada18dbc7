-- KEYS: job, events, rollouts, then the group ledgers of the iterations that the checkpoint makes durable.
-- ARGV: epoch, next iteration, path, consumer group. Only now are the groups acknowledged. Returns 1, or nil when fenced.
local rollouts = KEYS[3]
local ledgers = slice(KEYS, 4, #KEYS - 1)
local epoch, next_iteration, path, consumers = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if not is_owner(epoch) then return nil end
for _, groups in ipairs(ledgers) do
  for _, state in ipairs(redis.call('HVALS', groups)) do
    local entry = string.match(state, '^accepted:(.+)$')
    if entry then redis.call('XACK', rollouts, consumers, entry) end
  end
end
if tonumber(next_iteration) >= tonumber(field('checkpoint_iteration') or '0') then -- a restored one may be an older one
  redis.call('HSET', job, 'checkpoint', path, 'checkpoint_iteration', next_iteration)
end
emit('checkpoint.written', path, {next_iteration = tonumber(next_iteration)})
return 1
