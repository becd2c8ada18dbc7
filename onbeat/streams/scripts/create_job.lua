-- KEYS: job, events, prompts, rollouts, deleted. ARGV: job id, digest of the configuration (hex), consumer groups of the
-- two streams, then field/value pairs, which go before the defaults. Creates a PENDING job once; returns created | exists | deleted.
if redis.call('EXISTS', job) == 1 then return 'exists' end
if redis.call('EXISTS', KEYS[5]) == 1 then return 'deleted' end
local created = now()
redis.call('XGROUP', 'CREATE', KEYS[3], ARGV[3], '0', 'MKSTREAM')
redis.call('XGROUP', 'CREATE', KEYS[4], ARGV[4], '0', 'MKSTREAM')
redis.call('HSET', job, 'id', ARGV[1], 'state', 'PENDING', 'created_at', created, 'progress_at', created,
  'num_opened', '0', 'next_iteration', '0', 'epoch', '0', unpack(ARGV, 5))
if field('first_iteration') then
  record('created', ARGV[1], ARGV[2], field('first_iteration'))
else
  record('created', ARGV[1], ARGV[2])
end
emit('job.state', 'PENDING', {state = 'PENDING'})
return 'created'
