-- Put before every script: the clock, events and the fence. KEYS[1] is always the job hash, KEYS[2] the events stream.
local job, events = KEYS[1], KEYS[2]

local function now()
  local time = redis.call('TIME')
  return string.format('%.6f', tonumber(time[1]) + tonumber(time[2]) / 1e6)
end

local function emit(kind, message, data)
  redis.call('XADD', events, 'MAXLEN', '~', '5000', '*',
    'kind', kind, 'message', message, 'data', cjson.encode(data or {}), 'time', now())
end

local function field(name)
  return redis.call('HGET', job, name)
end

-- True if the caller still owns the job: a process that lost its lease carries an old epoch.
local function is_owner(epoch)
  return field('epoch') == epoch
end

-- Entries of a stream that nobody of the consumer group has claimed yet. (Done ones are acknowledged and deleted.)
local function num_unclaimed(stream, group)
  return redis.call('XLEN', stream) - redis.call('XPENDING', stream, group)[1]
end
