-- ARGV: kind, message, data (JSON object). An event that belongs to no state change. Returns 1, or 0 without such a job.
if not field('state') then return 0 end
emit(ARGV[1], ARGV[2], cjson.decode(ARGV[3]))
return 1
