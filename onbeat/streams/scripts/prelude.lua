-- Put before every script: the clock, events, the audit log and the fence. The first key is always the job hash, the
-- second the stream of events, the last the audit log.
local job, events, audit = KEYS[1], KEYS[2], KEYS[#KEYS]

-- The items of a list from number `first` to `last`, or to its end.
local function slice(list, first, last)
  local items = {}
  for i = first, last or #list do items[#items + 1] = list[i] end
  return items
end

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

-- Appends a line to the audit log. Its link is the hash of the link before it and of the line.
local function record(...)
  local words = {}
  for i, word in ipairs({...}) do words[i] = string.gsub(tostring(word), '%c', ' ') end
  local line = table.concat(words, '\t')
  local link = redis.sha1hex((field('audit_link') or '') .. '\n' .. line)
  redis.call('XADD', audit, '*', 'line', line, 'link', link)
  redis.call('HSET', job, 'audit_link', link)
end

-- True if the caller still owns the job: a process that lost its lease carries an old epoch.
local function is_owner(epoch)
  return field('epoch') == epoch
end

-- True if a set of pending jobs has as many as it may ('': any number).
local function is_full(pending, limit)
  return limit ~= '' and redis.call('ZCARD', pending) >= tonumber(limit)
end

-- Shifts `last_commit_at` by seconds that count for no iteration.
local function skip(seconds)
  local last = field('last_commit_at')
  if last then redis.call('HSET', job, 'last_commit_at', string.format('%.6f', tonumber(last) + seconds)) end
end

-- Entries of a stream that nobody of the consumer group has claimed yet. (Done ones are acknowledged and deleted.)
local function num_unclaimed(stream, group)
  return redis.call('XLEN', stream) - redis.call('XPENDING', stream, group)[1]
end

local function put_prompt(kind, number, groups, prompts, group_id, task)
  local entry = redis.call('XADD', prompts, '*', kind, number, 'group_id', group_id, 'task', task)
  redis.call('HSET', groups, group_id, 'waiting:' .. entry)
end

-- Writes a unit's record and puts its prompts on the stream. `tasks` begins with `num_groups` pairs of group id
-- and PromptTask. `kind` is iteration | evaluation.
local function dispatch(kind, number, version, unit, groups, prompts, tasks, num_groups)
  redis.call('HSET', unit, kind, number, 'state', 'OPEN', 'policy_version', version, 'num_groups', num_groups,
    'num_accepted', 0, 'opened_at', now())
  for i = 1, 2 * num_groups, 2 do
    put_prompt(kind, number, groups, prompts, tasks[i], tasks[i + 1])
  end
  redis.call('HSET', job, 'progress_at', now())
  emit(kind .. '.opened', kind .. ' ' .. number .. ' on policy version ' .. version,
    {[kind] = tonumber(number), policy_version = tonumber(version), num_groups = num_groups})
end
