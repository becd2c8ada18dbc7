-- ARGV: the id of a process, when its last heartbeat came, how many events are looked at, and a message. Emits
-- `process.silent`, unless one of the newest events tells already how that process ended or fell silent. Returns 1 or 0.
local process, last_seen_at, most, message = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if not field('state') then return 0 end
for _, entry in ipairs(redis.call('XREVRANGE', events, '+', '-', 'COUNT', most)) do
  local words = {}
  for i = 1, #entry[2], 2 do words[entry[2][i]] = entry[2][i + 1] end
  if tonumber(words.time or '0') < tonumber(last_seen_at) then break end
  if words.kind == 'process.ended' or words.kind == 'process.silent' then
    if cjson.decode(words.data).process == process then return 0 end
  end
end
emit('process.silent', message, {process = process})
return 1
