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

-- Writes a unit's record and puts its prompts on the stream. The arguments from `first` on are group id / PromptTask
-- pairs. `kind` is iteration | evaluation.
local function dispatch(kind, number, version, unit, groups, prompts, first)
  local num_groups = (#ARGV - first + 1) / 2
  redis.call('HSET', unit, kind, number, 'state', 'OPEN', 'policy_version', version, 'num_groups', num_groups,
    'num_accepted', 0, 'opened_at', now())
  for i = first, #ARGV, 2 do
    redis.call('HSET', groups, ARGV[i], 'waiting')
    redis.call('XADD', prompts, '*', kind, number, 'group_id', ARGV[i], 'task', ARGV[i + 1])
  end
  redis.call('HSET', job, 'progress_at', now())
  emit(kind .. '.opened', kind .. ' ' .. number .. ' on policy version ' .. version,
    {[kind] = tonumber(number), policy_version = tonumber(version), num_groups = num_groups})
end
