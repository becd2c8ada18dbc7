-- ARGV: job id, digest of the configuration (hex), then field/value pairs. Creates a PENDING job once; returns 1, or 0 if it exists.
if redis.call('EXISTS', job) == 1 then return 0 end
local created = now()
redis.call('HSET', job, 'id', ARGV[1], 'state', 'PENDING', 'created_at', created, 'progress_at', created,
  'num_opened', '0', 'next_iteration', '0', 'epoch', '0', unpack(ARGV, 3))
record('created', ARGV[1], ARGV[2])
emit('job.state', 'PENDING', {state = 'PENDING'})
return 1
