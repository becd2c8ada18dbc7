-- KEYS: job. Its hash as one string of JSON, [name, value, name, value, ...], which a client reads much faster than as
-- many strings; nil when there is no such hash.
local fields = redis.pcall('HGETALL', job)
if fields.err or #fields == 0 then return false end
return cjson.encode(fields)
