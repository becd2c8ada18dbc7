-- KEYS: job, events, prompts or rollouts. ARGV: consumer group, then entry ids.
-- Takes entries off the stream that no script of ours has put there. They are counted, and said in an event.
-- Returns how many there were.
local num_dropped = 0
for i = 2, #ARGV do
  redis.call('XACK', KEYS[3], ARGV[1], ARGV[i])
  num_dropped = num_dropped + redis.call('XDEL', KEYS[3], ARGV[i])
end
if num_dropped > 0 then
  redis.call('HINCRBY', job, 'num_foreign', num_dropped)
  emit('stream.foreign', num_dropped .. ' entries of ' .. KEYS[3] .. ' are none of ours, dropped', {num = num_dropped})
end
return num_dropped
