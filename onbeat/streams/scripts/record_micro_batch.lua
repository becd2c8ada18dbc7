-- KEYS: job, events, micro batches. ARGV: epoch, group ids (comma separated). Returns 1, or 0 when fenced.
if not is_owner(ARGV[1]) then return 0 end
redis.call('RPUSH', KEYS[3], ARGV[2])
return 1
