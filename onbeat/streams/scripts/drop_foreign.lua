-- KEYS: job, events, prompts or rollouts. ARGV: consumer group, then entry ids.
-- Takes entries off the stream that no script of ours has put there. They are counted, and said in an event.
-- Returns how many there were.
local stream = KEYS[3]
local consumers = ARGV[1]
local entries = slice(ARGV, 2)
local num_dropped = 0
for _, entry in ipairs(entries) do
  redis.call('XACK', stream, consumers, entry)
  num_dropped = num_dropped + redis.call('XDEL', stream, entry)
end
if num_dropped > 0 then
  redis.call('HINCRBY', job, 'num_foreign', num_dropped)
  emit('stream.foreign', 'dropped ' .. num_dropped .. ' entries of ' .. stream .. ' that Onbeat did not write',
    {num = num_dropped})
end
return num_dropped
