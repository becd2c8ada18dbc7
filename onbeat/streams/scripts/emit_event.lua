-- ARGV: kind, message, data (JSON object). An event that belongs to no state change. Returns 1, or 0 without such a job.
local kind, message, data = ARGV[1], ARGV[2], ARGV[3]
if not field('state') then return 0 end
emit(kind, message, cjson.decode(data))
return 1
